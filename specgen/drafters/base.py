"""The interface of a drafter."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from specgen.arrays import Logits
from specgen.backend.base import Backend, Batch
from specgen.calibration.cost_table import CostTable, Price
from specgen.core.draft import Draft
from specgen.policy import RoundPlan, RoundResult

__all__ = ["Ask", "Drafter", "Drafting", "Price", "WrappedDrafter", "draft_alone", "ready"]


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


class Drafter(Protocol):
    """Proposes drafts for one sequence.

    A drafter may fail; the loop then goes on without it. A drafter never changes the text, only
    how soon the text comes. The code that opened its context also closes it.
    """

    @property
    def name(self) -> str:
        """Its name in the display and the statistics: the `origin` of its tokens."""
        ...

    def price(self, n_context: int) -> Price:
        """Return what drafting would cost now, behind a text of `n_context` tokens."""
        ...

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        """Draft at most `plan.n_max` >= 1 tokens to follow `context`, as far as `plan.keeps` and
        `plan.looks` allow. The draft may be empty.

        `context` holds all committed tokens, prompt and answer, followed by `n_drafted` tokens
        that another drafter proposed. It is the caller's list: read it, do not keep it. It only
        grows from call to call, unless `rewind` is called in between.
        """
        ...

    def observe(self, result: RoundResult) -> None:
        """Learn from the result of the last round."""
        ...

    def rewind(self, n_tokens: int) -> None:
        """Forget all of the text but its first `n_tokens`; another text follows these."""
        ...


def ready(draft: Draft) -> Drafting:
    """Return the drafting of a drafter that needs no decode: it is done already."""
    yield from ()
    return draft


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


class WrappedDrafter:
    """Forwards every call to another drafter; subclasses override what differs."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    def price(self, n_context: int) -> Price:
        return self._inner.price(n_context)

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        return self._inner.propose(context, plan, n_drafted)

    def observe(self, result: RoundResult) -> None:
        self._inner.observe(result)

    def rewind(self, n_tokens: int) -> None:
        self._inner.rewind(n_tokens)
