"""A draft for the draft: a cheaper drafter guesses what the draft model will draft.

The draft model decodes the guessed tokens in one batch. It chooses each token from its own
distribution, and needs no further decode as long as it chooses the guessed token. So it drafts
exactly what it would without guesses, only faster (staged speculative decoding, Spector & Re,
arXiv:2308.04623, section 3.2).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specgen.drafters.autoregressive import ModelDrafter
from specgen.drafters.expansion import Decoding, Expansion
from specgen.drafters.interface import (
    FREE,
    NO_DRAFT,
    Ask,
    Backend,
    Draft,
    Drafting,
    DraftRequest,
    Price,
    RoundPlan,
    RoundResult,
)
from specgen.method.cascade import Cascade
from specgen.method.policy import Offer, Policy
from specgen.system.arrays import Logits
from specgen.text.overlap import common_prefix_length

#: The weight of the latest value in the moving average of seconds per drafted token.
_RATE = 0.1


@dataclass(slots=True)
class _OpenGuess:
    """A guess of the draft model's next tokens, until it is known how many of them are right."""

    #: The plan for the guess.
    plan: RoundPlan
    #: The guessed tokens.
    draft: Draft
    #: The proposals of the drafters that guess, before the plan cut them.
    proposed: tuple[Draft, ...]
    #: The number of tokens that the draft model had drafted before.
    n_before: int
    #: The seconds that making the guess took.
    draft_s: float
    #: The seconds of the draft model's decode that checks the guess.
    decode_s: float = 0.0


class DraftGuesser:
    """Guesses the next tokens of a draft model, for one answer.

    It does for the draft model what the draft model does for the target: it guesses as many tokens
    as the policy finds worthwhile, and learns from how many of them are right. In place of the
    verifier, the draft model chooses its own tokens; a guess is right if they are the same.

    Args:
        drafters: The drafters of the second draft, which guess.
        policy: Decides how much to guess.
        caches: The contexts in which these drafters decode.
    """

    def __init__(
        self,
        drafters: Cascade,
        policy: Policy,
        caches: Sequence[Backend] = (),
    ) -> None:
        self._drafters = drafters
        self._policy = policy
        self._caches = caches
        #: The last guess, until its result is known.
        self._guess: _OpenGuess | None = None
        #: The moving average of seconds per token of the draft model, with guesses; None before the
        #: first guess.
        self._token_s: float | None = None
        #: The length of the text that the drafters have seen.
        self._n_text = 0
        #: The draft model's tokens after that text that the drafters have seen.
        self._shown: tuple[int, ...] = ()
        #: The number of tokens that were guessed during the current draft.
        self._n_guessed = 0
        #: The number of them that were right.
        self._n_right = 0
        #: The reason that the first plan of the current draft gave for guessing much or little.
        self._why = ""

    def token_s(self, plain_s: float) -> float:
        """Return the expected seconds per token of the draft model.

        Args:
            plain_s: The seconds per token without guesses, which are never exceeded.
        """
        return plain_s if self._token_s is None else min(plain_s, self._token_s)

    def guess(
        self,
        context: Sequence[int],
        drafted: Sequence[int],
        n_room: int,
        n_drafted: int,
    ) -> Generator[Ask, Logits, Sequence[int]]:
        """Guess the draft model's next tokens, and return them.

        Args:
            context: The text, and the tokens that another drafter drafted after it.
            drafted: The tokens that the draft model has drafted so far.
            n_room: The maximum number of tokens to guess.
            n_drafted: The number of tokens at the end of `context` that another drafter drafted.
        """
        # This corresponds to a round of the target: look up, plan, propose, and cut.
        drafters = self._drafters
        text = [*context, *drafted]
        n_uncommitted = n_drafted + len(drafted)
        self._show(text, len(context))
        n_max = min(self._policy.n_max, n_room)
        found = drafters.look_up(text, n_max, n_uncommitted)
        price = FREE if drafters.model is None else drafters.model.price(len(text))
        plan = self._policy.plan(
            Offer(
                n_expected=n_room + 1,
                n_max=n_max,
                found=found,
                drafter=drafters.model_name,
                price=price,
            )
        )
        self._why = self._why or plan.why
        before_s = self._decoded_s()
        uncut = yield from drafters.propose(text, plan, n_uncommitted)
        draft_s = self._decoded_s() - before_s
        draft = plan.stop.cut(uncut)
        if not draft.is_chain:  # the draft model checks chains only
            draft = NO_DRAFT
        self._guess = _OpenGuess(
            plan=plan,
            draft=draft,
            proposed=(found, uncut),
            n_before=len(drafted),
            draft_s=draft_s,
        )
        self._n_guessed += len(draft)
        return draft.tokens

    def observe_decode(self, seconds: float) -> None:
        """Record how long the draft model's decode took that checks the last guess."""
        if self._guess is not None:
            self._guess.decode_s = seconds

    def settle(self, drafted: Sequence[int]) -> None:
        """Learn from the result of the last guess, if that was not done yet.

        Args:
            drafted: All tokens that the draft model has drafted.
        """
        guess = self._guess
        if guess is None:
            return
        self._guess = None
        added = tuple(drafted[guess.n_before :])
        n_right = common_prefix_length(guess.draft.tokens, added)
        self._n_right += n_right
        result = RoundResult(
            plan=guess.plan,
            # If the draft ended before all guesses were checked, the others are not counted.
            draft=guess.draft.first(len(added)),
            path=tuple(range(n_right)),
            draft_s=guess.draft_s,
            target_s=guess.decode_s,
            n_rows=0,  # the draft model's decodes are in its cost table already
            committed=added[: n_right + 1],
            proposed=tuple(each.first(len(added)) for each in guess.proposed if each.is_chain),
        )
        self._policy.observe(result)
        self._drafters.observe(result)
        token_s = (guess.draft_s + guess.decode_s) / (n_right + 1)
        if self._token_s is None:
            self._token_s = token_s
        self._token_s += _RATE * (token_s - self._token_s)

    def take_summary(self) -> str:
        """Return a sentence about the guesses for the finished draft, and start the next one."""
        n_guessed = self._n_guessed
        n_right = self._n_right
        why = self._why
        self._n_guessed = 0
        self._n_right = 0
        self._why = ""
        if n_guessed:
            return (
                f"the second draft guessed {n_guessed} of the draft's tokens, "
                f"{n_right} of them right"
            )
        return f"the second draft guessed nothing: {why or 'the draft is a single token'}"

    def rewind(self, n_tokens: int) -> None:
        """Forget all but the first `n_tokens` of the text, and the tokens of the draft model."""
        if self._shown:
            n_tokens = min(n_tokens, self._n_text)
        self._drafters.rewind(n_tokens)
        self._shown = ()
        self._guess = None

    def _show(self, text: Sequence[int], n_context: int) -> None:
        """Record that the drafters now see a text; first let them forget what is not part of it.

        Args:
            text: The text, followed by the draft model's tokens.
            n_context: The length of the text without these tokens.
        """
        n_same = common_prefix_length(self._shown, text[self._n_text :])
        if n_same < len(self._shown):
            self._drafters.rewind(self._n_text + n_same)
        self._shown = tuple(text[n_context:])
        self._n_text = n_context

    def _decoded_s(self) -> float:
        return sum(cache.decode_s for cache in self._caches)


class StagedDrafter(ModelDrafter):
    """Drafts chains with a model, whose tokens are guessed by a second draft.

    Args:
        backend: The model's context. It must be able to drop single cells.
        request: The answer to draft for.
        n_shared_tokens: See `ModelDrafter`.
        guesser: Guesses the model's tokens with the second draft.
    """

    def __init__(
        self,
        backend: Backend,
        request: DraftRequest,
        *,
        n_shared_tokens: int,
        guesser: DraftGuesser,
    ) -> None:
        super().__init__(backend, request, n_shared_tokens=n_shared_tokens)
        self._guesser = guesser
        #: The logits after the last tokens in the cache. The backend's next decode overwrites them.
        self._rows: Logits = np.empty((0, 0), np.float32)
        #: The backend's `n_decoded_rows` when it computed these logits, which are valid as long as
        #: it stays the same.
        self._n_decoded_rows = 0
        #: The guessed tokens at the end of the cache that the model has not confirmed yet.
        self._ahead: Sequence[int] = ()

    def price(self, n_context: int) -> Price:
        """Return the model's costs; each further token costs less with guesses."""
        price = super().price(n_context)
        return replace(price, next_s=self._guesser.token_s(price.next_s))

    def propose(
        self,
        context: Sequence[int],
        plan: RoundPlan,
        n_drafted: int = 0,
    ) -> Drafting:
        """Draft a chain: the one that the model would draft without guesses."""
        n_max = self._make_room(len(context), plan.n_max)
        if n_max < 1:
            return NO_DRAFT
        rows = yield from self._catch_up(context)
        # The cache may hold guesses of an earlier draft after the text, which may still be right.
        self._ahead = self._backend.text(self._sequence)[len(context) - self.n_skipped :]
        chain = self._start_draft(context, plan, n_drafted, n_max)

        def logits_after(_nodes: Sequence[int]) -> Decoding:
            """Return the logits after the chain's last token.

            If that token was guessed, its row is there already; else it is decoded with new
            guesses.
            """
            if self._ahead and self._ahead[0] == chain.tokens[-1]:
                self._ahead = self._ahead[1:]
            else:
                yield from self._decode_with_guesses(context, chain, n_drafted)
            # The last row follows the last guess that is not confirmed.
            row = len(self._rows) - 1 - len(self._ahead)
            return self._rows[row : row + 1, : self._n_shared_tokens]

        draft = yield from chain.grow(rows[0, : self._n_shared_tokens], logits_after)
        self._guesser.settle(chain.tokens)
        return replace(draft, guesses=self._guesser.take_summary())

    def rewind(self, n_tokens: int) -> None:
        """Let both drafts forget the tokens after the first `n_tokens`."""
        self._guesser.rewind(n_tokens)
        super().rewind(n_tokens)

    def _decode_with_guesses(
        self,
        context: Sequence[int],
        chain: Expansion,
        n_drafted: int,
    ) -> Generator[Ask, Logits, None]:
        """Decode the last token of the chain, together with guesses of the tokens after it."""
        backend = self._backend
        drafted = chain.tokens
        if self._ahead:  # the remaining guesses were wrong
            backend.remove(self._sequence, backend.length(self._sequence) - len(self._ahead))
        self._guesser.settle(drafted)
        # All rows are decoded in one batch, the first of them for the chain's last token.
        n_room = min(chain.n_max - len(drafted), backend.n_outputs, backend.n_batch) - 1
        self._ahead = yield from self._guesser.guess(context, drafted, n_room, n_drafted)
        before_s = backend.decode_s
        tokens = [drafted[-1], *self._ahead]
        self._rows = yield from self._decode(tokens, n_wanted=len(tokens))
        self._n_decoded_rows = backend.n_decoded_rows
        self._guesser.observe_decode(backend.decode_s - before_s)

    def _catch_up(self, context: Sequence[int]) -> Decoding:
        """Decode what the cache lacks of `context`.

        If the new tokens of the text were guessed before, and the logits of the last decode are
        still valid, nothing has to be decoded.

        Returns:
            The logits after the context, and after further tokens (guesses) that the cache holds,
            float32[n, n_vocab].
        """
        new = list(context[self._n_agreed :])
        start = max(0, self._n_agreed - self.n_skipped)
        cached = list(self._backend.text(self._sequence)[start:])
        were_guesses_right = bool(new) and new == cached[: len(new)]
        # The last row follows the last token in the cache; row `first` follows the text.
        n_guesses_after = len(cached) - len(new)
        first = len(self._rows) - 1 - n_guesses_after
        are_rows_valid = self._n_decoded_rows == self._backend.n_decoded_rows
        if were_guesses_right and are_rows_valid and first >= 0:
            self._n_agreed = len(context)
            return self._rows[first:]
        return (yield from super()._catch_up(context))
