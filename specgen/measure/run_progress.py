"""The progress of a run that has several steps, for one estimate of the remaining time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from specgen.system.progress import Progress

#: A function that receives how much of a step is done, and how much there is of it.
StepProgress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class RunStep:
    """A part of a run, with its own progress."""

    #: Its name.
    name: str
    #: Its expected work, in any unit that takes about as long in all steps.
    work: int
    #: Does the work, and reports its progress.
    do: Callable[[StepProgress], None]


def run_steps(
    steps: Sequence[RunStep],
    report: Progress,
    interrupted: Callable[[], bool],
) -> None:
    """Do the work of all steps, and report their progress as that of one run.

    Args:
        steps: The steps.
        report: Receives the name of the present step, the work that is done, and the work of all
            steps.
        interrupted: Whether to stop, asked before each step.
    """
    total_work = sum(step.work for step in steps)
    work_before = 0

    def progress(done: int, total: int) -> None:
        done_work = round(done / max(1, total) * step.work)
        report(step.name, work_before + done_work, total_work)

    for step in steps:
        if interrupted():
            return
        progress(0, 1)
        step.do(progress)
        work_before += step.work
