"""Decoder heads draft from the target's own hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specgen.drafters.expansion import (
    DraftedChain,
    DraftShaper,
    IsEnd,
    Look,
    look,
    make_expansion,
    n_guesses,
)
from specgen.drafters.hidden_trail import LastHidden
from specgen.method.cost_table import CostTable, Price
from specgen.method.draft import NO_DRAFT, ROOT, Draft, TreeBuilder
from specgen.method.drafter import Drafting, ready
from specgen.method.policy import RoundPlan, RoundResult
from specgen.options import TreeShape
from specgen.system.arrays import Hidden, Logits

#: The most tokens behind those that the target has read: its own next token, and tokens that a
#: grammar or another drafter added.
_MOST_UNREAD = 16
#: The most nodes that heads look beyond at once.
_WIDEST = 8


class Heads(Protocol):
    """What predicts from a target's hidden states; `specgen.llama.decoder_heads` computes it.

    A state is float32[n_embd] of the target, or what `begin` and `advance` return for it.
    `compute_s` are the seconds spent in predictions so far.
    """

    compute_s: float

    @property
    def n_vocab(self) -> int:
        """Return the size of the target's vocabulary."""

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Return the tokens that the heads can predict, int32[n_frequent], in the order of their logits."""

    def begin(self, hidden: Hidden, token: int) -> Hidden:
        """Return the state after `token`, float32[1, n_embd], from the hidden state before it."""

    def advance(self, states: Hidden, tokens: Sequence[int]) -> Hidden:
        """Return the states after one more token each, float32[n, n_embd]."""

    def logits(self, states: Hidden) -> Logits:
        """Return the logits of `tokens` after each state, float32[n, n_frequent]."""


class HeadsDrafter:
    """Drafts with decoder heads: a chain or, with `branches`, a tree. The tree has a fixed shape, or
    grows for as long as the policy finds it worthwhile.

    Heads start from the target's hidden state after its last decoded token (`last`, which the loop
    updates). Their input is the tokens after that one, usually the one token that the target chose. There
    is no cache and no decode of a model: a look beyond a node is two products with small matrices.

    As with a draft model, with `draws` each token is drawn from the distribution that `shaper`
    makes of the heads' logits. Tokens outside the frequent part of the vocabulary have probability
    0 and are never drafted; for a verifier this is a distribution like any other. `costs` is the
    cost table of the heads' looks.
    """

    def __init__(
        self,
        heads: Heads,
        last: LastHidden,
        shaper: DraftShaper,
        rng: np.random.Generator,
        is_end: IsEnd,
        *,
        draws: bool,
        branches: bool,
        shape: TreeShape,
        costs: CostTable,
        n_deepest: int | None = None,
    ) -> None:
        self._heads = heads
        self._last = last
        self._shaper = shaper
        self._rng = rng
        self._is_end = is_end
        self._draws = draws
        self._branches = branches
        self._shape = shape
        self._costs = costs
        self._n_deepest = n_deepest
        self._n_guesses = n_guesses(shape)
        #: A row of the target's logits, in which tokens that are not frequent stay at minus infinity.
        self._row = np.full(heads.n_vocab, -np.inf, np.float32)

    @property
    def name(self) -> str:
        return "heads"

    def price(self, n_context: int) -> Price:
        look_s = self._seconds(1)
        return Price(look_s, look_s)

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        found = self._last.before(len(context))
        if found is None or len(context) - found[0] > _MOST_UNREAD:
            return ready(NO_DRAFT)
        n_read, state = found
        unread = context[n_read:]
        states = self._heads.begin(state, unread[0])
        for token in unread[1:]:
            states = self._heads.advance(states, [token])
        before = context[len(context) - n_drafted :]
        grow = self._tree if self._branches else self._chain
        return ready(grow(states, before, plan))

    def observe(self, result: RoundResult) -> None:
        pass

    def rewind(self, n_tokens: int) -> None:
        self._last.rewind(n_tokens)

    def _chain(self, states: Hidden, before: Sequence[int], plan: RoundPlan) -> Draft:
        n_max = plan.n_max if self._n_deepest is None else min(plan.n_max, self._n_deepest)
        chain = DraftedChain(plan, self._shaper, self._rng, before, draws=self._draws)
        while chain.takes(self._whole(self._rows(states)[0])):
            token = chain.tokens[-1]
            if len(chain.tokens) == n_max or self._is_end(token) or not chain.goes_on():
                break
            states = self._heads.advance(states, [token])
        return chain.draft(self.name)

    def _tree(self, states: Hidden, before: Sequence[int], plan: RoundPlan) -> Draft:
        tree = TreeBuilder(self.name)
        expansion = make_expansion(
            self._shape, plan, plan.n_max, self._n_deepest, self._rng, self._is_end, self._seconds
        )
        expansion.take(tree, ROOT, self._look(self._rows(states)[0], before))
        behind = {ROOT: states}
        while nodes := expansion.frontier(tree, _WIDEST):
            parents = [behind[tree.parents[node]] for node in nodes]
            tokens = [tree.tokens[node] for node in nodes]
            reached = self._heads.advance(np.concatenate(parents), tokens)
            rows = self._rows(reached)
            for index, (node, row) in enumerate(zip(nodes, rows, strict=True)):
                behind[node] = reached[index : index + 1]
                tree.look_beyond(node)
                expansion.take(tree, node, self._look(row, (*before, *tree.path(node))))
        return expansion.cut(tree.draft(expansion.walks))

    def _look(self, row: Logits, path: Sequence[int]) -> Look:
        return look(self._whole(row), self._shaper, path, self._n_guesses, draws=self._draws)

    def _rows(self, states: Hidden) -> Logits:
        """Return the logits of the frequent tokens for each state: float32[n, n_frequent]."""
        before_s = self._heads.compute_s
        rows = self._heads.logits(states)
        self._costs.observe(len(rows), self._heads.compute_s - before_s)
        return rows

    def _whole(self, row: Logits) -> Logits:
        """Return a row over the target's vocabulary, float32[n_vocab], valid until the next call."""
        self._row[self._heads.tokens] = row
        return self._row

    def _seconds(self, n_looks: int) -> float:
        return self._costs.seconds(n_looks) if self._costs else 0.0
