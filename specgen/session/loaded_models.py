"""The loaded models: a target and what drafts for it, with their contexts and the costs of their decodes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

from specgen.drafters.lookup.array import SuffixArray
from specgen.drafters.lookup.corpus import load_corpus
from specgen.drafters.lookup.store import EarlierTexts
from specgen.errors import PromptError, SpecgenError
from specgen.llama import LlamaBackend, LlamaModel, default_threads
from specgen.llama.context_opening import n_native_sequences
from specgen.llama.decoder_heads import is_heads_file
from specgen.llama.dflash import DflashContext, DflashModel
from specgen.llama.draft_kind import draft_kind
from specgen.llama.eagle import EagleContext
from specgen.llama.file_check import check_file
from specgen.llama.gemma4_assistant import AssistantContext, AssistantModel
from specgen.llama.library import has_gpu
from specgen.llama.mtp import MtpContext
from specgen.llama.weights import load_ahead
from specgen.method.cost_table import CostTable
from specgen.options import ContextOptions, DraftOptions, DraftSource, SessionOptions
from specgen.session.calibration.memory import Memory, with_threads
from specgen.session.draft_models import DraftModel, DraftModels
from specgen.session.kept_answers import Learnt, read_learnt
from specgen.session.prompts import Prompts
from specgen.session.request import RequestSettings

#: What has a context to draft in: a draft model's file, or the target's MTP layers.
Drafting: TypeAlias = Path | Literal["mtp"]
#: llama.cpp's limit for the sequences of a context.
MAX_SEQUENCES = 256
#: The most tokens that one draft model drafts for another.
LONGEST_GUESS = 8
#: Smaller drafts are loaded in a moment.
LEAST_AHEAD = 32 << 20
#: The most nodes that a draft model decodes at once while a tree grows.
_WIDEST = 8
#: Context sizes are rounded up to a multiple of this, as llama.cpp does.
CONTEXT_STEP = 256
#: Tokens of room where no size is given: for an answer of unlimited length, or for a prompt with its answer.
_ROOM = 4096


def usual_n_ctx(wanted: int | None, n_train: int) -> int:
    """Return the default size, in tokens, of a context for a prompt and its answer: the options' size (0: the
    target's training context), or else 4096, or the training context if that is less."""
    if wanted is not None:
        return wanted or n_train or _ROOM
    return min(_ROOM, n_train) if n_train > 0 else _ROOM


class ModelCosts:
    """The cost tables of a target and its draft models in `memory`, for contexts with these options. A
    draft model is named by its file, the target's MTP layers by "mtp"; None stands for the target."""

    def __init__(self, options: SessionOptions, memory: Memory) -> None:
        self._options = options
        self._memory = memory
        #: Whether other programs took much of the machine when costs were measured.
        self.was_busy = False

    def context_options(self, draft: Drafting | None = None) -> ContextOptions:
        """Return the options of contexts of the target, or of a draft model. If the user named no number of
        threads, it is the fastest one that was measured."""
        if not isinstance(draft, Path):
            model, context = self._options.target, self._options.target_context
        else:
            model, context = draft, self._options.draft_context
        return with_threads(context, self._memory.threads(model, context))

    def table(self, draft: Drafting | None = None, n_past: int = 0) -> CostTable:
        """Return the cost table of the target, or of a draft model, in contexts that hold about `n_past`
        tokens."""
        context, model = self.context_options(draft), self._file(draft)
        return self._memory.costs(model, context, n_past, default_threads())

    def forget(self, draft: Drafting | None = None) -> None:
        """Forget the costs of the target, or of a draft model, so that they are measured again. No answer
        may be in progress."""
        context, model = self.context_options(draft), self._file(draft)
        self._memory.forget_costs(model, context, default_threads())

    def keep_briefly(self, draft: Drafting | None) -> None:
        """Keep the present costs of the target and a draft model for the next few runs only."""
        for model in (None,) if draft is None else (None, draft):
            context, file = self.context_options(model), self._file(model)
            self._memory.keep_briefly(file, context, default_threads())

    def _file(self, draft: Drafting | None) -> Path:
        """Return the file whose name stands for the costs."""
        target = self._options.target
        return target.with_name(f"{target.name}:mtp") if draft == "mtp" else draft or target


class Models:
    """A target and the models that draft for it, loaded once. Use it as a context manager.

    Opening it raises `ModelFileError`, `MemoryLimitError` or `PairError`. The weights stay loaded until it
    is closed, and until the last context that uses them is. `memory` has the measurements of these models
    on this machine, and is updated; the caller saves it. `draft_ahead` is a draft that is likely to be opened: its weights are loaded while those
    of the target are. With `vocabulary_only` the target decodes elsewhere: only the models that draft for
    it have contexts (`draft_contexts`).
    """

    def __init__(
        self,
        options: SessionOptions,
        clock: Callable[[], float],
        memory: Memory | None = None,
        *,
        draft_ahead: DraftSource = "none",
        vocabulary_only: bool = False,
    ) -> None:
        self.options = options
        self.clock = clock
        #: What was learnt about the models.
        self.memory = memory if memory is not None else Memory()
        #: The costs of the models' decodes, and the options of their contexts.
        self.costs = ModelCosts(options, self.memory)
        self._resources = contextlib.ExitStack()
        #: Ends the use of weights that were loaded ahead.
        self._ahead = self._resources.enter_context(contextlib.ExitStack())
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            if isinstance(draft_ahead, Path):
                self._load_ahead(draft_ahead)
            self.target = LlamaModel(
                options.target,
                n_gpu_layers=options.target_context.n_gpu_layers,
                vocabulary_only=vocabulary_only,
                workers=options.target_context.workers,
                mtp=True,
            )
            self._resources.callback(self.target.close)
            #: The settings of a request that has none of its own.
            self.settings = RequestSettings.of(
                self.target, options.sampler, options.generation, options.drafting
            )
            #: What drafts for the target.
            self.drafts = DraftModels(
                self.target,
                options.helpers,
                options.draft_context,
                clock,
                options.learning,
            )
            self._resources.callback(self.drafts.close)
            self.change_draft(options.draft)
            self._load_lookups()
            on_error.pop_all()

    def __enter__(self) -> Models:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the models. May be called twice.

        Their weights are freed with the last context that uses them. The context of an unfinished answer
        is freed together with its iterator, which raises `BackendError` if it is continued."""
        self._resources.close()

    @property
    def prompts(self) -> Prompts:
        """Makes the prompts of the target and of its present draft."""
        return Prompts(self.target, self.drafts.own_vocabulary)

    def _load_ahead(self, draft: Path) -> None:
        """Begin to load the weights of a draft model; not where that may take memory from the target, or the
        draft is a small file, or is none that has weights of its own. Errors are those of opening it."""
        context = self.options.draft_context
        with contextlib.suppress(SpecgenError, OSError):
            is_small = draft.stat().st_size < LEAST_AHEAD
            if is_small or has_gpu() or self.options.learning is not None:
                return
            if not is_heads_file(draft) and draft_kind(draft) is None:
                check_file(draft)
                self._ahead.callback(load_ahead(draft, context.n_gpu_layers))

    # --- what drafts -------------------------------------------------------------------------

    def change_draft(self, source: DraftSource) -> None:
        """Replace the present draft, which is closed and must have no open context. With the same source,
        it is loaded again, with the weights that it learnt last. Raise `ModelFileError`, `PairError` or
        `MemoryLimitError`; there is then no draft."""
        self.drafts.change(source, self.options.drafting)
        if source != "none":
            self._ahead.close()

    def change_drafting(self, drafting: DraftOptions) -> None:
        """Draft with other options from now on. The draft is loaded again; it must have no open context.
        Raise `ModelFileError` or `PairError`; there is then no draft."""
        if drafting != self.options.drafting:
            self._set_drafting(drafting)
            self.change_draft(self.drafts.source)

    def let_ngrams_draft(self, wanted: bool | None) -> None:
        """Set whether n-grams draft beside a draft model. None: they do if the policy decides by costs."""
        self._set_drafting(replace(self.options.drafting, ngrams=wanted))

    def _set_drafting(self, drafting: DraftOptions) -> None:
        self.options = replace(self.options, drafting=drafting)
        self.settings = replace(self.settings, drafting=drafting)

    def _load_lookups(self) -> None:
        """Load the texts in which n-grams are looked up, besides the answer's own text: files, and earlier
        answers. Their search structures are kept in the folder of the options. Raise `UsageError` if a file
        cannot be read."""
        drafting, cache = self.options.drafting, self.options.cache
        self._earlier: EarlierTexts | None = None
        corpora: list[SuffixArray] = []
        if drafting.lookup_files or drafting.lookup_store:
            vocabulary = self.target.vocabulary
            kind = vocabulary.digest()
            if drafting.lookup_files:
                folder = cache / "lookup" if cache is not None else None
                corpora.append(load_corpus(drafting.lookup_files, vocabulary, kind, folder))
            if drafting.lookup_store and cache is not None:
                self._earlier = EarlierTexts(cache / "texts", kind)
                corpora += self._earlier.arrays()
        #: The texts in which n-grams are looked up.
        self.corpora = tuple(corpora)

    def keep_text(self, tokens: Sequence[int]) -> None:
        """Store a finished text for lookups of later answers, if the options ask for that."""
        if self._earlier is not None:
            self._earlier.add(tokens)

    # --- contexts -----------------------------------------------------------------------------

    @property
    def n_rows_max(self) -> int:
        """The most rows of an answer in a round's batch: those of the draft, and of the token before it."""
        return 1 + self.options.drafting.n_max

    @property
    def n_branches_max(self) -> int:
        """The most branches of a draft: 1 if drafts are chains."""
        draft, drafting = self.drafts.main, self.options.drafting
        is_chain = self.target.has_recurrent_state or self.drafts.source == "none"
        if is_chain or not drafting.grows_trees:
            return 1
        if draft is not None and not (draft.branches or drafting.adds_ngrams):
            return 1
        return max(1, drafting.n_max)

    @property
    def n_sequences_max(self) -> int:
        """The most of llama.cpp's sequences that one answer needs in a context."""
        draft = self.drafts.main
        n_target = n_native_sequences(self.target, self.n_branches_max)
        if self.drafts.from_states is not None:
            return max(n_target, self._n_states_branches + (1 if self.target.n_window else 0))
        if draft is None:
            return n_target
        n_branches = self.n_rows_max + 1 if draft.decodes_branches else 1
        return max(n_target, n_native_sequences(draft.model, n_branches))

    @property
    def usual_n_ctx(self) -> int:
        """The default size, in tokens, of a context for a prompt and its answer: see `usual_n_ctx`."""
        return usual_n_ctx(self.options.target_context.n_ctx, self.target.n_ctx_train)

    def context_size(self, n_prompt: int, max_tokens: int | None = None) -> int:
        """Return the size of the target's context, in tokens, for an answer of `max_tokens` (None: those of
        the options). Raise `PromptError` if the prompt does not fit."""
        n_train = self.target.n_ctx_train
        if self.options.target_context.n_ctx is None:
            n_answer = max_tokens if max_tokens is not None else self.options.generation.max_tokens
            n_ctx = n_prompt + (n_answer if n_answer >= 0 else _ROOM) + self.options.drafting.n_max
            n_ctx = -(-n_ctx // CONTEXT_STEP) * CONTEXT_STEP
            n_ctx = min(n_ctx, n_train) if n_train > 0 else n_ctx
            hint = f"{self.target.name} was trained with a context of {n_train}"
        else:
            n_ctx = self.usual_n_ctx
            hint = f"take --ctx-size {n_prompt + 1} or more, or a shorter prompt"
        if n_prompt > n_ctx:
            raise PromptError(
                f"the prompt has {n_prompt} tokens, but the context has {n_ctx}", hint
            )
        return n_ctx

    @contextlib.contextmanager
    def contexts(
        self, n_ctx: int, *, drafts: bool = True, n_slots: int = 1
    ) -> Iterator[tuple[LlamaBackend, LlamaBackend | None]]:
        """Open contexts of the target and, with `drafts`, of the draft model if there is one. `n_slots`
        answers may be generated in them at once, each of `n_ctx` tokens with its prompt. The contexts are
        closed only at the end of the `with`. Raise `MemoryLimitError`."""
        self.target.check_parallel(n_slots)
        with contextlib.ExitStack() as stack:
            target = LlamaBackend(
                self.target,
                self.costs.context_options(),
                n_ctx=n_ctx * n_slots,
                clock=self.clock,
                n_sequences=self.n_branches_max * n_slots,
                n_outputs=self.n_rows_max * n_slots,
                n_rollback=self.n_rows_max - 1,
                n_branches=self.n_branches_max,
            )
            stack.callback(target.close)
            draft: LlamaBackend | None = None
            if drafts and self.drafts.main is not None:
                draft = self._draft_context(self.drafts.main, n_ctx, n_slots)
            elif drafts and self.drafts.from_states is not None:
                draft = self._states_context(target, n_ctx, n_slots)
            if draft is not None:
                stack.callback(draft.close)
            yield target, draft

    @contextlib.contextmanager
    def draft_contexts(
        self,
        n_ctx: int,
        *,
        target: LlamaBackend | None = None,
        n_slots: int = 1,
        helpers_only: bool = False,
    ) -> Iterator[tuple[LlamaBackend, ...]]:
        """Open contexts of the draft model (unless `helpers_only`), of the model that drafts for it, and so
        on, for a context of the target of the same size. What drafts from the target's hidden states needs
        that context, `target`, and is closed before it. Raise `MemoryLimitError`."""
        with contextlib.ExitStack() as stack:
            found: list[LlamaBackend] = []
            if self.drafts.from_states is not None and target is not None:
                found.append(self._states_context(target, n_ctx, n_slots))
                stack.callback(found[-1].close)
            for draft in list(self.drafts.stack())[int(helpers_only) :]:
                found.append(self._draft_context(draft, n_ctx, n_slots))
                stack.callback(found[-1].close)
            yield tuple(found)

    def _draft_context(self, draft: DraftModel, n_ctx: int, n_slots: int) -> LlamaBackend:
        """Open a context of a draft model, no larger than its training context. If a text does not
        fit, the draft sees its last tokens."""
        if draft.translation is not None:  # it may need more tokens for the same text
            n_ctx = -(-n_ctx * 3 // 2 // CONTEXT_STEP) * CONTEXT_STEP
        draft.model.check_parallel(n_slots)
        n_train = draft.model.n_ctx_train
        n_ctx = min(n_ctx, n_train) if n_train > 0 else n_ctx
        n_outputs = 1 if draft.helper is None else 1 + LONGEST_GUESS
        n_branches = 1
        if draft.mask is not None:
            n_outputs = max(1, self.options.drafting.n_max)
        elif draft.branches:
            n_outputs, n_branches = min(self.n_rows_max, _WIDEST), self.n_rows_max + 1
        context = LlamaBackend(
            draft.model,
            self.costs.context_options(draft.model.path),
            n_ctx=n_ctx * n_slots,
            clock=self.clock,
            n_sequences=n_branches * n_slots,
            n_outputs=n_outputs * n_slots,
            n_rollback=n_outputs - 1,
            n_branches=n_branches,
        )
        context.compute_frequent_tokens()
        return context

    @property
    def _n_states_branches(self) -> int:
        """The most branches of a text in a context of what drafts from the target's hidden states."""
        draft = self.drafts.from_states
        return self.n_rows_max + 1 if draft is not None and draft.branches else 1

    def _states_context(
        self, target: LlamaBackend, n_ctx: int, n_slots: int
    ) -> MtpContext | EagleContext | DflashContext | AssistantContext:
        """Open a context of what drafts from the target's hidden states, with room for the nodes of a
        growing tree."""
        n_branches, eagle = self._n_states_branches, self.drafts.eagle
        n_outputs = min(n_branches, _WIDEST)
        if eagle is not None and isinstance(eagle.model, AssistantModel):
            return AssistantContext(
                eagle.model,
                target,
                self.costs.context_options(eagle.model.path),
                clock=self.clock,
                n_shared_tokens=eagle.n_shared_tokens,
                n_slots=n_slots,
            )
        if eagle is not None and isinstance(eagle.model, DflashModel):
            return DflashContext(
                eagle.model,
                target,
                self.costs.context_options(eagle.model.path),
                n_ctx=n_ctx + CONTEXT_STEP,
                clock=self.clock,
                n_shared_tokens=eagle.n_shared_tokens,
                n_slots=n_slots,
            )
        if eagle is not None:
            return EagleContext(
                eagle.model,
                target,
                self.costs.context_options(eagle.model.path),
                n_ctx=n_ctx + CONTEXT_STEP,
                clock=self.clock,
                n_shared_tokens=eagle.n_shared_tokens,
                n_branches=n_branches,
                n_outputs=n_outputs,
                n_slots=n_slots,
            )
        layers = self.drafts.mtp
        assert layers is not None
        return MtpContext(
            layers.model,
            self.costs.context_options("mtp" if layers.is_target else layers.model.path),
            n_ctx=n_ctx + CONTEXT_STEP,
            clock=self.clock,
            n_branches=n_branches,
            n_outputs=n_outputs,
            n_slots=n_slots,
        )

    # --- what the user is told ----------------------------------------------------------------

    def notices(self, n_ctx: int) -> Iterator[str]:
        """Yield a message for each of these: learnt weights, a parallel draft
        without a mask token, a tree shape that cannot be drafted, and contexts of `n_ctx` tokens that are too long."""
        drafts = self.drafts
        if drafts.learnt is not None and drafts.path is not None:
            folder = self.options.learning
            learnt = read_learnt(folder, drafts.path) if folder is not None else Learnt()
            yield (
                f"{drafts.path.name} drafts with what it learnt from {learnt.n_answers} answers: on other "
                f"answers it agrees with the target on {learnt.agreement_after:.1%} of the tokens, before "
                f"on {learnt.agreement_before:.1%}"
            )
        if drafts.main is not None and drafts.main.lacks_mask:
            yield (
                f"{drafts.main.model.name} is a parallel draft, but its file does not say which its mask token "
                "is, so it drafts one token after the other: give --draft-mask (`pard_token` in the config.json "
                "of the model that it was converted from)"
            )
        shape = self.options.drafting.tree
        if shape.is_fixed and drafts.source != "none" and (why := drafts.why_chains):
            yield f"--tree {shape}: {why}: drafting chains of {shape.n_levels} tokens"
        if 0 < self.target.n_ctx_train < n_ctx:
            yield (
                f"{self.target.name} was trained with {self.target.n_ctx_train} tokens of context, but the "
                f"context has {n_ctx}: expect poor text"
            )
