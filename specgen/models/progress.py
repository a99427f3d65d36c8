"""How downloads report their progress: as lines, as a bar, or not at all."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from specgen.models.files import human_bytes
from specgen.system.progress import ProgressLines

if TYPE_CHECKING:
    from typing import TextIO

    from rich.console import Console
    from rich.progress import Progress as RichBar


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


class LineProgress(DownloadProgress):
    """Write a line now and then (`ProgressLines`): for logs, and terminals that only add lines."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._lines = ProgressLines(stream, clock)
        self._label = ""
        self._total_bytes = self._most_bytes = 0

    def start(self, label: str, total_bytes: int, done_bytes: int = 0) -> None:
        self._lines = ProgressLines(self._stream, self._clock)
        self._label, self._total_bytes, self._most_bytes = label, total_bytes, done_bytes

    def update(self, done_bytes: int) -> None:
        # A position that moves back changes nothing until it is past where it was.
        if done_bytes > self._most_bytes:
            self._most_bytes = done_bytes
            percent = 100 * done_bytes // max(1, self._total_bytes)
            done, total = human_bytes(done_bytes), human_bytes(self._total_bytes)
            self._lines.update(f"{self._label}: {percent} % ({done} of {total})")

    def finish(self) -> None:
        self._lines.finish()

    def note(self, message: str) -> None:
        print(message, file=self._stream, flush=True)


class RichProgress(DownloadProgress):
    """A bar with bytes, speed and time left, gone when the download ends; notes stand above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: RichBar | None = None

    def start(self, label: str, total_bytes: int, done_bytes: int = 0) -> None:
        from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._bar.add_task(label, total=total_bytes, completed=done_bytes)
        self._bar.start()

    def update(self, done_bytes: int) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done_bytes)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = None

    def note(self, message: str) -> None:
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)


def stderr_progress(*, quiet: bool = False) -> DownloadProgress:
    """Return what suits stderr as it is: a bar on a terminal, lines elsewhere, nothing if quiet."""
    if quiet:
        return DownloadProgress()
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        return RichProgress(console)
    return LineProgress(sys.stderr)
