"""Draft trees as rows of a batch and sequences of the cache.

Each text owns consecutive sequence ids of a cache (`Branches`), the first of which holds the committed
text. A tree with b leaves needs b sequences, one for each branch. All of them share the cells of the
committed text (no data moves). A node's row belongs to every branch that contains the node. A row
therefore attends to its own ancestors and to nothing else: tree attention by sequence ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specgen.method.backend import Backend, Batch
from specgen.method.draft import ROOT, Draft


@dataclass(frozen=True, slots=True)
class Branches:
    """The sequence ids of one text in a cache: `first` to `first + n_branches`, exclusive."""

    first: int = 0
    n_branches: int = 1

    def of_leaves(self, n: int) -> tuple[int, ...]:
        """Return the sequences for a tree with n leaves, at least the one of the committed text.
        Raise `ValueError` if there are fewer."""
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

    for offset, token in enumerate(pending[:-1]):
        batch.add(token, n_past + offset, branches, False)
    root_position = n_past + len(pending) - 1
    batch.add(pending[-1], root_position, branches, True)

    if len(branches) == 1:  # a chain, or no draft: the common case, kept short
        for node, token in enumerate(draft.tokens):
            batch.add(token, root_position + 1 + node, branches, True)
        return
    passing: list[list[int]] = [[] for _ in draft.tokens]
    for branch, leaf in zip(branches, leaves, strict=True):
        for node in draft.path(leaf):
            passing[node].append(branch)
    for node, depth in enumerate(draft.depths()):
        position = root_position + 1 + depth
        batch.add(draft.tokens[node], position, tuple(passing[node]), True)


def keep_path(backend: Backend, slot: Branches, draft: Draft, path: Sequence[int]) -> None:
    """Keep one path of the tree in the cache after a decode, and drop the rest of the tree.

    `path` are nodes from the root down; it may be empty. Raise `RollbackError` if the cache cannot
    drop the rest.
    """
    if len(path) == len(draft):
        return  # a chain, kept whole
    leaves = draft.leaves()
    branches = slot.of_leaves(len(leaves))
    length = backend.length(slot.first)
    if len(branches) == 1:
        backend.remove(slot.first, length - len(draft) + len(path))
        return
    # The slot's first sequence is the branch that ends at the first leaf. The length of the cache
    # before the tree thus follows from the depth of that leaf.
    n_before = length - len(draft.path(leaves[0]))
    last = path[-1] if path else ROOT
    for branch, leaf in zip(branches, leaves, strict=True):
        if last in draft.path(leaf):
            if branch != slot.first:
                backend.remove(slot.first, n_before)
                backend.copy(branch, slot.first, n_before, n_before + len(path))
            break
    backend.remove(slot.first, n_before + len(path))
    for branch in branches[1:]:
        backend.remove(branch)
