"""The text of tokens as it may be shown, up to a stop string."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

from specgen.text.overlap import partial_match_length

_Decoder = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """Turns the bytes of tokens into text, up to a stop string.

    Text that may be the beginning of a stop string is held back. Bytes that are not UTF-8 become
    U+FFFD.

    Args:
        stops: Strings that end the text, none of them empty.
        n_indent: If positive, a line after the first also ends the text where it begins with fewer
            spaces and tabs than this.
    """

    def __init__(self, stops: Sequence[str] = (), n_indent: int = 0) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._decoder = _Decoder(errors="replace")
        self._stops = tuple(stops)
        #: The start of a line with too little indentation; group 1 is what follows the
        #: indentation, if that is known already.
        self._dedent: re.Pattern[str] | None = None
        if n_indent:
            self._dedent = re.compile(rf"\n[ \t]{{0,{n_indent - 1}}}(?=([^ \t])|\Z)")
        self._held = ""
        self._shown: list[str] = []
        #: The stop string that was found.
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        """All text that was shown so far."""
        return "".join(self._shown)

    def flush(self) -> str:
        """Return the rest, at the end of the text; incomplete characters become U+FFFD."""
        return self.push(b"", final=True)

    def push(self, token_bytes: bytes, *, final: bool = False) -> str:
        """Take the bytes of a token; return the text that may be shown now."""
        text = self._decoder.decode(token_bytes, final)
        if self.stopped_by is not None:
            return ""
        if self._stops or self._dedent is not None:
            text = self._held + text
            n_held = self._find_stop(text)
            if final and self.stopped_by is None:
                n_held = 0
            n_shown = len(text) - n_held
            self._held = text[n_shown:]
            text = text[:n_shown]
        self._shown.append(text)
        return text

    def _find_stop(self, text: str) -> int:
        """Note the first stop string in a text, and return how many characters to hold back."""
        n_held = 0
        hits: list[tuple[int, str]] = []
        for stop in self._stops:
            index = text.find(stop)
            if index >= 0:
                hits.append((index, stop))
            n_held = max(n_held, partial_match_length(text, stop))
        dedent = None if self._dedent is None else self._dedent.search(text)
        if dedent is not None:
            if dedent[1]:
                hits.append((dedent.start(), "\n"))
            n_held = max(n_held, len(text) - dedent.start())
        if not hits:
            return n_held
        index, self.stopped_by = min(hits)
        return len(text) - index

    def preview(self, before: bytes, token_bytes: bytes) -> str:
        """Return how the bytes of a token would read after this text and some more bytes."""
        decoder = _Decoder(errors="replace")
        decoder.setstate(self._decoder.getstate())
        decoder.decode(before)
        return decoder.decode(token_bytes, final=True)
