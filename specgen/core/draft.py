"""A draft: the small tree of tokens that the target is asked to check in one batch.

Everything downstream (packing, verification, commit, display, statistics) is written for
the tree; a chain is a tree with one branch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from specgen.sampling import Distribution

#: Parent of the nodes that follow the last committed token directly.
ROOT = -1


@dataclass(frozen=True, slots=True)
class Draft:
    """n proposed tokens as a tree; parents come before their children.

    `tokens[i]` is node i's token id and `parents[i] < i` its parent (`ROOT` for children of
    the last committed token). `origins[i]` names the drafter. `probabilities[i]` is what the
    drafter thinks of the token, if it thinks anything: for display and statistics only.

    `distributions[i]`, where present, is the distribution that the token was *drawn from at
    random*; among siblings, given the earlier ones. A token chosen without chance (an argmax,
    an n-gram match) has None. Verifiers rely on this distinction: testing a token against a
    distribution that it was not drawn from gives biased text.

    `walks` are there if the draft is several chains that were drawn independently of each other,
    in the order of the draws: the nodes of each, from a child of the root down. Walks that begin
    alike share these nodes, so a token that was drawn twice is decoded once and judged twice.
    Walks stay whole: a token that was drawn and is left out for what it says would bias the text.

    Raises `ValueError` if the lengths differ, a parent does not come before its child, or a walk
    is none.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    origins: tuple[str, ...]
    probabilities: tuple[float | None, ...]
    distributions: tuple[Distribution | None, ...]
    walks: tuple[tuple[int, ...], ...] = ()
    #: Whether it has one branch only. Most drafts do, and have simple answers to most questions.
    is_chain: bool = field(init=False, repr=False, compare=False)
    #: The children of a tree's nodes, worked out when they are first asked for.
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
    ) -> Draft:
        """A draft with one branch."""
        n = len(tokens)
        return cls(
            tokens=tuple(tokens),
            parents=tuple(range(ROOT, n - 1)),
            origins=(origin,) * n,
            probabilities=tuple(probabilities) if probabilities else (None,) * n,
            distributions=tuple(distributions) if distributions else (None,) * n,
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_drawn(self) -> bool:
        """Whether any token was drawn at random."""
        return self.distributions.count(None) < len(self.distributions)

    @property
    def n_drawn(self) -> int:
        """How many nodes there are up to the last one that was drawn at random; 0 without any."""
        drawn = (n + 1 for n, source in enumerate(self.distributions) if source is not None)
        return max(drawn, default=0)

    @property
    def has_free_end(self) -> bool:
        """Whether all that was drawn at random is a chain, and the other nodes stand in it or behind
        its end: those behind it may be left out, as nothing was drawn that depends on them."""
        n_drawn = self.n_drawn
        return (
            not self.walks
            and self.parents[:n_drawn] == tuple(range(ROOT, n_drawn - 1))
            and all(parent >= n_drawn - 1 for parent in self.parents[n_drawn:])
        )

    def drawn_from(self, node: int) -> Distribution:
        """What a node's token was drawn from; a token chosen without chance was certain."""
        return self.distributions[node] or Distribution.certain(self.tokens[node])

    def children(self, node: int) -> Sequence[int]:
        """The nodes below `node` (or `ROOT`), in the order they were drafted."""
        if self.is_chain:
            return (node + 1,) if node + 1 < len(self.tokens) else ()
        below = self._below
        if not below:
            for child, parent in enumerate(self.parents):
                below.setdefault(parent, []).append(child)
        return below.get(node, ())

    def first_children(self) -> list[int]:
        """The path that takes the first child at each node, from the root down."""
        nodes: list[int] = []
        children = self.children(ROOT)
        while children:
            nodes.append(children[0])
            children = self.children(children[0])
        return nodes

    def tries(self, node: int, walks: Sequence[Sequence[int]], depth: int) -> Sequence[int]:
        """The nodes below `node` (or `ROOT`) in the order in which they are to be judged: its
        children or, of independent walks, those that `walks` go on to from there, `depth` being
        theirs; the same one as often as it was drawn."""
        if not self.walks:
            return self.children(node)
        return [walk[depth] for walk in walks if len(walk) > depth]

    def places(self) -> list[int]:
        """Each node's place among its siblings, from 0 on."""
        return [0] * len(self) if self.is_chain else _numbered(self.parents)

    def ranks(self) -> list[int]:
        """Each node's place among those of its siblings that come from the same drafter, from 0
        on: how many of its drafter's guesses were preferred to it."""
        if self.is_chain:
            return [0] * len(self)
        return _numbered(zip(self.parents, self.origins, strict=True))

    def depths(self) -> list[int]:
        """Each node's depth; children of the root have depth 0."""
        if self.is_chain:
            return list(range(len(self.tokens)))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return depths

    def path(self, node: int) -> list[int]:
        """The nodes from the root down to `node`, both ends included."""
        if self.is_chain:
            return list(range(node + 1))
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def text(self, node: int) -> tuple[int, ...]:
        """The tokens from the root down to `node`, both ends included; none for `ROOT`."""
        if self.is_chain:
            return self.tokens[: node + 1]
        return tuple(self.tokens[i] for i in self.path(node))

    def leaves(self) -> list[int]:
        """The nodes without children, in order."""
        n = len(self.tokens)
        if self.is_chain:
            return [n - 1] if n else []
        inner = set(self.parents)
        return [node for node in range(n) if node not in inner]

    def followed_by(self, other: Draft) -> Draft:
        """This chain, and another draft behind its last node. Raises ValueError if one of them is
        made of independent walks, which a longer draft could not tell apart."""
        if not len(other):
            return self
        if self.walks or other.walks:
            raise ValueError("independent walks cannot be a part of a longer draft")
        n = len(self)
        return Draft(
            self.tokens + other.tokens,
            self.parents + tuple(n + parent for parent in other.parents),
            self.origins + other.origins,
            self.probabilities + other.probabilities,
            self.distributions + other.distributions,
        )

    def merged_with(self, other: Draft) -> Draft:
        """A tree with the nodes of both, of those that say the same the one of this tree. Raises
        ValueError if a token was drawn at random: a draw is no draw any more where another token
        stands for it."""
        if self.is_drawn or other.is_drawn:
            raise ValueError("drafts that were drawn at random cannot be merged")
        tokens, parents = list(self.tokens), list(self.parents)
        origins, probabilities = list(self.origins), list(self.probabilities)
        found = {place: node for node, place in enumerate(zip(parents, tokens, strict=True))}
        index = {ROOT: ROOT}
        for node, (parent, token) in enumerate(zip(other.parents, other.tokens, strict=True)):
            place = (index[parent], token)
            if place not in found:
                found[place] = len(tokens)
                parents.append(index[parent])
                tokens.append(token)
                origins.append(other.origins[node])
                probabilities.append(other.probabilities[node])
            index[node] = found[place]
        n = len(tokens)
        if n == len(self):
            return self
        return Draft(
            tuple(tokens), tuple(parents), tuple(origins), tuple(probabilities), (None,) * n
        )

    def first(self, n: int) -> Draft:
        """The first n nodes; what remains is a tree, since parents come first. Raises ValueError
        if nodes of independent walks would be left out."""
        if n >= len(self.tokens):
            return self
        self._check_no_walks()
        return Draft(
            self.tokens[:n],
            self.parents[:n],
            self.origins[:n],
            self.probabilities[:n],
            self.distributions[:n],
        )

    def only(self, nodes: Sequence[int]) -> Draft:
        """These nodes, in this order; the parents of all must be among them, each before its
        children. Raises ValueError if nodes of independent walks would be left out."""
        if list(nodes) == list(range(len(self))):
            return self
        if len(nodes) < len(self):
            self._check_no_walks()
        index = {ROOT: ROOT} | {node: number for number, node in enumerate(nodes)}
        return Draft(
            tuple(self.tokens[node] for node in nodes),
            tuple(index[self.parents[node]] for node in nodes),
            tuple(self.origins[node] for node in nodes),
            tuple(self.probabilities[node] for node in nodes),
            tuple(self.distributions[node] for node in nodes),
            tuple(tuple(index[node] for node in walk) for walk in self.walks),
        )

    def _check_no_walks(self) -> None:
        if self.walks:
            raise ValueError("no node of independent walks may be left out")


def _numbered(groups: Iterable[Hashable]) -> list[int]:
    """How many of the same group come before each item."""
    n_before: Counter[Hashable] = Counter()
    numbers = []
    for group in groups:
        numbers.append(n_before[group])
        n_before[group] += 1
    return numbers


#: No draft: the target decodes one token.
NO_DRAFT = Draft((), (), (), (), ())
