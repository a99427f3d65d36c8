"""Choose the position in an answer where a wrong verification of drafts would be most visible."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from specgen.decoding.draft import ROOT, Draft
from specgen.decoding.loop import Loop
from specgen.decoding.sequence import Sequence
from specgen.decoding.text_state import TextMark
from specgen.decoding.verifiers import Target, Verdict, Verifier
from specgen.measure.proof.loop_events import check_drafting

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


def find_place(loop: Loop, sequence: Sequence) -> TextMark | None:
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
