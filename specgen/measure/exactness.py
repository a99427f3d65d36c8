"""The two checks of `specgen verify`, of the user's own models.

Greedy: are the texts with and without drafts equal? Sampled: do draws of a token fit the target's
distribution?

Answers come from the engine, as everywhere else. With specgen's kernels a row of logits has the
same bits in a batch as alone, so the texts are equal and any difference is a defect. llama.cpp's
kernels may round a row differently in a batch. Where two tokens are almost equally likely, that can
change the choice (a *near-tie*), in plain decoding too.
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

#: How many answers are made at once. The third may get the cells that the first left, while the
#: second goes on.
N_AT_ONCE = 3
#: How many prompts are answered again, several at once.
_N_AGAIN = 6
#: Logits may move this many times further than in the batches that were tried.
SLACK = 4.0
#: The movement that a cache value rounded differently may cause, in standard deviations of a row.
ALWAYS_ALLOWED = 0.01
#: Where texts differ, plain decoding is repeated in batches of up to this many rows.
_LARGEST_BATCH = 16
#: How many of an answer's first tokens are searched for a place to draw from.
N_SEARCHED = 48
#: How many draws the engine gets at a time.
_N_QUEUED = 60
#: How many prompts are searched for a place to draw from.
_N_TRIED = 3
#: The probability of any false alarm of all sampled checks.
_FALSE_ALARM = 1e-4

#: What decides how much is drafted; "forced" drafts in every round.
WayName: TypeAlias = Literal[PolicyName, "forced"]
CheckName: TypeAlias = Literal["both", "greedy", "sampled"]
CheckOutcome: TypeAlias = Literal["lossless", "defect", "interrupted", "nothing drafted"]
#: A function that receives how many answers or draws of a check are done, and how many there are.
CheckProgress: TypeAlias = Callable[[int, int], None]


def ways_to_draft(drafting: DraftOptions) -> dict[WayName, DraftOptions]:
    """Return how `specgen run` drafts and, if costs decide, also a way that always drafts."""
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
    """Make the checks in each way to draft.

    Args:
        session: its sampler is greedy at first; its drafting and sampling are changed.
        prompts: the prompts by number.
        ways: the ways to draft; the last drafts most, so several answers at once are checked in it.
        check: which checks to make.
        sampling: the sampler of the sampled check.
        n_draws: how many draws to make in each way.
        progress: receives the name of a check, how much is done, and how much there is.
        interrupted: whether to stop; what was checked so far is returned.
    """
    greedy: list[GreedyResult] = []
    sampled: list[SampledResult] = []

    def progress_of(what: str, way: WayName) -> CheckProgress:
        how = "a draft in each round" if way == "forced" else f"--policy {way}"
        return partial(progress, f"{what}, {how}")

    if check != "sampled":
        progress("greedy, plain decoding", 0, 1)
        plain = plain_texts(session, prompts, interrupted)
        check_texts = partial(check_greedy, session, plain=plain, interrupted=interrupted)
        for way, drafting in ways.items():
            session.change_drafting(drafting)
            greedy += check_texts(prompts, way=way, progress=progress_of("greedy", way))
        if not session.why_one_sequence:
            last = [*ways][-1]
            shown = progress_of("greedy", last)
            some = {number: prompts[number] for number in evenly_chosen(prompts, _N_AGAIN)}
            greedy += check_texts(some, way=last, n_at_once=N_AT_ONCE, progress=shown)

    if check != "greedy" and not interrupted():
        session.change_sampling(sampling)
        for way, drafting in ways.items():
            session.change_drafting(drafting)
            result = check_sampled(
                session,
                dict(islice(prompts.items(), _N_TRIED)),
                n_draws,
                level=_FALSE_ALARM / len(ways),  # the Bonferroni correction
                seed=max(0, sampling.seed),
                way=way,
                interrupted=interrupted,
                progress=progress_of("sampled", way),
            )
            if result is not None:
                sampled.append(result)
    return tuple(greedy), tuple(sampled)


# --- greedy


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position where two texts differ."""

    position: int
    #: The tokens there, of plain decoding and with drafts; empty if that text ended.
    plain: str
    drafted: str
    #: How much plain decoding prefers its token, in logits.
    gap: float
    #: How much of the gap rounding in batches explains; 0 if rows are batch-invariant.
    allowed: float
    #: Plain decoding chooses the other token too, in batches of this many rows.
    same_in_batches_of: int | None = None

    @property
    def is_defect(self) -> bool:
        """Whether rounding in batches does not explain the difference."""
        return self.same_in_batches_of is None and self.gap >= self.allowed


@dataclass(frozen=True, slots=True)
class GreedyResult:
    """The comparison of one answer with plain decoding's."""

    prompt: int
    way: WayName
    n_at_once: int
    n_tokens: int
    n_drafted: int
    n_accepted: int
    #: None if all tokens are equal.
    difference: Difference | None = None

    @property
    def is_defect(self) -> bool:
        """Whether the texts differ, and rounding in batches does not explain it."""
        return self.difference is not None and self.difference.is_defect


def plain_texts(
    session: Session,
    prompts: Mapping[int, Prompt],
    interrupted: Callable[[], bool] = never,
) -> dict[int, list[int]]:
    """Return the tokens of plain decoding's answers, by the prompts' numbers."""
    max_tokens = session.options.generation.max_tokens
    asked = [(prompt, max_tokens) for prompt in prompts.values()]
    answers = _answers(session, asked, 1, interrupted, draft=False)
    # Fewer answers than prompts if interrupted.
    tokens = [tokens_of(answer.events) for answer in answers]
    return dict(zip(prompts, tokens, strict=False))


def check_greedy(
    session: Session,
    prompts: Mapping[int, Prompt],
    plain: Mapping[int, Sequence[int]] | None = None,
    *,
    way: WayName | None = None,
    n_at_once: int = 1,
    interrupted: Callable[[], bool] = never,
    progress: CheckProgress = lambda _done, _total: None,
) -> Iterator[GreedyResult]:
    """Compare greedy answers with plain decoding's.

    Args:
        session: opened with a greedy sampler.
        prompts: the prompts by number; few are repeated so that there are `n_at_once`.
        plain: plain decoding's answers, if they are known.
        way: the name of the way to draft.
        n_at_once: how many answers are generated at once. Some are then shorter, so that others
            begin in their cells.
        interrupted: whether to stop.
        progress: receives how many answers are done, and how many there are.

    Raises:
        SpecgenError: the first failure of an answer or a drafter.
    """
    calibrate(session, interrupted)
    if plain is None:
        plain = plain_texts(session, prompts, interrupted)
    numbers = list(islice(cycle(prompts), max(len(prompts), n_at_once)))
    lengths = _lengths(session.options.generation.max_tokens, len(numbers), n_at_once)
    asked = [(prompts[number], n) for number, n in zip(numbers, lengths, strict=True)]
    progress(0, len(asked))
    for n_done, request in enumerate(_answers(session, asked, n_at_once, interrupted)):
        if interrupted() or request.finished is None:
            return
        number = numbers[n_done]
        expected = list(plain[number])
        if lengths[n_done] >= 0:
            del expected[lengths[n_done] :]
        found = tokens_of(request.events)
        difference = None
        if found != expected:
            difference = _difference(session, request.prompt.tokens, expected, found, n_at_once)
        yield GreedyResult(
            prompt=number,
            way=way or session.options.drafting.policy_in_use,
            n_at_once=n_at_once,
            n_tokens=len(expected),
            n_drafted=request.finished.n_drafted,
            n_accepted=request.finished.n_accepted,
            difference=difference,
        )
        progress(n_done + 1, len(asked))


def _lengths(max_tokens: int, n_answers: int, n_at_once: int) -> list[int]:
    """Return the token limits of answers that are generated at once; -1 means no limit."""
    if max_tokens < 1:
        return [max_tokens] * n_answers
    shares = [1 + n % n_at_once for n in range(n_answers)]
    return [max(1, max_tokens * share // n_at_once) for share in shares]


def _answers(
    session: Session,
    asked: Sequence[tuple[Prompt, int]],
    n_at_once: int,
    interrupted: Callable[[], bool],
    *,
    draft: bool = True,
) -> Iterator[Request]:
    """Answer prompts with their token limits, and yield the requests in order as they finish."""
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
    """Raise the error that ended an answer, or its drafter: it proves nothing without drafts."""
    if request.failure is not None:
        raise request.failure
    for event in request.events:
        if isinstance(event, NoticeEvent) and event.detail:
            raise BackendError(event.message)


def tokens_of(events: Iterable[Event]) -> list[int]:
    """Return the tokens that events add to an answer."""
    committed = (event for event in events if isinstance(event, CommittedEvent))
    return [piece.token_id for event in committed for piece in event.pieces]


def _difference(
    session: Session,
    prompt: Sequence[int],
    expected: Sequence[int],
    found: Sequence[int],
    n_at_once: int,
) -> Difference:
    """Return where two texts differ, and whether rounding in batches explains it."""
    vocabulary = session.target.vocabulary
    position = common_prefix_length(expected, found)

    def token_text(tokens: Sequence[int]) -> str:
        return vocabulary.token_text(tokens[position]) if position < len(tokens) else ""

    plain = token_text(expected)
    drafted = token_text(found)
    if position == min(len(expected), len(found)):
        # One text continues where the other ends: no choice of a token explains that.
        return Difference(position, plain, drafted, gap=math.inf, allowed=0.0)

    answer = expected[:position]
    state = TextState(prompt, session.settings.grammar)
    for token in answer:
        state.commit(token)
    sampling = SamplingPipeline(session.settings.sampler, state)

    # Decode the row in batches, as rounds do.
    *_, alone = plain_rows(session, prompt, answer)
    moved = 0.0
    same_in = None
    for n_rows, n_outputs in _batches_of_rounds(session, n_at_once):
        *_, row = plain_rows(session, prompt, answer, n_rows, n_outputs)
        moved = max(moved, movement(row, alone))
        if same_in is None and sampling.distribution(row).mode == found[position]:
            same_in = n_rows

    allowed = (SLACK * moved + ALWAYS_ALLOWED) * float(np.std(alone))
    if session.target.has_equal_rows and moved == 0.0:
        allowed = 0.0
    gap = _preference(session, state, alone, expected[position], found[position])
    return Difference(position, plain, drafted, gap, allowed, same_in)


def _batches_of_rounds(session: Session, n_at_once: int) -> Iterator[tuple[int, int | None]]:
    """Yield the sizes of batches in which rounds decode, and how many logits they want of each.

    None means all logits.
    """
    largest = min(session.n_rows_max * n_at_once, _LARGEST_BATCH)
    for n_rows in range(2, largest + 1):
        yield n_rows, None
    if session.target.has_recurrent_state or session.settings.grammar is not None:
        # They also decode batches of which few logits are wanted, which other kernels compute.
        yield max(2, largest), 1


def _preference(
    session: Session,
    state: TextState,
    logits: Logits,
    token: int,
    other: int,
) -> float:
    """Return by how many logits the target prefers a token to another one."""
    greedy = session.settings.sampler
    sampler = Sampler(replace(greedy.options, temperature=1.0), greedy.breakers)
    distribution = SamplingPipeline(sampler, state).distribution(logits)
    token_prob = distribution.probability(token)
    other_prob = distribution.probability(other)
    if not token_prob or not other_prob:
        return math.inf
    return math.log(token_prob / other_prob)


def movement(one: Logits, other: Logits) -> float:
    """Return how far two rows are apart.

    It is the standard deviation of their differences, relative to that of the `other` row.
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
    """Yield the logits after the prompt, and after each token of the answer.

    Args:
        session: whose target decodes.
        prompt: the prompt's tokens.
        answer: the answer's tokens.
        n_rows: the size of the batches in which the answer is decoded.
        n_outputs: the number of logits wanted of each batch, if not all; the others are missing.
    """
    tokens = (*prompt, *answer)
    n_prompt = len(prompt)
    n_ctx = session.context_size(len(tokens))
    n_slots = math.ceil(n_rows / session.n_rows_max)
    with session.contexts(n_ctx, drafts=False, n_slots=n_slots) as (target, _):
        prompt_ends = [*range(target.n_batch, n_prompt, target.n_batch), n_prompt]
        # The answer's first batch may be short, so that the last one is not.
        first_end = n_prompt + (len(answer) % n_rows or n_rows)
        answer_ends = range(first_end, len(tokens) + 1, n_rows)
        start = 0
        for end in (*prompt_ends, *answer_ends):
            if end < n_prompt:
                n_wanted = 0
            elif end == n_prompt:
                n_wanted = 1
            else:
                n_wanted = n_outputs or n_rows
            logits = target.decode(Batch.of(tokens[start:end], start, n_wanted))
            yield from logits.copy()
            start = end


# --- sampled


@dataclass(frozen=True, slots=True)
class SampledResult:
    """The test of draws of one token."""

    prompt: int
    way: WayName
    #: The number of tokens of the prompt and of the answer before the drawn one.
    n_prompt: int
    n_answer: int
    n_draws: int
    #: Draws of tokens to which the target gives probability 0.
    n_impossible: int
    n_drafted: int
    n_accepted: int
    #: The largest p-value of a defect.
    level: float
    test: GTest

    @property
    def is_defect(self) -> bool:
        """Whether the draws do not fit the target's distribution."""
        return self.test.p_value <= self.level


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in an answer, and the exact distribution there."""

    prompt: int
    #: The answer's tokens before it.
    answer: tuple[int, ...]
    exact: Distribution
    #: The smallest probability that the drafted token is accepted, that it is rejected, and that
    #: the target does not choose its likeliest token. Where it is small, mistakes are invisible.
    chance: float


@dataclass(slots=True)
class _Draws:
    """The tokens drawn at one place, and how they were drafted."""

    counts: Counter[int] = field(default_factory=Counter)
    n_drafted: int = 0
    n_accepted: int = 0

    def add(self, request: Request, position: int) -> None:
        """Add the token at a position of an answer."""
        _check_drafting(request)
        assert request.finished is not None
        self.counts[tokens_of(request.events)[position]] += 1
        self.n_drafted += request.finished.n_drafted
        self.n_accepted += request.finished.n_accepted


class _ForcedStart(SamplingPipeline):
    """A sampling pipeline with which the answer begins with given tokens."""

    def __init__(self, sampler: Sampler, state: TextState, forced: Sequence[int]) -> None:
        super().__init__(sampler, state)
        self._n_prompt = len(state.tokens)
        self._forced = forced

    def distribution(self, logits: Logits, path: Sequence[int] = ()) -> Distribution:
        n_answer = len(self._state.tokens) + len(path) - self._n_prompt
        if n_answer < len(self._forced):
            return Distribution.certain(self._forced[n_answer])
        return super().distribution(logits, path)


def check_sampled(
    session: Session,
    prompts: Mapping[int, Prompt],
    n_draws: int,
    level: float,
    *,
    seed: int = 0,
    way: WayName | None = None,
    interrupted: Callable[[], bool] = never,
    progress: CheckProgress = lambda _done, _total: None,
) -> SampledResult | None:
    """Draw one token again and again, and compare with the target's exact distribution.

    Args:
        session: opened with a sampler that draws.
        prompts: prompts by number; the token is drawn in an answer to one of them, where mistakes
            would be most visible.
        n_draws: how many draws to make.
        level: the largest p-value of a defect.
        seed: of the first draw.
        way: the name of the way to draft.
        interrupted: whether to stop.
        progress: receives how many draws are done, and how many there are.

    Returns:
        The result; None if nothing was drafted, or if interrupted.
    """
    calibrate(session, interrupted)
    places: list[_Place] = []
    for number, prompt in prompts.items():
        places += _places(session, number, prompt, seed, interrupted)
    if not places or interrupted():
        return None
    place = max(places, key=lambda each: each.chance)
    prompt = prompts[place.prompt]
    draws = _draw(session, prompt, place, n_draws, seed, interrupted, progress)
    if draws is None:
        return None
    counts = [draws.counts[token] for token in place.exact.token_ids.tolist()]
    return SampledResult(
        prompt=place.prompt,
        way=way or session.options.drafting.policy_in_use,
        n_prompt=len(prompt.tokens),
        n_answer=len(place.answer),
        n_draws=n_draws,
        n_impossible=n_draws - sum(counts),
        n_drafted=draws.n_drafted,
        n_accepted=draws.n_accepted,
        level=level,
        test=g_test(np.array(counts, np.int64), place.exact.probs, n_draws),
    )


def _places(
    session: Session,
    number: int,
    prompt: Prompt,
    seed: int,
    interrupted: Callable[[], bool],
) -> Iterator[_Place]:
    """Answer a prompt, and yield the places where a token was drafted and drawn."""
    answer, drafted = _drafted_answer(session, prompt, seed, interrupted)
    grammar = session.settings.grammar
    if grammar is not None:
        # The grammar of a draw starts after the forced tokens, of which there can be only one then.
        drafted = {n: token for n, token in drafted.items() if n == 1}
    if not drafted or interrupted():
        return
    state = TextState(prompt.tokens, grammar)
    sampling = SamplingPipeline(session.settings.sampler, state)
    searched = answer[: max(drafted)]
    for n, row in enumerate(plain_rows(session, prompt.tokens, searched)):
        if n:
            state.commit(answer[n - 1])
        if n in drafted and state.forced() is None:
            exact = sampling.distribution(row)
            accepted = exact.probability(drafted[n])
            chance = min(accepted, 1.0 - accepted, 1.0 - float(exact.probs.max()))
            yield _Place(number, tuple(answer[:n]), exact, chance)


def _drafted_answer(
    session: Session,
    prompt: Prompt,
    seed: int,
    interrupted: Callable[[], bool],
) -> tuple[list[int], dict[int, int]]:
    """Return an answer, and the tokens drafted in it by their positions, but the first."""
    n_ctx = session.context_size(len(prompt.tokens) + N_SEARCHED)
    options = replace(session.options.generation, max_tokens=N_SEARCHED, stop=())
    with Engine(session, n_ctx=n_ctx, interrupted=interrupted) as engine:
        request = engine.insert(prompt, generation=options)
        request.seed = seed
        for _ in engine.run():
            pass
    _check_drafting(request)
    answer: list[int] = []
    drafted: dict[int, int] = {}
    for event in request.events:
        if isinstance(event, DraftedEvent) and event.nodes and answer:
            drafted[len(answer)] = event.nodes[0].token_id
        answer += tokens_of([event])
    return answer, drafted


def _draw(
    session: Session,
    prompt: Prompt,
    place: _Place,
    n_draws: int,
    seed: int,
    interrupted: Callable[[], bool],
    progress: CheckProgress,
) -> _Draws | None:
    """Draw the token at a place `n_draws` times; None if interrupted."""
    # An answer's first token has no draft, and decoder heads have none for the second. So each draw
    # is an answer that begins with the last two tokens before the place.
    forced = place.answer[-2:]
    begun = session.prompts.followed_by(prompt, place.answer[: -len(forced)])

    def force_start(_request: Request, sequence: AnswerState) -> None:
        sequence.sampling = _ForcedStart(session.settings.sampler, sequence.text_state, forced)

    # Costs decide as in an answer that continues, though a draw ends after its token.
    generation = replace(session.options.generation, max_tokens=N_SEARCHED, stop=())
    draws = _Draws()
    with Engine(
        session,
        n_parallel=1 if session.why_one_sequence else N_AT_ONCE,
        n_ctx=session.context_size(len(prompt.tokens) + N_SEARCHED, N_SEARCHED),
        interrupted=interrupted,
        prepare=force_start,
    ) as engine:
        for n_done in range(0, n_draws, _N_QUEUED):
            n_more = min(_N_QUEUED, n_draws - n_done)
            requests = [engine.insert(begun, generation=generation) for _ in range(n_more)]
            for request in requests:
                # This only makes the draws repeatable. How drafts are verified depends on whether
                # the user gave a seed.
                request.seed = seed + request.index
            for event in engine.run():
                if isinstance(event, CommittedEvent) and event.n_tokens > len(forced):
                    # The token is drawn.
                    engine.cancel(requests[event.sequence - n_done])
            if interrupted():
                return None
            for request in requests:
                draws.add(request, position=len(forced))
            progress(n_done + n_more, n_draws)
    return draws


# --- the report


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The settings and the results."""

    #: The names of the target and of the draft.
    target: str
    draft: str
    verifier: str
    #: The most tokens of a draft.
    draft_max: int
    #: The sampler of the sampled check.
    sampler: SamplerOptions
    check: CheckName
    greedy: tuple[GreedyResult, ...]
    sampled: tuple[SampledResult, ...]
    #: The numbers of the prompts that did not fit in the context.
    skipped: tuple[int, ...] = ()
    is_interrupted: bool = False
    #: What computes: specgen's kernels or llama.cpp's.
    kernels: str = ""
    #: Why rows depend on their batch; empty if they do not.
    unequal_rows: str = ""
    #: How drafts differed from those that were asked for.
    instead: tuple[str, ...] = ()

    @property
    def _results(self) -> Sequence[GreedyResult | SampledResult]:
        return (*self.greedy, *self.sampled)

    @property
    def undrafted(self) -> list[str]:
        """The checks that showed nothing, since nothing was drafted in them.

        Results of the "cost" way do not count, since costs may decide against drafts.
        """
        checks: dict[str, Sequence[GreedyResult | SampledResult]] = {}
        if self.check != "sampled":
            checks["greedy"] = [result for result in self.greedy if result.n_at_once == 1]
            at_once = [result for result in self.greedy if result.n_at_once > 1]
            if at_once:  # some models can only generate one answer at a time
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
        """The result of all checks in a word."""
        if any(result.is_defect for result in self._results):
            return "defect"
        if self.is_interrupted:
            return "interrupted"
        return "nothing drafted" if self.undrafted else "lossless"

    def to_json_object(self) -> dict[str, Any]:
        """Return the report as it is printed with --json."""
        report: dict[str, Any] = {"verdict": self.verdict, **as_json(self)}
        records = (*report["greedy"], *report["sampled"])
        for record, result in zip(records, self._results, strict=True):
            record["is_defect"] = result.is_defect
        return report
