"""The interface of a drafter."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from specgen.arrays import Logits
from specgen.backend.base import Backend, Batch
from specgen.calibration.cost_table import CostTable, Price
from specgen.core.draft import Draft
from specgen.policy import Policy, RoundReport

__all__ = ["Ask", "AskingDrafter", "Drafter", "Drafting", "Price", "draft_alone", "drafting_of"]


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


@dataclass(frozen=True, slots=True)
class Ask:
    """A batch that a drafter wants decoded before it goes on, and the table that learns what it
    takes."""

    backend: Backend
    batch: Batch
    costs: CostTable


#: A draft in the making: asks for decodes, is sent the logits of the rows that want them, and
#: returns the draft. The logits are valid until it asks for the next decode.
Drafting: TypeAlias = Generator[Ask, Logits, Draft]


class AskingDrafter(Drafter, Protocol):
    """A drafter that needs a model's decodes. It asks for them, so that those of several sequences
    can be one batch."""

    def drafting(
        self, context: Sequence[int], n_max: int, policy: Policy, n_drafted: int = 0
    ) -> Drafting:
        """As `propose`, step by step."""
        ...


def drafting_of(
    drafter: Drafter, context: Sequence[int], n_max: int, policy: Policy, n_drafted: int = 0
) -> Drafting:
    """A draft of any drafter, step by step."""
    # An `AskingDrafter`: to ask isinstance takes a hundred times as long.
    drafting: Callable[..., Drafting] | None = getattr(drafter, "drafting", None)
    if drafting is not None:
        return (yield from drafting(context, n_max, policy, n_drafted))
    return drafter.propose(context, n_max, policy, n_drafted)


def draft_alone(drafting: Drafting) -> Draft:
    """Make a draft, decoding whatever it asks for by itself."""
    try:
        ask = next(drafting)
        while True:
            before_s = ask.backend.decode_s
            logits = ask.backend.decode(ask.batch)
            ask.costs.observe(len(ask.batch), ask.backend.decode_s - before_s)
            ask = drafting.send(logits)
    except StopIteration as ended:
        draft: Draft = ended.value
        return draft
