"""The loaded models: a target and what drafts for it, with their contexts and the costs of their
decodes.
"""

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
from specgen.llama.context import n_native_sequences
from specgen.llama.cuda_graphs import GraphCostTable, replays_graphs
from specgen.llama.gguf_file import GgufMetadata, check_file
from specgen.llama.library import has_gpu
from specgen.llama.weights import load_ahead
from specgen.options import DraftOptions, DraftSource, SamplerOptions, SessionOptions
from specgen.session.kept_answers import Learnt, learnt_weights, read_learnt
from specgen.session.measurement_store import MeasurementStore, SessionCosts
from specgen.session.prompts import Prompts
from specgen.session.request import RequestSettings

MAX_SEQUENCES = 256  # llama.cpp's limit for a context
LEAST_AHEAD = 32 << 20  # smaller drafts are loaded in a moment
CONTEXT_STEP = 256  # llama.cpp rounds sizes up to a multiple of it
_ROOM = 4096  # tokens where no size is given: for a prompt and its answer
_N_COMPARED = 1024  # the first tokens of two vocabularies tell them apart


def usual_n_ctx(wanted: int | None, n_train: int) -> int:
    if wanted is not None:
        return wanted or n_train or _ROOM
    return min(_ROOM, n_train) if n_train > 0 else _ROOM


def _check_helpers(options: SessionOptions) -> None:
    """Refuse a draft's draft of another vocabulary before anything is loaded. Raise `PairError`,
    `ModelFileError`.
    """
    files = [each for each in (options.draft, *options.helpers) if isinstance(each, Path)]
    for target, draft in pairwise(files):
        beginnings = []
        for file in (target, draft):
            check_file(file)
            with GgufMetadata(file) as metadata:
                beginnings.append([*islice(metadata.texts("tokenizer.ggml.tokens"), _N_COMPARED)])
        if beginnings[0] != beginnings[1]:
            raise PairError(
                f"{draft.name} cannot draft for {target.name}: each has a vocabulary of its own",
                hint="a draft's own draft is of the same model family, or n-grams",
            )


class Session:
    """A target and the models that draft for it, loaded once, as a context manager. `memory` is
    updated; the caller saves it. The weights of `draft_ahead` are loaded beside the target's. With
    `vocabulary_only` the target decodes elsewhere. Raises `ModelFileError`, `MemoryLimitError` or
    `PairError`.
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
        self.options = options
        self.clock = clock
        self.measurements = measurements if measurements is not None else MeasurementStore()
        #: The costs of the models' decodes, and the options of their contexts.
        self.costs = SessionCosts(options, self.measurements)
        #: What drafts for the target, and the source that it was loaded from.
        self.draft: LoadedDraft | None = None
        self.draft_source: DraftSource = "none"
        #: Seconds of the work before the first answer, by their names in its `FinishedEvent`, which
        #: takes them.
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
            started_s = clock()
            self.target = LlamaModel(
                options.target,
                n_gpu_layers=options.target_context.n_gpu_layers,
                vocabulary_only=vocabulary_only,
                workers=options.target_context.workers,
                mtp=True,
            )
            self._resources.callback(self.target.close)
            self._count_loading(self.target, started_s)
            if replays_graphs(self.target, options.target_context.n_gpu_layers):
                self.costs.kind = partial(GraphCostTable, n_layer=self.target.n_layer)
            self.target.own_template = options.target_context.chat_template
            #: The settings of a request that has none of its own.
            self.settings = RequestSettings.of(
                self.target, options.sampler, options.generation, options.drafting
            )
            self._open_ngrams()
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

    @property
    def prompts(self) -> Prompts:
        variables = self.options.target_context.template_variables
        return Prompts(self.target, self.own_vocabulary, variables=variables)

    def _load_ahead(self, draft: Path) -> None:
        """Begin to load a draft's weights, unless that may take the target's memory, or the file is
        small.
        """
        with contextlib.suppress(SpecgenError, OSError):
            is_small = draft.stat().st_size < LEAST_AHEAD
            if is_small or has_gpu() or self.options.learning is not None:
                return
            kind = find_kind(draft)
            if kind is not None and kind.name == ANY_FILE:
                check_file(draft)
                self._ahead.callback(load_ahead(draft, self.options.draft_context.n_gpu_layers))

    # --- what drafts -------------------------------------------------------------------------

    def change_draft(self, source: DraftSource) -> None:
        """Replace the present draft, which must have no open context, with its latest weights.
        Raise what `open_draft` raises.
        """
        self._close_draft()
        learning = self.options.learning
        setup = replace(
            self._setup,
            helpers=self.options.helpers,
            learnt=learnt_weights(learning, source) if isinstance(source, Path) else None,
        )
        is_ngrams, started_s = source == self.ngrams.name and not setup.helpers, self.clock()
        self.draft = self.ngrams if is_ngrams else open_draft(source, setup)
        for model in self.models[1:]:
            self._count_loading(model, started_s)
            started_s = self.clock()
        self.draft_source = source
        if source != "none":
            self._ahead.close()

    def _count_loading(self, model: LlamaModel, started_s: float) -> None:
        packed = model.loaded.packed
        name = "packing_s" if packed is not None and packed.n_new_bytes else "loading_s"
        self.setup_s[name] += self.clock() - started_s

    def _open_ngrams(self) -> None:
        """Open the n-grams, which also draft beside another draft. Raise `UsageError`."""
        opened = open_draft("ngram", self._setup)
        assert opened is not None, "n-grams always draft"
        self.ngrams: LoadedDraft = opened

    def _close_draft(self) -> None:
        if self.draft is not None:
            self.draft.close()
        self.draft, self.draft_source = None, "none"

    def change_drafting(self, drafting: DraftOptions) -> None:
        if drafting != self.options.drafting:
            self.options = replace(self.options, drafting=drafting)
            self.settings = replace(self.settings, drafting=drafting)
            self._open_ngrams()
            self.change_draft(self.draft_source)

    def change_sampling(self, sampling: SamplerOptions) -> None:
        """Draw answers in another way from now on. Raise `UsageError` as `RequestSettings.of` does."""
        self.options = replace(self.options, sampler=sampling)
        self.settings = self.settings.changed(self.target, sampling)

    @property
    def _setup(self) -> DraftSetup:
        options = self.options
        return DraftSetup(
            self.target, options.drafting, options.draft_context, self.clock, cache=options.cache
        )

    @property
    def draft_name(self) -> str:
        return self.draft.name if self.draft is not None else "none"

    @property
    def models(self) -> tuple[LlamaModel, ...]:
        return (self.target, *(self.draft.models if self.draft is not None else ()))

    @property
    def own_vocabulary(self) -> LlamaModel | None:
        return self.draft.own_vocabulary if self.draft is not None else None

    @property
    def why_chains(self) -> str | None:
        """Why drafts cannot branch here, whatever their shape; None if they can."""
        return self.draft.why_chains if self.draft is not None else self._setup.why_chains

    @property
    def why_one_sequence(self) -> str | None:
        """Why one of the models cannot decode several sequences at once; None if all can."""
        return next((why for model in self.models if (why := model.why_one_sequence)), None)

    # --- contexts -----------------------------------------------------------------------------

    @property
    def n_rows_max(self) -> int:
        """The most rows of an answer in a round's batch: those of the draft, and of the token
        before it.
        """
        return 1 + self.options.drafting.n_max

    @property
    def n_branches_max(self) -> int:
        draft, drafting = self.draft, self.options.drafting
        if draft is None or self.target.has_recurrent_state or not drafting.grows_trees:
            return 1
        if draft.why_chains and not drafting.adds_ngrams:
            return 1
        return max(1, drafting.n_max)

    @property
    def n_sequences_max(self) -> int:
        """The most of llama.cpp's sequences that one answer needs in a context."""
        n_target = n_native_sequences(self.target, self.n_branches_max)
        return max(n_target, self.draft.n_sequences(self.n_rows_max) if self.draft else 0)

    @property
    def usual_n_ctx(self) -> int:
        return usual_n_ctx(self.options.target_context.n_ctx, self.target.n_ctx_train)

    def context_size(self, n_prompt: int, max_tokens: int | None = None) -> int:
        """Return the size of the target's context for an answer of `max_tokens`. Raise
        `PromptError`.
        """
        n_train, n_ctx = self.target.n_ctx_train, self.usual_n_ctx
        hint = f"take --ctx-size {n_prompt + 1} or more, or a shorter prompt"
        if self.options.target_context.n_ctx is None:
            n_answer = max_tokens if max_tokens is not None else self.options.generation.max_tokens
            n_ctx = n_prompt + (n_answer if n_answer >= 0 else _ROOM) + self.options.drafting.n_max
            n_ctx = -(-n_ctx // CONTEXT_STEP) * CONTEXT_STEP
            n_ctx = min(n_ctx, n_train) if n_train > 0 else n_ctx
            hint = f"{self.target.name} was trained with a context of {n_train}"
        if n_prompt > n_ctx:
            raise PromptError(
                f"the prompt has {n_prompt} tokens, but the context has {n_ctx}", hint
            )
        return n_ctx

    @contextlib.contextmanager
    def contexts(
        self, n_ctx: int, *, drafts: bool = True, n_slots: int = 1
    ) -> Iterator[tuple[LlamaBackend, tuple[LlamaBackend, ...]]]:
        """Open contexts of the target and, with `drafts`, of the draft, for `n_slots` answers at
        once.
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
            own = self.draft_contexts(n_ctx, target=target, n_slots=n_slots)
            yield target, stack.enter_context(own) if drafts else ()

    @contextlib.contextmanager
    def draft_contexts(
        self, n_ctx: int, *, target: LlamaBackend | None = None, n_slots: int = 1
    ) -> Iterator[tuple[LlamaBackend, ...]]:
        """Open contexts of the draft and of what drafts for it, beside the target's if it reads
        that.
        """
        room = ContextSpec(
            n_ctx, n_slots, self.n_rows_max, self.clock, self.costs.context_options, target
        )
        with contextlib.ExitStack() as stack:
            found = self.draft.contexts(room) if self.draft is not None else ()
            for context in found:
                stack.callback(context.close)
            yield found

    def notices(self, n_ctx: int) -> Iterator[str]:
        draft, folder, shape = self.draft, self.options.learning, self.options.drafting.tree
        if draft is not None:
            if draft.learnt is not None and draft.learns is not None:
                learnt = read_learnt(folder, draft.learns) if folder is not None else Learnt()
                yield (
                    f"{draft.name} drafts with what it learnt from {learnt.n_answers} answers: on other "
                    f"answers it agrees with the target on {learnt.agreement_after:.1%} of the tokens, before "
                    f"on {learnt.agreement_before:.1%}"
                )
            yield from draft.notices()
            if shape.is_fixed and draft.why_chains:
                yield f"--tree {shape}: {draft.why_chains}: drafting chains of {shape.n_levels} tokens"
        if 0 < self.target.n_ctx_train < n_ctx:
            yield (
                f"{self.target.name} was trained with {self.target.n_ctx_train} tokens of context, but the "
                f"context has {n_ctx}: expect poor text"
            )
