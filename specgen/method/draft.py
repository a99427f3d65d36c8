"""A draft: the small tree of tokens that the target is asked to check in one batch.

Everything downstream (packing, verification, commit, display, statistics) is written for
the tree; a chain is a tree with one branch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specgen.method.backend import Backend, Batch
from specgen.method.distribution import Distribution

#: Parent of the nodes that follow the last committed token directly. The logits of node i are row i + 1, so those
#: of the root are row 0.
ROOT = -1


@dataclass(frozen=True, slots=True)
class Draft:
    """n proposed tokens as a tree; parents come before their children.

    `tokens[i]` is node i's token id and `parents[i] < i` its parent (`ROOT` for children of
    the last committed token). `origins[i]` names the drafter. `probabilities[i]` is the drafter's
    probability of the token, if it has one. Policies and the display use it, verifiers do not.

    `distributions[i]`, where present, is the distribution that the token was *drawn from at
    random*; among siblings, given the earlier ones. A token chosen deterministically (an argmax, an
    n-gram match) has None. Verifiers rely on this distinction: testing a token against a
    distribution that it was not drawn from gives biased text.

    `walks` is set if the draft consists of several chains that were drawn independently of each
    other. It lists the nodes of each chain from a child of the root down, in the order of the
    draws. Walks with a common prefix share nodes, so a token that was drawn twice is decoded once
    and judged twice. Walks stay whole: leaving out a drawn token because of what it is would bias
    the text.

    Raises `ValueError` if the lengths differ, if a parent does not come before its child, or if a
    walk is not a path from the root down.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    origins: tuple[str, ...]
    probabilities: tuple[float | None, ...]
    distributions: tuple[Distribution | None, ...]
    walks: tuple[tuple[int, ...], ...] = ()
    #: The largest probability that the drafter gave to any token at each of its looks, in their order. In a
    #: chain, look i comes before its token i; if there is one more look, it ended the draft.
    looks: tuple[float, ...] = field(default=(), compare=False)
    #: Whether the draft has one branch only. Most drafts do, and most methods are simple for these.
    is_chain: bool = field(init=False, repr=False, compare=False)
    #: The children of a tree's nodes, computed when they are first needed.
    _below: dict[int, list[int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        n = len(self.tokens)
        n_probabilities, n_distributions = len(self.probabilities), len(self.distributions)
        if not len(self.parents) == len(self.origins) == n_probabilities == n_distributions == n:
            raise ValueError(f"a draft of {n} tokens needs {n} of each of its fields")
        is_chain = self.parents == tuple(range(ROOT, n - 1))
        object.__setattr__(self, "is_chain", is_chain)
        for walk in self.walks:
            if not walk or [self.parents[node] for node in walk] != [ROOT, *walk[:-1]]:
                raise ValueError(f"{walk} is no walk from the root down")
        if is_chain:
            return
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"node {node} has parent {parent}: parents come first")

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        origin: str,
        probabilities: Sequence[float | None] | None = None,
        distributions: Sequence[Distribution | None] | None = None,
        looks: Sequence[float] = (),
    ) -> Draft:
        """Return a draft with one branch."""
        n = len(tokens)
        return cls(
            tokens=tuple(tokens),
            parents=tuple(range(ROOT, n - 1)),
            origins=(origin,) * n,
            probabilities=tuple(probabilities) if probabilities else (None,) * n,
            distributions=tuple(distributions) if distributions else (None,) * n,
            looks=tuple(looks),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_drawn(self) -> bool:
        """Whether any token was drawn at random."""
        return self.distributions.count(None) < len(self.distributions)

    @property
    def n_drawn(self) -> int:
        """The number of nodes up to the last one that was drawn at random; 0 if none was."""
        drawn = (n + 1 for n, source in enumerate(self.distributions) if source is not None)
        return max(drawn, default=0)

    @property
    def has_free_end(self) -> bool:
        """Whether the nodes up to the last drawn one are a chain, and all others are after its end. The
        others may then be left out, since no draw depends on them."""
        n_drawn = self.n_drawn
        return (
            not self.walks
            and self.parents[:n_drawn] == tuple(range(ROOT, n_drawn - 1))
            and all(parent >= n_drawn - 1 for parent in self.parents[n_drawn:])
        )

    def drawn_from(self, node: int) -> Distribution:
        """Return the distribution that a node's token was drawn from: all mass on the token if it was not
        drawn."""
        return self.distributions[node] or Distribution.certain(self.tokens[node])

    def children(self, node: int) -> Sequence[int]:
        """Return the nodes below `node` (or `ROOT`), in the order they were drafted."""
        if self.is_chain:
            return (node + 1,) if node + 1 < len(self.tokens) else ()
        below = self._below
        if not below:
            for child, parent in enumerate(self.parents):
                below.setdefault(parent, []).append(child)
        return below.get(node, ())

    def tries(self, node: int, walks: Sequence[Sequence[int]], depth: int) -> Sequence[int]:
        """Return the nodes at this depth below `node` (or `ROOT`), in the order in which they are judged:
        its children or, in a draft of independent walks, the next nodes of `walks`. A node that was drawn
        several times is repeated."""
        if not self.walks:
            return self.children(node)
        return [walk[depth] for walk in walks if len(walk) > depth]

    def ranks(self) -> list[int]:
        """Return each node's rank, from 0 on, among its siblings from the same drafter: the number of
        guesses that its drafter preferred to it."""
        if self.is_chain:
            return [0] * len(self)
        n_before: Counter[tuple[int, str]] = Counter()
        ranks = []
        for place in zip(self.parents, self.origins, strict=True):
            ranks.append(n_before[place])
            n_before[place] += 1
        return ranks

    def depths(self) -> list[int]:
        """Return each node's depth; children of the root have depth 0."""
        if self.is_chain:
            return list(range(len(self.tokens)))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return depths

    def path(self, node: int) -> list[int]:
        """Return the nodes from a child of the root down to `node`, inclusive; none for `ROOT`."""
        if self.is_chain:
            return list(range(node + 1))
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def text(self, node: int) -> tuple[int, ...]:
        """Return the tokens of the path to `node`."""
        return tuple(self.tokens[i] for i in self.path(node))

    def leaves(self) -> list[int]:
        """Return the nodes without children, in order."""
        inner = set(self.parents)
        return [node for node in range(len(self)) if node not in inner]

    def followed_by(self, other: Draft) -> Draft:
        """Return this chain with another draft appended to its last node. Raise `ValueError` if one of them
        consists of independent walks, which cannot be part of a longer draft."""
        if not len(other):
            return replace(self, looks=self.looks + other.looks) if other.looks else self
        if self.walks or other.walks:
            raise ValueError("independent walks cannot be a part of a longer draft")
        n = len(self)
        return Draft(
            self.tokens + other.tokens,
            self.parents + tuple(n + parent for parent in other.parents),
            self.origins + other.origins,
            self.probabilities + other.probabilities,
            self.distributions + other.distributions,
            looks=self.looks + other.looks,
        )

    def merged_with(self, other: Draft) -> Draft:
        """Return a tree with the nodes of both drafts; for the same text, the node of this draft is kept.
        Raise `ValueError` if a token was sampled: a merged node could stand for a token that was sampled
        and for one that was not."""
        if self.is_drawn or other.is_drawn:
            raise ValueError("drafts that were drawn at random cannot be merged")
        found = {
            place: node for node, place in enumerate(zip(self.parents, self.tokens, strict=True))
        }
        index, added = {ROOT: ROOT}, list[int]()
        for node, (parent, token) in enumerate(zip(other.parents, other.tokens, strict=True)):
            place = (index[parent], token)
            if place not in found:
                found[place] = len(self) + len(added)
                added.append(node)
            index[node] = found[place]
        if not added:
            return self
        return Draft(
            (*self.tokens, *(other.tokens[node] for node in added)),
            (*self.parents, *(index[other.parents[node]] for node in added)),
            (*self.origins, *(other.origins[node] for node in added)),
            (*self.probabilities, *(other.probabilities[node] for node in added)),
            (None,) * (len(self) + len(added)),
            looks=self.looks,
        )

    def first(self, n: int) -> Draft:
        """Return the first n nodes, which are a tree too, since parents come first. Raise `ValueError` if
        this would drop nodes of independent walks."""
        return self if n >= len(self.tokens) else self.only(range(n))

    def only(self, nodes: Sequence[int]) -> Draft:
        """Return a draft of these nodes, in this order; parents must be among them, before their children.
        Raise `ValueError` if this would drop nodes of independent walks."""
        if list(nodes) == list(range(len(self))):
            return self
        if self.walks and len(nodes) < len(self):
            raise ValueError("no node of independent walks may be left out")
        index = {ROOT: ROOT} | {node: number for number, node in enumerate(nodes)}
        return Draft(
            tuple(self.tokens[node] for node in nodes),
            tuple(index[self.parents[node]] for node in nodes),
            tuple(self.origins[node] for node in nodes),
            tuple(self.probabilities[node] for node in nodes),
            tuple(self.distributions[node] for node in nodes),
            tuple(tuple(index[node] for node in walk) for walk in self.walks),
            self.looks,
        )


#: No draft: the target decodes one token.
NO_DRAFT = Draft((), (), (), (), ())


@dataclass(frozen=True, slots=True)
class Branches:
    """The sequence ids of one text in a cache: `first` to `first + n_branches`, exclusive."""

    first: int = 0
    n_branches: int = 1

    def of_leaves(self, n: int) -> tuple[int, ...]:
        """Return the sequences for a tree with n leaves, at least the one of the committed text.
        Raise `ValueError` if the slot has fewer."""
        if n > self.n_branches:
            raise ValueError(f"the draft has {n} branches, the slot room for {self.n_branches}")
        return tuple(range(self.first, self.first + max(1, n)))


def pack(
    batch: Batch, backend: Backend, slot: Branches, pending: Sequence[int], draft: Draft
) -> None:
    """Add a generation's rows to a batch: its pending tokens, then its draft.

    `pending` are the committed tokens that the cache does not hold yet, at least one. The last of
    them (the root) and every node of the draft want logits. That gives 1 + len(draft) rows of
    logits: index 0 is the root, index 1 + i is node i.
    """
    n_past = backend.length(slot.first)
    if len(draft):
        backend.checkpoint(slot.first)
    leaves = draft.leaves()
    branches = slot.of_leaves(len(leaves))
    for branch in branches[1:]:
        backend.copy(slot.first, branch)
    last = len(pending) - 1
    for offset, token in enumerate(pending):
        batch.add(token, n_past + offset, branches, offset == last)
    passing = [branches] * len(draft)
    if len(branches) > 1:
        paths = [set(draft.path(leaf)) for leaf in leaves]
        passing = [
            tuple(branch for branch, path in zip(branches, paths, strict=True) if node in path)
            for node in range(len(draft))
        ]
    for token, depth, through in zip(draft.tokens, draft.depths(), passing, strict=True):
        batch.add(token, n_past + len(pending) + depth, through, True)


def keep_path(backend: Backend, slot: Branches, draft: Draft, path: Sequence[int]) -> None:
    """Drop the rejected nodes of a decoded tree from the KV cache: the text and the accepted path stay.

    `path` are nodes from a child of the root down; it may be empty. Raise `RollbackError` if the cache cannot
    drop the rest.
    """
    if len(path) == len(draft):
        return  # a chain, kept whole
    paths = [draft.path(leaf) for leaf in draft.leaves()]
    branches = slot.of_leaves(len(paths))
    # The slot's first sequence is the branch that ends at the first leaf.
    n_before = backend.length(slot.first) - len(paths[0])
    if path:
        kept = next(b for b, nodes in zip(branches, paths, strict=True) if path[-1] in nodes)
        if kept != slot.first:
            backend.remove(slot.first, n_before)
            backend.copy(kept, slot.first, n_before, n_before + len(path))
    backend.remove(slot.first, n_before + len(path))
    for branch in branches[1:]:
        backend.remove(branch)
