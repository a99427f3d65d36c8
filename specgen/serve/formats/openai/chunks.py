"""A streamed answer in the form of OpenAI's API."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from specgen.events import CommittedEvent
from specgen.serve.formats.openai.request import Kind
from specgen.serve.formats.openai.response import chat_logprobs, text_logprobs


class ChunkWriter:
    """Makes the chunks of one response, whose answers are numbered from 0.

    `identity` makes its id; `created` is in seconds since 1970. With `has_pieces`, each chunk says where its
    tokens come from.
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
        """Return the first chunk of an answer, with the role, in a chat; None in a completion."""
        if self._is_text:
            return None
        return self._chunk(number, {"role": "assistant", "content": ""})

    def text(
        self, number: int, event: CommittedEvent, deltas: list[dict[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """Return the chunks for tokens of an answer; none while none of their text can be shown. A chat's
        `deltas` replace the text if there is more than text."""
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
        self, number: int, finish_reason: str, stop_string: str | None, more: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the last chunk of an answer: the finish reason, the stop string that ended the answer, and
        `more` beside the choice."""
        chunk = self._chunk(number, {}, finish_reason)
        if stop_string is not None:
            chunk["choices"][0]["stop_reason"] = stop_string
        return {**chunk, **more}

    def without_choice(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """Return a chunk about all answers."""
        return {**self._head, "choices": [], **more}

    def delta(self, number: int, delta: Mapping[str, Any]) -> dict[str, Any]:
        """Return a chunk that adds `delta` to an answer of a chat."""
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
