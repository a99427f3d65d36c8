"""A parallel draft model predicts several tokens in one decode."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specgen.drafters.expansion import expansion
from specgen.drafters.interface import DraftRequest
from specgen.drafters.model_drafter import ModelDrafter
from specgen.errors import UsageError
from specgen.method.backend import Backend, Batch
from specgen.method.cost_table import FREE, CostTable, Price
from specgen.method.draft import NO_DRAFT
from specgen.method.drafter import Ask, Drafting
from specgen.method.policy import RoundPlan
from specgen.system.arrays import Logits

if TYPE_CHECKING:
    from specgen.llama import LlamaModel

_MASK_KEY = "tokenizer.ggml.mask_token_id"  # ordinary models have one too: Gemma's <mask>
#: Where a file has the names of its model. Converters copy them from the model's page.
_NAME_KEYS = ("general.name", "general.basename", "general.finetune", "general.base_model.0.name")
_RATE = 0.1  # how fast the usual confidence follows the latest ones
#: The method's name, which all published parallel drafts have in theirs: PARD-Qwen2.5-0.5B,
#: PARD2-Qwen3-8B.
_PARD = re.compile(r"(?<![a-z])pard-?2?(?![a-z0-9])", re.IGNORECASE)


class ParallelDrafter(ModelDrafter):
    """Drafts with a model that was trained to predict K tokens in one decode (PARD,
    arXiv:2504.18583).

    The decode has the tokens that the model has not read yet and K - 1 times the token `mask`,
    whose rows predict the further tokens. There are as many rows as the plan would look at if all
    were as sure as those before. A row does not depend on the tokens drafted before, so each token
    is drawn from a distribution that is known before, which suits every verifier. In a tree all
    nodes of one depth have children from one row.
    """

    def __init__(
        self, backend: Backend, request: DraftRequest, *, mask: int, n_shared_tokens: int
    ) -> None:
        super().__init__(backend, request, n_shared_tokens=n_shared_tokens)
        self._request = replace(request, costs=CostTable())  # a tree's rows are there already
        self._mask = mask
        self._n_most = min(max(1, request.n_max), backend.n_outputs)
        #: The mean confidence of recent looks.
        self._usual = 0.8

    def price(self, n_context: int) -> Price:
        if not self._costs:
            return FREE
        n_behind = self.n_behind(n_context)
        # After a full acceptance, all drafted tokens and the target's own are new to the model.
        n_usual = min(n_behind, self._n_most + 1)
        first_s, last_s, prefill_s = (
            self._costs.seconds_each(n) for n in (n_usual, n_usual + self._n_most - 1, n_behind)
        )
        next_s = (last_s - first_s) / max(1, self._n_most - 1)
        return Price(first_s, max(0.0, next_s), max(0.0, prefill_s - first_s))

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        request, shape = self._request, self._request.shape
        n_rows = min(plan.n_max, self._n_most, request.n_deepest or plan.n_max)
        n, whole, goes_on = 1, 1.0, True
        while goes_on and n < n_rows:
            step = plan.after_draft_step(n - 1, whole, self._usual)
            whole, goes_on = step.cumulative_acceptance, step.continue_drafting
            n += goes_on
        n_rows = n
        if request.branches and shape.is_fixed:
            n_rows = min(n_rows, shape.n_levels)
        n_rows = self._make_room(len(context), n_rows)
        if n_rows < 1:
            return NO_DRAFT
        rows = yield from self._predictions(context, n_rows)
        before, vocabulary = context[len(context) - n_drafted :], self._backend.vocabulary
        made = expansion(self.name, request, plan, before, vocabulary, plan.n_max)
        draft = yield from made.grow_from(rows)
        for confidence in draft.step_confidences:
            self._usual += _RATE * (confidence - self._usual)
        return draft

    def _predictions(self, context: Sequence[int], n_rows: int) -> Generator[Ask, Logits, Logits]:
        """Bring the cache to `context`; return the logits of the next tokens, float32[n_rows,
        n_shared_tokens].
        """
        backend, missing = self._backend, self._missing(context)
        n_masks = n_rows - 1
        # A prompt is read in batches of its own, and so is everything where a rollback would decode
        # it again.
        is_long = len(missing) + n_masks > backend.n_batch
        if len(missing) > 1 and (is_long or backend.rollback == "states"):
            yield from self._decode(missing[:-1], n_wanted=0)
            missing = missing[-1:]
        backend.checkpoint(self._sequence)
        position, batch = backend.length(self._sequence), Batch()
        for offset, token in enumerate((*missing, *[self._mask] * n_masks)):
            wants = offset >= len(missing) - 1
            batch.add(token, position + offset, (self._sequence,), wants)
        rows = yield Ask(backend, batch, self._costs)
        if n_masks:
            backend.remove(self._sequence, position + len(missing))
        self._n_agreed = len(context)
        return rows[:, : self._n_shared_tokens]


def mask_token(model: LlamaModel, wanted: str) -> int | None:
    """Return the mask token with which a model predicts several tokens at once; None if it predicts
    one. `wanted` is ``auto`` (what the file says), ``off``, a token's number, or its text in the
    vocabulary. Raise `UsageError`.
    """
    if wanted == "off":
        return None
    vocabulary, found = model.vocabulary, None
    if wanted == "auto":
        found = model.metadata(_MASK_KEY) if is_parallel_draft(model) else None
        return int(found) if found is not None and int(found) < vocabulary.n_tokens else None
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
    names = (model.name, *(model.metadata(key) or "" for key in _NAME_KEYS))
    return any(_PARD.search(name) for name in names)
