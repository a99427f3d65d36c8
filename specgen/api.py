"""Generate text from Python: open a target and its draft, then ask for answers (docs/python.md)."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeVar, cast

from specgen.errors import PromptError, SpecgenError, UsageError
from specgen.events import CommittedEvent, Event
from specgen.option_values import (
    by_field_names,
    checked_value,
    field_names_of,
    required,
    shown_value,
)
from specgen.options import (
    ContextOptions,
    Contexts,
    DraftOptions,
    GenerationOptions,
    Grammar,
    KernelChoice,
    KernelOptions,
    SamplerName,
    SamplerOptions,
    staged,
)
from specgen.session.async_engine import AsyncEngine
from specgen.session.calibration import calibrate
from specgen.session.choose_models import find_models
from specgen.session.conversation import Conversation, PromptWindow
from specgen.session.engine import Engine
from specgen.session.open import Reporter, WantedSession, open_session, start_kernels
from specgen.session.prompts import Prompt
from specgen.session.prompts.template import Message
from specgen.session.prompts.thoughts import ThoughtMarker, showing_thoughts
from specgen.session.request import Request
from specgen.session.session import Session
from specgen.system.folders import note_about_folders
from specgen.text.built_in_templates import BUILT_IN
from specgen.text.grammar.json_schema import schema_grammar

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: The prompt for an answer: a user's message, a conversation, or a finished `Prompt`. The messages
#: of a conversation may also be objects in the form of OpenAI's API.
PromptLike: TypeAlias = "str | Iterable[Message | Mapping[str, Any]] | Prompt"
_OPTIONS = TypeVar("_OPTIONS", SamplerOptions, GenerationOptions, ContextOptions)


class AnswerDefaults(TypedDict, total=False):
    """The options of answers that `load` takes, too. One that is None counts as left out.

    They have the names, limits and defaults of `SamplerOptions` and `GenerationOptions`. Other
    names that llama.cpp's programs or OpenAI's API use are accepted as well, such as ``temp``,
    ``n_predict`` and ``repetition_penalty``.
    """

    #: The maximum number of tokens; -1 for no limit but the context size.
    max_tokens: int | None
    #: A string, or several, that end the answer. They are not part of it.
    stop: str | Sequence[str] | None
    #: Whether to never choose an end-of-text token.
    ignore_eos: bool | None
    #: Report the log-probability of each token, and of this many of the most likely ones.
    logprobs: int | None
    #: The temperature of sampling; 0 chooses the most likely token each time.
    temperature: float | None
    #: The seed of sampling: the same seed gives the same text.
    seed: int | None
    #: Keep only this many of the most likely tokens; 0 keeps all.
    top_k: int | None
    #: Keep only the most likely tokens whose probabilities add up to this.
    top_p: float | None
    #: Drop tokens that are less than this times as likely as the most likely one.
    min_p: float | None
    #: The samplers to use, in order.
    samplers: str | Sequence[SamplerName] | None
    #: Biases of tokens, by their ids; minus infinity excludes a token.
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None
    #: The number of last tokens that the penalties look at; -1 for all.
    repeat_last_n: int | None
    #: Divide the logits of tokens that have already occurred by this.
    repeat_penalty: float | None
    #: Subtract this from the logits of tokens that have already occurred.
    presence_penalty: float | None
    #: Subtract this from a token's logit for each time that it has occurred.
    frequency_penalty: float | None
    #: DRY: the penalty for extending a repetition; 0 is off.
    dry_multiplier: float | None
    #: DRY: the factor by which the penalty grows with each repeated token.
    dry_base: float | None
    #: DRY: repetitions of fewer tokens are not penalised.
    dry_allowed_length: int | None
    #: DRY: the number of last tokens to look at; -1 for all.
    dry_last_n: int | None
    #: DRY: repetitions end at these texts.
    dry_breakers: str | Sequence[str] | None
    #: Keep only the most typical tokens whose probabilities add up to this.
    typical_p: float | None
    #: Keep only tokens with logits within this many standard deviations of the largest.
    top_n_sigma: float | None
    #: XTC: the probability that the most likely tokens are excluded.
    xtc_probability: float | None
    #: XTC: exclude all tokens at least this likely, except the least likely of them.
    xtc_threshold: float | None
    #: Dynamic temperature: how far it moves up and down.
    dynatemp_range: float | None
    #: Dynamic temperature: the exponent of the entropy.
    dynatemp_exponent: float | None
    #: Options of samplers. An option may also be given by its name, but not both ways.
    sampling: SamplerOptions | None
    #: Options about when an answer ends. The same holds for them.
    generation: GenerationOptions | None
    #: A grammar (GBNF) that the answer follows.
    grammar: str | None
    #: A JSON schema that the answer follows.
    json_schema: str | bool | Mapping[str, Any] | None


class AnswerOptions(AnswerDefaults, total=False):
    """The options of one answer. Options that are left out are those that were given to `load`."""

    #: A system message; the prompt must be a text.
    system: str | None
    #: Whether a text is a user's turn in the model's chat template (True) or is continued as it is
    #: (False). By default, the template is used if the model has one, or for a system message.
    chat: bool | None


#: The names of the fields of options, by any name of each option.
_SAMPLER_NAMES = field_names_of(SamplerOptions)
_GENERATION_NAMES = field_names_of(GenerationOptions)
#: Those that `load` takes.
_LOAD_NAMES = {
    **_SAMPLER_NAMES,
    **_GENERATION_NAMES,
    **{name: name for name in ("sampling", "generation", "grammar", "json_schema")},
}
#: Those that an answer takes.
_NAMES = _LOAD_NAMES | {"system": "system", "chat": "chat"}
#: How to give an option that belongs elsewhere, by any of its names.
_ELSEWHERE = {
    name: f"{argument}={options.__name__}({field_name}=...)"
    for argument, options in (("drafting", DraftOptions), ("context", ContextOptions))
    for name, field_name in field_names_of(options).items()
}


def load(
    target: str | Path,
    draft: str | Path | Sequence[str | Path] | None = None,
    *,
    n_ctx: int | None = None,
    n_parallel: int = 1,
    drafting: DraftOptions | None = None,
    context: ContextOptions | None = None,
    draft_context: ContextOptions | None = None,
    kernels: KernelChoice = "auto",
    note: Callable[[str], None] = lambda _text: None,
    **defaults: Unpack[AnswerDefaults],
) -> Model:
    """Load a target and its draft. Close the result, or use it as a context manager.

    Args:
        target: A GGUF file, a name from `specgen models list`, such as ``ollama:MODEL:TAG``, or
            ``hf:USER/REPO:QUANT`` on the Hugging Face hub. Models that are not on this disk are
            downloaded.
        draft: A file, a name or a hub reference as for the target, ``ngram``, or ``none``. In a
            list, each draft drafts for the one before it. None chooses a draft as `specgen run`
            does.
        n_ctx: The maximum number of tokens of a prompt and its answer; 0 is the size that the
            target was trained with. None is 4096, or that size if it is smaller.
        n_parallel: The number of answers that can be generated at once, each in a context of
            `n_ctx` tokens.
        drafting: How much is drafted, and how drafts are verified.
        context: How the target is loaded and its context is made.
        draft_context: The same for the draft.
        kernels: Which CPU kernels are used.
        note: Receives the notes that the command line would print, such as why a draft was chosen,
            and later which template a conversation uses if the target has none.
        **defaults: The options of answers that do not have their own.

    Raises:
        ModelFileError: If a file cannot be used.
        PairError: If the draft cannot draft for the target.
        UnknownModelError: If a name is unknown.
        FetchError: If a model cannot be downloaded.
        MemoryLimitError: If a model does not fit into memory.
        UsageError: If an option is invalid.
    """
    # 1. Check the arguments.
    target_name = _file_or_name("target", target)
    if not callable(note):
        raise UsageError(f"note: give a function, not {shown_value(note)}")
    if drafting is None:
        drafting = DraftOptions()
    required("drafting", DraftOptions, drafting)
    contexts = _contexts(n_ctx, context, draft_context)
    n_parallel = checked_value("n_parallel", int, n_parallel, {"min": 1})
    kernel_options = KernelOptions(checked_value("kernels", KernelChoice, kernels))
    parameters = inspect.signature(load).parameters
    defaults = cast("AnswerDefaults", _by_field_names(defaults, _LOAD_NAMES, parameters))
    sampling = _sampling(SamplerOptions(), defaults)
    generation = _generation(GenerationOptions(), defaults)

    # 2. Find the files, and choose the kernels.
    sources = find_models(staged(target_name, _draft_names(draft), None), quiet=True)
    wanted = WantedSession.of(
        sources,
        sampling=sampling,
        drafting=drafting,
        generation=generation,
        contexts=contexts,
    )
    wanted = replace(wanted, n_slots=n_parallel)
    _, kernel_note = start_kernels(kernel_options)
    for each in (note_about_folders(), kernel_note):
        if each is not None:
            note(each)

    # 3. Load the models, and open the engine.
    with contextlib.ExitStack() as on_error:
        session = open_session(wanted, Reporter(note), clock=time.perf_counter)
        on_error.callback(session.close)
        calibration_notice = calibrate(session)
        engine = Engine(session, n_parallel=n_parallel)
        engine.notify(calibration_notice)
        on_error.pop_all()
    return Model(session, engine, note)


def _draft_names(draft: Any) -> list[str]:
    """Return the files or names of drafts; raise `UsageError` if they are something else."""
    if draft is None:
        return []
    drafts = [draft] if isinstance(draft, (str, Path)) else _items("draft", draft)
    return [_file_or_name("draft", each) for each in drafts]


def _contexts(
    n_ctx: int | None,
    context: ContextOptions | None,
    draft_context: ContextOptions | None,
) -> Contexts:
    """Return the options of both contexts.

    Raises:
        UsageError: If one is invalid, or the context size is given twice.
    """
    by_name = {} if n_ctx is None else {"n_ctx": n_ctx}
    target = _merged(ContextOptions(), "context", context, by_name)
    draft = _merged(ContextOptions(), "draft_context", draft_context, {})
    return Contexts(_with_template(target), _with_template(draft))


def _with_template(context: ContextOptions) -> ContextOptions:
    """Return the options with the text of a chat template that is given by its name.

    Raises:
        UsageError: If it is neither a name nor a template.
    """
    template = context.chat_template
    if template is None or "{" in template:
        return context
    if template not in BUILT_IN:
        names = ", ".join(BUILT_IN)
        raise UsageError(
            f"chat_template: give the text of a template or one of {names}, "
            f"not {shown_value(template)}"
        )
    return replace(context, chat_template=BUILT_IN[template])


class Model:
    """A target and its draft, ready to generate answers. `load` makes it.

    It may be used by several threads and event loops: one thread at a time decodes, for the answers
    of all of them.
    """

    def __init__(
        self,
        session: Session,
        engine: Engine,
        note: Callable[[str], None] = lambda _text: None,
    ) -> None:
        #: The loaded models, and what they were opened with.
        self.session = session
        self._note = note
        #: The notices about prompts that were given to `note`. An empty one never is.
        self._known_notices = {""}
        #: The engine that generates the answers, for callers that step it themselves.
        self.engine = engine
        self._async_engine = AsyncEngine(engine)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free all memory, and save measurements. Unfinished answers fail with `BackendError`."""
        self._async_engine.close()
        self.engine.close()
        self.session.measurements.save()
        self.session.close()

    @property
    def target(self) -> str:
        """The target's file name."""
        return self.session.target.name

    @property
    def draft(self) -> str:
        """The name of the draft: a model's file name, ``ngram`` or ``none``."""
        return self.session.draft_name

    def generate(
        self,
        prompt: PromptLike,
        **options: Unpack[AnswerOptions],
    ) -> Request:
        """Generate one answer, and return it when it is complete.

        Returns:
            The request, with the answer as `text`, the numbers of tokens as `usage`, and its
            figures in `summary`.

        Raises:
            PromptError: If the prompt is empty, too long, or refused by the chat template.
            UsageError: If an option is invalid.
            SpecgenError: If generating the answer failed.
        """
        answer = self.submit(prompt, **options)
        for _ in self.engine.stream(answer):
            pass
        return answer

    def stream(
        self,
        prompt: PromptLike,
        **options: Unpack[AnswerOptions],
    ) -> Generator[str, None, None]:
        """Queue a request, and yield the text of its answer in pieces as it is generated.

        Leaving the loop, or dropping the iterator, cancels the answer. Raises what `generate`
        raises.
        """
        return _texts(self.events(prompt, **options))

    def events(
        self,
        prompt: PromptLike,
        **options: Unpack[AnswerOptions],
    ) -> Generator[Event, None, None]:
        """Queue a request, and yield the events of its answer: drafts, verdicts, tokens, figures.

        Closing or dropping the iterator cancels the answer. Raises what `generate` raises.
        """
        return self.engine.stream(self.submit(prompt, **options))

    async def agenerate(
        self,
        prompt: PromptLike,
        **options: Unpack[AnswerOptions],
    ) -> Request:
        """Generate one answer as `generate` does, without blocking the event loop.

        Tasks generate up to `n_parallel` answers at once. If the task is cancelled, so is the
        answer.
        """
        answer = await self._async_engine.insert(partial(self.submit, prompt, **options))
        async for _ in self._async_engine.stream(answer):
            pass
        return answer

    async def astream(
        self, prompt: PromptLike, **options: Unpack[AnswerOptions]
    ) -> AsyncGenerator[str, None]:
        """Yield the text of an answer in pieces as `stream` does, without blocking the event loop.

        The request is queued when the first piece is asked for. If the task is cancelled or leaves
        the loop, the answer is cancelled.
        """
        answer = await self._async_engine.insert(partial(self.submit, prompt, **options))
        async with contextlib.aclosing(self._async_engine.texts(answer)) as texts:
            async for text in texts:
                yield text

    def chat(self, system: str | None = None) -> ModelChat:
        """Begin a conversation, which keeps its messages.

        Args:
            system: A system message.

        Raises:
            UsageError: If the system message is not a text.
        """
        system = checked_value("system", str | None, system)
        return ModelChat(self, self._async_engine, self._note, system)

    def generate_all(
        self, prompts: Iterable[PromptLike], **options: Unpack[AnswerOptions]
    ) -> list[Request]:
        """Generate the answers to several prompts, and return them in the order of the prompts.

        An answer that failed has the error as its `failure`; the others are not affected.

        Raises:
            PromptError: If a prompt is empty, too long, or refused by the chat template.
            UsageError: If an option is invalid.
        """
        if isinstance(prompts, (str, Mapping, Prompt)):
            raise UsageError(f"prompts: give a list of prompts, not {shown_value(prompts)}")
        answers: list[Request] = []
        try:
            # `+=` adds each one at once, so that after an error the earlier ones can be cancelled.
            answers += (self.submit(prompt, **options) for prompt in _items("prompts", prompts))
            for answer in answers:
                self._wait_for(answer)
        except BaseException:  # Ctrl-C, too
            for answer in answers:
                self.cancel(answer)
            raise
        return answers

    def _wait_for(self, answer: Request) -> None:
        """Wait until an answer is done, even if it fails."""
        try:
            for _ in self.engine.stream(answer):
                pass
        except SpecgenError:
            if answer.failure is None:  # a worker was lost: nothing can be decoded any more
                raise

    def submit(
        self,
        prompt: PromptLike,
        **options: Unpack[AnswerOptions],
    ) -> Request:
        """Queue a request for an answer, and return it at once.

        The answer is generated by calls of `engine.step`, including those by callers that wait for
        other answers.

        Raises:
            PromptError: If the prompt is empty, too long, or refused by the chat template.
            UsageError: If an option is invalid.
        """
        options = cast("AnswerOptions", _by_field_names(options, _NAMES))
        defaults = self.session.options
        finished_prompt = self._prompt(prompt, options)
        if finished_prompt.notice not in self._known_notices:
            self._known_notices.add(finished_prompt.notice)
            self._note(finished_prompt.notice)
        return self.engine.insert(
            finished_prompt,
            sampling=_sampling(defaults.sampler, options),
            generation=_generation(defaults.generation, options),
        )

    def cancel(self, answer: Request) -> None:
        """End an answer with the text that it has so far.

        An answer that has begun ends at the next step.
        """
        self.engine.cancel(answer)

    def _prompt(
        self,
        asked: PromptLike,
        options: AnswerOptions,
    ) -> Prompt:
        """Return the prompt that a caller asked for.

        Raises:
            PromptError: If it is empty, too long, or refused by the chat template.
            UsageError: If it is not a prompt, or an option needs another kind of prompt.
        """
        system = checked_value("system", str | None, options.get("system"))
        chat = checked_value("chat", bool | None, options.get("chat"))
        prompts = self.session.prompts
        if isinstance(asked, str):
            return prompts.of_text(asked, chat=chat, system=system)
        if system is not None or chat is not None:
            raise UsageError("system and chat need a prompt that is a text")
        if isinstance(asked, Prompt):
            return asked
        return prompts.of_messages(_messages(asked))


def _texts(events: Iterable[Event]) -> Generator[str, None, None]:
    """Yield the text of the events of an answer, without empty pieces."""
    return (event.text for event in events if isinstance(event, CommittedEvent) and event.text)


class ModelChat:
    """A conversation with a model, which `Model.chat` begins.

    Each turn has a message of the user and its answer. A turn belongs to the conversation once its
    answer is complete; if it fails or is cancelled, the conversation is as it was before. Once the
    context is full, the oldest turns are left out of the prompts, and `note` of `load` is told so.

    A conversation has one turn at a time: a new message cancels an unfinished answer.
    """

    def __init__(
        self,
        model: Model,
        async_engine: AsyncEngine,
        note: Callable[[str], None],
        system: str | None,
    ) -> None:
        self._model = model
        self._async_engine = async_engine
        self._note = note
        self._conversation = Conversation(system)
        now = datetime.datetime.now().astimezone()
        self._window = PromptWindow(model.session, model.engine.n_ctx, now)
        #: Held while a message is added: tasks add messages in several threads.
        self._adding = threading.Lock()
        #: The conversation with the last message of the user.
        self._asked = self._conversation
        #: The last answer; None before the first.
        self._answer: Request | None = None

    @property
    def messages(self) -> list[Message]:
        """The messages of all turns, after the system message if there is one.

        Thinking is in a message's `reasoning`, not in its `content`.
        """
        return self._conversation.all_messages()

    def send(
        self,
        text: str,
        **options: Unpack[AnswerDefaults],
    ) -> Request:
        """Add a message of the user, and return its answer when it is complete.

        Raises what `Model.generate` raises.
        """
        answer = self._submit(text, options)
        for _ in self._model.engine.stream(answer):
            pass
        self._keep(answer)
        return answer

    def stream(
        self,
        text: str,
        **options: Unpack[AnswerDefaults],
    ) -> Generator[str, None, None]:
        """Add a message of the user, and yield the text of its answer as it is generated.

        Leaving the loop, or dropping the iterator, cancels the answer. Raises what `Model.generate`
        raises.
        """
        answer = self._submit(text, options)
        return self._stream(answer, self._model.engine.stream(answer))

    async def asend(
        self,
        text: str,
        **options: Unpack[AnswerDefaults],
    ) -> Request:
        """Do what `send` does, without blocking the event loop."""
        answer = await self._async_engine.insert(partial(self._submit, text, options))
        async for _ in self._async_engine.stream(answer):
            pass
        self._keep(answer)
        return answer

    async def astream(
        self, text: str, **options: Unpack[AnswerDefaults]
    ) -> AsyncGenerator[str, None]:
        """Do what `stream` does, without blocking the event loop."""
        answer = await self._async_engine.insert(partial(self._submit, text, options))
        async with contextlib.aclosing(self._async_engine.texts(answer)) as texts:
            async for piece in texts:
                yield piece
        self._keep(answer)

    def _stream(
        self,
        answer: Request,
        events: Generator[Event, None, None],
    ) -> Generator[str, None, None]:
        """Yield the text of an answer, and keep it when it is complete."""
        with contextlib.closing(events):
            yield from _texts(events)
        self._keep(answer)

    def _submit(self, text: str, options: AnswerDefaults) -> Request:
        """Queue a request for the answer to a message of the user, and return it."""
        text = checked_value("text", str, text)
        options = cast("AnswerDefaults", _by_field_names(options, _NAMES))
        for name in ("system", "chat"):
            if name in options:
                raise UsageError(
                    f"{name} is not an option of a turn", "give model.chat the system message"
                )
        defaults = self._model.session.options
        sampling = _sampling(defaults.sampler, options)
        # The marks tell the thinking, which templates leave out of later prompts, from the answer.
        generation = showing_thoughts(_generation(defaults.generation, options))
        with self._adding:
            asked = self._conversation.asking(text)
            prompt, n_newly_left_out = self._window.prompt_of(asked, generation.max_tokens)
            if n_newly_left_out:
                self._note(self._window.notice(asked, n_newly_left_out))
            if self._answer is not None and not self._answer.is_done:
                self._model.cancel(self._answer)
            self._answer = self._model.submit(prompt, sampling=sampling, generation=generation)
            self._asked = asked
            return self._answer

    def _keep(self, answer: Request) -> None:
        """Add the last turn to the conversation, unless its answer was cut off or replaced."""
        finished = answer.finished
        if answer is not self._answer or finished is None:
            return
        if finished.finish_reason == "interrupted":
            return
        grammar = answer.settings.generation.grammar
        marker = ThoughtMarker(answer.prompt.text, None if grammar is None else grammar.text)
        text = marker.feed(finished.text) + marker.finish()
        self._conversation = self._asked.answered(text)


# --- prompts --------------------------------------------------------------------------------------


def _messages(asked: Any) -> Sequence[Message]:
    """Return a conversation whose messages may be objects in OpenAI's form.

    Raises:
        PromptError: If it is empty.
        UsageError: If it is not a conversation.
    """
    if isinstance(asked, (Mapping, Message)):
        raise UsageError(f"prompt: give a list of messages, not {shown_value(asked)}")
    if not isinstance(asked, Iterable) or isinstance(asked, (bytes, bytearray)):
        raise UsageError(f"prompt: give a text or messages, not {shown_value(asked)}")
    messages = list(asked)
    if not messages:
        raise PromptError("the prompt is empty", hint="give some messages")
    for number, message in enumerate(messages):
        if not isinstance(message, (Mapping, Message)):
            raise UsageError(
                f"messages[{number}]: give a message, not {shown_value(message)}",
                hint="generate_all answers several prompts",
            )
    if all(isinstance(message, Message) for message in messages):
        return messages
    # Imported only now, since the formats of requests take a tenth of the time of `import`.
    from specgen.serve.formats.chat_completions import read_conversation

    return read_conversation([_as_object(message) for message in messages])


def _as_object(message: Message | Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in OpenAI's form."""
    if not isinstance(message, Message):
        return dict(message)
    calls = [
        {"id": call.identity, "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    return {
        "role": message.role,
        "content": message.content,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning,
    }


def _items(name: str, values: Any) -> list[Any]:
    """Return the items of an iterable that is not a text.

    Raises:
        UsageError: If it is something else.
    """
    if isinstance(values, (str, bytes, bytearray)) or not isinstance(values, Iterable):
        raise UsageError(f"{name}: give a list, not {shown_value(values)}")
    return list(values)


def _file_or_name(name: str, value: Any) -> str:
    """Return the text of a file or a name.

    Raises:
        UsageError: If it is neither, or empty.
    """
    text = str(checked_value(name, str | Path, value))
    if not text:
        raise UsageError(f"{name}: give a file or a name, not {shown_value(text)}")
    return text


# --- options --------------------------------------------------------------------------------------


def _by_field_names(
    given: Mapping[str, Any],
    names: Mapping[str, str],
    other_names: Iterable[str] = (),
) -> dict[str, Any]:
    """Return options by the names of their fields, as `by_field_names` does.

    Raises:
        UsageError: If there is no such option, or one is given twice.
    """
    for name in given:
        if name not in names:
            _refuse_misplaced(name)
    return by_field_names(given, names, other_names)


def _refuse_misplaced(name: str) -> None:
    """Raise `UsageError` if there is an option of this name elsewhere."""
    if name in inspect.signature(load).parameters:
        raise UsageError(f"{name} is not an option of answers: give load {name}=...")
    if name in _ELSEWHERE:
        raise UsageError(f"{name} is not an option of answers: give load {_ELSEWHERE[name]}")
    if name in _NAMES:
        raise UsageError(f"{name} is not an option of load: give it with a prompt")


def _sampling(defaults: SamplerOptions, given: AnswerDefaults) -> SamplerOptions:
    """Return how the tokens of an answer are sampled.

    Raises:
        UsageError: If an option is invalid, or given twice.
    """
    by_name = _given(_SAMPLER_NAMES, given)
    return _merged(defaults, "sampling", given.get("sampling"), by_name)


def _generation(defaults: GenerationOptions, given: AnswerDefaults) -> GenerationOptions:
    """Return when an answer ends, and which form it has.

    Raises:
        UsageError: If an option is invalid, given twice, or excludes another one.
    """
    by_name = _given(_GENERATION_NAMES, given)
    grammar = checked_value("grammar", str | None, given.get("grammar"))
    schema = given.get("json_schema")
    if grammar is not None and schema is not None:
        raise UsageError("grammar and json_schema cannot be used together; give one of them")
    if grammar is not None:
        by_name["grammar"] = Grammar("gbnf", grammar)
    if schema is not None:
        by_name["grammar"] = schema_grammar(_schema_text(schema))
    generation = _merged(defaults, "generation", given.get("generation"), by_name)
    if generation.grammar is not None and generation.ignore_eos:
        raise UsageError(
            "ignore_eos and a grammar cannot be used together: "
            "text that follows a grammar has an end"
        )
    return generation


def _schema_text(schema: Any) -> str:
    """Return a JSON schema as text; raise `UsageError` if it is not one."""
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, (Mapping, bool)):
        raise UsageError(f"json_schema: give an object, not {shown_value(schema)}")
    try:
        return json.dumps(schema if isinstance(schema, bool) else dict(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"json_schema: it is not JSON: {error}") from None


def _given(names: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the given options that have one of these names."""
    return {name: value for name, value in given.items() if name in names}


def _merged(
    defaults: _OPTIONS,
    argument: str,
    options: _OPTIONS | None,
    by_name: Mapping[str, Any],
) -> _OPTIONS:
    """Return options that were given as an object, by their names, or both.

    Args:
        defaults: The options without any of that.
        argument: The argument with the object, for messages.
        options: The object; None if it was not given.
        by_name: The options that were given by their names.

    Raises:
        UsageError: If an option is invalid, or has another value in the object.
    """
    if options is None:
        return replace(defaults, **by_name)
    required(argument, type(defaults), options)
    merged = replace(options, **by_name)
    unset = type(defaults)()
    for name in by_name:
        value = getattr(merged, name)
        other = getattr(options, name)
        if other not in (value, getattr(unset, name)):
            raise UsageError(
                f"{name} is {shown_value(value)}, but {shown_value(other)} in {argument}; "
                "give it once"
            )
    return merged
