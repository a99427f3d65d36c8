"""Writes an answer in the form of Anthropic's Messages API, from that of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specgen.serve.formats.chat_answer import own_figures

_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}
#: Types of errors that have another name in Anthropic's API.
_ERRORS = {"server_error": "api_error", "service_unavailable_error": "overloaded_error"}
PING: Mapping[str, str] = {"type": "ping"}


class MessageWriter:
    """Writes one answer, whole or as events. The model's name and the answer's identity are in it."""

    def __init__(self, identity: str, _created: int, model: str) -> None:
        self._head = {
            "id": f"msg_{identity[:24]}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        #: The number of blocks so far, and the type of the open one.
        self._n_blocks = 0
        self._open: str | None = None

    def begin(self, n_prompt_tokens: int) -> list[dict[str, Any]]:
        """Return the events before the answer. How much of the prompt is cached is not known yet."""
        usage = _usage(n_prompt_tokens, 0, 0)
        message = {**self._head, "content": [], **_ending(None, None), "usage": usage}
        return [{"type": "message_start", "message": message}, {**PING}]

    def feed(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events for a chunk of a chat completion, or for the body of an error."""
        if "error" in chunk:
            return [error_body(chunk)]
        (choice,) = chunk["choices"]
        events: list[dict[str, Any]] = []
        for block in _content(choice["delta"]):
            events += self._add(block)
        if choice["finish_reason"] is not None:
            events += self._close()
            ending = _ending(choice["finish_reason"], choice.get("stop_reason"))
            last = {"type": "message_delta", "delta": ending, **_figures(chunk)}
            events += [last, {"type": "message_stop"}]
        return events

    def whole(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole answer, from the body of a chat completion."""
        (choice,) = body["choices"]
        ending = _ending(choice["finish_reason"], choice.get("stop_reason"))
        content = _content(choice["message"])
        return {**self._head, "content": content, **ending, **_figures(body)}

    def _add(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events that add a block, or that add its text to the open block."""
        kind = block["type"]
        events: list[dict[str, Any]] = []
        if kind != self._open or kind == "tool_use":
            events = self._close()
            empty: dict[str, Any] = {"input": {}} if kind == "tool_use" else {kind: ""}
            start = {"type": "content_block_start", "content_block": {**block, **empty}}
            events.append({**start, "index": self._n_blocks})
            self._open = kind
        if kind == "tool_use":
            told = json.dumps(block["input"], ensure_ascii=False)
            delta = {"type": "input_json_delta", "partial_json": told}
        else:
            delta = {"type": f"{kind}_delta", kind: block[kind]}
        events.append({"type": "content_block_delta", "index": self._n_blocks, "delta": delta})
        return events

    def _close(self) -> list[dict[str, Any]]:
        """Return the event that ends the open block, if there is one."""
        if self._open is None:
            return []
        self._open = None
        self._n_blocks += 1
        return [{"type": "content_block_stop", "index": self._n_blocks - 1}]


def error_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of an error in Anthropic's form, from that in OpenAI's."""
    error = body["error"]
    kind, message = error["type"], error["message"]
    if error["code"] == "request_too_large":
        kind = "request_too_large"
    elif error["code"] == "context_length_exceeded":
        # Agents look for these words, and shorten the prompt.
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": _ERRORS.get(kind, kind), "message": message}}


def _content(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the blocks of a chat's message, or of an addition to one."""
    blocks: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        thought = message["reasoning_content"]
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if message.get("content"):
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        blocks.append(
            {
                "type": "tool_use",
                "id": f"toolu_{call['id'].removeprefix('call_')}",
                "name": function["name"],
                "input": json.loads(function["arguments"]),
            }
        )
    return blocks


def _ending(finish_reason: str | None, stop_string: str | None) -> dict[str, Any]:
    if stop_string is not None and finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
    reason = None if finish_reason is None else _STOP_REASONS[finish_reason]
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(n_prompt: int, n_cached: int, n_answer: int) -> dict[str, int]:
    """Return the numbers of tokens. In Anthropic's API, cached ones do not count as `input_tokens`."""
    return {
        "input_tokens": n_prompt - n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": n_answer,
    }


def _figures(body: Mapping[str, Any]) -> dict[str, Any]:
    usage = body["usage"]
    n_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "usage": _usage(usage["prompt_tokens"], n_cached, usage["completion_tokens"]),
        **own_figures(body),
    }
