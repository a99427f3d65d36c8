"""Show how far long work is: on a terminal a bar, elsewhere a line now and then; and numbers with
units.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TextIO, TypeAlias

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

#: A function that receives the name of the work, how much of it is done, and how much there is in
#: all.
Progress = Callable[[str, int, int], None]
#: What is counted: parts of one piece of work after the other, bytes of one file after the other,
#: or lines of a batch, whose text tells of its speed.
Kind: TypeAlias = Literal["counts", "bytes", "lines"]
#: The least time in seconds between two lines, and from the start to the first line.
INTERVAL_S = 10.0


class ProgressView:
    """Shows work on a stream, if there is one. Errors of the stream do not end the work."""

    def __init__(
        self,
        stream: TextIO | None,
        clock: Callable[[], float] = time.monotonic,
        kind: Kind = "counts",
    ) -> None:
        self._stream, self._clock, self._kind = stream, clock, kind
        self._bar: Bar | None = None
        self._begun_s: float | None = None
        self._text = self._line = self._written = ""

    def show(self, text: str, done: int, total: int) -> None:
        if self._stream is None:
            return
        text = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
        if self._begun_s is None:
            self._begun_s = self._clock()
            self._bar = _bar(self._stream, self._kind)
        if self._bar is None:
            self._line = _line(self._kind, text, done, total)
            self._write()
            return
        (task,) = self._bar.task_ids
        if text != self._text and self._kind != "lines":  # it has a bar of its own
            self._bar.reset(task, total=total, completed=done)
        self._text = text
        self._bar.update(task, completed=done, total=total, description=text, visible=True)

    def note(self, message: str) -> None:
        if self._bar is not None:
            self._bar.console.print(message, soft_wrap=True)
        elif self._stream is not None:
            print(message, file=self._stream, flush=True)

    def close(self) -> None:
        """End what `show` began, which may begin again: remove the bar, or write the last line if
        one is due.
        """
        if self._bar is not None:
            self._bar.stop()
        elif self._begun_s is not None:
            self._write(is_last=True)
        self._bar, self._begun_s, self._written = None, None, ""

    def _write(self, *, is_last: bool = False) -> None:
        now_s = self._clock()
        assert self._begun_s is not None
        is_due = now_s - self._begun_s >= INTERVAL_S or (is_last and self._written)
        if is_due and self._line != self._written:
            self._written, self._begun_s = self._line, now_s
            with contextlib.suppress(OSError):
                print(self._line, file=self._stream, flush=True)


def _line(kind: Kind, text: str, done: int, total: int) -> str:
    if kind == "lines":
        return f"{done} of {total} lines, {text}"
    if kind == "counts":
        return f"{text}: {done} of {total}"
    percent = 100 * done // max(1, total)
    return f"{text}: {percent} % ({human_bytes(done)} of {human_bytes(total)})"


def _bar(stream: TextIO, kind: Kind) -> Bar | None:
    if not stream.isatty():
        return None
    from rich import progress
    from rich.console import Console

    console = Console(file=stream, markup=False, emoji=False, highlight=False)
    if console.is_dumb_terminal:
        return None
    text, bar = progress.TextColumn("{task.description}", markup=False), progress.BarColumn()
    count, left = progress.MofNCompleteColumn(), progress.TimeRemainingColumn()
    columns: dict[Kind, tuple[progress.ProgressColumn, ...]] = {
        "counts": (text, bar, count, left),
        "lines": (bar, count, text, left),
        "bytes": (text, bar, progress.DownloadColumn(), progress.TransferSpeedColumn(), left),
    }
    found = progress.Progress(*columns[kind], console=console, transient=True)
    found.add_task("", visible=False)
    found.start()
    return found


# --- numbers with units, for people

_UNITS = ("kB", "MB", "GB", "TB", "PB")


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def three_digits(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def human_bytes(n_bytes: int) -> str:
    """Return a size to three digits in decimal units: 1117320768 is "1.12 GB"."""
    if n_bytes < 1000:
        return f"{n_bytes} B"
    amount, unit = n_bytes / 1000, 0
    # 999.5 would be rounded to the four digits of "1000".
    while amount >= 999.5 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{three_digits(amount)} {_UNITS[unit]}"


def seconds_text(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 0.9995 else f"{three_digits(value)} s"


def is_gain(speedup: float) -> bool:
    """Return whether drafts make answers faster beyond noise: to the digit that is shown."""
    return round(speedup, 1) > 1.0


def gain_text(low: float, high: float, spread: str = "") -> str:
    """Say how fast answers with drafts are, between two numbers: a gain that may be none is not
    called one.
    """
    times, told = times_text(low, high), [spread] if spread else []
    if is_gain(low):
        said = f"{times} times as fast as without drafts"
    else:
        said = f"{'about as fast as' if round(high, 1) >= 1.0 else 'slower than'} without drafts"
        told = [f"{times} times", *told] if times != "1.0" else told
    return f"{said} ({'; '.join(told)})" if told else said


def measured_gain(speedup: float, worst: float, best: float, n_answers: int) -> str:
    """Say what was measured: the mean speed-up over answers, the least and the greatest."""
    spread = f"{times_text(worst, best)} in {counted(n_answers, 'answer')}"
    return gain_text(speedup, speedup, spread)


def times_text(low: float, high: float) -> str:
    return f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} to {high:.1f}"
