"""Choose the place in an answer where a mistake would show most."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from specgen.core.draft import ROOT, Draft
from specgen.core.text_state import TextMark
from specgen.core.verifiers import Target, Verdict, Verifier
from specgen.engine.generation import Generation
from specgen.engine.loop import Loop
from specgen.proof.loop_events import check_drafting

#: Tokens of an answer in which to look for a place that tells much.
N_SEARCHED = 48


class _Scout:
    """A verifier that first looks how much a mistake would show in the round."""

    def __init__(self, inner: Verifier) -> None:
        self._inner = inner
        #: Of the last round: how likely the draft's first token is accepted, or refused, how
        #: likely the target is to say another than its favourite, and the same of what the
        #: token was drawn from; the least of these.
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


def find_place(loop: Loop, generation: Generation) -> TextMark | None:
    """The place before the round in which a mistake in judging drafts would show most.

    Nothing shows where the target is certain, where all drafts are accepted, or none. So it
    is the place where the least of these is largest: the chances that the first drafted token
    is accepted, that it is refused, that the target does not say its favourite token, and that
    a drawn draft is not the draft model's favourite.
    """
    scout = _Scout(generation.verifier)
    answering = replace(
        generation,
        verifier=scout,
        options=replace(generation.options, max_tokens=N_SEARCHED, stop=()),
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
