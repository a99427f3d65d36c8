"""The interface of a kind of draft: everything that the rest of specgen knows about it.

A kind consists of three objects, from the longest-lived to the shortest-lived:

1. `DraftKind`, the `KIND` of a module. It recognizes the value of `--draft` and opens it.
2. `LoadedDraft`, a draft that is loaded for a target. It opens contexts (KV caches).
3. `Drafter`, made by the loaded draft for each answer. It proposes drafts, round by round.

`specgen.drafters.kinds` lists the kinds. A kind in another package needs to import only this
module.
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
    TypeAlias,
)

import numpy as np

from specgen.drafters.ngram_counts import NgramCounts
from specgen.drafters.shared_phrases import SharedPhrases
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
    from specgen.method.acceptance import AcceptanceCounts
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
    "RoundPlan",
    "RoundResult",
    "ScorableText",
    "TreeShape",
    "ready",
]

#: Identifies a draft among stored measurements: its file, or a word.
Key: TypeAlias = Path | str


@dataclass(slots=True, eq=False)
class CacheSlot:
    """The place of one text: an equal share of the sequences and cells of each cache."""

    #: The index of this share, from 0.
    number: int = 0
    #: The total number of shares.
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
        n_redecoded: int = 0,
    ) -> int:
        """Let this slot hold the longest prefix of `tokens` that any slot of a cache holds.

        Nothing is copied: slots can share cells. Whatever else this slot holds is dropped. A cache
        that cannot drop cells (a recurrent state) can only reuse a prefix in the slot itself.

        Args:
            backend: The cache.
            tokens: The text that the slot is to hold. Its last token is never reused, since its
                logits are needed.
            n_redecoded: The number of tokens at the end of the prefix that are not reused, because
                a drafter needs their hidden states. Ignored if the cache cannot drop cells.

        Returns:
            The number of tokens that the slot now holds.
        """
        own = self.branches(backend)
        # The first sequence has the text; empty the others, which had the branches of a tree.
        for branch in range(own.first + 1, own.first + own.n_branches):
            if backend.length(branch):
                backend.remove(branch)
        try:
            if backend.rollback == "cells":
                return self._share_cells(backend, tokens[:-1], n_redecoded)
            return self._go_back(backend, tokens[:-1])
        except RollbackError:  # the cells that a sliding window needs are gone
            backend.remove(own.first)
            return 0

    def _share_cells(
        self,
        backend: Backend,
        tokens: Sequence[int],
        n_redecoded: int,
    ) -> int:
        """Share the cells of the slot that holds the longest prefix; return the prefix's length."""
        own = self.branches(backend).first
        slots = [CacheSlot(number, self.n) for number in range(self.n)]
        firsts = [slot.branches(backend).first for slot in slots]
        n_held = {first: common_prefix_length(backend.text(first), tokens) for first in firsts}
        lender = max(firsts, key=n_held.__getitem__)
        if n_held[lender] == n_held[own]:
            lender = own  # then nothing has to be shared
        n_shared = max(0, n_held[lender] - n_redecoded)
        n_kept = min(n_held[own], n_shared)
        if backend.length(own) > n_kept:
            backend.remove(own, n_kept)
        if lender != own:
            backend.copy(lender, own, n_kept, n_shared)
        return n_shared

    def _go_back(self, backend: Backend, tokens: Sequence[int]) -> int:
        """Go back to the longest prefix for which this slot has a saved state; return its length.

        Such a cache cannot drop cells: to go back to any other place, it would have to decode the
        whole text again.
        """
        own = self.branches(backend).first
        n_kept = common_prefix_length(backend.text(own), tokens)
        if n_kept < backend.length(own):
            n_kept = backend.n_restorable(own, n_kept)
        if backend.length(own) > n_kept:
            backend.remove(own, n_kept)
        return n_kept


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Everything that a drafter needs to know about the answer to draft for."""

    #: The text of the answer.
    text: TextState
    #: Turns logits into the distributions of drafted tokens.
    sampling: SamplingPipeline
    #: The random generator for drafts. The target has a separate one.
    rng: np.random.Generator
    #: The tokens before the answer. The draft's caches may hold some of them already.
    prompt: Sequence[int] = ()
    #: The draft's contexts: its own, then those of its second draft.
    caches: Sequence[Backend] = ()
    #: The place of the text in these contexts, and in the target's.
    slot: CacheSlot = field(default_factory=CacheSlot)
    #: The costs of the draft's decodes. Each decode refines them.
    costs: CostTable = field(default_factory=CostTable)
    #: Returns the costs of another draft's decodes.
    costs_of: Callable[[Key], CostTable] = lambda _key: CostTable()
    #: Returns how often a draft model (the first key) accepted the guesses of a second draft (the
    #: second key), by their origin.
    acceptance_of_guesses: Callable[[Key, Key], MutableMapping[str, AcceptanceCounts]] = (
        lambda _model, _second_draft: {}
    )
    #: How often n-grams predicted the target's tokens, in all texts.
    ngram_counts: NgramCounts = field(default_factory=NgramCounts)
    #: Phrases for n-grams to search: common ones, and those of earlier answers if drafts may depend
    #: on them; None for none.
    phrases: SharedPhrases | None = None
    #: Whether drafted tokens are sampled from their distributions, or are the likeliest ones.
    is_sampled: bool = False
    #: Whether the draft may be a tree.
    can_branch: bool = False
    #: The shape of the tree.
    shape: TreeShape = AUTO_TREE
    #: The maximum number of tokens of a draft.
    n_max: int = 16
    #: The maximum number of levels of a tree; None if only the number of tokens limits it.
    n_levels_max: int | None = None
    #: The positions of tokens that a draft model may skip: turns that the chat template adds before
    #: every prompt.
    skipped_prefix: range = range(0)
    #: The prompt for a draft with another vocabulary, in its own tokens and template. If it is
    #: None, such a draft translates the target's prompt.
    draft_prompt: Sequence[int] | None = None
    #: Whether tokens that end a text are never chosen.
    is_endless: bool = False

    def reuse_prefix(self, backend: Backend, start: int = 0) -> int:
        """Let the slot hold the longest known prefix of `prompt[start:]`; drop everything else.

        Args:
            backend: One of the draft's caches.
            start: The number of the prompt's first tokens that the cache leaves out.

        Returns:
            The number of tokens that the slot now holds.
        """
        return self.slot.share_prefix(backend, self.prompt[start:])


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """The arguments with which a draft is opened: its target, and options."""

    #: The target that it drafts for.
    target: LlamaModel
    #: How much is drafted, and how.
    drafting: DraftOptions
    #: The options of the draft's contexts.
    context: ContextOptions
    #: Returns the current time in seconds.
    clock: Callable[[], float]
    #: What drafts for the draft model (its "second draft"), what drafts for that one, and so on.
    further_drafts: tuple[DraftSource, ...] = ()
    #: A file of weights that the draft learnt from answers; None for its original weights.
    learnt: Path | None = None
    #: The folder for files that can be made again; None if nothing is stored.
    cache: Path | None = None

    @property
    def why_chains(self) -> str | None:
        """Why drafts for this target can only be chains; None if they can branch."""
        if not self.target.has_recurrent_state:
            return None
        return f"{self.target.name} has a recurrent state, which branches cannot share"


@dataclass(frozen=True, slots=True)
class ScorableText:
    """An answer as a model reads it, to compute the probabilities of its tokens."""

    #: The model.
    model: LlamaModel
    #: For each token of the answer, the text before it in the model's tokens: how many tokens of
    #: the step before stay, and the tokens that follow them.
    steps: Sequence[tuple[int, Sequence[int]]]

    @classmethod
    def of(
        cls,
        model: LlamaModel,
        prompt: Sequence[int],
        answer: Sequence[int],
    ) -> ScorableText:
        """Return an answer in the model's own tokens, one more at each step."""
        steps: list[tuple[int, Sequence[int]]] = [(0, prompt)]
        for number, token in enumerate(answer[:-1]):
            steps.append((len(prompt) + number, (token,)))
        return cls(model, steps)


@dataclass(frozen=True, slots=True)
class ContextSpec:
    """The size of a draft's contexts."""

    #: The maximum number of tokens of each text.
    n_ctx: int
    #: The number of texts.
    n_slots: int
    #: The maximum number of the target's rows per text in a round.
    n_rows: int
    #: Returns the current time in seconds.
    clock: Callable[[], float]
    #: Returns the options for the context of a draft.
    options_of: Callable[[Key], ContextOptions]
    #: The target's context; None if it decodes elsewhere.
    target: LlamaBackend | None = None


class LoadedDraft:
    """A draft that is loaded for a target.

    Args:
        name: The name that messages show.
        key: Identifies its acceptance counts.
    """

    #: Whether it reads the target's hidden states of all rows, even of the prompt
    #: (`HiddenStateSink.reads_all_rows`).
    reads_all_rows = False
    #: Whether it reads the target's KV cache.
    reads_target_cache = False
    #: Whether it needs no decodes, so that its draft is known before a round is planned.
    is_free = False
    #: Whether it can sample tokens at random and return their distributions.
    can_sample = True
    #: The number of tokens that one decode predicts. They share its cost.
    n_at_once = 1
    #: The name of its tokens in events and statistics.
    origin = "model"
    #: Identifies the costs of its decodes; None if it has no context of its own.
    cost_key: Key | None = None
    #: Why its drafts can only be chains; None if they can branch.
    why_chains: str | None = None
    #: Its own models, and those of its second draft.
    models: tuple[LlamaModel, ...] = ()
    #: Its model, if the vocabulary is not the target's.
    own_vocabulary: LlamaModel | None = None
    #: The file whose weights can learn from answers; None if it cannot learn.
    learns: Path | None = None
    #: The file of learnt weights in use; None if it uses its original ones.
    learnt: Path | None = None

    def __init__(self, name: str, key: Key) -> None:
        self.name = name
        self.key = key

    def n_sequences(self, n_rows: int) -> int:
        """Return the maximum number of llama.cpp's sequences per text in its contexts.

        Args:
            n_rows: The maximum number of the target's rows per text in a round.
        """
        return 0

    def contexts(self, spec: ContextSpec) -> tuple[LlamaBackend, ...]:
        """Open its contexts, which the caller closes. Drafters get them as `DraftRequest.caches`.

        Raises:
            MemoryLimitError: If they do not fit into memory.
        """
        return ()

    def drafter(self, request: DraftRequest) -> Drafter:
        """Return a drafter for one answer."""
        raise NotImplementedError

    def scorable_text(
        self,
        prompt: Sequence[int],
        draft_prompt: Sequence[int] | None,
        answer: Sequence[int],
    ) -> ScorableText | None:
        """Return an answer as its model reads it, to compute its probabilities afterwards.

        Args:
            prompt: The target's tokens of the prompt.
            draft_prompt: `Prompt.draft_tokens`.
            answer: The target's tokens of the answer.

        Returns:
            None if it has no model, or if the probabilities depend on more than the text.
        """
        return None

    def keep_text(self, tokens: Sequence[int]) -> None:
        """Store the tokens of a finished text for later answers, if the options ask for that."""

    def notices(self) -> Iterable[str]:
        """Return notices to show before the first answer."""
        return ()

    def close(self) -> None:
        """Free its models. It may be called more than once."""
        for model in self.models:
            model.close()


@dataclass(frozen=True)
class DraftKind:
    """A way to draft."""

    #: The name of the kind.
    name: str
    #: Returns whether a file, or the word after `--draft`, is of this kind. For a file that cannot
    #: be read, it returns False.
    matches: Callable[[DraftSource], bool]
    #: Loads a source that matches. Raises `ModelFileError` if the file cannot be used, `PairError`
    #: if it does not fit the target, and `UsageError` if it cannot do what the options ask for.
    open: Callable[[DraftSource, DraftSetup], LoadedDraft]
    #: Returns whether the name of the kind, as the word after `--draft`, can draft for a target.
    suits: Callable[[LlamaModel], bool] = lambda _target: False
