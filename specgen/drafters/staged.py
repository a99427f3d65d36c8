"""A cheaper drafter drafts for the draft model (Spector & Re, arXiv:2308.04623, section 3.2)."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from specgen.method.backend import Backend
from specgen.method.cascade import Cascade
from specgen.method.cost_table import FREE
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.drafter import Ask
from specgen.method.policy import Offer, Policy, RoundPlan, RoundResult
from specgen.system.arrays import Logits
from specgen.text.overlap import common_prefix_length

_RATE = 0.1  # how fast the seconds of a drafted token follow the latest ones


class SecondDraft:
    """A cheaper drafter that guesses the tokens of a draft model (Spector & Re, arXiv:2308.04623,
    section 3.2).

    The draft model decodes the guessed tokens in one batch, draws each token from its own
    distribution, and goes on in the same batch while the drawn token is the guessed one, as
    `MatchVerifier` does: so it drafts what it would without guesses. A policy decides how much to
    guess, by the costs of the draft model's decodes.
    """

    def __init__(self, drafters: Cascade, policy: Policy, caches: Sequence[Backend] = ()) -> None:
        self._drafters, self._policy = drafters, policy
        self._caches = caches  # in which the drafter decodes
        #: The last guess, behind `_n_before` drafted tokens, and what it was cut from. Whether its
        #: result is to come.
        self._guess = NO_DRAFT
        self._n_before = 0
        self._proposed: tuple[Draft, ...] = ()
        self._is_open = False
        self._plan: RoundPlan = RoundPlan("fixed", 0)
        self._draft_s = self._decode_s = 0.0
        #: Recent seconds for a drafted token; None before the first.
        self._token_s: float | None = None
        #: The drafted tokens behind the text that the drafter was shown, and the text's length
        #: then.
        self._shown: tuple[int, ...] = ()
        self._n_text = 0
        #: The guessed tokens of the present draft, and how many of them were right.
        self._n_guessed = self._n_right = 0
        self._why = ""  # the first reason of the present draft

    def token_s(self, plain_s: float) -> float:
        return plain_s if self._token_s is None else min(plain_s, self._token_s)

    def after(
        self, context: Sequence[int], drafted: Sequence[int], n_room: int, n_before: int
    ) -> Generator[Ask, Logits, Sequence[int]]:
        """Guess at most `n_room` tokens. The last `n_before` of the context are drafted too, by
        another drafter.
        """
        drafters, text, n_drafted = self._drafters, [*context, *drafted], n_before + len(drafted)
        n_same = common_prefix_length(self._shown, text[self._n_text :])
        if n_same < len(self._shown):  # some of what the drafter was shown did not become text
            drafters.rewind(self._n_text + n_same)
        self._shown, self._n_text = tuple(drafted), len(context)
        self._n_before, self._is_open = len(drafted), True
        n_max = min(self._policy.n_max, n_room)
        found = drafters.look_up(text, n_max, n_drafted)
        price = FREE if drafters.model is None else drafters.model.price(len(text))
        plan = self._policy.plan(Offer(n_room + 1, n_max, found, drafters.model_name, price))
        before_s = self._decoded_s()
        whole = yield from drafters.propose(text, plan, n_drafted)
        self._draft_s = self._decoded_s() - before_s
        guess = plan.stop.cut(whole)
        self._plan, self._proposed = plan, (found, whole)
        self._why = self._why or plan.why
        self._guess = guess if guess.is_chain else NO_DRAFT
        self._n_guessed += len(self._guess)
        return self._guess.tokens

    def decoded(self, seconds: float) -> None:
        self._decode_s = seconds

    def settle(self, drafted: Sequence[int]) -> None:
        """Report the result of the last guess; `drafted` are the tokens that the model has drafted."""
        if not self._is_open:
            return
        self._is_open = False
        added = tuple(drafted[self._n_before :])
        n_right = common_prefix_length(self._guess.tokens, added)
        self._n_right += n_right
        result = RoundResult(
            self._plan,
            self._guess.first(len(added)),
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
        token_s = (self._draft_s + self._decode_s) / (n_right + 1)
        before = token_s if self._token_s is None else self._token_s
        self._token_s = before + _RATE * (token_s - before)

    def in_words(self) -> str:
        """Return what was guessed of the draft that is done, and begin the next one."""
        n_guessed, n_right, why = self._n_guessed, self._n_right, self._why
        self._n_guessed, self._n_right, self._why = 0, 0, ""
        if n_guessed:
            return f"the second draft guessed {n_guessed} of the draft's tokens, {n_right} of them right"
        return f"the second draft guessed nothing: {why or 'the draft is a single token'}"

    def rewind(self, n_tokens: int) -> None:
        self._drafters.rewind(min(n_tokens, self._n_text) if self._shown else n_tokens)
        self._shown, self._is_open = (), False

    def _decoded_s(self) -> float:
        return sum(cache.decode_s for cache in self._caches)
