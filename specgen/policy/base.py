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
    """The result of a round, from which policies and drafters learn."""

    draft: Draft
    #: The accepted nodes.
    path: tuple[int, ...]
    #: Seconds that this sequence's drafting took.
    draft_s: float
    #: Seconds and rows of the target's batch, those of other sequences included.
    target_s: float
    n_rows: int
    #: The tokens that the round added to the text: the accepted ones, then the target's own.
    committed: tuple[int, ...] = ()
    #: Sequences with rows in the batch.
    n_sequences: int = 1


class Policy(Protocol):
    """Decides how much is drafted, before and during drafting.

    In a round the loop first calls `room`. A drafter that needs a model calls `prospect` before
    its first decode, `wants_more` before each token, and `goes_on` before each further decode.
    The finished draft is shortened by `trim` and verified, and the result goes to `observe`.

    To keep drawn drafts unbiased, `wants_more` is called *before* a token is drawn. It sees only
    the drafter's largest probability, not the token. For the same reason `trim` drops no token
    that was drawn at random.
    """

    @property
    def needs_confidence(self) -> bool:
        """Whether `wants_more` uses the confidence, which costs a pass over the logits."""
        ...

    def room(self, n_left: int, others: Others = ALONE) -> int:
        """The most tokens to draft in the round that begins; 0 decodes without a draft. About
        `n_left` tokens of the answer are left; `others` share the target's batch."""
        ...

    def prospect(self, origin: str, price: Price, after: Draft = NO_DRAFT) -> float:
        """The expected gain if a drafter starts at this price; above 0 it should start. `after`
        is a chain that is drafted already. The gain can be compared with `worth`."""
        ...

    def worth(self, draft: Draft) -> float:
        """The expected gain of verifying the draft instead of none; above 0 it should be verified."""
        ...

    def wants_more(self, n_drafted: int, confidence: float, origin: str = "model") -> bool:
        """Whether to draft one more token after `n_drafted` tokens. `confidence` is the largest
        probability that the drafter gives to any token there."""
        ...

    def goes_on(self, n_drafted: int, origin: str = "model") -> bool:
        """Whether another token after `n_drafted` tokens is worth a decode of the model."""
        ...

    def trim(self, draft: Draft) -> Draft:
        """The part of a finished draft that is worth verifying: the first tokens of a chain, or
        nodes of a tree, perhaps in another order."""
        ...

    def observe(self, report: RoundReport) -> None: ...

    def finish(self) -> None:
        """End the text, and count what it shows about other texts. May be called twice."""
        ...


@runtime_checkable
class TreePolicy(Policy, Protocol):
    """A policy that also decides where a tree grows."""

    def frontier(
        self, tree: GrowingTree, n_deepest: int, n_most: int, seconds: Callable[[int], float]
    ) -> list[int]:
        """The nodes beyond which the model should look next, at most `n_most`; none ends the tree.
        Their children have depths below `n_deepest`. The tree is not drawn at random.
        `seconds(n)` is the model's time for a batch of n nodes."""
        ...

    def pick(self, tree: GrowingTree, draft: Draft) -> Draft:
        """The nodes of a finished tree that are worth verifying, likeliest first; `draft` is the
        whole tree."""
        ...
