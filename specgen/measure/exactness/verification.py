"""Both checks of `specgen verify`, with each way to draft, and the progress of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from specgen.measure.exactness.finished_answers import N_AT_ONCE
from specgen.measure.exactness.greedy_check import GreedyResult, check_greedy, plain_texts
from specgen.measure.exactness.report import CheckName, VerifyReport
from specgen.measure.exactness.sampled_check import (
    SAMPLES_PER_SEARCH,
    SampledResult,
    check_sampled,
)
from specgen.measure.exactness.ways_to_draft import WayName
from specgen.measure.prompts import evenly_chosen
from specgen.measure.run_progress import RunStep, StepProgress, run_steps
from specgen.options import DraftOptions, SamplerOptions
from specgen.session.prompts import Prompt
from specgen.session.session import Session
from specgen.system.progress import Progress

#: The number of prompts that are answered again, `N_AT_ONCE` at a time.
_N_REPEATED_PROMPTS = 6
#: The number of prompts that are searched for a place to sample from.
_N_SEARCHED_PROMPTS = 3
#: The probability of a false alarm in any of the sampled checks.
_FALSE_ALARM_RATE = 1e-4
#: How long an answer without a limit is expected to be, for the progress.
_EXPECTED_TOKENS = 256
#: The time of a sample, in tokens of an answer.
_TOKENS_PER_SAMPLE = 2.5


def run_checks(
    session: Session,
    prompts: Mapping[int, Prompt],
    ways: Mapping[WayName, DraftOptions],
    *,
    check: CheckName,
    sampling: SamplerOptions,
    n_samples: int,
    progress: Progress,
    interrupted: Callable[[], bool],
) -> VerifyReport:
    """Run the checks with each way to draft.

    Args:
        session: A session with a greedy sampler. Its draft options and sampler are changed.
        prompts: The prompts by number.
        ways: The ways to draft. The first is the one that the user asked for. Several
            answers at once are only checked with the last one, which drafts most.
        check: Which checks to run.
        sampling: The sampler options of the sampled check.
        n_samples: The number of samples with each way.
        progress: Receives the name of a check, how much work of all checks is done, and the total.
        interrupted: Whether to stop.

    Returns:
        The report, with the results up to the interruption if there is one.

    Raises:
        SpecgenError: If an answer or its drafter fails.
    """
    checks = _Checks(session, prompts, ways, interrupted)
    steps: list[RunStep] = []
    if check != "sampled":
        steps += checks.greedy_steps()
    if check != "greedy":
        steps += checks.sampled_steps(sampling, n_samples)
    is_interrupted = False
    try:
        run_steps(steps, progress, interrupted)
    except KeyboardInterrupt:  # while costs were measured, or for the second time
        is_interrupted = True

    wanted = next(iter(ways.values()))
    return VerifyReport(
        target=session.options.target.name,
        draft=session.draft_name,
        verifier=wanted.verifier,
        draft_max=wanted.n_max,
        sampler=sampling,
        check=check,
        greedy=tuple(checks.greedy),
        sampled=tuple(checks.sampled),
        is_interrupted=is_interrupted or interrupted(),
        kernels=session.target.kernels,
        instead=_deviations(session),
        unequal_rows=session.target.row_exception if session.target.has_kernels else "",
    )


def _deviations(session: Session) -> tuple[str, ...]:
    """Return a sentence for each option of drafts that could not be checked as it was given."""
    draft = session.draft
    drafting = session.options.drafting
    if draft is None:
        return ()
    deviations: list[str] = []
    if drafting.tree.is_fixed and session.why_chains:
        deviations.append(f"drafts were chains, not trees of {drafting.tree}: {session.why_chains}")
    if drafting.verifier not in ("auto", "match") and not draft.can_sample:
        deviations.append(
            f"drafts were matched, not judged by {drafting.verifier}: none of them was sampled"
        )
    return tuple(deviations)


# --- the steps


@dataclass(slots=True)
class _Checks:
    """The checks of a session's models, and their results so far."""

    #: The session. Its draft options and sampler are changed.
    session: Session
    #: The prompts by number.
    prompts: Mapping[int, Prompt]
    #: The ways to draft; the last one drafts most.
    ways: Mapping[WayName, DraftOptions]
    #: Whether to stop.
    interrupted: Callable[[], bool]
    #: The tokens of plain decoding's answers by prompt number.
    plain: dict[int, list[int]] = field(default_factory=dict)
    #: The results of the greedy check.
    greedy: list[GreedyResult] = field(default_factory=list)
    #: The results of the sampled check.
    sampled: list[SampledResult] = field(default_factory=list)

    def greedy_steps(self) -> Iterator[RunStep]:
        """Yield the steps of the greedy check: plain decoding, and each way to draft.

        Their work is counted in tokens.
        """
        max_tokens = self.session.options.generation.max_tokens
        answer_tokens = max_tokens if max_tokens >= 0 else _EXPECTED_TOKENS
        n_tokens = len(self.prompts) * answer_tokens
        yield RunStep("greedy, plain decoding", n_tokens, self._answer_without_drafts)
        for way in self.ways:
            check = partial(self._check_greedy, way, self.prompts, 1)
            yield RunStep(_step_name("greedy", way), n_tokens, check)
        # Again with several answers at once, if the session can do that, in the way that drafts
        # most.
        if not self.session.why_one_sequence:
            *_, last_way = self.ways
            numbers = evenly_chosen(self.prompts, _N_REPEATED_PROMPTS)
            repeated = {number: self.prompts[number] for number in numbers}
            check = partial(self._check_greedy, last_way, repeated, N_AT_ONCE)
            name = f"greedy, {N_AT_ONCE} answers at once"
            yield RunStep(name, len(repeated) * answer_tokens, check)

    def sampled_steps(self, sampling: SamplerOptions, n_samples: int) -> Iterator[RunStep]:
        """Yield the steps of the sampled check, one for each way to draft."""
        searched = dict(islice(self.prompts.items(), _N_SEARCHED_PROMPTS))
        n_with_search = n_samples + len(searched) * SAMPLES_PER_SEARCH
        n_tokens = round(n_with_search * _TOKENS_PER_SAMPLE)
        for way in self.ways:
            check = partial(self._check_sampled, way, searched, sampling, n_samples)
            yield RunStep(_step_name("sampled", way), n_tokens, check)

    def _answer_without_drafts(self, progress: StepProgress) -> None:
        self.plain = plain_texts(self.session, self.prompts, self.interrupted, progress)

    def _check_greedy(
        self,
        way: WayName,
        prompts: Mapping[int, Prompt],
        n_at_once: int,
        progress: StepProgress,
    ) -> None:
        self.session.change_drafting(self.ways[way])
        self.greedy += check_greedy(
            self.session,
            prompts,
            self.plain,
            way=way,
            n_at_once=n_at_once,
            interrupted=self.interrupted,
            progress=progress,
        )

    def _check_sampled(
        self,
        way: WayName,
        prompts: Mapping[int, Prompt],
        sampling: SamplerOptions,
        n_samples: int,
        progress: StepProgress,
    ) -> None:
        self.session.change_sampling(sampling)
        self.session.change_drafting(self.ways[way])
        result = check_sampled(
            self.session,
            prompts,
            n_samples,
            level=_FALSE_ALARM_RATE / len(self.ways),  # the Bonferroni correction
            seed=max(0, sampling.seed),
            way=way,
            interrupted=self.interrupted,
            progress=progress,
        )
        if result is not None:
            self.sampled.append(result)


def _step_name(check: CheckName, way: WayName) -> str:
    """Return the name of a check with a way to draft, for the progress."""
    how = "a draft in each round" if way == "forced" else f"--policy {way}"
    return f"{check}, {how}"
