"""The measurements of `specgen bench`, one target after the other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from specgen.errors import SpecgenError
from specgen.measure.bench.environment import about
from specgen.measure.bench.plan import NGRAM, Field, Plan, contender_entries

if TYPE_CHECKING:
    from specgen.measure.bench.foresight_replay import Foresight
    from specgen.measure.bench.prompts import BenchPrompt
    from specgen.measure.bench.report import BenchReport
    from specgen.measure.bench.runs import Runs
    from specgen.options import DraftSource
    from specgen.system.progress import Progress


class Job:
    """The measurements of one command. An interruption keeps the results so far."""

    def __init__(
        self,
        plan: Plan,
        prompts: Sequence[BenchPrompt],
        n_rounds: int,
        progress: Progress,
        interrupted: Callable[[], bool],
        command: str,
    ) -> None:
        from specgen.measure.bench.runs import Runs

        self._plan = plan
        self._prompts = prompts
        self._n_rounds = n_rounds
        self._progress = progress
        self._interrupted = interrupted
        self._command = command
        self._runs: Runs = Runs()
        self._foresights: list[Foresight] = []
        #: The names of other programs.
        self._others: list[str] = []
        #: The error that ended the measurements after some results.
        self.error: SpecgenError | None = None

    def measure(self, field: Field) -> None:
        """Measure all contenders for a target; close its models afterwards."""
        from specgen.measure.bench.lineups import lineups
        from specgen.measure.bench.runs import run_lineups

        if self._is_over:
            return
        with (
            self._keeping_what_there_is(),
            lineups(field, self._plan, self._interrupted, self._progress) as opened,
        ):
            own = {entry["name"] for entry in contender_entries(field, self._plan)}
            self._others += [
                contender.name
                for contender in (opened[0].others if opened else ())
                if contender.name not in own and contender.name not in self._others
            ]
            run_lineups(
                opened,
                self._prompts,
                self._runs,
                n_rounds=self._n_rounds,
                interrupted=self._interrupted,
                progress=lambda done, total: self._progress(field.name, done, total),
            )

    def foresee(self, field: Field) -> None:
        """Compute the best speeds, if there is a draft and a temperature of 0."""
        from specgen.engine.loaded_models import Models
        from specgen.measure.bench.foresight_replay import foresee, foresight_options

        plan, groups = self._plan, self._plan.groups(field)
        if self._is_over or 0.0 not in plan.temperatures or not groups:
            return
        drafts: dict[str, DraftSource] = {
            name: stages[0] for name, stages in field.drafts.items() if len(stages) == 1
        }
        if any(NGRAM in group for group in groups):
            drafts[NGRAM] = NGRAM
        options = foresight_options(plan.options(field), plan.n_max)
        skipped = {skip.prompt for skip in self._runs.skipped if skip.target == field.name}
        prompts = [prompt for prompt in self._prompts if prompt.number not in skipped]
        with self._keeping_what_there_is(), Models(options, time.perf_counter) as loaded:
            found = foresee(
                loaded,
                field.name,
                drafts,
                groups,
                prompts,
                chat=plan.chat,
                interrupted=self._interrupted,
                progress=self._progress,
            )
            if found is not None:
                self._foresights.append(found)

    @property
    def _is_over(self) -> bool:
        return self._interrupted() or self.error is not None

    @contextlib.contextmanager
    def _keeping_what_there_is(self) -> Iterator[None]:
        """Keep the results so far if an error comes after, for example, an hour."""
        try:
            yield
        except SpecgenError as error:
            if not self._runs.results:
                raise
            self.error = error

    def report(self, fields: Sequence[Field]) -> BenchReport:
        from specgen.measure.bench.figures import figures_of
        from specgen.measure.bench.report import BenchReport

        return BenchReport(
            about=about(self._plan, fields, self._command),
            contenders=[
                entry
                for field in fields
                for entry in contender_entries(field, self._plan, self._others)
            ],
            prompts=self._prompts,
            n_rounds=self._n_rounds,
            runs=self._runs,
            figures=figures_of(self._runs.results),
            foresights=self._foresights,
            is_interrupted=self._interrupted(),
        )
