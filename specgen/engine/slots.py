"""Slots: which sequences of a cache an answer has, and the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specgen.backend.base import Backend
from specgen.backend.tree_batch import Slot
from specgen.errors import RollbackError


@dataclass(frozen=True, slots=True)
class Part:
    """One of `n` equal parts of caches, counted from 0: an answer has the same part of the target's
    cache and of those of what drafts for it. In each is room for as many sequences and tokens."""

    number: int = 0
    n: int = 1

    def slot(self, backend: Backend) -> Slot:
        """The part's sequences."""
        n_branches = backend.n_sequences // self.n
        return Slot(self.number * n_branches, n_branches)

    def n_ctx(self, backend: Backend) -> int:
        """The tokens that the part has room for."""
        return backend.n_ctx // self.n

    def share_prefix(self, backend: Backend, tokens: Sequence[int]) -> int:
        """Let the part hold the beginning of a text, as far as any part of the cache holds it, and
        nothing else; returns how many tokens that is: all but the last at most, since that one has
        to be decoded. Sequences share cells, so that nothing is copied."""
        own = self.slot(backend)
        for branch in range(own.first + 1, own.first + own.n_branches):
            if backend.length(branch):
                backend.remove(branch)
        tokens = tokens[:-1]
        n_own = n_common(backend.text(own.first), tokens)
        if backend.rollback != "cells" and n_own < backend.length(own.first):
            # To go back to the middle of a text is to decode it again.
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
        except RollbackError:  # what a sliding window needs of it is gone
            backend.remove(own.first)
            return 0
        return best


#: A cache that is one answer's alone.
WHOLE = Part()


def n_common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    n = 0
    for first, second in zip(one, other, strict=False):
        if first != second:
            break
        n += 1
    return n
