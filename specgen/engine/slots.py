"""Slots: the sequences of a cache that belong to an answer, and the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specgen.backend.base import Backend
from specgen.backend.tree_batch import Slot
from specgen.errors import RollbackError


@dataclass(frozen=True, slots=True)
class Part:
    """One of `n` equal parts of the caches, counted from 0. An answer has the same part of the target's
    cache and of each draft model's. The parts of a cache have equal numbers of sequences and cells."""

    number: int = 0
    n: int = 1

    def slot(self, backend: Backend) -> Slot:
        """Return the part's sequences in a cache."""
        n_branches = backend.n_sequences // self.n
        return Slot(self.number * n_branches, n_branches)

    def n_ctx(self, backend: Backend) -> int:
        """Return the number of tokens that the part has room for."""
        return backend.n_ctx // self.n

    def share_prefix(self, backend: Backend, tokens: Sequence[int]) -> int:
        """Let the part hold the longest beginning of a text that any part of the cache holds, and nothing
        else. Return its number of tokens: at most all but the last token, which must be decoded for its
        logits. The sequences share cells, so no data is copied."""
        own = self.slot(backend)
        for branch in range(own.first + 1, own.first + own.n_branches):
            if backend.length(branch):
                backend.remove(branch)
        tokens = tokens[:-1]
        n_own = n_common(backend.text(own.first), tokens)
        if backend.rollback != "cells" and n_own < backend.length(own.first):
            # Such a cache cannot drop cells: to go back within a text, it would decode it again.
            n_own = 0
        best, lender = n_own, own
        for other in range(self.n if backend.can_branch else 0):
            slot = Part(other, self.n).slot(backend)
            n = n_common(backend.text(slot.first), tokens)
            if n > best:
                best, lender = n, slot
        try:
            if backend.length(own.first) > n_own:
                backend.remove(own.first, n_own)
            if lender is not own:
                backend.copy(lender.first, own.first, n_own, best)
        except RollbackError:  # the cells that a sliding window needs are gone
            backend.remove(own.first)
            return 0
        return best


#: The only part of a cache that serves one answer.
WHOLE = Part()


def n_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning of two texts, in tokens."""
    n = 0
    for first, second in zip(one, other, strict=False):
        if first != second:
            break
        n += 1
    return n
