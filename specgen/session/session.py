"""The loaded models: a target and what drafts for it, with their contexts and costs."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice, pairwise
from pathlib import Path

from specgen.drafters.common_phrases import common_phrases
from specgen.drafters.interface import ContextSpec, DraftSetup, LoadedDraft
from specgen.drafters.kinds import ANY_FILE, find_kind, open_draft, refuse_draft
from specgen.errors import OutputError, PairError, PromptError, SpecgenError
from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.cuda_graphs import GraphCostTable, replays_graphs
from specgen.llama.file_check import check_file
from specgen.llama.gguf_file import GgufMetadata
from specgen.llama.kernels.packed_weights import PackedWeights
from specgen.llama.library import has_gpu
from specgen.llama.native_context import n_native_sequences, rounded_n_ctx
from specgen.llama.weights import load_ahead
from specgen.option_values import required
from specgen.options import (
    ContextOptions,
    DraftOptions,
    DraftSource,
    SamplerOptions,
    SessionOptions,
)
from specgen.session.kept_answers import Learnt, learnt_weights, read_learnt
from specgen.session.measurement_store import MeasurementStore, SessionCosts
from specgen.session.prompts import Prompts
from specgen.session.request import RequestSettings
from specgen.session.weights_memory import (
    ALL_WEIGHTS,
    DEFAULT_N_CTX,
    WeightsBudget,
    usual_n_ctx,
    weights_budget,
)

#: Smaller drafts load so quickly that reading them ahead is not worthwhile.
MIN_AHEAD_BYTES = 32 << 20
#: The number of tokens that are compared between two vocabularies: the first ones suffice.
_N_COMPARED = 1024


class Session:
    """A target and the models that draft for it, loaded once. It is a context manager.

    The constructor loads exactly the models that the options name. `open_session` also chooses the
    draft.
    """

    def __init__(
        self,
        options: SessionOptions,
        clock: Callable[[], float],
        measurements: MeasurementStore | None = None,
        *,
        draft_ahead: DraftSource = "none",
        vocabulary_only: bool = False,
        budget: WeightsBudget | None = None,
        on_packing: Callable[[int, int], None] | None = None,
    ) -> None:
        """Load the models.

        Args:
            options: The model files and all other options.
            clock: Returns the current time in seconds.
            measurements: What was measured before. The session updates it; the caller saves it.
            draft_ahead: A draft that will probably be loaded next. Its weights are read from the
                disk while the target is loading.
            vocabulary_only: Whether to load only the target's vocabulary, because it decodes
                elsewhere.
            budget: The memory for the target's weights; None decides it by the options and by what
                is available.
            on_packing: Receives the number of bytes of streamed weights that are packed, and of all
                that will be.

        Raises:
            ModelFileError: If a file cannot be used.
            MemoryLimitError: If a model does not fit into memory.
            PairError: If the draft cannot draft for the target.
            UsageError: If an option is invalid for the target.
        """
        required("options", SessionOptions, options)
        self.options = options
        self.clock = clock
        self.measurements = measurements if measurements is not None else MeasurementStore()
        #: The cost tables of the models, and the options of their contexts.
        self.costs = SessionCosts(options, self.measurements)
        #: The loaded draft; None if nothing drafts.
        self.draft: LoadedDraft | None = None
        #: The file or the word that the draft was loaded from.
        self.draft_source: DraftSource = "none"
        #: The seconds spent on loading, packing and measuring, by the fields of `FinishedEvent`
        #: that report them. The first answer reports them and empties this.
        self.setup_s: defaultdict[str, float] = defaultdict(float)
        #: The new packed weights by the name of their model. They are written when it is closed.
        self.packed: dict[str, PackedWeights] = {}
        self._resources = contextlib.ExitStack()
        #: What is called after the models are closed.
        self._after_close = contextlib.ExitStack()
        #: Releases the weights that were read ahead.
        self._ahead = self._resources.enter_context(contextlib.ExitStack())
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            refuse_draft(options.target)
            _check_further_drafts(options)
            #: The memory for the target's weights.
            self.budget = ALL_WEIGHTS
            if not vocabulary_only:
                self.budget = budget or weights_budget(options, (options.draft, draft_ahead))
            if isinstance(draft_ahead, Path):
                self._load_ahead(draft_ahead)
            self.target = self._load_target(vocabulary_only, on_packing)
            self.options = replace(options, drafting=self._with_draft_length(options.drafting))
            #: The default settings of a request.
            self.settings = RequestSettings.of(
                self.target, options.sampler, options.generation, self.options.drafting
            )
            #: The n-gram draft, which may be used together with another draft.
            self.ngrams = self._open_ngrams()
            self._resources.callback(self._close_draft)
            self.change_draft(options.draft)
            on_error.pop_all()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the models. Continuing an unfinished answer raises `BackendError` from then on."""
        self._resources.close()
        self._after_close.close()

    def call_after_close(self, callback: Callable[[], None]) -> None:
        """Call a function once, after the models are closed."""
        self._after_close.callback(callback)

    # --- loading ----------------------------------------------------------------------------------

    def _load_target(
        self,
        vocabulary_only: bool,
        on_packing: Callable[[int, int], None] | None,
    ) -> LlamaModel:
        """Load the target, count the time, and decide which of its cost tables are used."""
        context = self.options.target_context
        started_s = self.clock()
        target = LlamaModel(
            self.options.target,
            n_gpu_layers=context.n_gpu_layers,
            vocabulary_only=vocabulary_only,
            workers=context.workers,
            mtp=True,
            weights_bytes=self.budget.max_bytes,
            on_packing=on_packing,
        )
        self._resources.callback(target.close)
        self._count_loading(target, started_s)
        if replays_graphs(target, context.n_gpu_layers):
            self.costs.kind = partial(GraphCostTable, n_layer=target.n_layer)
        self.costs.streamed_share = target.streamed_bytes / max(1, target.size_bytes)
        target.own_template = context.chat_template
        return target

    def _with_draft_length(self, drafting: DraftOptions) -> DraftOptions:
        """Return the drafting options with the length of drafts that suits the target.

        If the user gave none, drafts may be longer if the target is streamed: a pass takes as long
        as its reads from disk, and a row costs next to nothing.
        """
        is_given = drafting.max_tokens is not None
        if not self.target.is_streamed or is_given or not drafting.is_by_cost:
            return drafting
        return replace(drafting, max_tokens=self.budget.longest_draft)

    def _load_ahead(self, draft: Path) -> None:
        """Start reading the weights of a draft in the background.

        This is only an optimization: any problem with the file is reported when it is loaded.
        Nothing is read ahead if the draft is small, if there is a GPU, whose memory the target
        needs first, or if other (learnt) weights may be used.
        """
        with contextlib.suppress(SpecgenError, OSError):
            is_small = draft.stat().st_size < MIN_AHEAD_BYTES
            if is_small or has_gpu() or self.options.learning is not None:
                return
            kind = find_kind(draft)
            # Only a stand-alone model: other kinds of drafts read their files differently.
            if kind is not None and kind.name == ANY_FILE:
                check_file(draft)
                self._ahead.callback(load_ahead(draft, self.options.draft_context.n_gpu_layers))

    def _count_loading(self, model: LlamaModel, started_s: float) -> None:
        """Count the time since `started_s` as loading a model, or as packing its weights."""
        field = "loading_s"
        packed = model.loaded.packed
        if packed is not None and packed.n_new_bytes > 0:
            field = "packing_s"
            self.packed[model.name] = packed
        self.setup_s[field] += self.clock() - started_s

    def count_rest(self, started_s: float) -> None:
        """Count what the session has not counted of the time since `started_s` as loading."""
        rest_s = self.clock() - started_s - sum(self.setup_s.values())
        if rest_s > 0.0:
            self.count_setup(rest_s)

    def count_setup(self, seconds: float) -> None:
        """Count some time as loading, or as loading and packing if weights were packed."""
        is_packing = self.setup_s["packing_s"] > 0.0
        field = "packing_s" if is_packing else "loading_s"
        self.setup_s[field] += seconds

    def _open_ngrams(self) -> LoadedDraft:
        ngrams = open_draft("ngram", self._draft_setup)
        assert ngrams is not None, "n-grams always draft"
        return ngrams

    @property
    def _draft_setup(self) -> DraftSetup:
        """The arguments with which any draft is opened."""
        options = self.options
        return DraftSetup(
            self.target,
            options.drafting,
            options.draft_context,
            self.clock,
            cache=options.cache,
        )

    # --- what can change --------------------------------------------------------------------------

    def change_draft(self, source: DraftSource) -> None:
        """Replace the draft. No context of the old one may be open.

        If the new draft learnt from answers, its latest weights are loaded. After an error, the
        session has no draft.

        Args:
            source: A file, a word such as ``ngram``, or ``none``.

        Raises:
            ModelFileError: If the file cannot be used.
            MemoryLimitError: If the draft does not fit into memory.
            PairError: If the draft cannot draft for the target.
        """
        self._close_draft()
        options = self.options
        started_s = self.clock()
        if source == self.ngrams.name and not options.further_drafts:
            self.draft = self.ngrams
        else:
            learnt = None
            if isinstance(source, Path):
                learnt = learnt_weights(options.learning, source)
            setup = replace(self._draft_setup, further_drafts=options.further_drafts, learnt=learnt)
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
        """Change the drafting options. The draft is loaded again, since they affect loading.

        Raises:
            UsageError: If an option is invalid.
        """
        drafting = self._with_draft_length(drafting)
        if drafting != self.options.drafting:
            self.options = replace(self.options, drafting=drafting)
            self.settings = replace(self.settings, drafting=drafting)
            self.ngrams = self._open_ngrams()
            self.change_draft(self.draft_source)

    def change_sampling(self, sampling: SamplerOptions) -> None:
        """Change the default sampling options of answers.

        Raises:
            UsageError: If an option is invalid for the target.
        """
        self.options = replace(self.options, sampler=sampling)
        self.settings = self.settings.changed(self.target, sampling)

    def keep_text(self, tokens: Sequence[int]) -> None:
        """Let n-grams and the draft store a finished text for later answers.

        Raises:
            OutputError: If the draft fails to.
        """
        self.ngrams.keep_text(tokens)
        draft = self.draft
        if draft is None or draft is self.ngrams:
            return
        try:
            draft.keep_text(tokens)
        except Exception as error:
            raise OutputError(f"{draft.name}: {error!r}") from error

    # --- the models -------------------------------------------------------------------------------

    @property
    def prompts(self) -> Prompts:
        """Makes the prompts for these models."""
        variables = self.options.target_context.template_variables
        return Prompts(self.target, self.translated_draft, variables=variables)

    @cached_property
    def common_phrases(self) -> list[list[int]]:
        """The tokens of the phrases that language models have in common."""
        return common_phrases(self.target.vocabulary)

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
    def translated_draft(self) -> LlamaModel | None:
        """The draft's model if its drafts are translated from another vocabulary, else None."""
        return self.draft.own_vocabulary if self.draft is not None else None

    @property
    def why_chains(self) -> str | None:
        """Why drafts can only be chains here, whatever shape is wanted; None if they can branch."""
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
        """The maximum number of rows per answer in a batch of a round.

        These are the drafted tokens, and the last committed token before them.
        """
        return 1 + self.options.drafting.n_max

    @property
    def n_branches_max(self) -> int:
        """The maximum number of branches of a draft in the target's context; 1 for chains."""
        draft = self.draft
        drafting = self.options.drafting
        if draft is None or self.target.has_recurrent_state or not drafting.grows_trees:
            return 1
        if draft.why_chains and not drafting.adds_ngrams:
            return 1
        return max(1, drafting.n_max)

    @property
    def n_sequences_max(self) -> int:
        """The maximum number of llama.cpp's sequences that one answer needs in a context."""
        n_target = n_native_sequences(self.target, self.n_branches_max)
        if self.draft is None:
            return n_target
        return max(n_target, self.draft.n_sequences(self.n_rows_max))

    @property
    def usual_n_ctx(self) -> int:
        """The size of the target's context, in tokens, that does not depend on a prompt."""
        wanted = self.options.target_context.n_ctx
        return self.target.limited_n_ctx(usual_n_ctx(wanted, self.target.n_ctx_train))

    def context_size(
        self,
        n_prompt: int,
        max_tokens: int | None = None,
    ) -> int:
        """Return the size of the target's context for one prompt and its answer, in tokens.

        It is the size that the user gave, or as large as necessary.

        Args:
            n_prompt: The number of tokens of the prompt.
            max_tokens: The maximum number of tokens of the answer; None uses the session's option.

        Raises:
            PromptError: If the prompt does not fit.
        """
        n_ctx = self.usual_n_ctx
        hint = self.fitting_hint(n_prompt + 1, "a shorter prompt")
        if self.options.target_context.n_ctx is None:
            n_ctx = self._needed_n_ctx(n_prompt, max_tokens)
            n_train = self.target.n_ctx_train
            hint = f"{self.target.name} was trained with a context of {n_train}"
        if n_prompt > n_ctx:
            raise PromptError(
                f"the prompt has {n_prompt} tokens, but the context has {n_ctx}", hint
            )
        return n_ctx

    def fitting_hint(self, n_tokens: int, otherwise: str) -> str:
        """Return the hint if the context has no room for a text of `n_tokens` tokens.

        Args:
            n_tokens: The number of tokens.
            otherwise: What to use in place of a larger context: "a shorter prompt".
        """
        n_learned = self.target.limited_n_ctx(n_tokens)
        if n_learned < n_tokens:
            return f"{self.target.name} has learned only {n_learned} positions: use {otherwise}"
        return f"use --ctx-size {n_tokens} or more, or {otherwise}"

    def _needed_n_ctx(self, n_prompt: int, max_tokens: int | None) -> int:
        """Return the context size that a prompt, its answer and a draft need.

        It is limited to the size that the target was trained with.
        """
        if max_tokens is None:
            max_tokens = self.options.generation.max_tokens
        if max_tokens < 0:  # no limit
            max_tokens = DEFAULT_N_CTX
        n_tokens = n_prompt + max_tokens + self.options.drafting.n_max
        n_ctx = rounded_n_ctx(n_tokens)
        n_train = self.target.n_ctx_train  # 0 if unknown
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
        """Open contexts of the target and of the draft, which are closed at the end of the block.

        Args:
            n_ctx: The number of tokens of a prompt and its answer.
            drafts: Whether to open the draft's contexts, too.
            n_slots: The number of answers that are generated at once.

        Yields:
            The target's context; the draft's contexts, as in `draft_contexts`.

        Raises:
            MemoryLimitError: If they do not fit into memory.
            UsageError: If the target cannot generate so many answers at once.
        """
        self.target.check_parallel(n_slots)
        with contextlib.ExitStack() as stack:
            target = LlamaBackend(
                self.target,
                self._target_options(),
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

    def _target_options(self) -> ContextOptions:
        """Return the options of the target's contexts.

        If the target is streamed, more of a prompt is decoded at once, since each batch reads the
        weights from disk. Without batch-invariant kernels, that would change the text.
        """
        options = self.costs.context_options()
        n_batch = self.budget.n_batch
        is_default = options.n_batch == ContextOptions().n_batch
        if n_batch is None or not is_default:
            return options
        if not self.target.is_streamed or not self.target.has_equal_rows:
            return options
        return replace(options, n_batch=n_batch)

    @contextlib.contextmanager
    def draft_contexts(
        self,
        n_ctx: int,
        *,
        target: LlamaBackend | None = None,
        n_slots: int = 1,
    ) -> Iterator[tuple[LlamaBackend, ...]]:
        """Open contexts of the draft, which are closed at the end of the block.

        Args:
            n_ctx: The number of tokens of a prompt and its answer.
            target: The target's context, whose hidden states the draft may read; None if the
                target decodes elsewhere.
            n_slots: The number of answers that are generated at once.

        Yields:
            The context of the draft's model, then those of its second draft; none if the draft has
            no model.

        Raises:
            MemoryLimitError: If they do not fit into memory.
        """
        spec = ContextSpec(
            n_ctx,
            n_slots,
            self.n_rows_max,
            self.clock,
            self.costs.context_options,
            target,
        )
        with contextlib.ExitStack() as stack:
            contexts = self.draft.contexts(spec) if self.draft is not None else ()
            for context in contexts:
                stack.callback(context.close)
            yield contexts

    def notices(
        self,
        n_ctx: int,
        n_wanted: int | None = None,
    ) -> Iterator[str]:
        """Yield notices for the user before the first answer.

        Args:
            n_ctx: The size of the target's context.
            n_wanted: The size that the user gave, if any.
        """
        if self.draft is not None:
            yield from self._draft_notices(self.draft)
        n_train = self.target.n_ctx_train
        if n_wanted is not None and n_wanted > self.target.limited_n_ctx(n_wanted):
            yield (
                f"{self.target.name} has learned only {n_train} positions, so the context has "
                f"{n_ctx} tokens and not {n_wanted}"
            )
        if 0 < n_train < n_ctx:
            yield (
                f"{self.target.name} was trained with {n_train} tokens of context, but the context "
                f"has {n_ctx}: expect poor text"
            )

    def _draft_notices(self, draft: LoadedDraft) -> Iterator[str]:
        """Yield notices about what the draft learnt, what it lacks, and its shape."""
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


def _check_further_drafts(options: SessionOptions) -> None:
    """Check, before anything is loaded, that a draft and its further drafts share one vocabulary.

    Raises:
        PairError: If the vocabularies differ.
        ModelFileError: If a file cannot be used.
    """
    files = [each for each in (options.draft, *options.further_drafts) if isinstance(each, Path)]
    for draft, second in pairwise(files):
        if _first_tokens(draft) != _first_tokens(second):
            raise PairError(
                f"{second.name} cannot draft for {draft.name}: each has a vocabulary of its own",
                hint="a draft's own draft must be from its model family, or n-grams",
            )


def _first_tokens(file: Path) -> list[bytes]:
    """Return the first tokens of a model file's vocabulary, which suffice to tell it apart."""
    check_file(file)
    with GgufMetadata(file) as metadata:
        return list(islice(metadata.texts("tokenizer.ggml.tokens"), _N_COMPARED))
