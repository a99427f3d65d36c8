"""A target's own MTP layer drafts from the target's hidden states, and so does an EAGLE-3 draft."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

import numpy as np

from specgen.drafters.expansion import (
    DraftedChain,
    DraftShaper,
    Look,
    look,
    make_expansion,
    n_guesses,
)
from specgen.drafters.hidden_trail import HiddenTrail
from specgen.drafters.states_cache import StatesCache
from specgen.drafters.tree import NodeBranches
from specgen.method.backend import Batch, MtpBackend
from specgen.method.cost_table import FREE, CostTable, Price
from specgen.method.draft import NO_DRAFT, ROOT, Branches, TreeBuilder
from specgen.method.drafter import Ask, Drafting
from specgen.method.policy import RoundPlan, RoundResult
from specgen.options import TreeShape
from specgen.system.arrays import Hidden, Logits

#: The most tokens behind those that the target has read: its own next token, and tokens that a
#: grammar or another drafter added. Each but the first takes a decode of its own.
MOST_UNREAD = 16
#: The most rows that count as those of the last round, and not as a prefill.
N_USUAL = 8
#: The most nodes that are looked beyond at once.
_WIDEST = 8
#: Decodes a token of a chain, which comes with its number from 1; returns the logits after it.
Step: TypeAlias = Callable[[int, int], Generator[Ask, Logits, Logits]]


class MtpDrafter:
    """Drafts with an MTP layer: a chain or, with `branches`, a tree. The tree has a fixed shape, or grows
    for as long as the policy finds it worthwhile.

    The layer has a cache. Its row of a token reads the hidden state before the token: the target's
    (`trail`, which the loop fills) or, behind what the target has read, the layer's own. The first batch
    of a proposal has the rows of all tokens that were accepted since the last one, and its last row
    begins the draft. Rows of drafted tokens are dropped afterwards, since the target's states of the
    accepted ones are better.

    Nothing is read before the plan asks for a draft, so a layer that does not pay costs nothing. If
    states of some tokens are missing, the cache begins behind these tokens.

    As with a draft model, with `draws` each token is drawn from the distribution that `shaper` makes of
    the layer's logits. `costs` is the table of the layer's decodes. The drafter owns the sequences `slot`
    of the cache, each with room for `n_ctx` tokens; the first holds the first `n_held` tokens of the text.
    """

    def __init__(
        self,
        backend: MtpBackend,
        trail: HiddenTrail,
        shaper: DraftShaper,
        rng: np.random.Generator,
        *,
        draws: bool,
        branches: bool,
        shape: TreeShape,
        costs: CostTable,
        slot: Branches,
        n_ctx: int,
        n_deepest: int | None = None,
        n_held: int = 0,
    ) -> None:
        self._backend = backend
        self._trail = trail
        self._shaper = shaper
        self._rng = rng
        self._draws = draws
        self._branches = branches
        self._shape = shape
        self._costs = costs
        self._slot = slot
        self._n_ctx = n_ctx
        self._n_deepest = n_deepest
        self._n_guesses = n_guesses(shape)
        self._nodes = NodeBranches(backend, slot)
        self._cache = StatesCache(backend, trail, costs, slot.first, n_held)

    @property
    def name(self) -> str:
        return "mtp"

    def price(self, n_context: int) -> Price:
        if not self._costs:
            return FREE
        n_read = self._n_read(n_context)
        n_rows = self._cache.n_missing(n_read)
        n_usual = min(n_rows, N_USUAL)
        next_s, first_s = self._costs.share_s(1), self._costs.share_s(n_usual)
        prefill_s = max(0.0, self._costs.share_s(n_rows) - first_s)
        n_unread = n_context - 1 - n_read
        return Price(first_s + n_unread * next_s, next_s, prefill_s)

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        n_read = self._n_read(len(context))
        if len(context) - 1 - n_read > MOST_UNREAD or not self._cache.find_start(n_read):
            return NO_DRAFT
        # The last drafted token is not decoded, so n tokens need n - 1 cells behind the text.
        n_max = min(plan.n_max, self._n_ctx - (len(context) - self._cache.n_skipped) + 1)
        if n_max < 1:
            return NO_DRAFT
        before = context[len(context) - n_drafted :]
        try:
            row = yield from self._cache.catch_up(context, n_read)
            self._trail.forget(self._cache.n_held - 1)
            for position in range(n_read + 1, len(context)):
                row = yield from self._step(context[position], position)
            if self._branches:
                n_text = len(context) - self._cache.n_skipped
                return (yield from self._tree(row, before, n_text, plan, n_max))
            n_text = len(context) - 1
            return (
                yield from self._chain(
                    row, before, lambda token, n: self._step(token, n_text + n), plan, n_max
                )
            )
        finally:
            self._nodes.keep(ROOT, self._cache.length, 0)

    def observe(self, result: RoundResult) -> None:
        pass

    def rewind(self, n_tokens: int) -> None:
        self._trail.rewind(n_tokens)
        self._cache.rewind(n_tokens)

    # --- the text ------------------------------------------------------------------------------

    def _n_read(self, n_context: int) -> int:
        """Return the number of tokens of a text that the target has read, at most all but the last."""
        return min(self._trail.n_read, n_context - 1)

    # --- drafts --------------------------------------------------------------------------------

    def _step(self, token: int, index: int) -> Generator[Ask, Logits, Logits]:
        """Decode the token at `index` of the text and the draft; return the logits after it."""
        state = self._backend.state(self._slot.first)
        return self._row_after(token, index - self._cache.n_skipped, state)

    def _row_after(
        self, token: int, position: int, state: Hidden
    ) -> Generator[Ask, Logits, Logits]:
        """Decode a token at a position of the cache, with the state before it; return the logits after it."""
        batch = Batch()
        batch.add(token, position, (self._slot.first,), True)
        batch.hidden.append(state)
        rows = yield Ask(self._backend, batch, self._costs)
        row: Logits = rows[0]
        return row

    def _chain(
        self, row: Logits, before: Sequence[int], step: Step, plan: RoundPlan, n_max: int
    ) -> Drafting:
        """Draft a chain from the logits before it. `step` decodes its n-th token, from 1."""
        if self._n_deepest is not None:
            n_max = min(n_max, self._n_deepest)
        chain = DraftedChain(plan, self._shaper, self._rng, before, draws=self._draws)
        while chain.takes(row):
            token, n = chain.tokens[-1], len(chain.tokens)
            if n == n_max or self._backend.vocabulary.is_end(token) or not chain.goes_on():
                break
            row = yield from step(token, n)
        return chain.draft(self.name)

    def _tree(
        self, row: Logits, before: Sequence[int], n_text: int, plan: RoundPlan, n_max: int
    ) -> Drafting:
        """Draft a tree behind `n_text` tokens of the cache."""
        is_end = self._backend.vocabulary.is_end
        tree = TreeBuilder(self.name)
        expansion = make_expansion(
            self._shape, plan, n_max, self._n_deepest, self._rng, is_end, self._seconds
        )
        expansion.take(tree, ROOT, self._look(row, before))
        states = {ROOT: self._backend.state(self._slot.first)}
        self._nodes.begin()
        while nodes := expansion.frontier(
            tree, min(_WIDEST, self._backend.n_outputs, self._nodes.n_free)
        ):
            batch, ends = Batch(), []
            for node in nodes:
                parent, position = tree.parents[node], n_text + tree.depths[node]
                ends.append(self._nodes.follow(node, parent, position))
                batch.add(tree.tokens[node], position, (ends[-1],), True)
                batch.hidden.append(states[parent])
            rows = yield Ask(self._backend, batch, self._costs)
            for node, end, row_behind in zip(nodes, ends, rows, strict=True):
                states[node] = self._backend.state(end)
                tree.look_beyond(node)
                expansion.take(tree, node, self._look(row_behind, (*before, *tree.path(node))))
        return expansion.cut(tree.draft(expansion.walks))

    def _seconds(self, n_rows: int) -> float:
        return self._costs.share_s(n_rows) if self._costs else 0.0

    def _look(self, row: Logits, path: Sequence[int]) -> Look:
        return look(row, self._shaper, path, self._n_guesses, draws=self._draws)


class EagleDrafter(MtpDrafter):
    """Drafts with EAGLE-3 as `MtpDrafter` does with an MTP layer: from the target's states of accepted
    tokens, and the draft's own of drafted ones. But the text's first token has no row: there is no state
    before it."""

    def __init__(self, *arguments: Any, n_held: int = 0, **options: Any) -> None:
        super().__init__(*arguments, n_held=max(1, n_held), **options)
        self._cache.n_skipped = 1

    @property
    def name(self) -> str:
        return "eagle3"
