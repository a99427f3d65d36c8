"""A draft: the small tree of tokens that the target is asked to check in one batch. A chain is a tree with one
branch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from specgen.errors import BackendError
from specgen.system.arrays import ProbArray, TokenArray

#: Parent of the nodes that follow the last committed token. The logits of node i are row i + 1, those of the root row
#: 0.
ROOT = -1


class NoTokenAllowedError(BackendError):
    """A grammar that allows no token at all."""

    def __init__(self) -> None:
        super().__init__(
            "the grammar allows no token here",
            hint="a rule of the grammar cannot be completed with this model's tokens; change the grammar",
        )


@dataclass(frozen=True, slots=True)
class Distribution:
    """Probabilities of tokens: `token_ids` is int64[m], strictly increasing; `probs` is float64[m], positive, and
    sums to 1 up to rounding."""

    token_ids: TokenArray
    probs: ProbArray

    @staticmethod
    def certain(token_id: int) -> Distribution:
        return _certain(token_id)

    def probability(self, token_id: int) -> float:
        index = int(self.token_ids.searchsorted(token_id))
        if index < len(self.token_ids) and self.token_ids[index] == token_id:
            return float(self.probs[index])
        return 0.0

    def probabilities(self, token_ids: TokenArray) -> ProbArray:
        position = self.token_ids.searchsorted(token_ids)
        position[position == len(self.token_ids)] = 0
        return np.where(self.token_ids[position] == token_ids, self.probs[position], 0.0)

    @property
    def mode(self) -> int:
        return int(self.token_ids[self.probs.argmax()])

    def draw(self, rng: np.random.Generator) -> int:
        """Draw a token with one uniform number; a certain token takes none. So plain and speculative decoding draw
        equal tokens from equal distributions if their generators are in equal states."""
        if len(self.token_ids) == 1:
            return int(self.token_ids[0])
        cumulative = self.probs.cumsum()
        index = int(cumulative.searchsorted(rng.random() * cumulative[-1], side="right"))
        return int(self.token_ids[min(index, len(self.token_ids) - 1)])

    def without(self, token_id: int) -> Distribution | None:
        """Return what the next sibling is drawn from without replacement; None if nothing is left."""
        return self.reweighted(np.where(self.token_ids == token_id, 0.0, self.probs))

    def minus(self, other: Distribution, scale: float = 1.0) -> Distribution | None:
        """Return normalize(max(0, scale * self - other)), the residual of a rejected draft; None if nothing is
        left."""
        return self.reweighted(scale * self.probs - other.probabilities(self.token_ids))

    def excess(self, other: Distribution, scale: float = 1.0) -> float:
        """Return the sum of max(0, scale * self - other)."""
        difference = scale * self.probs - other.probabilities(self.token_ids)
        return float(np.maximum(difference, 0.0).sum())

    def reweighted(self, weights: ProbArray) -> Distribution | None:
        kept = weights > 0.0
        if not kept.any():
            return None
        weights = weights[kept]
        return Distribution(self.token_ids[kept], weights / weights.sum())


@lru_cache(maxsize=4096)
def _certain(token_id: int) -> Distribution:
    """Return a shared distribution: greedy decoding takes one for each token."""
    found = Distribution(np.array((token_id,), np.int64), np.ones(1))
    found.token_ids.flags.writeable = found.probs.flags.writeable = False
    return found


@dataclass(frozen=True, slots=True)
class Draft:
    """n proposed tokens as a tree. Node i's parent, `parents[i] < i`, is `ROOT` behind the last committed token;
    `origins[i]` names its drafter. `probabilities[i]` is the drafter's probability of the token, if it has one:
    policies and the display use it, verifiers do not.

    `distributions[i]` is the one that the token was *drawn from at random*; among siblings, given the earlier ones.
    It is None for a token chosen deterministically (an argmax, an n-gram match): testing a token against a
    distribution that it was not drawn from would bias the text, and so would leaving out a drawn token because of
    what it is.

    `walks` are the nodes of chains that were drawn independently of each other, from a child of the root down, in the
    order of the draws. Walks with a common prefix share nodes: a token that was drawn twice is decoded once and
    judged twice. `looks` are the largest probabilities that the drafter gave to any token, in the order in which it
    looked: in a chain, look i comes before its token i; one more look ended the draft.

    Raises `ValueError` if the lengths differ, a parent does not come before its child, or a walk is no path.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    origins: tuple[str, ...]
    probabilities: tuple[float | None, ...]
    distributions: tuple[Distribution | None, ...]
    walks: tuple[tuple[int, ...], ...] = ()
    looks: tuple[float, ...] = field(default=(), compare=False)
    is_chain: bool = field(init=False, repr=False, compare=False)
    #: Whether any token was drawn at random. No node of such a draft is left out.
    is_drawn: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        n, parents = len(self.tokens), self.parents
        columns = (parents, self.origins, self.probabilities, self.distributions)
        if any(len(column) != n for column in columns):
            raise ValueError(f"a draft of {n} tokens needs {n} of each of its fields")
        object.__setattr__(self, "is_chain", parents == tuple(range(ROOT, n - 1)))
        object.__setattr__(self, "is_drawn", self.distributions.count(None) < n)
        for walk in self.walks:
            if not walk or [parents[node] for node in walk] != [ROOT, *walk[:-1]]:
                raise ValueError(f"{walk} is no walk from the root down")
        if not self.is_chain and not all(ROOT <= up < node for node, up in enumerate(parents)):
            raise ValueError(f"{parents}: parents come first")

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        origin: str,
        probabilities: Sequence[float | None] = (),
        distributions: Sequence[Distribution | None] = (),
        looks: Sequence[float] = (),
    ) -> Draft:
        n = len(tokens)
        return cls(
            tuple(tokens),
            tuple(range(ROOT, n - 1)),
            (origin,) * n,
            tuple(probabilities or (None,) * n),
            tuple(distributions or (None,) * n),
            looks=tuple(looks),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def children(self, node: int) -> Sequence[int]:
        """Return the nodes below `node` (or `ROOT`), in the order they were drafted."""
        if self.is_chain:
            return (node + 1,) if node + 1 < len(self.tokens) else ()
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def ranks(self) -> list[int]:
        """Return each node's rank, from 0, among its siblings."""
        if self.is_chain:
            return [0] * len(self.tokens)
        n_before: Counter[int] = Counter()
        ranks = []
        for parent in self.parents:
            ranks.append(n_before[parent])
            n_before[parent] += 1
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
        return tuple([self.tokens[i] for i in self.path(node)])

    def leaves(self) -> list[int]:
        inner = set(self.parents)
        return [node for node in range(len(self.tokens)) if node not in inner]

    def first(self, n: int) -> Draft:
        """Return the first n nodes, which are a tree too; see `only`."""
        return self if n >= len(self.tokens) else self.only(range(n))

    def only(self, nodes: Sequence[int]) -> Draft:
        """Return a draft of these nodes, in this order; parents must be among them, before their children. Raise
        `ValueError` if this would drop nodes of independent walks."""
        if self.walks and len(nodes) < len(self.tokens):
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
