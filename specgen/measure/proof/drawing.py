"""Sample speculatively, again and again, from the position in a text where a wrong verification of drafts would be
most visible, with the loop of `specgen run`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from specgen.measure.proof.drafting_plans import check_drafting, drafted_by, tokens_told
from specgen.method.backend import Backend
from specgen.method.draft import ROOT, Draft
from specgen.method.policy import Offer, Policy, RoundPlan
from specgen.method.verify import Target, Verdict, Verifier
from specgen.session.answer_loop import AnswerLoop
from specgen.testing.bugs import Bug
from specgen.text.sequence import Sequence
from specgen.text.tally import Tally
from specgen.text.text_state import TextMark

#: The number of an answer's first tokens that are searched for the position.
N_SEARCHED = 48


class _Scout:
    """A verifier that first computes how visible a wrong verification would be in the round."""

    def __init__(self, inner: Verifier) -> None:
        self._inner = inner
        #: For the last round, the smallest of these probabilities: the draft's first token is accepted; it
        #: is rejected; the target does not choose its most likely token; and, if the draft was sampled,
        #: the drafter does not choose its own.
        self.chance = 0.0

    @property
    def wants_draws(self) -> bool:
        return self._inner.wants_draws

    def verify(self, draft: Draft, target: Target, rng: np.random.Generator) -> Verdict:
        children = draft.children(ROOT)
        if children:
            wanted, first = target(ROOT), children[0]
            drawn_from = draft.drawn_from(first)
            refused = wanted.excess(drawn_from)
            unsure = [wanted]
            if draft.distributions[first] is not None:
                unsure.append(drawn_from)
            self.chance = min(
                refused, 1.0 - refused, *(1.0 - float(each.probs.max()) for each in unsure)
            )
        return self._inner.verify(draft, target, rng)


def find_place(loop: AnswerLoop, sequence: Sequence) -> TextMark | None:
    """Return the position before the round in which a wrong verification would be most visible; None if
    nothing was drafted. Raise the error that ended the answer, if one did.

    A mistake is invisible if the target is certain, or if all drafts are accepted, or none. So this
    takes the round in which the smallest of these probabilities is largest: the first drafted token is
    accepted; it is rejected; the target does not choose its most likely token; and, if the draft was
    sampled, the drafter does not choose its own.
    """
    scout = _Scout(sequence.verifier)
    answering = replace(
        sequence,
        verifier=scout,
        options=replace(sequence.options, max_tokens=N_SEARCHED, stop=()),
    )
    best: TextMark | None = None
    best_chance = -1.0
    loop.start(answering)
    while not answering.is_finished:
        place, n_drafted = answering.state.mark(), answering.tally.n_drafted
        check_drafting(loop.round([answering]))
        if answering.tally.n_drafted > n_drafted and scout.chance > best_chance:
            best, best_chance = place, scout.chance
    if answering.failure is not None:
        raise answering.failure
    return best


class _UpTo:
    """A policy that limits drafts to a length, which is set for each draw."""

    def __init__(self, inner: Policy) -> None:
        self._inner = inner
        self.limit = 1
        self.observe, self.finish = inner.observe, inner.finish

    @property
    def n_max(self) -> int:
        return min(self.limit, self._inner.n_max)

    def plan(self, offer: Offer) -> RoundPlan:
        return self._inner.plan(replace(offer, n_most=min(self.limit, offer.n_most)))


class Drawer:
    """Generates the next `depth` tokens after `place`, again and again.

    The limit of drafts changes with each draw: one token, two, and so on up to `depth` or `n_longest`,
    in turn. The bonus token after a wholly accepted draft is therefore among the tested tokens, for any
    `n_longest`.
    """

    def __init__(
        self,
        loop: AnswerLoop,
        target: Backend,
        sequence: Sequence,
        place: TextMark,
        depth: int,
        n_longest: int,
        bug: Bug | None,
    ) -> None:
        self._loop = loop
        self._target = target
        self._place = place
        self._depth = depth
        self._loses_bonus = bug is not None and bug.loses_bonus
        self._policy = _UpTo(sequence.policy)
        self._n_lengths = max(1, min(depth, n_longest))
        self._sequence = replace(
            sequence,
            policy=self._policy,
            # Enough room for a whole draft in the last round too.
            options=replace(sequence.options, max_tokens=2 * depth + 2, stop=()),
        )
        if bug is not None:
            bug.plant(self._sequence)
        #: Counts over all draws.
        self.tally = Tally()
        self.drafted_by: Counter[str] = Counter()

    def draw(self) -> tuple[int, ...]:
        """Return the tokens of one draw; fewer than `depth` if the text ended."""
        place = self._place
        self._policy.limit = 1 + self._policy.limit % self._n_lengths
        self._sequence.state.rewind(place)
        self._target.remove(0, place.n_tokens - 1)
        if self._sequence.drafters is not None:
            self._sequence.drafters.rewind(place.n_tokens)
        once = replace(self._sequence, tally=Tally(), finish_reason=None)
        told: list[int] = []
        while len(told) < self._depth and not once.is_finished:
            events = self._loop.round([once])
            check_drafting(events)
            if once.failure is not None:
                raise once.failure
            told += tokens_told(events, loses_bonus=self._loses_bonus)
            self.drafted_by += drafted_by(events)
        self.tally.n_rounds += once.tally.n_rounds
        self.tally.n_drafted += once.tally.n_drafted
        self.tally.n_accepted += once.tally.n_accepted
        return tuple(told[: self._depth])
