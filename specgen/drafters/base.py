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

    A drafter may fail; the loop then goes on without it. A drafter never changes the text, only
    how soon the text comes. The code that opened its context also closes it.
    """

    @property
    def name(self) -> str:
        """Its name in the display and the statistics: the `origin` of its tokens."""
        ...

    @property
    def model_s(self) -> float:
        """Seconds spent in a model's decodes so far; 0 for a drafter without one."""
        ...

    def price(self, n_context: int) -> Price:
        """What drafting would cost now, behind a text of `n_context` tokens."""
        ...

    def propose(
        self, context: Sequence[int], n_max: int, policy: Policy, n_drafted: int = 0
    ) -> Draft:
        """A draft of at most n_max >= 1 tokens to follow `context`; it may be empty.

        `context` holds all committed tokens, prompt and answer, followed by `n_drafted` tokens
        that another drafter proposed. It is the caller's list: read it, do not keep it. It only
        grows from call to call, unless `rewind` is called in between.
        """
        ...

    def observe(self, report: RoundReport) -> None:
        """Learn from the result of the last proposal."""
        ...

    def rewind(self, n_tokens: int) -> None:
        """Forget all of the text but its first `n_tokens`; another text follows these."""
        ...


@dataclass(frozen=True, slots=True)
class Ask:
    """A batch that a drafter needs decoded before it goes on, and the cost table that learns from
    the decode."""

    backend: Backend
    batch: Batch
    costs: CostTable


#: A draft in progress: a generator that asks for decodes, is sent the logits of the rows that want
#: them, and returns the draft. The logits are valid until it asks for the next decode.
Drafting: TypeAlias = Generator[Ask, Logits, Draft]


class AskingDrafter(Drafter, Protocol):
    """A drafter that needs a model's decodes. It asks for them, so that the decodes of several
    sequences can become one batch."""

    def drafting(
        self, context: Sequence[int], n_max: int, policy: Policy, n_drafted: int = 0
    ) -> Drafting:
        """As `propose`, step by step."""
        ...


def drafting_of(
    drafter: Drafter, context: Sequence[int], n_max: int, policy: Policy, n_drafted: int = 0
) -> Drafting:
    """A draft of any drafter, step by step."""
    # Whether it is an `AskingDrafter`: isinstance would take a hundred times as long.
    drafting: Callable[..., Drafting] | None = getattr(drafter, "drafting", None)
    if drafting is not None:
        return (yield from drafting(context, n_max, policy, n_drafted))
    return drafter.propose(context, n_max, policy, n_drafted)


def draft_alone(drafting: Drafting) -> Draft:
    """Make a draft, decoding each batch that it asks for on its own."""
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
