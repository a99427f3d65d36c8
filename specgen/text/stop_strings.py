"""Stop strings, which end an answer, and the beginnings of other marks, in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import AnyStr


class StopScanner:
    """Finds stop strings in text that arrives in pieces. What may be a prefix of one is held back until more text
    comes."""

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(stops)
        self._held = ""
        #: The stop string that was found.
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Take a piece; return the text that may be shown now, up to a stop string, which is then `found`."""
        if not self._stops:
            return text
        text = self._held + text
        hits = [(index, stop) for stop in self._stops if (index := text.find(stop)) >= 0]
        if hits:
            index, self.found = min(hits)
            self._held = ""
            return text[:index]
        n_held = max(n_begun(text, stop) for stop in self._stops)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def n_begun(text: AnyStr, mark: AnyStr) -> int:
    """Return how many characters or bytes at the end of a text may be the beginning of a mark that is not there as a whole."""
    most = min(len(text), len(mark) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(mark[:n])), 0)
