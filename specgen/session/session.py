"""The loaded models: a target and what drafts for it, with their contexts and costs."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path

from specgen.drafters.interface import ContextSpec, DraftSetup, LoadedDraft
from specgen.drafters.kinds import ANY_FILE, find_kind, open_draft, refuse_draft
from specgen.errors import PairError, PromptError, SpecgenError
from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.cuda_graphs import GraphCostTable, replays_graphs
from specgen.llama.file_check import check_file
from specgen.llama.gguf_file import GgufMetadata
from specgen.llama.library import has_gpu
from specgen.llama.native_context import n_native_sequences
from specgen.llama.weights import load_ahead
from specgen.options import DraftOptions, DraftSource, SamplerOptions, SessionOptions
from specgen.session.kept_answers import Learnt, learnt_weights, read_learnt
from specgen.session.measurement_store import MeasurementStore, SessionCosts
from specgen.session.prompts import Prompts
from specgen.session.request import RequestSettings

#: llama.cpp's limit for a context.
MAX_SEQUENCES = 256
#: Smaller drafts are loaded in a moment, so not ahead.
LEAST_AHEAD_BYTES = 32 << 20
#: llama.cpp rounds the sizes of contexts up to a multiple of it.
CONTEXT_STEP = 256
#: Tokens for a prompt and its answer, where no size is given.
_USUAL_N_CTX = 4096
#: How many tokens of two vocabularies are compared: the first ones tell them apart.
_N_COMPARED = 1024


def usual_n_ctx(wanted: int | None, n_train: int) -> int:
    """Return the size of a context.

    Args:
        wanted: The size that the user gave; 0 is the size that the model was trained with.
        n_train: The size that the model was trained with; 0 if that is not known.
    """
    if wanted is not None:
        return wanted or n_train or _USUAL_N_CTX
    if n_train > 0:
        return min(_USUAL_N_CTX, n_train)
    return _USUAL_N_CTX


class Session:
    """A target and the models that draft for it, loaded once. It is a context manager.

    `open_session` makes one and chooses the draft; the constructor loads what the options name.
    """

    def __init__(
        self,
        options: SessionOptions,
        clock: Callable[[], float],
        measurements: MeasurementStore | None = None,
        *,
        draft_ahead: DraftSource = "none",
        vocabulary_only: bool = False,
    ) -> None:
        """Load the models.

        Args:
            options: The files, and all that decides what the session does.
            clock: Returns seconds.
            measurements: What was measured before; updated here, and saved by the caller.
            draft_ahead: A draft that will probably be loaded next: its weights are read while the
                target's are.
            vocabulary_only: The target decodes elsewhere, so only its vocabulary is loaded.

        Raises:
            ModelFileError: A file cannot be used.
            MemoryLimitError: A model does not fit into memory.
            PairError: The draft cannot draft for the target.
        """
        self.options = options
        self.clock = clock
        self.measurements = measurements if measurements is not None else MeasurementStore()
        #: The costs of the models' decodes, and the options of their contexts.
        self.costs = SessionCosts(options, self.measurements)
        #: What drafts for the target.
        self.draft: LoadedDraft | None = None
        #: What the draft was loaded from.
        self.draft_source: DraftSource = "none"
        #: Seconds of the work before the first answer, by the names of fields of `FinishedEvent`.
        #: The first answer takes them.
        self.setup_s: defaultdict[str, float] = defaultdict(float)
        self._resources = contextlib.ExitStack()
        #: Ends the use of weights that were loaded ahead.
        self._ahead = self._resources.enter_context(contextlib.ExitStack())
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            refuse_draft(options.target)
            _check_helpers(options)
            if isinstance(draft_ahead, Path):
                self._load_ahead(draft_ahead)
            self.target = self._load_target(vocabulary_only)
            #: The default settings of a request.
            self.settings = RequestSettings.of(
                self.target, options.sampler, options.generation, options.drafting
            )
            #: The n-grams, which may draft together with another draft.
            self.ngrams = self._open_ngrams()
            self._resources.callback(self._close_draft)
            self.change_draft(options.draft)
            on_error.pop_all()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the models. An unfinished answer raises `BackendError` if it is continued."""
        self._resources.close()

    # --- loading ----------------------------------------------------------------------------------

    def _load_target(self, vocabulary_only: bool) -> LlamaModel:
        context = self.options.target_context
        started_s = self.clock()
        target = LlamaModel(
            self.options.target,
            n_gpu_layers=context.n_gpu_layers,
            vocabulary_only=vocabulary_only,
            workers=context.workers,
            mtp=True,
        )
        self._resources.callback(target.close)
        self._count_loading(target, started_s)
        if replays_graphs(target, context.n_gpu_layers):
            self.costs.kind = partial(GraphCostTable, n_layer=target.n_layer)
        target.own_template = context.chat_template
        return target

    def _load_ahead(self, draft: Path) -> None:
        """Begin to load a draft's weights, unless they are few or may take the target's memory."""
        with contextlib.suppress(SpecgenError, OSError):
            is_small = draft.stat().st_size < LEAST_AHEAD_BYTES
            if is_small or has_gpu() or self.options.learning is not None:
                return
            kind = find_kind(draft)
            if kind is not None and kind.name == ANY_FILE:
                check_file(draft)
                self._ahead.callback(load_ahead(draft, self.options.draft_context.n_gpu_layers))

    def _count_loading(self, model: LlamaModel, started_s: float) -> None:
        packed = model.loaded.packed
        is_packed = packed is not None and packed.n_new_bytes > 0
        self.setup_s["packing_s" if is_packed else "loading_s"] += self.clock() - started_s

    def _open_ngrams(self) -> LoadedDraft:
        ngrams = open_draft("ngram", self._draft_setup)
        assert ngrams is not None, "n-grams always draft"
        return ngrams

    @property
    def _draft_setup(self) -> DraftSetup:
        """What any draft is opened with."""
        options = self.options
        return DraftSetup(
            self.target, options.drafting, options.draft_context, self.clock, cache=options.cache
        )

    # --- what can change --------------------------------------------------------------------------

    def change_draft(self, source: DraftSource) -> None:
        """Replace the draft, which must have no open context; its latest weights are loaded.

        Nothing drafts after an error.

        Raises:
            ModelFileError: The file cannot be used.
            MemoryLimitError: It does not fit into memory.
            PairError: It cannot draft for the target.
        """
        self._close_draft()
        options = self.options
        started_s = self.clock()
        if source == self.ngrams.name and not options.helpers:
            self.draft = self.ngrams
        else:
            learnt = None
            if isinstance(source, Path):
                learnt = learnt_weights(options.learning, source)
            setup = replace(self._draft_setup, helpers=options.helpers, learnt=learnt)
            self.draft = open_draft(source, setup)
        for model in self.models[1:]:
            self._count_loading(model, started_s)
            started_s = self.clock()
        self.draft_source = source
        if source != "none":
            self._ahead.close()

    def _close_draft(self) -> None:
        if self.draft is not None:
            self.draft.close()
        self.draft = None
        self.draft_source = "none"

    def change_drafting(self, drafting: DraftOptions) -> None:
        """Draft in another way from now on. Raise `UsageError` as the constructor does."""
        if drafting != self.options.drafting:
            self.options = replace(self.options, drafting=drafting)
            self.settings = replace(self.settings, drafting=drafting)
            self.ngrams = self._open_ngrams()
            self.change_draft(self.draft_source)

    def change_sampling(self, sampling: SamplerOptions) -> None:
        """Sample answers in another way from now on. Raise `UsageError` as `RequestSettings.of`."""
        self.options = replace(self.options, sampler=sampling)
        self.settings = self.settings.changed(self.target, sampling)

    # --- the models -------------------------------------------------------------------------------

    @property
    def prompts(self) -> Prompts:
        """Makes the prompts of these models."""
        variables = self.options.target_context.template_variables
        return Prompts(self.target, self.own_vocabulary, variables=variables)

    @property
    def draft_name(self) -> str:
        """The draft's name, or ``none``."""
        return self.draft.name if self.draft is not None else "none"

    @property
    def models(self) -> tuple[LlamaModel, ...]:
        """The target, and the models of the draft."""
        if self.draft is None:
            return (self.target,)
        return (self.target, *self.draft.models)

    @property
    def own_vocabulary(self) -> LlamaModel | None:
        """The draft, if its vocabulary is not the target's."""
        return self.draft.own_vocabulary if self.draft is not None else None

    @property
    def why_chains(self) -> str | None:
        """Why drafts cannot branch here, whatever their shape; None if they can."""
        if self.draft is None:
            return self._draft_setup.why_chains
        return self.draft.why_chains

    @property
    def why_one_sequence(self) -> str | None:
        """Why one of the models cannot decode several sequences at once; None if all can."""
        reasons = (model.why_one_sequence for model in self.models)
        return next(filter(None, reasons), None)

    # --- sizes of contexts ------------------------------------------------------------------------

    @property
    def n_rows_max(self) -> int:
        """The most rows of an answer in a round: those of the draft and of the token before it."""
        return 1 + self.options.drafting.n_max

    @property
    def n_branches_max(self) -> int:
        """The most branches of a draft in the target's context."""
        draft = self.draft
        drafting = self.options.drafting
        if draft is None or self.target.has_recurrent_state or not drafting.grows_trees:
            return 1
        if draft.why_chains and not drafting.adds_ngrams:
            return 1
        return max(1, drafting.n_max)

    @property
    def n_sequences_max(self) -> int:
        """The most of llama.cpp's sequences that one answer needs in a context."""
        n_target = n_native_sequences(self.target, self.n_branches_max)
        if self.draft is None:
            return n_target
        return max(n_target, self.draft.n_sequences(self.n_rows_max))

    @property
    def usual_n_ctx(self) -> int:
        """The size of the target's context, where it does not depend on a prompt."""
        return usual_n_ctx(self.options.target_context.n_ctx, self.target.n_ctx_train)

    def context_size(self, n_prompt: int, max_tokens: int | None = None) -> int:
        """Return the size of the target's context for one prompt and its answer.

        Args:
            n_prompt: The tokens of the prompt.
            max_tokens: The most tokens of the answer; None is as in the session's options.

        Raises:
            PromptError: The prompt does not fit.
        """
        n_ctx = self.usual_n_ctx
        hint = f"take --ctx-size {n_prompt + 1} or more, or a shorter prompt"
        if self.options.target_context.n_ctx is None:
            n_ctx = self._needed_n_ctx(n_prompt, max_tokens)
            n_train = self.target.n_ctx_train
            hint = f"{self.target.name} was trained with a context of {n_train}"
        if n_prompt > n_ctx:
            raise PromptError(
                f"the prompt has {n_prompt} tokens, but the context has {n_ctx}", hint
            )
        return n_ctx

    def _needed_n_ctx(self, n_prompt: int, max_tokens: int | None) -> int:
        """Return what a prompt, its answer and a draft need, up to what the target can do."""
        if max_tokens is None:
            max_tokens = self.options.generation.max_tokens
        if max_tokens < 0:
            max_tokens = _USUAL_N_CTX
        n_tokens = n_prompt + max_tokens + self.options.drafting.n_max
        n_steps = -(-n_tokens // CONTEXT_STEP)
        n_train = self.target.n_ctx_train
        n_ctx = n_steps * CONTEXT_STEP
        if n_train > 0:
            n_ctx = min(n_ctx, n_train)
        return n_ctx

    # --- contexts ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def contexts(
        self,
        n_ctx: int,
        *,
        drafts: bool = True,
        n_slots: int = 1,
    ) -> Iterator[tuple[LlamaBackend, tuple[LlamaBackend, ...]]]:
        """Open contexts of the target and of the draft.

        Args:
            n_ctx: The tokens of a prompt and its answer.
            drafts: Whether the draft's contexts are opened, too.
            n_slots: How many answers are generated at once.

        Raises:
            MemoryLimitError: They do not fit into memory.
        """
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
            draft_contexts: tuple[LlamaBackend, ...] = ()
            if drafts:
                draft_contexts = stack.enter_context(
                    self.draft_contexts(n_ctx, target=target, n_slots=n_slots)
                )
            yield target, draft_contexts

    @contextlib.contextmanager
    def draft_contexts(
        self,
        n_ctx: int,
        *,
        target: LlamaBackend | None = None,
        n_slots: int = 1,
    ) -> Iterator[tuple[LlamaBackend, ...]]:
        """Open contexts of the draft, and of what drafts for it.

        Args:
            n_ctx: The tokens of a prompt and its answer.
            target: The target's context; the draft may read its hidden states.
            n_slots: How many answers are generated at once.

        Raises:
            MemoryLimitError: They do not fit into memory.
        """
        spec = ContextSpec(
            n_ctx, n_slots, self.n_rows_max, self.clock, self.costs.context_options, target
        )
        with contextlib.ExitStack() as stack:
            contexts = self.draft.contexts(spec) if self.draft is not None else ()
            for context in contexts:
                stack.callback(context.close)
            yield contexts

    def notices(self, n_ctx: int) -> Iterator[str]:
        """Yield what a user should know before an answer in contexts of this size."""
        if self.draft is not None:
            yield from self._draft_notices(self.draft)
        n_train = self.target.n_ctx_train
        if 0 < n_train < n_ctx:
            yield (
                f"{self.target.name} was trained with {n_train} tokens of context, but the context "
                f"has {n_ctx}: expect poor text"
            )

    def _draft_notices(self, draft: LoadedDraft) -> Iterator[str]:
        if draft.learnt is not None and draft.learns is not None:
            folder = self.options.learning
            learnt = read_learnt(folder, draft.learns) if folder is not None else Learnt()
            yield (
                f"{draft.name} drafts with what it learnt from {learnt.n_answers} answers: "
                f"on other answers it agrees with the target on {learnt.agreement_after:.1%} of "
                f"the tokens, before on {learnt.agreement_before:.1%}"
            )
        yield from draft.notices()
        tree = self.options.drafting.tree
        if tree.is_fixed and draft.why_chains:
            yield f"--tree {tree}: {draft.why_chains}: drafting chains of {tree.n_levels} tokens"


def _check_helpers(options: SessionOptions) -> None:
    """Refuse a draft's draft with another vocabulary, before anything is loaded.

    Raises:
        PairError: The vocabularies differ.
        ModelFileError: A file cannot be used.
    """
    files = [each for each in (options.draft, *options.helpers) if isinstance(each, Path)]
    for target, draft in pairwise(files):
        if _first_tokens(target) != _first_tokens(draft):
            raise PairError(
                f"{draft.name} cannot draft for {target.name}: each has a vocabulary of its own",
                hint="a draft's own draft is of the same model family, or n-grams",
            )


def _first_tokens(file: Path) -> list[bytes]:
    check_file(file)
    with GgufMetadata(file) as metadata:
        return list(islice(metadata.texts("tokenizer.ggml.tokens"), _N_COMPARED))
