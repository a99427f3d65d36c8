"""A kind of draft is one object: what the rest of specgen knows of a way to draft.

A module has a `KIND`, which opens a source (a file, or a word after `--draft`) for a target. The
`LoadedDraft` opens contexts and makes the `Drafter` of each answer, for a `DraftRequest`.
`specgen.drafters.kinds` lists the kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from specgen.errors import RollbackError
from specgen.method.backend import Backend
from specgen.method.cost_table import CostTable
from specgen.method.draft import Branches
from specgen.options import AUTO_TREE, ContextOptions, DraftOptions, DraftSource, TreeShape
from specgen.text.overlap import common_prefix_length

if TYPE_CHECKING:
    from specgen.llama import LlamaBackend, LlamaModel
    from specgen.method.acceptance import AcceptanceRates
    from specgen.method.drafter import Drafter
    from specgen.method.sampling_pipeline import SamplingPipeline
    from specgen.method.text_state import TextState

#: What a draft is named by in the memory of costs and acceptance: its file, or a word.
Key: TypeAlias = Path | str
#: What a draft reads: tokens, the target's hidden states of the last rows or of all rows, or its
#: cache beside these.
Reads: TypeAlias = Literal["text", "last states", "all states", "cache"]


@dataclass(slots=True, eq=False)
class CacheSlot:
    """One of `n` equal shares of the sequences and cells of all caches, counted from 0: the place
    of one text.
    """

    number: int = 0
    n: int = 1

    def branches(self, backend: Backend) -> Branches:
        n_branches = backend.n_sequences // self.n
        return Branches(self.number * n_branches, n_branches)

    def n_ctx(self, backend: Backend) -> int:
        return backend.n_ctx // self.n

    def share_prefix(self, backend: Backend, tokens: Sequence[int], *, n_again: int = 0) -> int:
        """Reuse the longest prefix of `tokens` that any slot of the cache holds, without copying;
        drop the rest of this slot. Return the number of reused tokens: at most all but the last,
        whose logits are needed. The last `n_again` tokens of a prefix are not reused where the
        cache can drop them: a drafter needs their states.
        """
        own = self.branches(backend)
        for branch in range(own.first + 1, own.first + own.n_branches):
            if backend.length(branch):
                backend.remove(branch)
        tokens = tokens[:-1]
        best = n_own = common_prefix_length(backend.text(own.first), tokens)
        lender = own.first
        if backend.rollback == "cells":
            firsts = [CacheSlot(other, self.n).branches(backend).first for other in range(self.n)]
            n_held = {first: common_prefix_length(backend.text(first), tokens) for first in firsts}
            if max(n_held.values()) > n_own:
                lender = max(firsts, key=n_held.__getitem__)
            best = max(0, n_held[lender] - n_again)
            n_own = min(n_own, best)
        elif n_own < backend.length(own.first):
            # Such a cache cannot drop cells: to go back to any other place, it would decode all
            # again.
            best = n_own = backend.way_back(own.first, n_own)
        try:
            if backend.length(own.first) > n_own:
                backend.remove(own.first, n_own)
            if lender != own.first:
                backend.copy(lender, own.first, n_own, best)
        except RollbackError:  # the cells that a sliding window needs are gone
            backend.remove(own.first)
            best = 0
        return best


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One answer that is to be drafted for. With `draws` tokens are drawn from the distributions
    that `shaper` makes, else they are the likeliest. With `branches` the draft may be a tree of
    this `shape`, `n_deepest` levels at most.
    """

    text: TextState
    shaper: SamplingPipeline
    rng: np.random.Generator
    #: The text's first tokens, as the draft reads them: its caches may hold some of them already.
    prompt: Sequence[int] = ()
    #: The draft's contexts: its own, then those of what drafts for it.
    caches: Sequence[Backend] = ()
    slot: CacheSlot = field(default_factory=CacheSlot)
    #: The table of the draft's decodes, which each decode corrects; and that of another draft.
    costs: CostTable = field(default_factory=CostTable)
    costs_of: Callable[[Key], CostTable] = lambda _key: CostTable()
    #: The acceptance statistics of one draft's guesses for another one.
    guesses_of: Callable[[Key, Key], MutableMapping[str, AcceptanceRates]] = lambda _one, _two: {}
    draws: bool = False
    branches: bool = False
    shape: TreeShape = AUTO_TREE
    n_max: int = 16
    n_deepest: int | None = None
    #: Positions of the text that a draft model need not read: what a chat template puts before
    #: every prompt.
    head: range = range(0)
    #: The prompt of a draft with another vocabulary, in its own template; None translates the
    #: target's.
    draft_prompt: Sequence[int] | None = None
    is_endless: bool = False  # tokens that end a text are never chosen

    def reused(self, backend: Backend, start: int = 0) -> Sequence[int]:
        """Let the slot of a cache hold the longest known prefix of the prompt, from `start` on;
        return it.
        """
        tokens = self.prompt[start:]
        return tokens[: self.slot.share_prefix(backend, tokens)]


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """What a draft is opened for: a target, with options. `helpers` are the sources of what drafts
    for the draft; `learnt` is a file of weights that it learnt from answers, and `cache` a folder
    for what can be made again.
    """

    target: LlamaModel
    drafting: DraftOptions
    context: ContextOptions
    clock: Callable[[], float]
    helpers: tuple[DraftSource, ...] = ()
    learnt: Path | None = None
    cache: Path | None = None

    @property
    def why_chains(self) -> str | None:
        if not self.target.has_recurrent_state:
            return None
        return f"{self.target.name} has a recurrent state, which branches cannot share"


@dataclass(frozen=True, slots=True)
class ContextSpec:
    """The room that a draft's contexts need: for `n_slots` texts of `n_ctx` tokens each, with
    `n_rows` rows a round.
    """

    n_ctx: int
    n_slots: int
    n_rows: int
    clock: Callable[[], float]
    options_of: Callable[[Key], ContextOptions]
    target: LlamaBackend | None = None  # its context; None if it decodes elsewhere


class LoadedDraft:
    """A draft that is loaded for a target. `name` is shown, `key` names it in the memory of
    acceptance.
    """

    reads: Reads = "text"
    is_free = False  # it decodes nothing, so that its draft is known before a round is planned
    can_draw = True  # tokens at random, and it tells their distributions
    n_at_once = 1  # the tokens that one decode predicts, if it is measured by that
    origin = "model"  # the name of its tokens in events and statistics
    #: What names the costs of its decodes in a context of its own; None if it has no context.
    timed: Key | None = None
    why_chains: str | None = None  # why its drafts cannot branch; None if they can
    models: tuple[LlamaModel, ...] = ()  # its own, and those of what drafts for it
    own_vocabulary: LlamaModel | None = None  # the model, if its vocabulary is not the target's
    #: The file that can learn from answers; and the weights in use that it learnt.
    learns: Path | None = None
    learnt: Path | None = None

    def __init__(self, name: str, key: Key) -> None:
        self.name = name
        self.key = key

    def n_sequences(self, n_rows: int) -> int:
        """Return the most of llama.cpp's sequences that a text needs in its contexts."""
        return 0

    def contexts(self, room: ContextSpec) -> tuple[LlamaBackend, ...]:
        """Open its contexts. Raise `MemoryLimitError`."""
        return ()

    def drafter(self, request: DraftRequest) -> Drafter:
        raise NotImplementedError

    def keep_text(self, tokens: Sequence[int]) -> None:
        """Store a finished text for later answers, if the options ask for that; nothing by default."""

    def notices(self) -> Iterable[str]:
        return ()

    def close(self) -> None:
        """Free its models. May be called twice."""
        for model in self.models:
            model.close()


@dataclass(frozen=True)
class DraftKind:
    """A way to draft. `matches` says whether a file, or the word after `--draft`, is of this kind;
    a file that cannot be read is not. `suits` says whether its name alone, as the word, drafts for
    a target. `open` loads a source that matches; it raises `ModelFileError`, `PairError`, or
    `UsageError` if the options ask for what it cannot do.
    """

    name: str
    matches: Callable[[DraftSource], bool]
    open: Callable[[DraftSource, DraftSetup], LoadedDraft]
    suits: Callable[[LlamaModel], bool] = lambda _target: False
