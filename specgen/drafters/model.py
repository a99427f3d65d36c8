"""A small model drafts for the large one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from specgen.arrays import Logits
from specgen.backend.base import Backend, Batch
from specgen.draft import NO_DRAFT, Draft
from specgen.policy import Policy, RoundReport
from specgen.sampling import Distribution, NoTokenAllowedError

#: Tokens at the beginning of the text that a window keeps: attention rests on the first few,
#: whatever they say (Xiao et al., arXiv:2309.17453).
_N_SINK = 4


class DraftShaper(Protocol):
    """What makes rows of a draft model's logits, float32[n_vocab], into distributions over its
    tokens; `path` are the drafted tokens before. A `Shaper` is one."""

    def distribution(self, logits: Logits, path: Sequence[int] = ()) -> Distribution: ...

    def top_probability(self, logits: Logits, path: Sequence[int] = ()) -> float: ...


class ModelDrafter:
    """Drafts a chain with a model.

    With `draws`, each token is drawn from what `shaper` makes of the model's logits, and the
    distribution goes on record, for verifiers that weigh it against the target's. Without, the
    shaper is expected to be greedy, and the draft is the model's most likely text. The shaper
    sees the target's own text: the grammar and the penalties hold within the draft too, so
    that nothing is drafted that cannot be accepted.

    The model's cache is cut back to what was kept and never to less, so no token is decoded
    twice: the next proposal begins with one batch of what was committed since (usually the
    target's own token; after a full acceptance also the last drafted token, which had no
    reason to be decoded before). The exception is a text that outgrows the model's context:
    the cache is then filled anew with the text's first few tokens and its latest half, so that
    drafting goes on at the price of about one more token of prompt for each drafted-for token.

    `n_shared_tokens`: tokens from this id on exist in only one of the two vocabularies
    (padding); they are never drafted. The drafter owns the backend and closes it.
    """

    def __init__(
        self,
        backend: Backend,
        shaper: DraftShaper,
        rng: np.random.Generator,
        *,
        draws: bool,
        n_shared_tokens: int,
        sequence: int = 0,
    ) -> None:
        self._backend = backend
        self._shaper = shaper
        self._rng = rng
        self._draws = draws
        self._n_shared_tokens = n_shared_tokens
        self._sequence = sequence
        #: The cache agrees with the text on so many tokens; behind them it holds `_ahead`.
        self._n_agreed = 0
        self._ahead: list[int] = []
        #: So many tokens of the text, behind the first few, are left out of the cache.
        self._n_skipped = 0

    @property
    def name(self) -> str:
        return "model"

    @property
    def model_s(self) -> float:
        return self._backend.decode_s

    def propose(self, context: Sequence[int], n_max: int, policy: Policy) -> Draft:
        n_max = self._make_room(len(context), n_max)
        if n_max < 1:
            return NO_DRAFT
        row = self._catch_up(context)
        self._backend.checkpoint(self._sequence)
        tokens: list[int] = []
        probabilities: list[float | None] = []
        distributions: list[Distribution | None] = []
        while True:
            row = row[: self._n_shared_tokens]
            top = self._shaper.top_probability(row, tokens) if policy.needs_probability else None
            if not policy.wants_more(len(tokens), 1.0 if top is None else top):
                break
            try:
                source = self._shaper.distribution(row, tokens)
            except NoTokenAllowedError:  # none, or none of those that the models share
                break
            token = source.draw(self._rng)
            probabilities.append(source.probability(token) if self._draws else top)
            distributions.append(source if self._draws else None)
            tokens.append(token)
            if len(tokens) == n_max or self._backend.vocabulary.is_end(token):
                break
            row = self._decode([token])
            self._ahead.append(token)
        return Draft.chain(tokens, self.name, probabilities, distributions)

    def observe(self, report: RoundReport) -> None:
        pass

    def rewind(self, n_tokens: int) -> None:
        if n_tokens >= self._n_agreed:
            return
        if self._n_skipped and n_tokens < _N_SINK + self._n_skipped:
            self._empty()
            return
        self._backend.remove(self._sequence, n_tokens - self._n_skipped)
        self._ahead.clear()
        self._n_agreed = n_tokens

    def close(self) -> None:
        self._backend.close()

    def _empty(self) -> None:
        self._backend.remove(self._sequence)
        self._ahead.clear()
        self._n_agreed = self._n_skipped = 0

    def _make_room(self, n_context: int, n_max: int) -> int:
        """Slide the window, if the text and a draft of n_max tokens do not fit the cache;
        returns how many tokens may be drafted."""
        n_ctx = self._backend.n_ctx
        # The last drafted token is not decoded, so n tokens need n - 1 cells after the text.
        n_room = n_ctx - (n_context - self._n_skipped) + 1
        if n_room < min(n_max, max(1, n_ctx // 4)):
            n_window = n_ctx // 2
            if n_window <= _N_SINK:  # too small for a beginning and an end
                return 0
            self._empty()
            self._n_skipped = max(0, n_context - n_window)
            n_room = n_ctx - (n_context - self._n_skipped) + 1
        return min(n_max, n_room)

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
            self._backend.remove(self._sequence, n_kept - self._n_skipped)
        self._ahead.clear()
        missing = context[n_kept:]
        if self._n_skipped and n_kept == 0:
            missing = [*context[:_N_SINK], *context[_N_SINK + self._n_skipped :]]
        row = self._decode(missing)
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
