"""From tokens to text as it arrives: whole characters only, stop strings exact."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class StopScanner:
    """Finds stop strings in text that arrives in pieces, wherever the pieces' borders are.

    Text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(stops)
        self._held = ""
        #: The stop string that was found.
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Takes a piece; returns what may be shown now. Nothing is to be pushed after a stop
        string was found: `found` names it then, and the text before it has been returned."""
        if not self._stops:
            return text
        text = self._held + text
        hits = [(index, stop) for stop in self._stops if (index := text.find(stop)) >= 0]
        if hits:
            index, self.found = min(hits)
            self._held = ""
            return text[:index]
        n_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def flush(self) -> str:
        """What is still held back: the text has ended."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, `stop` itself excluded."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TextStream:
    """Bytes of tokens in, text out.

    A character whose bytes are not all there is held back and comes with the token that
    completes it; bytes that are no UTF-8 come as U+FFFD.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._scanner = StopScanner(stops)
        self._text: list[str] = []

    @property
    def stopped_by(self) -> str | None:
        """The stop string that the text ended with, if it did."""
        return self._scanner.found

    @property
    def text(self) -> str:
        """All that was returned so far."""
        return "".join(self._text)

    def push(self, token_bytes: bytes) -> str:
        """The text that may be shown after this token."""
        return self._add(self._scanner.push(self._decoder.decode(token_bytes)))

    def flush(self) -> str:
        """The rest, at the end of the text; incomplete characters come as U+FFFD."""
        rest = self._decoder.decode(b"", final=True)
        if self._scanner.found is not None:
            return ""
        text = self._scanner.push(rest)
        return self._add(text + self._scanner.flush())

    def preview(self, before: bytes, token_bytes: bytes) -> str:
        """What `token_bytes` would show if `before` and they came next; nothing is kept."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        decoder.setstate(self._decoder.getstate())
        decoder.decode(before)
        return decoder.decode(token_bytes, final=True)

    def _add(self, text: str) -> str:
        if text:
            self._text.append(text)
        return text
