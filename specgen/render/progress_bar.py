"""A bar on standard error, or lines, for commands that measure for minutes."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

from specgen.progress import Progress


@contextlib.contextmanager
def progress_bar(*, quiet: bool, clock: Callable[[], float] = time.monotonic) -> Iterator[Progress]:
    """Show the progress on standard error: on a terminal with a bar that disappears at the end, elsewhere
    with a line now and then (`ProgressLines`); with `quiet` nothing is shown."""
    if quiet:
        yield _nothing
        return
    if not sys.stderr.isatty():
        with _lines(clock) as progress:
            yield progress
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.progress import (
        Progress as Bar,
    )

    from specgen.render import make_console

    bar = Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=make_console(sys.stderr, os.environ),
        transient=True,
    )
    with bar:
        tasks: dict[str, object] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                for task in bar.task_ids:
                    bar.update(task, visible=False)
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)  # type: ignore[arg-type]

        yield show


@contextlib.contextmanager
def _lines(clock: Callable[[], float]) -> Iterator[Progress]:
    from specgen.progress import ProgressLines
    from specgen.render.text import clean_line

    lines = ProgressLines(sys.stderr, clock)
    encoding = sys.stderr.encoding

    def show(what: str, done: int, total: int) -> None:
        # File names may be part of it.
        lines.update(clean_line(f"{what}: {done} of {total}", encoding))

    try:
        yield show
    finally:
        lines.finish()


def _nothing(_what: str, _done: int, _total: int) -> None:
    pass
