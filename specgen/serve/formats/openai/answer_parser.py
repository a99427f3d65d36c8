"""Splits a model's text into reasoning, content and tool calls while it is generated."""

from __future__ import annotations

from typing import Any

from specgen.serve.formats.openai.tool_calls import Delta, ToolCallParser
from specgen.session.thoughts import ThoughtReader


class AnswerParser:
    """Parses one answer: `thoughts` splits off its thinking block, and `calls` finds the calls behind it; a
    part that is None is not looked for."""

    def __init__(self, thoughts: ThoughtReader | None, calls: ToolCallParser | None) -> None:
        self._thoughts = thoughts
        self._calls = calls

    @property
    def n_calls(self) -> int:
        """The number of reported calls."""
        return self._calls.n_calls if self._calls is not None else 0

    def feed(self, text: str) -> list[Delta]:
        """Add a piece of the answer; return what is certain now."""
        if self._thoughts is None:
            return self._answer(text)
        return self._split(*self._thoughts.feed(text))

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Return the rest, at the end of the answer, which may be cut: see `ToolCallParser.finish`."""
        deltas = self._split(*self._thoughts.finish()) if self._thoughts is not None else []
        return deltas + (self._calls.finish(is_cut=is_cut) if self._calls is not None else [])

    def _split(self, thought: str, answer: str) -> list[Delta]:
        deltas: list[Delta] = [{"reasoning_content": thought}] if thought else []
        return deltas + (self._answer(answer) if answer else [])

    def _answer(self, text: str) -> list[Delta]:
        if self._calls is not None:
            return self._calls.feed(text)
        return [{"content": text}] if text else []


def message_of(parser: AnswerParser, text: str, *, is_cut: bool = False) -> dict[str, Any]:
    """Return the message of a whole answer, read by a new `parser`."""
    deltas = parser.feed(text) + parser.finish(is_cut=is_cut)
    content = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    calls = [
        {name: value for name, value in call.items() if name != "index"}
        for delta in deltas
        for call in delta.get("tool_calls", [])
    ]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    return message
