"""A small model drafts a chain for the large one."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from specgen.drafters.expansion import DraftedChain
from specgen.drafters.kind import DraftRequest
from specgen.drafters.staged import Guesses
from specgen.method.backend import Backend, Batch
from specgen.method.draft import NO_DRAFT
from specgen.method.drafter import Ask, Drafter, Drafting
from specgen.method.policy import RoundPlan, RoundResult
from specgen.method.tables import Price
from specgen.system.arrays import Logits
from specgen.text.prefix import n_common

#: Tokens at the beginning of the text that a sliding window keeps: attention rests on the first
#: few tokens, whatever they are (Xiao et al., arXiv:2309.17453).
_N_SINK = 4
#: The most tokens that an up-to-date drafter has to decode first: the target's own token and, if
#: the whole last draft was accepted, its last token.
N_USUAL = 2


class ModelDrafter(Drafter):
    """Drafts a chain with a model.

    The model's cache keeps all tokens that became text, so no token is decoded twice. The next proposal starts with
    one batch of the tokens that were committed since: usually the target's own token and, after a full acceptance, the
    last drafted one. The exception is a text that outgrows the model's context: the cache is then filled again with the
    text's first few tokens and as many of its latest as fill half of the context.

    Tokens from `n_shared_tokens` on exist in only one of the two vocabularies (padding) and are never drafted. With
    `guesses`, a cheaper drafter speeds up the model itself.
    """

    def __init__(
        self,
        backend: Backend,
        request: DraftRequest,
        *,
        n_shared_tokens: int,
        guesses: Guesses | None = None,
    ) -> None:
        self._backend = backend
        self._request = request
        self._n_shared_tokens = n_shared_tokens
        self._costs = request.costs
        self._guesses = guesses if backend.rollback == "cells" else None
        self._slot = request.slot.branches(backend)
        self._sequence = self._slot.first
        self._n_ctx = request.slot.n_ctx(backend)
        #: The number of tokens on which cache and text agree; behind these the cache holds `_ahead`.
        self._n_agreed = 0
        self._ahead = _Ahead(request.reused(backend))
        #: The number of tokens, behind the text's first few, that are left out of the cache.
        self.n_skipped = 0

    @property
    def name(self) -> str:
        return "model"

    def price(self, n_context: int) -> Price:
        n_behind = max(1, n_context - self._n_agreed - len(self._ahead))
        n_usual = min(n_behind, N_USUAL)
        first_s = self._costs.share_s(n_usual)
        next_s = self._costs.share_s(1)
        if self._guesses is not None:
            next_s = self._guesses.token_s(next_s)
        prefill_s = max(0.0, self._costs.share_s(n_behind) - first_s)
        return Price(first_s, next_s, prefill_s)

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        n_max = self._make_room(len(context), plan.n_max)
        if n_max < 1:
            return NO_DRAFT
        row = yield from self._catch_up(context)
        self._backend.checkpoint(self._sequence)
        before = list(context[len(context) - n_drafted :])
        is_end = self._backend.vocabulary.is_end
        chain = DraftedChain(plan, self._request, before, is_end, n_max)
        while chain.extend(row[: self._n_shared_tokens]):
            row = yield from self._row_after(chain.tokens, context, n_max, n_drafted)
        if self._guesses is not None:
            self._guesses.settle(chain.tokens)
        return chain.draft(self.name)

    def observe(self, result: RoundResult) -> None:
        pass

    def rewind(self, n_tokens: int) -> None:
        if self._guesses is not None:
            self._guesses.rewind(n_tokens)
        if n_tokens >= self._n_agreed:
            return
        if self.n_skipped and n_tokens < _N_SINK + self.n_skipped:
            self._empty()
            return
        self._backend.remove(self._sequence, n_tokens - self.n_skipped)
        self._ahead.clear()
        self._n_agreed = n_tokens

    def _empty(self) -> None:
        self._backend.remove(self._sequence)
        self._ahead.clear()
        self._n_agreed = self.n_skipped = 0

    def _make_room(self, n_context: int, n_max: int) -> int:
        """Slide the window, if the text and a draft of n_max tokens do not fit the cache;
        returns how many tokens may be drafted."""
        n_ctx = self._n_ctx
        # The last drafted token is not decoded, so n tokens need n - 1 cells after the text.
        n_room = n_ctx - (n_context - self.n_skipped) + 1
        if n_room < min(n_max, max(1, n_ctx // 4)):
            n_window = n_ctx // 2
            if n_window <= _N_SINK:  # too small for a beginning and an end
                return 0
            self._empty()
            self.n_skipped = max(0, n_context - n_window)
            n_room = n_ctx - (n_context - self.n_skipped) + 1
        return min(n_max, n_room)

    def _catch_up(self, context: Sequence[int]) -> Generator[Ask, Logits, Logits]:
        """Bring the cache to `context`; return the logits after it, float32[n_vocab]."""
        new, ahead = context[self._n_agreed :], self._ahead
        n_same = n_common(ahead.tokens, new) if new else 0
        if n_same and n_same == len(new):
            row = ahead.row_after(n_same, self._backend)
            if row is not None:
                ahead.drop_until(n_same)
                self._n_agreed = len(context)
                return row
        rows = yield from self._decode_rows(self._missing(context), n_wanted=1)
        self._n_agreed = len(context)
        last: Logits = rows[-1]
        return last

    def _missing(self, context: Sequence[int]) -> Sequence[int]:
        """Drop from the cache what is not a prefix of `context`; returns the tokens that it then lacks. The
        last one is always among them, since a draft begins with its logits."""
        new, ahead = context[self._n_agreed :], self._ahead
        n_kept = min(self._n_agreed + n_common(ahead.tokens, new), len(context) - 1)
        if n_kept < self._n_agreed + len(ahead):
            self._backend.remove(self._sequence, n_kept - self.n_skipped)
        ahead.clear()
        if self.n_skipped and n_kept == 0:
            return [*context[:_N_SINK], *context[_N_SINK + self.n_skipped :]]
        return context[n_kept:]

    def _row_after(
        self, tokens: Sequence[int], context: Sequence[int], n_max: int, n_drafted: int
    ) -> Generator[Ask, Logits, Logits]:
        """Return the logits after the tokens drafted so far, float32[n_vocab]. All of these tokens but the
        last are decoded already; with guesses the last may be too, and some tokens after it."""
        ahead, n_before = self._ahead, len(tokens) - 1
        if ahead.tokens[n_before : len(tokens)] == [tokens[-1]]:
            found = ahead.row_after(len(tokens), self._backend)
            if found is not None:
                return found
        n_wrong = ahead.drop_from(n_before)
        if n_wrong:
            length = self._backend.length(self._sequence)
            self._backend.remove(self._sequence, length - n_wrong)
        guessed: Sequence[int] = ()
        if self._guesses is not None:
            self._guesses.settle(tokens)
            n_room = min(n_max - len(tokens) - 1, self._backend.n_outputs - 1)
            guessed = yield from self._guesses.after(context, tokens, n_room, n_drafted)
        before_s = self._backend.decode_s
        rows = yield from self._decode_rows([tokens[-1], *guessed], n_wanted=1 + len(guessed))
        if self._guesses is not None:
            self._guesses.decoded(self._backend.decode_s - before_s)
        return ahead.add((tokens[-1], *guessed), rows, self._backend)

    def _decode_rows(
        self, tokens: Sequence[int], *, n_wanted: int
    ) -> Generator[Ask, Logits, Logits]:
        """Decode tokens in batches; return the logits after the last `n_wanted` tokens,
        float32[n_wanted, n_vocab], or fewer if the last batch has fewer."""
        position = self._backend.length(self._sequence)
        n_batch = self._backend.n_batch
        logits: Logits | None = None
        for start in range(0, len(tokens), n_batch):
            part = list(tokens[start : start + n_batch])
            n = len(part)
            n_silent = min(n, max(0, len(tokens) - n_wanted - start))
            batch = Batch(
                part,
                list(range(position, position + n)),
                [(self._sequence,)] * n,
                [False] * n_silent + [True] * (n - n_silent),
            )
            position += n
            logits = yield Ask(self._backend, batch, self._costs)
        assert logits is not None, "at least one token is decoded"
        return logits


class _Ahead:
    """The tokens that a cache holds after the text, and the rows of logits of the last decode. The
    rows are valid until the backend decodes anything else."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = list(tokens)
        self._rows: Logits | None = None
        #: Row i has the logits after the first `_n_first + i` of the tokens.
        self._n_first = 0
        #: The backend's count of decoded rows after that decode.
        self._n_decoded = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def row_after(self, n: int, backend: Backend) -> Logits | None:
        """Return the logits after the first n tokens, float32[n_vocab]; None if they are no longer
        available."""
        is_there = backend.n_decoded_rows == self._n_decoded
        if self._rows is None or not is_there or not self._n_first <= n <= len(self.tokens):
            return None
        row: Logits = self._rows[n - self._n_first]
        return row

    def drop_from(self, n: int) -> int:
        """Forget all tokens but the first n; return how many were forgotten."""
        n_wrong = len(self.tokens) - n
        del self.tokens[n:]
        return n_wrong

    def drop_until(self, n: int) -> None:
        """Forget the first n tokens: they belong to the text now."""
        del self.tokens[:n]
        self._n_first -= n

    def add(self, tokens: Sequence[int], rows: Logits, backend: Backend) -> Logits:
        """Add the tokens of the last decode; return the logits after the first of them."""
        self._n_first = len(self.tokens) + 1
        self.tokens.extend(tokens)
        self._rows, self._n_decoded = rows, backend.n_decoded_rows
        row: Logits = rows[0]
        return row

    def clear(self) -> None:
        self.tokens.clear()
        self._rows = None
