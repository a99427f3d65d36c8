"""How a draft grows from a model's logits, as a chain or as a tree.

To *expand* a node is to ask the drafter for the logits of the token after it. From these the node
gets its children: the likeliest tokens, or tokens sampled at random. One object grows one draft and
decides which nodes to expand and which tokens to add; the drafter only computes logits. There are:

- `Chain`: one branch, as long as the plan wants.
- `CostAwareTree`: the most likely paths, as long as they are worth their time.
- `FixedTree`: a given number of children at each depth (SpecInfer, arXiv:2305.09781).
- `IndependentWalks`: chains that are sampled independently of each other (SpecTr,
  arXiv:2310.15141).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Sequence,
)
from dataclasses import dataclass, field
from typing import TypeAlias

from specgen.drafters.interface import (
    ROOT,
    Ask,
    Draft,
    Drafting,
    DraftRequest,
    RoundPlan,
    TreeShape,
)
from specgen.errors import NoTokenAllowedError
from specgen.method.stopping import CostAwareStopping, DraftStep
from specgen.system.arrays import Logits
from specgen.text.sampling.distribution import Distribution
from specgen.text.vocabulary import Vocabulary

#: The most likely tokens that are considered at a position, if the shape asks for no more.
_N_CANDIDATES = 4
#: The least probability of a further sibling, where costs decide.
_LEAST_PROBABILITY = 0.02
#: The most nodes that are expanded at once.
MAX_WIDTH = 8
#: A computation in progress: a generator that asks for decodes and returns logits.
Decoding: TypeAlias = Generator[Ask, Logits, Logits]
#: Computes the logits of the token after each of some nodes, float32[n_vocab].
LogitsAfter: TypeAlias = Callable[[Sequence[int]], Generator[Ask, Logits, Iterable[Logits]]]


@dataclass(eq=False)
class Expansion(ABC):
    """A draft as it grows. Parents come before their children."""

    #: The name of the drafter.
    origin: str
    request: DraftRequest
    #: The shape of the tree.
    shape: TreeShape
    plan: RoundPlan
    #: The tokens between the text and this draft, which another drafter drafted.
    before: tuple[int, ...]
    #: Whether a token ends the text, so that it has no children.
    is_end: Callable[[int], bool]
    #: The most tokens.
    n_max: int
    #: The most levels.
    n_deepest: int
    #: The most nodes that can be expanded at once. The drafter may change it after each expansion.
    max_width: int = field(default=MAX_WIDTH, init=False)
    #: The token of each node.
    tokens: list[int] = field(default_factory=list, init=False)
    #: The parent of each node, or `ROOT`.
    parents: list[int] = field(default_factory=list, init=False)
    #: The depth of each node; children of the root have depth 0.
    depths: list[int] = field(default_factory=list, init=False)
    #: The probability of each token, if it is known.
    probabilities: list[float | None] = field(default_factory=list, init=False)
    #: The distribution that each token was sampled from; None for one that was not.
    distributions: list[Distribution | None] = field(default_factory=list, init=False)
    #: The nodes of each independent chain, if the draft consists of such chains.
    walks: list[list[int]] = field(default_factory=list, init=False)
    #: The largest probability at each expanded position (`Draft.step_confidences`).
    confidences: list[float] = field(default_factory=list, init=False)

    @abstractmethod
    def grow(self, first: Logits, logits_after: LogitsAfter) -> Drafting:
        """Grow the draft and return it.

        Args:
            first: The logits of the token after the root, float32[n_vocab].
            logits_after: Computes those after other nodes.
        """

    def grow_from(self, rows: Logits) -> Drafting:
        """Grow from logits that do not depend on the drafted tokens.

        Args:
            rows: float32[n, n_vocab], a row for all nodes of each depth.
        """

        def logits_after(nodes: Sequence[int]) -> Generator[Ask, Logits, list[Logits]]:
            """Return the row of the next depth for each node."""
            yield from ()  # nothing is decoded
            return [rows[self.depths[node] + 1] for node in nodes]

        self.n_deepest = min(self.n_deepest, len(rows))
        return self.grow(rows[0], logits_after)

    def child(self, node: int, token: int) -> int | None:
        """Return the child of a node that has this token; None if there is none."""
        for other in range(node + 1, len(self.tokens)):
            if self.parents[other] == node and self.tokens[other] == token:
                return other
        return None

    def _path_to(self, node: int) -> tuple[int, ...]:
        """Return the tokens between the text and the position after a node."""
        path: list[int] = []
        while node != ROOT:
            path.append(self.tokens[node])
            node = self.parents[node]
        return (*self.before, *reversed(path))

    def _add(
        self,
        parent: int,
        token: int,
        probability: float | None,
        source: Distribution | None = None,
    ) -> None:
        """Add a node. Its token was sampled from `source`, if that is given."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(0 if parent == ROOT else self.depths[parent] + 1)
        self.probabilities.append(probability)
        self.distributions.append(source)

    def _draft(self) -> Draft:
        return Draft(
            tokens=tuple(self.tokens),
            parents=tuple(self.parents),
            origins=(self.origin,) * len(self.tokens),
            probabilities=tuple(self.probabilities),
            distributions=tuple(self.distributions),
            walks=tuple(tuple(walk) for walk in self.walks if walk),
            step_confidences=tuple(self.confidences),
        )


@dataclass(eq=False)
class Chain(Expansion):
    """One branch, which grows token by token, as long as the plan wants."""

    #: The probability that all tokens so far are accepted, as the plan estimates it.
    _cumulative_acceptance: float = field(default=1.0, init=False)

    def grow(self, first: Logits, logits_after: LogitsAfter) -> Drafting:
        goes_on = self._add_next(first)
        while goes_on:
            (row,) = yield from logits_after((len(self.tokens) - 1,))
            goes_on = self._add_next(row)
        return self._draft()

    def _add_next(self, row: Logits) -> bool:
        """Add the next token, if the plan wants one; return whether another one may follow."""
        path = (*self.before, *self.tokens)
        try:
            if self.request.draws:
                step = self._sample_next(row, path)
            else:
                step = self._add_likeliest(row, path)
        except NoTokenAllowedError:
            return False
        return (
            step.keep_token
            and step.continue_drafting
            and len(self.tokens) < self.n_deepest
            and not self.is_end(self.tokens[-1])
        )

    def _sample_next(self, row: Logits, path: Sequence[int]) -> DraftStep:
        request = self.request
        confidence = 1.0
        if self.plan.stop.needs_confidence:
            confidence = request.shaper.top_probability(row, path)
        step = self._decide(confidence)
        if step.keep_token:
            # Sampled only now: whether the token is drafted must not depend on what it is.
            source = request.shaper.distribution(row, path)
            token = source.sample(request.rng)
            self._add(len(self.tokens) - 1, token, source.probability(token), source)
        return step

    def _add_likeliest(self, row: Logits, path: Sequence[int]) -> DraftStep:
        shaper = self.request.shaper
        parent = len(self.tokens) - 1
        if self.plan.stop.needs_confidence:
            (token,), (confidence,) = shaper.likeliest(row, path, 1)
            step = self._decide(confidence)
            if step.keep_token:
                self._add(parent, token, confidence)
        else:
            step = self._decide(1.0)
            if step.keep_token:
                self._add(parent, shaper.distribution(row, path).mode, None)
        return step

    def _decide(self, confidence: float) -> DraftStep:
        """Ask the plan whether to add the next token, given the largest probability there."""
        self.confidences.append(confidence)
        n_drafted = len(self.tokens)
        step = self.plan.after_draft_step(n_drafted, self._cumulative_acceptance, confidence)
        self._cumulative_acceptance = step.cumulative_acceptance
        return step


@dataclass(eq=False)
class Tree(Expansion):
    """Several branches, which grow by expanding several nodes at once."""

    #: The nodes that were not expanded and may have children: their tokens do not end the text.
    _open: list[int] = field(default_factory=list, init=False)

    def grow(self, first: Logits, logits_after: LogitsAfter) -> Drafting:
        self._add_children(ROOT, first)
        while nodes := self._nodes_to_expand():
            rows = yield from logits_after(nodes)
            for node, row in zip(nodes, rows, strict=True):
                self._open.remove(node)
                self._add_children(node, row)
        return self._draft()

    def _add_children(self, node: int, row: Logits) -> None:
        """Add children of a node, or of `ROOT`, given the logits after it."""
        request = self.request
        path = self._path_to(node)
        n_before = len(self.tokens)
        try:
            if request.draws:
                self._sample_children(node, request.shaper.distribution(row, path))
            else:
                tokens, probabilities = request.shaper.likeliest(row, path, self._n_candidates())
                self._add_likeliest(node, tokens, probabilities)
        except NoTokenAllowedError:
            return
        for child in range(n_before, len(self.tokens)):
            if not self.is_end(self.tokens[child]):
                self._open.append(child)

    def _n_candidates(self) -> int:
        shape = self.request.shape
        return max(_N_CANDIDATES, *shape.numbers) if shape.is_fixed else _N_CANDIDATES

    @abstractmethod
    def _add_likeliest(
        self,
        node: int,
        tokens: list[int],
        probabilities: list[float],
    ) -> None:
        """Add some of the likeliest tokens; their probabilities are at temperature 1."""

    def _sample_children(self, node: int, source: Distribution) -> None:
        raise NotImplementedError

    def _nodes_to_expand(self) -> list[int]:
        """Return the nodes to expand next, at most `max_width`; none ends the draft."""
        if len(self.tokens) >= self.n_max:
            return []
        return self._open_nodes()[: self.max_width]

    def _open_nodes(self) -> list[int]:
        return [node for node in self._open if self.depths[node] < self.n_deepest - 1]


@dataclass(eq=False)
class CostAwareTree(Tree):
    """A tree that grows while that pays.

    The likeliest paths are expanded, and the nodes that are worth a row of the target's batch are
    kept.
    """

    #: The number of each node among its siblings.
    _ranks: list[int] = field(default_factory=list, init=False)
    #: The probability that each node and all before it are accepted.
    _cumulative_acceptances: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        assert isinstance(self.plan.stop, CostAwareStopping)
        self._stop = self.plan.stop

    def _add_likeliest(
        self,
        node: int,
        tokens: list[int],
        probabilities: list[float],
    ) -> None:
        before = 1.0 if node == ROOT else self._cumulative_acceptances[node]
        self.confidences.append(probabilities[0])
        for rank, (token, probability) in enumerate(zip(tokens, probabilities, strict=True)):
            if rank == 0 or probability >= _LEAST_PROBABILITY:
                self._add(node, token, probability)
                self._ranks.append(rank)
                acceptance = self._stop.rates(self._stop.origin, rank).acceptance(probability)
                self._cumulative_acceptances.append(before * acceptance)

    def _nodes_to_expand(self) -> list[int]:
        """Return as many of the likeliest nodes as are together worth a decode of the drafter."""
        stop = self._stop
        acceptances = self._cumulative_acceptances
        if not stop.values:
            return []
        nodes = [node for node in self._open_nodes() if self._may_be_expanded(node)]
        nodes.sort(key=acceptances.__getitem__, reverse=True)
        n_verified = len(stop.best_nodes(acceptances))

        # How many of them? Each adds a gain, and a decode of more rows costs more.
        n_best = 0
        most_saved_s = 0.0
        gain_s = 0.0
        for n, node in enumerate(nodes[: self.max_width], start=1):
            # The children of all these nodes compete for the same rows of the target's batch.
            n_rows = max(n_verified + n - 1, self.depths[node] + 1)
            if n_rows >= len(stop.extra_s) - 1:
                break
            # The value of a step is net of the drafter's decode (`next_s`), which is paid below,
            # once for all nodes. The value of an impossible node is not a gain: it is that of a
            # larger batch, which may cost less.
            gain_s += max(0.0, stop.value(n_rows, acceptances[node]) + stop.next_s)
            gain_s -= max(0.0, stop.value(n_rows, 0.0) + stop.next_s)
            saved_s = gain_s - self.request.costs.seconds_each(n)
            if saved_s > most_saved_s:
                n_best = n
                most_saved_s = saved_s
        return nodes[:n_best]

    def _may_be_expanded(self, node: int) -> bool:
        """Return whether the node is likely enough; only first siblings need `p_min`."""
        return self._ranks[node] > 0 or (self.probabilities[node] or 0.0) >= self._stop.p_min

    def _draft(self) -> Draft:
        likeliest_first = self._stop.best_nodes(self._cumulative_acceptances)
        return super()._draft().only(likeliest_first[: self.n_max])


class FixedTree(Tree):
    """A tree with a fixed number of children at each depth.

    These are the likeliest tokens, or tokens that are sampled without replacement.
    """

    def _add_likeliest(
        self,
        node: int,
        tokens: list[int],
        probabilities: list[float],
    ) -> None:
        n_children = self._n_children(node)
        for token, probability in zip(tokens[:n_children], probabilities, strict=False):
            self._add(node, token, probability)

    def _sample_children(self, node: int, source: Distribution) -> None:
        remaining: Distribution | None = source
        for _ in range(self._n_children(node)):
            if remaining is None:
                break
            token = remaining.sample(self.request.rng)
            self._add(node, token, remaining.probability(token), remaining)
            remaining = remaining.minus(Distribution.certain(token))

    def _n_children(self, node: int) -> int:
        depth = 0 if node == ROOT else self.depths[node] + 1
        return min(self.shape.numbers[depth], self.n_max - len(self.tokens))


@dataclass(eq=False)
class IndependentWalks(Tree):
    """Chains that are sampled independently, or one chain of the likeliest tokens.

    Chains share the nodes of a common prefix. If there is no room for all of them, there are fewer
    or shorter ones, which is decided before anything is sampled.
    """

    def __post_init__(self) -> None:
        self.walks = [[] for _ in range(min(self.shape.numbers[0], self.n_max))]
        self.n_deepest = min(self.n_deepest, self.n_max // len(self.walks))

    def _add_likeliest(
        self,
        node: int,
        tokens: list[int],
        probabilities: list[float],
    ) -> None:
        self._add(node, tokens[0], probabilities[0])

    def _sample_children(self, node: int, source: Distribution) -> None:
        for walk in self.walks:
            end = walk[-1] if walk else ROOT
            if end != node:
                continue
            token = source.sample(self.request.rng)
            child = self.child(node, token)
            if child is None:
                child = len(self.tokens)
                self._add(node, token, source.probability(token), source)
            walk.append(child)


def start_expansion(
    origin: str,
    request: DraftRequest,
    plan: RoundPlan,
    context: Sequence[int],
    n_drafted: int,
    vocabulary: Vocabulary,
    n_max: int,
) -> Expansion:
    """Start a draft: a chain, or a tree of the shape that the request asks for.

    Args:
        origin: The name of the drafter.
        request: The answer to draft for.
        plan: Decides how far to draft.
        context: The text, and the tokens that another drafter drafted after it.
        n_drafted: The number of these tokens.
        vocabulary: Tells which tokens end the text.
        n_max: The most tokens of the draft.
    """
    shape = request.shape
    n_deepest = min(n_max, request.n_deepest or n_max, plan.n_deepest or n_max)
    kind: type[Expansion]
    if not request.branches:
        kind = Chain
    elif shape.is_fixed:
        kind = IndependentWalks if shape.kind == "walks" else FixedTree
        n_deepest = min(n_deepest, shape.n_levels)
    elif isinstance(plan.stop, CostAwareStopping):
        kind = CostAwareTree
    else:  # without costs it is unknown where a branch is worth its row
        kind = IndependentWalks
        shape = TreeShape("walks", (1, n_max))
    before = tuple(context[len(context) - n_drafted :])
    return kind(
        origin,
        request,
        shape,
        plan,
        before,
        vocabulary.is_end,
        n_max,
        n_deepest,
    )
