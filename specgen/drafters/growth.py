"""How a tree of drafted tokens grows: beyond which nodes to look, and which of the found tokens to add.

A draft model looks by a decode, decoder heads look at the target's hidden states. Trees grow in the
same way for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specgen.arrays import Logits
from specgen.core.draft import ROOT
from specgen.core.growing_tree import GrowingTree
from specgen.options import TreeShape
from specgen.policy import Policy, TreePolicy
from specgen.sampling import Distribution, NoTokenAllowedError

#: The guesses to consider for a place, if the shape does not ask for more; and, where costs decide, the
#: least probability of guesses after the first.
_N_GUESSES = 4
_LEAST = 0.02


class DraftShaper(Protocol):
    """Turns rows of a draft model's logits, float32[n_vocab], into distributions over its tokens;
    `path` holds the drafted tokens before. `Shaper` is an implementation."""

    def distribution(self, logits: Logits, path: Sequence[int] = ()) -> Distribution: ...

    def top_probability(self, logits: Logits, path: Sequence[int] = ()) -> float: ...


@dataclass(frozen=True, slots=True)
class Look:
    """A model's prediction for a place: the likeliest tokens with their probabilities at
    temperature 1, best first, or the distribution to draw tokens from. It is empty if the grammar
    allows no token."""

    guesses: tuple[tuple[int, float], ...] = ()
    source: Distribution | None = None


class Growth(Protocol):
    """How one tree grows, starting with the look beyond its root."""

    @property
    def walks(self) -> Sequence[Sequence[int]]:
        """The independent chains, if the tree consists of such chains."""
        ...

    def take(self, tree: GrowingTree, node: int, look: Look) -> None:
        """Add tokens that a look beyond a node, or `ROOT`, found."""
        ...

    def frontier(self, tree: GrowingTree, n_most: int) -> list[int]:
        """The nodes to look beyond next, at most `n_most`; none ends the tree."""
        ...


def look(
    row: Logits, shaper: DraftShaper, path: Sequence[int], n_guesses: int, *, draws: bool
) -> Look:
    """The prediction of logits, float32[n_vocab], for the token after the text and a path."""
    try:
        source = shaper.distribution(row, path)
    except NoTokenAllowedError:
        return Look()
    if draws:
        return Look(source=source)
    top = shaper.top_probability(row, path)
    likeliest = source.ranked(n_guesses)
    # The shaper may drop tokens, and rescales the others to a sum of 1.
    scale = top / likeliest[0][1]
    return Look(tuple((token, probability * scale) for token, probability in likeliest))


class IsEnd(Protocol):
    """Whether a token ends the text."""

    def __call__(self, token_id: int, /) -> bool: ...


def n_guesses(shape: TreeShape) -> int:
    """The number of guesses for a place that a tree of this shape may need."""
    return max(_N_GUESSES, *shape.numbers) if shape.is_fixed else _N_GUESSES


def growth(
    shape: TreeShape,
    policy: Policy,
    n_max: int,
    n_deepest: int | None,
    rng: np.random.Generator,
    is_end: IsEnd,
    seconds: Callable[[int], float],
) -> Growth:
    """The growth of a tree of this shape, to at most `n_max` nodes on `n_deepest` levels;
    `seconds(n)` is the time of a look beyond n nodes."""
    n_deepest = n_max if n_deepest is None else min(n_max, n_deepest)
    if shape.kind == "walks":
        return Walks(shape, n_max, n_deepest, rng, is_end)
    if shape.kind == "levels":
        return Levels(shape, n_max, n_deepest, rng, is_end)
    assert isinstance(policy, TreePolicy), "costs decide how far a tree grows"
    return Worthwhile(policy, seconds, n_deepest, is_end)


@dataclass(slots=True)
class Worthwhile:
    """Growth for as long as a policy finds it worthwhile: the policy sees all likely tokens, chooses
    the nodes to look beyond, and later picks the nodes to verify."""

    policy: TreePolicy
    seconds: Callable[[int], float]
    n_deepest: int
    is_end: IsEnd
    walks: tuple[tuple[int, ...], ...] = ()

    def take(self, tree: GrowingTree, node: int, look: Look) -> None:
        for rank, (token, probability) in enumerate(look.guesses):
            if rank == 0 or probability >= _LEAST:
                tree.add(node, token, probability, is_end=self.is_end(token))

    def frontier(self, tree: GrowingTree, n_most: int) -> list[int]:
        return self.policy.frontier(tree, self.n_deepest, n_most, self.seconds)


@dataclass(slots=True)
class Levels:
    """A fixed number of children for each node of a depth: the likeliest tokens, or tokens drawn
    without replacement."""

    shape: TreeShape
    n_max: int
    n_deepest: int
    rng: np.random.Generator
    is_end: IsEnd
    walks: tuple[tuple[int, ...], ...] = ()

    def take(self, tree: GrowingTree, node: int, look: Look) -> None:
        depth = 0 if node == ROOT else tree.depths[node] + 1
        n_children = min(self.shape.numbers[depth], self.n_max - len(tree))
        for token, probability in look.guesses[:n_children]:
            tree.add(node, token, probability, is_end=self.is_end(token))
        source = look.source
        for _ in range(n_children):
            if source is None:
                break
            token = source.draw(self.rng)
            probability = source.probability(token)
            tree.add(node, token, probability, source=source, is_end=self.is_end(token))
            source = source.without(token)

    def frontier(self, tree: GrowingTree, n_most: int) -> list[int]:
        if len(tree) >= self.n_max:
            return []
        n_levels = min(self.shape.n_levels, self.n_deepest)
        return tree.open_nodes(n_levels - 1)[:n_most]


class Walks:
    """Independent chains that are drawn at random, or one chain of the likeliest tokens if nothing is
    drawn.

    If there is no room for all, there are fewer or shorter chains; this is decided before anything
    is drawn.
    """

    def __init__(
        self, shape: TreeShape, n_max: int, n_deepest: int, rng: np.random.Generator, is_end: IsEnd
    ) -> None:
        n_walks = min(shape.numbers[0], n_max)
        self._n_levels = min(shape.n_levels, n_deepest, n_max // n_walks)
        self._rng = rng
        self._is_end = is_end
        self._walks: list[list[int]] = [[] for _ in range(n_walks)]
        self._is_drawn = False

    @property
    def walks(self) -> Sequence[Sequence[int]]:
        return self._walks if self._is_drawn else ()

    def take(self, tree: GrowingTree, node: int, look: Look) -> None:
        if look.source is None:
            for token, probability in look.guesses[:1]:
                tree.add(node, token, probability, is_end=self._is_end(token))
            return
        self._is_drawn = True
        for walk in self._walks:
            if (walk[-1] if walk else ROOT) != node:
                continue
            token = look.source.draw(self._rng)
            child = tree.child(node, token)
            if child is None:
                probability, is_end = look.source.probability(token), self._is_end(token)
                child = tree.add(node, token, probability, source=look.source, is_end=is_end)
            walk.append(child)

    def frontier(self, tree: GrowingTree, n_most: int) -> list[int]:
        return tree.open_nodes(self._n_levels - 1)[:n_most]
