"""How a draft grows, a chain or a tree: beyond which nodes to look, and which of the found tokens
to add.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from specgen.drafters.interface import DraftRequest
from specgen.errors import NoTokenAllowedError
from specgen.method.backend import Backend
from specgen.method.draft import ROOT, Branches, Draft
from specgen.method.drafter import Ask, Drafting
from specgen.method.policy import RoundPlan
from specgen.method.stopping import CostAwareStopping
from specgen.options import TreeShape
from specgen.system.arrays import Logits
from specgen.text.sampling.distribution import Distribution
from specgen.text.vocabulary import Vocabulary

#: The guesses for a position, if the shape asks for no more; where costs decide, the least chance
#: of further ones.
_N_GUESSES = 4
_LEAST = 0.02
#: The most nodes that are looked beyond at once.
WIDEST = 8
#: Returns the logits beyond nodes, float32[n_vocab] each.
RowsBeyond: TypeAlias = Callable[[Sequence[int]], Generator[Ask, Logits, Iterable[Logits]]]


@dataclass(eq=False)
class Expansion(ABC):
    """A draft of at most `n_max` tokens on at most `n_deepest` levels, as it grows. Parents come
    before their children.

    To *look beyond* a node is to ask the drafter which tokens follow it. These become the node's
    children, the likeliest or first drawn one first. The look beyond the root starts the draft.
    """

    origin: str
    request: DraftRequest
    shape: TreeShape
    plan: RoundPlan
    before: tuple[int, ...]  # the tokens that another drafter drafted before
    is_end: Callable[[int], bool]
    n_max: int
    n_deepest: int
    #: The most nodes that can be looked beyond at once. A look may change it.
    n_most: int = field(default=WIDEST, init=False)
    tokens: list[int] = field(default_factory=list, init=False)
    parents: list[int] = field(default_factory=list, init=False)
    #: Children of the root have depth 0.
    depths: list[int] = field(default_factory=list, init=False)
    probabilities: list[float | None] = field(default_factory=list, init=False)
    distributions: list[Distribution | None] = field(default_factory=list, init=False)
    #: The independent chains of a draft that consists of such chains; and the `looks` of a `Draft`.
    walks: list[list[int]] = field(default_factory=list, init=False)
    confidences: list[float] = field(default_factory=list, init=False)

    @abstractmethod
    def grow(self, first: Logits, rows_beyond: RowsBeyond) -> Drafting:
        """Grow from the logits beyond the root."""

    def grow_from(self, rows: Logits) -> Drafting:
        """Grow from rows that are there already, float32[n, n_vocab]: one for the nodes of each
        depth.
        """

        def rows_beyond(nodes: Sequence[int]) -> Generator[Ask, Logits, list[Logits]]:
            yield from ()
            return [rows[self.depths[node] + 1] for node in nodes]

        self.n_deepest = min(self.n_deepest, len(rows))
        return self.grow(rows[0], rows_beyond)

    def child(self, node: int, token: int) -> int | None:
        for other in range(node + 1, len(self.tokens)):
            if self.parents[other] == node and self.tokens[other] == token:
                return other
        return None

    def _add(
        self, parent: int, token: int, probability: float | None, source: Distribution | None = None
    ) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(0 if parent == ROOT else self.depths[parent] + 1)
        self.probabilities.append(probability)
        self.distributions.append(source)

    def _draft(self) -> Draft:
        return Draft(
            tuple(self.tokens),
            tuple(self.parents),
            (self.origin,) * len(self.tokens),
            tuple(self.probabilities),
            tuple(self.distributions),
            tuple(map(tuple, filter(None, self.walks))),
            tuple(self.confidences),
        )


@dataclass(eq=False)
class Chain(Expansion):
    """One branch, token by token as far as the plan wants: tokens drawn at random, or the
    likeliest.
    """

    _whole: float = field(default=1.0, init=False)  # see `RoundPlan.after_draft_step`

    def grow(self, first: Logits, rows_beyond: RowsBeyond) -> Drafting:
        goes_on = self._take(first)
        while goes_on:
            (row,) = yield from rows_beyond((len(self.tokens) - 1,))
            goes_on = self._take(row)
        return self._draft()

    def _take(self, row: Logits) -> bool:
        """Add the next token, if the plan wants one. Return whether another one may follow it."""
        request, plan, n = self.request, self.plan, len(self.tokens)
        shaper, path, draws = request.shaper, (*self.before, *self.tokens), request.draws
        token, source, top = None, None, None
        try:
            if plan.stop.needs_confidence and draws:
                top = shaper.top_probability(row, path)
            elif plan.stop.needs_confidence:
                (token,), (top,) = shaper.likeliest(row, path, 1)
            confidence = 1.0 if top is None else top
            self.confidences.append(confidence)
            step = plan.after_draft_step(n, self._whole, confidence)
            self._whole = step.cumulative_acceptance
            if not step.keep_token:
                return False
            if token is None:
                source = shaper.distribution(row, path)
                token = source.sample(request.rng) if draws else source.mode
        except NoTokenAllowedError:
            return False
        if source is not None and draws:
            self._add(n - 1, token, source.probability(token), source)
        else:
            self._add(n - 1, token, top)
        return step.continue_drafting and n + 1 < self.n_deepest and not self.is_end(token)


@dataclass(eq=False)
class Tree(Expansion):
    """Several branches."""

    #: The nodes that were not looked beyond and may have children: their tokens do not end the
    #: text.
    _open: list[int] = field(default_factory=list, init=False)

    def grow(self, first: Logits, rows_beyond: RowsBeyond) -> Drafting:
        self._take(ROOT, first)
        while nodes := self._frontier():
            rows = yield from rows_beyond(nodes)
            for node, row in zip(nodes, rows, strict=True):
                self._open.remove(node)
                self._take(node, row)
        return self._draft()

    def _take(self, node: int, row: Logits) -> None:
        """Add children of a node, or of `ROOT`, by the logits beyond it."""
        request, shape, n_before, up = self.request, self.request.shape, len(self.tokens), node
        path: tuple[int, ...] = ()
        while up != ROOT:
            path, up = (self.tokens[up], *path), self.parents[up]
        path = (*self.before, *path)
        n_guesses = max(_N_GUESSES, *shape.numbers) if shape.is_fixed else _N_GUESSES
        try:
            if request.draws:
                self._draw(node, request.shaper.distribution(row, path))
            else:
                self._guess(node, *request.shaper.likeliest(row, path, n_guesses))
        except NoTokenAllowedError:
            return
        added = range(n_before, len(self.tokens))
        self._open += [child for child in added if not self.is_end(self.tokens[child])]

    @abstractmethod
    def _guess(self, node: int, tokens: list[int], chances: list[float]) -> None:
        """Add children: the likeliest tokens, with their probabilities at temperature 1."""

    def _draw(self, node: int, source: Distribution) -> None:
        raise NotImplementedError

    def _frontier(self) -> list[int]:
        """Return the nodes to look beyond next, at most `n_most`; none ends the draft."""
        return self._open_nodes()[: self.n_most] if len(self.tokens) < self.n_max else []

    def _open_nodes(self) -> list[int]:
        return [node for node in self._open if self.depths[node] < self.n_deepest - 1]


@dataclass(eq=False)
class Worthwhile(Tree):
    """A tree that grows while it pays: the likeliest paths are followed, and nodes that are worth a
    row verified.
    """

    #: For each node, its number among its siblings, and the probability that it and all before it
    #: are accepted.
    _ranks: list[int] = field(default_factory=list, init=False)
    _chances: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        assert isinstance(self.plan.stop, CostAwareStopping)
        self._stop = self.plan.stop

    def _guess(self, node: int, tokens: list[int], chances: list[float]) -> None:
        before = 1.0 if node == ROOT else self._chances[node]
        self.confidences.append(chances[0])
        for rank, (token, probability) in enumerate(zip(tokens, chances, strict=True)):
            if rank == 0 or probability >= _LEAST:
                self._add(node, token, probability)
                self._ranks.append(rank)
                acceptance = self._stop.rates(self._stop.origin, rank).acceptance(probability)
                self._chances.append(before * acceptance)

    def _frontier(self) -> list[int]:
        """Return as many of the likeliest nodes as are worth the model's batch together."""
        stop, chances = self._stop, self._chances
        if not stop.values:
            return []
        nodes = [
            node
            for node in self._open_nodes()
            if self._ranks[node] > 0 or (self.probabilities[node] or 0.0) >= stop.p_min
        ]
        nodes.sort(key=chances.__getitem__, reverse=True)
        n_taken = len(stop.best_nodes(chances))
        n_best, best_s, gain_s = 0, 0.0, 0.0
        for n, node in enumerate(nodes[: self.n_most]):
            # Tokens behind several nodes compete for the same rows.
            n_rows = max(n_taken + n, self.depths[node] + 1)
            if n_rows >= len(stop.extra_s) - 1:
                break
            # A larger batch may cost less, but that is no gain of a token.
            gain_s += max(0.0, stop.value(n_rows, chances[node]) + stop.next_s)
            gain_s -= max(0.0, stop.value(n_rows, 0.0) + stop.next_s)
            decode_s = self.request.costs.seconds_each(n + 1)
            if gain_s - decode_s > best_s:
                n_best, best_s = n + 1, gain_s - decode_s
        return nodes[:n_best]

    def _draft(self) -> Draft:
        nodes = self._stop.best_nodes(self._chances)
        return super()._draft().only(nodes[: self.n_max])  # likeliest first


class Levels(Tree):
    """A tree with a fixed number of children for each depth: the likeliest, or drawn without
    replacement.
    """

    def _guess(self, node: int, tokens: list[int], chances: list[float]) -> None:
        n_children = self._n_children(node)
        for token, probability in zip(tokens[:n_children], chances, strict=False):
            self._add(node, token, probability)

    def _draw(self, node: int, source: Distribution) -> None:
        left: Distribution | None = source
        for _ in range(self._n_children(node)):
            if left is None:
                break
            token = left.sample(self.request.rng)
            self._add(node, token, left.probability(token), left)
            left = left.minus(Distribution.certain(token))

    def _n_children(self, node: int) -> int:
        depth = 0 if node == ROOT else self.depths[node] + 1
        return min(self.shape.numbers[depth], self.n_max - len(self.tokens))


@dataclass(eq=False)
class Walks(Tree):
    """Independent chains that are drawn at random, or one chain of the likeliest tokens if nothing
    is drawn. If there is no room for all, there are fewer or shorter ones; this is decided before
    anything is drawn.
    """

    def __post_init__(self) -> None:
        self.walks = [[] for _ in range(min(self.shape.numbers[0], self.n_max))]
        self.n_deepest = min(self.n_deepest, self.n_max // len(self.walks))

    def _guess(self, node: int, tokens: list[int], chances: list[float]) -> None:
        self._add(node, tokens[0], chances[0])

    def _draw(self, node: int, source: Distribution) -> None:
        for walk in self.walks:
            if (walk[-1] if walk else ROOT) == node:
                token = source.sample(self.request.rng)
                child = self.child(node, token)
                if child is None:
                    child = len(self.tokens)
                    self._add(node, token, source.probability(token), source)
                walk.append(child)


def expansion(
    origin: str,
    request: DraftRequest,
    plan: RoundPlan,
    before: Sequence[int],
    vocabulary: Vocabulary,
    n_max: int,
) -> Expansion:
    """Begin a draft of at most `n_max` tokens behind `before`: a chain, or a tree of the request's
    shape.
    """
    kind: type[Expansion] = Chain
    shape = request.shape
    n_deepest = min(n_max, request.n_deepest or n_max, plan.n_deepest or n_max)
    if request.branches and not shape.is_fixed:
        kind = Worthwhile
        if not isinstance(
            plan.stop, CostAwareStopping
        ):  # only costs say where a tree is worth a branch
            kind, shape = Walks, TreeShape("walks", (1, n_max))
    elif request.branches:
        kind, n_deepest = Levels, min(n_deepest, shape.n_levels)
        if shape.kind == "walks":
            kind = Walks
    is_end = vocabulary.is_end
    return kind(origin, request, shape, plan, tuple(before), is_end, n_max, n_deepest)


class NodeBranches:
    """The branches of a draft, each in its own sequence of the model's cache, which ends on a node,
    its tip. The first child of a tip continues the sequence; any other node gets one of its own,
    which shares its parent's cells.
    """

    def __init__(self, backend: Backend, slot: Branches) -> None:
        self._backend = backend
        self._trunk = slot.first
        #: The sequences for branches; sequences outside the slot belong to other texts.
        self._others = range(slot.first + 1, slot.first + slot.n_branches)
        #: The sequence of each decoded node, and the node on which each sequence ends.
        self._sequences: dict[int, int] = {}
        self._tips: dict[int, int] = {}
        #: The sequences of the cache that are left: each takes one more node, wherever in the tree
        #: it is.
        self.free: list[int] = []
        for sequence in self._others:  # an earlier answer may have left cells
            if backend.length(sequence):
                backend.remove(sequence)

    def __contains__(self, node: int) -> bool:
        return node in self._sequences and node != ROOT

    def begin(self) -> None:
        self.free = list(reversed(self._others))
        self._sequences = {ROOT: self._trunk}
        self._tips = {self._trunk: ROOT}

    def follow(self, node: int, parent: int, position: int) -> int:
        sequence = self._sequences[parent]
        if self._tips[sequence] != parent:
            branch = self.free.pop()
            self._backend.copy(sequence, branch, 0, position)
            sequence = branch
        self._sequences[node] = sequence
        self._tips[sequence] = node
        return sequence

    def keep(self, node: int, n_before: int, n_kept: int) -> None:
        """Keep the text, of `n_before` tokens, and the path of `n_kept` nodes down to `node` in the
        trunk.
        """
        backend, trunk = self._backend, self._trunk
        sequence = self._sequences.get(node, trunk)
        if sequence != trunk:
            backend.remove(trunk, n_before)
            backend.copy(sequence, trunk, n_before, n_before + n_kept)
        if backend.length(trunk) > n_before + n_kept:
            backend.remove(trunk, n_before + n_kept)
        for other in self._tips:
            if other != trunk:
                backend.remove(other)
        self._sequences, self._tips, self.free = {}, {}, []
