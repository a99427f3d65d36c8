"""A session: loaded models with their options. It generates answers as streams of events."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np

from specgen.backend.base import Backend
from specgen.backend.llama import LlamaBackend, LlamaModel
from specgen.backend.tree_batch import Slot
from specgen.calibration.acceptance import Chances
from specgen.calibration.memory import Memory
from specgen.calibration.weight_copies import Comparison, Copies
from specgen.core.last_hidden import LastHidden
from specgen.core.text_state import Shaper, TextState
from specgen.core.verifiers import make_verifier
from specgen.drafters import Drafter, Drafters
from specgen.engine.answer_drafts import AnswerDrafts
from specgen.engine.answer_settings import AnswerSettings
from specgen.engine.chat_template import Message
from specgen.engine.contexts import SessionContexts
from specgen.engine.draft_model import MakeShaper, Translated
from specgen.engine.draft_stack import DraftStack
from specgen.engine.engine import Engine
from specgen.engine.generation import Generation
from specgen.engine.infill import Gap, InfillPrompt, infill_prompt
from specgen.engine.kept_answers import KeptAnswer, KeptAnswers
from specgen.engine.lookups import Lookups
from specgen.engine.model_costs import ChancesOf, ModelCosts
from specgen.engine.prompts import (
    Prompt,
    ToolDefinitions,
    conversation_prompt,
    text_prompt,
    token_prompt,
)
from specgen.engine.slots import WHOLE, Part
from specgen.events import Event
from specgen.options import (
    DraftOptions,
    DraftSource,
    GenerationOptions,
    SamplerOptions,
    SessionOptions,
    VerifierName,
)

__all__ = ["DraftSource", "Prompt", "Session", "SessionOptions"]


class Session:
    """A loaded target and the models that draft for it. Use it as a context manager.

    Opening it raises `ModelFileError`, `MemoryLimitError` or `PairError`. The weights stay loaded until it
    is closed. `generate` opens contexts for each answer; an `Engine` keeps its contexts. `memory` is what is
    known about these models on this machine, and learns more; the caller saves it. `tell` is called with a
    message before slow steps of opening a draft. With `vocabulary_only` the target decodes elsewhere: only
    the models that draft for it have contexts (`draft_contexts`).
    """

    def __init__(
        self,
        options: SessionOptions,
        clock: Callable[[], float],
        memory: Memory | None = None,
        tell: Callable[[str], None] = lambda _what: None,
        *,
        vocabulary_only: bool = False,
    ) -> None:
        self._options = options
        #: What was learnt about the models.
        self.memory = memory if memory is not None else Memory()
        self._clock = clock
        #: Whether other programs took much of the machine when costs were measured.
        self.was_busy = False
        self._n_told = 0
        folder = None
        if options.cache is not None and options.drafting.weights == "auto":
            folder = options.cache / "drafts"
        copies = Copies(folder, self.memory, clock, tell)
        #: The costs of the models' decodes, and the options of their contexts.
        self.costs = ModelCosts(
            options.target, options.target_context, options.draft_context, self.memory, copies
        )
        self._resources = contextlib.ExitStack()
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            self._target_model = LlamaModel(
                options.target,
                n_gpu_layers=options.target_context.n_gpu_layers,
                vocabulary_only=vocabulary_only,
                workers=options.target_context.workers,
            )
            self._resources.callback(self._target_model.close)
            #: The settings of an answer that has none of its own.
            self.settings = AnswerSettings.of(
                self._target_model, options.sampler, options.generation, options.drafting
            )
            self._drafts = DraftStack(
                self._target_model,
                options.helpers,
                copies,
                options.draft_context,
                self.costs.context_options,
                clock,
                options.learning,
            )
            self._resources.callback(self._drafts.close)
            self.change_draft(options.draft)
            vocabulary = self._target_model.vocabulary
            self._lookups = Lookups(options.drafting, options.cache, vocabulary)
            self._answer_drafts = AnswerDrafts(
                self._drafts, self._lookups, self.costs, self.memory, options.target
            )
            self._kept = KeptAnswers(options.learning) if options.learning is not None else None
            on_error.pop_all()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the models. May be called twice.

        Their weights are freed with the last context that uses them. The context of an unfinished answer
        is freed together with its iterator, which raises `BackendError` if it is continued."""
        self._resources.close()

    def change_draft(self, source: DraftSource) -> None:
        """Replace the present draft, which is closed and must have no open context. Raises
        `ModelFileError` or `PairError`; there is then no draft."""
        self._drafts.change(source, self._options.drafting)

    def reload_draft(self) -> None:
        """Load the draft model again, with the weights that it learnt last. It must have no open context.
        Raises `ModelFileError` or `MemoryLimitError`; there is then no draft."""
        self.change_draft(self._drafts.source)

    def change_drafting(self, drafting: DraftOptions) -> None:
        """Draft with other options from now on. The draft is loaded again; it must have no open context.
        Raises `ModelFileError` or `PairError`; there is then no draft."""
        if drafting != self._options.drafting:
            self._set_drafting(drafting)
            self.change_draft(self._drafts.source)

    def let_ngrams_draft(self, wanted: bool | None) -> None:
        """Set whether n-grams draft beside a draft model. None: they do if the policy decides by costs."""
        self._set_drafting(replace(self._options.drafting, ngrams=wanted))

    def _set_drafting(self, drafting: DraftOptions) -> None:
        self._options = replace(self._options, drafting=drafting)
        self.settings = replace(self.settings, drafting=drafting)

    # --- what is loaded ----------------------------------------------------------------------

    @property
    def target_model(self) -> LlamaModel:
        return self._target_model

    @property
    def clock(self) -> Callable[[], float]:
        return self._clock

    @property
    def options(self) -> SessionOptions:
        return self._options

    @property
    def compared(self) -> list[Comparison]:
        """The comparisons of draft models with copies of their weights in this session."""
        return self._drafts.compared

    @property
    def copied(self) -> list[Comparison]:
        """The last comparison of each draft model whose copy is used."""
        return self._drafts.copied

    def news_of_copies(self) -> list[str]:
        """Return the messages about copies that came into use since the last call."""
        news = [comparison.note for comparison in self.copied[self._n_told :]]
        self._n_told = len(self.copied)
        return news

    @property
    def why_chains(self) -> str | None:
        """Why drafts cannot branch here, whatever their shape; None if they can."""
        return self._drafts.why_chains

    @property
    def why_one_sequence(self) -> str | None:
        """Why only one answer can be made at a time; None if several can."""
        return self._drafts.why_one_sequence

    @property
    def draft_source(self) -> DraftSource:
        return self._drafts.source

    @property
    def draft_path(self) -> Path | None:
        """The draft model's file; None if no draft model is loaded."""
        return self._drafts.path

    @property
    def draft_model(self) -> LlamaModel | None:
        """The draft model; None if none is loaded."""
        return self._drafts.model.model if self._drafts.model is not None else None

    @property
    def draft_weights(self) -> Path | None:
        """The weights that the draft model would use without learning; None if no draft model is loaded."""
        return self._drafts.weights

    @property
    def learnt_draft(self) -> Path | None:
        """The file of learnt weights; None if the draft model does not use any."""
        return self._drafts.learnt

    @property
    def drafts_from_hidden_states(self) -> bool:
        """Whether decoder heads draft, from the target's hidden states."""
        return self._drafts.heads is not None

    @property
    def draft_name(self) -> str:
        return self._drafts.name

    @property
    def is_translated(self) -> bool:
        """Whether the draft model has another vocabulary than the target."""
        return self._drafts.model is not None and self._drafts.model.has_own_vocabulary

    # --- contexts -----------------------------------------------------------------------------

    @property
    def n_rows_max(self) -> int:
        """The most rows of an answer in a round's batch: those of the draft, and of the token before it."""
        return self._contexts.n_rows_max

    @property
    def n_branches_max(self) -> int:
        """The most branches of a draft: 1 if drafts are chains."""
        return self._contexts.n_branches_max

    @property
    def n_sequences_max(self) -> int:
        """The most sequences that one answer needs in a context."""
        return self._contexts.n_sequences_max

    def context_size(self, n_prompt: int, max_tokens: int | None = None) -> int:
        """Return the size of the target's context, in tokens, for an answer of `max_tokens` (None: those of
        the options). Raises `PromptError` if the prompt does not fit."""
        return self._contexts.n_ctx_for(n_prompt, max_tokens)

    @property
    def _contexts(self) -> SessionContexts:
        """The contexts for the present options."""
        return SessionContexts(
            self._options, self._target_model, self._drafts, self.costs, self._clock
        )

    def contexts(
        self, n_ctx: int, *, drafts: bool = True, n_parts: int = 1
    ) -> AbstractContextManager[tuple[LlamaBackend, LlamaBackend | None]]:
        """Open contexts of the target and, with `drafts`, of the draft model if there is one. `n_parts`
        answers may be generated in them at once, each of `n_ctx` tokens with its prompt. The contexts are
        closed only at the end of the `with`. Raises `MemoryLimitError`."""
        return self._contexts.opened(n_ctx, drafts=drafts, n_parts=n_parts)

    def helper_contexts(
        self, n_ctx: int, *, n_parts: int = 1
    ) -> AbstractContextManager[tuple[LlamaBackend, ...]]:
        """Open contexts of the models that draft for the draft model, for a context of the target of the
        same size. Raises `MemoryLimitError`."""
        return self._drafts.contexts(n_ctx, self.n_rows_max, n_parts=n_parts, first=1)

    def draft_contexts(
        self, n_ctx: int, *, n_parts: int = 1
    ) -> AbstractContextManager[tuple[LlamaBackend, ...]]:
        """Open contexts of the draft model and of the models that draft for it, for a context of the
        target of the same size. Raises `MemoryLimitError`."""
        return self._drafts.contexts(n_ctx, self.n_rows_max, n_parts=n_parts)

    # --- prompts and answers -----------------------------------------------------------------

    def prompt(
        self,
        text: str,
        *,
        chat: bool | None = None,
        system: str | None = None,
        now: datetime.datetime | None = None,
    ) -> Prompt:
        """Return the prompt of the user's `text`; see `text_prompt`. `now` is by default the present time.
        Raises `UsageError` or `PromptError`."""
        own = self._own_draft
        return text_prompt(self._target_model, own, text, chat, system, now or _now())

    def conversation(
        self,
        messages: Sequence[Message],
        *,
        now: datetime.datetime | None = None,
        tools: ToolDefinitions = (),
    ) -> Prompt:
        """Return the prompt of a conversation's next turn; see `conversation_prompt`. Raises `UsageError`
        or `PromptError`."""
        own = self._own_draft
        return conversation_prompt(self._target_model, own, messages, now or _now(), tools)

    def prompt_of_tokens(self, tokens: Sequence[int]) -> Prompt:
        """Return a prompt of these tokens of the target. Raises `PromptError` if there are none, or if the
        target lacks one of them."""
        return token_prompt(self._target_model, tokens)

    def infill(self, gap: Gap, n_room: int) -> InfillPrompt:
        """Return the prompt for a gap, of at most `n_room` tokens; see `infill_prompt`. Raises
        `UsageError`."""
        return infill_prompt(self._target_model, self._own_draft, gap, n_room)

    @property
    def _own_draft(self) -> LlamaModel | None:
        """The draft model if it has another vocabulary than the target; else None."""
        draft = self._drafts.model
        return draft.model if draft is not None and draft.has_own_vocabulary else None

    def answer_settings(
        self,
        sampling: SamplerOptions | None = None,
        generation: GenerationOptions | None = None,
        *,
        n_drafted_max: int | None = None,
        verifier: VerifierName | None = None,
    ) -> AnswerSettings:
        """Return the settings of one answer: the session's where an argument is None. `n_drafted_max` cannot
        raise the session's limit of drafted tokens. Raises `UsageError` if a bias names a token that does
        not exist, the grammar is invalid, or `n_drafted_max` is given although drafts have a fixed
        shape."""
        return self.settings.changed(
            self._target_model,
            sampling,
            generation,
            n_drafted_max=n_drafted_max,
            verifier=verifier,
        )

    def generate(
        self,
        prompt: Prompt,
        *,
        interrupted: Callable[[], bool] = lambda: False,
        estimate_gain: bool = True,
    ) -> Iterator[Event]:
        """Generate an answer to a prompt, and yield its events; the last one is a `FinishedEvent`.

        `interrupted` is called between decodes; if it returns True, the answer ends with the text so far.
        `estimate_gain` allows a few extra decodes at the end to measure the cost of plain decoding. Raises
        `PromptError` if the prompt does not fit into the context, `MemoryLimitError` if the context does
        not fit into memory, and `BackendError` if the session is closed.
        """
        n_ctx = self.context_size(len(prompt.tokens))
        with Engine(
            self, n_ctx=n_ctx, interrupted=interrupted, estimate_gain=estimate_gain
        ) as engine:
            yield from engine.stream(engine.submit(prompt))

    def translation(self, settings: AnswerSettings) -> Translated | None:
        """Return how drafts for an answer are translated; None if they need not be."""
        draft = self._drafts.model
        return draft.translated(settings) if draft is not None else None

    def verifier_name(self, settings: AnswerSettings | None = None) -> VerifierName:
        """Return the name of the verifier of an answer's drafts."""
        return (settings or self.settings).verifier

    def keep_text(self, tokens: Sequence[int]) -> None:
        """Store a finished text for lookups of later answers, if the options ask for that."""
        self._lookups.keep(tokens)

    def keep_answer(self, prompt: Prompt, tokens: Sequence[int]) -> None:
        """Store a finished text, prompt and answer, for lookups of later answers and for drafts to learn
        from, if the options ask for that. Raises `OutputError` if it cannot be written for learning; it is
        then written with the next one."""
        self.keep_text(tokens)
        if self._kept is None:
            return
        own = self._own_draft if prompt.draft_tokens is not None else None
        answer = KeptAnswer(
            prompt.without_head().tokens,
            tuple(tokens[len(prompt.tokens) :]),
            draft_prompt=prompt.draft_tokens if own is not None else None,
            draft_vocabulary=own.vocabulary.digest() if own is not None else None,
        )
        self._kept.add(answer)

    def text(self, prompt: Sequence[int]) -> TextState:
        """Return a text that begins with `prompt`, with the grammar at its start."""
        return TextState(prompt, self.settings.grammar)

    def shaper(self, text: TextState) -> Shaper:
        """Return the shaper with the target's samplers for a text."""
        return Shaper(self.settings.sampler, text)

    def generation(
        self,
        prompt: Prompt,
        n_ctx: int,
        draft: Backend | None,
        seed: int,
        *,
        helpers: Sequence[Backend] = (),
        plain: bool = False,
        make_shaper: MakeShaper = Shaper,
        settings: AnswerSettings | None = None,
        part: Part = WHOLE,
        index: int = 0,
        learns_alone: bool = False,
    ) -> Generation:
        """Return the `Generation` of an answer to `prompt`, with the number `index`. `draft` is the draft
        model's context, if there is one, and `helpers` are those of the models that draft for it. With
        `plain`, nothing drafts. `settings` are by default the session's, and `part` is the answer's part
        of all contexts. With `learns_alone`, the acceptance statistics that it adds are dropped with it.
        """
        settings = settings or self.settings
        drafts = self._answer_drafts
        chances = drafts.chances_of_one_answer if learns_alone else self.memory.chances
        # The draft has a random generator of its own, so that it cannot change the target's samples.
        target_seed, draft_seed = np.random.SeedSequence(seed).spawn(2)
        state = TextState(prompt.tokens, settings.grammar)
        drafters: Drafters | None = None
        hidden: LastHidden | None = None
        if not plain:
            drafters, hidden = drafts.drafter(
                prompt,
                () if draft is None else (draft, *helpers),
                state,
                np.random.default_rng(draft_seed),
                make_shaper,
                settings,
                self.ngrams,
                part=part,
                chances=chances,
            )
        return Generation(
            vocabulary=self._target_model.vocabulary.showing(settings.generation.shown_controls),
            options=settings.generation,
            n_ctx=n_ctx,
            drafters=drafters,
            policy=drafts.policy(len(prompt.tokens), settings, chances),
            verifier=make_verifier(self.verifier_name(settings)),
            shaper=make_shaper(settings.sampler, state),
            state=state,
            rng=np.random.default_rng(target_seed),
            slot=Slot(part.number * self.n_branches_max, self.n_branches_max),
            index=index,
            hidden=hidden,
            ends=frozenset() if settings.generation.ignore_eos else prompt.ends,
        )

    def model_drafter(
        self,
        prompt: Prompt,
        backends: Sequence[Backend],
        state: TextState,
        rng: np.random.Generator,
        make_shaper: MakeShaper,
        *,
        settings: AnswerSettings | None = None,
        branches: bool = True,
        part: Part = WHOLE,
        chances: ChancesOf | None = None,
    ) -> Drafter:
        """Return the draft model's drafter without n-grams beside it. `backends` are the contexts of the
        draft model and of the models that draft for it."""
        return self._answer_drafts.model_drafter(
            prompt,
            backends,
            state,
            rng,
            make_shaper,
            settings or self.settings,
            branches=branches,
            part=part,
            chances=chances,
        )

    def ngrams(self) -> Drafter:
        """Return a drafter from n-grams of the text and of the lookup texts."""
        return self._answer_drafts.ngrams(self._options.drafting, branches=self.n_branches_max > 1)

    def chances(self, settings: AnswerSettings | None = None) -> MutableMapping[str, Chances]:
        """Return the acceptance statistics of the present draft with an answer's samplers, by origin."""
        return self._answer_drafts.chances(settings or self.settings)


def _now() -> datetime.datetime:
    return datetime.datetime.now().astimezone()
