"""Sample speculatively, again and again, from one position in a text, with the loop of `specgen run`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from specgen.decoding.backend import Backend
from specgen.decoding.loop import Loop
from specgen.decoding.policy import Offer, Policy, RoundPlan
from specgen.decoding.sequence import Sequence
from specgen.decoding.tally import Tally
from specgen.decoding.text_state import TextMark
from specgen.measure.proof.loop_events import check_drafting, drafted_by, tokens_told
from specgen.testing.bugs import Bug


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
        loop: Loop,
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
