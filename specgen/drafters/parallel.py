"""A draft model that predicts several tokens in one decode (PARD, arXiv:2504.18583).

The model was trained with a *mask* token, which stands for a token that is not known yet: the row
of each mask predicts the token after it. So a draft of n tokens takes one decode, of the last token
and n - 1 masks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specgen.drafters.autoregressive import ModelDrafter
from specgen.drafters.expansion import Decoding, start_expansion
from specgen.drafters.interface import (
    FREE,
    NO_DRAFT,
    Ask,
    Backend,
    Batch,
    CostTable,
    Drafting,
    DraftRequest,
    Price,
    RoundPlan,
)
from specgen.errors import UsageError

if TYPE_CHECKING:
    from specgen.llama import LlamaModel

#: Ordinary models may have this key too, such as Gemma for <mask>.
_MASK_KEY = "tokenizer.ggml.mask_token_id"
#: Where a file has the names of its model. Converters copy them from the model's page.
_NAME_KEYS = ("general.name", "general.basename", "general.finetune", "general.base_model.0.name")
#: The method's name, which all published parallel drafts have in theirs: PARD-Qwen2.5-0.5B,
#: PARD2-Qwen3-8B.
_PARD = re.compile(r"(?<![a-z])pard-?2?(?![a-z0-9])", re.IGNORECASE)
#: How fast the usual confidence follows the latest ones.
_RATE = 0.1


class ParallelDrafter(ModelDrafter):
    """Drafts with a parallel draft model: one decode for each draft.

    There are as many rows as the plan would draft tokens if all were as likely as recent ones. A
    row does not depend on the tokens drafted before it, so each token is sampled from a
    distribution that is known beforehand, and every verifier can judge it. In a tree, all nodes of
    one depth get their children from the same row.

    Args:
        backend: The model's context.
        request: The answer to draft for.
        mask: The mask token.
        n_shared_tokens: See `ModelDrafter`.
    """

    def __init__(
        self,
        backend: Backend,
        request: DraftRequest,
        *,
        mask: int,
        n_shared_tokens: int,
    ) -> None:
        super().__init__(backend, request, n_shared_tokens=n_shared_tokens)
        # Expanding a node of a tree costs nothing: its row is there already.
        self._request = replace(request, costs=CostTable())
        self._mask = mask
        self._most_rows = min(max(1, request.n_max), backend.n_outputs)
        #: The average confidence of recent tokens.
        self._usual_confidence = 0.8

    def price(self, n_context: int) -> Price:
        """Return the cost of one decode; a further token costs a further row."""
        costs = self._costs
        if not costs:
            return FREE
        n_masks = self._most_rows - 1
        n_text = self.n_to_decode(n_context)
        # If all was accepted, all drafted tokens and the target's own are new to the model.
        n_usual = min(n_text, self._most_rows + 1)
        first_s = costs.seconds_each(n_usual)
        next_s = (costs.seconds_each(n_usual + n_masks) - first_s) / max(1, n_masks)
        prefill_s = costs.seconds_each(n_text) - first_s
        return Price(first_s, max(0.0, next_s), max(0.0, prefill_s))

    def propose(
        self,
        context: Sequence[int],
        plan: RoundPlan,
        n_drafted: int = 0,
    ) -> Drafting:
        """Predict as many tokens as the plan is expected to want, and grow a draft from them."""
        request = self._request
        n_rows = self._n_worthwhile(plan)
        if request.branches and request.shape.is_fixed:
            n_rows = min(n_rows, request.shape.n_levels)
        n_rows = self._make_room(len(context), n_rows)
        if n_rows < 1:
            return NO_DRAFT
        rows = yield from self._predict(context, n_rows)
        expansion = start_expansion(
            self.name,
            request,
            plan,
            context,
            n_drafted,
            self._backend.vocabulary,
            plan.n_max,
        )
        draft = yield from expansion.grow_from(rows)
        for confidence in draft.step_confidences:
            self._usual_confidence += _RATE * (confidence - self._usual_confidence)
        return draft

    def _n_worthwhile(self, plan: RoundPlan) -> int:
        """Return how many tokens the plan drafts if all are as likely as usual."""
        n_max = min(plan.n_max, self._most_rows, self._request.n_deepest or plan.n_max)
        cumulative_acceptance = 1.0
        for n in range(1, n_max):
            step = plan.after_draft_step(n - 1, cumulative_acceptance, self._usual_confidence)
            if not step.continue_drafting:
                return n
            cumulative_acceptance = step.cumulative_acceptance
        return n_max

    def _predict(self, context: Sequence[int], n_rows: int) -> Decoding:
        """Bring the cache to `context`, and predict the next tokens.

        Returns:
            Their logits, float32[n_rows, n_shared_tokens].
        """
        backend = self._backend
        n_masks = n_rows - 1
        missing = self._missing(context)
        # A prompt is decoded first, in separate batches. So is everything else if dropping the
        # masks from the cache means decoding again.
        is_long = len(missing) + n_masks > backend.n_batch
        if len(missing) > 1 and (is_long or backend.rollback == "states"):
            yield from self._decode(missing[:-1], n_wanted=0)
            missing = missing[-1:]
        backend.checkpoint(self._sequence)
        n_cells = backend.length(self._sequence)
        tokens = [*missing, *[self._mask] * n_masks]
        batch = Batch.of(tokens, n_cells, n_rows, self._sequence)
        rows = yield Ask(backend, batch, self._costs)
        if n_masks:
            backend.remove(self._sequence, n_cells + len(missing))
        self._n_agreed = len(context)
        return rows[:, : self._n_shared_tokens]


def mask_token(model: LlamaModel, wanted: str) -> int | None:
    """Return the mask token of a parallel draft model; None if it drafts token by token.

    Args:
        model: The draft model.
        wanted: ``auto`` (what the file says), ``off``, the number of a token, or its text in the
            vocabulary.

    Raises:
        UsageError: There is no such token.
    """
    vocabulary = model.vocabulary
    if wanted == "off":
        return None
    if wanted == "auto":
        number = model.metadata(_MASK_KEY) if is_parallel_draft(model) else None
        if number is None or int(number) >= vocabulary.n_tokens:
            return None
        return int(number)
    if wanted.isdecimal() and int(wanted) < vocabulary.n_tokens:
        return int(wanted)
    for token in range(vocabulary.n_tokens):
        if vocabulary.token_text(token) == wanted:
            return token
    raise UsageError(
        f"--draft-mask {wanted}: {model.name} has no such token",
        hint=f"give the number of a token, from 0 to {vocabulary.n_tokens - 1}",
    )


def is_parallel_draft(model: LlamaModel) -> bool:
    """Return whether a model is a parallel draft, judging by its names."""
    names = (model.name, *(model.metadata(key) or "" for key in _NAME_KEYS))
    return any(_PARD.search(name) for name in names)
