"""Staged drafting: a draft for the draft model."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from specgen.drafters.cascade import Cascade
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.drafter import Ask, Drafting
from specgen.method.policy import Offer, Policy, RoundPlan, RoundResult, draft_up_to
from specgen.system.arrays import Logits
from specgen.text.prefix import n_common


class Guesses:
    """A cheaper drafter that guesses the tokens of a draft model, and the results of its guesses.

    The draft model treats guesses as the target treats drafts. It decodes the guessed tokens in one
    batch, draws each token from its own distribution, and goes on in the same batch while the drawn
    token is the guessed one (the rule of `MatchVerifier`). So its tokens and the recorded
    distributions are those that it would have without guesses. A policy of the same kind decides
    how much to guess, by the costs of the draft model's decodes. (Spector & Re, arXiv:2308.04623,
    section 3.2.)
    """

    def __init__(self, drafters: Cascade, policy: Policy) -> None:
        self._drafters = drafters
        self._policy = policy
        #: The last guess, which follows the first `_n_before` drafted tokens; and whether its result
        #: is still to be reported.
        self._guess = NO_DRAFT
        #: What was found and guessed for it, before it was cut.
        self._proposed: tuple[Draft, ...] = ()
        self._plan: RoundPlan = draft_up_to(0)
        self._n_before = 0
        self._is_open = False
        self._draft_s = self._decode_s = 0.0
        #: Recent seconds for a drafted token; None before the first.
        self._token_s: float | None = None
        #: The drafted tokens behind the text that the drafter was shown, and the text's length then.
        self._shown: tuple[int, ...] = ()
        self._n_text = 0

    def token_s(self, plain_s: float) -> float:
        """Return the seconds for a drafted token; `plain_s` are those without guesses."""
        return plain_s if self._token_s is None else min(plain_s, self._token_s)

    def after(
        self, context: Sequence[int], drafted: Sequence[int], n_room: int, n_before: int
    ) -> Generator[Ask, Logits, Sequence[int]]:
        """Guess at most `n_room` tokens that follow the draft. The last `n_before` tokens of the context
        are drafted too, by another drafter."""
        self._guess, self._n_before = NO_DRAFT, len(drafted)
        self._is_open = True
        self._draft_s = 0.0
        n_max = min(self._policy.n_max, n_room)
        text = [*context, *drafted]
        self._take_back(text)
        drafters, n_text, n_drafted = self._drafters, len(text), n_before + len(drafted)
        found = drafters.look_up(text, n_max, n_drafted)
        self._plan = plan = self._policy.plan(
            Offer(n_room + 1, n_max, found, drafters.model_name, drafters.price(n_text))
        )
        whole = yield from self._timed(drafters.propose(text, plan, n_drafted))
        self._proposed, guess = (found, whole), plan.stop.cut(whole)
        self._guess = guess if guess.is_chain else NO_DRAFT
        self._shown, self._n_text = tuple(drafted), len(context)
        return self._guess.tokens

    def decoded(self, seconds: float) -> None:
        """Note how long the draft model took to decode the last guess and the token before it."""
        self._decode_s = seconds

    def settle(self, drafted: Sequence[int]) -> None:
        """Report the result of the last guess; `drafted` are the tokens that the model has drafted."""
        if not self._is_open:
            return
        self._is_open = False
        added = tuple(drafted[self._n_before :])
        n_right = n_common(self._guess.tokens, added)
        guess = self._guess.first(max(len(added), n_right))
        result = RoundResult(
            self._plan,
            guess,
            tuple(range(n_right)),
            self._draft_s,
            self._decode_s,
            0,  # the draft model's decodes are in its cost table already
            added[: n_right + 1],
            # What goes on behind the draft is not compared with another one.
            tuple(each.first(len(added)) for each in self._proposed if each.is_chain),
        )
        self._policy.observe(result)
        self._drafters.observe(result)
        token_s = (self._draft_s + self._decode_s) / max(1, n_right + 1)
        before = self._token_s
        self._token_s = token_s if before is None else before + 0.1 * (token_s - before)

    def rewind(self, n_tokens: int) -> None:
        """Forget all of the text but its first `n_tokens`."""
        self._drafters.rewind(min(n_tokens, self._n_text) if self._shown else n_tokens)
        self._shown = ()
        self._is_open = False

    def _timed(self, drafting: Drafting) -> Drafting:
        """Carry out a drafting, and count the seconds of its decodes."""
        logits: Logits | None = None
        while True:
            try:
                ask = next(drafting) if logits is None else drafting.send(logits)
            except StopIteration as ended:
                draft: Draft = ended.value
                return draft
            before_s = ask.backend.decode_s
            logits = yield ask
            self._draft_s += ask.backend.decode_s - before_s

    def _take_back(self, text: Sequence[int]) -> None:
        """Let the drafter forget the tokens that it was shown and that did not become text."""
        n_same = n_common(self._shown, text[self._n_text :])
        if n_same < len(self._shown):
            self._drafters.rewind(self._n_text + n_same)
        self._shown = ()
