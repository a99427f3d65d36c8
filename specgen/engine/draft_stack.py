"""The models that draft for a target: the draft model, the model that drafts for it, and so on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from specgen.backend.llama import LlamaBackend, LlamaModel
from specgen.backend.llama.decoder_heads import is_heads_file
from specgen.calibration.weight_copies import Comparison, Copies
from specgen.engine.agreement import TEXT
from specgen.engine.draft_model import DraftModel
from specgen.engine.heads_draft import HeadsDraft
from specgen.engine.learnt_weights import learnt_weights
from specgen.errors import ModelFileError, UsageError
from specgen.options import ContextOptions, DraftOptions, DraftSource, TreeShape

#: The most tokens that one draft model drafts for another.
LONGEST_GUESS = 8
#: The most nodes that a draft model decodes at once while a tree grows.
_WIDEST = 8
#: Context sizes are rounded up to a multiple of this, as llama.cpp does.
CONTEXT_STEP = 256


class DraftStack:
    """The loaded draft models of a session. They use copies of their weights where these are quicker.

    `context_options` returns the options of a draft model's contexts. A model that drafts for another
    one is opened and closed with it. The first draft model uses learnt weights if the folder `learning`
    has some.
    """

    def __init__(
        self,
        target: LlamaModel,
        helpers: Sequence[DraftSource],
        copies: Copies,
        context: ContextOptions,
        context_options: Callable[[Path], ContextOptions],
        clock: Callable[[], float],
        learning: Path | None = None,
    ) -> None:
        self._target = target
        self._helpers = helpers
        self._copies = copies
        self._context = context
        self._context_options = context_options
        self._clock = clock
        self._learning = learning
        #: The file of learnt weights, if the draft model uses them.
        self.learnt: Path | None = None
        #: What drafts for the target, and its model if it is a draft model.
        self.source: DraftSource = "none"
        self.model: DraftModel | None = None
        #: The decoder heads, if they draft.
        self.heads: HeadsDraft | None = None
        #: The comparisons of draft models with copies of their weights.
        self.compared: list[Comparison] = []

    def change(self, source: DraftSource, drafting: DraftOptions) -> None:
        """Replace the present draft, which is closed and must have no open context. Raises
        `ModelFileError`, `PairError`, or `UsageError` if decoder heads are given a helper; there is then
        no draft."""
        self.close()
        if isinstance(source, Path) and is_heads_file(source):
            if self._helpers:
                raise UsageError(
                    f"{source.name}: decoder heads take no draft of their own; leave out the next --draft"
                )
            self.heads = HeadsDraft(source, self._target, self._context, drafting, self._clock)
        elif isinstance(source, Path):
            self.model = self._open((source, *self._helpers), self._target, drafting)
        self.source = source

    def close(self) -> None:
        """Close the models. May be called twice."""
        if self.model is not None:
            self.model.close()
        if self.heads is not None:
            self.heads.close()
        self.model, self.heads, self.source = None, None, "none"
        self.learnt = None

    @property
    def path(self) -> Path | None:
        """The draft model's file; None if no draft model is loaded."""
        return self.model.model.path if self.model is not None else None

    @property
    def weights(self) -> Path | None:
        """The weights that the draft model would use without learning: its own file, or a copy of it."""
        path = self.path
        return None if path is None else self._copies.of(path, self._context) or path

    @property
    def key(self) -> Path | str:
        """The key of the present draft in the memory: a file, or a word such as "ngram". A model with
        learnt weights is a draft of its own."""
        if self.learnt is not None:
            return self.learnt
        return self.path or (self.heads.heads.path if self.heads is not None else str(self.source))

    @property
    def name(self) -> str:
        if self.heads is not None:
            return self.heads.heads.name
        return self.model.model.name if self.model is not None else str(self.source)

    @property
    def copied(self) -> list[Comparison]:
        """The last comparison of each model whose copy is used."""
        last = {compared.model: compared for compared in self.compared}
        return [compared for compared in last.values() if compared.is_taken]

    @property
    def why_chains(self) -> str | None:
        """Why drafts cannot branch here, whatever their shape; None if they can."""
        target, draft = self._target, self.model
        if target.has_recurrent_state:
            return f"{target.name} has a recurrent state, which branches cannot share"
        if draft is None or draft.branches:
            return None
        if draft.model.has_recurrent_state:
            return f"{draft.model.name} has a recurrent state, which branches cannot share"
        if draft.has_own_vocabulary:
            return f"what {draft.model.name} drafts is translated, a chain at a time"
        return f"{draft.model.name} has a draft of its own, which drafts chains"

    @property
    def why_one_sequence(self) -> str | None:
        """Why one of the models, or the target, cannot decode several sequences at once; None if all can."""
        models = [self._target]
        draft: DraftModel | str | None = self.model
        while isinstance(draft, DraftModel):
            models.append(draft.model)
            draft = draft.helper
        return next((why for model in models if (why := model.why_one_sequence)), None)

    @contextlib.contextmanager
    def contexts(
        self,
        n_ctx: int,
        n_rows: int,
        *,
        n_parts: int = 1,
        first: int = 0,
        n_models: int | None = None,
    ) -> Iterator[tuple[LlamaBackend, ...]]:
        """Open contexts of the draft model, of the model that drafts for it, and so on: `n_models` of
        them from the `first` on, by default all. `n_parts` answers may be made at once, each of `n_ctx`
        tokens with its prompt and up to `n_rows` rows a round. The contexts are closed at the end of the
        `with`. Raises `MemoryLimitError`."""
        models: list[DraftModel] = []
        draft: DraftModel | str | None = self.model
        while isinstance(draft, DraftModel):
            models.append(draft)
            draft = draft.helper
        wanted = models[first:] if n_models is None else models[first : first + n_models]
        with contextlib.ExitStack() as stack:
            found = []
            for draft in wanted:
                context = self._context_of(draft, n_ctx, n_rows, n_parts)
                found.append(context)
                stack.callback(context.close)
            yield tuple(found)

    def _context_of(self, draft: DraftModel, n_ctx: int, n_rows: int, n_parts: int) -> LlamaBackend:
        """Open a context of a draft model, no larger than its training context. If a text does not
        fit, the draft sees the latest part of it."""
        if draft.has_own_vocabulary:  # it may need more tokens for the same text
            n_ctx = -(-n_ctx * 3 // 2 // CONTEXT_STEP) * CONTEXT_STEP
        draft.model.check_parallel(n_parts)
        n_train = draft.model.n_ctx_train
        n_ctx = min(n_ctx, n_train) if n_train > 0 else n_ctx
        n_outputs = 1 if draft.helper is None else 1 + LONGEST_GUESS
        if draft.branches:
            n_outputs = min(n_rows, _WIDEST)
        n_branches = n_rows + 1 if draft.branches else 1
        return LlamaBackend(
            draft.model,
            self._context_options(draft.model.path),
            n_ctx=n_ctx * n_parts,
            clock=self._clock,
            n_sequences=n_branches * n_parts,
            n_outputs=n_outputs * n_parts,
            n_rollback=n_outputs - 1,
            n_branches=n_branches,
        )

    def _open(
        self, sources: Sequence[DraftSource], target: LlamaModel, drafting: DraftOptions
    ) -> DraftModel:
        """Open the first of the sources, which drafts for `target`, and the others as its helpers."""
        if len(sources) > 1 or target is not self._target:  # in a stack, models draft only chains
            drafting = replace(drafting, tree=TreeShape("off"))
        path = Path(sources[0])
        draft = self._load_learnt(path, drafting) if target is self._target else None
        if draft is None:
            draft = self._load_compared(path, target, drafting)
        with contextlib.ExitStack() as on_error:
            on_error.callback(draft.close)
            if len(sources) > 1:
                is_model = isinstance(sources[1], Path)
                rest = sources[1:]
                draft.helper = self._open(rest, draft.model, drafting) if is_model else "ngram"
            on_error.pop_all()
        return draft

    def _load_learnt(self, path: Path, drafting: DraftOptions) -> DraftModel | None:
        """Load a draft model with its learnt weights; None if there are none that work."""
        learnt = learnt_weights(self._learning, path)
        if learnt is None:
            return None
        try:
            draft = DraftModel(path, self._target, self._context, drafting, learnt)
        except ModelFileError:
            return None
        self.learnt = learnt
        return draft

    def _load_compared(self, path: Path, target: LlamaModel, drafting: DraftOptions) -> DraftModel:
        """Load a draft model, from a copy of its weights if measuring shows that the copy is better."""
        draft = self._load(path, target, drafting)
        with contextlib.ExitStack() as on_error:
            on_error.callback(draft.close)
            compared = self._copies.compare(draft.model, self._context_options(path), TEXT)
            if compared is not None:
                self.compared.append(compared)
            if compared is not None and compared.is_taken:
                draft.close()
                draft = self._load(path, target, drafting)
            on_error.pop_all()
        return draft

    def _load(self, path: Path, target: LlamaModel, drafting: DraftOptions) -> DraftModel:
        """Load a draft model from its copy, or from its own file if there is no copy that works."""
        copy = self._copies.of(path, self._context)
        try:
            return DraftModel(path, target, self._context, drafting, copy)
        except ModelFileError:
            if copy is None:
                raise
            self._copies.discard(path)
            return DraftModel(path, target, self._context, drafting)
