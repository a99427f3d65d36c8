"""`--foresight` for real drafters: replays a target's answers with measured costs."""

from __future__ import annotations

import statistics
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specgen.decoding.draft import ROOT, Draft
from specgen.decoding.drafters import draft_alone
from specgen.decoding.policy import draft_up_to
from specgen.decoding.sequence import Sequence
from specgen.engine.drafter_factory import DrafterFactory
from specgen.measure.bench.contenders import NOW
from specgen.measure.bench.foresight import DrafterForesight, Schedule, best_schedule, run_lengths
from specgen.measure.bench.prompts import BenchPrompt
from specgen.measure.selection.trial import Baseline, TargetAnswer, agreeing_path, measure_target

if TYPE_CHECKING:
    from specgen.engine.loaded_models import Models
    from specgen.options import DraftSource, SessionOptions
    from specgen.system.progress import Progress

#: Every fourth look also times a draft of a single token.
_EVERY = 4


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The best way for one prompt with the drafts of `drafters`, by name.

    `plain_s` and `best_s` are seconds after the first token, by the measured costs: of plain decoding, and of
    the best way."""

    prompt: int
    drafters: tuple[str, ...]
    n_tokens: int
    n_rounds: int
    plain_s: float
    best_s: float

    @property
    def speedup(self) -> float:
        """The speed-up over plain decoding: the limit for these drafts and costs."""
        return self.plain_s / self.best_s


@dataclass(frozen=True, slots=True)
class Foresight:
    """The best ways for a target at temperature 0, and the costs that lead to them: `batch_s` has the seconds of a
    batch by its rows."""

    target: str
    batch_s: Mapping[int, float]
    #: Seconds for the first token of a draft and for each further one, by the drafter's name; medians over
    #: the answers.
    draft_s: Mapping[str, tuple[float, float]]
    foreseen: tuple[Foreseen, ...]

    def speedups(self, drafters: abc.Sequence[str]) -> dict[int, float]:
        """Return the best speed-up with exactly these drafters, by the prompt's number."""
        names = set(drafters)
        return {one.prompt: one.speedup for one in self.foreseen if set(one.drafters) == names}


def foresight_options(options: SessionOptions, n_max: int) -> SessionOptions:
    """Return session options in which drafters always draft up to `n_max` tokens, however unsure they are, at
    temperature 0."""
    drafting = replace(
        options.drafting, policy="fixed", max_tokens=n_max, min_tokens=0, p_min=0.0, ngrams=False
    )
    sampler = replace(options.sampler, temperature=0.0, xtc_probability=0.0, dynatemp_range=0.0)
    return replace(options, draft="none", drafting=drafting, sampler=sampler)


def foresee(
    loaded: Models,
    target: str,
    drafts: Mapping[str, DraftSource],
    groups: abc.Sequence[tuple[str, ...]],
    prompts: abc.Sequence[BenchPrompt],
    *,
    chat: bool | None = None,
    interrupted: Callable[[], bool] = lambda: False,
    progress: Progress = lambda _what, _done, _total: None,
) -> Foresight | None:
    """Find the best way for these prompts with each group of drafts; groups name the drafts.

    The models have `foresight_options`; their draft is changed. Prompts that do not fit the context are
    left out. None if interrupted. Raise `PromptError` if no prompt fits; `ModelFileError`, `PairError`,
    `MemoryLimitError`, `BackendError`.
    """
    baseline = measure_target(
        loaded,
        [prompt.text for prompt in prompts],
        chat=chat,
        interrupted=interrupted,
        progress=lambda done, total: progress("foresight: the target", done, total),
    )
    if baseline is None:
        return None
    numbers = [
        prompt.number for place, prompt in enumerate(prompts, 1) if place not in baseline.skipped
    ]
    by_draft: dict[str, list[DrafterForesight]] = {}
    for name, source in drafts.items():
        found: list[DrafterForesight] = []
        loaded.change_draft(source)
        with loaded.contexts(baseline.n_ctx) as (_, draft):
            for answer in baseline.answers:
                progress(f"foresight: {name}", len(found), len(baseline.answers))
                if interrupted():
                    return None
                if draft is not None:
                    draft.remove(0)
                prompt = loaded.prompts.of_text(answer.prompt, chat=chat, now=NOW)
                generation = DrafterFactory(loaded).sequence(prompt, baseline.n_ctx, draft, 0)
                found.append(
                    foresee_drafter(generation, answer, loaded.n_rows_max - 1, loaded.clock)
                )
        by_draft[name] = found
    return _foresight(target, baseline, numbers, by_draft, groups)


def _foresight(
    target: str,
    baseline: Baseline,
    numbers: abc.Sequence[int],
    by_draft: Mapping[str, abc.Sequence[DrafterForesight]],
    groups: abc.Sequence[tuple[str, ...]],
) -> Foresight:
    costs = {
        name: (
            statistics.median(drafting.first_s for drafting in found),
            statistics.median(drafting.next_s for drafting in found),
        )
        for name, found in by_draft.items()
    }
    foreseen: list[Foreseen] = []
    for index, (number, answer) in enumerate(zip(numbers, baseline.answers, strict=True)):
        n_tokens = len(answer.tokens) - 1
        if n_tokens < 1:
            continue
        for names in groups:
            # One answer gives few times, so the costs are those over all answers.
            drafters = [DrafterForesight(by_draft[n][index].accepted, *costs[n]) for n in names]
            way = best_schedule(n_tokens, baseline.rows_s, drafters)
            foreseen.append(_foreseen(number, names, n_tokens, baseline, way))
    return Foresight(target, dict(baseline.batch_s), costs, tuple(foreseen))


def _foreseen(
    number: int, names: tuple[str, ...], n_tokens: int, baseline: Baseline, way: Schedule
) -> Foreseen:
    plain_s = n_tokens * baseline.token_s
    return Foreseen(number, names, n_tokens, len(way.steps), plain_s, way.seconds)


def foresee_drafter(
    generation: Sequence, answer: TargetAnswer, n_max: int, clock: Callable[[], float]
) -> DrafterForesight:
    """Return the possible drafts of the generation's drafter for a known answer, with up to `n_max` tokens
    a round, at the positions after its first token.

    `generation` is at the end of the prompt; `clock` gives seconds and is read around each proposal.
    """
    drafts = _Drafts(generation, answer.tokens, n_max, clock)
    n_tokens = len(answer.tokens) - 1
    if drafts.begin():
        accepted = run_lengths(n_tokens, n_max, drafts.look)
    else:
        # Without a model a draft costs nothing, and its errors depend on where it began.
        accepted = tuple(drafts.look(place)[1] for place in range(n_tokens))
    return DrafterForesight(accepted, *drafts.prices())


class _Drafts:
    """A drafter's drafts at the positions of an answer, asked for in order."""

    def __init__(
        self,
        generation: Sequence,
        tokens: abc.Sequence[int],
        n_max: int,
        clock: Callable[[], float],
    ) -> None:
        self._generation = generation
        self._tokens = tokens
        self._n_max = n_max
        self._clock = clock
        self._n_looks = 0
        #: The seconds of drafts of a single token; the lengths and seconds of longer drafts.
        self._single_s: list[float] = []
        self._longer_s: list[tuple[int, float]] = []

    def begin(self) -> bool:
        """Prefill the drafter, which is not in the costs; return whether it has a model."""
        drafters = self._generation.drafters
        if drafters is None:
            return False
        self._propose(1)
        self._generation.commit(self._tokens[0])
        return drafters.model is not None

    def look(self, place: int) -> tuple[int, int]:
        """Draft after the first token and `place` others. Return the number of correct tokens plus one if a
        wrong one follows, and the number of correct tokens."""
        generation = self._generation
        n_done = len(generation.tokens) - generation.n_prompt
        for token in self._tokens[n_done : 1 + place]:
            generation.commit(token)
        n_max = min(self._n_max, generation.n_draftable)
        if n_max < 1 or generation.drafters is None:
            return 0, 0
        self._n_looks += 1
        if self._n_looks % _EVERY == 1:
            single, seconds = self._propose(1)
            if len(single):
                self._single_s.append(seconds)
        draft, seconds = self._propose(n_max)
        if len(draft) > 1:
            self._longer_s.append((len(draft), seconds))
        path = agreeing_path(draft, self._tokens[1 + place :])
        is_wrong = bool(draft.children(path[-1] if path else ROOT))
        return len(path) + is_wrong, len(path)

    def prices(self) -> tuple[float, float]:
        """Return the median seconds for the first token of a draft, and for each further one."""
        first_s = statistics.median(self._single_s) if self._single_s else 0.0
        further = [(seconds - first_s) / (n - 1) for n, seconds in self._longer_s]
        return first_s, max(0.0, statistics.median(further)) if further else 0.0

    def _propose(self, n_max: int) -> tuple[Draft, float]:
        generation = self._generation
        drafters = generation.drafters
        assert drafters is not None, "what drafts"
        started = self._clock()
        found = drafters.look_up(generation.tokens, n_max)
        draft = draft_alone(drafters.propose(generation.tokens, draft_up_to(n_max)))
        return draft if len(draft) else found, self._clock() - started
