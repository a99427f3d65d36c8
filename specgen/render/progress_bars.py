"""Progress on standard error: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from specgen.render.text import clean_line
from specgen.system.progress import Progress, ProgressView, duration

if TYPE_CHECKING:
    from specgen.serve.batch.runner import Tally

#: Seconds before which a speed means nothing.
_LEAST_S = 1.0


@contextlib.contextmanager
def progress_bar(*, quiet: bool, clock: Callable[[], float] = time.monotonic) -> Iterator[Progress]:
    """Show the progress on standard error: on a terminal with a bar that disappears at the end, elsewhere
    with a line now and then (`ProgressLines`); with `quiet` nothing is shown."""
    if quiet:
        yield lambda _what, _done, _total: None
        return
    with contextlib.closing(ProgressView(sys.stderr, clock)) as view:

        def show(what: str, done: int, total: int) -> None:
            what = clean_line(what)  # it may have the name of a file
            view.update(what, done, total, f"{what}: {done} of {total}")

        yield show


@contextlib.contextmanager
def batch_progress(stream: TextIO, *, quiet: bool) -> Iterator[Callable[[Tally], None]]:
    """Show the progress of a batch in the same way, with tokens per second since the first report, and the
    time that is left at this pace."""
    if quiet:
        yield lambda _tally: None
        return
    begin: list[tuple[float, int]] = []
    with contextlib.closing(ProgressView(stream, kind="batch")) as view:

        def report(tally: Tally) -> None:
            if not begin:
                begin.append((time.monotonic(), tally.n_done))
            start_s, n_before = begin[0]
            seconds, n_done = time.monotonic() - start_s, tally.n_done - n_before
            text = "starting"
            if seconds >= _LEAST_S:
                text = f"{tally.n_tokens / seconds:.1f} tokens/s"
                if n_done and tally.n_done < tally.n_lines:
                    left_s = seconds / n_done * (tally.n_lines - tally.n_done)
                    text += f", {duration(left_s)} left"
            done, total = tally.n_done, tally.n_lines
            view.update(text, done, total, f"{done} of {total} lines, {text}")

        yield report


def batch_summary(tally: Tally, seconds: float, where: str) -> str:
    """Return a sentence about a finished batch. `where` says how many answers were generated at once, or by
    whom."""
    from specgen.render.summary import totals

    answers, *others = totals(tally.n_answers, [tally])
    speed = f"{duration(seconds)}: {tally.n_tokens / seconds:.1f} tokens/s"
    return ", ".join((answers, speed, where, *others))
