"""A draft model that predicts several tokens in one decode (PARD, arXiv:2504.18583).

The model was trained with a *mask* token, which stands for a token that is not known yet. The row
of each mask predicts the token after it. So a draft of n tokens takes a single decode of n rows:
the text's last token, and n - 1 masks.
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

#: The metadata key of the mask token. Ordinary models may have it, too, such as Gemma (<mask>).
_MASK_KEY = "tokenizer.ggml.mask_token_id"
#: The metadata keys of a model's names. Converters copy the names from the model's page.
_NAME_KEYS = ("general.name", "general.basename", "general.finetune", "general.base_model.0.name")
#: Matches the name of the method, which is part of the name of every published parallel draft, such
#: as PARD-Qwen2.5-0.5B or PARD2-Qwen3-8B.
_PARD = re.compile(r"(?<![a-z])pard-?2?(?![a-z0-9])", re.IGNORECASE)
#: The weight of the latest value in the moving average of confidences.
_RATE = 0.1
#: The average confidence that is assumed before anything was drafted.
_INITIAL_CONFIDENCE = 0.8


class ParallelDrafter(ModelDrafter):
    """Drafts with a parallel draft model: one decode for each draft.

    The number of rows has to be chosen before anything is predicted: it is the number of tokens
    that the plan would draft if all had the average confidence of recent ones. A row does not
    depend on drafted tokens, so each token is sampled from a distribution that is known beforehand,
    and every verifier can judge it. In a tree, all nodes of one depth get their children from the
    same row.

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
        # Expanding a node of a tree costs nothing, since its row is there already: an empty table.
        self._request = replace(request, costs=CostTable())
        self._mask = mask
        #: The maximum number of rows that predict tokens.
        self._max_rows = min(max(1, request.n_max), backend.n_outputs)
        #: A moving average of the confidences of drafted tokens.
        self._average_confidence = _INITIAL_CONFIDENCE

    def price(self, n_context: int) -> Price:
        """Return the cost of one decode, in which each further token costs a further row."""
        costs = self._costs
        if not costs:
            return FREE
        n_masks = self._max_rows - 1
        n_text = self.n_to_decode(n_context)
        # One round adds at most all drafted tokens, whose masks are no longer in the cache, and the
        # target's own token. If more of the text is missing, the rest is a prefill.
        n_round = min(n_text, self._max_rows + 1)
        first_s = costs.seconds_each(n_round)
        next_s = (costs.seconds_each(n_round + n_masks) - first_s) / max(1, n_masks)
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
        if request.can_branch and request.shape.is_fixed:
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
            self._average_confidence += _RATE * (confidence - self._average_confidence)
        return draft

    def _n_worthwhile(self, plan: RoundPlan) -> int:
        """Return the number of tokens that the plan would draft with the average confidence."""
        n_max = min(plan.n_max, self._max_rows, self._request.n_levels_max or plan.n_max)
        cumulative_acceptance = 1.0
        for n in range(1, n_max):
            step = plan.after_draft_step(n - 1, cumulative_acceptance, self._average_confidence)
            if not step.continue_drafting:
                return n
            cumulative_acceptance = step.cumulative_acceptance
        return n_max

    def _predict(self, context: Sequence[int], n_rows: int) -> Decoding:
        """Decode what the cache lacks of `context`, and predict the next tokens.

        Args:
            context: The text.
            n_rows: The number of tokens to predict.

        Returns:
            Their logits, float32[n_rows, n_shared_tokens].
        """
        backend = self._backend
        n_masks = n_rows - 1
        missing = self._align_cache(context)
        # All but the last token are decoded separately if the batch would be too large. So are they
        # if the cache cannot drop cells: to drop the masks, it goes back to the checkpoint below
        # and decodes the tokens after it again.
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
        wanted: The value of `--draft-mask`: ``auto`` (the token that the file names, if the model
            is a parallel draft), ``off``, a token id, or the text of a token in the vocabulary.

    Raises:
        UsageError: If the model has no such token.
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
    """Return whether the name of a model says that it is a parallel draft."""
    names = (model.name, *(model.metadata(key) or "" for key in _NAME_KEYS))
    return any(_PARD.search(name) for name in names)
