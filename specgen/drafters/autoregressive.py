"""A draft model that drafts one token after another, as a chain or as a tree.

A small model decodes each drafted token to predict the next one (Leviathan et al.,
arXiv:2211.17192; Chen et al., arXiv:2302.01318). A tree is decoded level by level, with each branch
in its own sequence of the cache (SpecInfer, arXiv:2305.09781; EAGLE-2, arXiv:2406.16858).
"""

from __future__ import annotations

from collections.abc import Sequence

from specgen.drafters.expansion import (
    Decoding,
    Expansion,
    start_expansion,
)
from specgen.drafters.interface import (
    NO_DRAFT,
    ROOT,
    Ask,
    Backend,
    Batch,
    Drafter,
    Drafting,
    DraftRequest,
    Price,
    RoundPlan,
)
from specgen.drafters.tree_cache import TreeCache
from specgen.system.arrays import Logits
from specgen.text.overlap import common_prefix_length

#: The number of tokens at the beginning of the text that always stay in the cache ("attention
#: sinks", arXiv:2309.17453): without them, the model's predictions break down.
_N_SINK = 4
#: If the cache lacks more than twice this many tokens of a text, only the first few tokens and this
#: many of the last are prefilled. The draft model then agrees with the target nearly as often as
#: with the whole text, unless the answer copies from the text (where n-grams draft well).
_N_WINDOW = 64
#: The maximum number of tokens that a round usually adds to what the cache lacks: the target's own
#: token, and the last drafted token if all were accepted.
N_NEW_PER_ROUND = 2


class ModelDrafter(Drafter):
    """Drafts with a model: chains or trees.

    The cache keeps all drafted tokens that became text, so that no token is decoded twice. If a
    text outgrows the model's context, the cache is filled again with the first few tokens of the
    text and with its latest tokens, up to half of the context.

    To expand nodes of a tree, the model decodes them in one batch, each on its own branch of the
    cache. Leaves are never decoded, since decoding a node finds all of its children. After the
    round, the branch that became text stays in the cache.

    What a chat template puts before every prompt (`DraftRequest.skipped_prefix`) is skipped. The
    model drafts nearly the same without it, and the shorter prefill saves 1 to 4% of the time of an
    answer to a short prompt.

    Args:
        backend: The model's context.
        request: The answer to draft for.
        n_shared_tokens: The number of tokens that both vocabularies have. Later ones (padding) are
            never drafted.
    """

    name = "model"

    def __init__(
        self,
        backend: Backend,
        request: DraftRequest,
        *,
        n_shared_tokens: int,
    ) -> None:
        self._backend = backend
        self._request = request
        self._costs = request.costs
        self._n_shared_tokens = n_shared_tokens
        branches = request.slot.branches(backend)
        #: The sequence of the text.
        self._sequence = branches.first
        self._n_ctx = request.slot.n_ctx(backend)
        self._tree_cache = TreeCache(backend, branches)
        #: The number of the text's first tokens, skipped ones included, that the cache is known to
        #: agree with.
        self._n_agreed = 0
        #: The positions of the text that are left out of the cache.
        self._skipped = request.skipped_prefix
        #: The last tree, while the cache holds its branches.
        self._tree: Expansion | None = None
        #: The length of the text before the last draft.
        self._n_text = 0
        request.slot.share_prefix(backend, self._without_skipped(request.prompt))

    @property
    def n_skipped(self) -> int:
        """The number of the text's tokens that are left out of the cache."""
        return len(self._skipped)

    def price(self, n_context: int) -> Price:
        """Return the cost of decoding the text that the cache lacks, and each drafted token."""
        return self._costs.price_of_draft(self.n_to_decode(n_context), N_NEW_PER_ROUND)

    def n_to_decode(self, n_context: int) -> int:
        """Return the number of tokens of the text that are decoded before the next draft."""
        if self._needs_window(n_context):
            return min(_N_WINDOW, self._n_ctx // 2)
        return max(1, self._n_lacking(n_context))

    def propose(
        self,
        context: Sequence[int],
        plan: RoundPlan,
        n_drafted: int = 0,
    ) -> Drafting:
        """Decode the part of `context` that the cache lacks, then grow a chain or a tree."""
        if self._tree is not None:
            self._keep_text(context, self._tree)
        n_max = self._make_room(len(context), plan.n_max)
        if n_max < 1:
            return NO_DRAFT
        rows = yield from self._catch_up(context)
        draft = self._start_draft(context, plan, n_drafted, n_max)
        if self._request.can_branch:
            return (yield from self._grow_tree(draft, rows[0]))
        return (yield from self._grow_chain(draft, rows[0]))

    def rewind(self, n_tokens: int) -> None:
        """Drop the tokens after the first `n_tokens` from the cache."""
        self._end_tree()
        if n_tokens >= self._n_agreed:
            return
        if n_tokens < self._skipped.stop:  # the cache could not be continued after a gap
            self._empty()
            return
        self._backend.remove(self._sequence, n_tokens - self.n_skipped)
        self._n_agreed = n_tokens

    # --- growing a draft

    def _start_draft(
        self,
        context: Sequence[int],
        plan: RoundPlan,
        n_drafted: int,
        n_max: int,
    ) -> Expansion:
        """Start a draft after `context`, to which the cache can go back afterwards."""
        self._backend.checkpoint(self._sequence)
        self._n_text = len(context)
        return start_expansion(
            self.name,
            self._request,
            plan,
            context,
            n_drafted,
            self._backend.vocabulary,
            n_max,
        )

    def _grow_chain(self, chain: Expansion, first: Logits) -> Drafting:
        """Grow a chain in the text's sequence, given the logits after the text."""

        def logits_after(_nodes: Sequence[int]) -> Decoding:
            """Decode the last token of the chain; the others are in the cache already."""
            rows = yield from self._decode(chain.tokens[-1:], n_wanted=1)
            return rows[:, : self._n_shared_tokens]

        return chain.grow(first[: self._n_shared_tokens], logits_after)

    def _grow_tree(self, tree: Expansion, first: Logits) -> Drafting:
        """Grow a tree in several sequences, given the logits after the text."""
        cache = self._tree_cache
        n_cells = self._n_text - self.n_skipped

        def update_width() -> None:
            """Limit the nodes that are decoded at once: each needs a sequence and a row."""
            tree.max_width = min(cache.n_free, self._backend.n_outputs)

        def logits_after(nodes: Sequence[int]) -> Decoding:
            """Decode nodes in one batch, each in the sequence of its branch."""
            batch = Batch()
            for node in nodes:
                position = n_cells + tree.depths[node]
                sequence = cache.sequence_of(node, tree.parents[node], position)
                batch.add(tree.tokens[node], position, (sequence,), wants=True)
            rows = yield Ask(self._backend, batch, self._costs)
            update_width()
            return rows[:, : self._n_shared_tokens]

        self._tree = tree
        cache.begin()
        update_width()
        return tree.grow(first[: self._n_shared_tokens], logits_after)

    def _keep_text(self, context: Sequence[int], tree: Expansion) -> None:
        """End the last tree: keep its nodes that became text in the cache, and drop the others.

        Args:
            context: The text, with what the target made of the tree.
            tree: The last tree.
        """
        node = ROOT
        n_kept = 0
        for token in context[self._n_text :]:
            child = tree.child(node, token)
            if child is None or child not in self._tree_cache:
                break
            node = child
            n_kept += 1
        self._end_tree(node, n_kept)

    def _end_tree(self, node: int = ROOT, n_kept: int = 0) -> None:
        """Drop the last tree from the cache, except for the path from the root to a node.

        Args:
            node: The last node of the path; `ROOT` keeps nothing.
            n_kept: The number of nodes on the path.
        """
        if self._tree is not None:
            self._tree_cache.keep(node, self._n_text - self.n_skipped, n_kept)
            self._n_agreed = max(self._n_agreed, self._n_text + n_kept)
            self._tree = None

    # --- the text in the cache

    def _without_skipped(self, text: Sequence[int]) -> Sequence[int]:
        """Return the tokens of a text that belong in the cache."""
        skipped = self._skipped
        return [*text[: skipped.start], *text[skipped.stop :]] if skipped else text

    def _empty(self) -> None:
        """Empty the cache; from now on nothing is skipped."""
        self._backend.remove(self._sequence)
        self._n_agreed = 0
        self._skipped = range(0)

    def _n_lacking(self, n_context: int) -> int:
        """Estimate the number of tokens of a text that the cache lacks.

        It is exact if all tokens of the last draft in the cache became text.
        """
        return n_context - self.n_skipped - self._backend.length(self._sequence)

    def _needs_window(self, n_context: int) -> bool:
        """Return whether the cache lacks so much of a text that only a window of it is decoded."""
        return self._n_lacking(n_context) > 2 * _N_WINDOW

    def _n_free(self, n_context: int) -> int:
        """Return the number of tokens for which the context has room after a text."""
        # The last drafted token is not decoded, so n tokens need n - 1 cells.
        return self._n_ctx - (n_context - self.n_skipped) + 1

    def _make_room(self, n_context: int, n_max: int) -> int:
        """Slide the window if the text or a draft does not fit, or if much of the text is lacking.

        To slide the window is to empty the cache and skip all but the first and the last tokens.

        Args:
            n_context: The length of the text.
            n_max: The number of tokens that are wanted.

        Returns:
            The number of tokens that can be drafted, at most `n_max`; below 1 if there is no room.
        """
        n_ctx = self._n_ctx
        n_window: int | None = None
        if self._needs_window(n_context):
            n_window = min(_N_WINDOW, n_ctx // 2)
        elif self._n_free(n_context) < min(n_max, max(1, n_ctx // 4)):
            n_window = n_ctx // 2
        if n_window is not None:
            if n_window <= _N_SINK:  # the context is too small for a beginning and an end
                return 0
            self._empty()
            self._skipped = range(_N_SINK, _N_SINK + max(0, n_context - n_window))
        return min(n_max, self._n_free(n_context))

    def _catch_up(self, context: Sequence[int]) -> Decoding:
        """Decode what the cache lacks of `context`; return the logits after it.

        Returns:
            float32[1, n_vocab]
        """
        missing = self._align_cache(context)
        rows = yield from self._decode(missing, n_wanted=1)
        self._n_agreed = len(context)
        return rows

    def _align_cache(self, context: Sequence[int]) -> Sequence[int]:
        """Drop everything from the cache after its common prefix with `context`.

        Returns:
            The tokens that the cache then lacks; at least one, whose logits are needed.
        """
        backend = self._backend
        # Up to here, cache and text are known to agree.
        start = max(0, self._n_agreed - self.n_skipped)
        wanted = self._without_skipped(context)
        n_same = common_prefix_length(backend.text(self._sequence)[start:], wanted[start:])
        n_kept = min(start + n_same, len(wanted) - 1)
        if backend.length(self._sequence) > n_kept:
            backend.remove(self._sequence, n_kept)
        return wanted[n_kept:]

    def _decode(
        self,
        tokens: Sequence[int],
        *,
        n_wanted: int,
    ) -> Decoding:
        """Append tokens to the text's sequence, in several batches if necessary.

        Args:
            tokens: The tokens, at least one.
            n_wanted: The number of last tokens after which logits are wanted. It may be above 1
                only if all tokens fit into one batch.

        Returns:
            The logits after the last `n_wanted` tokens, float32[n_wanted, n_vocab].
        """
        backend = self._backend
        n_cells = backend.length(self._sequence)
        first_wanted = len(tokens) - n_wanted
        logits: Logits | None = None
        for start in range(0, len(tokens), backend.n_batch):
            part = tokens[start : start + backend.n_batch]
            end = start + len(part)
            n_wanted_here = min(len(part), max(0, end - first_wanted))
            batch = Batch.of(part, n_cells + start, n_wanted_here, self._sequence)
            logits = yield Ask(backend, batch, self._costs)
        assert logits is not None, "at least one token is decoded"
        return logits
