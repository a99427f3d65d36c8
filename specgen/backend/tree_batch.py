"""Draft trees as rows of a batch and sequences of the cache.

Each generation owns a *slot*: a run of sequence ids, of which the first holds the committed
text. A tree with b leaves needs b sequences, one a branch: the cells of the committed text
are shared with each (no data moves), and a node's row belongs to every branch that passes
through it. A row then attends to its own ancestors and to nothing else, which is tree
attention by means of sequence ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specgen.backend.base import Backend, Batch
from specgen.core.draft import ROOT, Draft


@dataclass(frozen=True, slots=True)
class Slot:
    """The sequence ids of one generation: `first` to `first + n_branches`, exclusive."""

    first: int = 0
    n_branches: int = 1

    def branches(self, n: int) -> tuple[int, ...]:
        """The sequences of a tree with n leaves; at least the one of the committed text."""
        if n > self.n_branches:
            raise ValueError(f"the draft has {n} branches, the slot room for {self.n_branches}")
        return tuple(range(self.first, self.first + max(1, n)))


def pack(batch: Batch, backend: Backend, slot: Slot, pending: Sequence[int], draft: Draft) -> None:
    """Add a generation's rows to a batch: its pending tokens, then its draft.

    `pending` are committed tokens that the cache does not hold yet, at least one. The last
    of them and every node of the draft ask for logits: 1 + len(draft) rows of them, the
    root's first, node i's at index 1 + i.
    """
    n_past = backend.length(slot.first)
    if len(draft):
        backend.checkpoint(slot.first)
    leaves = draft.leaves()
    branches = slot.branches(len(leaves))
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


def keep_path(backend: Backend, slot: Slot, draft: Draft, path: Sequence[int]) -> None:
    """After a decode, keep one path of the tree in the cache and drop the rest of it.

    `path` are nodes from the root down; it may be empty. Raises `RollbackError`.
    """
    if len(path) == len(draft):
        return  # a chain, kept whole
    leaves = draft.leaves()
    branches = slot.branches(len(leaves))
    length = backend.length(slot.first)
    if len(branches) == 1:
        backend.remove(slot.first, length - len(draft) + len(path))
        return
    # The branch that holds the slot's first sequence ends at the first leaf, so what was
    # cached before the tree is known from that leaf's depth.
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
