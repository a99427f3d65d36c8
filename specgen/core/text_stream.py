"""From tokens to text as it arrives, in whole characters, and cut exactly at stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class StopScanner:
    """Finds stop strings in text that arrives in pieces, also across the borders of pieces.

    Text that may be the beginning of a stop string is held back until more text decides it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(stops)
        self._held = ""
        #: The stop string that was found.
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Take a piece; returns the text that may be shown now. If that completes a stop string,
        `found` is set, the text before it is returned, and no more text may be pushed."""
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
        """Return the text that is still held back, since the text has ended."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest ending of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TextStream:
    """Turns the bytes of tokens into text.

    An incomplete character is held back and comes with the token that completes it. Bytes that are
    not UTF-8 become U+FFFD.
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
        """All text that was returned so far."""
        return "".join(self._text)

    def push(self, token_bytes: bytes) -> str:
        """The text that may be shown after this token."""
        return self._add(self._scanner.push(self._decoder.decode(token_bytes)))

    def flush(self) -> str:
        """The rest, at the end of the text; incomplete characters become U+FFFD."""
        rest = self._decoder.decode(b"", final=True)
        if self._scanner.found is not None:
            return ""
        text = self._scanner.push(rest)
        return self._add(text + self._scanner.flush())

    def preview(self, before: bytes, token_bytes: bytes) -> str:
        """The text of `token_bytes` if `before` and then these came next; the stream does not change."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        decoder.setstate(self._decoder.getstate())
        decoder.decode(before)
        return decoder.decode(token_bytes, final=True)

    def _add(self, text: str) -> str:
        if text:
            self._text.append(text)
        return text
