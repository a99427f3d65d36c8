"""Drafts that read the target's hidden states: the common part of MTP, EAGLE-3, DFlash and Gemma 4.

Such a draft consists of a few layers that were trained for one target. A *row* is a token together
with the hidden state after the previous token. This state is the target's if the target has decoded
the previous token, and else the draft's own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    ClassVar,
    cast,
)

from specgen.drafters.expansion import (
    MAX_WIDTH,
    Decoding,
    Expansion,
    start_expansion,
)
from specgen.drafters.interface import (
    NO_DRAFT,
    ROOT,
    Ask,
    Batch,
    ContextSpec,
    Drafter,
    Drafting,
    DraftKind,
    DraftRequest,
    DraftSetup,
    Key,
    LoadedDraft,
    Price,
    RoundPlan,
)
from specgen.drafters.tree_cache import TreeCache
from specgen.drafters.vocabularies import check_pair
from specgen.errors import PairError
from specgen.llama.gguf_file import architecture_of
from specgen.llama.hidden_state_contexts import DraftContextSize, HiddenStateContext
from specgen.method.hidden_states import HiddenStateBackend, HiddenStateBuffer
from specgen.system.arrays import Hidden, Logits

if TYPE_CHECKING:
    from specgen.llama import LlamaBackend, LlamaModel
    from specgen.llama.paired_drafts import TrainedDraftModel

#: If more rows than this are missing in the cache, they count as a prefill; up to this number, they
#: are taken to be those of the last round.
N_ROUND_ROWS = 8
#: Cells for drafted tokens, in addition to those for the text.
N_DRAFT_CELLS = 256


class HiddenStateCache:
    """The rows of a text in one sequence of a draft's cache.

    The cache may leave out the first tokens of the text, whose states of the target were never
    seen. The tokens of the text are divided like this::

        [ skipped | in the cache        | missing             ]
        0         n_skipped             n_held                length of the text

    All rows in the cache read the target's states. After `n_held`, the cache may also have rows
    that read the draft's own states, until `drop_drafted`.

    Args:
        backend: The draft's context.
        request: The answer to draft for. As much of its prompt as possible is reused from the
            cache; everything else in the slot is dropped.
        hidden_states: The target's hidden states along the text.
        n_skipped: The number of the first tokens that never have a row.
    """

    def __init__(
        self,
        backend: HiddenStateBackend,
        request: DraftRequest,
        hidden_states: HiddenStateBuffer,
        n_skipped: int = 0,
    ) -> None:
        self._backend = backend
        self._hidden_states = hidden_states
        self._costs = request.costs
        self._sequence = request.slot.branches(backend).first
        #: The number of the text's first tokens that are not in the cache.
        self.n_skipped = n_skipped
        #: The number of the text's first tokens that are skipped or in the cache.
        self.n_held = n_skipped + request.reuse_prefix(backend, n_skipped)

    @property
    def length(self) -> int:
        """The number of rows in the cache that have read the target's states."""
        return self.n_held - self.n_skipped

    def n_missing(self, n_decoded: int) -> int:
        """Return the number of rows to decode before the next draft.

        Args:
            n_decoded: The number of the text's tokens that the target has decoded.
        """
        return max(1, n_decoded + 1 - max(self.n_held, self._hidden_states.first))

    def prepare(self, n_decoded: int) -> bool:
        """Drop the rows that have to be decoded again.

        Args:
            n_decoded: The number of the text's tokens that the target has decoded.

        Returns:
            Whether the cache can catch up; False if the state that the last row reads is not known.
        """
        if n_decoded and self._hidden_states.after(n_decoded - 1) is None:
            return False
        self.n_held = min(self.n_held, n_decoded)
        if self._hidden_states.first > self.n_held:
            # There is a gap of unknown states after the rows in the cache: skip up to its end. The
            # first row after it, whose previous state is unknown, reads zeros.
            self.n_held = self._hidden_states.first
            self.n_skipped = self.n_held
            self._backend.remove(self._sequence)
        self.drop_drafted()
        return True

    def catch_up(
        self,
        context: Sequence[int],
        n_decoded: int,
        drafted: Sequence[int] = (),
        own_states: Sequence[Hidden] = (),
    ) -> Decoding:
        """Decode the rows that the cache lacks.

        Args:
            context: The text.
            n_decoded: The number of its tokens that the target has decoded. The row of the next
                token is the last one that reads a state of the target.
            drafted: The drafted tokens after `context`.
            own_states: The draft's own states, one for each further row: those after the tokens at
                `n_decoded`, `n_decoded + 1`, and so on.

        Returns:
            The logits after the last row, float32[1, n_vocab].
        """
        rows: Logits | None = None
        end = n_decoded + 1 + len(own_states)
        n_batch = self._backend.n_batch
        for start in range(self.n_held, end, n_batch):
            batch = Batch()
            batch_end = min(start + n_batch, end)
            for index in range(start, batch_end):
                n_beyond = index - len(context)
                token = context[index] if n_beyond < 0 else drafted[n_beyond]
                is_last = index == end - 1
                position = index - self.n_skipped
                batch.add(token, position, (self._sequence,), wants=is_last)
                if index <= n_decoded:
                    batch.hidden.append(self._hidden_states.after(index - 1))
                else:
                    batch.hidden.append(own_states[index - n_decoded - 1])
            rows = yield Ask(self._backend, batch, self._costs)
            # Rows that read the draft's own states do not count: they are dropped later.
            self.n_held = min(batch_end, n_decoded + 1)
        assert rows is not None, "at least one token is decoded"
        return rows

    def state(self) -> Hidden:
        """Return the draft's state after the last row, float32[n_embd]."""
        return self._backend.state(self._sequence)

    def drop_drafted(self) -> None:
        """Drop the rows that have read the draft's own states."""
        if self._backend.length(self._sequence) > self.length:
            self._backend.remove(self._sequence, self.length)


class HiddenStateDrafter(Drafter):
    """The base class of drafters that read the target's hidden states.

    Nothing is decoded, not even the prompt, before a plan asks for a draft.
    """

    name: ClassVar[str]
    #: Nothing is drafted if, not counting the first one, more tokens than this are not yet decoded
    #: by the target. The draft decodes each of them separately.
    max_undecoded = 16

    def __init__(
        self,
        backend: HiddenStateBackend,
        request: DraftRequest,
    ) -> None:
        self._backend = backend
        self._request = request
        self._costs = request.costs
        self._branches = request.slot.branches(backend)
        #: The target's hidden states along the text.
        self.hidden_states: HiddenStateBuffer = backend.hidden_states_by_slot[request.slot.number]
        self.hidden_states.begin(request.prompt, backend.hidden_states_by_slot)
        #: The draft's caches: one per layer, or none.
        self._caches: list[HiddenStateCache] = []
        #: The maximum number of positions that a draft can predict. They start after the first
        #: token that the target has not decoded, and include those whose token is known already.
        #: None if there is no limit.
        self._max_predicted: int | None = None

    def price(self, n_context: int) -> Price:
        """Return the costs of the rows that are missing, and of each further token."""
        n_decoded = self._n_decoded(n_context)
        n_rows = self._caches[0].n_missing(n_decoded) if self._caches else 1
        return self._costs.price_of_draft(n_rows, N_ROUND_ROWS, n_context - 1 - n_decoded)

    def propose(
        self,
        context: Sequence[int],
        plan: RoundPlan,
        n_drafted: int = 0,
    ) -> Drafting:
        """Draft after the text, if the target's states are known that the draft reads.

        The rows of drafted tokens are dropped from the cache afterwards, because they read the
        draft's own states and not the target's.
        """
        n_decoded = self._n_decoded(len(context))
        # Known tokens that the target has not decoded, except the first one, which is its own token
        # of the last round.
        n_undecoded = len(context) - 1 - n_decoded
        n_max = plan.n_max
        if self._max_predicted is not None:
            # The known tokens after the first count as predicted.
            n_max = min(n_max, self._max_predicted - n_undecoded)
        if n_undecoded > self.max_undecoded or n_max < 1:
            return NO_DRAFT
        if not all(cache.prepare(n_decoded) for cache in self._caches):
            return NO_DRAFT
        draft = start_expansion(
            self.name,
            self._request,
            plan,
            context,
            n_drafted,
            self._backend.vocabulary,
            n_max,
        )
        try:
            return (yield from self._grow(draft, context, n_decoded))
        finally:
            self._drop_drafted()
            # Forget states that all caches have read; row n reads the state after token n - 1.
            n_read = min((cache.n_held - 1 for cache in self._caches), default=n_decoded)
            self.hidden_states.forget(n_read)

    @abstractmethod
    def _grow(
        self,
        draft: Expansion,
        context: Sequence[int],
        n_decoded: int,
    ) -> Drafting:
        """Grow a draft after the text. The target has decoded its first `n_decoded` tokens."""

    def _drop_drafted(self) -> None:
        for cache in self._caches:
            cache.drop_drafted()

    def _n_decoded(self, n_context: int) -> int:
        """Return the number of the text's tokens that the target has decoded.

        The last token does not count, even if it is decoded: its row predicts the first drafted
        token.
        """
        return min(self.hidden_states.n_decoded, n_context - 1)

    def _decode_token(
        self,
        token: int,
        position: int,
        state: Hidden,
    ) -> Decoding:
        """Decode a token with the state before it; return the logits, float32[1, n_vocab]."""
        batch = Batch()
        batch.add(token, position, (self._branches.first,), wants=True)
        batch.hidden.append(state)
        return (yield Ask(self._backend, batch, self._costs))


class LayerDrafter(HiddenStateDrafter):
    """Drafts with one layer that has a cache: a chain or a tree.

    The first batch of a draft has the rows of all tokens that were accepted since the last draft.
    Its last row predicts the first drafted token. The rows of drafted tokens are dropped
    afterwards, to be decoded again with the target's states, which are better.
    """

    name = "mtp"
    #: The number of a text's first tokens that never have a row.
    n_skipped: ClassVar[int] = 0

    def __init__(
        self,
        backend: HiddenStateBackend,
        request: DraftRequest,
    ) -> None:
        super().__init__(backend, request)
        self._tree_cache = TreeCache(backend, self._branches)
        self._cache = HiddenStateCache(backend, request, self.hidden_states, self.n_skipped)
        self._caches = [self._cache]

    def _grow(
        self,
        draft: Expansion,
        context: Sequence[int],
        n_decoded: int,
    ) -> Drafting:
        """Decode the rows of the text that the cache lacks, and grow a draft after them."""
        n_skipped = self._cache.n_skipped
        rows = yield from self._cache.catch_up(context, n_decoded)
        # Known tokens that the target has not decoded yet read the draft's own states.
        for index in range(n_decoded + 1, len(context)):
            state = self._cache.state()
            rows = yield from self._decode_token(context[index], index - n_skipped, state)
        n_cells = len(context) - n_skipped
        return (yield from self._grow_nodes(draft, rows[0], self._cache.state(), n_cells))

    def _grow_nodes(
        self,
        draft: Expansion,
        first: Logits,
        first_state: Hidden,
        n_cells: int,
    ) -> Drafting:
        """Grow a draft after the text.

        Args:
            draft: The draft to grow.
            first: The logits after the text.
            first_state: The draft's state after the text.
            n_cells: The number of cells that the text takes.
        """
        backend = self._backend
        cache = self._tree_cache
        max_width = min(MAX_WIDTH, backend.n_outputs)
        #: The draft's state after each node, which its children read.
        states = {ROOT: first_state}

        def logits_after(nodes: Sequence[int]) -> Decoding:
            """Decode nodes in one batch, each with the state after its parent."""
            batch = Batch()
            for node in nodes:
                parent = draft.parents[node]
                position = n_cells + draft.depths[node]
                sequence = cache.sequence_of(node, parent, position)
                batch.add(draft.tokens[node], position, (sequence,), wants=True)
                batch.hidden.append(states[parent])
            rows: Logits = yield Ask(backend, batch, self._costs)
            for node, (sequence,) in zip(nodes, batch.sequences, strict=True):
                states[node] = backend.state(sequence)
            draft.max_width = min(max_width, cache.n_free)
            return rows

        cache.begin()
        draft.max_width = min(max_width, cache.n_free)
        return draft.grow(first, logits_after)

    def _drop_drafted(self) -> None:
        self._tree_cache.keep(ROOT, self._cache.length, 0)


class HiddenStateDraft(LoadedDraft):
    """A loaded draft that reads the target's hidden states, in one context."""

    reads_all_rows = True
    origin = "mtp"

    def __init__(self, name: str, key: Key, setup: DraftSetup) -> None:
        super().__init__(name, key)
        self.cost_key = key
        self._target = setup.target
        self._grows_trees = setup.drafting.grows_trees
        #: The number of tokens that both vocabularies have; None if they are the same one.
        self._n_shared_tokens: int | None = None

    def n_sequences(self, n_rows: int) -> int:
        """Return the number of llama.cpp's sequences per text.

        With a sliding window, one more is needed than there are branches.
        """
        n_branches = self._n_branches(n_rows)
        return n_branches + 1 if self._target.n_window > 0 else n_branches

    def _n_branches(self, n_rows: int) -> int:
        """Return the number of branches: one for the text and, in a tree, one for each node."""
        return n_rows + 1 if self._grows_trees and self.why_chains is None else 1

    def _context_size(self, spec: ContextSpec) -> DraftContextSize:
        return DraftContextSize(
            n_ctx=spec.n_ctx + N_DRAFT_CELLS,
            n_slots=spec.n_slots,
            n_branches=self._n_branches(spec.n_rows),
            n_shared_tokens=self._n_shared_tokens,
        )

    def _use_model(self, model: LlamaModel) -> None:
        """Use a loaded model that is separate from the target. It is closed after an error.

        Raises:
            PairError: If its vocabulary is not the target's.
        """
        self.models = (model,)
        target = self._target
        try:
            self._n_shared_tokens = check_pair(
                target.vocabulary, model.vocabulary, target.name, model.name
            )
        except PairError:
            self.close()
            raise


class TrainedDraft(HiddenStateDraft):
    """A loaded draft that was trained for one target, in a file with its own architecture."""

    #: Loads the file.
    model_type: ClassVar[type[TrainedDraftModel]]
    #: The type of its contexts.
    context_type: ClassVar[type[HiddenStateContext]]
    #: The type of its drafters.
    drafter_type: ClassVar[type[HiddenStateDrafter]]
    #: Whether its drafts may branch.
    can_branch: ClassVar[bool] = False

    def __init__(self, path: Path, setup: DraftSetup) -> None:
        super().__init__(path.name, path, setup)
        self.origin = self.model_type.file_architecture
        self.why_chains = setup.why_chains
        if self.why_chains is None and not self.can_branch:
            self.why_chains = f"{path.name} drafts chains"
        self._model = self.model_type(path, setup.target, n_gpu_layers=setup.context.n_gpu_layers)
        self._use_model(self._model)

    @classmethod
    def kind(cls) -> DraftKind:
        """Return the kind of drafts that are loaded as this class."""
        name = cls.model_type.file_architecture
        return DraftKind(
            name,
            matches=lambda source: isinstance(source, Path) and architecture_of(source) == name,
            open=lambda source, setup: cls(Path(source), setup),
        )

    def contexts(self, spec: ContextSpec) -> tuple[LlamaBackend, ...]:
        """Open its one context, which reads the target's hidden states.

        There is none if the target decodes elsewhere: its hidden states cannot be read then, and no
        drafter is made.
        """
        if spec.target is None:
            return ()
        context = self.context_type(
            self._model,
            spec.target,
            spec.options_of(self._model.path),
            self._context_size(spec),
            spec.clock,
        )
        return (context,)

    def drafter(self, request: DraftRequest) -> Drafter:
        return self.drafter_type(cast(HiddenStateBackend, request.caches[0]), request)
