"""A tree of drafted tokens while it grows."""

from __future__ import annotations

from collections.abc import Sequence

from specgen.method.draft import ROOT, Draft
from specgen.text.sampling import Distribution


class TreeBuilder:
    """The nodes that a drafter proposes, in the order in which it found them; parents come first.

    To *look beyond* a node is to ask the drafter which tokens follow it. These become the node's
    children, the likeliest or first drawn one first. The look beyond the root starts the tree.
    """

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.tokens: list[int] = []
        self.parents: list[int] = []
        #: The drafter's probability of each token, and the distribution that it was drawn from.
        self.probabilities: list[float] = []
        self.distributions: list[Distribution | None] = []
        #: Children of the root have depth 0.
        self.depths: list[int] = []
        #: Each node's rank among its siblings.
        self.ranks: list[int] = []
        #: Whether a node and all its ancestors are the first of their siblings.
        self.is_first_choice: list[bool] = []
        #: The number of children of a node, or of `ROOT`; and the nodes that were not looked beyond
        #: and may have children.
        self._n_children: dict[int, int] = {}
        self._open: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def add(
        self,
        parent: int,
        token: int,
        probability: float,
        *,
        source: Distribution | None = None,
        is_end: bool = False,
    ) -> int:
        """Add a child of a node, or of `ROOT`, after its other children; return the new node. With `is_end`
        its token ends the text, and the node gets no children."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.probabilities.append(probability)
        self.distributions.append(source)
        self.depths.append(0 if parent == ROOT else self.depths[parent] + 1)
        rank = self._n_children.get(parent, 0)
        self._n_children[parent] = rank + 1
        self.ranks.append(rank)
        is_first = rank == 0 and (parent == ROOT or self.is_first_choice[parent])
        self.is_first_choice.append(is_first)
        if not is_end:
            self._open.append(node)
        return node

    def look_beyond(self, node: int) -> None:
        """Note that the drafter looks beyond a node."""
        self._open.remove(node)

    def child(self, node: int, token: int) -> int | None:
        """Return the child of a node, or of `ROOT`, with this token; None if there is none."""
        for other in range(node + 1, len(self.tokens)):
            if self.parents[other] == node and self.tokens[other] == token:
                return other
        return None

    def path(self, node: int) -> list[int]:
        """Return the tokens from the root down to `node`; none for `ROOT`."""
        tokens = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def open_nodes(self, n_deepest: int) -> list[int]:
        """Return the nodes of depths below `n_deepest` that may have children and were not expanded yet."""
        return [node for node in self._open if self.depths[node] < n_deepest]

    def draft(self, walks: Sequence[Sequence[int]] = ()) -> Draft:
        """Return the whole tree as a draft; `walks` as in `Draft`."""
        n = len(self.tokens)
        return Draft(
            tuple(self.tokens),
            tuple(self.parents),
            (self.origin,) * n,
            tuple(self.probabilities),
            tuple(self.distributions),
            tuple(tuple(walk) for walk in walks),
        )
