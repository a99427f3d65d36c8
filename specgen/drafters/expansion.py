"""How a tree of drafted tokens grows: beyond which nodes to look, and which of the found tokens to add.

A draft model looks by a decode, decoder heads look at the target's hidden states. Trees grow in the
same way for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from specgen.drafters.kind import DraftRequest
from specgen.method.draft import ROOT, Distribution, Draft, NoTokenAllowedError
from specgen.method.drafter import Ask, Drafting
from specgen.method.policy import RoundPlan, WhilePaying, best_nodes
from specgen.options import TreeShape
from specgen.system.arrays import Logits, best

#: The guesses to consider for a position, if the shape does not ask for more; and, where costs decide, the
#: least probability of guesses after the first.
_N_GUESSES = 4
_LEAST = 0.02
#: The most nodes that are looked beyond at once.
WIDEST = 8
#: Whether a token ends the text.
IsEnd: TypeAlias = Callable[[int], bool]


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
        #: The nodes that were not looked beyond and may have children.
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
        self.ranks.append(self.parents[:-1].count(parent))
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


@dataclass(frozen=True, slots=True)
class Look:
    """A model's prediction for a position: the likeliest tokens with their probabilities at
    temperature 1, best first, or the distribution to draw tokens from. It is empty if the grammar
    allows no token."""

    guesses: tuple[tuple[int, float], ...] = ()
    source: Distribution | None = None


class Expansion(ABC):
    """How one tree grows, starting with the look beyond its root."""

    @property
    def walks(self) -> Sequence[Sequence[int]]:
        """The independent chains, if the tree consists of such chains."""
        return ()

    @abstractmethod
    def take(self, tree: TreeBuilder, node: int, look: Look) -> None:
        """Add tokens that a look beyond a node, or `ROOT`, found."""

    @abstractmethod
    def frontier(self, tree: TreeBuilder, n_most: int) -> list[int]:
        """Return the nodes to look beyond next, at most `n_most`; none ends the tree."""

    def cut(self, draft: Draft) -> Draft:
        """Return the nodes of the finished tree that are proposed."""
        return draft


def look(row: Logits, request: DraftRequest, path: Sequence[int]) -> Look:
    """Return the prediction for the token after the text and a path, from logits, float32[n_vocab]."""
    try:
        source = request.shaper.distribution(row, path)
    except NoTokenAllowedError:
        return Look()
    if request.draws:
        return Look(source=source)
    top, shape = request.shaper.top_probability(row, path), request.shape
    n_guesses = max(_N_GUESSES, *shape.numbers) if shape.is_fixed else _N_GUESSES
    order = best(source.probs, n_guesses)
    # The shaper may drop tokens, and rescales the others to a sum of 1.
    probabilities = source.probs[order] * (top / source.probs[order[0]])
    return Look(tuple(zip(source.token_ids[order].tolist(), probabilities.tolist(), strict=True)))


class DraftedChain:
    """A chain of at most `n_max` tokens that a drafter drafts one by one, from a row of logits for each. `before` are
    the tokens that another drafter drafted."""

    def __init__(
        self,
        plan: RoundPlan,
        request: DraftRequest,
        before: Sequence[int],
        is_end: IsEnd,
        n_max: int | None = None,
    ) -> None:
        self._plan = plan
        self._request = request
        self._before = before
        self._is_end = is_end
        self._n_max = plan.n_max if n_max is None else n_max
        self.tokens: list[int] = []
        self._looks: list[float] = []
        self._probabilities: list[float | None] = []
        self._distributions: list[Distribution | None] = []

    def extend(self, row: Logits) -> bool:
        """Draft the next token from its row of logits, float32[n_vocab], if the plan wants one; return whether
        another row is worth its cost. Whether a token is drafted depends on the row, and not on which it is."""
        plan, path, request = self._plan, [*self._before, *self.tokens], self._request
        top = None
        if plan.stop.needs_confidence:
            top = request.shaper.top_probability(row, path)
        self._looks.append(1.0 if top is None else top)
        if not plan.wants_token(self._looks):
            return False
        try:
            source = request.shaper.distribution(row, path)
        except NoTokenAllowedError:
            return False
        token = source.draw(request.rng)
        self._probabilities.append(source.probability(token) if request.draws else top)
        self._distributions.append(source if request.draws else None)
        self.tokens.append(token)
        if len(self.tokens) >= self._n_max or self._is_end(token):
            return False
        return plan.wants_decode(self._looks)

    def draft(self, origin: str) -> Draft:
        """Return the chain as a draft; `origin` is the drafter's name."""
        return Draft.chain(
            self.tokens, origin, self._probabilities, self._distributions, self._looks
        )


def grow(
    tree: TreeBuilder,
    request: DraftRequest,
    plan: RoundPlan,
    before: Sequence[int],
    is_end: IsEnd,
    first: Look,
    rows_beyond: Callable[[Sequence[int]], Generator[Ask, Logits, Iterable[Logits]]],
    *,
    n_max: int,
    n_most: Callable[[], int] = lambda: WIDEST,
    n_deepest: int | None = None,
    looks: dict[int, Look] | None = None,
) -> Drafting:
    """Grow a tree of the request's shape, to at most `n_max` nodes on `n_deepest` levels (None: those of the request),
    from the look beyond its root. `rows_beyond` returns the logits beyond nodes, float32[n_vocab] each, of which
    there are at most `n_most()`. `before` are the tokens that another drafter drafted; `looks` gets all looks."""
    expansion = _expansion(request, plan, n_max, n_deepest, is_end)
    looks = {} if looks is None else looks
    looks[ROOT] = first
    expansion.take(tree, ROOT, first)
    while nodes := expansion.frontier(tree, n_most()):
        rows = yield from rows_beyond(nodes)
        for node, row in zip(nodes, rows, strict=True):
            tree.look_beyond(node)
            looks[node] = look(row, request, (*before, *tree.path(node)))
            expansion.take(tree, node, looks[node])
    return expansion.cut(tree.draft(expansion.walks))


def _expansion(
    request: DraftRequest, plan: RoundPlan, n_max: int, n_deepest: int | None, is_end: IsEnd
) -> Expansion:
    limits = (n_max, n_deepest, request.n_deepest)
    n_deepest, shape = min(n for n in limits if n is not None), request.shape
    if shape.kind == "levels":
        return Levels(shape, n_max, n_deepest, request.rng, is_end)
    if shape.kind != "walks" and isinstance(plan.stop, WhilePaying):
        return Worthwhile(plan.stop, request.costs.share_s, n_max, n_deepest, is_end)
    if shape.kind != "walks":  # only costs say where a tree is worth a branch
        shape = TreeShape("walks", (1, n_max))
    return Walks(shape, n_max, n_deepest, request.rng, is_end)


class Worthwhile(Expansion):
    """Expansion for as long as it is worthwhile by the plan: all likely tokens are added, the likeliest
    paths are followed, and the nodes that are worth a row are verified."""

    def __init__(
        self,
        stop: WhilePaying,
        seconds: Callable[[int], float],
        n_max: int,
        n_deepest: int,
        is_end: IsEnd,
    ) -> None:
        self._stop = stop
        self._seconds = seconds
        self._n_max = n_max
        self._n_deepest = n_deepest
        self._is_end = is_end
        #: For each node, the probability that it and all before it are accepted.
        self._probabilities: list[float] = []
        self._looks: list[float] = []

    def take(self, tree: TreeBuilder, node: int, look: Look) -> None:
        before = 1.0 if node == ROOT else self._probabilities[node]
        self._looks += [probability for _, probability in look.guesses[:1]]
        for rank, (token, probability) in enumerate(look.guesses):
            if rank == 0 or probability >= _LEAST:
                tree.add(node, token, probability, is_end=self._is_end(token))
                self._probabilities.append(
                    before * self._stop.chance(self._stop.origin, probability, rank)
                )

    def frontier(self, tree: TreeBuilder, n_most: int) -> list[int]:
        """Return as many of the likeliest nodes as are worth the model's batch together."""
        stop, probabilities = self._stop, self._probabilities
        if stop.rule is None:
            return []
        nodes = [
            node
            for node in tree.open_nodes(self._n_deepest - 1)
            if tree.ranks[node] > 0 or tree.probabilities[node] >= stop.p_min
        ]
        nodes.sort(key=probabilities.__getitem__, reverse=True)
        n_taken = len(best_nodes(probabilities, stop.token_s, stop.extra_s))
        best, best_s, gain_s = 0, 0.0, 0.0
        for n, node in enumerate(nodes[:n_most]):
            # Tokens behind several nodes compete for the same rows.
            n_rows = max(n_taken + n, tree.depths[node] + 1)
            if n_rows >= len(stop.extra_s) - 1:
                break
            # A larger batch may cost less, but that is no gain of a token.
            idle_s, look_s = (
                max(0.0, stop.rule.value(n_rows, chance) + stop.next_s)
                for chance in (0.0, probabilities[node])
            )
            gain_s += look_s - idle_s
            if gain_s - self._seconds(n + 1) > best_s:
                best, best_s = n + 1, gain_s - self._seconds(n + 1)
        return nodes[:best]

    def cut(self, draft: Draft) -> Draft:
        kept = self._stop.cut(draft).first(self._n_max)  # the likeliest come first
        return replace(kept, looks=tuple(self._looks))


@dataclass
class Levels(Expansion):
    """A fixed number of children for each node of a depth: the likeliest tokens, or tokens drawn
    without replacement."""

    shape: TreeShape
    n_max: int
    n_deepest: int
    rng: np.random.Generator
    is_end: IsEnd

    def take(self, tree: TreeBuilder, node: int, look: Look) -> None:
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

    def frontier(self, tree: TreeBuilder, n_most: int) -> list[int]:
        if len(tree) >= self.n_max:
            return []
        n_levels = min(self.shape.n_levels, self.n_deepest)
        return tree.open_nodes(n_levels - 1)[:n_most]


class Walks(Expansion):
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

    def take(self, tree: TreeBuilder, node: int, look: Look) -> None:
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

    def frontier(self, tree: TreeBuilder, n_most: int) -> list[int]:
        return tree.open_nodes(self._n_levels - 1)[:n_most]
