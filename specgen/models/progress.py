"""The interface by which downloads report their progress, and three ways of showing it.

Nothing here is imported by the code that downloads, apart from the Protocol: that code calls the
methods of the object that it gets, and prints nothing.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from specgen.models.files import human_bytes
from specgen.system.progress import ProgressLines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TextIO

    from rich.console import Console
    from rich.progress import Progress as RichBar
    from rich.progress import TaskID


class DownloadProgress(Protocol):
    """Receives the progress of downloads.

    `update` takes the absolute position, which may move back where bytes have to be fetched
    again. `start` and `finish` come in turns; `note` may come at any time. `update` may come
    from another thread than the rest.
    """

    def start(self, label: str, total_bytes: int, done_bytes: int = 0) -> None: ...

    def update(self, done_bytes: int) -> None: ...

    def finish(self) -> None: ...

    def note(self, message: str) -> None: ...


@contextmanager
def shown(
    progress: DownloadProgress, label: str, total_bytes: int, done_bytes: int = 0
) -> Iterator[DownloadProgress]:
    """Start `progress`, and finish it however the block ends."""
    progress.start(label, total_bytes, done_bytes)
    try:
        yield progress
    finally:
        progress.finish()


class SilentProgress:
    """Show nothing."""

    def start(self, label: str, total_bytes: int, done_bytes: int = 0) -> None:
        pass

    def update(self, done_bytes: int) -> None:
        pass

    def finish(self) -> None:
        pass

    def note(self, message: str) -> None:
        pass


class LineProgress:
    """Write a line now and then (`ProgressLines`): for logs, and terminals that only add lines."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._lines: ProgressLines | None = None
        self._label = ""
        self._total_bytes = 0
        self._most_bytes = 0

    def start(self, label: str, total_bytes: int, done_bytes: int = 0) -> None:
        self._lines = ProgressLines(self._stream, self._clock)
        self._label = label
        self._total_bytes = total_bytes
        self._most_bytes = done_bytes

    def update(self, done_bytes: int) -> None:
        # A position that moves back changes nothing until it is past where it was.
        if self._lines is not None and done_bytes > self._most_bytes:
            self._most_bytes = done_bytes
            percent = 100 * done_bytes // max(1, self._total_bytes)
            done, total = human_bytes(done_bytes), human_bytes(self._total_bytes)
            self._lines.update(f"{self._label}: {percent} % ({done} of {total})")

    def finish(self) -> None:
        if self._lines is not None:
            self._lines.finish()
        self._lines = None

    def note(self, message: str) -> None:
        self._stream.write(f"{message}\n")
        self._stream.flush()


class RichProgress:
    """A bar with bytes, speed and time left, gone when the download ends; notes stand above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: RichBar | None = None
        self._task: TaskID | None = None

    def start(self, label: str, total_bytes: int, done_bytes: int = 0) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as RichBar

        self.finish()
        self._bar = RichBar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task(label, total=total_bytes, completed=done_bytes)
        self._bar.start()

    def update(self, done_bytes: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done_bytes)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None

    def note(self, message: str) -> None:
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)


def stderr_progress(*, quiet: bool = False) -> DownloadProgress:
    """Return what suits stderr as it is: a bar on a terminal, lines elsewhere, nothing if quiet."""
    if quiet:
        return SilentProgress()
    import sys

    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        return RichProgress(console)
    return LineProgress(sys.stderr)
