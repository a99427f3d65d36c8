"""Drafts that read the target's hidden states: what MTP layers and drafts trained for one target
have in common.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from specgen.drafters.expansion import WIDEST, Expansion, NodeBranches, expansion
from specgen.drafters.interface import (
    ContextSpec,
    DraftKind,
    DraftRequest,
    DraftSetup,
    LoadedDraft,
    Reads,
)
from specgen.drafters.vocabularies import check_pair
from specgen.errors import PairError
from specgen.llama.gguf_file import architecture_of
from specgen.method.backend import Batch
from specgen.method.cost_table import Price
from specgen.method.draft import NO_DRAFT, ROOT
from specgen.method.drafter import Ask, Drafter, Drafting
from specgen.method.hidden_states import HiddenStateBuffer, StatesBackend
from specgen.method.policy import RoundPlan
from specgen.system.arrays import Hidden, Logits

if TYPE_CHECKING:
    from specgen.llama import LlamaBackend, LlamaModel
    from specgen.llama.draft_models import TrainedModel

N_USUAL = 8  # the most rows that count as those of the last round, and not as a prefill
CELLS_BEHIND = 256  # behind those of a text, for what is drafted


class StatesCache:
    """The rows of a text in one sequence of a cache. The row of a token reads the hidden state
    before it: the target's (`trail`) or, behind what the target has read, a drafted one.

    If states of some tokens are missing, the cache begins behind these tokens.
    """

    def __init__(
        self,
        backend: StatesBackend,
        request: DraftRequest,
        hidden_states: HiddenStateBuffer,
        n_left_out: int = 0,
    ) -> None:
        self._backend, self._hidden_states, self._costs = backend, hidden_states, request.costs
        self._sequence = request.slot.branches(backend).first
        #: The number of the text's first tokens that the cache holds, and how many of the first are
        #: left out.
        self.n_held = n_left_out + len(request.reused(backend, n_left_out))
        self.n_skipped = n_left_out

    @property
    def length(self) -> int:
        """The number of rows of tokens that the target has read."""
        return self.n_held - self.n_skipped

    def n_missing(self, n_read: int) -> int:
        return max(1, n_read + 1 - max(self.n_held, self._hidden_states.first))

    def find_start(self, n_read: int) -> bool:
        """Drop the rows that are decoded again; return whether the last row's state is known.
        Behind others it begins.
        """
        if n_read and self._hidden_states.after(n_read - 1) is None:
            return False
        n_held = min(self.n_held, n_read)
        if self._hidden_states.first > n_held:
            # One state too few happens wherever a kept text goes on: the row then reads zeros.
            n_held = self.n_skipped = self._hidden_states.first
            self._backend.remove(self._sequence)
        self.n_held = n_held
        self.drop_drafted()
        return True

    def catch_up(
        self,
        context: Sequence[int],
        n_read: int,
        drafted: Sequence[int] = (),
        behind: Sequence[Hidden] = (),
    ) -> Generator[Ask, Logits, Logits]:
        """Decode the rows up to that of token `n_read`, and further ones, which read the states
        `behind`; return the logits after the last, float32[n_vocab]. `drafted` are the tokens
        behind `context`.
        """
        start, n_rows = self.n_held, n_read + 1 + len(behind)
        rows: Logits | None = None
        while start < n_rows:
            batch = Batch()
            for index in range(start, n_rows)[: self._backend.n_batch]:
                n_behind = index - len(context)
                token = context[index] if n_behind < 0 else drafted[n_behind]
                wants = index == n_rows - 1
                batch.add(token, index - self.n_skipped, (self._sequence,), wants)
                state = self._hidden_states.after(index - 1)
                batch.hidden.append(state if index <= n_read else behind[index - n_read - 1])
            rows = yield Ask(self._backend, batch, self._costs)
            start += len(batch)
            self.n_held = min(start, n_read + 1)
        assert rows is not None, "at least one token is decoded"
        row: Logits = rows[0]
        return row

    def state(self) -> Hidden:
        return self._backend.state(self._sequence)

    def drop_drafted(self) -> None:
        """Drop the rows behind those of tokens that the target has read."""
        if self._backend.length(self._sequence) > self.length:
            self._backend.remove(self._sequence, self.length)


class StatesDrafter(Drafter):
    """The base of drafters that read the target's hidden states, and nothing before the plan asks
    for a draft.
    """

    name: ClassVar[str]
    #: The most tokens behind those that the target has read; each but the first takes a decode of
    #: its own.
    n_most_unread = 16

    def __init__(self, backend: StatesBackend, request: DraftRequest) -> None:
        self._backend, self._request, self._costs = backend, request, request.costs
        self._slot = request.slot.branches(backend)
        #: The target's hidden states along the text.
        self.hidden_states: HiddenStateBuffer = backend.hidden_states_by_slot[request.slot.number]
        self.hidden_states.begin(request.prompt, backend.hidden_states_by_slot)
        #: What it holds of the text; and the most tokens that it can draft behind those that the
        #: target has read.
        self._caches: list[StatesCache] = []
        self._n_most: int | None = None

    def price(self, n_context: int) -> Price:
        n_read = self._n_read(n_context)
        n_rows = self._caches[0].n_missing(n_read) if self._caches else 1
        return self._costs.price_of_draft(n_rows, N_USUAL, n_context - 1 - n_read)

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        n_read = self._n_read(len(context))
        n_max, n_unread = plan.n_max, len(context) - 1 - n_read
        if self._n_most is not None:
            n_max = min(n_max, self._n_most - n_unread)
        if n_unread > self.n_most_unread or n_max < 1:
            return NO_DRAFT
        if not all(cache.find_start(n_read) for cache in self._caches):
            return NO_DRAFT
        before, vocabulary = context[len(context) - n_drafted :], self._backend.vocabulary
        made = expansion(self.name, self._request, plan, before, vocabulary, n_max)
        try:
            return (yield from self._grow(made, context, n_read))
        finally:
            self._drop_drafted()
            self.hidden_states.forget(
                min((each.n_held - 1 for each in self._caches), default=n_read)
            )

    @abstractmethod
    def _grow(self, made: Expansion, context: Sequence[int], n_read: int) -> Drafting:
        """Let a draft grow after the text, of which the target has read `n_read` tokens."""

    def _drop_drafted(self) -> None:
        for cache in self._caches:
            cache.drop_drafted()

    def _n_read(self, n_context: int) -> int:
        return min(self.hidden_states.n_decoded, n_context - 1)

    def _row_after(
        self, token: int, position: int, state: Hidden
    ) -> Generator[Ask, Logits, Logits]:
        """Decode a token at a position of the cache, with the state before it; return the logits
        after it.
        """
        batch = Batch()
        batch.add(token, position, (self._slot.first,), True)
        batch.hidden.append(state)
        rows = yield Ask(self._backend, batch, self._costs)
        row: Logits = rows[0]
        return row


class LayerDrafter(StatesDrafter):
    """Drafts with a layer that has a cache: a chain or a tree.

    The first batch of a proposal has the rows of all tokens that were accepted since the last one,
    and its last row begins the draft. Rows of drafted tokens are dropped afterwards: the target's
    states are better.
    """

    name = "mtp"
    #: The first tokens of a text that have no row.
    n_left_out: ClassVar[int] = 0

    def __init__(self, backend: StatesBackend, request: DraftRequest) -> None:
        super().__init__(backend, request)
        self._nodes = NodeBranches(backend, self._slot)
        self._cache = StatesCache(backend, request, self.hidden_states, self.n_left_out)
        self._caches = [self._cache]

    def _grow(self, made: Expansion, context: Sequence[int], n_read: int) -> Drafting:
        backend, nodes_at, n_skipped = self._backend, self._nodes, self._cache.n_skipped

        def rows_beyond(nodes: Sequence[int]) -> Generator[Ask, Logits, Logits]:
            batch, ends = Batch(), []
            for node in nodes:
                parent, position = made.parents[node], len(context) - n_skipped + made.depths[node]
                ends.append(nodes_at.follow(node, parent, position))
                batch.add(made.tokens[node], position, (ends[-1],), True)
                batch.hidden.append(behind[parent])
            rows: Logits = yield Ask(backend, batch, self._costs)
            behind.update((node, backend.state(end)) for node, end in zip(nodes, ends, strict=True))
            made.n_most = min(n_widest, len(nodes_at.free))
            return rows

        row = yield from self._cache.catch_up(context, n_read)
        for index in range(n_read + 1, len(context)):
            row = yield from self._row_after(context[index], index - n_skipped, self._cache.state())
        behind = {ROOT: self._cache.state()}
        nodes_at.begin()
        n_widest = min(WIDEST, backend.n_outputs)
        made.n_most = min(n_widest, len(nodes_at.free))
        return (yield from made.grow(row, rows_beyond))

    def _drop_drafted(self) -> None:
        self._nodes.keep(ROOT, self._cache.length, 0)


class StatesDraft(LoadedDraft):
    """A loaded draft that reads the target's hidden states, in one context."""

    reads: Reads = "all states"
    origin = "mtp"

    def __init__(self, name: str, key: Path | str, setup: DraftSetup) -> None:
        super().__init__(name, key)
        self.timed = key
        self._target = setup.target
        self._grows_trees = setup.drafting.grows_trees
        #: The number of tokens that both models have, from 0 on; None: all.
        self._n_shared_tokens: int | None = None

    def n_sequences(self, n_rows: int) -> int:
        return self._n_branches(n_rows) + (self._target.n_window > 0)

    def _n_branches(self, n_rows: int) -> int:
        return n_rows + 1 if self._grows_trees and self.why_chains is None else 1

    def _sizes(self, room: ContextSpec) -> dict[str, Any]:
        n_ctx, n_branches = room.n_ctx + CELLS_BEHIND, self._n_branches(room.n_rows)
        sizes = {"n_ctx": n_ctx, "n_branches": n_branches, "n_slots": room.n_slots}
        return {**sizes, "clock": room.clock, "n_shared_tokens": self._n_shared_tokens}

    def _take(self, model: LlamaModel) -> None:
        """Take a loaded model as the draft's. Raise `PairError`."""
        self.models, target = (model,), self._target
        own, theirs = target.vocabulary, model.vocabulary
        try:
            self._n_shared_tokens = check_pair(own, theirs, target.name, model.name)
        except PairError:
            self.close()
            raise


class TrainedDraft(StatesDraft):
    """A loaded draft that was trained for one target, in a GGUF file with an architecture of its
    own.
    """

    model_type: ClassVar[type[TrainedModel]]
    context_type: ClassVar[type[Any]]
    drafter_type: ClassVar[type[Any]]
    draws_trees: ClassVar[bool] = False

    def __init__(self, path: Path, setup: DraftSetup) -> None:
        super().__init__(path.name, path, setup)
        own = None if self.draws_trees else f"{path.name} drafts chains"
        self.origin, self.why_chains = self.model_type.file_architecture, setup.why_chains or own
        self._model = self.model_type(path, setup.target, n_gpu_layers=setup.context.n_gpu_layers)
        self._take(self._model)

    @classmethod
    def kind(cls) -> DraftKind:
        name = cls.model_type.file_architecture
        return DraftKind(
            name,
            matches=lambda source: isinstance(source, Path) and architecture_of(source) == name,
            open=lambda source, setup: cls(Path(source), setup),
        )

    def contexts(self, room: ContextSpec) -> tuple[LlamaBackend, ...]:
        if room.target is None:  # it decodes elsewhere
            return ()
        options, sizes = room.options_of(self._model.path), self._sizes(room)
        return (self.context_type(self._model, room.target, options, **sizes),)

    def drafter(self, request: DraftRequest) -> Drafter:
        made: Drafter = self.drafter_type(request.caches[0], request)
        return made
