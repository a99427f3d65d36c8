"""The text of tokens as it may be shown, up to a stop string."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

from specgen.text.overlap import partial_match_length

_Decoder = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """Turns the bytes of tokens into text, up to a stop string, of which a prefix is held back;
    bytes that are not UTF-8 become U+FFFD. A line that begins with fewer than `n_indent` spaces and
    tabs is a stop string, too.
    """

    def __init__(self, stops: Sequence[str] = (), n_indent: int = 0) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._decoder = _Decoder(errors="replace")
        self._stops = tuple(stops)
        self._short = (
            re.compile(rf"\n[ \t]{{0,{n_indent - 1}}}(?=([^ \t])|\Z)") if n_indent else None
        )
        self._held = ""
        self._shown: list[str] = []
        #: The stop string that was found.
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        return "".join(self._shown)

    def flush(self) -> str:
        """Return the rest, at the end of the text; incomplete characters become U+FFFD."""
        return self.push(b"", final=True)

    def push(self, token_bytes: bytes, *, final: bool = False) -> str:
        """Take the bytes of a token; return the text that may be shown now."""
        text = self._decoder.decode(token_bytes, final)
        if self.stopped_by is not None:
            return ""
        if self._stops or self._short is not None:
            text = self._held + text
            hits = [(index, stop) for stop in self._stops if (index := text.find(stop)) >= 0]
            n_held = max((partial_match_length(text, stop) for stop in self._stops), default=0)
            if self._short is not None and (short := self._short.search(text)) is not None:
                n_held = max(n_held, len(text) - short.start())
                hits += [(short.start(), "\n")] if short[1] else []
            if hits:
                index, self.stopped_by = min(hits)
                n_held = len(text) - index
            elif final:
                n_held = 0
            text, self._held = text[: len(text) - n_held], text[len(text) - n_held :]
        self._shown.append(text)
        return text

    def preview(self, before: bytes, token_bytes: bytes) -> str:
        decoder = _Decoder(errors="replace")
        decoder.setstate(self._decoder.getstate())
        decoder.decode(before)
        return decoder.decode(token_bytes, final=True)
