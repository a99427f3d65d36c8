"""Where UTF-8 text breaks off."""

from __future__ import annotations

import codecs


def n_unfinished(data: bytes) -> int:
    """How many bytes at the end of `data` are the beginning of an incomplete character: 0 to 3.
    Bytes that cannot begin a character are not counted."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data[-3:])
    return len(decoder.getstate()[0])
