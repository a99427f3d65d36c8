"""The progress of a batch: a bar on a terminal, else a line now and then; and a sentence about the
results."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from specgen.batch.runner import Tally
from specgen.progress import ProgressLines
from specgen.render.text import counted

#: Seconds before which a speed means nothing.
_LEAST_S = 1.0

Report = Callable[[Tally], None]


@contextlib.contextmanager
def batch_progress(
    stream: TextIO, *, quiet: bool, clock: Callable[[], float] = time.monotonic
) -> Iterator[Report]:
    """Yield a function that shows the progress of a batch. The bar disappears at the end; with `quiet`
    nothing is shown."""
    if quiet:
        yield lambda _tally: None
        return
    pace = _Pace(clock)
    if not stream.isatty():
        lines = ProgressLines(stream, clock)
        try:
            yield lambda tally: lines.update(
                f"{tally.n_done} of {tally.n_lines} lines, {pace.text(tally)}"
            )
        finally:
            lines.finish()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from specgen.render.select import make_console

    bar = Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}", markup=False),
        console=make_console(stream, os.environ),
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=None)

        def show(tally: Tally) -> None:
            bar.update(
                task, total=tally.n_lines, completed=tally.n_done, description=pace.text(tally)
            )

        yield show


class _Pace:
    """Tokens per second since the first report, and the time that is left at this pace."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start_s: float | None = None
        self._n_done_before = 0

    def text(self, tally: Tally) -> str:
        if self._start_s is None:
            self._start_s, self._n_done_before = self._clock(), tally.n_done
        seconds = self._clock() - self._start_s
        n_done = tally.n_done - self._n_done_before
        if seconds < _LEAST_S:
            return "starting"
        parts = [f"{tally.n_tokens / seconds:.1f} tokens/s"]
        if n_done and tally.n_done < tally.n_lines:
            parts.append(f"{_duration(seconds / n_done * (tally.n_lines - tally.n_done))} left")
        return ", ".join(parts)


def batch_summary(tally: Tally, seconds: float, where: str) -> str:
    """Return a sentence about a finished batch. `where` says how many answers were made at once, or by
    whom."""
    parts = [
        f"{counted(tally.n_answers, 'answer')} of {counted(tally.n_tokens, 'token')} in all",
        f"{_duration(seconds)}: {tally.n_tokens / seconds:.1f} tokens/s",
        where,
    ]
    if tally.n_drafted:
        parts.append(f"{100 * tally.n_accepted / tally.n_drafted:.0f}% of the draft accepted")
    if tally.n_cached_tokens:
        share = 100 * tally.n_cached_tokens / tally.n_prompt_tokens
        parts.append(f"{share:.0f}% of the prompts from the cache")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    """Return seconds in a suitable unit."""
    if seconds < 90.0:
        return f"{seconds:.0f} s"
    if seconds < 5400.0:
        return f"{seconds / 60.0:.0f} min"
    return f"{seconds / 3600.0:.1f} h"


__all__ = ["Report", "batch_progress", "batch_summary"]
