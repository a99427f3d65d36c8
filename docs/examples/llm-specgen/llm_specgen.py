"""A plugin for `llm`: ``llm -m specgen/NAME "prompt"``.

`llm` imports its plugins for every command, so nothing heavy is imported before a model answers.
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
from specgen.option_values import field_type
from specgen.options import GenerationOptions, SamplerOptions

# --- options --------------------------------------------------------------------------------------

_SAMPLING_NAMES = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
)
#: The help of the options that are not numbers.
_TEXT_HELP = {
    "target": "A GGUF file, or a name from `specgen models list`, to answer instead",
    "draft": "What drafts: a GGUF file, a name, ngram or none; it changes no answer",
    "stop": "A text before which the answer ends",
    "grammar": "A grammar (GBNF) that the answer follows",
}
_MAX_INT = 2**31 - 1


def _option_fields() -> dict[str, Any]:
    """Return the definitions of all options: types and pydantic fields, by name."""
    fields: dict[str, Any] = {}
    # Numbers have the help and the limits of the command line.
    for options, names in ((SamplerOptions, _SAMPLING_NAMES), (GenerationOptions, ("max_tokens",))):
        for option in dataclasses.fields(options):
            if option.name in names:
                field = Field(None, description=option.metadata["help"])
                fields[option.name] = (field_type(options, option.name) | None, field)
    for name, text in _TEXT_HELP.items():
        option_type: Any = str | None
        if name == "stop":  # Python programs may give several
            option_type = str | list[str] | None
        fields[name] = (option_type, Field(None, description=text))
    n_ctx_help = "The room for a prompt and its answer, in tokens"
    fields["n_ctx"] = (int | None, Field(None, ge=1, le=_MAX_INT, description=n_ctx_help))
    return fields


#: The options of every model; the defaults are those of `specgen run`.
LlmOptions: Any = pydantic.create_model("LlmOptions", __base__=llm.Options, **_option_fields())


# --- models ---------------------------------------------------------------------------------------


class AnswerError(llm.ModelError, click.ClickException):
    """An error that ends an answer.

    It is both an `llm.ModelError` and click's exception: `llm chat` shows click's exceptions in one
    line, but ends with a traceback after other errors of a model.
    """


class SpecgenModel(llm.Model):
    """A model of `llm`: a target and its draft, which options may replace.

    Without any target, the default pair answers, as with `specgen run`.

    Args:
        model_id: The name of the model in `llm`.
        target: A GGUF file or a name; None for the default pair.
        draft: A GGUF file or a name; None for the draft that specgen chooses.
    """

    can_stream = True
    supports_schema = True
    Options = LlmOptions

    def __init__(self, model_id: str, target: str | None, draft: str | None = None) -> None:
        self.model_id = model_id
        self._target = target
        self._draft = draft

    def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,
        response: llm.Response,
        conversation: llm.Conversation | None,
    ) -> Iterator[str]:
        """Yield the pieces of an answer, and then report its token counts to `response`."""
        options = prompt.options.model_dump(exclude_none=True)
        try:
            target, draft = self._models(options.get("target"), options.get("draft"))
            model = _load_once(target, draft, options.get("n_ctx"))
            yield from _answer(model, prompt, options, response)
        except specgen.SpecgenError as error:
            hint = f" ({error.hint})" if error.hint else ""
            raise AnswerError(f"{error.message}{hint}") from error

    def _models(self, target: str | None, draft: str | None) -> tuple[str, str | None]:
        """Return the target and the draft to use.

        The arguments are those that the options of a prompt name; None if they name none.
        """
        if target is None:
            target = self._target
        if target is None:
            registry = load_registry()
            pair = registry.pair(registry.default_pair)
            return pair.target, draft or pair.draft
        if target == self._target:
            return target, draft or self._draft
        return target, draft  # this model's draft does not fit another target


@llm.hookimpl
def register_models(register: Callable[[llm.Model], None]) -> None:
    """Register a model for any file, one for each pair, and one for each downloaded model."""
    register(SpecgenModel("specgen", None))
    try:
        registry = load_registry()
    except specgen.SpecgenError as error:  # the models of other plugins must stay usable
        tell_once(error.message)
        return
    for pair in registry.pairs.values():
        register(SpecgenModel(f"specgen/{pair.name}", pair.target, pair.draft))
    for model in registry.models.values():
        if locate(model) is not None:
            register(SpecgenModel(f"specgen/{model.name}", model.name))


@functools.cache
def tell_once(text: str) -> None:
    """Write a line to standard error once, though `llm` asks for the models several times."""
    sys.stderr.write(f"specgen: {text}\n")


#: The loaded models, by target, draft and context size. They stay loaded until the process ends,
#: when they are closed and save what they have learnt.
loaded_models: dict[tuple[str, str | None, int | None], specgen.Model] = {}
_loading = threading.Lock()


def _load_once(target: str, draft: str | None, n_ctx: int | None) -> specgen.Model:
    """Return a loaded model, after downloading its files and loading it if necessary."""
    key = (target, draft, n_ctx)
    with _loading:
        if key in loaded_models:
            return loaded_models[key]
        registered_models = load_registry().models
        for name in (target, draft):
            if name is not None and name in registered_models:
                fetch(registered_models[name], progress=stderr_progress())
        model = specgen.load(target, draft, n_ctx=n_ctx)
        loaded_models[key] = model
        atexit.register(model.close)
        return model


# --- answers --------------------------------------------------------------------------------------


def _answer(
    model: specgen.Model,
    prompt: llm.Prompt,
    options: dict[str, Any],
    response: llm.Response,
) -> Iterator[str]:
    """Yield the pieces of an answer, and then report its token counts to `response`.

    Args:
        model: The loaded model.
        prompt: The prompt.
        options: The options that were given, by name.
        response: The response of `llm`.
    """
    names = (*_SAMPLING_NAMES, "max_tokens", "stop", "grammar")
    answer_options: dict[str, Any] = {name: options[name] for name in names if name in options}
    if prompt.schema is not None:
        answer_options["json_schema"] = prompt.schema

    answer = model.submit(_messages(prompt), **cast("specgen.AnswerOptions", answer_options))
    if answer.prompt.notice:
        tell_once(answer.prompt.notice)
    with contextlib.closing(model.engine.stream(answer)) as events:
        for event in events:
            if isinstance(event, specgen.CommittedEvent) and event.text:
                yield event.text

    finished = answer.summary
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


def _messages(prompt: llm.Prompt) -> str | list[specgen.Message]:
    """Return the messages of a prompt; a single message of the user's is returned as text.

    A model without a chat template continues a text as it is.
    """
    messages: list[specgen.Message] = []
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
