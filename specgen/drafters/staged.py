"""Staged drafting: a draft for the draft model."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from specgen.arrays import Logits
from specgen.core.draft import NO_DRAFT
from specgen.drafters.base import Ask, Drafter, drafting_of
from specgen.policy import Policy, RoundReport


class Guesses:
    """What a cheaper drafter proposes to a draft model, and what comes of it.

    The draft model is to its own draft what the target is to it: it decodes the guessed tokens
    in one batch, draws each of its tokens from what it says itself, and goes on in the same
    batch while that is what was guessed (the rule of `MatchVerifier`). So what it drafts, and
    the distributions that go on record, are those that it would have without guesses. How much
    is guessed is for a policy of the same kind to say, by what the draft model's decodes cost.
    (Spector & Re, arXiv:2308.04623, section 3.2.)
    """

    def __init__(self, drafter: Drafter, policy: Policy) -> None:
        self._drafter = drafter
        self._policy = policy
        #: What was guessed to follow the first `_n_before` drafted tokens, and is not settled.
        self._guess = NO_DRAFT
        self._n_before = 0
        self._is_open = False
        self._draft_s = self._decode_s = 0.0
        #: Seconds for a drafted token of late; None before the first.
        self._token_s: float | None = None
        #: What the drafter was shown behind the text, and how long that was.
        self._shown: tuple[int, ...] = ()
        self._n_text = 0

    @property
    def model_s(self) -> float:
        """Seconds in a model's decodes so far."""
        return self._drafter.model_s

    def token_s(self, plain_s: float) -> float:
        """Seconds for a drafted token, without guesses in `plain_s`."""
        return plain_s if self._token_s is None else min(plain_s, self._token_s)

    def after(
        self, context: Sequence[int], drafted: Sequence[int], n_room: int, n_before: int = 0
    ) -> Generator[Ask, Logits, Sequence[int]]:
        """Guess how the draft goes on, by at most `n_room` tokens. Of the context the last
        `n_before` tokens are drafted too, by another drafter."""
        self._guess, self._n_before = NO_DRAFT, len(drafted)
        self._is_open = True
        self._draft_s = 0.0
        n_max = min(self._policy.room(n_room + 1), n_room)
        if n_max >= 1:
            text = [*context, *drafted]
            self._take_back(text)
            before_s = self._drafter.model_s
            n_drafted = n_before + len(drafted)
            guess = yield from drafting_of(self._drafter, text, n_max, self._policy, n_drafted)
            guess = self._policy.trim(guess)
            self._guess = guess if guess.is_chain else NO_DRAFT
            self._draft_s = self._drafter.model_s - before_s
            self._shown, self._n_text = tuple(drafted), len(context)
        return self._guess.tokens

    def decoded(self, seconds: float) -> None:
        """The draft model decoded the last guess, and the token before it, in so many seconds."""
        self._decode_s = seconds

    def settle(self, drafted: Sequence[int]) -> None:
        """Tell what became of the last guess: the model has drafted these tokens by now."""
        if not self._is_open:
            return
        self._is_open = False
        told = tuple(drafted[self._n_before :])
        n_right = 0
        for guessed, token in zip(self._guess.tokens, told, strict=False):
            if guessed != token:
                break
            n_right += 1
        guess = self._guess.first(max(len(told), n_right))
        report = RoundReport(
            guess,
            tuple(range(n_right)),
            self._draft_s,
            self._decode_s,
            0,  # the draft model itself tells its table what its decodes take
            told[: n_right + 1],
        )
        self._policy.observe(report)
        self._drafter.observe(report)
        token_s = (self._draft_s + self._decode_s) / max(1, n_right + 1)
        before = self._token_s
        self._token_s = token_s if before is None else before + 0.1 * (token_s - before)

    def rewind(self, n_tokens: int) -> None:
        """Forget the text from its first `n_tokens` on."""
        self._drafter.rewind(min(n_tokens, self._n_text) if self._shown else n_tokens)
        self._shown = ()
        self._is_open = False

    def _take_back(self, text: Sequence[int]) -> None:
        """Let the drafter forget what it was shown and the text does not say."""
        n_same = 0
        for shown, token in zip(self._shown, text[self._n_text :], strict=False):
            if shown != token:
                break
            n_same += 1
        if n_same < len(self._shown):
            self._drafter.rewind(self._n_text + n_same)
        self._shown = ()
