"""The interface of a kind of draft: all that the rest of specgen knows of a way to draft.

Three objects make a kind, from the longest-lived to the shortest-lived:

1. `DraftKind`, the `KIND` of a module. It recognizes the value of `--draft` and opens it.
2. `LoadedDraft`, a draft that is loaded for a target. It opens contexts (KV caches).
3. `Drafter`, which it makes for each answer. It proposes drafts, round by round.

`specgen.drafters.kinds` lists the kinds. A kind in another package needs this import only.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Iterable,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Literal,
    TypeAlias,
)

import numpy as np

from specgen.errors import RollbackError
from specgen.method.backend import Backend, Batch
from specgen.method.cost_table import (
    FREE,
    CostTable,
    Price,
)
from specgen.method.draft import (
    NO_DRAFT,
    ROOT,
    Branches,
    Draft,
)
from specgen.method.drafter import (
    Ask,
    Drafter,
    Drafting,
    ready,
)
from specgen.method.policy import RoundPlan, RoundResult
from specgen.options import (
    AUTO_TREE,
    ContextOptions,
    DraftOptions,
    DraftSource,
    TreeShape,
)
from specgen.text.overlap import common_prefix_length

if TYPE_CHECKING:
    from specgen.llama import LlamaBackend, LlamaModel
    from specgen.method.acceptance import AcceptanceRates
    from specgen.method.sampling_pipeline import SamplingPipeline
    from specgen.method.text_state import TextState

__all__ = [
    "FREE",
    "NO_DRAFT",
    "ROOT",
    "Ask",
    "Backend",
    "Batch",
    "CacheSlot",
    "ContextOptions",
    "ContextSpec",
    "CostTable",
    "Draft",
    "DraftKind",
    "DraftOptions",
    "DraftRequest",
    "DraftSetup",
    "DraftSource",
    "Drafter",
    "Drafting",
    "Key",
    "LoadedDraft",
    "Price",
    "Reads",
    "RoundPlan",
    "RoundResult",
    "TreeShape",
    "ready",
]

#: What measured costs and acceptance of a draft are stored under: its file, or a word.
Key: TypeAlias = Path | str
#: What a draft reads besides tokens: nothing, the target's hidden states of the last rows or of all
#: rows, or the target's cache and these.
Reads: TypeAlias = Literal["text", "last states", "all states", "cache"]


@dataclass(slots=True, eq=False)
class CacheSlot:
    """The place of one text: one of `n` equal shares of the sequences and cells of each cache."""

    #: The number of this share, from 0.
    number: int = 0
    #: The number of all shares.
    n: int = 1

    def branches(self, backend: Backend) -> Branches:
        """Return the sequences of this slot in a cache."""
        n_branches = backend.n_sequences // self.n
        return Branches(self.number * n_branches, n_branches)

    def n_ctx(self, backend: Backend) -> int:
        """Return the number of cells of this slot in a cache."""
        return backend.n_ctx // self.n

    def share_prefix(
        self,
        backend: Backend,
        tokens: Sequence[int],
        *,
        n_again: int = 0,
    ) -> int:
        """Reuse the longest prefix of `tokens` that any slot of a cache holds, without copying.

        Whatever else this slot holds is dropped.

        Args:
            backend: The cache.
            tokens: The text that the slot is to hold. Its last token is never reused, since its
                logits are needed.
            n_again: How many of the prefix's last tokens not to reuse, where the cache can drop
                them: a drafter needs their hidden states.

        Returns:
            The number of tokens that the slot holds then.
        """
        own = self.branches(backend)
        for branch in range(own.first + 1, own.first + own.n_branches):
            if backend.length(branch):
                backend.remove(branch)
        try:
            if backend.rollback == "cells":
                return self._share_cells(backend, tokens[:-1], n_again)
            return self._go_back(backend, tokens[:-1])
        except RollbackError:  # the cells that a sliding window needs are gone
            backend.remove(own.first)
            return 0

    def _share_cells(
        self,
        backend: Backend,
        tokens: Sequence[int],
        n_again: int,
    ) -> int:
        """Share the cells of the slot that holds the longest prefix; return the prefix's length."""
        own = self.branches(backend).first
        firsts = [CacheSlot(number, self.n).branches(backend).first for number in range(self.n)]
        n_held = {first: common_prefix_length(backend.text(first), tokens) for first in firsts}
        lender = max(firsts, key=n_held.__getitem__)
        if n_held[lender] == n_held[own]:
            lender = own
        n_shared = max(0, n_held[lender] - n_again)
        n_kept = min(n_held[own], n_shared)
        if backend.length(own) > n_kept:
            backend.remove(own, n_kept)
        if lender != own:
            backend.copy(lender, own, n_kept, n_shared)
        return n_shared

    def _go_back(self, backend: Backend, tokens: Sequence[int]) -> int:
        """Go back to the longest prefix that this slot has a state of; return its length.

        Such a cache cannot drop cells: to go back to any other place, it would decode all again.
        """
        own = self.branches(backend).first
        n_kept = common_prefix_length(backend.text(own), tokens)
        if n_kept < backend.length(own):
            n_kept = backend.way_back(own, n_kept)
        if backend.length(own) > n_kept:
            backend.remove(own, n_kept)
        return n_kept


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """An answer to draft for."""

    #: The text of the answer.
    text: TextState
    #: Makes the distributions of drafted tokens.
    shaper: SamplingPipeline
    #: The draft's own random generator.
    rng: np.random.Generator
    #: The text's first tokens, as the draft reads them: its caches may hold some of them already.
    prompt: Sequence[int] = ()
    #: The draft's contexts: its own, then those of what drafts for it.
    caches: Sequence[Backend] = ()
    #: The place of the text in these contexts, and in the target's.
    slot: CacheSlot = field(default_factory=CacheSlot)
    #: What the draft's decodes cost; each decode corrects it.
    costs: CostTable = field(default_factory=CostTable)
    #: Returns what the decodes of another draft cost.
    costs_of: Callable[[Key], CostTable] = lambda _key: CostTable()
    #: Returns the acceptance statistics of what one draft (the second key) drafts for another.
    guesses_of: Callable[[Key, Key], MutableMapping[str, AcceptanceRates]] = lambda _one, _two: {}
    #: Whether tokens are sampled from their distributions; else they are the likeliest.
    draws: bool = False
    #: Whether the draft may be a tree.
    branches: bool = False
    #: The shape of the tree.
    shape: TreeShape = AUTO_TREE
    #: The most tokens of a draft.
    n_max: int = 16
    #: The most levels of a tree; None: as many as there may be tokens.
    n_deepest: int | None = None
    #: Positions of the text that a draft model need not read: what a chat template puts before
    #: every prompt.
    head: range = range(0)
    #: The prompt of a draft with another vocabulary, in its own template; None translates the
    #: target's.
    draft_prompt: Sequence[int] | None = None
    #: Whether tokens that end a text are never chosen.
    is_endless: bool = False

    def reused(self, backend: Backend, start: int = 0) -> Sequence[int]:
        """Let the slot hold the longest known prefix of the prompt, from `start` on; return it."""
        tokens = self.prompt[start:]
        return tokens[: self.slot.share_prefix(backend, tokens)]


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """What a draft is opened for: a target, with options."""

    target: LlamaModel
    drafting: DraftOptions
    context: ContextOptions
    clock: Callable[[], float]
    #: The sources of what drafts for the draft.
    helpers: tuple[DraftSource, ...] = ()
    #: A file of weights that the draft learnt from answers.
    learnt: Path | None = None
    #: A folder for what can be made again.
    cache: Path | None = None

    @property
    def why_chains(self) -> str | None:
        """Why no draft for this target can branch; None if drafts can."""
        if not self.target.has_recurrent_state:
            return None
        return f"{self.target.name} has a recurrent state, which branches cannot share"


@dataclass(frozen=True, slots=True)
class ContextSpec:
    """The size of a draft's contexts."""

    #: The number of tokens of each text.
    n_ctx: int
    #: The number of texts.
    n_slots: int
    #: The most rows of a text in a round.
    n_rows: int
    clock: Callable[[], float]
    #: Returns the options of the context of a draft.
    options_of: Callable[[Key], ContextOptions]
    #: The target's context; None if it decodes elsewhere.
    target: LlamaBackend | None = None


class LoadedDraft:
    """A draft that is loaded for a target.

    Args:
        name: What it is called in messages.
        key: What its acceptance is stored under.
    """

    #: What it reads besides tokens.
    reads: Reads = "text"
    #: Whether it decodes nothing, so that its draft is known before a round is planned.
    is_free = False
    #: Whether it can sample tokens at random and return their distributions.
    can_draw = True
    #: How many tokens one decode predicts, for measuring the cost of a token.
    n_at_once = 1
    #: The name of its tokens in events and statistics.
    origin = "model"
    #: What the costs of its decodes are stored under; None if it has no context of its own.
    timed: Key | None = None
    #: Why its drafts cannot branch; None if they can.
    why_chains: str | None = None
    #: Its own models, and those of what drafts for it.
    models: tuple[LlamaModel, ...] = ()
    #: Its model, if the vocabulary is not the target's.
    own_vocabulary: LlamaModel | None = None
    #: The file that can learn from answers; None if it cannot learn.
    learns: Path | None = None
    #: The file of weights in use that it learnt; None if it uses its original ones.
    learnt: Path | None = None

    def __init__(self, name: str, key: Key) -> None:
        self.name = name
        self.key = key

    def n_sequences(self, n_rows: int) -> int:
        """Return the most of llama.cpp's sequences that a text needs in its contexts.

        Args:
            n_rows: The most rows of a text in a round.
        """
        return 0

    def contexts(self, spec: ContextSpec) -> tuple[LlamaBackend, ...]:
        """Open its contexts: `DraftRequest.caches`, which the caller closes.

        Raises:
            MemoryLimitError: They do not fit.
        """
        return ()

    def drafter(self, request: DraftRequest) -> Drafter:
        """Return what drafts for an answer."""
        raise NotImplementedError

    def keep_text(self, tokens: Sequence[int]) -> None:
        """Store a finished text for later answers, if the options ask for that."""

    def notices(self) -> Iterable[str]:
        """Return notices to print before the first answer."""
        return ()

    def close(self) -> None:
        """Free its models. May be called twice."""
        for model in self.models:
            model.close()


@dataclass(frozen=True)
class DraftKind:
    """A way to draft."""

    #: The name of the kind.
    name: str
    #: Whether a file, or the word after `--draft`, is of this kind. A file that cannot be read is
    #: not.
    matches: Callable[[DraftSource], bool]
    #: Loads a source that matches. Raises `ModelFileError`, `PairError`, or `UsageError` if the
    #: options ask for something that it cannot do.
    open: Callable[[DraftSource, DraftSetup], LoadedDraft]
    #: Whether its name alone, as the word after `--draft`, drafts for a target.
    suits: Callable[[LlamaModel], bool] = lambda _target: False
