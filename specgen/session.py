"""From files and options to a stream of events."""

from __future__ import annotations

import contextlib
import datetime
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from specgen import chat
from specgen.backend.base import Backend
from specgen.backend.llama import LlamaBackend, LlamaModel
from specgen.drafters import Drafter, ModelDrafter, NgramDrafter
from specgen.errors import ModelFileError, PromptError
from specgen.events import Event, NoticeEvent, PromptEvent
from specgen.generation import Generation
from specgen.loop import Loop
from specgen.options import ContextOptions, DraftOptions, GenerationOptions, SamplerOptions
from specgen.pair import check_pair
from specgen.policy import FixedPolicy
from specgen.verify import AutoVerifier

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
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            self._target_model = self._load(options.target, options.target_context)
            if isinstance(options.draft, Path):
                self._open_draft_model(options.draft)
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
        n_ctx = self._context_size(len(tokens))
        seed = options.sampler.seed if options.sampler.seed >= 0 else secrets.randbits(32)
        with contextlib.ExitStack() as stack:
            target = stack.enter_context(contextlib.closing(self._target_context(n_ctx)))
            draft = self._draft_context(n_ctx)
            if draft is not None:
                stack.callback(draft.close)
            loop = Loop(target, self._clock, interrupted)
            generation = self._generation(tokens, n_ctx, target, draft, seed)
            yield PromptEvent(
                sequence=0,
                time_s=loop.now_s,
                text=prompt,
                n_prompt_tokens=len(tokens),
                target=self._target_model.name,
                draft=self.draft_name,
                n_ctx=n_ctx,
                temperature=options.sampler.temperature,
                top_k=options.sampler.top_k,
                top_p=options.sampler.top_p,
                min_p=options.sampler.min_p,
                seed=seed,
            )
            for message in self._notices(target, n_ctx):
                yield NoticeEvent(sequence=0, time_s=loop.now_s, message=message)
            yield from loop.start(generation)
            while generation.finish_reason is None:
                yield from loop.round([generation])
            yield from loop.finish(generation, estimate_gain=estimate_gain)

    def _load(self, path: Path, context: ContextOptions) -> LlamaModel:
        model = LlamaModel(path, n_gpu_layers=context.n_gpu_layers)
        self._resources.callback(model.close)
        return model

    def _open_draft_model(self, path: Path) -> None:
        draft = self._load(path, self._options.draft_context)
        if not draft.can_roll_back:
            raise ModelFileError(
                f"{path}: a recurrent model cannot take tokens back, so it cannot draft",
                hint="take another draft, or --draft ngram",
            )
        self._n_shared_tokens = check_pair(
            self._target_model.vocabulary,
            draft.vocabulary,
            self._target_model.name,
            draft.name,
        )
        self._draft_model = draft

    def _context_size(self, n_prompt: int) -> int:
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

    def _target_context(self, n_ctx: int) -> LlamaBackend:
        return LlamaBackend(
            self._target_model,
            self._options.target_context,
            n_ctx=n_ctx,
            clock=self._clock,
            n_outputs=1 + max(0, self._options.drafting.max_tokens),
        )

    def _draft_context(self, n_ctx: int) -> LlamaBackend | None:
        if self._draft_model is None or not self._target_model.can_roll_back:
            return None
        n_train = self._draft_model.n_ctx_train
        return LlamaBackend(
            self._draft_model,
            self._options.draft_context,
            n_ctx=min(n_ctx, n_train) if n_train > 0 else n_ctx,
            clock=self._clock,
        )

    def _generation(
        self, tokens: list[int], n_ctx: int, target: Backend, draft: Backend | None, seed: int
    ) -> Generation:
        sampler, drafting = self._options.sampler, self._options.drafting
        # The draft draws from a stream of its own: what it draws must not move the target's.
        target_seed, draft_seed = np.random.SeedSequence(seed).spawn(2)
        drafter: Drafter | None = None
        if draft is not None:
            ignore_eos = self._options.generation.ignore_eos
            drafter = ModelDrafter(
                draft,
                sampler,
                np.random.default_rng(draft_seed),
                n_shared_tokens=self._n_shared_tokens,
                excluded=target.vocabulary.end_tokens() if ignore_eos else (),
            )
        elif self._options.draft == "ngram" and target.can_roll_back:
            drafter = NgramDrafter(drafting.ngram_min, drafting.ngram_max)
        return Generation(
            vocabulary=target.vocabulary,
            prompt=tokens,
            options=self._options.generation,
            n_ctx=n_ctx,
            drafter=drafter,
            policy=FixedPolicy(drafting),
            verifier=AutoVerifier(sampler),
            rng=np.random.default_rng(target_seed),
        )

    def _notices(self, target: Backend, n_ctx: int) -> Iterator[str]:
        if self._options.draft != "none" and not target.can_roll_back:
            yield (
                f"{self._target_model.name} is a recurrent model, whose cache cannot take "
                "refused tokens back: decoding without a draft"
            )
        for model in (self._target_model, self._draft_model):
            if model is not None and 0 < model.n_ctx_train < n_ctx:
                what = "drafting ends there" if model is self._draft_model else "expect poor text"
                yield (
                    f"{model.name} was trained with {model.n_ctx_train} tokens of context, "
                    f"{n_ctx} are asked for: {what}"
                )
