"""The two questions of `specgen verify`, asked of the user's own pair: are greedy texts equal, and
do draws fit?

Answers come from the engine, as everywhere else. With specgen's kernels a row of logits has the
same bits in a batch as alone, so the texts are equal and any difference is a defect. llama.cpp's
own code may round a row differently in a batch: where two tokens are almost equally likely, that
can turn the choice (a *near-tie*), in plain decoding too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from specgen.errors import BackendError
from specgen.events import CommittedEvent, DraftedEvent, Event, NoticeEvent
from specgen.measure.prompts import evenly_chosen
from specgen.method.answer_state import AnswerState
from specgen.method.backend import Batch
from specgen.method.sampling_pipeline import SamplingPipeline
from specgen.method.text_state import TextState
from specgen.options import DraftOptions, PolicyName, SamplerOptions
from specgen.session.calibration import calibrate
from specgen.session.engine import Engine
from specgen.session.prompts import Prompt
from specgen.session.request import Request
from specgen.session.session import Session
from specgen.system.arrays import Logits, ProbArray
from specgen.system.files import as_json
from specgen.text.sampling.chain import Sampler
from specgen.text.sampling.distribution import Distribution

#: How many answers are made at once. The third may get the cells that the first left, while the
#: second goes on.
N_AT_ONCE = 3
#: Draws are made after one of an answer's first tokens, so many at a time.
N_SEARCHED, _N_QUEUED = 48, 60
#: How many prompts are answered again, several at once, and how many are looked at for a place to
#: draw samples; the probability of any false alarm of sampled checks.
_N_SOME, _N_TRIED, _FALSE_ALARM = 6, 3, 1e-4
#: A row may move by this many times what batches caused, beside what a cache value rounded
#: otherwise causes.
SLACK, ALWAYS_ALLOWED = 4.0, 0.01

#: What decides how much is drafted; "forced" drafts in every round.
WayName: TypeAlias = Literal[PolicyName, "forced"]
CheckName: TypeAlias = Literal["both", "greedy", "sampled"]
CheckOutcome: TypeAlias = Literal["lossless", "defect", "interrupted", "nothing drafted"]
Progress: TypeAlias = Callable[[int, int], None]


def ways_to_draft(drafting: DraftOptions) -> dict[WayName, DraftOptions]:
    """Return how `specgen run` drafts, and, if costs could decide against it, a way that drafts
    every round.
    """
    ways: dict[WayName, DraftOptions] = {drafting.policy_in_use: drafting}
    if drafting.is_by_cost:
        shortest, longest = drafting.ngrams_of
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
    n_draws: int,
    progress: Callable[[str, int, int], None],
    interrupted: Callable[[], bool],
) -> tuple[tuple[GreedyResult, ...], tuple[SampledResult, ...]]:
    """Make the checks in each way to draft, those of several answers at once in the last, which
    drafts most.
    """
    greedy: list[GreedyResult] = []
    sampled: list[SampledResult] = []

    def each_way(what: str) -> Iterator[dict[str, Any]]:
        for way, drafting in ways.items():
            session.change_drafting(drafting)
            how = "a draft in each round" if way == "forced" else f"--policy {way}"
            shown = partial(progress, f"{what}, {how}")
            yield {"way": way, "interrupted": interrupted, "progress": shown}

    if check != "sampled":
        progress("greedy, plain decoding", 0, 1)
        plain = plain_texts(session, prompts, interrupted)
        for how in each_way("greedy"):
            greedy += check_greedy(session, prompts, plain, **how)
        if not session.why_one_sequence:
            some = {number: prompts[number] for number in evenly_chosen(prompts, _N_SOME)}
            greedy += check_greedy(session, some, plain, n_at_once=N_AT_ONCE, **how)
    if check != "greedy" and not interrupted():
        session.change_sampling(sampling)
        how = {"seed": max(0, sampling.seed), "level": _FALSE_ALARM / len(ways)}  # Bonferroni
        tried = dict(list(prompts.items())[:_N_TRIED])
        found = [
            check_sampled(session, tried, n_draws, **how, **each) for each in each_way("sampled")
        ]
        sampled += filter(None, found)
    return tuple(greedy), tuple(sampled)


# --- greedy --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position where texts differ, and the two tokens (empty: that text ended). `gap` is
    plain decoding's preference in logits, of which rounding in batches explains `allowed` (0 if
    rows are batch-invariant); in batches of `same_in_batches_of` plain decoding does the same.
    """

    position: int
    plain: str
    drafted: str
    gap: float
    allowed: float
    same_in_batches_of: int | None = None

    @property
    def is_defect(self) -> bool:
        return self.same_in_batches_of is None and self.gap >= self.allowed


@dataclass(frozen=True, slots=True)
class GreedyResult:
    """The result of one prompt, `n_at_once` answers at once; `difference` is None if all tokens are
    equal.
    """

    prompt: int
    way: WayName
    n_at_once: int
    n_tokens: int
    n_drafted: int
    n_accepted: int
    difference: Difference | None = None

    @property
    def is_defect(self) -> bool:
        return self.difference is not None and self.difference.is_defect


def plain_texts(
    session: Session, prompts: Mapping[int, Prompt], interrupted: Callable[[], bool] = lambda: False
) -> dict[int, list[int]]:
    n = session.options.generation.max_tokens
    asked = [(prompt, n) for prompt in prompts.values()]
    answers = _answers(session, asked, 1, interrupted, draft=False)
    return {number: tokens_of(each.events) for number, each in zip(prompts, answers, strict=False)}


def check_greedy(
    session: Session,
    prompts: Mapping[int, Prompt],
    plain: Mapping[int, Sequence[int]] | None = None,
    *,
    way: WayName | None = None,
    n_at_once: int = 1,
    interrupted: Callable[[], bool] = lambda: False,
    progress: Progress = lambda _done, _total: None,
) -> Iterator[GreedyResult]:
    """Compare greedy answers with plain decoding's, one by one or `n_at_once` at once: some are
    then shorter, so that others begin in their cells. Raise the first failure of an answer or a
    drafter.
    """
    calibrate(session, interrupted)
    plain = plain_texts(session, prompts, interrupted) if plain is None else plain
    n_most, n_answers = session.options.generation.max_tokens, max(len(prompts), n_at_once)
    numbers = list(islice(cycle(prompts), n_answers))
    lengths = [
        max(min(1, n_most), n_most * (1 + n % n_at_once) // n_at_once) for n in range(len(numbers))
    ]
    asked = [(prompts[number], n) for number, n in zip(numbers, lengths, strict=True)]
    progress(0, len(asked))
    for n_done, request in enumerate(_answers(session, asked, n_at_once, interrupted)):
        if interrupted() or request.finished is None:
            return
        number, length = numbers[n_done], lengths[n_done]
        expected = list(plain[number])[: length if length >= 0 else None]
        found = tokens_of(request.events)
        difference = None
        if found != expected:
            difference = _difference(session, request.prompt.tokens, expected, found, n_at_once)
        yield GreedyResult(
            number,
            way or session.options.drafting.policy_in_use,
            n_at_once,
            len(expected),
            request.finished.n_drafted,
            request.finished.n_accepted,
            difference,
        )
        progress(n_done + 1, len(asked))


def _answers(
    session: Session,
    asked: Sequence[tuple[Prompt, int]],
    n_at_once: int,
    interrupted: Callable[[], bool],
    *,
    draft: bool = True,
) -> Iterator[Request]:
    """Answer prompts with so many tokens each, and yield the requests in order once they are done."""
    if not asked or interrupted():
        return
    n_ctx = session.context_size(max(len(prompt.tokens) for prompt, _ in asked))
    with Engine(session, n_parallel=n_at_once, n_ctx=n_ctx, interrupted=interrupted) as engine:
        options = session.options.generation
        waiting = [
            engine.insert(prompt, generation=replace(options, max_tokens=n), draft=draft)
            for prompt, n in asked
        ]
        n_done = 0
        for _ in engine.run():
            while n_done < len(waiting) and waiting[n_done].is_done:
                _check_drafting(waiting[n_done])
                yield waiting[n_done]
                n_done += 1


def _check_drafting(request: Request) -> None:
    """Raise the error that ended an answer, or its drafter: without drafts an answer proves
    nothing.
    """
    if request.failure is not None:
        raise request.failure
    for event in request.events:
        if isinstance(event, NoticeEvent) and event.detail:
            raise BackendError(event.message)


def tokens_of(events: Iterable[Event]) -> list[int]:
    committed = (event for event in events if isinstance(event, CommittedEvent))
    return [piece.token_id for event in committed for piece in event.pieces]


def _difference(
    session: Session,
    prompt: Sequence[int],
    expected: Sequence[int],
    found: Sequence[int],
    n_at_once: int,
) -> Difference:
    n_both = min(len(expected), len(found))
    at = next((n for n in range(n_both) if expected[n] != found[n]), n_both)
    plain, drafted = (
        session.target.vocabulary.token_text(tokens[at]) if at < len(tokens) else ""
        for tokens in (expected, found)
    )
    if at == n_both:  # one text continues where the other ends: no choice of a token explains that
        return Difference(at, plain, drafted, math.inf, 0.0)
    settings = session.settings
    state = TextState(prompt, settings.grammar)
    for token in expected[:at]:
        state.commit(token)
    shaper = SamplingPipeline(settings.sampler, state)
    largest = min(session.n_rows_max * n_at_once, 16)  # rows of larger batches are not looked at
    batches: list[tuple[int, int | None]] = [(n_rows, None) for n_rows in range(2, largest + 1)]
    if session.target.has_recurrent_state or settings.grammar is not None:
        # They also decode batches of which few logits are wanted, which other kernels compute.
        batches.append((max(2, largest), 1))
    *_, alone = plain_rows(session, prompt, expected[:at])
    moved, same_in = 0.0, None
    for n_rows, n_outputs in batches:
        *_, row = plain_rows(session, prompt, expected[:at], n_rows, n_outputs)
        moved = max(moved, movement(row, alone))
        if same_in is None and shaper.distribution(row).mode == found[at]:
            same_in = n_rows
    own = settings.sampler
    warm = Sampler(replace(own.options, temperature=1.0), own.breakers)
    likely = SamplingPipeline(warm, state).distribution(alone)
    ours, theirs = likely.probability(expected[at]), likely.probability(found[at])
    gap = math.log(ours / theirs) if ours and theirs else math.inf
    allowed = (SLACK * moved + ALWAYS_ALLOWED) * float(np.std(alone))
    if session.target.has_equal_rows and moved == 0.0:
        allowed = 0.0
    return Difference(at, plain, drafted, gap, allowed, same_in)


def movement(one: Logits, other: Logits) -> float:
    """Return how far row `one` is from `other`: the deviation of their differences, relative to
    `other`'s own.
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
    """Yield the logits behind the prompt and each token of the answer, decoded in batches of
    `n_rows`.
    """
    tokens, n_prompt, start = (*prompt, *answer), len(prompt), 0
    n_ctx, n_slots = session.context_size(len(tokens)), -(-n_rows // session.n_rows_max)
    with session.contexts(n_ctx, drafts=False, n_slots=n_slots) as (target, _):
        # The answer's first batch may be short, the last one is whole.
        first = n_prompt + (len(answer) % n_rows or n_rows)
        ends = [*range(target.n_batch, n_prompt, target.n_batch), n_prompt]
        for end in (*ends, *range(first, len(tokens) + 1, n_rows)):
            n_wanted = (n_outputs or n_rows) if end > n_prompt else int(end == n_prompt)
            yield from target.decode(Batch.of(tokens[start:end], start, n_wanted)).copy()
            start = end


# --- sampled -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SampledResult:
    """The draws after `n_prompt` and `n_answer` tokens. `level` is the largest p-value of a defect."""

    prompt: int
    way: WayName
    n_prompt: int
    n_answer: int
    n_draws: int
    n_impossible: int
    n_drafted: int
    n_accepted: int
    level: float
    test: GTest

    @property
    def is_defect(self) -> bool:
        return self.test.p_value <= self.level


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in an answer, and the exact distribution there. `chance` is the smallest probability
    that the drafted token is the target's, is not, or that the target does not choose its
    likeliest: where it is small, mistakes are invisible.
    """

    prompt: int
    answer: tuple[int, ...]
    exact: Distribution
    chance: float


def check_sampled(
    session: Session,
    prompts: Mapping[int, Prompt],
    n_draws: int,
    level: float,
    *,
    seed: int = 0,
    way: WayName | None = None,
    interrupted: Callable[[], bool] = lambda: False,
    progress: Progress = lambda _done, _total: None,
) -> SampledResult | None:
    """Draw the next token again and again where a wrong judgement of drafts would be most visible,
    and compare with the target's exact distribution. None if nothing was drafted, or if
    interrupted.
    """
    calibrate(session, interrupted)
    places = [
        place
        for number, prompt in prompts.items()
        for place in _places(session, number, prompt, seed, interrupted)
    ]
    if not places or interrupted():
        return None
    place = max(places, key=lambda each: each.chance)
    # An answer's first token has no draft, and heads have none for the second: so these are forced.
    prompt, forced = prompts[place.prompt], place.answer[-2:]
    begun = session.prompts.followed_by(prompt, place.answer[: -len(forced)])

    def force_first(_request: Request, sequence: AnswerState) -> None:
        sequence.sampling = _FirstForced(session.settings.sampler, sequence.text_state, forced)

    drawn: Counter[int] = Counter()
    n_drafted = n_accepted = 0
    # Costs decide as in an answer that goes on.
    generation = replace(session.options.generation, max_tokens=N_SEARCHED, stop=())
    with Engine(
        session,
        n_parallel=1 if session.why_one_sequence else N_AT_ONCE,
        n_ctx=session.context_size(len(prompt.tokens) + N_SEARCHED, N_SEARCHED),
        interrupted=interrupted,
        prepare=force_first,
    ) as engine:
        for n_done in range(0, n_draws, _N_QUEUED):
            n_more = min(_N_QUEUED, n_draws - n_done)
            requests = [engine.insert(begun, generation=generation) for _ in range(n_more)]
            for request in requests:
                # Without a seed of the user's own, drafts are judged as without one; the draws
                # repeat all the same.
                request.seed = seed + request.index
            for event in engine.run():
                # The token behind the forced ones ends the draw.
                if isinstance(event, CommittedEvent) and event.n_tokens > len(forced):
                    engine.cancel(requests[event.sequence - n_done])
            if interrupted():
                return None
            for request in requests:
                _check_drafting(request)
                assert request.finished is not None
                drawn[tokens_of(request.events)[len(forced)]] += 1
                n_drafted += request.finished.n_drafted
                n_accepted += request.finished.n_accepted
            progress(n_done + len(requests), n_draws)
    counts = np.array([drawn[int(token)] for token in place.exact.token_ids], np.int64)
    return SampledResult(
        prompt=place.prompt,
        way=way or session.options.drafting.policy_in_use,
        n_prompt=len(prompt.tokens),
        n_answer=len(place.answer),
        n_draws=n_draws,
        n_impossible=n_draws - int(counts.sum()),
        n_drafted=n_drafted,
        n_accepted=n_accepted,
        level=level,
        test=g_test(counts, place.exact.probs, n_draws),
    )


class _FirstForced(SamplingPipeline):
    """A shaper with which the answer begins with given tokens."""

    def __init__(self, sampler: Sampler, state: TextState, forced: Sequence[int]) -> None:
        super().__init__(sampler, state)
        self._n_prompt = len(state.tokens)
        self._forced = forced

    def distribution(self, logits: Logits, path: Sequence[int] = ()) -> Distribution:
        n_said = len(self._state.tokens) + len(path) - self._n_prompt
        if n_said < len(self._forced):
            return Distribution.certain(self._forced[n_said])
        return super().distribution(logits, path)


def _places(
    session: Session, number: int, prompt: Prompt, seed: int, interrupted: Callable[[], bool]
) -> Iterator[_Place]:
    n_ctx = session.context_size(len(prompt.tokens) + N_SEARCHED)
    with Engine(session, n_ctx=n_ctx, interrupted=interrupted) as engine:
        options = replace(session.options.generation, max_tokens=N_SEARCHED, stop=())
        request = engine.insert(prompt, generation=options)
        request.seed = seed
        list(engine.run())
        _check_drafting(request)
    answer: list[int] = []
    drafted: dict[int, int] = {}
    for event in request.events:
        if isinstance(event, DraftedEvent) and event.nodes and answer:
            drafted[len(answer)] = event.nodes[0].token_id
        answer += tokens_of([event])
    grammar = session.settings.grammar
    if grammar is not None:  # it begins with the answer, so only one token can come before
        drafted = {n: token for n, token in drafted.items() if n == 1}
    if not drafted or interrupted():
        return
    state = TextState(prompt.tokens, grammar)
    shaper = SamplingPipeline(session.settings.sampler, state)
    for n, row in enumerate(plain_rows(session, prompt.tokens, answer[: max(drafted)])):
        if n:
            state.commit(answer[n - 1])
        if n in drafted and state.forced() is None:
            exact = shaper.distribution(row)
            accepted = exact.probability(drafted[n])
            chance = min(accepted, 1.0 - accepted, 1.0 - float(exact.probs.max()))
            yield _Place(number, tuple(answer[:n]), exact, chance)


# --- the test of the draws --------------------------------------------------------------------------

#: Cells with a smaller expected count are pooled.
MIN_EXPECTED = 20.0


@dataclass(frozen=True, slots=True)
class GTest:
    """2 Σ count·ln(count / expected) over cells, one of which pools rare ones, and the chance to
    exceed it.
    """

    statistic: float
    n_cells: int
    p_value: float
    n_pooled: int


def g_test(
    counts: npt.NDArray[np.int64],
    exact_probs: ProbArray,
    n_draws: int | None = None,
    *,
    min_expected: float = MIN_EXPECTED,
) -> GTest:
    """Test whether int64[n_cells] counts are draws from float64[n_cells] exact probabilities; draws
    in no cell are impossible. The chi-square distribution holds only for large expected counts:
    cells below `min_expected` are pooled, then the rarest others until the pool suffices (whatever
    the counts: that would bias the test), and the statistic is divided by Williams's correction
    (Biometrika 63, 1976, p. 33), 1 + (Σ 1/prob - 1) / (6 n (n_cells - 1)). The false-alarm rate is
    then at most 1.5 times the nominal one down to 1e-5. Raise `ValueError`.
    """
    n = int(counts.sum()) if n_draws is None else n_draws
    n_impossible, total = n - int(counts.sum()), float(exact_probs.sum())
    if not bool((exact_probs > 0.0).all()) or not abs(total - 1.0) <= 1e-6:
        raise ValueError(f"the exact probabilities must be positive and sum to 1, not to {total}")
    if len(counts) != len(exact_probs) or n < 1 or n_impossible < 0:
        raise ValueError(
            f"{counts.sum()} draws of {n} in {len(counts)} of {len(exact_probs)} cells"
        )
    probs, observed = exact_probs / total, counts.astype(np.float64)
    order = probs.argsort(kind="stable")
    n_pooled = int(np.count_nonzero(n * probs < min_expected))
    if n_pooled:
        enough = int((n * probs[order]).cumsum().searchsorted(min_expected)) + 1
        n_pooled = min(max(n_pooled, enough), len(probs))
        pool, kept = order[:n_pooled], order[n_pooled:]
        probs = np.append(probs[kept], probs[pool].sum())
        observed = np.append(observed[kept], observed[pool].sum())
    if n_impossible:
        return GTest(math.inf, len(probs), 0.0, n_pooled)
    if len(probs) == 1:
        return GTest(0.0, 1, 1.0, n_pooled)
    seen = observed > 0.0
    ratios = np.log(observed[seen] / (n * probs[seen]))
    # Rounding may leave a perfect fit a hair below zero.
    statistic, degrees = max(0.0, 2.0 * float(observed[seen] @ ratios)), len(probs) - 1
    correction = 1.0 + (float((1.0 / probs).sum()) - 1.0) / (6.0 * n * degrees)
    return GTest(statistic, len(probs), chi_square_tail(statistic / correction, degrees), n_pooled)


def chi_square_tail(x: float, degrees: int) -> float:
    """P(X >= x) of the chi-square distribution, as a finite sum (Abramowitz and Stegun, 26.4.4 and
    26.4.5).
    """
    if x <= 0.0:
        return 1.0
    first = math.erfc(math.sqrt(x / 2.0)) if degrees % 2 else 0.0
    powers = degrees % 2 / 2.0 + np.arange(degrees // 2, dtype=np.float64)
    log_gamma = np.array([math.lgamma(power + 1.0) for power in powers], np.float64)
    terms = np.exp(powers * math.log(x / 2.0) - x / 2.0 - log_gamma)
    return min(1.0, first + float(terms.sum()))


# --- the report ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The settings and results. `skipped` prompts did not fit; `unequal_rows` says why rows depend
    on batches, `instead` how drafts differed from those that were asked for.
    """

    target: str
    draft: str
    verifier: str
    draft_max: int
    sampler: SamplerOptions
    check: CheckName
    greedy: tuple[GreedyResult, ...]
    sampled: tuple[SampledResult, ...]
    skipped: tuple[int, ...] = ()
    is_interrupted: bool = False
    kernels: str = ""
    unequal_rows: str = ""
    instead: tuple[str, ...] = ()

    @property
    def _results(self) -> Sequence[GreedyResult | SampledResult]:
        return (*self.greedy, *self.sampled)

    @property
    def undrafted(self) -> list[str]:
        """The checks in which nothing was drafted, not counting "cost", which may decide so: they
        showed nothing.
        """
        checks: dict[str, Sequence[GreedyResult | SampledResult]] = {}
        if self.check != "sampled":
            checks["greedy"] = [result for result in self.greedy if result.n_at_once == 1]
            # Some models make one answer at a time only.
            if at_once := [result for result in self.greedy if result.n_at_once > 1]:
                checks["several answers at once"] = at_once
        if self.check != "greedy":
            checks["sampled"] = self.sampled
        return [
            name
            for name, results in checks.items()
            if not any(result.n_drafted for result in results if result.way != "cost")
        ]

    @property
    def verdict(self) -> CheckOutcome:
        if any(each.is_defect for each in self._results):
            return "defect"
        if self.is_interrupted:
            return "interrupted"
        return "nothing drafted" if self.undrafted else "lossless"

    def to_json_object(self) -> dict[str, Any]:
        whole: dict[str, Any] = {"verdict": self.verdict, **as_json(self)}
        records = (*whole["greedy"], *whole["sampled"])
        for record, result in zip(records, self._results, strict=True):
            record["is_defect"] = result.is_defect
        return whole
