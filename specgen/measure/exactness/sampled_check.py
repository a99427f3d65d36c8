"""The sampled check: do many samples of one token fit the target's distribution?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from specgen.events import CommittedEvent
from specgen.measure.exactness.finished_answers import N_AT_ONCE, raise_failure, tokens_of
from specgen.measure.exactness.visible_places import N_SEARCHED, Place, find_places
from specgen.measure.exactness.ways_to_draft import WayName
from specgen.measure.goodness_of_fit import GTest, g_test
from specgen.measure.run_progress import StepProgress
from specgen.method.answer_state import AnswerState
from specgen.method.drafter import never
from specgen.method.sampling_pipeline import SamplingPipeline
from specgen.method.text_state import TextState
from specgen.session.calibration import calibrate
from specgen.session.engine import Engine
from specgen.session.prompts import Prompt
from specgen.session.request import Request
from specgen.session.session import Session
from specgen.system.arrays import Logits
from specgen.text.sampling.chain import Sampler
from specgen.text.sampling.distribution import Distribution

#: The number of samples that the engine gets at a time.
_N_QUEUED_SAMPLES = 60
#: The number of places that are tried until something is drafted.
_N_TRIED_PLACES = 3
#: The time that the search for a place takes for each prompt, in samples.
SAMPLES_PER_SEARCH = 50


@dataclass(frozen=True, slots=True)
class SampledResult:
    """The test of many samples of one token."""

    #: The prompt's number.
    prompt: int
    #: How drafts were made.
    way: WayName
    #: The number of the prompt's tokens.
    n_prompt: int
    #: The number of the answer's tokens before the one that was sampled.
    n_answer: int
    #: The number of samples.
    n_samples: int
    #: The number of samples of tokens to which the target gives probability 0.
    n_impossible: int
    #: The number of drafted tokens.
    n_drafted: int
    #: The number of drafted tokens that were accepted.
    n_accepted: int
    #: The significance level: a p-value up to this counts as a defect.
    level: float
    #: The comparison of the samples with the target's distribution.
    test: GTest

    @property
    def is_defect(self) -> bool:
        """Whether the samples do not fit the target's distribution."""
        return self.test.p_value <= self.level


def check_sampled(
    session: Session,
    prompts: Mapping[int, Prompt],
    n_samples: int,
    level: float,
    *,
    seed: int = 0,
    way: WayName | None = None,
    interrupted: Callable[[], bool] = never,
    progress: StepProgress = lambda _done, _total: None,
) -> SampledResult | None:
    """Sample one token many times with drafts, and test whether it has the target's distribution.

    The token is sampled in the answer to one of the prompts, at the place where mistakes would be
    most visible and where something is drafted.

    Args:
        session: A session with a random sampler.
        prompts: The prompts by number.
        n_samples: The number of samples to take.
        level: The significance level: a p-value up to this counts as a defect.
        seed: The seed of the first sample.
        way: The name of the way to draft, for the result; None for the session's policy.
        interrupted: Whether to stop.
        progress: Receives the number of finished samples, and of all samples. The search in a
            prompt counts as `SAMPLES_PER_SEARCH`.

    Returns:
        The result. It has fewer samples if interrupted, or if nothing was drafted in any place.
        None if no place was found, or if interrupted before the first samples.

    Raises:
        SpecgenError: If an answer or its drafter fails.
    """
    calibrate(session, interrupted)
    places: list[Place] = []
    n_total = n_samples + SAMPLES_PER_SEARCH * len(prompts)
    for n_searched, (number, prompt) in enumerate(prompts.items(), start=1):
        places += find_places(session, number, prompt, seed, interrupted)
        progress(n_searched * SAMPLES_PER_SEARCH, n_total)
    if not places or interrupted():
        return None
    places.sort(key=lambda each: each.visibility, reverse=True)
    samples = _Samples()
    for place in places[:_N_TRIED_PLACES]:
        samples = _take_samples(
            session,
            place,
            n_samples,
            seed,
            interrupted,
            lambda n_done: progress(n_total - n_samples + n_done, n_total),
        )
        if samples.n_drafted or interrupted():
            break
    n_taken = samples.counts.total()
    if n_taken == 0:
        return None
    # `exact` only has the possible tokens, so all other samples are impossible ones.
    counts = [samples.counts[token] for token in place.exact.token_ids.tolist()]
    return SampledResult(
        prompt=place.number,
        way=way or session.options.drafting.policy_in_use,
        n_prompt=len(place.prompt.tokens),
        n_answer=len(place.answer),
        n_samples=n_taken,
        n_impossible=n_taken - sum(counts),
        n_drafted=samples.n_drafted,
        n_accepted=samples.n_accepted,
        level=level,
        test=g_test(np.array(counts, np.int64), place.exact.probs, n_taken),
    )


@dataclass(slots=True)
class _Samples:
    """The samples at one place."""

    #: The number of times each token was sampled.
    counts: Counter[int] = field(default_factory=Counter)
    #: The number of drafted tokens in all answers.
    n_drafted: int = 0
    #: The number of them that were accepted.
    n_accepted: int = 0

    def add(self, request: Request, position: int) -> None:
        """Count the token at a position of a finished answer.

        Raises:
            SpecgenError: If the answer or its drafter failed.
        """
        raise_failure(request)
        assert request.finished is not None
        self.counts[tokens_of(request.events)[position]] += 1
        self.n_drafted += request.finished.n_drafted
        self.n_accepted += request.finished.n_accepted


class _ForcedStart(SamplingPipeline):
    """A sampling pipeline that makes the answer begin with given tokens."""

    def __init__(
        self,
        sampler: Sampler,
        state: TextState,
        forced: Sequence[int],
    ) -> None:
        super().__init__(sampler, state)
        self._n_prompt = len(state.tokens)
        self._forced = forced

    def distribution(
        self,
        logits: Logits,
        drafted: Sequence[int] = (),
    ) -> Distribution:
        position = len(self._state.tokens) + len(drafted) - self._n_prompt
        if position < len(self._forced):
            return Distribution.certain(self._forced[position])
        return super().distribution(logits, drafted)


def _take_samples(
    session: Session,
    place: Place,
    n_samples: int,
    seed: int,
    interrupted: Callable[[], bool],
    progress: Callable[[int], None],
) -> _Samples:
    """Sample the token at a place `n_samples` times.

    It ends early if interrupted, and if nothing is drafted at first. That may happen: the search
    found a draft at the place, but there, a draft with another vocabulary may have split the text
    into other tokens.

    Args:
        session: The session.
        place: The place.
        n_samples: The number of samples.
        seed: The seed of the first sample.
        interrupted: Whether to stop.
        progress: Receives the number of finished samples.

    Raises:
        SpecgenError: If an answer or its drafter fails.
    """
    # Each sample is the start of an answer of its own. An answer's first token has no draft, and
    # decoder heads draft nothing for the second. So the two tokens before the place are forced as
    # the first two of the answer, and the tokens before those are appended to the prompt.
    forced = place.answer[-2:]
    prompt = session.prompts.followed_by(place.prompt, place.answer[: -len(forced)])

    def force_start(_request: Request, sequence: AnswerState) -> None:
        sequence.sampling = _ForcedStart(session.settings.sampler, sequence.text_state, forced)

    # The limit leaves room for more tokens than are sampled, since the policy would draft less just
    # before the end of an answer.
    generation = replace(session.options.generation, max_tokens=N_SEARCHED, stop=())
    samples = _Samples()
    with Engine(
        session,
        n_parallel=1 if session.why_one_sequence else N_AT_ONCE,
        n_ctx=session.context_size(len(place.prompt.tokens) + N_SEARCHED, N_SEARCHED),
        interrupted=interrupted,
        learn_alone=True,  # otherwise, the drafts would be earlier samples
        prepare=force_start,
    ) as engine:
        for n_done in range(0, n_samples, _N_QUEUED_SAMPLES):
            n_queued = min(_N_QUEUED_SAMPLES, n_samples - n_done)
            requests = [engine.insert(prompt, generation=generation) for _ in range(n_queued)]
            for request in requests:
                # This makes the samples repeatable. It must not be the seed option, since how
                # drafts are verified depends on whether the user gave one.
                request.seed = seed + request.index
            for event in engine.run():
                # Stop each answer as soon as its token is sampled. Sequences are numbered through
                # all samples, not from 0 in each queue.
                if isinstance(event, CommittedEvent) and event.n_tokens > len(forced):
                    engine.cancel(requests[event.sequence - n_done])
            if interrupted():
                break
            for request in requests:
                samples.add(request, position=len(forced))
            progress(n_done + n_queued)
            if not samples.n_drafted:
                break
    return samples
