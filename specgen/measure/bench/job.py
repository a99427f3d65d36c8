"""The measurements of `specgen bench`, one target after the other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.errors import SpecgenError
from specgen.measure.bench.contenders import SessionContender, peers_of
from specgen.measure.bench.figures import figures_of
from specgen.measure.bench.plan import PLAIN, Field, Plan, Stages, contender_entries
from specgen.measure.bench.report import BenchReport, about
from specgen.measure.bench.runs import Lineup, Runs, run_lineups
from specgen.session.loaded_models import Models

if TYPE_CHECKING:
    from specgen.measure.bench.contenders import Contender
    from specgen.measure.bench.prompts import BenchPrompt
    from specgen.options import DraftOptions
    from specgen.system.progress import Progress


@dataclass(frozen=True, slots=True)
class Announcement:
    """What will be measured for a target that `kernels` compute: each contender gives `n_answers` answers of
    `n_tokens` tokens at most. It takes about `seconds` if all answers are as long, and no contender is faster than
    plain decoding."""

    target: str
    kernels: str
    n_answers: int
    contenders: tuple[str, ...]
    n_tokens: int
    seconds: float


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
        announce: Callable[[Announcement], None] = lambda _planned: None,
    ) -> None:
        self._plan = plan
        self._prompts = prompts
        self._n_rounds = n_rounds
        self._progress = progress
        self._interrupted = interrupted
        self._command = command
        self._announce = announce
        self._runs: Runs = Runs()
        #: The names of other programs.
        self._others: list[str] = []
        #: Whose code computes each target.
        self._kernels: dict[str, str] = {}
        #: The error that ended the measurements after some results.
        self.error: SpecgenError | None = None

    def measure(self, field: Field) -> None:
        """Measure all contenders for a target; close its models afterwards."""
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
            self._announce_first(field, opened)
            run_lineups(
                opened,
                self._prompts,
                self._runs,
                n_rounds=self._n_rounds,
                interrupted=self._interrupted,
                progress=lambda done, total: self._progress(field.name, done, total),
            )

    def _announce_first(self, field: Field, opened: Sequence[Lineup]) -> None:
        """Say what will be measured and how long it takes, if plain decoding of full answers were the pace."""
        plain = opened[0].plain
        assert isinstance(plain, SessionContender), "as `lineups` makes it"
        self._kernels[field.name] = plain.kernels
        n_answers = len(self._prompts) * self._n_rounds
        names = [each.name for lineup in opened for each in (lineup.plain, *lineup.others)]
        n_tokens = self._plan.answer.max_tokens
        texts = [each.text for each in self._prompts]
        seconds = self._n_rounds * len(names) * plain.expected_s(texts, n_tokens)
        self._announce(
            Announcement(
                field.name, plain.kernels, n_answers, tuple(dict.fromkeys(names)), n_tokens, seconds
            )
        )

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
        return BenchReport(
            about=about(self._plan, fields, self._command, self._kernels),
            contenders=[
                entry
                for field in fields
                for entry in contender_entries(field, self._plan, self._others)
            ],
            prompts=self._prompts,
            n_rounds=self._n_rounds,
            runs=self._runs,
            figures=figures_of(self._runs.results),
            is_interrupted=self._interrupted(),
        )


@contextlib.contextmanager
def lineups(
    field: Field, plan: Plan, interrupted: Callable[[], bool], progress: Progress
) -> Iterator[list[Lineup]]:
    """Yield a lineup for each temperature, with its models loaded until the end.

    Each contender has models with weights of its own: if llama.cpp repacks weights for the CPU, or keeps them
    on a GPU, each takes memory. Raises `ModelFileError`, `PairError`.
    """
    n_contenders = len(plan.temperatures) * (1 + len(field.drafts) * len(plan.ways))
    opened: list[Models] = []
    with contextlib.ExitStack() as stack:

        def contender(
            name: str, draft: Stages, drafting: DraftOptions, temperature: float
        ) -> SessionContender:
            progress(f"loading {field.name}", len(opened), n_contenders)
            options = plan.options(field, draft)
            options = replace(
                options,
                drafting=drafting,
                sampler=replace(options.sampler, temperature=temperature),
            )
            # Each contender learns its own costs and acceptance rates and keeps them for all prompts: no
            # contender gains or loses by the others.
            loaded = stack.enter_context(Models(options, time.perf_counter))
            opened.append(loaded)
            return SessionContender(name, loaded, chat=plan.chat, interrupted=interrupted)

        found: list[Lineup] = []
        for temperature in plan.temperatures:
            plain = contender(PLAIN, ("none",), replace(plan.drafting, policy="fixed"), temperature)
            others: list[Contender] = [
                contender(plan.name(name, way), draft, plan.drafting_of(way), temperature)
                for name, draft in field.drafts.items()
                for way in plan.ways
            ]
            loaded = opened[-1 - len(others)]
            drafts = _same_vocabulary(field, opened)
            for against in plan.against:
                others += peers_of(
                    against,
                    loaded,
                    drafts,
                    folder=plan.peers,
                    chat=plan.chat,
                    interrupted=interrupted,
                )
            found.append(Lineup(field.name, temperature, plain, tuple(others)))
        yield found


def _same_vocabulary(field: Field, sessions: Sequence[Models]) -> dict[str, Path]:
    """Return the draft models with the target's vocabulary, by name: llama.cpp refuses others."""
    own = {loaded.options.draft for loaded in sessions if not (loaded.own_vocabulary is not None)}
    firsts = {stages[0]: name for name, stages in field.drafts.items() if len(stages) == 1}
    return {
        firsts.get(draft, draft.name): draft
        for draft, *_ in field.drafts.values()
        if isinstance(draft, Path) and draft in own
    }
