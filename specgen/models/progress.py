"""How downloads report their progress: as lines, as a bar, or not at all."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from specgen.models.files import human_bytes
from specgen.system.progress import ProgressView


class DownloadProgress:
    """Receives the progress of downloads, and shows nothing.

    `start` and `finish` come in turns, and `update` with the bytes that are here between them; `note` may
    come at any time.
    """

    def start(self, label: str, total_bytes: int, done_bytes: int = 0) -> None:
        pass

    def update(self, done_bytes: int) -> None:
        pass

    def finish(self) -> None:
        pass

    def note(self, message: str) -> None:
        pass


@contextmanager
def shown(
    progress: DownloadProgress, label: str, total_bytes: int, done_bytes: int = 0
) -> Iterator[None]:
    """Start `progress`, and finish it however the block ends."""
    progress.start(label, total_bytes, done_bytes)
    try:
        yield
    finally:
        progress.finish()


class StreamProgress(DownloadProgress):
    """Shows downloads on a stream: on a terminal a bar with bytes, speed and time left, elsewhere lines."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._view: ProgressView | None = None
        self._label, self._total_bytes, self._most_bytes = "", 0, 0

    def start(self, label: str, total_bytes: int, done_bytes: int = 0) -> None:
        self._label, self._total_bytes, self._most_bytes = label, total_bytes, done_bytes
        self._view = ProgressView(self._stream, self._clock, "bytes")
        self._view.update(label, done_bytes, total_bytes, "")

    def update(self, done_bytes: int) -> None:
        # A position that moves back changes nothing until it is past where it was.
        if self._view is not None and done_bytes > self._most_bytes:
            self._most_bytes = done_bytes
            percent = 100 * done_bytes // max(1, self._total_bytes)
            done, total = human_bytes(done_bytes), human_bytes(self._total_bytes)
            line = f"{self._label}: {percent} % ({done} of {total})"
            self._view.update(self._label, done_bytes, self._total_bytes, line)

    def finish(self) -> None:
        if self._view is not None:
            self._view.close()
        self._view = None

    def note(self, message: str) -> None:
        if self._view is not None:
            self._view.note(message)
        else:
            print(message, file=self._stream, flush=True)


def stderr_progress(*, quiet: bool = False) -> DownloadProgress:
    """Return what shows downloads on standard error, or nothing if quiet."""
    return DownloadProgress() if quiet else StreamProgress(sys.stderr)
