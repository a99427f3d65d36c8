"""Is sampled text distributed as the target's own?

From one place in a text, a few tokens are generated thousands of times, by the very loop that
`specgen run` uses, and counted. What the target alone would say there is known exactly: its
distribution of the next token, and of the next after each of these, from which the joint
distribution of two and three follows. The draws must fit it.

Both models' logits are remembered (`MemoBackend`): the tokens repeat, so all but the first
few rounds cost microseconds, and the draws and the exact distribution rest on the same rows.
What a remembered row hides, a cache that holds what was refused, is looked for apart: rows
that rounds computed are compared with the same texts decoded without drafts.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from specgen.arrays import Logits
from specgen.backend.base import Backend, Batch
from specgen.backend.memo import MemoBackend
from specgen.draft import ROOT, Draft
from specgen.drafters import Drafter
from specgen.generation import Generation
from specgen.loop import Loop
from specgen.policy import Policy, RoundReport
from specgen.proof.bugs import Bug
from specgen.proof.rows import batches_move, is_moved, movement, plain_rows
from specgen.proof.statistics import (
    Cells,
    Distance,
    GTest,
    detectable_deviation,
    draws_needed,
    g_test,
    n_cells_tested,
    total_variation,
)
from specgen.proof.told import check_drafting, tokens_told
from specgen.sampling import Distribution
from specgen.session import Session
from specgen.state import Mark, RememberingShaper, Shaper, TextState
from specgen.tally import Tally
from specgen.verify import Target, Verdict, Verifier

#: Memory for the rows of each model.
_N_BYTES_MAX = 2**29
#: Prefixes less likely than this are not followed further: each costs a decode.
_MIN_PREFIX = 0.004
_MAX_PREFIXES = 300
#: Outcomes less likely than this are told apart only by what they begin with.
_MIN_OUTCOME = 1e-4
#: In an outcome: any of the tokens that are too unlikely to be told apart.
_ANY = -1
#: Draws before the counted ones, in which rounds fill the memory with their rows.
_N_PILOT = 200
#: Tokens of an answer in which to look for a place that tells much.
_N_SEARCHED = 48
#: Drawn texts whose rows are compared with those of plain decoding; each costs two more
#: decodes of the prompt.
_N_COMPARED = 3


@dataclass(frozen=True, slots=True)
class SampledPlan:
    """How sure the answer is to be.

    `depth`: tokens that are drawn and tested jointly. `deviation`: a total variation distance
    that is found with probability `power` at least, whatever its form; it decides the number
    of draws, unless `n_draws` does. `level`: the chance that a test fails although nothing is
    wrong, for each of the `depth` tests at each place.
    """

    depth: int = 3
    deviation: float = 0.08
    power: float = 0.99
    level: float = 1e-5
    n_draws: int | None = None


@dataclass(frozen=True, slots=True)
class DepthResult:
    """The joint distribution of the next `n_tokens` tokens: the test and the distance."""

    n_tokens: int
    test: GTest
    distance: Distance
    #: The total variation distance that these draws would have shown with the plan's power.
    detectable: float


@dataclass(frozen=True, slots=True)
class RowsResult:
    """How far `n_rows` rows of logits that rounds computed are from those of plain decoding, one
    token at a time: the largest movement, beside the largest that batches alone make (see
    `specgen.proof.rows`)."""

    n_rows: int
    moved_by: float
    batches_move: float

    @property
    def is_defect(self) -> bool:
        return is_moved(self.moved_by, self.batches_move)


@dataclass(frozen=True, slots=True)
class SampledResult:
    """One place. `prompt`, `n_prompt` and `n_answer` say where: in an answer to which prompt,
    counted from 1, and after so many tokens of the prompt and of the answer."""

    prompt: int
    n_prompt: int
    n_answer: int
    n_draws: int
    n_impossible: int
    n_rounds: int
    n_drafted: int
    n_accepted: int
    #: Decodes that the draws really needed.
    n_decodes: int
    level: float
    depths: tuple[DepthResult, ...]
    rows: RowsResult

    @property
    def fits(self) -> bool:
        """Whether every test passed."""
        return all(depth.test.p_value > self.level for depth in self.depths)

    @property
    def is_tested(self) -> bool:
        """Whether there was anything that could fail: a draft, and more than one cell."""
        return self.n_drafted > 0 and any(depth.test.n_cells > 1 for depth in self.depths)

    @property
    def is_defect(self) -> bool:
        return not self.fits or self.rows.is_defect


def room(plan: SampledPlan) -> int:
    """How many tokens of the context the check needs behind a prompt."""
    return _N_SEARCHED + plan.depth


def check_sampled(
    session: Session,
    prompt: Sequence[int],
    plan: SampledPlan,
    *,
    seed: int,
    number: int = 1,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    interrupted: Callable[[], bool] = lambda: False,
    bug: Bug | None = None,
) -> SampledResult | None:
    """Draw and test at one place of an answer to `prompt` (token ids).

    The place is the one, among the first tokens of an answer, where a mistake in judging drafts
    would show most: see `_find_place`. None if nothing was ever drafted there, or if interrupted.
    `number` is the prompt's, for the result. `progress` is told how many draws of how many are done. `bug` is built into the
    speculative side: the check must find it.
    """
    n_ctx = session.context_size(len(prompt) + room(plan))
    with session.contexts(n_ctx) as (target_cache, draft_cache):
        target = MemoBackend(target_cache, n_bytes_max=_N_BYTES_MAX)
        draft = None if draft_cache is None else MemoBackend(draft_cache, n_bytes_max=_N_BYTES_MAX)
        loop = Loop(target, session.clock, interrupted)
        generation = session.generation(prompt, n_ctx, draft, seed, make_shaper=RememberingShaper)
        place = _find_place(loop, generation)
        if place is None or interrupted():
            return None
        drawer = Drawer(loop, target, generation, place, plan.depth, bug)
        for _ in range(_N_PILOT):
            drawer.draw()
        generation.state.rewind(place)
        # From rounds, all of them: what decodes plainly comes after.
        drawn = [text[len(prompt) :] for text, _ in target.rows() if len(text) > place.n_tokens]
        # A shaper of its own: that of the draws remembers what they saw, right or wrong.
        shaper = session.shaper(generation.state)
        exact = Exact(target, shaper, generation.state, plan.depth)
        cells = exact.cells()
        by_depth = [_shorten(cells, n) for n in range(1, plan.depth + 1)]
        # Pooling may leave a deeper test fewer cells than one before it.
        n_draws = plan.n_draws or max(_n_draws(shorter, plan) for shorter in by_depth)
        outcomes: Counter[tuple[int, ...]] = Counter()
        for done in range(n_draws):
            outcomes[exact.cell(drawer.draw())] += 1
            if done % 256 == 0:
                progress(done, n_draws)
                if interrupted():
                    return None
        progress(n_draws, n_draws)
        generation.state.rewind(place)
        depths = [_test(shorter, outcomes, n, plan) for n, shorter in enumerate(by_depth, 1)]
        n_impossible = n_draws - sum(
            count for outcome, count in outcomes.items() if cells.find(outcome) is not None
        )
        return SampledResult(
            prompt=number,
            n_prompt=len(prompt),
            n_answer=place.n_tokens - len(prompt),
            n_draws=n_draws,
            n_impossible=n_impossible,
            n_rounds=drawer.tally.n_rounds,
            n_drafted=drawer.tally.n_drafted,
            n_accepted=drawer.tally.n_accepted,
            n_decodes=target.n_decodes,
            level=plan.level,
            depths=tuple(depths),
            rows=_compare_rows(session, n_ctx, target, prompt, drawn),
        )


# --- where to draw --------------------------------------------------------------------------


class _Scout:
    """A verifier that first looks how much a mistake would show in the round."""

    def __init__(self, inner: Verifier) -> None:
        self._inner = inner
        #: Of the last round: how likely the draft's first token is accepted, or refused, how
        #: likely the target is to say another than its favourite, and the same of what the
        #: token was drawn from; the least of these.
        self.chance = 0.0

    @property
    def wants_draws(self) -> bool:
        return self._inner.wants_draws

    def verify(self, draft: Draft, target: Target, rng: np.random.Generator) -> Verdict:
        children = draft.children(ROOT)
        if children:
            wanted, first = target(ROOT), children[0]
            drawn_from = draft.distributions[first] or Distribution.certain(draft.tokens[first])
            refused = distance(wanted, drawn_from)
            unsure = [wanted]
            if draft.distributions[first] is not None:
                unsure.append(drawn_from)
            self.chance = min(
                refused, 1.0 - refused, *(1.0 - float(each.probs.max()) for each in unsure)
            )
        return self._inner.verify(draft, target, rng)


def _find_place(loop: Loop, generation: Generation) -> Mark | None:
    """The place before the round in which a mistake in judging drafts would show most.

    Nothing shows where the target is certain, where all drafts are accepted, or none. So it
    is the place where the least of these is largest: the chances that the first drafted token
    is accepted, that it is refused, that the target does not say its favourite token, and that
    a drawn draft is not the draft model's favourite.
    """
    scout = _Scout(generation.verifier)
    answering = replace(
        generation,
        verifier=scout,
        options=replace(generation.options, max_tokens=_N_SEARCHED, stop=()),
    )
    best: Mark | None = None
    best_chance = -1.0
    loop.start(answering)
    while not answering.is_finished:
        place, n_drafted = answering.state.mark(), answering.tally.n_drafted
        check_drafting(loop.round([answering]))
        if answering.tally.n_drafted > n_drafted and scout.chance > best_chance:
            best, best_chance = place, scout.chance
    return best


# --- what the target says -------------------------------------------------------------------


class Exact:
    """The target's joint distribution of the next `depth` tokens after a text.

    Prefixes are followed in the order of their probability; those that are too unlikely stay
    whole, a cell each. So are, after each prefix, the tokens that are too unlikely: with a
    vocabulary that no sampler truncates there would be millions of cells.
    """

    def __init__(self, target: MemoBackend, shaper: Shaper, state: TextState, depth: int) -> None:
        self._target = target
        self._shaper = shaper
        self._state = state
        self._depth = depth
        self._text = list(state.tokens)
        self._n_followed = 0
        #: By prefix, a bit for each token: whether it shares the cell of the unlikely ones.
        self._unlikely: dict[tuple[int, ...], npt.NDArray[np.uint8]] = {}

    def cells(self) -> Cells:
        """The outcomes and their probabilities."""
        is_end = self._target.vocabulary.is_end
        found: dict[tuple[int, ...], float] = {}
        open_prefixes: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
        while open_prefixes:
            negative, prefix = heapq.heappop(open_prefixes)
            prob = -negative
            is_whole = len(prefix) == self._depth or (prefix and is_end(prefix[-1]))
            too_many = prob < _MIN_PREFIX or self._n_followed >= _MAX_PREFIXES
            if is_whole or (prefix and too_many):
                found[prefix] = prob
                continue
            step = self._after(prefix)
            likely = step.probs * prob >= _MIN_OUTCOME
            for token, p in zip(
                step.token_ids[likely].tolist(), step.probs[likely].tolist(), strict=True
            ):
                heapq.heappush(open_prefixes, (-prob * p, (*prefix, token)))
            if not likely.all():
                unlikely = np.zeros(self._target.n_vocab, np.bool_)
                unlikely[step.token_ids[~likely]] = True
                self._unlikely[prefix] = np.packbits(unlikely)
                found[(*prefix, _ANY)] = prob * float(step.probs[~likely].sum())
        return Cells.of(found)

    def cell(self, outcome: tuple[int, ...]) -> tuple[int, ...]:
        """A drawn outcome as the cells have it."""
        for length, token in enumerate(outcome):
            bits = self._unlikely.get(outcome[:length])
            if bits is not None and bits[token >> 3] >> (7 - (token & 7)) & 1:
                return (*outcome[:length], _ANY)
        return outcome

    def _after(self, prefix: tuple[int, ...]) -> Distribution:
        grammar = self._state.grammar(prefix)
        forced = grammar.forced() if grammar is not None else None
        if forced is not None:  # no row is needed
            return Distribution.certain(forced)
        self._n_followed += 1
        return self._shaper.distribution(self._row(prefix), prefix)

    def _row(self, prefix: tuple[int, ...]) -> Logits:
        """The target's logits after a prefix, float32[n_vocab]."""
        text = [*self._text, *prefix]
        known = self._target.remembered(text)
        if known is None:
            return _decode_after(self._target, text, len(self._text) - 1)
        return known.copy()


def _decode_after(backend: Backend, text: Sequence[int], n_kept: int) -> Logits:
    """Decode a text behind its first `n_kept` tokens, which are cached, in one batch; returns
    the last row, float32[n_vocab]."""
    backend.remove(0, n_kept)
    backend.checkpoint(0)
    batch = Batch()
    start = backend.length(0)
    for position in range(start, len(text)):
        batch.add(text[position], position, (0,), position + 1 == len(text))
    row: Logits = backend.decode(batch)[-1]
    return row


# --- what is drawn --------------------------------------------------------------------------


class _UpTo:
    """A policy whose drafts are cut at a length that each draw has anew."""

    def __init__(self, inner: Policy) -> None:
        self._inner = inner
        self.limit = 1

    @property
    def needs_probability(self) -> bool:
        return self._inner.needs_probability

    def room(self) -> int:
        return min(self.limit, self._inner.room())

    def wants_more(self, n_drafted: int, top_probability: float) -> bool:
        return self._inner.wants_more(n_drafted, top_probability)

    def admits(self, draft: Draft) -> bool:
        return self._inner.admits(draft)

    def observe(self, report: RoundReport) -> None:
        self._inner.observe(report)


class Drawer:
    """Generates the next few tokens after a place, again and again.

    Drafts are of at most one token in one draw, two in the next, and so on in turn: the token
    after a wholly accepted draft, which is none of the draft's, then is among those that are
    tested, whatever the longest draft.
    """

    def __init__(
        self,
        loop: Loop,
        target: Backend,
        generation: Generation,
        place: Mark,
        depth: int,
        bug: Bug | None,
    ) -> None:
        self._loop = loop
        self._target = target
        self._place = place
        self._depth = depth
        self._loses_bonus = bug is not None and bug.loses_bonus
        self._policy = _UpTo(generation.policy)
        self._n_lengths = max(1, min(depth, generation.policy.room()))
        self._generation = replace(
            generation,
            policy=self._policy,
            # Room for whole drafts to the last.
            options=replace(generation.options, max_tokens=2 * depth + 2, stop=()),
        )
        if bug is not None:
            bug.plant(self._generation)
        #: Counts over all draws.
        self.tally = Tally()

    def draw(self) -> tuple[int, ...]:
        """The tokens of one draw; fewer than `depth` if the text ended."""
        place = self._place
        self._policy.limit = 1 + self._policy.limit % self._n_lengths
        self._generation.state.rewind(place)
        self._target.remove(0, place.n_tokens - 1)
        drafter: Drafter | None = self._generation.drafter
        if drafter is not None:
            drafter.rewind(place.n_tokens)
        once = replace(self._generation, tally=Tally(), finish_reason=None)
        told: list[int] = []
        while len(told) < self._depth and not once.is_finished:
            events = self._loop.round([once])
            check_drafting(events)
            told += tokens_told(events, loses_bonus=self._loses_bonus)
        self.tally.n_rounds += once.tally.n_rounds
        self.tally.n_drafted += once.tally.n_drafted
        self.tally.n_accepted += once.tally.n_accepted
        return tuple(told[: self._depth])


# --- the comparison -------------------------------------------------------------------------


def _shorten(cells: Cells, n_tokens: int) -> Cells:
    """The same distribution, of the first `n_tokens` tokens only."""
    shorter: dict[tuple[int, ...], float] = {}
    for outcome, prob in zip(cells.outcomes, cells.probs.tolist(), strict=True):
        shorter[outcome[:n_tokens]] = shorter.get(outcome[:n_tokens], 0.0) + prob
    return Cells.of(shorter)


def _n_draws(cells: Cells, plan: SampledPlan) -> int:
    """As many as the plan's deviation asks for. More draws leave more cells after pooling, and
    more cells need more draws, until there are no more."""
    n = 0
    while True:
        n_cells = max(2, n_cells_tested(cells.probs, max(1000, n)))
        n_needed = draws_needed(plan.deviation, plan.level, plan.power, n_cells)
        if n_needed <= n:
            return n
        n = n_needed


def _test(
    cells: Cells, outcomes: Counter[tuple[int, ...]], n_tokens: int, plan: SampledPlan
) -> DepthResult:
    counts = cells.count(
        outcome[:n_tokens] for outcome, count in outcomes.items() for _ in range(count)
    )
    test = g_test(counts.per_cell, cells.probs, counts.n_draws)
    return DepthResult(
        n_tokens=n_tokens,
        test=test,
        distance=total_variation(counts.per_cell, cells.probs, counts.n_draws),
        detectable=detectable_deviation(counts.n_draws, plan.level, plan.power, test.n_cells),
    )


def _compare_rows(
    session: Session,
    n_ctx: int,
    target: MemoBackend,
    prompt: Sequence[int],
    drawn: Sequence[tuple[int, ...]],
) -> RowsResult:
    """Compare remembered rows with those of plain decoding, along a few of the `drawn` answers;
    none of those is decoded in a cache from which anything was dropped."""
    beginnings = {text[:-1] for text in drawn}
    whole = [text for text in drawn if text not in beginnings]
    n_rows, moved_by, by_batches = 0, 0.0, 0.0
    for text in whole[:: max(1, len(whole) // _N_COMPARED)][:_N_COMPARED]:
        plain = {
            n_before - len(prompt): row.copy()
            for n_before, row in plain_rows(session, n_ctx, prompt, text, 1)
        }
        by_batches = max(by_batches, batches_move(session, n_ctx, prompt, text, plain))
        for length, alone in plain.items():
            seen = target.remembered([*prompt, *text[:length]])
            if seen is not None:  # there is none before what a grammar forced
                n_rows += 1
                moved_by = max(moved_by, movement(seen, alone))
    return RowsResult(n_rows, moved_by, by_batches)


def distance(one: Distribution, other: Distribution) -> float:
    """The total variation distance of two distributions."""
    token_ids = np.union1d(one.token_ids, other.token_ids)
    probs = np.zeros((2, len(token_ids)))
    for row, distribution in zip(probs, (one, other), strict=True):
        row[token_ids.searchsorted(distribution.token_ids)] = distribution.probs
    return 0.5 * float(np.abs(probs[0] - probs[1]).sum())
