"""A draft: the small tree of tokens that the target checks in one batch.

`pack` adds a draft to a batch of the target, `keep_path` drops what was rejected from the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from specgen.method.backend import Backend, Batch
from specgen.text.sampling.distribution import Distribution

#: The parent of the nodes that follow the last committed token. Row 0 of a draft's logits belongs
#: to it, and row i + 1 to node i.
ROOT = -1


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of n proposed tokens; a chain is a tree with one branch.

    Nodes are numbered so that parents come before their children. `tokens`, `parents`, `origins`,
    `probabilities` and `distributions` have one entry for each node.
    """

    #: The proposed tokens.
    tokens: tuple[int, ...]
    #: The parent of each node; `ROOT` for those that follow the last committed token.
    parents: tuple[int, ...]
    #: The name of the drafter that proposed each token.
    origins: tuple[str, ...]
    #: The drafter's probability of each token, where it has one. Policies and the display use it,
    #: verifiers do not.
    probabilities: tuple[float | None, ...]
    #: The distribution from which each token was sampled, given its earlier siblings; None for a
    #: token that was chosen deterministically (an argmax, an n-gram match). To verify a token with
    #: a distribution that it was not sampled from would bias the text. So would leaving out a
    #: sampled token because of its value.
    distributions: tuple[Distribution | None, ...]
    #: Chains that were sampled independently of each other, in the order in which they were
    #: sampled: the nodes of each, from a child of the root down. Chains share the nodes of a common
    #: prefix, so a token that was sampled twice is decoded once and judged twice.
    walks: tuple[tuple[int, ...], ...] = ()
    #: The drafter's largest probability at each draft step. In a chain, entry i belongs to the step
    #: that drafted token i, and a last entry may belong to a step whose token was not kept.
    step_confidences: tuple[float, ...] = field(default=(), compare=False)
    #: Whether `probabilities` are acceptance rates already. A model's confidence is not: how often
    #: tokens with a given confidence are accepted has to be learnt.
    is_calibrated: bool = field(default=False, compare=False)
    #: For the display: what a second draft guessed of this draft, in words (`drafters/staged.py`).
    guesses: str = field(default="", compare=False)
    #: The depth of each node: 0 for the children of the root, 1 for their children, ...
    depths: Sequence[int] = field(init=False, repr=False, compare=False)
    #: The rank of each node among its siblings, from 0.
    ranks: Sequence[int] = field(init=False, repr=False, compare=False)
    #: The children of each node, in the order in which they were drafted. `ROOT` is -1, so its
    #: children are the last entry.
    children: Sequence[Sequence[int]] = field(init=False, repr=False, compare=False)
    #: Whether each node is the only child of the one before.
    is_chain: bool = field(init=False, repr=False, compare=False)
    #: Whether any token was sampled at random. No node of such a draft may be left out.
    is_sampled: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        n = len(self.tokens)
        columns = (self.parents, self.origins, self.probabilities, self.distributions)
        if any(len(column) != n for column in columns):
            raise ValueError(f"a draft of {n} tokens needs {n} of each of its fields")
        depths: list[int] = []
        ranks: list[int] = []
        children: list[list[int]] = [[] for _ in range(n + 1)]
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"{self.parents}: parents come first")
            depths.append(0 if parent == ROOT else depths[parent] + 1)
            ranks.append(len(children[parent]))
            children[parent].append(node)
        for walk in self.walks:
            if not walk or [self.parents[node] for node in walk] != [ROOT, *walk[:-1]]:
                raise ValueError(f"{walk} is not a path from the root down")
        object.__setattr__(self, "depths", depths)
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "children", children)
        object.__setattr__(self, "is_chain", self.parents == tuple(range(ROOT, n - 1)))
        object.__setattr__(self, "is_sampled", self.distributions.count(None) < n)

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        origin: str,
        probabilities: Sequence[float | None] = (),
        distributions: Sequence[Distribution | None] = (),
        step_confidences: Sequence[float] = (),
    ) -> Draft:
        """Return a draft with one branch, whose tokens all have the same origin.

        The other arguments are fields of the class. Empty ones mean None for each token.
        """
        n = len(tokens)
        return cls(
            tuple(tokens),
            tuple(range(ROOT, n - 1)),
            (origin,) * n,
            tuple(probabilities or (None,) * n),
            tuple(distributions or (None,) * n),
            step_confidences=tuple(step_confidences),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def path(self, node: int) -> list[int]:
        """Return the nodes from a child of the root down to `node`, inclusive; none for `ROOT`."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def tokens_to(self, node: int) -> tuple[int, ...]:
        """Return the tokens from a child of the root down to `node`, inclusive; none for `ROOT`."""
        if self.is_chain:
            return self.tokens[: node + 1]
        return tuple([self.tokens[ancestor] for ancestor in self.path(node)])

    def paths(self) -> list[list[int]]:
        """Return the path to each leaf; a single empty path if the draft is empty."""
        leaves = [node for node in range(len(self.tokens)) if not self.children[node]]
        return [self.path(leaf) for leaf in leaves] or [[]]

    def without_numpy_numbers(self) -> Draft:
        """Return the draft with Python's numbers in place of NumPy's, which JSON does not have."""
        columns = (self.tokens, self.parents, self.probabilities)
        if not any(isinstance(number, np.generic) for column in columns for number in column):
            return self
        return replace(
            self,
            tokens=tuple(map(_python_number, self.tokens)),
            parents=tuple(map(_python_number, self.parents)),
            probabilities=tuple(map(_python_number, self.probabilities)),
        )

    def first(self, n: int) -> Draft:
        """Return a draft of the first `n` nodes."""
        return self.only(range(min(n, len(self.tokens))))

    def only(self, nodes: Sequence[int]) -> Draft:
        """Return a draft of these nodes, in this order.

        Args:
            nodes: The nodes. Parents have to come before their children.

        Raises:
            ValueError: If a node of independent walks is left out.
        """
        if list(nodes) == list(range(len(self.tokens))):
            return self
        if self.walks and len(nodes) < len(self.tokens):
            raise ValueError("no node of independent walks may be left out")
        new_index = {node: index for index, node in enumerate(nodes)}
        new_index[ROOT] = ROOT
        return Draft(
            tuple([self.tokens[node] for node in nodes]),
            tuple([new_index[self.parents[node]] for node in nodes]),
            tuple([self.origins[node] for node in nodes]),
            tuple([self.probabilities[node] for node in nodes]),
            tuple([self.distributions[node] for node in nodes]),
            tuple(tuple([new_index[node] for node in walk]) for walk in self.walks),
            self.step_confidences,
            self.is_calibrated,
            self.guesses,
        )


def _python_number(number: Any) -> Any:
    """Return a number of NumPy as one of Python, and any other value unchanged."""
    return number.item() if isinstance(number, np.generic) else number


#: No draft: the target decodes one token.
NO_DRAFT = Draft((), (), (), (), ())


@dataclass(frozen=True, slots=True)
class Branches:
    """The consecutive sequences of one text in a cache: one for each branch of a draft."""

    #: The sequence that holds the committed text and the draft's first branch.
    first: int = 0
    #: The number of sequences, `first` included.
    n_branches: int = 1

    def paths(self, draft: Draft) -> dict[int, list[int]]:
        """Return a draft's paths by the sequence that holds each of them.

        Raises:
            ValueError: If there are more paths than sequences.
        """
        paths = draft.paths()
        if len(paths) > self.n_branches:
            raise ValueError(
                f"the draft has {len(paths)} branches, its slot only {self.n_branches} sequences"
            )
        return dict(enumerate(paths, self.first))


def pack(
    batch: Batch,
    backend: Backend,
    branches: Branches,
    pending: Sequence[int],
    draft: Draft,
) -> range:
    """Add a text's rows to a batch: the pending tokens, then the draft.

    The last pending token, which is the root of the draft, and every node want logits.

    Args:
        batch: The target's batch, which may already have rows of other texts.
        backend: The target. The branches of the draft get to share the text's cells in its cache.
        branches: The text's sequences.
        pending: The committed tokens that are not in the cache yet, at least one.
        draft: The draft, which may be empty.

    Returns:
        The rows of the pending tokens in the batch.
    """
    n_in_cache = backend.length(branches.first)
    if len(draft):
        backend.checkpoint(branches.first)
    paths = branches.paths(draft)
    node_sequences: list[tuple[int, ...]] = [()] * len(draft)
    for sequence, path in paths.items():
        if sequence != branches.first:
            backend.copy(branches.first, sequence)  # every branch follows the committed text
        for node in path:
            node_sequences[node] += (sequence,)

    first_row = len(batch.tokens)
    n_committed = n_in_cache + len(pending)
    batch.tokens += pending
    batch.tokens += draft.tokens
    batch.positions += range(n_in_cache, n_committed)
    batch.positions += [n_committed + depth for depth in draft.depths]
    batch.sequences += [tuple(paths)] * len(pending)
    batch.sequences += node_sequences
    batch.wants_logits += [False] * (len(pending) - 1)
    batch.wants_logits += [True] * (1 + len(draft))
    return range(first_row, first_row + len(pending))


def keep_path(
    backend: Backend,
    branches: Branches,
    draft: Draft,
    path: Sequence[int],
) -> None:
    """Drop a decoded draft from the cache, except for the accepted `path`."""
    if len(path) == len(draft.tokens):
        return  # everything was accepted, so there is only one branch
    paths = branches.paths(draft)
    # The first sequence holds the committed text and the first branch.
    n_committed = backend.length(branches.first) - len(paths[branches.first])
    if path:
        accepted_sequence = next(sequence for sequence, nodes in paths.items() if path[-1] in nodes)
        if accepted_sequence != branches.first:  # replace the first branch with the accepted one
            backend.remove(branches.first, n_committed)
            backend.copy(accepted_sequence, branches.first, n_committed, n_committed + len(path))
    backend.remove(branches.first, n_committed + len(path))
    for sequence in paths:
        if sequence != branches.first:
            backend.remove(sequence)
