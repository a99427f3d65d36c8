"""A drafter that does not read the beginning of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from specgen.calibration.cost_table import Price
from specgen.drafters.base import Drafter, Drafting, WrappedDrafter
from specgen.policy import RoundPlan


class PromptHeadSkipper(WrappedDrafter):
    """Lets `inner` draft for a text without the tokens at the places `head`.

    This is for the text that a chat template puts before every prompt. Without it a draft model
    drafts nearly the same, and has less to read before it starts. No text ends within `head`.
    """

    def __init__(self, inner: Drafter, head: range) -> None:
        super().__init__(inner)
        self._head = head
        #: The text so far, without the head.
        self._text: list[int] = []

    def price(self, n_context: int) -> Price:
        return self._inner.price(n_context - len(self._head))

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        text, head = self._text, self._head
        text.extend(context[len(text) : head.start])
        text.extend(context[len(text) + len(head) :])
        return self._inner.propose(text, plan, n_drafted)

    def rewind(self, n_tokens: int) -> None:
        n_left_out = len(range(self._head.start, min(self._head.stop, n_tokens)))
        del self._text[n_tokens - n_left_out :]
        self._inner.rewind(n_tokens - n_left_out)
