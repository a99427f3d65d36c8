"""Progress of long work; as lines for files and pipes, where a bar would be unreadable."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TextIO

#: Called with the name of the work, how much of it is done, and of how much.
Progress = Callable[[str, int, int], None]

#: Seconds from one line to the next, and from the start to the first.
INTERVAL_S = 10.0


class ProgressLines:
    """Writes the state of some work when it has changed, at most once in `INTERVAL_S`.

    Work that is done sooner writes nothing. Each line is flushed. A stream that cannot be
    written does not end the work.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._last_s = clock()
        self._state = self._written = ""

    def update(self, state: str) -> None:
        """Take a state, a line of text without its end, and write it if it is time to."""
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


__all__ = ["INTERVAL_S", "Progress", "ProgressLines"]
