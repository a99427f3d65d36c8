"""The nodes of a growing draft in a model's KV cache, which stores a tree as several sequences."""

from __future__ import annotations

from specgen.method.backend import Backend
from specgen.method.draft import ROOT, Branches


class TreeCache:
    """Assigns the nodes of a tree to sequences of a cache.

    Each sequence holds a path from the root and ends on a node, its *tip*. The first child of a tip
    extends the sequence. Any other node starts a sequence of its own, which shares the cells of the
    nodes before it. The text itself is in the *trunk*, the first sequence.
    """

    def __init__(self, backend: Backend, slot: Branches) -> None:
        self._backend = backend
        self._trunk = slot.first
        #: The sequences for branches; sequences outside the slot belong to other texts.
        self._others = range(slot.first + 1, slot.first + slot.n_branches)
        #: The sequence of each decoded node.
        self._sequences: dict[int, int] = {}
        #: The node on which each sequence ends.
        self._tips: dict[int, int] = {}
        #: The sequences that are not used yet.
        self._free: list[int] = []
        for sequence in self._others:  # an earlier answer may have left cells
            if backend.length(sequence):
                backend.remove(sequence)

    def __contains__(self, node: int) -> bool:
        return node in self._sequences and node != ROOT

    @property
    def n_free(self) -> int:
        """The number of nodes that can be added, wherever in the tree they are."""
        return len(self._free)

    def begin(self) -> None:
        """Begin a tree after the text."""
        self._free = list(reversed(self._others))
        self._sequences = {ROOT: self._trunk}
        self._tips = {self._trunk: ROOT}

    def sequence_of(
        self,
        node: int,
        parent: int,
        position: int,
    ) -> int:
        """Return the sequence in which to decode a new node, at a position of the cache."""
        sequence = self._sequences[parent]
        if self._tips[sequence] != parent:
            branch = self._free.pop()
            self._backend.copy(sequence, branch, 0, position)
            sequence = branch
        self._sequences[node] = sequence
        self._tips[sequence] = node
        return sequence

    def keep(
        self,
        node: int,
        n_text: int,
        n_kept: int,
    ) -> None:
        """End the tree: keep a path in the trunk, and drop all other nodes.

        Args:
            node: The last node of the path, or `ROOT`.
            n_text: The number of the text's tokens in the cache, before the tree.
            n_kept: The number of the path's nodes.
        """
        backend = self._backend
        trunk = self._trunk
        sequence = self._sequences.get(node, trunk)
        if sequence != trunk:
            backend.remove(trunk, n_text)
            backend.copy(sequence, trunk, n_text, n_text + n_kept)
        if backend.length(trunk) > n_text + n_kept:
            backend.remove(trunk, n_text + n_kept)
        for other in self._tips:
            if other != trunk:
                backend.remove(other)
        self._sequences = {}
        self._tips = {}
        self._free = []
