"""Writes an answer in the form of the Responses API: an object with items, or the events of its making."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from specgen.serve.formats.chat_answer import own_figures

_Event = dict[str, Any]


class ResponseWriter:
    """Writes one response from the chunks of a chat completion.

    `echo` are the fields that repeat the request. `custom` are the names of tools that take a free text. `hides`
    gives thoughts also the form that clients send back; None leaves it out.
    """

    def __init__(
        self,
        identity: str,
        created: int,
        model: str,
        *,
        echo: Mapping[str, Any],
        custom: Collection[str],
        hides: Callable[[str], str] | None,
    ) -> None:
        self._identity = identity
        self._custom = custom
        self._hides = hides
        self._head = {
            "id": f"resp_{identity}",
            "object": "response",
            "created_at": created,
            "model": model,
            **echo,
            "background": False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
        }
        self._n_events = 0
        self._output: list[dict[str, Any]] = []
        #: The item of text or thoughts to which deltas are added.
        self._open: _OpenItem | None = None

    def begin(self, n_prompt_tokens: int) -> list[_Event]:
        """Return the events before the answer."""
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def feed(self, chunk: Mapping[str, Any]) -> list[_Event]:
        """Return the events for a chunk of a chat completion, or for an error."""
        if "error" in chunk:
            error = {"code": "server_error", "message": chunk["error"]["message"]}
            response = {**self._response("failed"), "error": error}
            return [self._event("response.failed", response=response)]
        (choice,) = chunk["choices"]
        delta, reason = choice["delta"], choice["finish_reason"]
        events: list[_Event] = []
        for kind, name in (("reasoning", "reasoning_content"), ("message", "content")):
            if delta.get(name):
                events += self._add_text(kind, delta[name])
        for call in delta.get("tool_calls") or ():
            events += self._add_call(call)
        if reason is not None:
            events += self._finish(chunk, is_whole=reason != "length")
        return events

    def whole(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole response, from the body of a chat completion."""
        (choice,) = body["choices"]
        *_, last = self.feed({**body, "choices": [{**choice, "delta": choice["message"]}]})
        response: dict[str, Any] = last["response"]
        return response

    def _finish(self, chunk: Mapping[str, Any], *, is_whole: bool) -> list[_Event]:
        status = "completed" if is_whole else "incomplete"
        events: list[_Event] = []
        if self._open is None and not self._output:  # clients expect an item
            events += self._begin_item("message")
        events += self._close(status)
        usage = chunk["usage"]
        response = {
            **self._response(status),
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {
                    **usage["prompt_tokens_details"],
                    "cache_write_tokens": 0,  # which OpenAI charges for
                },
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            },
            **own_figures(chunk),
        }
        return [*events, self._event(f"response.{status}", response=response)]

    def _response(self, status: str) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": list(self._output),
            "usage": None,
        }

    def _event(self, kind: str, **fields: Any) -> _Event:
        number = self._n_events
        self._n_events += 1
        return {"type": kind, "sequence_number": number, **fields}

    # --- items ----------------------------------------------------------------------------------

    def _add_text(self, kind: str, text: str) -> list[_Event]:
        events: list[_Event] = []
        if self._open is None or self._open.kind != kind:
            events = [*self._close("completed"), *self._begin_item(kind)]
        assert self._open is not None
        self._open.text += text
        return [*events, self._part_event("delta", delta=text)]

    def _begin_item(self, kind: str) -> list[_Event]:
        identity = self._item_id("msg" if kind == "message" else "rs")
        self._open = _OpenItem(kind, identity, self._hides)
        item = {**self._open.item("in_progress"), "content": []}
        return [
            self._event("response.output_item.added", output_index=self._place, item=item),
            self._event(
                "response.content_part.added", **self._part_place, part=self._open.part("")
            ),
        ]

    def _close(self, status: str) -> list[_Event]:
        if self._open is None:
            return []
        opened, item = self._open, self._open.item(status)
        part = opened.part(opened.text)
        events = [
            self._part_event("done", text=opened.text),
            self._event("response.content_part.done", **self._part_place, part=part),
            self._event("response.output_item.done", output_index=self._place, item=item),
        ]
        self._output.append(item)
        self._open = None
        return events

    def _add_call(self, call: Mapping[str, Any]) -> list[_Event]:
        events = self._close("completed")
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item: dict[str, Any] = {"call_id": call["id"], "name": name, "status": "completed"}
        if name in self._custom:
            kind, field, event = "custom_tool_call", "input", "custom_tool_call_input"
            text = _free_text(arguments)
        else:
            kind, field, event, text = (
                "function_call",
                "arguments",
                "function_call_arguments",
                arguments,
            )
        prefix = "fc" if kind == "function_call" else "ctc"
        item |= {"type": kind, "id": self._item_id(prefix), field: text}
        place = {"item_id": item["id"], "output_index": self._place}
        begun = {**item, field: "", "status": "in_progress"}
        done = {field: text, "name": name}
        events += [
            self._event("response.output_item.added", output_index=self._place, item=begun),
            self._event(f"response.{event}.delta", **place, delta=text),
            self._event(f"response.{event}.done", **place, **done),
            self._event("response.output_item.done", output_index=self._place, item=item),
        ]
        self._output.append(item)
        return events

    @property
    def _place(self) -> int:
        """The index of the next item in the output."""
        return len(self._output)

    @property
    def _part_place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open.identity, "output_index": self._place, "content_index": 0}

    def _part_event(self, step: str, **fields: Any) -> _Event:
        """Return an event about the text of the open item."""
        assert self._open is not None
        if self._open.kind == "reasoning":
            return self._event(f"response.reasoning_text.{step}", **self._part_place, **fields)
        kind = f"response.output_text.{step}"
        return self._event(kind, **self._part_place, **fields, logprobs=[])

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._identity}_{self._place}"


class _OpenItem:
    """An item that is written: a ``message``, or ``reasoning``."""

    def __init__(self, kind: str, identity: str, hides: Callable[[str], str] | None) -> None:
        self.kind = kind
        self.identity = identity
        self.text = ""
        self._hides = hides

    def part(self, text: str) -> dict[str, Any]:
        """Return the part with a text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def item(self, status: str) -> dict[str, Any]:
        """Return the item with the text so far."""
        item: dict[str, Any] = {"id": self.identity, "type": self.kind, "status": status}
        if self.kind == "message":
            item["role"] = "assistant"
        else:
            item["summary"] = []
            if self._hides is not None:
                item["encrypted_content"] = self._hides(self.text)
        return {**item, "content": [self.part(self.text)]}


def _free_text(arguments: str) -> str:
    """Return the input of a custom tool; if the model wrote other arguments, these."""
    value = json.loads(arguments).get("input")
    return value if isinstance(value, str) else arguments
