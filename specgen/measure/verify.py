"""The two questions of `specgen verify`, asked of the user's own pair: are greedy texts equal, and do draws fit?

Answers come from the engine, as everywhere else. With specgen's kernels a row of logits has the same bits in a batch
as alone, so the texts are equal and any difference is a defect. llama.cpp's own code may round a row differently in
a batch: where two tokens are almost equally likely, that can turn the choice (a *near-tie*), in plain decoding too.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from specgen.errors import BackendError
from specgen.events import CommittedEvent, DraftedEvent, Event, NoticeEvent
from specgen.measure.goodness_of_fit import GTest, g_test
from specgen.method.backend import Backend, Batch
from specgen.method.draft import Distribution
from specgen.options import DraftOptions, PolicyName, SamplerOptions
from specgen.session.calibration import calibrate
from specgen.session.engine import Engine
from specgen.session.prompts import Prompt
from specgen.session.request import Request
from specgen.session.session import Session
from specgen.system.arrays import Logits
from specgen.text.sampling import Sampler
from specgen.text.sequence import Sequence as TextSequence
from specgen.text.text_state import Shaper, TextState

#: How many answers are made at once. The third may get the cells that the first left, while the second goes on.
N_AT_ONCE = 3
#: Draws are made after one of an answer's first tokens.
N_SEARCHED = 48
#: Requests that wait at once.
_N_QUEUED = 60
#: A row may move by this many times the largest movement that batches were found to cause, beside what is always
#: allowed: a value in an f16 cache that happens to round the other way moves all rows after it.
SLACK = 4.0
ALWAYS_ALLOWED = 0.01
#: The size of the largest batch that is measured.
_MAX_ROWS = 16

#: What decides how much is drafted; "forced" drafts in every round.
WayName: TypeAlias = Literal[PolicyName, "forced"]
Verdict: TypeAlias = Literal["lossless", "defect", "interrupted", "nothing drafted"]
Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to draft."""

    name: WayName
    drafting: DraftOptions


def ways_to_draft(drafting: DraftOptions) -> list[Way]:
    """Return how `specgen run` drafts with these options. If costs could decide that nothing is drafted,
    add a way that drafts in every round, however unsure the draft is."""
    ways = [Way(drafting.policy_in_use, drafting)]
    if drafting.is_by_cost:
        shortest, longest = drafting.ngrams_of
        forced = replace(
            drafting,
            policy="fixed",
            p_min=0.0,
            ngrams=drafting.adds_ngrams,
            ngram_min=shortest,
            ngram_max=longest,
        )
        ways.append(Way("forced", forced))
    return ways


# --- greedy --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position where the texts differ, counted from 0 in the answer's tokens.

    `plain` and `drafted` are the two tokens as text; one is empty if that text ended. `gap` is how much plain
    decoding prefers its own token, in logits behind the samplers; up to `allowed` rounding in batches explains it,
    but nothing does if rows are batch-invariant (`exact_rows`). `same_in_batches_of` is the smallest batch size in
    which plain decoding itself chooses the other token.
    """

    position: int
    plain: str
    drafted: str
    gap: float
    allowed: float
    exact_rows: bool = False
    same_in_batches_of: int | None = None

    @property
    def is_defect(self) -> bool:
        """Whether rounding in batches cannot explain the difference."""
        return self.exact_rows or (self.same_in_batches_of is None and self.gap > self.allowed)


@dataclass(frozen=True, slots=True)
class GreedyResult:
    """The result of one prompt, counted from 1; `n_at_once` answers were made at once in one cache. `n_tokens`
    tokens of plain decoding were compared; `difference` is None if all are equal."""

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
    session: Session, prompts: Sequence[Prompt], interrupted: Callable[[], bool] = lambda: False
) -> list[list[int]]:
    """Return the tokens of plain decoding's answers, each made alone; those that end a text too."""
    n = session.options.generation.max_tokens
    asked = [(prompt, n) for prompt in prompts]
    return [
        tokens_of(each.events) for each in _answers(session, asked, 1, interrupted, draft=False)
    ]


def check_greedy(
    session: Session,
    prompts: Sequence[Prompt],
    plain: Sequence[Sequence[int]] | None = None,
    *,
    way: Way | None = None,
    n_at_once: int = 1,
    interrupted: Callable[[], bool] = lambda: False,
    progress: Progress = lambda _done, _total: None,
) -> Iterator[GreedyResult]:
    """Compare answers with those of plain decoding (`plain_texts`), one by one or `n_at_once` at once.

    The temperature must be 0. From now on drafts are made as `way` says (None: as its options say). Of answers at
    once some are shorter, so that others begin in their cells, and prompts are repeated if there are fewer. The
    iterator ends early if `interrupted` returns True. Raise the first failure of an answer or its drafter.
    """
    way = way or Way(session.options.drafting.policy_in_use, session.options.drafting)
    session.change_drafting(way.drafting)
    calibrate(session, interrupted)
    plain = plain_texts(session, prompts, interrupted) if plain is None else plain
    n_most = session.options.generation.max_tokens
    numbers = [n % len(prompts) for n in range(max(len(prompts), n_at_once))] if prompts else []
    lengths = [
        max(min(1, n_most), n_most * (1 + n % n_at_once) // n_at_once) for n in range(len(numbers))
    ]
    asked = [(prompts[n], length) for n, length in zip(numbers, lengths, strict=True)]
    progress(0, len(asked))
    for n_done, request in enumerate(_answers(session, asked, n_at_once, interrupted)):
        if interrupted() or request.finished is None:
            return
        number = numbers[n_done]
        expected = list(plain[number])
        if lengths[n_done] >= 0:
            expected = expected[: lengths[n_done]]
        found = tokens_of(request.events)
        difference = None
        if found != expected:
            difference = _difference(session, request.prompt.tokens, expected, found, n_at_once)
        counts = request.finished.n_drafted, request.finished.n_accepted
        yield GreedyResult(number + 1, way.name, n_at_once, len(expected), *counts, difference)
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
    n_prompt = max(len(prompt.tokens) for prompt, _ in asked)
    with _engine(session, session.context_size(n_prompt), n_at_once, interrupted) as engine:
        options = session.options.generation
        waiting = [
            engine.insert(prompt, generation=replace(options, max_tokens=n), draft=draft)
            for prompt, n in asked
        ]
        n_done = 0
        for _ in engine.run():
            while n_done < len(waiting) and waiting[n_done].is_done:
                check_drafting(waiting[n_done])
                yield waiting[n_done]
                n_done += 1


def _engine(
    session: Session,
    n_ctx: int,
    n_parallel: int,
    interrupted: Callable[[], bool],
    prepare: Callable[[Request, TextSequence], None] = lambda _request, _sequence: None,
) -> Engine:
    engine = Engine(
        session, n_parallel=n_parallel, n_ctx=n_ctx, interrupted=interrupted, prepare=prepare
    )
    engine.take_notices()
    return engine


def check_drafting(request: Request) -> None:
    """Raise the error that ended an answer, or its drafter: an answer that continues without drafts proves
    nothing."""
    if request.failure is not None:
        raise request.failure
    for event in request.events:
        if isinstance(event, NoticeEvent):
            raise BackendError(event.message)


def tokens_of(events: Iterable[Event]) -> list[int]:
    """Return the tokens that events commit to the text, the one that ends it too."""
    return [
        piece.token_id
        for event in events
        if isinstance(event, CommittedEvent)
        for piece in event.pieces
    ]


def _difference(
    session: Session,
    prompt: Sequence[int],
    expected: Sequence[int],
    found: Sequence[int],
    n_at_once: int,
) -> Difference:
    pairs = enumerate(zip(expected, found, strict=False))
    n_both = min(len(expected), len(found))
    at = next((index for index, pair in pairs if pair[0] != pair[1]), n_both)
    plain, drafted = (
        session.target.vocabulary.token_text(tokens[at]) if at < len(tokens) else ""
        for tokens in (expected, found)
    )
    if at == n_both:  # one text continues where the other ends: no choice of a token explains that
        return Difference(at, plain, drafted, math.inf, 0.0)
    ours, theirs = expected[at], found[at]
    state = TextState(prompt, session.settings.grammar)
    for token in expected[:at]:
        state.commit(token)
    settings = session.settings
    shaper = Shaper(settings.sampler, state)
    alone = last_row(session, prompt, expected[:at])
    moved, same_in = 0.0, None
    for n_rows, n_outputs in _batches(session, n_at_once):
        row = last_row(session, prompt, expected[:at], n_rows, n_outputs)
        moved = max(moved, movement(row, alone))
        if same_in is None and shaper.distribution(row).mode == theirs:
            same_in = n_rows
    warm = Sampler(replace(settings.in_use, temperature=1.0), settings.breakers)
    likely = Shaper(warm, state).distribution(alone)
    p_ours, p_theirs = likely.probability(ours), likely.probability(theirs)
    gap = math.log(p_ours / p_theirs) if p_ours and p_theirs else math.inf
    allowed = (SLACK * moved + ALWAYS_ALLOWED) * float(np.std(alone))
    is_exact = session.target.has_equal_rows and moved == 0.0
    return Difference(at, plain, drafted, gap, allowed, is_exact, same_in)


def _batches(session: Session, n_at_once: int) -> list[tuple[int, int | None]]:
    """Return the batches that drafting decodes, as rows and wanted logits (None: all). Texts of recurrent models and
    of grammars are also decoded in batches of which few logits are wanted, which other kernels compute."""
    largest = min(session.n_rows_max * n_at_once, _MAX_ROWS)
    found: list[tuple[int, int | None]] = [(n_rows, None) for n_rows in range(2, largest + 1)]
    if session.target.has_recurrent_state or session.options.generation.grammar is not None:
        found.append((max(2, largest), 1))
    return found


def movement(one: Logits, other: Logits) -> float:
    """Return the distance of row `one` from row `other`, float32[n_vocab] each: the standard deviation of
    the differences of their logits, divided by that of the other's logits."""
    spread = float(np.std(other, dtype=np.float64))
    return float(np.std(one - other, dtype=np.float64)) / spread if spread else 0.0


def last_row(
    session: Session,
    prompt: Sequence[int],
    answer: Sequence[int],
    n_rows: int = 1,
    n_outputs: int | None = None,
) -> Logits:
    """Return the logits behind a text, float32[n_vocab], decoded without drafts, the answer in batches of `n_rows`
    of which `n_outputs` want logits (None: all)."""
    *_, last = plain_rows(session, prompt, answer, n_rows, n_outputs)
    return last


def plain_rows(
    session: Session,
    prompt: Sequence[int],
    answer: Sequence[int],
    n_rows: int = 1,
    n_outputs: int | None = None,
) -> Iterator[Logits]:
    """Yield the rows behind the prompt, and behind the tokens of the answer that want logits."""
    n_ctx = session.context_size(len(prompt) + len(answer))
    with session.contexts(n_ctx, drafts=False, n_slots=-(-n_rows // session.n_rows_max)) as (
        target,
        _,
    ):
        for start in range(0, len(prompt), target.n_batch):
            piece = prompt[start : start + target.n_batch]
            is_last = start + len(piece) == len(prompt)
            yield from decode(target, piece, start, 1 if is_last else 0)
        # The first batch may be short, the last one is whole.
        for end in range(len(answer) % n_rows or n_rows, len(answer) + 1, n_rows):
            piece = answer[max(0, end - n_rows) : end]
            position = len(prompt) + end - len(piece)
            yield from decode(target, piece, position, n_outputs or n_rows)


def decode(
    backend: Backend, tokens: Sequence[int], position: int, n_outputs: int
) -> Iterator[Logits]:
    """Decode tokens at a position in one batch, and yield copies of the last `n_outputs` rows."""
    batch = Batch()
    for index, token in enumerate(tokens):
        batch.add(token, position + index, (0,), index >= len(tokens) - n_outputs)
    yield from backend.decode(batch).copy()


# --- sampled -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SampledResult:
    """The draws at one place: after `n_prompt` tokens of the prompt (counted from 1) and `n_answer` tokens of an
    answer. `test` fails at p-values up to `level`, which is the probability of a false alarm."""

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
    def is_tested(self) -> bool:
        """Whether the test could fail: something was drafted, and there is more than one cell."""
        return self.n_drafted > 0 and self.test.n_cells > 1

    @property
    def is_defect(self) -> bool:
        return self.test.p_value <= self.level


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in an answer where drafts are judged, and the exact distribution of the next token there. `chance` is
    the smallest of three probabilities: that the drafted token is the target's, that it is not, and that the target
    does not choose its likeliest token. Where it is small, mistakes are invisible."""

    answer: tuple[int, ...]
    exact: Distribution
    chance: float


def check_sampled(
    session: Session,
    prompts: Sequence[Prompt],
    n_draws: int,
    level: float,
    *,
    seed: int = 0,
    way: Way | None = None,
    interrupted: Callable[[], bool] = lambda: False,
    progress: Progress = lambda _done, _total: None,
) -> SampledResult | None:
    """Draw the next token again and again at one place in an answer to one of the prompts, and compare with the
    target's exact distribution. It is the place where a wrong judgement of drafts would be most visible. None if
    nothing was drafted in the answers, or if interrupted. From now on drafts are made as `way` says."""
    way = way or Way(session.options.drafting.policy_in_use, session.options.drafting)
    session.change_drafting(way.drafting)
    calibrate(session, interrupted)
    found = [_find_place(session, each, seed, interrupted) for each in prompts]
    places = [(place, n) for n, place in enumerate(found) if place is not None]
    if not places or interrupted():
        return None
    place, number = max(places, key=lambda each: each[0].chance)
    prompt, (*before, first) = prompts[number], place.answer
    begun = session.prompts.followed_by(prompt, before)

    def force_first(_request: Request, sequence: TextSequence) -> None:
        # The first token of an answer is chosen without a draft: the one that was said before.
        sequence.shaper = _FirstForced(session.settings.sampler, sequence.state, first)

    n_ctx = session.context_size(len(prompt.tokens) + N_SEARCHED, N_SEARCHED)
    drawn: Counter[int] = Counter()
    n_drafted = n_accepted = 0
    n_at_once = 1 if session.why_one_sequence else N_AT_ONCE
    with _engine(session, n_ctx, n_at_once, interrupted, force_first) as engine:
        # Costs decide as in an answer that goes on.
        generation = replace(session.options.generation, max_tokens=N_SEARCHED, stop=())
        for n_done in range(0, n_draws, _N_QUEUED):
            requests = [
                engine.insert(begun, generation=generation)
                for _ in range(min(_N_QUEUED, n_draws - n_done))
            ]
            for request in requests:
                # Without a seed of the user's own, drafts are judged as without one; the draws repeat all the same.
                request.seed = seed + request.index
            for event in engine.run():
                # The token behind the first one ends the draw.
                if isinstance(event, CommittedEvent) and event.n_tokens > 1:
                    engine.cancel(requests[event.sequence - n_done])
            if interrupted():
                return None
            for request in requests:
                check_drafting(request)
                assert request.finished is not None
                drawn[tokens_of(request.events)[1]] += 1
                n_drafted += request.finished.n_drafted
                n_accepted += request.finished.n_accepted
            progress(n_done + len(requests), n_draws)
    counts = np.array([drawn[int(token)] for token in place.exact.token_ids], np.int64)
    return SampledResult(
        prompt=number + 1,
        way=way.name,
        n_prompt=len(prompt.tokens),
        n_answer=len(place.answer),
        n_draws=n_draws,
        n_impossible=n_draws - int(counts.sum()),
        n_drafted=n_drafted,
        n_accepted=n_accepted,
        level=level,
        test=g_test(counts, place.exact.probs, n_draws),
    )


class _FirstForced(Shaper):
    """A shaper with which the answer begins with a given token."""

    def __init__(self, sampler: Sampler, state: TextState, first: int) -> None:
        super().__init__(sampler, state)
        self._n_prompt = len(state.tokens)
        self._first = first

    def distribution(self, logits: Logits, path: abc.Sequence[int] = ()) -> Distribution:
        if len(self._state.tokens) == self._n_prompt and not path:
            return Distribution.certain(self._first)
        return super().distribution(logits, path)


def _find_place(
    session: Session, prompt: Prompt, seed: int, interrupted: Callable[[], bool]
) -> _Place | None:
    """Return the place in an answer where a wrong judgement of the draft would be most visible; None if nothing was
    drafted."""
    n_ctx = session.context_size(len(prompt.tokens) + N_SEARCHED)
    with _engine(session, n_ctx, 1, interrupted) as engine:
        options = replace(session.options.generation, max_tokens=N_SEARCHED, stop=())
        request = engine.insert(prompt, generation=options)
        request.seed = seed
        list(engine.run())
        check_drafting(request)
    answer: list[int] = []
    drafted: dict[int, int] = {}
    for event in request.events:
        if isinstance(event, DraftedEvent) and event.nodes and answer:
            drafted[len(answer)] = event.nodes[0].token_id
        answer += tokens_of([event])
    if (
        session.settings.grammar is not None
    ):  # it begins with the answer, so only one token can come before
        drafted = {n: token for n, token in drafted.items() if n == 1}
    if not drafted or interrupted():
        return None
    state = TextState(prompt.tokens, session.settings.grammar)
    shaper = Shaper(session.settings.sampler, state)
    best: _Place | None = None
    rows = plain_rows(session, prompt.tokens, answer[: max(drafted)])
    for n_answer, row in enumerate(rows):
        if n_answer:
            state.commit(answer[n_answer - 1])
        if n_answer not in drafted or state.forced() is not None:
            continue
        exact = shaper.distribution(row)
        accepted = exact.probability(drafted[n_answer])
        chance = min(accepted, 1.0 - accepted, 1.0 - float(exact.probs.max()))
        if best is None or chance > best.chance:
            best = _Place(tuple(answer[:n_answer]), exact, chance)
    return best


# --- the report ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The settings, and the result of each prompt and place. `skipped` are the numbers, from 1, of prompts that do
    not fit into the context. `kernels` names what computes the target, and
    `unequal_rows` why its rows depend on their batch although specgen's kernels compute."""

    target: str
    draft: str
    verifier: str
    draft_max: int
    #: The samplers of the sampled check; the greedy one has temperature 0.
    sampler: SamplerOptions
    check: Literal["both", "greedy", "sampled"]
    greedy: tuple[GreedyResult, ...]
    sampled: tuple[SampledResult, ...]
    skipped: tuple[int, ...] = ()
    is_interrupted: bool = False
    kernels: str = ""
    unequal_rows: str = ""

    @property
    def undrafted(self) -> list[str]:
        """The checks in which nothing was drafted, so that they showed nothing. Where costs decide, that is
        no fault: each check is made again with a draft in every round."""
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
    def verdict(self) -> Verdict:
        if any(each.is_defect for each in self.greedy) or any(p.is_defect for p in self.sampled):
            return "defect"
        if self.is_interrupted:
            return "interrupted"
        return "nothing drafted" if self.undrafted else "lossless"


def to_json_object(report: VerifyReport) -> dict[str, Any]:
    """Return the report as a JSON-ready dict: its fields and those of its results, with `verdict`, `is_defect` and
    `is_tested`; infinities become null."""
    whole: dict[str, Any] = {"verdict": report.verdict, **dataclasses.asdict(report)}
    for record, result in zip(whole["greedy"], report.greedy, strict=True):
        record["is_defect"] = result.is_defect
    for record, place in zip(whole["sampled"], report.sampled, strict=True):
        record |= {"is_tested": place.is_tested, "is_defect": place.is_defect}
        record["test"]["n_cells"] = place.test.n_cells
    found: dict[str, Any] = _finite(whole)
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
