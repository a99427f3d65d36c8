"""Store a growing tree in a model's KV cache, as several sequences that share cells."""

from __future__ import annotations

from specgen.method.backend import Backend
from specgen.method.draft import ROOT, Branches


class TreeCache:
    """Assigns the nodes of a tree to sequences of a cache.

    Each sequence holds a path from the root, and ends with a node, its *tip*. The first child of a
    tip extends the sequence. Any other node starts a new sequence, which shares the cells of the
    nodes before it. The text itself is in the first sequence, the *trunk*.

    Args:
        backend: The cache.
        branches: The sequences of the text. They are emptied, except for the trunk.
    """

    def __init__(self, backend: Backend, branches: Branches) -> None:
        self._backend = backend
        self._trunk = branches.first
        #: The sequences for further branches.
        self._others = range(branches.first + 1, branches.first + branches.n_branches)
        #: The sequence in which each node was decoded.
        self._sequences: dict[int, int] = {}
        #: The last node of each sequence that is in use.
        self._tips: dict[int, int] = {}
        #: The sequences that are not in use.
        self._free: list[int] = []
        for sequence in self._others:  # an earlier answer may have left cells in them
            if backend.length(sequence):
                backend.remove(sequence)

    def __contains__(self, node: int) -> bool:
        return node in self._sequences and node != ROOT

    @property
    def n_free(self) -> int:
        """The number of nodes that can certainly be added: each may need a new sequence."""
        return len(self._free)

    def begin(self) -> None:
        """Start a tree after the text."""
        self._free = list(reversed(self._others))
        self._sequences = {ROOT: self._trunk}
        self._tips = {self._trunk: ROOT}

    def sequence_of(
        self,
        node: int,
        parent: int,
        position: int,
    ) -> int:
        """Assign a new node to a sequence.

        Args:
            node: The node.
            parent: The parent node, or `ROOT`.
            position: The position of the node in the cache.

        Returns:
            The sequence in which to decode the node.
        """
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
        """End the tree: keep one path, as part of the trunk, and drop all other nodes.

        Args:
            node: The last node of the path; `ROOT` keeps no node.
            n_text: The number of tokens in the cache before the tree.
            n_kept: The number of nodes on the path.
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
