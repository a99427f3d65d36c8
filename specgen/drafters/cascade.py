"""Drafters that draft together: what costs nothing before a model, and a cheaper drafter for a draft model."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.drafter import Ask, Drafter, Drafting, draft_alone
from specgen.method.policy import Offer, Policy, RoundPlan, RoundResult, draft_up_to
from specgen.method.tables import FREE, Price
from specgen.system.arrays import Logits
from specgen.text.prefix import n_common
from specgen.text.text_state import TextState

#: How fast the seconds of a drafted token follow the latest ones.
_RATE = 0.1


class Cascade:
    """A drafter that costs nothing, one that decodes, or both, for one sequence.

    In each round `look_up` comes first: the proposal of `free` (n-grams) is known before the round is
    planned. Then `propose` carries out the plan: it proposes what was found, or lets the model draft. With `state`, nothing is found that its grammar forbids.
    """

    def __init__(
        self,
        free: Drafter | None = None,
        model: Drafter | None = None,
        *,
        state: TextState | None = None,
    ) -> None:
        self.free = free
        self.model = model
        self._both = [each for each in (free, model) if each is not None]
        self._state = state

    @property
    def model_name(self) -> str | None:
        """The name of the drafter that decodes; None if there is none."""
        return None if self.model is None else self.model.name

    def look_up(self, context: Sequence[int], n_max: int, n_drafted: int = 0) -> Draft:
        """Begin a round, and return what the free drafter finds to follow the text; at most `n_max` tokens.
        The last `n_drafted` tokens of `context` are drafted too."""
        if self.free is None or n_max < 1:
            return NO_DRAFT
        found = draft_alone(self.free.propose(context, draft_up_to(n_max), n_drafted))
        if self._state is not None:
            found = self._state.within_grammar(found, context[len(context) - n_drafted :])
        return found

    def price(self, n_context: int) -> Price:
        """Return the price of the drafter that decodes, after a text of `n_context` tokens."""
        return FREE if self.model is None else self.model.price(n_context)

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        """Draft as planned; see `Drafter.propose`. `look_up` was called for this round."""
        if self.model is None or plan.n_max < 1:
            return plan.found
        return (yield from self.model.propose(context, plan, n_drafted))

    def observe(self, result: RoundResult) -> None:
        for drafter in self._both:
            drafter.observe(result)

    def rewind(self, n_tokens: int) -> None:
        """Forget all of the text but its first `n_tokens`; another text follows these."""
        for drafter in self._both:
            drafter.rewind(n_tokens)


class Guesses:
    """A cheaper drafter that guesses the tokens of a draft model (Spector & Re, arXiv:2308.04623, section 3.2).

    The draft model decodes the guessed tokens in one batch, draws each token from its own distribution, and goes on in
    the same batch while the drawn token is the guessed one (the rule of `MatchVerifier`). So its tokens and their
    distributions are those that it would have without guesses. A policy decides how much to guess, by the costs of the
    draft model's decodes.
    """

    def __init__(self, drafters: Cascade, policy: Policy) -> None:
        self._drafters = drafters
        self._policy = policy
        #: The last guess, which follows the first `_n_before` drafted tokens, and what was found and guessed for it
        #: before it was cut. Whether its result is still to be reported.
        self._guess = NO_DRAFT
        self._n_before = 0
        self._proposed: tuple[Draft, ...] = ()
        self._is_open = False
        self._plan: RoundPlan = draft_up_to(0)
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
        drafters, text, n_drafted = self._drafters, [*context, *drafted], n_before + len(drafted)
        n_same = n_common(self._shown, text[self._n_text :])
        if n_same < len(self._shown):  # some of what the drafter was shown did not become text
            drafters.rewind(self._n_text + n_same)
        self._shown, self._n_text = tuple(drafted), len(context)
        self._n_before, self._is_open, self._draft_s = len(drafted), True, 0.0
        n_max = min(self._policy.n_max, n_room)
        found = drafters.look_up(text, n_max, n_drafted)
        price = drafters.price(len(text))
        plan = self._policy.plan(Offer(n_room + 1, n_max, found, drafters.model_name, price))
        whole = yield from self._timed(drafters.propose(text, plan, n_drafted))
        guess = plan.stop.cut(whole)
        self._plan, self._proposed = plan, (found, whole)
        self._guess = guess if guess.is_chain else NO_DRAFT
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

    def rewind(self, n_tokens: int) -> None:
        """Forget all of the text but its first `n_tokens`."""
        self._drafters.rewind(min(n_tokens, self._n_text) if self._shown else n_tokens)
        self._shown, self._is_open = (), False

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
