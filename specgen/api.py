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
    """The options of one answer. One that is left out has the value that was given to `load`."""

    #: The most tokens; if negative, until the text ends or the context is full.
    max_tokens: int
    #: Strings that end the answer; they are not part of it.
    stop: Sequence[str]
    #: 0 chooses the most likely token each time.
    temperature: float
    #: The same seed gives the same text.
    seed: int
    #: All samplers; `temperature` and `seed` change these.
    sampling: SamplerOptions
    #: A grammar (GBNF) that the answer follows.
    grammar: str
    #: A JSON schema that the answer follows.
    json_schema: str | Mapping[str, Any]
    #: Never choose an end-of-text token.
    ignore_eos: bool
    #: Report the log-probability of each token, and of this many of the most likely ones.
    logprobs: int
    #: A system message before a prompt that is a text.
    system: str
    #: Whether the text is a user's turn in the model's chat template, if it has one, or is
    #: continued.
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

    Args:
        target: A GGUF file, a name from `specgen models list`, or ``hf:USER/REPO:QUANT`` on the
            Hugging Face hub. What is not on this disk is downloaded.
        draft: Also a file or a name, or ``ngram``, or ``none``; in a list each drafts for the one
            before it. None chooses one as `specgen run` does.
        n_ctx: The tokens of a prompt and its answer, at most; None is 4096, or what the target was
            trained with if that is smaller.
        n_parallel: How many answers are generated at once, each in a context of `n_ctx` tokens.
        sampling: How tokens are chosen.
        generation: When an answer ends.
        drafting: How much is drafted, and how drafts are judged.
        context: How the target is loaded and its context made.
        draft_context: The same for the draft.
        kernels: What computes on the CPU.
        note: Receives what the command line would print, for example why a draft was chosen.

    Raises:
        ModelFileError: A file cannot be used.
        PairError: The draft cannot draft for the target.
        UnknownModelError: There is no model of this name.
        FetchError: A model cannot be downloaded.
        MemoryLimitError: A model does not fit into memory.
        UsageError: An option is not valid.
    """
    drafts = [draft] if isinstance(draft, (str, Path)) else list(draft or ())
    choice = staged(str(target), [str(each) for each in drafts], None)
    sources = find_models(choice, quiet=True)
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
        self._session = session
        #: The engine that makes the answers, for callers that step it themselves.
        self.engine = engine

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free all memory, and save what was measured. Answers that are not done fail."""
        self.engine.close()
        self._session.measurements.save()
        self._session.close()

    @property
    def target(self) -> str:
        """The target's file name."""
        return self._session.target.name

    @property
    def draft(self) -> str:
        """The draft: a model's file name, ``ngram`` or ``none``."""
        return self._session.draft_name

    def generate(self, prompt: Asked, **options: Unpack[AnswerOptions]) -> Request:
        """Return one whole answer: its `text`, and its figures in `finished`.

        Raises:
            PromptError: The prompt is not valid.
            UsageError: An option is not valid.
            SpecgenError: What ended the answer early.
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
        """Return the answers to several prompts, in their order.

        One that fails has the error as its `failure`.
        """
        answers = [self.submit(prompt, **options) for prompt in prompts]
        while not all(answer.is_done for answer in answers):
            self.engine.step()
        return answers

    def submit(self, prompt: Asked, **options: Unpack[AnswerOptions]) -> Request:
        """Ask for an answer. `engine.step` makes it, also while a caller waits for another answer.

        Raises:
            PromptError: The prompt is not valid.
            UsageError: An option is not valid.
        """
        system = options.get("system")
        chat = options.get("chat")
        prompts = self._session.prompts
        if isinstance(prompt, str):
            prompt = prompts.of_text(prompt, chat=chat, system=system)
        elif system is not None or chat is not None:
            raise UsageError("system and chat need a prompt that is a text")
        elif not isinstance(prompt, Prompt):
            prompt = prompts.of_messages(prompt)
        return self.engine.insert(
            prompt, sampling=self._sampling(options), generation=self._generation(options)
        )

    def cancel(self, answer: Request) -> None:
        """End an answer, at the next step if it has begun. It keeps the text that it has then."""
        self.engine.cancel(answer)

    def _sampling(self, options: AnswerOptions) -> SamplerOptions:
        sampling = options.get("sampling", self._session.options.sampler)
        return replace(sampling, **_given(options, "temperature", "seed"))

    def _generation(self, options: AnswerOptions) -> GenerationOptions:
        given = _given(options, "max_tokens", "ignore_eos", "logprobs")
        if "grammar" in options and "json_schema" in options:
            raise UsageError("grammar and json_schema exclude each other")
        if "grammar" in options:
            given["grammar"] = Grammar("gbnf", options["grammar"])
        schema = options.get("json_schema")
        if schema is not None:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            given["grammar"] = schema_grammar(text)
        if "stop" in options:
            given["stop"] = tuple(options["stop"])
        generation = replace(self._session.options.generation, **given)
        if generation.grammar is not None and generation.ignore_eos:
            raise UsageError("ignore_eos and a grammar, whose text ends, exclude each other")
        return generation


def _given(options: AnswerOptions, *names: str) -> dict[str, Any]:
    """Return those of an answer's options that were given, by their names."""
    return {name: value for name, value in options.items() if name in names}
