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
from typing import Any, Literal, TypeAlias

import numpy as np

from specgen import chat
from specgen.backend.base import Backend
from specgen.backend.llama import LlamaBackend, LlamaGrammar, LlamaModel
from specgen.drafters import Drafter, ModelDrafter, NgramDrafter
from specgen.errors import PromptError, UsageError
from specgen.events import Event, NoticeEvent, PromptEvent
from specgen.generation import Generation
from specgen.grammar import GrammarState
from specgen.loop import Loop
from specgen.options import (
    DRAFT_TEMPERATURE,
    ContextOptions,
    DraftOptions,
    GenerationOptions,
    SamplerOptions,
)
from specgen.pair import check_pair
from specgen.policy import FixedPolicy
from specgen.sampling import DryBreakers, Sampler
from specgen.state import Shaper, TextState
from specgen.verify import make_verifier

#: What drafts: a model file, n-grams of the text so far, or nothing.
DraftSource: TypeAlias = Path | Literal["ngram", "none"]

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
        self._draft_model: LlamaModel | None = None
        self._n_shared_tokens = 0
        self._grammar: GrammarState | None = None
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            self._target_model = self._load(options.target, options.target_context)
            if isinstance(options.draft, Path):
                self._open_draft_model(options.draft)
            vocabulary = self._target_model.vocabulary
            if options.generation.grammar is not None:
                self._grammar = LlamaGrammar(vocabulary, options.generation.grammar).start
            self._make_samplers()
            on_error.pop_all()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the models. May be called twice."""
        self._resources.close()

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
        return self._draft_model.name if self._draft_model else str(self._options.draft)

    def chat_prompt(self, text: str, system: str | None, now: datetime.datetime) -> str | None:
        """`text` as a user's turn in the model's own template; None if it has no template."""
        template = self._target_model.chat_template()
        if template is None:
            return None
        vocabulary = self._target_model.vocabulary
        special = vocabulary.special_tokens()
        messages = [chat.Message("user", text)]
        if system is not None:
            messages.insert(0, chat.Message("system", system))
        return chat.render(
            template,
            messages,
            bos_token=vocabulary.control_text(special["bos"]),
            eos_token=vocabulary.control_text(special["eos"]),
            now=now,
        )

    def tokenize(self, prompt: str, *, parse_special: bool) -> list[int]:
        """The prompt's tokens. Raises `PromptError` if there are none."""
        vocabulary = self._target_model.vocabulary
        bos = vocabulary.control_text(vocabulary.special_tokens()["bos"])
        # A chat template may have written the beginning-of-text token already.
        add_special = not (parse_special and bos and prompt.startswith(bos))
        tokens = vocabulary.tokenize(prompt, add_special=add_special, parse_special=parse_special)
        if not tokens:
            raise PromptError("the prompt is empty", hint="give some text to continue")
        return tokens

    def generate(
        self,
        prompt: str,
        *,
        parse_special: bool,
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
        tokens = self.tokenize(prompt, parse_special=parse_special)
        n_ctx = self.context_size(len(tokens))
        seed = options.sampler.seed if options.sampler.seed >= 0 else secrets.randbits(32)
        with self.contexts(n_ctx) as (target, draft):
            loop = Loop(target, self._clock, interrupted)
            generation = self.generation(tokens, n_ctx, draft, seed)
            yield PromptEvent(
                sequence=0,
                time_s=loop.now_s,
                text=prompt,
                n_prompt_tokens=len(tokens),
                target=self._target_model.name,
                draft=self.draft_name,
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

    def _load(self, path: Path, context: ContextOptions) -> LlamaModel:
        model = LlamaModel(path, n_gpu_layers=context.n_gpu_layers)
        self._resources.callback(model.close)
        return model

    def _open_draft_model(self, path: Path) -> None:
        draft = self._load(path, self._options.draft_context)
        self._n_shared_tokens = check_pair(
            self._target_model.vocabulary,
            draft.vocabulary,
            self._target_model.name,
            draft.name,
        )
        self._draft_model = draft

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
            if drafts and self._draft_model is not None:
                n_train = self._draft_model.n_ctx_train
                draft = LlamaBackend(
                    self._draft_model,
                    self._options.draft_context,
                    n_ctx=min(n_ctx, n_train) if n_train > 0 else n_ctx,
                    clock=self._clock,
                )
                stack.callback(draft.close)
            yield target, draft

    def text(self, prompt: Sequence[int]) -> TextState:
        """A text that begins with `prompt`, and its grammar at the start."""
        return TextState(prompt, self._grammar)

    def shaper(self, text: TextState) -> Shaper:
        """The target's samplers over a text."""
        return Shaper(self._sampler, text)

    def generation(
        self,
        tokens: Sequence[int],
        n_ctx: int,
        draft: Backend | None,
        seed: int,
        *,
        plain: bool = False,
        make_shaper: Callable[[Sampler, TextState], Shaper] = Shaper,
    ) -> Generation:
        """An answer to begin after `tokens`; `draft` is the draft model's context, if there is
        one. With `plain`, nothing drafts."""
        drafting = self._options.drafting
        # The draft draws from a stream of its own: what it draws must not move the target's.
        target_seed, draft_seed = np.random.SeedSequence(seed).spawn(2)
        state = self.text(tokens)
        drafter: Drafter | None = None
        if plain:
            pass
        elif draft is not None:
            drafter = ModelDrafter(
                draft,
                make_shaper(self._draft_sampler, state),
                np.random.default_rng(draft_seed),
                draws=self._draws,
                n_shared_tokens=self._n_shared_tokens,
            )
        elif self._options.draft == "ngram":
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

    def _make_samplers(self) -> None:
        """The target's chain of samplers, and the draft's, which is the same but for what
        makes its drafts likelier to be accepted."""
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
        breakers = None
        if sampler.dry_multiplier > 0.0:
            breakers = DryBreakers.of(vocabulary, sampler.dry_breakers)
        self._sampler = Sampler(sampler, breakers)
        self._draws = (
            self._sampler.is_random and make_verifier(options.drafting.verifier).wants_draws
        )
        shaped = _draft_sampling(sampler, options.drafting, draws=self._draws)
        self._draft_sampler = Sampler(shaped, breakers)

    def _notices(self, n_ctx: int) -> Iterator[str]:
        for model in (self._target_model, self._draft_model):
            if model is not None and 0 < model.n_ctx_train < n_ctx:
                what = "drafting ends there" if model is self._draft_model else "expect poor text"
                yield (
                    f"{model.name} was trained with {model.n_ctx_train} tokens of context, "
                    f"{n_ctx} are asked for: {what}"
                )


def _draft_sampling(
    target: SamplerOptions, drafting: DraftOptions, *, draws: bool
) -> SamplerOptions:
    """The samplers of a draft model: the target's, shaped so that more of its drafts is
    accepted. Penalties and biases stay, since they decide what the target can accept."""
    if not draws:  # the most likely text is accepted most
        # A temperature that is not among the samplers, or a dynamic one, would not be 0.
        order = tuple(dict.fromkeys((*target.samplers, "temperature")))
        return replace(
            target, temperature=0.0, dynatemp_range=0.0, xtc_probability=0.0, samplers=order
        )
    temperature, top_k = drafting.temperature, drafting.top_k
    if temperature is None:
        temperature = DRAFT_TEMPERATURE * target.temperature
    return replace(target, temperature=temperature, top_k=target.top_k if top_k is None else top_k)


def _settings(options: SamplerOptions) -> dict[str, Any]:
    """The samplers' options as JSON can have them."""
    settings = dataclasses.asdict(options)
    # JSON has no infinity.
    settings["logit_bias"] = [
        [token, bias if math.isfinite(bias) else str(bias)] for token, bias in options.logit_bias
    ]
    return settings
