"""Where UTF-8 text breaks off."""

from __future__ import annotations

import codecs


def n_unfinished(data: bytes) -> int:
    """How many bytes at the end of `data` begin a character of which the rest is missing:
    0 to 3. Bytes that can begin none are not counted."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data[-3:])
    return len(decoder.getstate()[0])
