"""A streamed answer in the form of OpenAI's API."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from specgen.events import CommittedEvent
from specgen.openai_format.request import Kind
from specgen.openai_format.response import chat_logprobs, text_logprobs


class ChunkWriter:
    """Makes the chunks of one response, whose answers are numbered from 0 on. `identity` makes its id,
    `created` are seconds since 1970; with `has_pieces`, each chunk tells where its tokens come from.
    """

    def __init__(
        self,
        kind: Kind,
        *,
        identity: str,
        created: int,
        model: str,
        has_logprobs: bool,
        has_pieces: bool,
    ) -> None:
        self._is_text = kind == "completion"
        self._head = {
            "id": f"{'cmpl' if self._is_text else 'chatcmpl'}-{identity}",
            "object": "text_completion" if self._is_text else "chat.completion.chunk",
            "created": created,
            "model": model,
        }
        self._has_logprobs = has_logprobs
        self._has_pieces = has_pieces
        #: Characters of each answer so far.
        self._n_told: defaultdict[int, int] = defaultdict(int)

    def first(self, number: int) -> dict[str, Any] | None:
        """What comes before the text of an answer: whose turn it is, in a chat."""
        if self._is_text:
            return None
        return self._chunk(number, {"role": "assistant", "content": ""})

    def text(
        self, number: int, event: CommittedEvent, deltas: list[dict[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """The chunks for tokens of an answer; none for tokens of which nothing can be shown yet.
        `deltas` are what a chat says in the place of the text, where that is more than text."""
        logprobs = None
        if self._has_logprobs:
            start = self._n_told[number]
            logprobs = (
                text_logprobs(event.pieces, start) if self._is_text else chat_logprobs(event.pieces)
            )
        self._n_told[number] += len(event.text)
        if deltas is None:
            is_silent = not event.text and not self._has_logprobs
            deltas = [] if is_silent else [{"content": event.text}]
        chunks = [self._chunk(number, delta) for delta in deltas]
        if self._has_logprobs or self._has_pieces:
            chunks = chunks or [self._chunk(number, {})]
        if self._has_logprobs:
            chunks[0]["choices"][0]["logprobs"] = logprobs
        if self._has_pieces:
            chunks[0]["pieces"] = [
                {"text": piece.text, "kind": piece.kind, "origin": piece.origin}
                for piece in event.pieces
            ]
        return chunks

    def last(
        self, number: int, finish_reason: str, more: Mapping[str, Any], delta: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The end of an answer: what is left to say, why it ended, and `more` beside the choice."""
        return {**self._chunk(number, delta, finish_reason), **more}

    def without_choice(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """A chunk about all answers."""
        return {**self._head, "choices": [], **more}

    def delta(self, number: int, delta: Mapping[str, Any]) -> dict[str, Any]:
        """A chunk that adds to an answer of a chat what this says."""
        return self._chunk(number, delta)

    def _chunk(
        self, number: int, delta: Mapping[str, Any], finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": number}
        if self._is_text:
            choice["text"] = delta.get("content", "")
        else:
            choice["delta"] = delta
        choice |= {"logprobs": None, "finish_reason": finish_reason}
        return {**self._head, "choices": [choice]}


__all__ = ["ChunkWriter"]
