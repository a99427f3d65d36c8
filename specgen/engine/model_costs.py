"""The measured costs of a session's models, by the options of their contexts."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import TypeAlias

from specgen.backend.base import Vocabulary
from specgen.backend.llama import default_threads
from specgen.calibration.acceptance import Chances
from specgen.calibration.cost_table import CostTable
from specgen.calibration.memory import Memory
from specgen.calibration.threads import with_threads
from specgen.calibration.weight_copies import Copies
from specgen.drafters import Drafter, SuffixDrafter
from specgen.engine.draft_stack import LONGEST_GUESS
from specgen.options import ContextOptions, DraftOptions
from specgen.policy import CostAwarePolicy, Policy

#: Returns acceptance statistics by origin, given a target's file, a draft (a file or a word such as
#: "ngram") and a mode (`Memory.chances`).
ChancesOf: TypeAlias = Callable[[Path, Path | str, str], MutableMapping[str, Chances]]


class ModelCosts:
    """The cost tables of a target and its draft models in `memory`, for contexts with these options. A
    draft model is named by its file; None stands for the target."""

    def __init__(
        self,
        target: Path,
        target_context: ContextOptions,
        draft_context: ContextOptions,
        memory: Memory,
        copies: Copies,
    ) -> None:
        self._target = target
        self._target_context = target_context
        self._draft_context = draft_context
        self._memory = memory
        self._copies = copies

    def context_options(self, draft: Path | None = None) -> ContextOptions:
        """Return the options of contexts of the target, or of a draft model. If the user named no number of
        threads, it is the fastest one that was measured."""
        if draft is None:
            context = self._target_context
            return with_threads(context, self._memory.threads(self._target, context))
        context = self._copies.context_of(draft, self._draft_context)
        return with_threads(context, self._memory.threads(draft, context))

    def table(self, draft: Path | None = None, n_past: int = 0) -> CostTable:
        """Return the cost table of the target, or of a draft model, in contexts that hold about `n_past`
        tokens."""
        context = self.context_options(draft)
        return self._memory.costs(draft or self._target, context, n_past, default_threads())

    def forget(self, draft: Path | None = None) -> None:
        """Forget the costs of the target, or of a draft model, so that they are measured anew. No answer
        may be in progress."""
        context = self.context_options(draft)
        self._memory.forget_costs(draft or self._target, context, default_threads())

    def forget_weights(self, draft: Path) -> None:
        """Forget whether a copy of a draft model is quicker. They are compared again when a session next
        loads the model."""
        self._copies.forget(draft, self._draft_context)

    def do_not_keep(self, draft: Path | None) -> None:
        """Do not keep the present costs of the target and a draft model: they are measured anew the next
        time."""
        for model in (None,) if draft is None else (None, draft):
            context = self.context_options(model)
            self._memory.keep_no_costs(model or self._target, context, default_threads())

    def known(self, n_past: int, chances: ChancesOf) -> KnownOfAnswer:
        """Return what is known for one answer after `n_past` tokens; `chances` returns the acceptance
        statistics."""
        return KnownOfAnswer(self.table, chances, n_past)


class KnownOfAnswer:
    """What is known of draft models for one answer after `n_past` tokens: `Known` of
    `specgen.engine.draft_model`."""

    def __init__(
        self, table: Callable[[Path, int], CostTable], chances: ChancesOf, n_past: int
    ) -> None:
        self._table = table
        self._chances = chances
        self._n_past = n_past

    def costs(self, model: Path) -> CostTable:
        return self._table(model, self._n_past)

    def policy(self, model: Path, draft: Path | str) -> Policy:
        options = DraftOptions(max_tokens=LONGEST_GUESS)
        chances = self._chances(model, draft, "guesses")
        return CostAwarePolicy(options, self.costs(model), chances)

    def ngrams(self, vocabulary: Vocabulary) -> Drafter:
        shortest, longest = DraftOptions().ngrams_of
        return SuffixDrafter(shortest, longest)
