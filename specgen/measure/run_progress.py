"""The progress of a run that has several steps, for one estimate of the remaining time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

#: A function that receives how much of a step is done, and how much there is of it.
StepProgress: TypeAlias = Callable[[int, int], None]


class RunProgress:
    """Turns the progress of each step into that of the whole run."""

    def __init__(
        self,
        work: Mapping[str, int],
        report: Callable[[str, int, int], None],
    ) -> None:
        """Begin a run.

        Args:
            work: The expected work of each step by its name, in the order of the steps. Any unit
                will do that is about as long in all steps.
            report: Receives the name of the present step, and the work that is done, and the work
                of all steps.
        """
        self._work = dict(work)
        self._report = report

    def step(self, name: str) -> StepProgress:
        """Begin a step, and return the function that receives its progress.

        The work of all steps before it counts as done.
        """
        names = list(self._work)
        work_before = sum(self._work[each] for each in names[: names.index(name)])
        total_work = sum(self._work.values())

        def progress(done: int, total: int) -> None:
            share = done / max(1, total)
            self._report(name, work_before + round(share * self._work[name]), total_work)

        progress(0, 1)
        return progress
