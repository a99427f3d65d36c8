"""How downloads report their progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from specgen.models.files import human_bytes
from specgen.system.progress import ProgressView


class DownloadProgress:
    """Receives the progress of downloads, and shows nothing."""

    def show(self, label: str, done_bytes: int, total_bytes: int) -> None:
        """Show how many bytes are here of a file, or are checked."""

    def note(self, message: str) -> None:
        pass

    def close(self) -> None:
        """End what `show` began, which may begin again."""


class StreamProgress(DownloadProgress):
    """Shows downloads on a stream: on a terminal a bar with bytes, speed and time left, elsewhere lines."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._view: ProgressView | None = None

    def show(self, label: str, done_bytes: int, total_bytes: int) -> None:
        if self._view is None:
            self._view = ProgressView(self._stream, self._clock, "bytes")
        percent = 100 * done_bytes // max(1, total_bytes)
        line = f"{label}: {percent} % ({human_bytes(done_bytes)} of {human_bytes(total_bytes)})"
        self._view.update(label, done_bytes, total_bytes, line)

    def note(self, message: str) -> None:
        if self._view is not None:
            self._view.note(message)
        else:
            print(message, file=self._stream, flush=True)

    def close(self) -> None:
        if self._view is not None:
            self._view.close()
        self._view = None


def stderr_progress(*, quiet: bool = False) -> DownloadProgress:
    """Return what shows downloads on standard error, or nothing if quiet."""
    return DownloadProgress() if quiet else StreamProgress(sys.stderr)
