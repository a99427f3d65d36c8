"""The plugin of `llm`, ``llm -m specgen/NAME "prompt"`` (docs/adapters.md). `llm` imports it for
each of its commands: nothing heavy is imported before a model is asked.
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
from specgen.models.hub_names import locate
from specgen.models.registry import load_registry
from specgen.options import GenerationOptions, SamplerOptions
from specgen.sampler_options import LARGEST_FACTOR

#: The options of samplers and of an answer's end.
_SAMPLING = ["temperature", "top_k", "top_p", "min_p", "seed", "repeat_penalty"]
_SAMPLING += ["presence_penalty", "frequency_penalty"]
_ENDS = ["max_tokens", "stop", "grammar"]
#: The options that are texts.
_TEXTS = {
    "target": "A GGUF file, or a name from `specgen models list`, to answer instead",
    "draft": "What drafts: a GGUF file, a name, ngram or none; it changes no answer",
    "stop": "A text before which the answer ends",
    "grammar": "A grammar (GBNF) that the answer follows",
}


def _fields() -> Iterator[tuple[str, Any]]:
    """Yield the options for pydantic; numbers have the help and the limits of the command line."""
    numbers = [*dataclasses.fields(SamplerOptions), *dataclasses.fields(GenerationOptions)]
    for field in numbers:
        if field.name in (*_SAMPLING, "max_tokens"):
            known, kind = field.metadata, type(field.default)
            most = known.get("max", LARGEST_FACTOR if kind is float else 2**31 - 1)
            limits = {"ge": known.get("min", -LARGEST_FACTOR), "le": most}
            yield field.name, (kind | None, Field(None, description=known["help"], **limits))
    for name, text in _TEXTS.items():
        kinds = str | list[str] | None if name == "stop" else str | None
        yield name, (kinds, Field(None, description=text))
    room = Field(
        None, ge=1, le=2**31 - 1, description="The room for a prompt and its answer, in tokens"
    )
    yield "n_ctx", (int | None, room)


#: The options of every model; the defaults are those of `specgen run`.
AnswerOptions: Any = pydantic.create_model("AnswerOptions", __base__=llm.Options, **dict(_fields()))


class AnswerError(llm.ModelError, click.ClickException):
    """`llm chat` ends in a traceback after a `ModelError`, and shows click's in a line; so this is
    both.
    """


class Specgen(llm.Model):
    """A target with a name, and its draft; the options may name others. Without any, `specgen
    run`'s answer.
    """

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
        given = prompt.options.model_dump(exclude_none=True)
        target, draft = given.get("target", self._target), given.get("draft")
        try:
            if target is None:
                registry = load_registry()
                pair = registry.pair(registry.default_pair)
                target, draft = pair.target, draft or pair.draft
            elif target == self._target:
                draft = draft or self._draft
            model = _loaded(target, draft, given.get("n_ctx"))
            yield from _answer(model, prompt, given, response)
        except specgen.SpecgenError as error:
            hint = f" ({error.hint})" if error.hint else ""
            raise AnswerError(f"{error.message}{hint}") from error


@llm.hookimpl
def register_models(register: Callable[[llm.Model], None]) -> None:
    """Register a model for any file, one for each pair, and one for each named model on this disk."""
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


#: The models that were used stay loaded until the process ends; what they learnt is saved then.
loaded_models: dict[tuple[str, str | None, int | None], specgen.Model] = {}
_loading = threading.Lock()


def _loaded(target: str, draft: str | None, n_ctx: int | None) -> specgen.Model:
    key, named = (target, draft, n_ctx), load_registry().models
    with _loading:
        if key not in loaded_models:
            for name in (target, draft):
                if name is not None and name in named:
                    fetch(named[name], progress=stderr_progress())
            loaded_models[key] = specgen.load(target, draft, n_ctx=n_ctx)
            atexit.register(loaded_models[key].close)
        return loaded_models[key]


def _answer(
    model: specgen.Model, prompt: llm.Prompt, given: dict[str, Any], response: llm.Response
) -> Iterator[str]:
    options: dict[str, Any] = {name: given[name] for name in _ENDS if name in given}
    sampling = {name: given[name] for name in _SAMPLING if name in given}
    options["sampling"] = SamplerOptions(**sampling)
    if isinstance(given.get("stop"), str):
        options["stop"] = [given["stop"]]
    if prompt.schema is not None:
        options["json_schema"] = prompt.schema
    answer = model.submit(_asked(prompt), **cast("specgen.AnswerOptions", options))
    with contextlib.closing(model.engine.stream(answer)) as events:
        for event in events:
            if isinstance(event, specgen.CommittedEvent) and event.text:
                yield event.text
    finished = answer.finished
    assert finished is not None, "a stream that ends has an answer that is finished"
    details = {"n_cached": finished.n_cached_tokens, "draft": model.draft}
    details |= {"n_drafted": finished.n_drafted, "n_accepted": finished.n_accepted}
    response.set_resolved_model(model.target)
    response.set_usage(input=finished.n_prompt_tokens, output=finished.n_tokens, details=details)
    response.response_json = {"finish_reason": finished.finish_reason, "seed": answer.seed}


def _asked(prompt: llm.Prompt) -> str | list[specgen.Message]:
    """Return messages, or a lone question as text, which a model without a chat template continues."""
    messages = []
    for message in prompt.messages:
        parts = [part for part in message.parts if not isinstance(part, ReasoningPart)]
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        if message.role not in ("system", "user", "assistant") or len(texts) < len(parts):
            raise specgen.PromptError(
                f"a message of the role {message.role}: only text is supported"
            )
        messages.append(specgen.Message(message.role, "".join(texts)))  # type: ignore[arg-type]
    if not messages:
        raise specgen.PromptError("the prompt is empty", hint="give some text to continue")
    if len(messages) == 1 and messages[0].role == "user":
        return messages[0].content
    return messages
