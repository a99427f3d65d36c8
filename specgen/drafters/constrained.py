"""Keep a drafter within the grammar of the text."""

from __future__ import annotations

from collections.abc import Sequence

from specgen.core.text_state import TextState
from specgen.drafters.base import Drafter, Drafting
from specgen.drafters.wrapped import WrappedDrafter
from specgen.policy import Policy


class ConstrainedDrafter(WrappedDrafter):
    """Cuts the drafts of `inner` where the grammar of `state` rejects them.

    Such tokens could not be accepted, and a model that drafts on behind them would have no grammar
    state. `inner` must not draw at random.
    """

    def __init__(self, inner: Drafter, state: TextState) -> None:
        super().__init__(inner)
        self._state = state

    def drafting(
        self, context: Sequence[int], n_max: int, policy: Policy, n_drafted: int = 0
    ) -> Drafting:
        draft = yield from super().drafting(context, n_max, policy, n_drafted)
        return self._state.within_grammar(draft, context[len(context) - n_drafted :])
