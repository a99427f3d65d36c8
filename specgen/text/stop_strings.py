"""Stop strings, which end an answer, and the beginnings of other marks, in text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import AnyStr


class StopScanner:
    """Finds stop strings in text that arrives in pieces, and a line break before a line that begins with fewer than
    `n_indent` spaces and tabs. What may be a prefix of one is held back until more text comes."""

    def __init__(self, stops: Sequence[str], n_indent: int = 0) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(stops)
        self._short = (
            re.compile(rf"\n[ \t]{{0,{n_indent - 1}}}(?=([^ \t])|\Z)") if n_indent else None
        )
        self._held = ""
        #: The stop string that was found.
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Take a piece; return the text that may be shown now, up to a stop string, which is then `found`."""
        if not self._stops and self._short is None:
            return text
        text = self._held + text
        hits = [(index, stop) for stop in self._stops if (index := text.find(stop)) >= 0]
        short = None if self._short is None else self._short.search(text)
        if short is not None and short[1]:
            hits.append((short.start(), "\n"))
        if hits:
            index, self.found = min(hits)
            self._held = ""
            return text[:index]
        n_held = max((n_begun(text, stop) for stop in self._stops), default=0)
        n_held = max(n_held, len(text) - short.start() if short is not None else 0)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def n_begun(text: AnyStr, mark: AnyStr) -> int:
    """Return how many characters or bytes at the end of a text may be the beginning of a mark that is not there as a whole."""
    most = min(len(text), len(mark) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(mark[:n])), 0)
