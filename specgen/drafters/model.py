"""A small model drafts for the large one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specgen.arrays import Logits
from specgen.backend.base import Backend, Batch
from specgen.draft import NO_DRAFT, Draft
from specgen.options import SamplerOptions
from specgen.policy import Policy, RoundReport
from specgen.sampling import Distribution, argmax, distribution, top_probability


class ModelDrafter:
    """Drafts a chain with a model that shares the target's vocabulary.

    At temperature 0 it drafts its most likely tokens; above, it draws them, from its logits
    under the same samplers as the target's, so that residual sampling accepts as many as the
    two distributions share.

    The model's cache is cut back to what was kept and never to less, so no token is decoded
    twice: the next proposal begins with one batch of what was committed since (usually the
    target's own token; after a full acceptance also the last drafted token, which had no
    reason to be decoded before).

    `n_shared_tokens`: tokens from this id on exist in only one of the two vocabularies
    (padding); they are never drafted. `excluded` are tokens never to draft, `ends` those to
    draft nothing after. The drafter owns the backend and closes it.
    """

    def __init__(
        self,
        backend: Backend,
        options: SamplerOptions,
        rng: np.random.Generator,
        *,
        n_shared_tokens: int,
        excluded: Sequence[int] = (),
        sequence: int = 0,
    ) -> None:
        self._backend = backend
        self._options = options
        self._rng = rng
        self._n_shared_tokens = n_shared_tokens
        self._excluded = list(excluded)
        self._sequence = sequence
        #: The cache agrees with the text on so many tokens; behind them it holds `_ahead`.
        self._n_agreed = 0
        self._ahead: list[int] = []

    @property
    def name(self) -> str:
        return "model"

    @property
    def model_s(self) -> float:
        return self._backend.decode_s

    def propose(self, context: Sequence[int], n_max: int, policy: Policy) -> Draft:
        # The last drafted token is not decoded, so n tokens need n - 1 cells after the text.
        n_max = min(n_max, self._backend.n_ctx - len(context) + 1)
        if n_max < 1:
            return NO_DRAFT
        row = self._catch_up(context)
        tokens: list[int] = []
        probabilities: list[float | None] = []
        distributions: list[Distribution | None] = []
        while True:
            row = self._draftable(row)
            top = top_probability(row) if policy.needs_probability else 1.0
            if not policy.wants_more(len(tokens), top):
                break
            if self._options.greedy:
                token = argmax(row)
                probabilities.append(top if policy.needs_probability else None)
                distributions.append(None)
            else:
                drawn_from = distribution(row, self._options)
                token = drawn_from.draw(self._rng)
                probabilities.append(drawn_from.probability(token))
                distributions.append(drawn_from)
            tokens.append(token)
            if len(tokens) == n_max or self._backend.vocabulary.is_end(token):
                break
            row = self._decode([token])
            self._ahead.append(token)
        return Draft.chain(tokens, self.name, probabilities, distributions)

    def observe(self, report: RoundReport) -> None:
        pass

    def reset(self) -> None:
        self._backend.remove(self._sequence)
        self._n_agreed = 0
        self._ahead.clear()

    def close(self) -> None:
        self._backend.close()

    def _catch_up(self, context: Sequence[int]) -> Logits:
        """Bring the cache to `context`; returns the logits after it, float32[n_vocab]."""
        # The last token is always decoded here, since its logits are what a draft begins with.
        n_kept = min(self._n_agreed, len(context) - 1)
        if n_kept == self._n_agreed:
            for drafted, committed in zip(self._ahead, context[n_kept:-1], strict=False):
                if drafted != committed:
                    break
                n_kept += 1
        if n_kept < self._n_agreed + len(self._ahead):
            self._backend.remove(self._sequence, n_kept)
        self._ahead.clear()
        row = self._decode(context[n_kept:])
        self._n_agreed = len(context)
        return row

    def _decode(self, tokens: Sequence[int]) -> Logits:
        """Decode tokens in batches; returns the logits after the last one, float32[n_vocab]."""
        position = self._backend.length(self._sequence)
        n_batch = self._backend.n_batch
        logits: Logits | None = None
        for start in range(0, len(tokens), n_batch):
            batch = Batch()
            for token in tokens[start : start + n_batch]:
                batch.add(token, position, (self._sequence,), False)
                position += 1
            batch.wants_logits[-1] = start + n_batch >= len(tokens)
            logits = self._backend.decode(batch)
        assert logits is not None, "at least one token is decoded"
        row: Logits = logits[-1]
        return row

    def _draftable(self, row: Logits) -> Logits:
        """The row without what must not be drafted."""
        if self._excluded:
            row[self._excluded] = -np.inf
        return row[: self._n_shared_tokens]
