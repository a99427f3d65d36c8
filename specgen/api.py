"""Generate text from Python: open a target and its draft, then ask for answers (docs/python.md)."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from specgen.errors import UsageError
from specgen.events import CommittedEvent, Event
from specgen.options import (
    ContextOptions,
    Contexts,
    DraftOptions,
    GenerationOptions,
    Grammar,
    KernelChoice,
    KernelOptions,
    SamplerOptions,
    staged,
)
from specgen.session.calibration import calibrate
from specgen.session.choose_models import find_models
from specgen.session.engine import Engine
from specgen.session.open import Reporter, WantedSession, open_session, start_kernels
from specgen.session.prompts import Prompt
from specgen.session.prompts.template import Message
from specgen.session.request import Request
from specgen.session.session import Session
from specgen.text.grammar.json_schema import schema_grammar

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: The prompt of an answer: a user's message, a conversation, or tokens.
Asked: TypeAlias = "str | Sequence[Message] | Prompt"


class AnswerOptions(TypedDict, total=False):
    """The options of one answer. An option that is left out has the value that was given to `load`."""

    max_tokens: int  # if negative, the answer continues until the text ends or the context is full
    stop: Sequence[str]  # strings that end the answer; they are not part of it
    temperature: float  # 0 chooses the most likely token each time
    seed: int  # the same seed gives the same text
    sampling: SamplerOptions  # all samplers; `temperature` and `seed` change these
    grammar: str  # a grammar (GBNF) that the answer follows
    json_schema: str | Mapping[str, Any]  # a JSON schema that the answer follows
    ignore_eos: bool  # never choose an end-of-text token
    logprobs: (
        int  # report the log-probability of each token, and of this many of the most likely ones
    )
    system: str  # a system message before a prompt that is a text
    # whether the text is a user's turn in the model's chat template, if it has one, or is continued
    chat: bool


def load(
    target: str | Path,
    draft: str | Path | Sequence[str | Path] | None = None,
    *,
    n_ctx: int | None = None,
    n_parallel: int = 1,
    sampling: SamplerOptions | None = None,
    generation: GenerationOptions | None = None,
    drafting: DraftOptions | None = None,
    context: ContextOptions | None = None,
    draft_context: ContextOptions | None = None,
    kernels: KernelChoice = "auto",
    note: Callable[[str], None] = lambda _text: None,
) -> Model:
    """Load a target and its draft. Close the result, or use it as a context manager.

    `target` is a GGUF file, a name from `specgen models list`, or ``hf:USER/REPO:QUANT`` on the
    Hugging Face hub, and is downloaded if it is not on this disk. `draft` is also a file or a name,
    or ``ngram``, or ``none``; None chooses one as `specgen run` does, and in a list each drafts for
    the one before it. Up to `n_parallel` answers are generated at once, each in a context of
    `n_ctx` tokens (by default 4096, or what the target was trained with if that is smaller). `note`
    receives what the command line would print, for example why a draft was chosen.

    Raise `ModelFileError`, `PairError`, `UnknownModelError`, `FetchError`, `MemoryLimitError` or
    `UsageError`.
    """
    drafts = [draft] if isinstance(draft, (str, Path)) else list(draft or ())
    sources = find_models(staged(str(target), [str(each) for each in drafts], None), quiet=True)
    wanted = WantedSession.of(
        sources,
        sampling=sampling or SamplerOptions(),
        drafting=drafting or DraftOptions(),
        answer=generation or GenerationOptions(),
        contexts=Contexts(context or ContextOptions(), draft_context or ContextOptions()),
    )
    _, kernel_note = start_kernels(KernelOptions(kernels))
    if kernel_note is not None:
        note(kernel_note)
    with contextlib.ExitStack() as on_error:
        session = open_session(wanted, Reporter(note), clock=time.perf_counter)
        on_error.callback(session.close)
        news = calibrate(session)
        engine = Engine(session, n_parallel=n_parallel, n_ctx=n_ctx)
        engine.notify(news)
        on_error.pop_all()
    return Model(session, engine)


class Model:
    """A target and its draft, ready to answer. `load` makes it.

    Several threads may call it; one at a time decodes, for the answers of all.
    """

    def __init__(self, session: Session, engine: Engine) -> None:
        self._loaded = session
        #: The engine that makes the answers, for callers that step it themselves.
        self.engine = engine

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free all memory, and save what was learnt about the models. Answers that are not done
        fail.
        """
        self.engine.close()
        self._loaded.measurements.save()
        self._loaded.close()

    @property
    def target(self) -> str:
        """The target's file name."""
        return self._loaded.target.name

    @property
    def draft(self) -> str:
        """The draft: a model's file name, ``ngram`` or ``none``."""
        return self._loaded.draft_name

    def generate(self, prompt: Asked, **options: Unpack[AnswerOptions]) -> Request:
        """Return one whole answer: its `text`, and its figures in `finished`. Raise what ends it
        early, and `PromptError` or `UsageError` if the prompt or the options are not valid.
        """
        answer = self.submit(prompt, **options)
        for _ in self.engine.stream(answer):
            pass
        return answer

    def stream(self, prompt: Asked, **options: Unpack[AnswerOptions]) -> Iterator[str]:
        """Yield the text of one answer in pieces, as it is generated."""
        for event in self.events(prompt, **options):
            if isinstance(event, CommittedEvent) and event.text:
                yield event.text

    def events(self, prompt: Asked, **options: Unpack[AnswerOptions]) -> Iterator[Event]:
        """Yield the events of one answer as it is made: drafts, verdicts, tokens, figures."""
        return self.engine.stream(self.submit(prompt, **options))

    def generate_all(
        self, prompts: Iterable[Asked], **options: Unpack[AnswerOptions]
    ) -> list[Request]:
        """Return the answers to several prompts, in their order. One that fails has the error as
        its `failure`.
        """
        answers = [self.submit(prompt, **options) for prompt in prompts]
        while not all(answer.is_done for answer in answers):
            self.engine.step()
        return answers

    def submit(self, prompt: Asked, **options: Unpack[AnswerOptions]) -> Request:
        """Ask for an answer. It is made by `engine.step`, or while the caller waits for any other
        answer.
        """
        system, chat = options.get("system"), options.get("chat")
        if isinstance(prompt, str):
            prompt = self._loaded.prompts.of_text(prompt, chat=chat, system=system)
        elif system is not None or chat is not None:
            raise UsageError("system and chat need a prompt that is a text")
        elif not isinstance(prompt, Prompt):
            prompt = self._loaded.prompts.of_messages(prompt)
        return self.engine.insert(
            prompt, sampling=self._sampling(options), generation=self._generation(options)
        )

    def cancel(self, answer: Request) -> None:
        """End an answer, at the next step if it has begun. It keeps the text that it has until
        then.
        """
        self.engine.cancel(answer)

    def _sampling(self, options: AnswerOptions) -> SamplerOptions:
        sampling = options.get("sampling", self._loaded.options.sampler)
        return replace(sampling, **_given(options, "temperature", "seed"))

    def _generation(self, options: AnswerOptions) -> GenerationOptions:
        given = _given(options, "max_tokens", "ignore_eos", "logprobs")
        if "grammar" in options and "json_schema" in options:
            raise UsageError("grammar and json_schema exclude each other")
        if "grammar" in options:
            given["grammar"] = Grammar("gbnf", options["grammar"])
        if (schema := options.get("json_schema")) is not None:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            given["grammar"] = schema_grammar(text)
        if "stop" in options:
            given["stop"] = tuple(options["stop"])
        generation = replace(self._loaded.options.generation, **given)
        if generation.grammar is not None and generation.ignore_eos:
            raise UsageError("ignore_eos and a grammar, whose text ends, exclude each other")
        return generation


def _given(options: AnswerOptions, *names: str) -> dict[str, Any]:
    """Return those of an answer's options that were given, by their names."""
    return {name: value for name, value in options.items() if name in names}
