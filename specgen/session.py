"""From files and options to a stream of events."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from specgen.backend.base import Backend
from specgen.backend.llama import LlamaBackend, LlamaGrammar, LlamaModel
from specgen.drafters import CascadeDrafter, Drafter, NgramDrafter
from specgen.drafting import DraftModel, MakeShaper
from specgen.errors import PromptError, UsageError
from specgen.events import Event, NoticeEvent, PromptEvent
from specgen.generation import Generation
from specgen.grammar import GrammarState
from specgen.loop import Loop
from specgen.options import (
    ContextOptions,
    DraftOptions,
    DraftSource,
    GenerationOptions,
    SamplerOptions,
)
from specgen.policy import FixedPolicy
from specgen.prompting import Prompt, chat_text, draft_chat_tokens, messages_of, tokenize
from specgen.sampling import DryBreakers, Sampler
from specgen.state import Shaper, TextState
from specgen.verify import make_verifier

__all__ = ["DraftSource", "Prompt", "Session", "SessionOptions"]

#: Room for an answer of unlimited length where no context size is given, in tokens.
_ANSWER_ROOM = 4096
#: Context sizes are rounded up to a multiple of this, as llama.cpp does.
_CONTEXT_STEP = 256


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Everything that decides what a session does."""

    target: Path
    draft: DraftSource = "ngram"
    sampler: SamplerOptions = field(default_factory=SamplerOptions)
    drafting: DraftOptions = field(default_factory=DraftOptions)
    generation: GenerationOptions = field(default_factory=GenerationOptions)
    target_context: ContextOptions = field(default_factory=ContextOptions)
    draft_context: ContextOptions = field(default_factory=ContextOptions)


class Session:
    """A target and what drafts for it, loaded. Use it as a context manager.

    Opening it raises `ModelFileError` or `PairError`; the models' weights stay loaded until
    it is closed, contexts are made for each generation.
    """

    def __init__(self, options: SessionOptions, clock: Callable[[], float]) -> None:
        self._options = options
        self._clock = clock
        self._resources = contextlib.ExitStack()
        self._draft_source: DraftSource = "none"
        self._draft: DraftModel | None = None
        self._grammar: GrammarState | None = None
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            self._target_model = LlamaModel(
                options.target, n_gpu_layers=options.target_context.n_gpu_layers
            )
            self._resources.callback(self._target_model.close)
            self._make_sampler()
            self.change_draft(options.draft)
            vocabulary = self._target_model.vocabulary
            if options.generation.grammar is not None:
                self._grammar = LlamaGrammar(vocabulary, options.generation.grammar).start
            on_error.pop_all()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the models. May be called twice."""
        self._close_draft()
        self._resources.close()

    def change_draft(self, source: DraftSource) -> None:
        """Let another draft take the place of the present one, which is closed; there must be
        no context of it. Raises `ModelFileError` or `PairError`; there is then no draft."""
        self._close_draft()
        if isinstance(source, Path):
            options = self._options
            self._draft = DraftModel(
                source,
                self._target_model,
                options.draft_context,
                self._shaped,
                options.drafting,
                options.generation,
                self._breakers,
            )
        self._draft_source = source

    def _close_draft(self) -> None:
        if self._draft is not None:
            self._draft.close()
        self._draft, self._draft_source = None, "none"

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
    def sampler(self) -> Sampler:
        """The target's samplers."""
        return self._sampler

    @property
    def n_rows_max(self) -> int:
        """The most rows of a round's batch: the draft, and the token before it."""
        return 1 + max(0, self._options.drafting.max_tokens)

    @property
    def draft_name(self) -> str:
        return self._draft.model.name if self._draft else str(self._draft_source)

    def prompt(
        self,
        text: str,
        *,
        chat: bool | None = None,
        system: str | None = None,
        now: datetime.datetime | None = None,
    ) -> Prompt:
        """What an answer to `text` begins after.

        With `chat`, the text is a user's turn in the target's own template, and in that of a
        draft with another vocabulary; without, it is continued as it is; None takes the
        template if there is one. Some templates write the date: `now`, by default the present
        time. Names of control tokens in the text are read as these, as llama.cpp does.

        Raises `UsageError` if there is no template for `chat` or `system`, `PromptError` if the
        prompt is empty or the template does not accept it.
        """
        model = self._target_model
        messages = messages_of(text, system)
        now = now or datetime.datetime.now().astimezone()
        whole = chat_text(model, messages, now) if chat is not False else None
        if whole is None and (chat or system is not None):
            wanted = "--chat" if chat else "--system"
            raise UsageError(
                f"{model.name} has no chat template, which {wanted} needs",
                hint=f"leave {wanted} out: the prompt is then continued as it is",
            )
        shown = text if whole is None else whole
        tokens = tokenize(model.vocabulary, shown, parse_special=True)
        if not tokens:
            raise PromptError("the prompt is empty", hint="give some text to continue")
        draft_tokens = None
        if whole is not None and self._draft is not None and self._draft.has_own_vocabulary:
            draft_tokens = draft_chat_tokens(self._draft.model, messages, now)
        return Prompt(shown, tuple(tokens), draft_tokens)

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
        if the context does not fit the memory.
        """
        options = self._options
        n_ctx = self.context_size(len(prompt.tokens))
        seed = options.sampler.seed if options.sampler.seed >= 0 else secrets.randbits(32)
        with self.contexts(n_ctx) as (target, draft):
            loop = Loop(target, self._clock, interrupted)
            generation = self.generation(prompt, n_ctx, draft, seed)
            yield PromptEvent(
                sequence=0,
                time_s=loop.now_s,
                text=prompt.text,
                n_prompt_tokens=len(prompt.tokens),
                target=self._target_model.name,
                draft=self.draft_name,
                translation=self._draft.translated if self._draft else None,
                n_ctx=n_ctx,
                sampler=_settings(replace(options.sampler, seed=seed)),
                verifier=options.drafting.verifier,
                grammar=options.generation.grammar,
            )
            for message in self._notices(n_ctx):
                yield NoticeEvent(sequence=0, time_s=loop.now_s, message=message)
            yield from loop.start(generation)
            while not generation.is_finished:
                yield from loop.round([generation])
            yield from loop.finish(generation, estimate_gain=estimate_gain)

    def context_size(self, n_prompt: int) -> int:
        """The target's context in tokens. Raises `PromptError` if the prompt is longer."""
        n_train = self._target_model.n_ctx_train
        wanted = self._options.target_context.n_ctx
        if wanted is None:
            n_answer = self._options.generation.max_tokens
            n_ctx = n_prompt + (n_answer if n_answer >= 0 else _ANSWER_ROOM)
            n_ctx += self._options.drafting.max_tokens
            n_ctx = -(-n_ctx // _CONTEXT_STEP) * _CONTEXT_STEP
            n_ctx = min(n_ctx, n_train) if n_train > 0 else n_ctx
            hint = f"{self._target_model.name} was trained with a context of {n_train}"
        else:
            n_ctx = wanted or n_train or _ANSWER_ROOM
            hint = f"take --ctx-size {n_prompt + 1} or more, or a shorter prompt"
        if n_prompt > n_ctx:
            raise PromptError(f"the prompt has {n_prompt} tokens, the context {n_ctx}", hint)
        return n_ctx

    @contextlib.contextmanager
    def contexts(
        self, n_ctx: int, *, drafts: bool = True
    ) -> Iterator[tuple[LlamaBackend, LlamaBackend | None]]:
        """Contexts of n_ctx tokens of the target and, if there is one and `drafts` asks for
        it, of the draft model. Raises `MemoryLimitError`."""
        with contextlib.ExitStack() as stack:
            target = LlamaBackend(
                self._target_model,
                self._options.target_context,
                n_ctx=n_ctx,
                clock=self._clock,
                n_outputs=self.n_rows_max,
            )
            stack.callback(target.close)
            draft = None
            if drafts and self._draft is not None:
                draft = LlamaBackend(
                    self._draft.model,
                    self._options.draft_context,
                    n_ctx=self._draft_context_size(n_ctx),
                    clock=self._clock,
                )
                stack.callback(draft.close)
            yield target, draft

    def _draft_context_size(self, n_ctx: int) -> int:
        """The draft's context in tokens, for a context of n_ctx tokens of the target. A draft
        whose context is too small for a text sees the latest part of it."""
        assert self._draft is not None
        if self._draft.has_own_vocabulary:  # it may need more tokens for the same text
            n_ctx = -(-n_ctx * 3 // 2 // _CONTEXT_STEP) * _CONTEXT_STEP
        n_train = self._draft.model.n_ctx_train
        return min(n_ctx, n_train) if n_train > 0 else n_ctx

    def text(self, prompt: Sequence[int]) -> TextState:
        """A text that begins with `prompt`, and its grammar at the start."""
        return TextState(prompt, self._grammar)

    def shaper(self, text: TextState) -> Shaper:
        """The target's samplers over a text."""
        return Shaper(self._sampler, text)

    def generation(
        self,
        prompt: Prompt,
        n_ctx: int,
        draft: Backend | None,
        seed: int,
        *,
        plain: bool = False,
        make_shaper: MakeShaper = Shaper,
    ) -> Generation:
        """An answer to begin after `prompt`; `draft` is the draft model's context, if there is
        one. With `plain`, nothing drafts."""
        drafting = self._options.drafting
        # The draft draws from a stream of its own: what it draws must not move the target's.
        target_seed, draft_seed = np.random.SeedSequence(seed).spawn(2)
        state = self.text(prompt.tokens)
        drafter: Drafter | None = None
        if plain:
            pass
        elif self._draft is not None and draft is not None:
            rng = np.random.default_rng(draft_seed)
            drafter = self._draft.drafter(prompt, draft, state, rng, make_shaper)
            if drafting.ngrams:
                ngrams = NgramDrafter(drafting.ngram_min, drafting.ngram_max)
                drafter = CascadeDrafter((ngrams, drafter))
        elif self._draft_source == "ngram":
            drafter = NgramDrafter(drafting.ngram_min, drafting.ngram_max)
        return Generation(
            vocabulary=self._target_model.vocabulary,
            options=self._options.generation,
            n_ctx=n_ctx,
            drafter=drafter,
            policy=FixedPolicy(drafting),
            verifier=make_verifier(drafting.verifier),
            shaper=make_shaper(self._sampler, state),
            state=state,
            rng=np.random.default_rng(target_seed),
        )

    def _make_sampler(self) -> None:
        """The target's chain of samplers."""
        options, vocabulary = self._options, self._target_model.vocabulary
        sampler = options.sampler
        for token, _ in sampler.logit_bias:
            if not 0 <= token < vocabulary.n_tokens:
                raise UsageError(
                    f"--logit-bias: there is no token {token}: "
                    f"{self._target_model.name} has {vocabulary.n_tokens}"
                )
        if options.generation.ignore_eos:
            never = tuple((token, -math.inf) for token in vocabulary.end_tokens())
            sampler = replace(sampler, logit_bias=sampler.logit_bias + never)
        self._breakers: DryBreakers | None = None
        if sampler.dry_multiplier > 0.0:
            self._breakers = DryBreakers.of(vocabulary, sampler.dry_breakers)
        self._shaped = sampler
        self._sampler = Sampler(sampler, self._breakers)

    def _notices(self, n_ctx: int) -> Iterator[str]:
        target, n_train = self._target_model, self._target_model.n_ctx_train
        if 0 < n_train < n_ctx:
            yield (
                f"{target.name} was trained with {n_train} tokens of context, "
                f"{n_ctx} are asked for: expect poor text"
            )
        draft = self._draft.model if self._draft else None
        if draft is not None and 0 < draft.n_ctx_train < n_ctx:
            yield (
                f"{draft.name} was trained with {draft.n_ctx_train} tokens of context, "
                f"{n_ctx} are asked for: of a longer text it sees the latest part"
            )


def _settings(options: SamplerOptions) -> dict[str, Any]:
    """The samplers' options as JSON can have them."""
    settings = dataclasses.asdict(options)
    # JSON has no infinity.
    settings["logit_bias"] = [
        [token, bias if math.isfinite(bias) else str(bias)] for token, bias in options.logit_bias
    ]
    return settings
