"""Grow a draft from a model's logits, as a chain or as a tree.

To *expand* a node is to ask the drafter for the logits of the token after it. From these the node
gets its children: the likeliest tokens, or tokens sampled at random. An `Expansion` grows one draft
and decides which nodes to expand and which tokens to add; the drafter only computes logits. Its
subclasses are:

- `Chain`: one branch, as long as the plan wants.
- `CostAwareTree`: the most likely paths, as far as they are worth their time.
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

#: The number of likeliest tokens that are considered at each position, unless the shape of the tree
#: has more children.
_N_CANDIDATES = 4
#: In a tree that depends on costs, tokens with a lower probability are added only as the likeliest
#: of their position.
_MIN_PROBABILITY = 0.02
#: The maximum number of nodes that are expanded at once.
MAX_WIDTH = 8
#: A computation in progress: a generator that asks for decodes and returns logits.
Decoding: TypeAlias = Generator[Ask, Logits, Logits]
#: Computes, for each of the given nodes, the logits of the token after it, float32[n_vocab].
LogitsAfter: TypeAlias = Callable[[Sequence[int]], Generator[Ask, Logits, Iterable[Logits]]]


@dataclass(eq=False)
class Expansion(ABC):
    """A draft as it grows. Nodes are numbered from 0; parents come before their children."""

    #: The name of the drafter.
    origin: str
    #: The answer to draft for.
    request: DraftRequest
    #: The shape of the tree.
    shape: TreeShape
    #: Decides how far to draft.
    plan: RoundPlan
    #: The tokens between the text and this draft, which another drafter drafted.
    before: tuple[int, ...]
    #: Returns whether a token ends the text, so that it has no children.
    is_end: Callable[[int], bool]
    #: The maximum number of tokens.
    n_max: int
    #: The maximum number of levels.
    n_levels_max: int
    #: The maximum number of nodes that are expanded at once. The drafter may change it after each
    #: expansion.
    max_width: int = field(default=MAX_WIDTH, init=False)
    #: The token of each node.
    tokens: list[int] = field(default_factory=list, init=False)
    #: The parent of each node, or `ROOT`.
    parents: list[int] = field(default_factory=list, init=False)
    #: The depth of each node; children of the root have depth 0.
    depths: list[int] = field(default_factory=list, init=False)
    #: The probability of each token; None if it is not known.
    probabilities: list[float | None] = field(default_factory=list, init=False)
    #: The distribution that each token was sampled from; None if it was not sampled.
    distributions: list[Distribution | None] = field(default_factory=list, init=False)
    #: The nodes of each independent chain, if the draft consists of such chains.
    walks: list[list[int]] = field(default_factory=list, init=False)
    #: The largest probability at each expanded position (`Draft.step_confidences`).
    confidences: list[float] = field(default_factory=list, init=False)

    @abstractmethod
    def grow(self, first: Logits, logits_after: LogitsAfter) -> Drafting:
        """Grow the draft, and return it when it is complete.

        Args:
            first: The logits of the token after the root, float32[n_vocab].
            logits_after: Computes the logits of the token after other nodes.
        """

    def grow_from(self, rows: Logits) -> Drafting:
        """Grow the draft from logits that were computed beforehand for each depth.

        This is for drafters that predict all positions at once, without knowing the drafted tokens.

        Args:
            rows: float32[n_levels, n_vocab]: row d has the logits for all nodes of depth d.
        """

        def logits_after(nodes: Sequence[int]) -> Generator[Ask, Logits, list[Logits]]:
            """Return the row for the children of each node, which are one level deeper."""
            yield from ()  # nothing is decoded
            return [rows[self.depths[node] + 1] for node in nodes]

        # There is no row for deeper nodes.
        self.n_levels_max = min(self.n_levels_max, len(rows))
        return self.grow(rows[0], logits_after)

    def child(self, node: int, token: int) -> int | None:
        """Return the child of a node with this token; None if there is none."""
        for other in range(node + 1, len(self.tokens)):
            if self.parents[other] == node and self.tokens[other] == token:
                return other
        return None

    def _drafted_to(self, node: int) -> tuple[int, ...]:
        """Return all drafted tokens from the end of the text down to a node, inclusive."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return (*self.before, *reversed(tokens))

    def _add(
        self,
        parent: int,
        token: int,
        probability: float | None,
        source: Distribution | None = None,
    ) -> None:
        """Add a node.

        Args:
            parent: The parent node, or `ROOT`.
            token: The token.
            probability: The probability of the token, if it is known.
            source: The distribution that the token was sampled from, if it was sampled.
        """
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(0 if parent == ROOT else self.depths[parent] + 1)
        self.probabilities.append(probability)
        self.distributions.append(source)

    def _draft(self) -> Draft:
        """Return the draft as it is now."""
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
        """Add the next token if the plan wants it.

        Args:
            row: The logits of the next token.

        Returns:
            Whether another token may follow.
        """
        drafted = (*self.before, *self.tokens)
        try:
            if self.request.is_sampled:
                step = self._sample_next(row, drafted)
            else:
                step = self._add_likeliest(row, drafted)
        except NoTokenAllowedError:
            return False
        return (
            step.keep_token
            and step.continue_drafting
            and len(self.tokens) < self.n_levels_max
            and not self.is_end(self.tokens[-1])
        )

    def _sample_next(
        self,
        row: Logits,
        drafted: Sequence[int],
    ) -> DraftStep:
        """Ask the plan whether to add a token, and sample it if so."""
        request = self.request
        confidence = 1.0
        if self.plan.stop.needs_confidence:
            confidence = request.sampling.top_probability(row, drafted)
        step = self._decide(confidence)
        if step.keep_token:
            # Sample only now: for exact verification, the decision to draft a token must not depend
            # on the token.
            source = request.sampling.distribution(row, drafted)
            token = source.sample(request.rng)
            self._add(len(self.tokens) - 1, token, source.probability(token), source)
        return step

    def _add_likeliest(
        self,
        row: Logits,
        drafted: Sequence[int],
    ) -> DraftStep:
        """Ask the plan whether to add a token, and add the likeliest one if so."""
        sampling = self.request.sampling
        parent = len(self.tokens) - 1
        if self.plan.stop.needs_confidence:
            (token,), (confidence,) = sampling.likeliest(row, drafted, 1)
            step = self._decide(confidence)
            if step.keep_token:
                self._add(parent, token, confidence)
        else:
            step = self._decide(1.0)
            if step.keep_token:
                self._add(parent, sampling.distribution(row, drafted).mode, None)
        return step

    def _decide(self, confidence: float) -> DraftStep:
        """Ask the plan whether to add the next token.

        Args:
            confidence: The largest probability at its position; 1 if the plan does not need it.
        """
        self.confidences.append(confidence)
        n_drafted = len(self.tokens)
        step = self.plan.after_draft_step(n_drafted, self._cumulative_acceptance, confidence)
        self._cumulative_acceptance = step.cumulative_acceptance
        return step


@dataclass(eq=False)
class Tree(Expansion):
    """Several branches, which grow by expanding several nodes at once."""

    #: The nodes that can still be expanded: those that end the text cannot.
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
        """Add the children of a node, or of `ROOT`, given the logits after it."""
        request = self.request
        drafted = self._drafted_to(node)
        n_before = len(self.tokens)
        try:
            if request.is_sampled:
                self._sample_children(node, request.sampling.distribution(row, drafted))
            else:
                n_candidates = self._n_candidates()
                tokens, probabilities = request.sampling.likeliest(row, drafted, n_candidates)
                self._add_likeliest(node, tokens, probabilities)
        except NoTokenAllowedError:  # the grammar allows no token here
            return
        for child in range(n_before, len(self.tokens)):
            if not self.is_end(self.tokens[child]):
                self._open.append(child)

    def _n_candidates(self) -> int:
        """Return the number of likeliest tokens to consider at each position."""
        shape = self.request.shape
        return max(_N_CANDIDATES, *shape.numbers) if shape.is_fixed else _N_CANDIDATES

    @abstractmethod
    def _add_likeliest(
        self,
        node: int,
        tokens: list[int],
        probabilities: list[float],
    ) -> None:
        """Add some of the likeliest tokens as children of a node.

        Args:
            node: The node, or `ROOT`.
            tokens: The likeliest tokens, the likeliest first.
            probabilities: Their probabilities at temperature 1.
        """

    def _sample_children(self, node: int, source: Distribution) -> None:
        """Sample children of a node. Trees that are never sampled do not implement it."""
        raise NotImplementedError

    def _nodes_to_expand(self) -> list[int]:
        """Return the nodes to expand next, at most `max_width`. If there are none, growth ends."""
        if len(self.tokens) >= self.n_max:
            return []
        return self._open_nodes()[: self.max_width]

    def _open_nodes(self) -> list[int]:
        """Return the nodes that can be expanded and whose children would not be too deep."""
        return [node for node in self._open if self.depths[node] < self.n_levels_max - 1]


@dataclass(eq=False)
class CostAwareTree(Tree):
    """A tree that grows as long as the expected gain exceeds the cost.

    The likeliest paths are expanded as long as that is worth the drafter's decodes. In the end, the
    nodes are kept that are worth a row of the target's batch.
    """

    #: The estimated probability that each node, and all nodes before it on its path, are accepted.
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
        """Add the likeliest token, and others if they are likely enough.

        If the likeliest one does not reach `p_min`, none is added.
        """
        parent_acceptance = 1.0 if node == ROOT else self._cumulative_acceptances[node]
        self.confidences.append(probabilities[0])
        if probabilities[0] < self._stop.p_min:
            return
        for rank, (token, probability) in enumerate(zip(tokens, probabilities, strict=True)):
            if rank == 0 or probability >= _MIN_PROBABILITY:
                self._add(node, token, probability)
                acceptance = self._stop.rates_of(self._stop.origin, rank).acceptance(probability)
                self._cumulative_acceptances.append(parent_acceptance * acceptance)

    def _nodes_to_expand(self) -> list[int]:
        """Return the likeliest nodes, as many as save the most time when decoded in one batch.

        If no number of nodes is expected to save time, none are returned.
        """
        if not self._stop.values:
            return []
        acceptances = self._cumulative_acceptances
        nodes = sorted(self._open_nodes(), key=acceptances.__getitem__, reverse=True)
        # Each expanded node takes a cell of the drafter's cache.
        n_expanded = len(self.confidences) - 1  # without the root
        n_max = min(self.max_width, self._n_rows_max - n_expanded)
        nodes = nodes[: max(0, n_max)]
        return nodes[: self._n_worth_expanding(nodes)]

    @property
    def _n_rows_max(self) -> int:
        """The maximum number of drafted rows in the target's batch."""
        return len(self._stop.extra_s) - 1

    def _n_worth_expanding(self, nodes: Sequence[int]) -> int:
        """Return how many of these nodes save the most time when decoded in one batch.

        Args:
            nodes: Nodes that can be expanded, the likeliest first.
        """
        stop = self._stop
        acceptances = self._cumulative_acceptances
        verified = stop.best_nodes(acceptances)
        n_verified = len(verified)
        n_rows_max = self._n_rows_max
        # Once all rows are taken, a new node takes that of the least likely one.
        displaced_s = 0.0
        if n_verified >= n_rows_max:
            displaced_s = acceptances[verified[-1]] * stop.token_s

        # Each further node adds an expected gain, but a decode with more rows costs more.
        n_best = 0
        max_saved_s = 0.0
        gain_s = 0.0
        for n, node in enumerate(nodes, start=1):
            # The children of all these nodes compete for the same rows of the target's batch.
            n_rows = max(n_verified + n - 1, self.depths[node] + 1)
            n_rows = min(n_rows, n_rows_max - 1)
            # `stop.value` subtracts the drafter's decode (`next_s`) for each node. Add it back,
            # because one decode of all nodes is paid for below. Also subtract the value of a node
            # that is never accepted: it is above 0 if a larger batch of the target costs less.
            step_s = stop.value(n_rows, acceptances[node]) + stop.next_s - displaced_s
            gain_s += max(0.0, step_s)
            gain_s -= max(0.0, stop.value(n_rows, 0.0) + stop.next_s)
            saved_s = gain_s - self.request.costs.seconds_each(n)
            if saved_s > max_saved_s:
                n_best = n
                max_saved_s = saved_s
        return n_best

    def _draft(self) -> Draft:
        """Return the draft with only those nodes that are worth a row of the target's batch."""
        likeliest_first = self._stop.best_nodes(self._cumulative_acceptances)
        return super()._draft().only(likeliest_first[: self.n_max])


class FixedTree(Tree):
    """A tree with a fixed number of children at each depth.

    The children are the likeliest tokens, or tokens that are sampled without replacement.
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
            if remaining is None:  # all tokens with a probability have been sampled
                break
            token = remaining.sample(self.request.rng)
            self._add(node, token, remaining.probability(token), remaining)
            remaining = remaining.minus(Distribution.certain(token))

    def _n_children(self, node: int) -> int:
        """Return the number of children of a node, as far as there is room."""
        depth = 0 if node == ROOT else self.depths[node] + 1
        return min(self.shape.numbers[depth], self.n_max - len(self.tokens))


@dataclass(eq=False)
class IndependentWalks(Tree):
    """Chains ("walks") that are sampled independently, or one chain of the likeliest tokens.

    Walks share the nodes of a common prefix. If there is no room for all of them, there are fewer
    or shorter ones. This is decided before anything is sampled, as exact verification requires.
    """

    def __post_init__(self) -> None:
        self.walks = [[] for _ in range(min(self.shape.numbers[0], self.n_max))]
        self.n_levels_max = min(self.n_levels_max, self.n_max // len(self.walks))

    def _add_likeliest(
        self,
        node: int,
        tokens: list[int],
        probabilities: list[float],
    ) -> None:
        self._add(node, tokens[0], probabilities[0])

    def _sample_children(self, node: int, source: Distribution) -> None:
        """Sample the next token of each walk that ends at a node, or is empty if it is `ROOT`."""
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
        context: The text, followed by tokens that another drafter drafted.
        n_drafted: The number of tokens that the other drafter drafted.
        vocabulary: Tells which tokens end the text.
        n_max: The maximum number of tokens of the draft.
    """
    shape = request.shape
    n_levels_max = min(n_max, request.n_levels_max or n_max, plan.n_levels_max or n_max)
    kind: type[Expansion]
    if not request.can_branch:
        kind = Chain
    elif shape.is_fixed:
        kind = IndependentWalks if shape.kind == "walks" else FixedTree
        n_levels_max = min(n_levels_max, shape.n_levels)
    elif isinstance(plan.stop, CostAwareStopping):
        kind = CostAwareTree
    else:
        # Without costs, it is unknown where a branch is worth a row: draft one chain as long as
        # possible, with all the features of a tree.
        kind = IndependentWalks
        shape = TreeShape("walks", (1, n_max))
    before = tuple(context[len(context) - n_drafted :])
    return kind(
        origin=origin,
        request=request,
        shape=shape,
        plan=plan,
        before=before,
        is_end=vocabulary.is_end,
        n_max=n_max,
        n_levels_max=n_levels_max,
    )
