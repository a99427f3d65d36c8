"""Progress of long work: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TextIO, TypeAlias

from specgen.system.quantities import duration, human_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn

#: A function that receives the name of the work, the amount that is done, and the total amount.
Progress = Callable[[str, int, int], None]
#: What is counted: the parts of a piece of work, the bytes of a file, the lines of a batch, or the
#: work of a whole run. With "lines", the text is the present speed, and with "run" the step; with
#: the others, a new text means a new piece of work.
ProgressKind: TypeAlias = Literal["counts", "bytes", "lines", "run"]
#: The minimum time in seconds between two lines, and from the start to the first line.
INTERVAL_S = 10.0


class ProgressView:
    """Shows the progress of work on a stream, if there is one.

    Args:
        stream: Where to show it; None shows nothing. Errors of the stream are ignored.
        clock: Returns the time in seconds.
        kind: What is counted.
    """

    def __init__(
        self,
        stream: TextIO | None,
        clock: Callable[[], float] = time.monotonic,
        kind: ProgressKind = "counts",
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._kind = kind
        #: What is shown since the first call of `show`.
        self._shown: _ProgressBar | _ProgressLines | None = None

    def show(
        self,
        text: str,
        done: int,
        total: int,
    ) -> None:
        """Show progress.

        Args:
            text: The name of the work (with "lines": the present speed; with "run": the step).
            done: The amount that is done.
            total: The total amount.
        """
        if self._stream is None:
            return
        if self._shown is None:
            console = _terminal_of(self._stream)
            if console is not None:
                self._shown = _ProgressBar(console, self._kind)
            else:
                self._shown = _ProgressLines(self._stream, self._clock, self._kind)
        # Names of files may contain characters that control a terminal.
        printable = (char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
        self._shown.show("".join(printable), done, total)

    def note(self, message: str) -> None:
        """Write a message, above the bar if there is one."""
        if isinstance(self._shown, _ProgressBar):
            self._shown.note(message)
        elif self._stream is not None:
            print(message, file=self._stream, flush=True)

    def close(self) -> None:
        """Remove the bar, or write the last line. `show` may begin again."""
        if self._shown is not None:
            self._shown.close()
        self._shown = None


class _ProgressLines:
    """Progress as lines, at most one per `INTERVAL_S`, on a stream that is not a terminal."""

    def __init__(
        self,
        stream: TextIO,
        clock: Callable[[], float],
        kind: ProgressKind,
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._kind = kind
        self._began_s = clock()
        #: When the latest line was written; before the first one, when the work began.
        self._latest_s = self._began_s
        #: The line about the present progress, written or not.
        self._line = ""
        #: The latest line that was written.
        self._written = ""

    def show(self, text: str, done: int, total: int) -> None:
        now_s = self._clock()
        self._line = _progress_line(self._kind, text, done, total)
        if self._kind == "run" and 0 < done < total:
            left_s = (now_s - self._began_s) * (total - done) / done
            self._line += f", about {duration(left_s)} left"
        if now_s - self._latest_s >= INTERVAL_S:
            self._write(now_s)

    def close(self) -> None:
        now_s = self._clock()
        if self._written or now_s - self._latest_s >= INTERVAL_S:
            self._write(now_s)

    def _write(self, now_s: float) -> None:
        """Write the present line, unless it is the latest one already."""
        if self._line == self._written:
            return
        self._written = self._line
        self._latest_s = now_s
        with contextlib.suppress(OSError):
            print(self._line, file=self._stream, flush=True)


def _progress_line(kind: ProgressKind, text: str, done: int, total: int) -> str:
    """Return the line about some progress; the arguments are those of `ProgressView.show`."""
    if kind == "lines":
        return f"{done} of {total} lines, {text}"
    if kind == "counts":
        return f"{text}: {done} of {total}"
    percent = 100 * done // max(1, total)
    if kind == "run":
        return f"{text}: {percent}% of the run"
    return f"{text}: {percent}% ({human_bytes(done)} of {human_bytes(total)})"


class _ProgressBar:
    """Progress as a bar on a terminal, which disappears at the end."""

    def __init__(self, console: Console, kind: ProgressKind) -> None:
        from rich.progress import Progress as RichProgress

        self._kind = kind
        self._text = ""
        self._bar = RichProgress(*_columns(kind), console=console, transient=True)
        self._task = self._bar.add_task("", visible=False)
        self._bar.start()

    def show(self, text: str, done: int, total: int) -> None:
        is_new_work = text != self._text and self._kind not in ("lines", "run")
        if is_new_work:
            self._bar.reset(self._task, total=total, completed=done)
        self._text = text
        self._bar.update(self._task, completed=done, total=total, description=text, visible=True)

    def note(self, message: str) -> None:
        self._bar.console.print(message, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()


def _columns(kind: ProgressKind) -> tuple[ProgressColumn, ...]:
    """Return the columns of the bar, from left to right."""
    from rich import progress

    text = progress.TextColumn("{task.description}", markup=False)
    bar = progress.BarColumn()
    time_left = progress.TimeRemainingColumn()
    if kind == "bytes":
        speed = progress.TransferSpeedColumn()
        return text, bar, progress.DownloadColumn(), speed, time_left
    if kind == "run":
        return text, bar, progress.TaskProgressColumn(), time_left
    count = progress.MofNCompleteColumn()
    if kind == "lines":
        return bar, count, text, time_left
    return text, bar, count, time_left


def _terminal_of(stream: TextIO) -> Console | None:
    """Return a console for a stream; None if it is not a terminal that can show a bar."""
    if not stream.isatty():
        return None
    from rich.console import Console

    console = Console(file=stream, markup=False, emoji=False, highlight=False)
    return None if console.is_dumb_terminal else console
