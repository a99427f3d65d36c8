"""Show the progress of long work as lines, for files and pipes, where a bar would be unreadable."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TextIO

#: A function that receives the name of the work, how much of it is done, and how much there is in all.
Progress = Callable[[str, int, int], None]

#: The least time in seconds between two lines, and from the start to the first line.
INTERVAL_S = 10.0


class ProgressLines:
    """Writes the state of some work if it has changed, at most once in `INTERVAL_S`.

    Work that finishes earlier writes nothing. Each line is flushed. Errors of the stream are ignored, so
    that they do not end the work.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._last_s = clock()
        self._state = self._written = ""

    def update(self, state: str) -> None:
        """Set the state, a line of text without its newline, and write it if the interval is over."""
        self._state = state
        if self._clock() - self._last_s >= INTERVAL_S:
            self._write()

    def finish(self) -> None:
        """Write the last state, if the work took long enough for a line."""
        if self._written or self._clock() - self._last_s >= INTERVAL_S:
            self._write()

    def _write(self) -> None:
        if self._state == self._written:
            return
        self._written, self._last_s = self._state, self._clock()
        with contextlib.suppress(OSError):
            self._stream.write(f"{self._state}\n")
            self._stream.flush()
