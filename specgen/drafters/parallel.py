"""A parallel draft model predicts several tokens in one decode."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from specgen.drafters.expansion import (
    DraftedChain,
    DraftShaper,
    look,
    make_expansion,
    n_guesses,
)
from specgen.drafters.model import ModelDrafter
from specgen.method.backend import Backend, Batch
from specgen.method.cost_table import FREE, CostTable, Price
from specgen.method.draft import NO_DRAFT, ROOT, Draft, TreeBuilder
from specgen.method.drafter import Ask, Drafting
from specgen.method.policy import RoundPlan
from specgen.options import TreeShape
from specgen.system.arrays import Logits

#: The most nodes of a tree that are looked beyond in one step. A look reads a row that is there already.
_WIDEST = 8


class ParallelDrafter(ModelDrafter):
    """Drafts with a model that was trained to predict K tokens in one decode (PARD, arXiv:2504.18583).

    The decode has the tokens that the model has not read yet and K - 1 times the token `mask`, at
    consecutive positions. The row of the last token of the text predicts the next token, as in any model,
    and the row of mask i predicts token i + 1. The plan says how many tokens that are (`n_at_once`), and
    its `keeps` decides with the confidence of each row how many are drafted.

    A row depends on the text and not on the tokens drafted before. So each token of a draft that is drawn
    is drawn from a distribution that does not depend on the draws before, except through the shaper
    (grammar, penalties). That is a valid distribution for every verifier. With `branches` the draft is a
    tree: siblings are the likeliest tokens of a row, and all nodes of one depth share a row.

    The masks leave the cache right after the decode, which then holds the text and nothing else. The
    drafted tokens were never decoded, so those that become text are read with the next decode.
    """

    def __init__(
        self,
        backend: Backend,
        shaper: DraftShaper,
        rng: np.random.Generator,
        *,
        mask: int,
        draws: bool,
        n_shared_tokens: int,
        n_most: int,
        branches: bool = False,
        shape: TreeShape | None = None,
        n_deepest: int | None = None,
        costs: CostTable | None = None,
        sequence: int = 0,
        n_ctx: int | None = None,
        held: Sequence[int] = (),
    ) -> None:
        super().__init__(
            backend,
            shaper,
            rng,
            draws=draws,
            n_shared_tokens=n_shared_tokens,
            costs=costs,
            sequence=sequence,
            n_ctx=n_ctx,
            held=held,
        )
        self._mask = mask
        self._n_most = min(n_most, backend.n_outputs)
        self._branches = branches
        self._shape = shape or TreeShape("off")
        self._n_deepest = n_deepest

    def price(self, n_context: int) -> Price:
        if not self._costs:
            return FREE
        n_behind = max(1, n_context - self._n_agreed - len(self._ahead))
        # After a full acceptance, all drafted tokens and the target's own are new to the model.
        n_usual = min(n_behind, self._n_most + 1)
        at_once_s = tuple(self._costs.share_s(n_usual + n) for n in range(self._n_most))
        prefill_s = max(0.0, self._costs.share_s(n_behind) - at_once_s[0])
        return Price(at_once_s[0], 0.0, prefill_s, at_once_s)

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        n_rows = self._make_room(len(context), self._n_at_once(plan))
        if n_rows < 1:
            return NO_DRAFT
        rows = yield from self._predictions(context, n_rows)
        before = context[len(context) - n_drafted :]
        if self._branches:
            return self._tree(rows, plan, before)
        is_end = self._backend.vocabulary.is_end
        chain = DraftedChain(plan, self._shaper, self._rng, before, draws=self._draws)
        for row in rows:
            if not chain.takes(row) or is_end(chain.tokens[-1]) or not chain.goes_on():
                break
        return chain.draft(self.name)

    def _n_at_once(self, plan: RoundPlan) -> int:
        """Return how many tokens to predict: the depth of the draft."""
        limits = [plan.n_max, self._n_most]
        if plan.n_at_once is not None:
            limits.append(plan.n_at_once)
        if self._branches and self._shape.is_fixed:
            limits.append(self._shape.n_levels)
        if self._n_deepest is not None:
            limits.append(self._n_deepest)
        return min(limits)

    def _predictions(self, context: Sequence[int], n_rows: int) -> Generator[Ask, Logits, Logits]:
        """Bring the cache to `context`; returns the logits of the next `n_rows` tokens,
        float32[n_rows, n_shared_tokens]."""
        backend, missing = self._backend, self._missing(context)
        n_masks = n_rows - 1
        # A prompt is read in batches of its own, and so is everything where a rollback would decode it again.
        is_long = len(missing) + n_masks > backend.n_batch
        if len(missing) > 1 and (is_long or backend.rollback == "states"):
            yield from self._decode_rows(missing[:-1], n_wanted=0)
            missing = missing[-1:]
        backend.checkpoint(self._sequence)
        position = backend.length(self._sequence)
        tokens = [*missing, *[self._mask] * n_masks]
        n_silent = len(missing) - 1
        batch = Batch(
            tokens,
            list(range(position, position + len(tokens))),
            [(self._sequence,)] * len(tokens),
            [False] * n_silent + [True] * n_rows,
        )
        rows = yield Ask(backend, batch, self._costs)
        if n_masks:
            backend.remove(self._sequence, position + len(missing))
        self._n_agreed = len(context)
        found: Logits = rows[:, : self._n_shared_tokens]
        return found

    def _tree(self, rows: Logits, plan: RoundPlan, before: Sequence[int]) -> Draft:
        """Return a tree in which the nodes of one depth have children from the same row."""
        tree, guesses = TreeBuilder(self.name), n_guesses(self._shape)
        expansion = make_expansion(
            self._shape,
            plan,
            plan.n_max,
            len(rows),
            self._rng,
            self._backend.vocabulary.is_end,
            lambda _n: 0.0,
        )
        found = look(rows[0], self._shaper, before, guesses, draws=self._draws)
        expansion.take(tree, ROOT, found)
        while nodes := expansion.frontier(tree, _WIDEST):
            for node in nodes:
                path = (*before, *tree.path(node))
                row = rows[tree.depths[node] + 1]
                found = look(row, self._shaper, path, guesses, draws=self._draws)
                tree.look_beyond(node)
                expansion.take(tree, node, found)
        return expansion.cut(tree.draft(expansion.walks))
