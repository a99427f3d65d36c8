"""A draft in the target's KV cache: its rows are added to a batch, and those of rejected tokens are dropped again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specgen.method.backend import Backend, Batch
from specgen.method.draft import Draft


@dataclass(frozen=True, slots=True)
class Branches:
    """The sequence ids of one text in a cache: `first` to `first + n_branches`, exclusive."""

    first: int = 0
    n_branches: int = 1

    def of_leaves(self, n: int) -> tuple[int, ...]:
        """Return the sequences for a tree with n leaves, at least the text's own. Raise `ValueError` if the slot has
        fewer."""
        if n > self.n_branches:
            raise ValueError(f"the draft has {n} branches, the slot room for {self.n_branches}")
        return tuple(range(self.first, self.first + max(1, n)))


def pack(
    batch: Batch, backend: Backend, slot: Branches, pending: Sequence[int], draft: Draft
) -> range:
    """Add a text's rows to a batch: the committed tokens that the cache does not hold yet, at least one, then its
    draft. Return the batch's rows of the former. The last of these (the root) and every node want logits."""
    n_past, first_row = backend.length(slot.first), len(batch)
    if len(draft):
        backend.checkpoint(slot.first)
    leaves = draft.leaves()
    branches = slot.of_leaves(len(leaves))
    for branch in branches[1:]:
        backend.copy(slot.first, branch)
    last = len(pending) - 1
    for offset, token in enumerate(pending):
        batch.add(token, n_past + offset, branches, offset == last)
    through = [branches] * len(draft)
    if len(branches) > 1:
        paths = [set(draft.path(leaf)) for leaf in leaves]
        through = [
            tuple(branch for branch, path in zip(branches, paths, strict=True) if node in path)
            for node in range(len(draft))
        ]
    for token, depth, sequences in zip(draft.tokens, draft.depths(), through, strict=True):
        batch.add(token, n_past + len(pending) + depth, sequences, True)
    return range(first_row, first_row + len(pending))


def keep_path(backend: Backend, slot: Branches, draft: Draft, path: Sequence[int]) -> None:
    """Drop the rejected nodes of a decoded tree from the KV cache: the text and the accepted path stay. Raise
    `RollbackError` if the cache cannot drop them."""
    if len(path) == len(draft):
        return  # a chain, kept whole
    paths = [draft.path(leaf) for leaf in draft.leaves()]
    branches = slot.of_leaves(len(paths))
    # The slot's first sequence is the branch that ends at the first leaf.
    n_before = backend.length(slot.first) - len(paths[0])
    if path:
        kept = next(b for b, nodes in zip(branches, paths, strict=True) if path[-1] in nodes)
        if kept != slot.first:
            backend.remove(slot.first, n_before)
            backend.copy(kept, slot.first, n_before, n_before + len(path))
    backend.remove(slot.first, n_before + len(path))
    for branch in branches[1:]:
        backend.remove(branch)
