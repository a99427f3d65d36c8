"""A small model drafts a tree for the large one."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from specgen.drafters.chain import N_USUAL, ModelDrafter
from specgen.drafters.expansion import Look, TreeBuilder, grow, look
from specgen.drafters.kind import DraftRequest
from specgen.method.backend import Backend, Batch
from specgen.method.draft import NO_DRAFT, ROOT, Branches
from specgen.method.drafter import Ask, Drafting
from specgen.method.policy import RoundPlan
from specgen.method.tables import Price
from specgen.system.arrays import Logits


class TreeModelDrafter(ModelDrafter):
    """Drafts a tree with a model: of a fixed shape, or for as long as the policy finds it worthwhile.

    To look beyond nodes, the model decodes them: all nodes of a frontier in one batch, each on its
    own branch of the model's cache. A branch is a sequence that shares the cells of its ancestors.
    Leaves cost no decode, since one look finds all children of a node. After the round the branch
    that became text stays, whole or in part, and the others are removed. The look beyond its last
    node is remembered, so that no token of the text is decoded twice. (One exception: a token that
    was decoded but not verified, and that the target chose nevertheless, two tokens later; it was
    removed with its branch.)

    Siblings are the model's likeliest tokens or, with `draws`, drawn one after the other without
    replacement; the walks of a shape like 4x5 are drawn independently. Dynamic trees of this kind
    are SpecInfer's (Miao et al., arXiv:2305.09781) and EAGLE-2's (Li et al., arXiv:2406.16858).
    """

    def __init__(self, backend: Backend, request: DraftRequest, *, n_shared_tokens: int) -> None:
        super().__init__(backend, request, n_shared_tokens=n_shared_tokens)
        self._branches = NodeBranches(backend, self._slot)
        self._tree = TreeBuilder(self.name)
        #: The looks beyond nodes of the tree, and the text's length then.
        self._looks: dict[int, Look] = {}
        self._n_text = 0
        #: The look beyond the text's last token, if that is a node that was looked beyond.
        self._known: Look | None = None

    def price(self, n_context: int) -> Price:
        if not self._looks:
            return super().price(n_context)
        # Most tokens that became text since the last tree are in the cache: by far the usual case.
        return super().price(max(self._n_agreed, min(n_context, self._n_agreed + N_USUAL)))

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        self._settle(context)
        n_max = self._make_room(len(context), plan.n_max)
        if n_max < 1:
            return NO_DRAFT
        tree = self._tree = TreeBuilder(self.name)
        self._n_text = len(context)
        before = tuple(context[len(context) - n_drafted :])
        found = self._known
        if found is None or self._n_agreed < len(context):
            row = yield from self._catch_up(context)
            found = look(row[: self._n_shared_tokens], self._request, before)
        self._looks[ROOT] = found
        self._branches.begin()
        n_past = self._n_text - self.n_skipped

        def rows_beyond(nodes: Sequence[int]) -> Generator[Ask, Logits, Logits]:
            batch = Batch()
            for node in nodes:
                position = n_past + tree.depths[node]
                branch = self._branches.follow(node, tree.parents[node], position)
                batch.add(tree.tokens[node], position, (branch,), True)
            rows: Logits = yield Ask(self._backend, batch, self._costs)
            return rows[:, : self._n_shared_tokens]

        return (
            yield from grow(
                tree,
                self._request,
                plan,
                before,
                self._backend.vocabulary.is_end,
                found,
                rows_beyond,
                n_max=n_max,
                # Each needs a branch and a row of logits.
                n_most=lambda: min(self._branches.n_free, self._backend.n_outputs),
                looks=self._looks,
            )
        )

    def rewind(self, n_tokens: int) -> None:
        if self._looks:
            self._keep(ROOT, 0)
        self._known = None
        super().rewind(n_tokens)

    def _settle(self, context: Sequence[int]) -> None:
        """Keep the nodes of the last tree that became text in the cache, and remove the others."""
        if not self._looks:
            return
        tree, node, n_kept = self._tree, ROOT, 0
        for token in context[self._n_text :]:
            child = tree.child(node, token)
            if child is None or child not in self._branches:
                break
            node, n_kept = child, n_kept + 1
        if node == ROOT or self._n_text + n_kept < len(context):
            self._known = None
        else:
            self._known = self._looks.get(node)
        if not len(tree) and self._n_text == len(context):
            self._known = self._looks.get(ROOT)
        self._keep(node, n_kept)

    def _keep(self, node: int, n_kept: int) -> None:
        self._branches.keep(node, self._n_text - self.n_skipped, n_kept)
        self._n_agreed = max(self._n_agreed, self._n_text + n_kept)
        self._looks.clear()

    def _empty(self) -> None:
        self._known = None
        super()._empty()


class NodeBranches:
    """The branches of a tree, each in its own sequence of the model's cache.

    A sequence ends on a node, its tip. The first child of a tip continues the sequence; another
    child, or a child of a node further up, gets a sequence of its own, which shares the cells up
    to its parent.
    """

    def __init__(self, backend: Backend, slot: Branches) -> None:
        self._backend = backend
        self._trunk = slot.first
        #: The sequences for branches; sequences outside the slot belong to other texts.
        self._others = range(slot.first + 1, slot.first + slot.n_branches)
        #: The sequence of each decoded node, and the node on which each sequence ends.
        self._sequences: dict[int, int] = {}
        self._tips: dict[int, int] = {}
        self._free: list[int] = []
        for sequence in self._others:  # an earlier answer may have left cells
            if backend.length(sequence):
                backend.remove(sequence)

    def __contains__(self, node: int) -> bool:
        """Return whether a node is decoded."""
        return node in self._sequences and node != ROOT

    @property
    def n_free(self) -> int:
        """How many more nodes can be decoded, wherever in the tree they are."""
        return len(self._free)

    def begin(self) -> None:
        """Begin a tree after the text."""
        self._free = list(reversed(self._others))
        self._sequences = {ROOT: self._trunk}
        self._tips = {self._trunk: ROOT}

    def follow(self, node: int, parent: int, position: int) -> int:
        """Return the sequence for a node that is about to be decoded at a position; its `parent` is decoded
        already."""
        sequence = self._sequences[parent]
        if self._tips[sequence] != parent:
            branch = self._free.pop()
            self._backend.copy(sequence, branch, 0, position)
            sequence = branch
        self._sequences[node] = sequence
        self._tips[sequence] = node
        return sequence

    def keep(self, node: int, n_before: int, n_kept: int) -> None:
        """Keep the text, of `n_before` tokens, and the path of `n_kept` nodes down to `node` in the
        trunk; remove everything else."""
        backend, trunk = self._backend, self._trunk
        sequence = self._sequences.get(node, trunk)
        if sequence != trunk:
            backend.remove(trunk, n_before)
            backend.copy(sequence, trunk, n_before, n_before + n_kept)
        if backend.length(trunk) > n_before + n_kept:
            backend.remove(trunk, n_before + n_kept)
        for other in self._tips:
            if other != trunk:
                backend.remove(other)
        self._sequences, self._tips, self._free = {}, {}, []
