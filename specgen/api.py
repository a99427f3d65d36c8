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
from specgen.system.folders import note_about_folders
from specgen.text.grammar.json_schema import schema_grammar

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: The prompt for an answer: a user's message, a conversation, or a finished `Prompt`.
Asked: TypeAlias = "str | Sequence[Message] | Prompt"


class AnswerOptions(TypedDict, total=False):
    """The options of one answer. Options that are left out are those that were given to `load`."""

    #: The maximum number of tokens; if negative, there is no limit but the context size.
    max_tokens: int
    #: Strings that end the answer. They are not part of it.
    stop: Sequence[str]
    #: The temperature of sampling; 0 chooses the most likely token each time.
    temperature: float
    #: The seed of sampling: the same seed gives the same text.
    seed: int
    #: The options of all samplers; `temperature` and `seed` take precedence.
    sampling: SamplerOptions
    #: A grammar (GBNF) that the answer follows.
    grammar: str
    #: A JSON schema that the answer follows.
    json_schema: str | Mapping[str, Any]
    #: Whether to never choose an end-of-text token.
    ignore_eos: bool
    #: Report the log-probability of each token, and of this many of the most likely ones.
    logprobs: int
    #: A system message; the prompt must be a text.
    system: str
    #: Whether a text is a user's turn in the model's chat template (True) or is continued as it is
    #: (False). By default, the template is used if the model has one.
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
            Hugging Face hub. Models that are not on this disk are downloaded.
        draft: A file, a name or a hub reference as for the target, ``ngram``, or ``none``. In a
            list, each draft drafts for the one before it. None chooses a draft as `specgen run`
            does.
        n_ctx: The maximum number of tokens of a prompt and its answer. None is 4096, or the size
            that the target was trained with if that is smaller.
        n_parallel: The number of answers that can be generated at once, each in a context of
            `n_ctx` tokens.
        sampling: How tokens are chosen.
        generation: When an answer ends.
        drafting: How much is drafted, and how drafts are verified.
        context: How the target is loaded and its context is made.
        draft_context: The same for the draft.
        kernels: Which CPU kernels are used.
        note: Receives the notes that the command line would print, such as why a draft was chosen.

    Raises:
        ModelFileError: If a file cannot be used.
        PairError: If the draft cannot draft for the target.
        UnknownModelError: If a name is unknown.
        FetchError: If a model cannot be downloaded.
        MemoryLimitError: If a model does not fit into memory.
        UsageError: If an option is invalid.
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
    for each in (note_about_folders(), kernel_note):
        if each is not None:
            note(each)
    with contextlib.ExitStack() as on_error:
        session = open_session(wanted, Reporter(note), clock=time.perf_counter)
        on_error.callback(session.close)
        calibration_notice = calibrate(session)
        engine = Engine(session, n_parallel=n_parallel, n_ctx=n_ctx)
        engine.notify(calibration_notice)
        on_error.pop_all()
    return Model(session, engine)


class Model:
    """A target and its draft, ready to generate answers. `load` makes it.

    It may be used by several threads: one at a time decodes, for the answers of all of them.
    """

    def __init__(self, session: Session, engine: Engine) -> None:
        self._session = session
        #: The engine that generates the answers, for callers that step it themselves.
        self.engine = engine

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free all memory, and save measurements. Unfinished answers fail with `BackendError`."""
        self.engine.close()
        self._session.measurements.save()
        self._session.close()

    @property
    def target(self) -> str:
        """The target's file name."""
        return self._session.target.name

    @property
    def draft(self) -> str:
        """The name of the draft: a model's file name, ``ngram`` or ``none``."""
        return self._session.draft_name

    def generate(self, prompt: Asked, **options: Unpack[AnswerOptions]) -> Request:
        """Generate one answer, and return it when it is complete.

        Returns:
            The request, with the answer as `text`, and its figures in `finished`.

        Raises:
            PromptError: If the prompt is empty, too long, or refused by the chat template.
            UsageError: If an option is invalid.
            SpecgenError: If generating the answer failed.
        """
        answer = self.submit(prompt, **options)
        for _ in self.engine.stream(answer):
            pass
        return answer

    def stream(self, prompt: Asked, **options: Unpack[AnswerOptions]) -> Iterator[str]:
        """Yield the text of one answer in pieces, as it is generated.

        Raises what `generate` raises.
        """
        for event in self.events(prompt, **options):
            if isinstance(event, CommittedEvent) and event.text:
                yield event.text

    def events(self, prompt: Asked, **options: Unpack[AnswerOptions]) -> Iterator[Event]:
        """Yield the events of one answer as it is generated: drafts, verdicts, tokens, figures.

        Raises what `generate` raises.
        """
        return self.engine.stream(self.submit(prompt, **options))

    def generate_all(
        self, prompts: Iterable[Asked], **options: Unpack[AnswerOptions]
    ) -> list[Request]:
        """Generate the answers to several prompts, and return them in the order of the prompts.

        An answer that failed has the error as its `failure`; the others are not affected.

        Raises:
            PromptError: If a prompt is empty, too long, or refused by the chat template.
            UsageError: If an option is invalid.
        """
        answers = [self.submit(prompt, **options) for prompt in prompts]
        while not all(answer.is_done for answer in answers):
            self.engine.step()
        return answers

    def submit(self, prompt: Asked, **options: Unpack[AnswerOptions]) -> Request:
        """Queue a request for an answer, and return it at once.

        The answer is generated by calls of `engine.step`, including those by callers that wait for
        other answers.

        Raises:
            PromptError: If the prompt is empty, too long, or refused by the chat template.
            UsageError: If an option is invalid.
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
        """End an answer with the text that it has so far.

        An answer that has begun ends at the next step.
        """
        self.engine.cancel(answer)

    def _sampling(self, options: AnswerOptions) -> SamplerOptions:
        """Return the sampling options of an answer."""
        sampling = options.get("sampling", self._session.options.sampler)
        return replace(sampling, **_given(options, "temperature", "seed"))

    def _generation(self, options: AnswerOptions) -> GenerationOptions:
        """Return the options about when an answer ends and which form it has.

        Raises:
            UsageError: If options exclude each other, or the schema is invalid.
        """
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
    """Return the options with these names that the caller gave."""
    return {name: value for name, value in options.items() if name in names}
