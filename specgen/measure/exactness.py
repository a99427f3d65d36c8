"""The two checks of `specgen verify`, which test that drafting is lossless with the user's models.

Greedy: are the texts with and without drafts equal? Sampled: do many samples of one token fit the
target's distribution?

The answers come from the same engine as everywhere else. With specgen's kernels a row of logits has
the same bits in a batch as alone, so the texts must be equal, and any difference is a defect.
llama.cpp's kernels may round a row differently in a batch. If two tokens are almost equally likely,
rounding can change which one is chosen (a *near-tie*), even in plain decoding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from typing import Any, Literal, TypeAlias

import numpy as np

from specgen.errors import BackendError
from specgen.events import CommittedEvent, DraftedEvent, Event, NoticeEvent
from specgen.measure.goodness_of_fit import GTest, g_test
from specgen.measure.prompts import evenly_chosen
from specgen.measure.run_progress import RunProgress, StepProgress
from specgen.method.answer_state import AnswerState
from specgen.method.backend import Batch
from specgen.method.drafter import never
from specgen.method.sampling_pipeline import SamplingPipeline
from specgen.method.text_state import TextState
from specgen.options import DraftOptions, PolicyName, SamplerOptions
from specgen.session.calibration import calibrate
from specgen.session.engine import Engine
from specgen.session.prompts import Prompt
from specgen.session.request import Request
from specgen.session.session import Session
from specgen.system.arrays import Logits
from specgen.system.files import as_json
from specgen.text.overlap import common_prefix_length
from specgen.text.sampling.chain import Sampler
from specgen.text.sampling.distribution import Distribution

#: The number of answers generated at once. With three, the last may reuse the cache cells that the
#: first left while the second is still running.
N_AT_ONCE = 3
#: The number of prompts that are answered again, `N_AT_ONCE` at a time.
_N_REPEATED_PROMPTS = 6
#: Logits may move up to this many times as far as in the batches that were tried.
SLACK = 4.0
#: The movement that a cache value rounded differently may cause, in standard deviations of a row.
ALWAYS_ALLOWED = 0.01
#: At a difference, plain decoding is repeated in batches of up to this many rows.
_MAX_BATCH_ROWS = 16
#: The number of tokens at the start of an answer that are searched for a place to sample from.
N_SEARCHED = 48
#: The number of samples that the engine gets at a time.
_N_QUEUED_SAMPLES = 60
#: The number of prompts that are searched for a place to sample from.
_N_SEARCHED_PROMPTS = 3
#: The names of the first and of the last greedy step, for the progress.
_PLAIN_STEP = "greedy, plain decoding"
_AT_ONCE_STEP = f"greedy, {N_AT_ONCE} answers at once"
#: How long an answer without a limit is expected to be, for the progress.
_EXPECTED_TOKENS = 256
#: The time of a sample, in tokens of an answer.
_TOKENS_PER_SAMPLE = 2.5
#: The time that the search for a place takes for each prompt, in samples.
_SAMPLES_PER_SEARCH = 50
#: The probability of a false alarm in any of the sampled checks.
_FALSE_ALARM_RATE = 1e-4

#: A way to draft: the policy of `specgen run`, or "forced", which drafts in every round.
WayName: TypeAlias = Literal[PolicyName, "forced"]
CheckName: TypeAlias = Literal["both", "greedy", "sampled"]
CheckOutcome: TypeAlias = Literal["lossless", "defect", "interrupted", "nothing drafted"]


def ways_to_draft(drafting: DraftOptions) -> dict[WayName, DraftOptions]:
    """Return the ways to draft that are checked.

    The first is the way of `specgen run`. If its cost policy may decide not to draft, a second one
    drafts in every round, so that drafts are checked in any case.
    """
    ways: dict[WayName, DraftOptions] = {drafting.policy_in_use: drafting}
    if drafting.is_by_cost:
        # N-gram options that are not set depend on the policy. Keep those of the cost policy.
        shortest, longest = drafting.ngram_lengths
        ways["forced"] = replace(
            drafting,
            policy="fixed",
            p_min=0.0,
            ngrams=drafting.adds_ngrams,
            ngram_min=shortest,
            ngram_max=longest,
        )
    return ways


def run_checks(
    session: Session,
    prompts: Mapping[int, Prompt],
    ways: Mapping[WayName, DraftOptions],
    *,
    check: CheckName,
    sampling: SamplerOptions,
    n_samples: int,
    progress: Callable[[str, int, int], None],
    interrupted: Callable[[], bool],
) -> tuple[tuple[GreedyResult, ...], tuple[SampledResult, ...]]:
    """Run the checks with each way to draft.

    Args:
        session: A session with a greedy sampler. Its draft options and sampler are changed.
        prompts: The prompts by number.
        ways: The ways to draft. Several answers at once are only checked with the last one, which
            drafts most.
        check: Which checks to run.
        sampling: The sampler options of the sampled check.
        n_samples: The number of samples with each way.
        progress: Receives the name of a check, how much work of all checks is done, and the total.
        interrupted: Whether to stop.

    Returns:
        The results of the greedy and of the sampled checks, up to the interruption if there is one.
    """
    steps = _planned_steps(session, prompts, ways, check, n_samples)
    run = RunProgress(steps, progress)
    greedy: list[GreedyResult] = []
    sampled: list[SampledResult] = []
    if check != "sampled":
        greedy = _greedy_results(session, prompts, ways, run, interrupted)
    if check != "greedy" and not interrupted():
        session.change_sampling(sampling)
        sampled = _sampled_results(
            session,
            dict(islice(prompts.items(), _N_SEARCHED_PROMPTS)),
            ways,
            n_samples,
            run,
            interrupted,
        )
    return tuple(greedy), tuple(sampled)


def _greedy_results(
    session: Session,
    prompts: Mapping[int, Prompt],
    ways: Mapping[WayName, DraftOptions],
    run: RunProgress,
    interrupted: Callable[[], bool],
) -> list[GreedyResult]:
    """Compare the answers to all prompts with plain decoding's, with each way to draft."""
    results: list[GreedyResult] = []
    plain = plain_texts(session, prompts, interrupted, run.step(_PLAIN_STEP))
    check_texts = partial(check_greedy, session, plain=plain, interrupted=interrupted)
    for way, drafting in ways.items():
        session.change_drafting(drafting)
        step = run.step(_step_name("greedy", way))
        results += check_texts(prompts, way=way, progress=step)
    # Again with several answers at once, if the session can do that.
    if not session.why_one_sequence:
        last_way = [*ways][-1]
        results += check_texts(
            _repeated_prompts(prompts),
            way=last_way,
            n_at_once=N_AT_ONCE,
            progress=run.step(_AT_ONCE_STEP),
        )
    return results


def _sampled_results(
    session: Session,
    prompts: Mapping[int, Prompt],
    ways: Mapping[WayName, DraftOptions],
    n_samples: int,
    run: RunProgress,
    interrupted: Callable[[], bool],
) -> list[SampledResult]:
    """Test samples of a token in the answers to these prompts, with each way to draft."""
    results: list[SampledResult] = []
    for way, drafting in ways.items():
        session.change_drafting(drafting)
        result = check_sampled(
            session,
            prompts,
            n_samples,
            level=_FALSE_ALARM_RATE / len(ways),  # the Bonferroni correction
            seed=max(0, session.options.sampler.seed),
            way=way,
            interrupted=interrupted,
            progress=run.step(_step_name("sampled", way)),
        )
        if result is not None:
            results.append(result)
    return results


def _planned_steps(
    session: Session,
    prompts: Mapping[int, Prompt],
    ways: Mapping[WayName, DraftOptions],
    check: CheckName,
    n_samples: int,
) -> dict[str, int]:
    """Return the steps of all checks in their order, with the expected work of each in tokens."""
    max_tokens = session.options.generation.max_tokens
    answer_tokens = max_tokens if max_tokens >= 0 else _EXPECTED_TOKENS
    steps: dict[str, int] = {}
    if check != "sampled":
        steps[_PLAIN_STEP] = len(prompts) * answer_tokens
        for way in ways:
            steps[_step_name("greedy", way)] = len(prompts) * answer_tokens
        if not session.why_one_sequence:
            steps[_AT_ONCE_STEP] = len(_repeated_prompts(prompts)) * answer_tokens
    if check != "greedy":
        n_searched = min(len(prompts), _N_SEARCHED_PROMPTS)
        for way in ways:
            n_with_search = n_samples + n_searched * _SAMPLES_PER_SEARCH
            steps[_step_name("sampled", way)] = round(n_with_search * _TOKENS_PER_SAMPLE)
    return steps


def _step_name(check: CheckName, way: WayName) -> str:
    """Return the name of a check with a way to draft, for the progress."""
    how = "a draft in each round" if way == "forced" else f"--policy {way}"
    return f"{check}, {how}"


def _repeated_prompts(prompts: Mapping[int, Prompt]) -> dict[int, Prompt]:
    """Return the prompts that are answered again, several at once."""
    return {number: prompts[number] for number in evenly_chosen(prompts, _N_REPEATED_PROMPTS)}


# --- greedy


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position where two texts differ."""

    #: The number of equal tokens before it.
    position: int
    #: The text of plain decoding's token; empty if its answer ends there.
    plain: str
    #: The text of the token with drafts; empty if that answer ends there.
    drafted: str
    #: By how many logits plain decoding prefers its token.
    gap: float
    #: The largest gap that rounding in batches explains; 0 if rows are batch-invariant.
    allowed: float
    #: The smallest batch, in rows, in which plain decoding also chooses the token with drafts;
    #: None if there is no such batch.
    same_in_batches_of: int | None = None

    @property
    def is_defect(self) -> bool:
        """Whether the difference cannot be explained by rounding in batches."""
        return self.same_in_batches_of is None and self.gap >= self.allowed


@dataclass(frozen=True, slots=True)
class GreedyResult:
    """The comparison of one answer with drafts to plain decoding's answer."""

    #: The prompt's number.
    prompt: int
    #: How drafts were made.
    way: WayName
    #: The number of answers that were generated at once.
    n_at_once: int
    #: The number of tokens of plain decoding's answer.
    n_tokens: int
    #: The number of drafted tokens.
    n_drafted: int
    #: The number of drafted tokens that were accepted.
    n_accepted: int
    #: The first difference between the texts; None if all tokens are equal.
    difference: Difference | None = None

    @property
    def is_defect(self) -> bool:
        """Whether the texts differ in a way that rounding in batches does not explain."""
        return self.difference is not None and self.difference.is_defect


def plain_texts(
    session: Session,
    prompts: Mapping[int, Prompt],
    interrupted: Callable[[], bool] = never,
    progress: StepProgress = lambda _done, _total: None,
) -> dict[int, list[int]]:
    """Return the tokens of plain decoding's answers by prompt number; fewer if interrupted."""
    max_tokens = session.options.generation.max_tokens
    limited_prompts = [(prompt, max_tokens) for prompt in prompts.values()]
    answers = _answers(session, limited_prompts, 1, interrupted, draft=False)
    texts: list[list[int]] = []
    for answer in answers:
        texts.append(tokens_of(answer.events))
        progress(len(texts), len(prompts))
    return dict(zip(prompts, texts, strict=False))


def check_greedy(
    session: Session,
    prompts: Mapping[int, Prompt],
    plain: Mapping[int, Sequence[int]] | None = None,
    *,
    way: WayName | None = None,
    n_at_once: int = 1,
    interrupted: Callable[[], bool] = never,
    progress: StepProgress = lambda _done, _total: None,
) -> Iterator[GreedyResult]:
    """Compare greedy answers with drafts to plain decoding's answers.

    Args:
        session: A session with a greedy sampler.
        prompts: The prompts by number. If there are fewer than `n_at_once`, some are repeated.
        plain: The tokens of plain decoding's answers by prompt number; None to generate them first.
        way: The name of the way to draft, for the results; None for the session's policy.
        n_at_once: The number of answers generated at once. If there are several, some get a lower
            token limit, so that later answers reuse their cache cells.
        interrupted: Whether to stop.
        progress: Receives the number of finished answers, and of all answers.

    Yields:
        A result for each answer, up to the interruption if there is one.

    Raises:
        SpecgenError: If an answer or its drafter fails.
    """
    calibrate(session, interrupted)
    if plain is None:
        plain = plain_texts(session, prompts, interrupted)
    numbers = list(islice(cycle(prompts), max(len(prompts), n_at_once)))
    limits = _token_limits(session.options.generation.max_tokens, len(numbers), n_at_once)
    limited_prompts = [(prompts[number], n) for number, n in zip(numbers, limits, strict=True)]
    progress(0, len(limited_prompts))
    answers = _answers(session, limited_prompts, n_at_once, interrupted)
    for n_done, request in enumerate(answers):
        if interrupted() or request.finished is None:
            return
        number = numbers[n_done]
        limit = limits[n_done]
        expected = list(plain[number])
        if limit >= 0:
            del expected[limit:]
        drafted = tokens_of(request.events)
        difference = None
        if drafted != expected:
            difference = _difference(
                session,
                request.prompt.tokens,
                expected,
                drafted,
                n_at_once,
            )
        yield GreedyResult(
            prompt=number,
            way=way or session.options.drafting.policy_in_use,
            n_at_once=n_at_once,
            n_tokens=len(expected),
            n_drafted=request.finished.n_drafted,
            n_accepted=request.finished.n_accepted,
            difference=difference,
        )
        progress(n_done + 1, len(limited_prompts))


def _token_limits(
    max_tokens: int,
    n_answers: int,
    n_at_once: int,
) -> list[int]:
    """Return the token limit of each answer, with fractions of `max_tokens` in turn.

    With three answers at once these are one third, two thirds, all, one third and so on. A negative
    `max_tokens` means no limit, for any of the answers.
    """
    if max_tokens < 1:
        return [max_tokens] * n_answers
    shares = [1 + n % n_at_once for n in range(n_answers)]
    return [max(1, max_tokens * share // n_at_once) for share in shares]


def _answers(
    session: Session,
    limited_prompts: Sequence[tuple[Prompt, int]],
    n_at_once: int,
    interrupted: Callable[[], bool],
    *,
    draft: bool = True,
) -> Iterator[Request]:
    """Answer prompts, and yield the finished requests in the order of the prompts.

    Args:
        session: The session.
        limited_prompts: The prompts, with their token limits.
        n_at_once: The number of answers generated at once.
        interrupted: Whether to stop.
        draft: Whether to draft.

    Raises:
        SpecgenError: If an answer or its drafter fails.
    """
    if not limited_prompts or interrupted():
        return
    n_ctx = session.context_size(max(len(prompt.tokens) for prompt, _ in limited_prompts))
    with Engine(
        session,
        n_parallel=n_at_once,
        n_ctx=n_ctx,
        interrupted=interrupted,
    ) as engine:
        options = session.options.generation
        requests = [
            engine.insert(prompt, generation=replace(options, max_tokens=max_tokens), draft=draft)
            for prompt, max_tokens in limited_prompts
        ]
        for request in requests:
            while not request.is_done:  # a failure may come without an event
                engine.step()
            _raise_failure(request)
            yield request


def _raise_failure(request: Request) -> None:
    """Raise the error of an answer or of its drafter, if there is one.

    An answer whose drafter failed goes on without drafts, and proves nothing about them.
    """
    if request.failure is not None:
        raise request.failure
    for event in request.events:
        # Only the notice of a failed drafter has a detail.
        if isinstance(event, NoticeEvent) and event.detail:
            raise BackendError(event.message)


def tokens_of(events: Iterable[Event]) -> list[int]:
    """Return the tokens that the events commit."""
    committed = (event for event in events if isinstance(event, CommittedEvent))
    return [piece.token_id for event in committed for piece in event.pieces]


def _difference(
    session: Session,
    prompt: Sequence[int],
    plain_tokens: Sequence[int],
    drafted_tokens: Sequence[int],
    n_at_once: int,
) -> Difference:
    """Find the first difference between two texts, and how much of it rounding explains.

    Args:
        session: The session that generated the texts.
        prompt: The prompt's tokens.
        plain_tokens: Plain decoding's answer.
        drafted_tokens: The answer with drafts, which differs from it.
        n_at_once: The number of answers that were generated at once.
    """
    position = common_prefix_length(plain_tokens, drafted_tokens)
    plain_text = _text_at(session, plain_tokens, position)
    drafted_text = _text_at(session, drafted_tokens, position)
    if position == min(len(plain_tokens), len(drafted_tokens)):
        # One text continues where the other ends: no choice of a token explains that.
        return Difference(position, plain_text, drafted_text, gap=math.inf, allowed=0.0)

    answer = plain_tokens[:position]
    state = TextState(prompt, session.settings.grammar)
    for token in answer:
        state.commit(token)
    # Compute the logits of the choice alone, and as the last row of batches such as rounds decode.
    *_, row_alone = plain_rows(session, prompt, answer)
    rows_in_batches = _rows_in_batches(session, prompt, answer, n_at_once)
    gap = _preference(
        session,
        state,
        row_alone,
        plain_tokens[position],
        drafted_tokens[position],
    )
    allowed = _gap_by_rounding(session, row_alone, [row for _, row in rows_in_batches])
    sampling = SamplingPipeline(session.settings.sampler, state)
    same_in_batches_of = _first_that_chooses(drafted_tokens[position], sampling, rows_in_batches)
    return Difference(
        position,
        plain_text,
        drafted_text,
        gap,
        allowed,
        same_in_batches_of,
    )


def _text_at(
    session: Session,
    tokens: Sequence[int],
    position: int,
) -> str:
    """Return the text of the token at a position; "" if the tokens end there."""
    if position >= len(tokens):
        return ""
    return session.target.vocabulary.token_text(tokens[position])


def _rows_in_batches(
    session: Session,
    prompt: Sequence[int],
    answer: Sequence[int],
    n_at_once: int,
) -> list[tuple[int, Logits]]:
    """Decode the last row of an answer in batches such as rounds decode.

    Returns:
        The size of each batch, in rows, and its last row of logits, float32[n_vocab].
    """
    rows: list[tuple[int, Logits]] = []
    for n_rows, n_outputs in _batches_of_rounds(session, n_at_once):
        *_, row = plain_rows(session, prompt, answer, n_rows, n_outputs)
        rows.append((n_rows, row))
    return rows


def _gap_by_rounding(
    session: Session,
    row_alone: Logits,
    rows_in_batches: Sequence[Logits],
) -> float:
    """Return the largest gap between two tokens that rounding in batches explains.

    Args:
        session: The session that decoded the rows.
        row_alone: float32[n_vocab], the logits that were computed for the row alone.
        rows_in_batches: The logits of the same row in batches.
    """
    movements = [movement(row, row_alone) for row in rows_in_batches]
    max_movement = max([0.0, *movements])
    if session.target.has_equal_rows and max_movement == 0.0:
        return 0.0
    return (SLACK * max_movement + ALWAYS_ALLOWED) * float(np.std(row_alone))


def _first_that_chooses(
    token: int,
    sampling: SamplingPipeline,
    rows_in_batches: Iterable[tuple[int, Logits]],
) -> int | None:
    """Return the size of the first batch whose row makes plain decoding choose a token, or None."""
    for n_rows, row in rows_in_batches:
        if sampling.distribution(row).mode == token:
            return n_rows
    return None


def _batches_of_rounds(session: Session, n_at_once: int) -> Iterator[tuple[int, int | None]]:
    """Yield the batches that rounds decode: the number of rows, and of rows with logits.

    The second number is None if all rows have logits.
    """
    max_rows = min(session.n_rows_max * n_at_once, _MAX_BATCH_ROWS)
    for n_rows in range(2, max_rows + 1):
        yield n_rows, None
    if session.target.has_recurrent_state or session.settings.grammar is not None:
        # Such rounds also decode batches with few logits, for which other kernels are used.
        yield max(2, max_rows), 1


def _preference(
    session: Session,
    state: TextState,
    logits: Logits,
    token: int,
    other: int,
) -> float:
    """Return by how many logits the target prefers a token to another one.

    It is infinite if the sampler or the grammar rules one of them out.
    """
    greedy = session.settings.sampler
    # At temperature 1 the logarithm of a ratio of probabilities is the difference of logits.
    sampler = Sampler(replace(greedy.options, temperature=1.0), greedy.breakers)
    distribution = SamplingPipeline(sampler, state).distribution(logits)
    token_prob = distribution.probability(token)
    other_prob = distribution.probability(other)
    if not token_prob or not other_prob:
        return math.inf
    return math.log(token_prob / other_prob)


def movement(one: Logits, other: Logits) -> float:
    """Return how far apart two rows of logits are.

    This is the standard deviation of their difference, relative to that of the `other` row.
    """
    spread = float(np.std(other, dtype=np.float64))
    return float(np.std(one - other, dtype=np.float64)) / spread if spread else 0.0


def plain_rows(
    session: Session,
    prompt: Sequence[int],
    answer: Sequence[int],
    n_rows: int = 1,
    n_outputs: int | None = None,
) -> Iterator[Logits]:
    """Decode a known answer, and yield the logits after the prompt and after each of its tokens.

    Args:
        session: The session whose target decodes.
        prompt: The prompt's tokens.
        answer: The answer's tokens.
        n_rows: The size of the answer's batches.
        n_outputs: The number of last rows of each batch whose logits are computed and yielded;
            None for all rows.

    Yields:
        float32[n_vocab] for each row.
    """
    tokens = (*prompt, *answer)
    n_prompt = len(prompt)
    n_ctx = session.context_size(len(tokens))
    n_slots = math.ceil(n_rows / session.n_rows_max)
    with session.contexts(n_ctx, drafts=False, n_slots=n_slots) as (target, _):
        prompt_ends = [*range(target.n_batch, n_prompt, target.n_batch), n_prompt]
        # The last batch has to have `n_rows` rows, so the first one gets the remainder.
        first_end = n_prompt + (len(answer) % n_rows or n_rows)
        answer_ends = range(first_end, len(tokens) + 1, n_rows)
        start = 0
        for end in (*prompt_ends, *answer_ends):
            if end < n_prompt:
                n_logits = 0
            elif end == n_prompt:
                n_logits = 1
            else:
                n_logits = n_outputs or n_rows
            logits = target.decode(Batch.of(tokens[start:end], start, n_logits))
            yield from logits.copy()
            start = end


# --- sampled


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


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in an answer where a token can be sampled."""

    #: The prompt's number.
    prompt: int
    #: The answer's tokens before the place.
    answer: tuple[int, ...]
    #: The target's distribution at the place.
    exact: Distribution
    #: How visible mistakes in verification would be there. This is the probability of the rarest
    #: of three events: the drafted token is accepted, it is rejected, and the target does not
    #: choose its likeliest token.
    visibility: float


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
        _raise_failure(request)
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
    most visible.

    Args:
        session: A session with a random sampler.
        prompts: The prompts by number.
        n_samples: The number of samples.
        level: The significance level: a p-value up to this counts as a defect.
        seed: The seed of the first sample.
        way: The name of the way to draft, for the result; None for the session's policy.
        interrupted: Whether to stop.
        progress: Receives the number of finished samples, and of all samples. The search in a
            prompt counts as `_SAMPLES_PER_SEARCH`.

    Returns:
        The result; None if nothing was drafted, or if interrupted.

    Raises:
        SpecgenError: If an answer or its drafter fails.
    """
    calibrate(session, interrupted)
    places: list[_Place] = []
    n_total = n_samples + _SAMPLES_PER_SEARCH * len(prompts)
    for n_searched, (number, prompt) in enumerate(prompts.items(), start=1):
        places += _places(session, number, prompt, seed, interrupted)
        progress(n_searched * _SAMPLES_PER_SEARCH, n_total)
    if not places or interrupted():
        return None
    place = max(places, key=lambda each: each.visibility)
    prompt = prompts[place.prompt]
    samples = _take_samples(
        session,
        prompt,
        place,
        n_samples,
        seed,
        interrupted,
        lambda n_done: progress(n_total - n_samples + n_done, n_total),
    )
    if samples is None:
        return None
    # `exact` only has the possible tokens, so all other samples are impossible ones.
    counts = [samples.counts[token] for token in place.exact.token_ids.tolist()]
    return SampledResult(
        prompt=place.prompt,
        way=way or session.options.drafting.policy_in_use,
        n_prompt=len(prompt.tokens),
        n_answer=len(place.answer),
        n_samples=n_samples,
        n_impossible=n_samples - sum(counts),
        n_drafted=samples.n_drafted,
        n_accepted=samples.n_accepted,
        level=level,
        test=g_test(np.array(counts, np.int64), place.exact.probs, n_samples),
    )


def _places(
    session: Session,
    number: int,
    prompt: Prompt,
    seed: int,
    interrupted: Callable[[], bool],
) -> Iterator[_Place]:
    """Answer a prompt, and yield the places where a token was drafted and sampled.

    Args:
        session: The session.
        number: The prompt's number.
        prompt: The prompt.
        seed: The seed of the answer.
        interrupted: Whether to stop.
    """
    answer, drafted_tokens = _drafted_answer(session, prompt, seed, interrupted)
    grammar = session.settings.grammar
    if grammar is not None:
        # The grammar begins with the answer. But `_take_samples` moves the answer's first tokens to
        # the prompt, except the last two before the place. So only the second token is sampled.
        drafted_tokens = {n: token for n, token in drafted_tokens.items() if n == 1}
    if not drafted_tokens or interrupted():
        return
    state = TextState(prompt.tokens, grammar)
    sampling = SamplingPipeline(session.settings.sampler, state)
    searched = answer[: max(drafted_tokens)]
    # The row at each position gives the token there, so the tokens before it are committed first.
    for position, row in enumerate(plain_rows(session, prompt.tokens, searched)):
        if position > 0:
            state.commit(answer[position - 1])
        # A token forced by the grammar is not sampled.
        if position in drafted_tokens and state.forced() is None:
            exact = sampling.distribution(row)
            accept_prob = exact.probability(drafted_tokens[position])
            max_prob = float(exact.probs.max())
            visibility = min(accept_prob, 1.0 - accept_prob, 1.0 - max_prob)
            yield _Place(number, tuple(answer[:position]), exact, visibility)


def _drafted_answer(
    session: Session,
    prompt: Prompt,
    seed: int,
    interrupted: Callable[[], bool],
) -> tuple[list[int], dict[int, int]]:
    """Generate an answer, and record what was drafted in it.

    Returns:
        The answer's tokens, and the first token of each draft by its position in the answer. A
        draft for the answer's first token is left out.

    Raises:
        SpecgenError: If the answer or its drafter fails.
    """
    n_ctx = session.context_size(len(prompt.tokens) + N_SEARCHED)
    options = replace(session.options.generation, max_tokens=N_SEARCHED, stop=())
    with Engine(session, n_ctx=n_ctx, interrupted=interrupted) as engine:
        request = engine.insert(prompt, generation=options)
        request.seed = seed
        for _ in engine.run():
            pass
    _raise_failure(request)
    answer: list[int] = []
    drafted_tokens: dict[int, int] = {}
    for event in request.events:
        if isinstance(event, DraftedEvent) and event.nodes and answer:
            drafted_tokens[len(answer)] = event.nodes[0].token_id
        answer += tokens_of([event])
    return answer, drafted_tokens


def _take_samples(
    session: Session,
    prompt: Prompt,
    place: _Place,
    n_samples: int,
    seed: int,
    interrupted: Callable[[], bool],
    progress: Callable[[int], None],
) -> _Samples | None:
    """Sample the token at a place `n_samples` times.

    Args:
        session: The session.
        prompt: The prompt of the place.
        place: The place.
        n_samples: The number of samples.
        seed: The seed of the first sample.
        interrupted: Whether to stop.
        progress: Receives the number of finished samples.

    Returns:
        The samples; None if interrupted.

    Raises:
        SpecgenError: If an answer or its drafter fails.
    """
    # Each sample is the start of an answer of its own. An answer's first token has no draft, and
    # decoder heads draft nothing for the second. So the two tokens before the place are forced as
    # the first two of the answer, and the tokens before those are appended to the prompt.
    forced = place.answer[-2:]
    extended_prompt = session.prompts.followed_by(prompt, place.answer[: -len(forced)])

    def force_start(_request: Request, sequence: AnswerState) -> None:
        sequence.sampling = _ForcedStart(session.settings.sampler, sequence.text_state, forced)

    # The limit leaves room for more tokens than are sampled, since the policy would draft less just
    # before the end of an answer.
    generation = replace(session.options.generation, max_tokens=N_SEARCHED, stop=())
    samples = _Samples()
    with Engine(
        session,
        n_parallel=1 if session.why_one_sequence else N_AT_ONCE,
        n_ctx=session.context_size(len(prompt.tokens) + N_SEARCHED, N_SEARCHED),
        interrupted=interrupted,
        prepare=force_start,
    ) as engine:
        for n_done in range(0, n_samples, _N_QUEUED_SAMPLES):
            n_queued = min(_N_QUEUED_SAMPLES, n_samples - n_done)
            requests = [
                engine.insert(extended_prompt, generation=generation) for _ in range(n_queued)
            ]
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
                return None
            for request in requests:
                samples.add(request, position=len(forced))
            progress(n_done + n_queued)
    return samples


# --- the report


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The settings and results of `specgen verify`."""

    #: The target's name.
    target: str
    #: The draft's name.
    draft: str
    #: How drafts were verified.
    verifier: str
    #: The maximum number of tokens of a draft.
    draft_max: int
    #: The sampler options of the sampled check.
    sampler: SamplerOptions
    #: Which of the two checks were made.
    check: CheckName
    #: The results of the greedy check.
    greedy: tuple[GreedyResult, ...]
    #: The results of the sampled check.
    sampled: tuple[SampledResult, ...]
    #: The numbers of the prompts that did not fit in the context.
    skipped: tuple[int, ...] = ()
    #: Whether the user interrupted the checks.
    is_interrupted: bool = False
    #: The kernels that were used: specgen's or llama.cpp's.
    kernels: str = ""
    #: Why rows depend on their batch; empty if they do not.
    unequal_rows: str = ""
    #: Sentences about how the drafts differed from those that the user asked for.
    instead: tuple[str, ...] = ()

    @property
    def _results(self) -> Sequence[GreedyResult | SampledResult]:
        return (*self.greedy, *self.sampled)

    @property
    def undrafted(self) -> list[str]:
        """The names of the checks that prove nothing, because nothing was drafted in them.

        Results of the "cost" way are left out, since that policy may decide not to draft.
        """
        results_by_check: dict[str, Sequence[GreedyResult | SampledResult]] = {}
        if self.check != "sampled":
            one_at_a_time = [result for result in self.greedy if result.n_at_once == 1]
            several_at_once = [result for result in self.greedy if result.n_at_once > 1]
            results_by_check["greedy"] = one_at_a_time
            if several_at_once:  # some models can only generate one answer at a time
                results_by_check["several answers at once"] = several_at_once
        if self.check != "greedy":
            results_by_check["sampled"] = self.sampled
        return [
            name
            for name, results in results_by_check.items()
            if not any(result.n_drafted for result in results if result.way != "cost")
        ]

    @property
    def verdict(self) -> CheckOutcome:
        """The outcome of all checks together."""
        if any(result.is_defect for result in self._results):
            return "defect"
        if self.is_interrupted:
            return "interrupted"
        return "nothing drafted" if self.undrafted else "lossless"

    def to_json_object(self) -> dict[str, Any]:
        """Return the report as `--json` prints it."""
        report: dict[str, Any] = {"verdict": self.verdict, **as_json(self)}
        records = (*report["greedy"], *report["sampled"])
        for record, result in zip(records, self._results, strict=True):
            record["is_defect"] = result.is_defect
        return report
