"""Show how far long work is, on a terminal by a bar, elsewhere by a line now and then; and numbers with units."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TextIO, TypeAlias

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

#: A function that receives the name of the work, how much of it is done, and how much there is in all.
Progress = Callable[[str, int, int], None]

#: The least time in seconds between two lines, and from the start to the first line.
INTERVAL_S = 10.0


class ProgressLines:
    """Writes the state of some work if it has changed, at most once in `INTERVAL_S`; nothing if it finishes earlier.
    Errors of the stream do not end the work."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._last_s = clock()
        self._state = self._written = ""

    def update(self, state: str) -> None:
        """Set the state, a line of text, and write it if the interval is over."""
        self._state = state
        if self._clock() - self._last_s >= INTERVAL_S:
            self._write()

    def finish(self) -> None:
        if self._written or self._clock() - self._last_s >= INTERVAL_S:
            self._write()

    def _write(self) -> None:
        if self._state == self._written:
            return
        self._written, self._last_s = self._state, self._clock()
        with contextlib.suppress(OSError):
            self._stream.write(f"{self._state}\n")
            self._stream.flush()


#: What a bar has: counts of one piece of work after the other, those of a batch with a text, or bytes.
BarKind: TypeAlias = Literal["counts", "batch", "bytes"]


def _bar(stream: TextIO, kind: BarKind) -> Bar | None:
    """Return a bar, if the stream can show one."""
    if not stream.isatty():
        return None
    from rich import progress
    from rich.console import Console

    console = Console(file=stream, markup=False, emoji=False, highlight=False)
    if console.is_dumb_terminal:
        return None
    text, bar = progress.TextColumn("{task.description}", markup=False), progress.BarColumn()
    count, left = progress.MofNCompleteColumn(), progress.TimeRemainingColumn()
    columns: dict[BarKind, tuple[progress.ProgressColumn, ...]] = {
        "counts": (text, bar, count, left),
        "batch": (bar, count, text),
        "bytes": (text, bar, progress.DownloadColumn(), progress.TransferSpeedColumn(), left),
    }
    return progress.Progress(*columns[kind], console=console, transient=True)


class ProgressView:
    """Shows a bar that disappears at the end, or `ProgressLines`."""

    def __init__(
        self,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        kind: BarKind = "counts",
    ) -> None:
        self._stream, self._kind, self._text = stream, kind, ""
        self._lines = ProgressLines(stream, clock)
        self._bar = _bar(stream, kind)
        if self._bar is not None:
            self._task = self._bar.add_task("", visible=False)
            self._bar.start()

    def update(self, text: str, done: int, total: int, line: str) -> None:
        """Show a text and how much is done, or a line that says both. Each text has its bar, except in a batch."""
        if self._bar is None:
            self._lines.update(line)
            return
        if text != self._text and self._kind != "batch":
            self._bar.reset(self._task, total=total, completed=done)
        self._text = text
        self._bar.update(self._task, completed=done, total=total, description=text, visible=True)

    def note(self, message: str) -> None:
        if self._bar is None:
            print(message, file=self._stream, flush=True)
        else:
            self._bar.console.print(message, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar, or write the last line."""
        if self._bar is None:
            self._lines.finish()
        else:
            self._bar.stop()


# --- numbers with units, for people

_UNITS = ("kB", "MB", "GB", "TB", "PB")


def three_digits(value: float) -> str:
    """Return three digits, or all digits before the point if they are more."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def human_bytes(n_bytes: int) -> str:
    """Return a size to three digits in decimal units: 1117320768 is "1.12 GB"."""
    if n_bytes < 1000:
        return f"{n_bytes} B"
    amount, unit = n_bytes / 1000, 0
    while (
        amount >= 999.5 and unit < len(_UNITS) - 1
    ):  # it would be rounded to the four digits of "1000"
        amount, unit = amount / 1000, unit + 1
    return f"{three_digits(amount)} {_UNITS[unit]}"


def seconds_text(value: float) -> str:
    """Return a short time: milliseconds below a second."""
    return f"{value * 1000:.0f} ms" if value < 0.9995 else f"{three_digits(value)} s"


def duration(seconds: float) -> str:
    """Return a time that people wait, in seconds, minutes or hours."""
    if seconds < 90.0:
        return f"{seconds:.0f} s"
    if seconds < 5400.0:
        return f"{seconds / 60.0:.0f} min"
    return f"{seconds / 3600.0:.1f} h"
