"""A draft: the small tree of tokens that the target checks in one batch, and its rows in the
target's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specgen.method.backend import Backend, Batch
from specgen.text.sampling.distribution import Distribution

#: Parent of the nodes that follow the last committed token. Its logits are row 0, those of node i
#: are row i + 1.
ROOT = -1


@dataclass(frozen=True, slots=True)
class Draft:
    """n proposed tokens as a tree; a chain has one branch. Node i's parent, `parents[i] < i`, is
    `ROOT` behind the last committed token; `origins[i]` names its drafter. `probabilities[i]` is
    the drafter's probability of the token, if known: policies and the display use it, verifiers do
    not. `distributions[i]` is the one that the token was *drawn from at random*, among siblings
    given the earlier ones; None for a token chosen deterministically (an argmax, an n-gram match).
    To test a token against a distribution that it was not drawn from would bias the text, and so
    would leaving out a drawn token because of what it is.

    `walks` are the nodes of chains that were drawn independently of each other, from a child of the
    root down, in the order of the draws. They share the nodes of a common prefix: a token that was
    drawn twice is decoded once and judged twice. `looks` are the drafter's largest probabilities at
    each position that it read: in a chain, look i is before token i; one more look ended the draft.
    `guesses` says what a cheaper drafter guessed of it.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    origins: tuple[str, ...]
    probabilities: tuple[float | None, ...]
    distributions: tuple[Distribution | None, ...]
    walks: tuple[tuple[int, ...], ...] = ()
    looks: tuple[float, ...] = field(default=(), compare=False)
    guesses: str = field(default="", compare=False)
    #: The depth of each node, from 0, and its rank among its siblings.
    depths: Sequence[int] = field(init=False, repr=False, compare=False)
    ranks: Sequence[int] = field(init=False, repr=False, compare=False)
    #: The nodes below each node, in the order they were drafted; those of `ROOT`, -1, come last.
    children: Sequence[Sequence[int]] = field(init=False, repr=False, compare=False)
    is_chain: bool = field(init=False, repr=False, compare=False)
    #: Whether any token was drawn at random. No node of such a draft is left out.
    is_sampled: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        n, parents = len(self.tokens), self.parents
        columns = (parents, self.origins, self.probabilities, self.distributions)
        if any(len(column) != n for column in columns):
            raise ValueError(f"a draft of {n} tokens needs {n} of each of its fields")
        depths, ranks, children = list[int](), list[int](), [list[int]() for _ in range(n + 1)]
        for node, parent in enumerate(parents):
            if not ROOT <= parent < node:
                raise ValueError(f"{parents}: parents come first")
            depths.append(0 if parent == ROOT else depths[parent] + 1)
            ranks.append(len(children[parent]))
            children[parent].append(node)
        object.__setattr__(self, "depths", depths)
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "children", children)
        object.__setattr__(self, "is_chain", parents == tuple(range(ROOT, n - 1)))
        object.__setattr__(self, "is_sampled", self.distributions.count(None) < n)
        for walk in self.walks:
            if not walk or [parents[node] for node in walk] != [ROOT, *walk[:-1]]:
                raise ValueError(f"{walk} is no walk from the root down")

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

    def path(self, node: int) -> list[int]:
        """Return the nodes from a child of the root down to `node`, inclusive; none for `ROOT`."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def text(self, node: int) -> tuple[int, ...]:
        if self.is_chain:
            return self.tokens[: node + 1]
        return tuple([self.tokens[i] for i in self.path(node)])

    def paths(self) -> list[list[int]]:
        """Return the path to each leaf; one without a node if there is no draft."""
        nodes = range(len(self.tokens))
        return [self.path(node) for node in nodes if not self.children[node]] or [[]]

    def first(self, n: int) -> Draft:
        return self.only(range(min(n, len(self.tokens))))

    def only(self, nodes: Sequence[int]) -> Draft:
        """Return a draft of these nodes, in this order: parents come first. Independent walks need
        all of theirs.
        """
        if list(nodes) == list(range(len(self.tokens))):
            return self
        if self.walks and len(nodes) < len(self.tokens):
            raise ValueError("no node of independent walks may be left out")
        index = {ROOT: ROOT} | {node: number for number, node in enumerate(nodes)}
        return Draft(
            tuple([self.tokens[node] for node in nodes]),
            tuple([index[self.parents[node]] for node in nodes]),
            tuple([self.origins[node] for node in nodes]),
            tuple([self.probabilities[node] for node in nodes]),
            tuple([self.distributions[node] for node in nodes]),
            tuple(tuple([index[node] for node in walk]) for walk in self.walks),
            self.looks,
            self.guesses,
        )


#: No draft: the target decodes one token.
NO_DRAFT = Draft((), (), (), (), ())


@dataclass(frozen=True, slots=True)
class Branches:
    """The sequence ids of one text in a cache: `first` to `first + n_branches`, exclusive."""

    first: int = 0
    n_branches: int = 1

    def paths(self, draft: Draft) -> dict[int, list[int]]:
        """Return a draft's paths by the sequences that hold them; the first one is the text's own."""
        paths = draft.paths()
        if (n := len(paths)) > self.n_branches:
            raise ValueError(f"the draft has {n} branches, the slot room for {self.n_branches}")
        return dict(enumerate(paths, self.first))


def pack(
    batch: Batch, backend: Backend, slot: Branches, pending: Sequence[int], draft: Draft
) -> range:
    """Add a text's rows to a batch: the committed tokens that the cache lacks, at least one, then
    its draft. Return the row numbers of those tokens: the last of them, the root's row, and every
    node want logits.
    """
    n_past, first_row, n = backend.length(slot.first), len(batch.tokens), len(draft.tokens)
    if n:
        backend.checkpoint(slot.first)
    paths, through = slot.paths(draft), [tuple[int, ...]()] * n
    for branch, path in paths.items():
        if branch != slot.first:
            backend.copy(slot.first, branch)
        for node in path:
            through[node] += (branch,)
    n_all = n_past + len(pending)
    batch.tokens += [*pending, *draft.tokens]
    batch.positions += [*range(n_past, n_all), *[n_all + depth for depth in draft.depths]]
    batch.sequences += [*[tuple(paths)] * len(pending), *through]
    batch.wants_logits += [*[False] * (len(pending) - 1), *[True] * (n + 1)]
    return range(first_row, first_row + len(pending))


def keep_path(backend: Backend, slot: Branches, draft: Draft, path: Sequence[int]) -> None:
    """Drop the rejected nodes of a decoded tree from the cache: the text and the accepted path
    stay.
    """
    n_rejected = len(draft.tokens) - len(path)
    if n_rejected == 0:
        return  # all was accepted: it had one branch
    paths = slot.paths(draft)
    n_before = backend.length(slot.first) - len(paths[slot.first])
    if path:
        kept = next(branch for branch, nodes in paths.items() if path[-1] in nodes)
        if kept != slot.first:
            backend.remove(slot.first, n_before)
            backend.copy(kept, slot.first, n_before, n_before + len(path))
    backend.remove(slot.first, n_before + len(path))
    for branch in list(paths)[1:]:
        backend.remove(branch)
