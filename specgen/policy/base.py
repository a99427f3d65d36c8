"""The interface of a policy, which decides how much to draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from specgen.calibration.cost_table import ALONE, Others, Price
from specgen.core.draft import NO_DRAFT, Draft
from specgen.core.growing_tree import GrowingTree


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What became of a round: what a policy and a drafter can learn from."""

    draft: Draft
    #: The accepted nodes.
    path: tuple[int, ...]
    #: Seconds of this sequence's drafting.
    draft_s: float
    #: Seconds of the target's batch and its rows, those of the other sequences in it included.
    target_s: float
    n_rows: int
    #: What the round added to the text: accepted tokens, then the target's own.
    committed: tuple[int, ...] = ()
    #: Sequences that had a part in the batch.
    n_sequences: int = 1


class Policy(Protocol):
    """Decides, before and while a drafter drafts, how far it goes.

    A round: the loop asks for `room`; a drafter that needs a model asks what the `prospect` is
    before its first decode, whether it `wants_more` for each token, and whether it `goes_on`
    before each further decode. What comes out is shortened by `trim`, verified, and observed.

    To keep drawn drafts unbiased, `wants_more` is asked *before* a token is drawn and sees only
    how sure the drafter can be at best, not the token; and `trim` leaves all of a draft that was
    drawn at random.
    """

    @property
    def needs_confidence(self) -> bool:
        """Whether `wants_more` looks at the confidence: it costs a pass over the logits."""
        ...

    def room(self, n_left: int, others: Others = ALONE) -> int:
        """The most tokens to draft in the round that begins; 0 decodes without a draft. So many
        tokens are expected to be left of the answer; `others` share the target's batch."""
        ...

    def prospect(self, origin: str, price: Price, after: Draft = NO_DRAFT) -> float:
        """What it promises to let a drafter begin at this price, `after` a chain that stands
        already: above 0 it should. To be compared with `worth`."""
        ...

    def worth(self, draft: Draft) -> float:
        """What it promises to verify the draft, compared with none: above 0 it should be."""
        ...

    def wants_more(self, n_drafted: int, confidence: float, origin: str = "model") -> bool:
        """Whether to draft a token of which the drafter can be so sure at best, after
        `n_drafted` others."""
        ...

    def goes_on(self, n_drafted: int, origin: str = "model") -> bool:
        """Whether it is worth a model's decode to look for another token after `n_drafted`."""
        ...

    def trim(self, draft: Draft) -> Draft:
        """The beginning of a finished draft that is worth verifying; of a tree the nodes, in
        another order perhaps."""
        ...

    def observe(self, report: RoundReport) -> None: ...

    def finish(self) -> None:
        """The text is finished: what it says of other texts may be counted. May be said twice."""
        ...


@runtime_checkable
class TreePolicy(Policy, Protocol):
    """A policy that can tell where a tree is worth growing."""

    def frontier(
        self, tree: GrowingTree, n_deepest: int, n_most: int, seconds: Callable[[int], float]
    ) -> list[int]:
        """The nodes of a tree that is not drawn at random beyond which a model is worth asking
        next: `n_most` at most, none of a depth of `n_deepest` or more with what follows it; none
        at all ends the tree. `seconds` are the model's for a batch of so many."""
        ...

    def pick(self, tree: GrowingTree, draft: Draft) -> Draft:
        """The nodes of a tree that has grown, as a draft, that are worth verifying, likeliest
        first."""
        ...
