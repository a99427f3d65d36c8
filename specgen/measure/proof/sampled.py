"""Does sampled text have the target's distribution?

From one position in a text, a few tokens are generated thousands of times, with the same loop as in
`specgen run`, and counted. The target's distribution there is known exactly: that of the next token, and
that of the token after each of these, which give the joint distribution of two and three tokens. The
draws must fit it.

The logits of both models are remembered (`MemoBackend`). Since the tokens repeat, all rounds except the
first few cost microseconds, and the draws and the exact distribution use the same rows. Remembered rows
would hide a cache that holds rejected tokens. A separate check looks for it: rows that rounds computed
are compared with rows of the same texts decoded without drafts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from specgen.llama import LlamaBackend
from specgen.llama.gemma4_assistant import AssistantContext
from specgen.measure.proof.drafting_plans import DraftingPlan, WayName
from specgen.measure.proof.drawing import N_SEARCHED, Drawer, find_place
from specgen.measure.proof.exact import Exact
from specgen.measure.proof.memo_backend import MemoBackend
from specgen.measure.proof.rows import batches_move, is_moved, movement, plain_rows
from specgen.measure.proof.statistics import (
    Cells,
    Distance,
    GTest,
    detectable_deviation,
    draws_needed,
    g_test,
    n_cells_tested,
    total_variation,
)
from specgen.method.backend import Backend
from specgen.session.answer_loop import AnswerLoop
from specgen.session.calibration import calibrate
from specgen.session.drafter_factory import DrafterFactory
from specgen.session.prompts import Prompt
from specgen.session.session import Session
from specgen.testing.bugs import Bug
from specgen.text.text_state import RememberingShaper, Shaper

#: The memory in bytes for the rows of each model.
_N_BYTES_MAX = 2**29
#: The number of draws before the counted ones; their rounds fill the memory with rows.
_N_PILOT = 200
#: The number of drawn texts whose rows are compared with those of plain decoding; each costs at least
#: three decodes of the prompt.
_N_COMPARED = 3


@dataclass(frozen=True, slots=True)
class SampledPlan:
    """The size and the power of the sampled check.

    `depth` is the number of tokens that are drawn and tested jointly. `deviation` is a total variation
    distance that is found with at least probability `power`, in any form; it determines the number of
    draws, unless `n_draws` is given. `level` is the probability that a test fails although nothing is
    wrong, for each of the `depth` tests at each position.
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
    #: The total variation distance that these draws find with the plan's power.
    detectable: float


@dataclass(frozen=True, slots=True)
class RowsResult:
    """The distance of `n_rows` rows of logits that rounds computed from those of plain decoding, one token
    at a time. `moved_by` is the largest movement, `batches_move` the largest that batches alone cause
    (see `specgen.measure.proof.rows`). With `exact_rows` (specgen's kernels) both must be 0."""

    n_rows: int
    moved_by: float
    batches_move: float
    exact_rows: bool = False

    @property
    def is_defect(self) -> bool:
        return is_moved(self.moved_by, self.batches_move, exact=self.exact_rows)


@dataclass(frozen=True, slots=True)
class SampledResult:
    """The result at one position: after `n_prompt` tokens of the prompt with number `prompt` (from 1) and
    `n_answer` tokens of the answer. `way` names what decided how much was drafted. `drafted_by` has the
    number of verified tokens that each drafter proposed."""

    prompt: int
    n_prompt: int
    n_answer: int
    n_draws: int
    n_impossible: int
    n_rounds: int
    n_drafted: int
    n_accepted: int
    #: Decodes of the target that were not answered from memory.
    n_decodes: int
    level: float
    depths: tuple[DepthResult, ...]
    rows: RowsResult
    way: WayName = "fixed"
    drafted_by: Mapping[str, int] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether every test passed."""
        return all(depth.test.p_value > self.level for depth in self.depths)

    @property
    def is_tested(self) -> bool:
        """Whether a test could fail: something was drafted, and there is more than one cell."""
        return self.n_drafted > 0 and any(depth.test.n_cells > 1 for depth in self.depths)

    @property
    def is_defect(self) -> bool:
        return not self.fits or self.rows.is_defect


def room(plan: SampledPlan) -> int:
    """Return how many tokens of the context the check needs after a prompt."""
    return N_SEARCHED + plan.depth


def check_sampled(
    loaded: Session,
    prompt: Prompt,
    plan: SampledPlan,
    *,
    seed: int,
    number: int = 1,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    interrupted: Callable[[], bool] = lambda: False,
    bug: Bug | None = None,
    way: DraftingPlan | None = None,
) -> SampledResult | None:
    """Draw and test at one position of an answer to `prompt`.

    The position is where, among the first tokens of an answer, a wrong verification would be most
    visible (see `find_place`). Return None if nothing was drafted there, or if interrupted. `number` is
    the number of the prompt, for the result. `progress` receives the number of draws that are done and
    of all draws. `bug` is planted in the speculative side: the check must find it. From now on the
    session drafts as `way` says (None: as its options say).
    """
    way = way or DraftingPlan(loaded.options.drafting)
    loaded.change_drafting(way.drafting)
    calibrate(loaded)
    n_prompt = len(prompt.tokens)
    n_ctx = loaded.context_size(n_prompt + room(plan))
    with (
        loaded.contexts(n_ctx) as (cache, caches),
    ):
        target = _remembering(loaded, cache, prompt)
        drafts: list[Backend] = []
        remembering = [target]
        reads_states = loaded.draft is not None and loaded.draft.reads in ("all states", "cache")
        for each in caches:
            if reads_states:  # its rows read states, and not the text alone
                drafts.append(each)
                if isinstance(each, AssistantContext):
                    each.before_decode = target.hold
            else:
                remembering.append(_remembering(loaded, each, prompt))
                drafts.append(remembering[-1])

        def clock() -> float:
            """Return seconds as if nothing were remembered: policies compare the time of decodes with the
            time of everything else."""
            return loaded.clock() + sum(each.saved_s for each in remembering)

        loop = AnswerLoop(target, clock, interrupted)
        generation = DrafterFactory(loaded).sequence(
            prompt,
            n_ctx,
            drafts,
            seed,
            make_shaper=RememberingShaper,
        )
        way.prepare(generation)
        place = find_place(loop, generation)
        if place is None or interrupted():
            return None
        n_longest = loaded.options.drafting.n_max
        drawer = Drawer(loop, target, generation, place, plan.depth, n_longest, bug)
        for _ in range(_N_PILOT):
            drawer.draw()
        generation.state.rewind(place)
        # All these rows come from rounds, because the plain decodes come later.
        drawn = [text[n_prompt:] for text, _ in target.rows() if len(text) > place.n_tokens]
        # Another shaper: that of the draws remembers the distributions that they used, right or wrong.
        shaper = Shaper(loaded.settings.sampler, generation.state)
        exact = Exact(target, shaper, generation.state, plan.depth)
        cells = exact.cells()
        by_depth = [_shorten(cells, n) for n in range(1, plan.depth + 1)]
        # Pooling may leave fewer cells for more tokens, so the maximum over all depths is taken.
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
            n_prompt=n_prompt,
            n_answer=place.n_tokens - n_prompt,
            n_draws=n_draws,
            n_impossible=n_impossible,
            n_rounds=drawer.tally.n_rounds,
            n_drafted=drawer.tally.n_drafted,
            n_accepted=drawer.tally.n_accepted,
            n_decodes=target.n_decodes,
            level=plan.level,
            depths=tuple(depths),
            rows=_compare_rows(loaded, n_ctx, target, prompt.tokens, drawn),
            way=way.name,
            drafted_by=dict(drawer.drafted_by),
        )


def _remembering(loaded: Session, cache: LlamaBackend, prompt: Prompt) -> MemoBackend:
    """Wrap a model's cache in a memory whose remembered decodes count with their measured time."""
    model = cache.model.path
    is_target = cache.model is loaded.target
    costs = loaded.costs.table(None if is_target else model, len(prompt.tokens))
    hidden = is_target and loaded.draft is not None and loaded.draft.reads == "last states"
    all_rows = (
        is_target and loaded.draft is not None and loaded.draft.reads in ("all states", "cache")
    )
    return MemoBackend(
        cache, n_bytes_max=_N_BYTES_MAX, costs=costs, hidden=hidden, all_rows=all_rows
    )


def _shorten(cells: Cells, n_tokens: int) -> Cells:
    """Return the distribution of the first `n_tokens` tokens only."""
    shorter: dict[tuple[int, ...], float] = {}
    for outcome, prob in zip(cells.outcomes, cells.probs.tolist(), strict=True):
        shorter[outcome[:n_tokens]] = shorter.get(outcome[:n_tokens], 0.0) + prob
    return Cells.of(shorter)


def _n_draws(cells: Cells, plan: SampledPlan) -> int:
    """Return the number of draws that the plan's deviation needs. With more draws more cells are left after
    pooling, and more cells need more draws; so the number is increased until it is enough."""
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
    loaded: Session,
    n_ctx: int,
    target: MemoBackend,
    prompt: Sequence[int],
    drawn: Sequence[tuple[int, ...]],
) -> RowsResult:
    """Compare remembered rows with those of plain decoding, for a few of the `drawn` answers. The plain
    rows come from a cache from which nothing was dropped."""
    beginnings = {text[:-1] for text in drawn}
    whole = [text for text in drawn if text not in beginnings]
    n_rows, moved_by, by_batches = 0, 0.0, 0.0
    for text in whole[:: max(1, len(whole) // _N_COMPARED)][:_N_COMPARED]:
        plain = {
            n_before - len(prompt): row.copy()
            for n_before, row in plain_rows(loaded, n_ctx, prompt, text, 1)
        }
        by_batches = max(by_batches, batches_move(loaded, n_ctx, prompt, text, plain))
        for length, alone in plain.items():
            seen = target.remembered([*prompt, *text[:length]])
            if seen is not None:  # there is no row before a token that a grammar forced
                n_rows += 1
                moved_by = max(moved_by, movement(seen, alone))
    exact = loaded.target.has_equal_rows and by_batches == 0.0
    return RowsResult(n_rows, moved_by, by_batches, exact)
