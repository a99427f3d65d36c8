"""A session: loaded models with their options; it makes answers as streams of events."""

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
from specgen.drafters import Drafter
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
    """A target and what drafts for it, loaded. Use it as a context manager.

    Opening it raises `ModelFileError`, `MemoryLimitError` or `PairError`; the weights stay loaded until
    it is closed, contexts are made for each answer of `generate`, and stay in an `Engine`. `memory`
    is what is known of these models on this machine, and learns more; whoever keeps it saves it.
    `tell` is told what else takes seconds while a draft is opened. With `vocabulary_only` the target
    decodes elsewhere: there are contexts of what drafts for it (`draft_contexts`) and no others.
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
        #: What was learnt of the models.
        self.memory = memory if memory is not None else Memory()
        self._clock = clock
        #: Whether other programs took much of the machine when costs were measured.
        self.was_busy = False
        self._n_told = 0
        folder = None
        if options.cache is not None and options.drafting.weights == "auto":
            folder = options.cache / "drafts"
        copies = Copies(folder, self.memory, clock, tell)
        #: What decodes of the models cost, and the options of their contexts.
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
            #: What an answer asks for that says nothing of its own.
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

        Their weights are freed with the last context that was made from them: that of an answer
        which is not at its end is freed when the iterator is. The answer does not go on: the
        iterator raises `BackendError`."""
        self._resources.close()

    def change_draft(self, source: DraftSource) -> None:
        """Let another draft take the place of the present one, which is closed; there must be
        no context of it. Raises `ModelFileError` or `PairError`; there is then no draft."""
        self._drafts.change(source, self._options.drafting)

    def reload_draft(self) -> None:
        """Load the draft model again: it drafts from the weights that it learnt last. There must be
        no context of it. Raises `ModelFileError` or `MemoryLimitError`; there is then no draft."""
        self.change_draft(self._drafts.source)

    def change_drafting(self, drafting: DraftOptions) -> None:
        """Draft by other options from now on. The draft is opened anew; there must be no context
        of it. Raises `ModelFileError` or `PairError`; there is then no draft."""
        if drafting != self._options.drafting:
            self._set_drafting(drafting)
            self.change_draft(self._drafts.source)

    def let_ngrams_draft(self, wanted: bool | None) -> None:
        """Let n-grams draft beside a draft model, or not; None is as the policy has it."""
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
        """Draft models that were compared with copies in this session."""
        return self._drafts.compared

    @property
    def copied(self) -> list[Comparison]:
        """Those of `compared` that draft from their copy, the last one of each model."""
        return self._drafts.copied

    def news_of_copies(self) -> list[str]:
        """What came of copies that draft since this was asked last."""
        news = [comparison.note for comparison in self.copied[self._n_told :]]
        self._n_told = len(self.copied)
        return news

    @property
    def why_chains(self) -> str | None:
        """Why drafts cannot branch here, whatever their shape; None if they can."""
        return self._drafts.why_chains

    @property
    def draft_source(self) -> DraftSource:
        return self._drafts.source

    @property
    def draft_path(self) -> Path | None:
        """The draft model's file; None where no model drafts."""
        return self._drafts.path

    @property
    def draft_model(self) -> LlamaModel | None:
        """The draft model, where one drafts."""
        return self._drafts.model.model if self._drafts.model is not None else None

    @property
    def draft_weights(self) -> Path | None:
        """The file that the draft model drafts from without what it learnt; None where none drafts."""
        return self._drafts.weights

    @property
    def learnt_draft(self) -> Path | None:
        """The weights that the draft model learnt, where it drafts from such."""
        return self._drafts.learnt

    @property
    def drafts_from_hidden_states(self) -> bool:
        """Whether decoder heads draft, which read the target's hidden states."""
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
        """The most rows of a round's batch: the draft, and the token before it."""
        return self._contexts.n_rows_max

    @property
    def n_branches_max(self) -> int:
        """The most branches of a draft: 1 where drafts are chains."""
        return self._contexts.n_branches_max

    @property
    def n_sequences_max(self) -> int:
        """The most sequences of a context that one answer needs."""
        return self._contexts.n_sequences_max

    def context_size(self, n_prompt: int, max_tokens: int | None = None) -> int:
        """The target's context in tokens, for an answer of `max_tokens` (None: of as many as the
        options say). Raises `PromptError` if the prompt is longer."""
        return self._contexts.n_ctx_for(n_prompt, max_tokens)

    @property
    def _contexts(self) -> SessionContexts:
        """The contexts that the present options ask for."""
        return SessionContexts(
            self._options, self._target_model, self._drafts, self.costs, self._clock
        )

    def contexts(
        self, n_ctx: int, *, drafts: bool = True, n_parts: int = 1
    ) -> AbstractContextManager[tuple[LlamaBackend, LlamaBackend | None]]:
        """Contexts of the target and, if there is one and `drafts` asks for it, of the draft model,
        in which `n_parts` answers may be made at once, of n_ctx tokens each with their prompts. They
        are closed at the end of the `with`, by nobody else. Raises `MemoryLimitError`."""
        return self._contexts.opened(n_ctx, drafts=drafts, n_parts=n_parts)

    def helper_contexts(
        self, n_ctx: int, *, n_parts: int = 1
    ) -> AbstractContextManager[tuple[LlamaBackend, ...]]:
        """Contexts of the models that draft for the draft model, for such a context of the target.
        Raises `MemoryLimitError`."""
        return self._drafts.contexts(n_ctx, self.n_rows_max, n_parts=n_parts, first=1)

    def draft_contexts(
        self, n_ctx: int, *, n_parts: int = 1
    ) -> AbstractContextManager[tuple[LlamaBackend, ...]]:
        """Contexts of the draft model and of the models that draft for it, for such a context of
        the target. Raises `MemoryLimitError`."""
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
        """What an answer to `text` begins after; see `text_prompt`. `now` is by default the present
        time. Raises `UsageError`, `PromptError`."""
        own = self._own_draft
        return text_prompt(self._target_model, own, text, chat, system, now or _now())

    def conversation(
        self,
        messages: Sequence[Message],
        *,
        now: datetime.datetime | None = None,
        tools: ToolDefinitions = (),
    ) -> Prompt:
        """What the next turn of a conversation begins after; see `conversation_prompt`. Raises
        `UsageError`, `PromptError`."""
        own = self._own_draft
        return conversation_prompt(self._target_model, own, messages, now or _now(), tools)

    def prompt_of_tokens(self, tokens: Sequence[int]) -> Prompt:
        """A prompt of the target's tokens as they are. Raises `PromptError` if there is none, or one
        that the target does not have."""
        return token_prompt(self._target_model, tokens)

    def infill(self, gap: Gap, n_room: int) -> InfillPrompt:
        """What the text for a gap begins after, in `n_room` tokens at most; see `infill_prompt`. Raises
        `UsageError`."""
        return infill_prompt(self._target_model, self._own_draft, gap, n_room)

    @property
    def _own_draft(self) -> LlamaModel | None:
        """The draft model, where it reads prompts in a vocabulary of its own."""
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
        """The settings of one answer; what is None is the session's. No more is drafted for it in a
        round than the session's options allow. Raises `UsageError` if a token of a bias does not
        exist, the grammar is not one, or a number of drafted tokens is given where drafts have a
        fixed shape."""
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
        """Generate an answer to a prompt, as events; the last one is a `FinishedEvent`.

        `interrupted` is asked between decodes; a yes ends the answer with what there is.
        `estimate_gain` allows a few extra decodes at the end to learn what plain decoding
        costs. Raises `PromptError` if the prompt does not fit the context, `MemoryLimitError`
        if the context does not fit the memory, `BackendError` if the session is closed.
        """
        n_ctx = self.context_size(len(prompt.tokens))
        with Engine(
            self, n_ctx=n_ctx, interrupted=interrupted, estimate_gain=estimate_gain
        ) as engine:
            yield from engine.stream(engine.submit(prompt))

    def translation(self, settings: AnswerSettings) -> Translated | None:
        """How drafts for an answer are translated; None if they need not be."""
        draft = self._drafts.model
        return draft.translated(settings) if draft is not None else None

    def verifier_name(self, settings: AnswerSettings | None = None) -> VerifierName:
        """How drafts for an answer are judged."""
        return (settings or self.settings).verifier

    def keep_text(self, tokens: Sequence[int]) -> None:
        """Keep a finished text for later answers to draft from, if the options ask for that."""
        self._lookups.keep(tokens)

    def keep_answer(self, prompt: Prompt, tokens: Sequence[int]) -> None:
        """Keep a finished text, prompt and answer, for later answers to draft from and for drafts to
        learn from, if the options ask for that. Raises `OutputError` if it cannot be kept for
        learning; it is then kept with the next one."""
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
        """A text that begins with `prompt`, and its grammar at the start."""
        return TextState(prompt, self.settings.grammar)

    def shaper(self, text: TextState) -> Shaper:
        """The target's samplers over a text."""
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
        """An answer of its `index` to begin after `prompt`; `draft` is the draft model's context, if
        there is one, and `helpers` are those of what drafts for it. With `plain`, nothing drafts.
        `settings` are the answer's own, by default the session's, and `part` is the answer's part of
        all contexts. What is learnt of drafts in an answer that `learns_alone` is forgotten with it.
        """
        settings = settings or self.settings
        drafts = self._answer_drafts
        chances = drafts.chances_of_one_answer if learns_alone else self.memory.chances
        # The draft draws from a stream of its own: what it draws must not move the target's.
        target_seed, draft_seed = np.random.SeedSequence(seed).spawn(2)
        state = TextState(prompt.tokens, settings.grammar)
        drafter: Drafter | None = None
        hidden: LastHidden | None = None
        if not plain:
            drafter, hidden = drafts.drafter(
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
            drafter=drafter,
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
        """What the draft model drafts, alone, in contexts of it and of what drafts for it."""
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
        """N-grams of the text, and of the texts that are looked up."""
        return self._answer_drafts.ngrams(self._options.drafting, branches=self.n_branches_max > 1)

    def chances(self, settings: AnswerSettings | None = None) -> MutableMapping[str, Chances]:
        """What is known of the present draft's chances with an answer's samplers, by origin."""
        return self._answer_drafts.chances(settings or self.settings)


def _now() -> datetime.datetime:
    return datetime.datetime.now().astimezone()
