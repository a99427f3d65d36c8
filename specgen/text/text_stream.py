"""The text of tokens as it can be shown, up to a stop string."""

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
        stops: Strings that end the text; none may be empty.
        n_indent: If positive, the text also ends before any line but the first that begins with
            fewer spaces and tabs than this.

    Raises:
        ValueError: If a stop string is empty.
    """

    def __init__(
        self,
        stops: Sequence[str] = (),
        n_indent: int = 0,
    ) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._decoder = _Decoder(errors="replace")
        self._stops = tuple(stops)
        #: Matches the start of a line with too little indentation. Group 1 is the character after
        #: the indentation; it is empty at the end of the text, where more indentation may follow.
        self._dedent: re.Pattern[str] | None = None
        if n_indent:
            self._dedent = re.compile(rf"\n[ \t]{{0,{n_indent - 1}}}(?=([^ \t])|\Z)")
        #: Text that is held back.
        self._held = ""
        #: The pieces of text that were shown.
        self._shown: list[str] = []
        #: The stop string that was found; None as long as there is none.
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        """All text that was shown so far."""
        return "".join(self._shown)

    def flush(self) -> str:
        """End the text, and return the rest of it; an incomplete character becomes U+FFFD."""
        return self.push(b"", final=True)

    def push(self, token_bytes: bytes, *, final: bool = False) -> str:
        """Add the bytes of a token, and return the text that can be shown now.

        Args:
            token_bytes: The bytes; incomplete characters may be at either end.
            final: Whether these are the last ones, so that nothing has to be held back.
        """
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
        """Look for the first stop string in a text, and set `stopped_by` if there is one.

        Returns:
            The number of characters at the end of the text that must not be shown: those from the
            stop string on, or those that may be the beginning of one.
        """
        n_held = 0
        hits: list[tuple[int, str]] = []  # the index of each stop string that was found
        for stop in self._stops:
            index = text.find(stop)
            if index >= 0:
                hits.append((index, stop))
            n_held = max(n_held, partial_match_length(text, stop))
        dedent = None if self._dedent is None else self._dedent.search(text)
        if dedent is not None:
            if dedent[1]:  # otherwise more indentation may follow
                hits.append((dedent.start(), "\n"))
            n_held = max(n_held, len(text) - dedent.start())
        if not hits:
            return n_held
        index, self.stopped_by = min(hits)
        return len(text) - index

    def preview(self, before: bytes, token_bytes: bytes) -> str:
        """Return the text of some bytes, as if they came after this text and the bytes `before`.

        The stream itself does not change.
        """
        decoder = _Decoder(errors="replace")
        decoder.setstate(self._decoder.getstate())
        decoder.decode(before)
        return decoder.decode(token_bytes, final=True)
