"""Wrappers around drafters."""

from __future__ import annotations

from collections.abc import Sequence

from specgen.method.cost_table import Price
from specgen.method.drafter import Drafter, Drafting
from specgen.method.policy import RoundPlan, RoundResult


class WrappedDrafter:
    """Forwards every call to another drafter; subclasses override what differs."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    def price(self, n_context: int) -> Price:
        return self.inner.price(n_context)

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        return self.inner.propose(context, plan, n_drafted)

    def observe(self, result: RoundResult) -> None:
        self.inner.observe(result)

    def rewind(self, n_tokens: int) -> None:
        self.inner.rewind(n_tokens)


class PromptHeadSkipper(WrappedDrafter):
    """Lets `inner` draft for a text without the tokens at the positions `head`.

    This is for the text that a chat template puts before every prompt. Without it a draft model
    drafts nearly the same, and its prefill is shorter. No text ends within `head`.
    """

    def __init__(self, inner: Drafter, head: range) -> None:
        super().__init__(inner)
        self._head = head
        #: The text so far, without the head.
        self._text: list[int] = []

    def price(self, n_context: int) -> Price:
        return self.inner.price(n_context - len(self._head))

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        text, head = self._text, self._head
        text.extend(context[len(text) : head.start])
        text.extend(context[len(text) + len(head) :])
        return self.inner.propose(text, plan, n_drafted)

    def rewind(self, n_tokens: int) -> None:
        n_left_out = len(range(self._head.start, min(self._head.stop, n_tokens)))
        del self._text[n_tokens - n_left_out :]
        self.inner.rewind(n_tokens - n_left_out)
