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
        #: The kind of the open item, to which deltas are added (``message`` or ``reasoning``), and its text.
        self._kind: str | None = None
        self._text = ""

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
        if self._kind is None and not self._output:  # clients expect an item
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
        if self._kind != kind:
            events = [*self._close("completed"), *self._begin_item(kind)]
        self._text += text
        return [*events, self._text_event("delta", delta=text)]

    def _begin_item(self, kind: str) -> list[_Event]:
        self._kind, self._text = kind, ""
        item = {**self._item("in_progress"), "content": []}
        return [
            self._event("response.output_item.added", output_index=self._place, item=item),
            self._event("response.content_part.added", **self._part_place, part=self._part()),
        ]

    def _close(self, status: str) -> list[_Event]:
        """Return the events that end the open item, if there is one."""
        if self._kind is None:
            return []
        item = self._item(status)
        events = [
            self._text_event("done", text=self._text),
            self._event("response.content_part.done", **self._part_place, part=self._part()),
            self._event("response.output_item.done", output_index=self._place, item=item),
        ]
        self._output.append(item)
        self._kind = None
        return events

    def _item(self, status: str) -> dict[str, Any]:
        """Return the open item with its text so far."""
        item = {"id": self._item_id(), "type": self._kind, "status": status}
        if self._kind == "message":
            return {**item, "role": "assistant", "content": [self._part()]}
        hidden = {} if self._hides is None else {"encrypted_content": self._hides(self._text)}
        return {**item, "summary": [], **hidden, "content": [self._part()]}

    def _part(self) -> dict[str, Any]:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _text_event(self, step: str, **fields: Any) -> _Event:
        """Return an event about the text of the open item."""
        if self._kind == "reasoning":
            return self._event(f"response.reasoning_text.{step}", **self._part_place, **fields)
        kind = f"response.output_text.{step}"
        return self._event(kind, **self._part_place, **fields, logprobs=[])

    def _add_call(self, call: Mapping[str, Any]) -> list[_Event]:
        events = self._close("completed")
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        is_custom = name in self._custom
        text = _free_text(arguments) if is_custom else arguments
        field = "input" if is_custom else "arguments"
        item: dict[str, Any] = {
            "type": "custom_tool_call" if is_custom else "function_call",
            "id": f"{'ctc' if is_custom else 'fc'}_{self._identity}_{self._place}",
            "call_id": call["id"],
            "name": name,
            "status": "completed",
            field: text,
        }
        event = f"{item['type']}_{field}"
        place = {"item_id": item["id"], "output_index": self._place}
        begun = {**item, field: "", "status": "in_progress"}
        events += [
            self._event("response.output_item.added", output_index=self._place, item=begun),
            self._event(f"response.{event}.delta", **place, delta=text),
            self._event(f"response.{event}.done", **place, **{field: text, "name": name}),
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
        return {"item_id": self._item_id(), "output_index": self._place, "content_index": 0}

    def _item_id(self) -> str:
        prefix = "rs" if self._kind == "reasoning" else "msg"
        return f"{prefix}_{self._identity}_{self._place}"


def _free_text(arguments: str) -> str:
    """Return the input of a custom tool; if the model wrote other arguments, these."""
    value = json.loads(arguments).get("input")
    return value if isinstance(value, str) else arguments
