"""The interface of whatever proposes drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specgen.calibration.cost_table import Price
from specgen.core.draft import Draft
from specgen.policy import Policy, RoundReport

__all__ = ["Drafter", "Price"]


class Drafter(Protocol):
    """Proposes drafts for one generation.

    A drafter may fail: the loop then goes on without it. It never changes the text, only how
    soon it comes. The context that it decodes in belongs to whoever made it.
    """

    @property
    def name(self) -> str:
        """What the display and the statistics call it: the `origin` of its tokens."""
        ...

    @property
    def model_s(self) -> float:
        """Seconds spent in a model's decodes so far; 0 for a drafter without one."""
        ...

    def price(self, n_context: int) -> Price:
        """What it would take now to draft for a text of so many tokens."""
        ...

    def propose(
        self, context: Sequence[int], n_max: int, policy: Policy, n_drafted: int = 0
    ) -> Draft:
        """A draft of at most n_max >= 1 tokens to follow `context`; it may be empty.

        `context` is all committed tokens, prompt and answer, and behind them `n_drafted` tokens
        that another drafter proposed. It is the caller's list: read it, do not keep it. From call
        to call it only grows, unless `rewind` comes between.
        """
        ...

    def observe(self, report: RoundReport) -> None:
        """What became of the last proposal."""
        ...

    def rewind(self, n_tokens: int) -> None:
        """Forget the text from its first `n_tokens` on: another one goes on from there."""
        ...
