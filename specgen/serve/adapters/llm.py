"""The plugin of `llm`: ``llm -m specgen/NAME "prompt"``. `docs/adapters.md` says how it is used.

`llm` imports it for each of its commands, so nothing heavy is imported before a model is asked.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import click
import llm
import pydantic
from llm.parts import ReasoningPart, TextPart
from pydantic import Field

import specgen
from specgen.models.download import fetch, stderr_progress
from specgen.models.hub import locate
from specgen.models.registry import load_registry
from specgen.options import SamplerOptions

#: Logits are float32: factors near its largest number (3e38) would make infinities.
_LARGEST = 1e30
_SAMPLING: dict[str, type] = {
    **dict.fromkeys(["temperature", "top_p", "min_p"], float),
    **dict.fromkeys(["repeat_penalty", "presence_penalty", "frequency_penalty"], float),
    **dict.fromkeys(["top_k", "seed"], int),
}


def _sampling_fields() -> Iterator[tuple[str, Any]]:
    """Yield the fields of the sampling options for pydantic, with the limits of the command line."""
    for field in dataclasses.fields(SamplerOptions):
        if (kind := _SAMPLING.get(field.name)) is not None:
            known = field.metadata
            most = known.get("max", _LARGEST if kind is float else 2**31 - 1)
            limits = {"ge": known.get("min", -_LARGEST), "le": most}
            yield field.name, (kind | None, Field(None, description=known["help"], **limits))


_Sampling: Any = pydantic.create_model(
    "_Sampling", __base__=llm.Options, **dict(_sampling_fields())
)


class AnswerOptions(_Sampling):  # type: ignore[misc]
    """The options of every model; the defaults are those of `specgen run`."""

    target: str | None = Field(
        None, description="A GGUF file, or a name from `specgen models list`, to answer instead"
    )
    draft: str | None = Field(
        None,
        description="What drafts: a GGUF file, a name, ngram or none. It changes how long an answer "
        "takes, not what it says",
    )
    max_tokens: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="The most tokens of the answer; -1 is no limit"
    )
    stop: str | list[str] | None = Field(
        None, description="A text that ends the answer, and is no part of it"
    )
    grammar: str | None = Field(None, description="A grammar (GBNF) that the answer follows")
    n_ctx: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="The room for a prompt and its answer, in tokens; by default 4096, or what the "
        "model was trained with if that is less",
    )


class AnswerError(llm.ModelError, click.ClickException):
    """An answer is not possible; the message says why. `llm chat` ends in a traceback after a `ModelError`,
    but prints an exception of click's in one line; so this is both."""


class Specgen(llm.Model):
    """A target with a name, and its draft; the options may name others. Without any target the default pair
    answers, without a draft one is chosen as in `specgen run`."""

    can_stream = True
    supports_schema = True
    Options = AnswerOptions

    def __init__(self, model_id: str, target: str | None, draft: str | None = None) -> None:
        self.model_id, self._target, self._draft = model_id, target, draft

    def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,
        response: llm.Response,
        conversation: llm.Conversation | None,
    ) -> Iterator[str]:
        """Yield the text of the answer as it is generated, and load the model if need be. Raise
        `AnswerError`."""
        options: Any = prompt.options
        target, draft = options.target or self._target, options.draft
        try:
            if target is None:
                registry = load_registry()
                pair = registry.pair(registry.default_pair)
                target, draft = pair.target, draft or pair.draft
            elif target == self._target:
                draft = draft or self._draft
            yield from _answer(loaded_models.get(target, draft, options.n_ctx), prompt, response)
        except specgen.SpecgenError as error:
            hint = f" ({error.hint})" if error.hint else ""
            raise AnswerError(f"{error.message}{hint}") from error


@llm.hookimpl
def register_models(register: Callable[[llm.Model], None]) -> None:
    """Register a model for any file, one for each pair (fetched at its first use), and one for each named
    model on this disk."""
    register(Specgen("specgen", None))
    try:
        registry = load_registry()
    except specgen.SpecgenError as error:  # the models of other plugins must stay usable
        tell_once(f"specgen: {error.message}")
        return
    for pair in registry.pairs.values():
        register(Specgen(f"specgen/{pair.name}", pair.target, pair.draft))
    for model in registry.models.values():
        if locate(model) is not None:
            register(Specgen(f"specgen/{model.name}", model.name))


@functools.cache
def tell_once(text: str) -> None:
    """Write a line to standard error once, though `llm` asks for the models several times."""
    sys.stderr.write(f"{text}\n")


class _LoadedModels:
    """The models that were used. They stay loaded until the process ends; what they learnt is saved then."""

    def __init__(self) -> None:
        self.models: dict[tuple[str, str | None, int | None], specgen.Model] = {}
        self._lock = threading.Lock()
        atexit.register(self.close)

    def get(self, target: str, draft: str | None, n_ctx: int | None) -> specgen.Model:
        """Return a model; fetch and load it if need be. Raise what `specgen.load` raises."""
        key = (target, draft, n_ctx)
        with self._lock:
            if key not in self.models:
                named = load_registry().models
                for name in (target, draft):
                    if name is not None and name in named:
                        fetch(named[name], progress=stderr_progress())
                self.models[key] = specgen.load(target, draft, n_ctx=n_ctx)
            return self.models[key]

    def close(self) -> None:
        """Free all models. They are loaded again if they are used again."""
        with self._lock:
            while self.models:
                self.models.popitem()[1].close()


loaded_models = _LoadedModels()


def _answer(model: specgen.Model, prompt: llm.Prompt, response: llm.Response) -> Iterator[str]:
    """Yield the text of an answer. Its other figures go to the response."""
    answer = model.submit(_asked(prompt), **_answer_options(prompt))
    with contextlib.closing(model.engine.stream(answer)) as events:
        for event in events:
            if isinstance(event, specgen.CommittedEvent) and event.text:
                yield event.text
    finished = answer.finished
    assert finished is not None, "a stream that ends has an answer that is finished"
    response.set_resolved_model(model.target)
    response.set_usage(
        input=finished.n_prompt_tokens,
        output=finished.n_tokens,
        details={
            "n_cached": finished.n_cached_tokens,
            "draft": model.draft,
            "n_drafted": finished.n_drafted,
            "n_accepted": finished.n_accepted,
        },
    )
    response.response_json = {"finish_reason": finished.finish_reason, "seed": answer.seed}


def _answer_options(prompt: llm.Prompt) -> specgen.AnswerOptions:
    given = prompt.options.model_dump(exclude_none=True)
    sampling = {name: value for name, value in given.items() if name in _SAMPLING}
    options: dict[str, Any] = {"sampling": SamplerOptions(**sampling)}
    options |= {name: given[name] for name in ("max_tokens", "stop", "grammar") if name in given}
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    if prompt.schema is not None:
        options["json_schema"] = prompt.schema
    return cast("specgen.AnswerOptions", options)


def _asked(prompt: llm.Prompt) -> str | list[specgen.Message]:
    """Return the prompt: messages, or a text if there is only a question, so that a model without a chat
    template can continue it."""
    messages = []
    for message in prompt.messages:
        parts = [part for part in message.parts if not isinstance(part, ReasoningPart)]
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        if message.role not in ("system", "user", "assistant") or len(texts) < len(parts):
            raise specgen.PromptError(
                f"a message of the role {message.role} has something that is not supported: only text is"
            )
        messages.append(specgen.Message(message.role, "".join(texts)))  # type: ignore[arg-type]
    if not messages:
        raise specgen.PromptError("the prompt is empty", hint="give some text to continue")
    if len(messages) == 1 and messages[0].role == "user":
        return messages[0].content
    return messages
