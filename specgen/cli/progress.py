"""A bar on standard error, for commands that measure for minutes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

#: Told what is going on, and how much of it is done, of how much.
Progress = Callable[[str, int, int], None]


@contextlib.contextmanager
def progress_bar(*, quiet: bool) -> Iterator[Progress]:
    """Tells on standard error how far the work is, on a terminal; gone when the work is done."""
    if quiet or not sys.stderr.isatty():
        yield _nothing
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from specgen.render import make_console

    bar = Progress(
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


def _nothing(_what: str, _done: int, _total: int) -> None:
    pass
