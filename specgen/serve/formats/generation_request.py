"""The fields that the requests of several endpoints share.

The request model of each endpoint inherits from these: a field of all endpoints that generate text
belongs in `GenerationRequest`, one of all chats in `ChatRequest`, and one of a single endpoint in
its own module.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    BeforeValidator,
    Field,
    create_model,
)

from specgen.errors import UsageError
from specgen.options import Grammar, SamplerOptions
from specgen.sampler_options import LARGEST_FACTOR
from specgen.serve.formats.fields import Fields, Integer, Schema
from specgen.serve.formats.parsed_request import Defaults, Kind, ParsedRequest, SpeculativeWishes
from specgen.serve.formats.request_errors import BodyError
from specgen.serve.formats.tools import ToolChoiceField, ToolField, chosen_tools, functions_of
from specgen.session.prompts.template import OWN_VARIABLES, Message
from specgen.text.grammar.json_schema import lenient_schema_grammar, schema_grammar

# --- samplers -------------------------------------------------------------------------------------

_TOKEN = re.compile(r"-?[0-9]{1,18}")
_LARGEST = {int: 2**63 - 1, float: LARGEST_FACTOR}
_SMALLEST = {int: -(2**63 - 1), float: -LARGEST_FACTOR}


def _bias_pairs(value: Any) -> Any:
    """Return biases as pairs, the form that llama.cpp's server also takes."""
    if not isinstance(value, dict):
        return value
    pairs: list[tuple[int | str, Any]] = []
    for key, bias in value.items():
        if _TOKEN.fullmatch(key):
            pairs.append((int(key), bias))
        else:
            pairs.append((key, bias))
    return tuple(pairs)


#: A token, or a text and so all of its tokens; and their bias. False means that they never come.
_Bias = tuple[
    int | str,
    Annotated[float, BeforeValidator(lambda n: -LARGEST_FACTOR if n is False else n)],
]
#: The types of fields that are not simply those of the options.
_SAMPLER_TYPES: dict[str, Any] = {
    "logit_bias": Annotated[tuple[_Bias, ...], BeforeValidator(_bias_pairs)],
    "dry_breakers": tuple[str, ...],
    "top_k": Annotated[int, BeforeValidator(lambda k: 0 if k == -1 else k)],
}


def _sampler_field(option: dataclasses.Field[Any]) -> tuple[Any, Any]:
    """Return the type and the declaration of the field for an option of the sampler."""
    option_type = type(option.default)
    spellings = [each.replace("-", "_").lstrip("_") for each in option.metadata["spellings"]]
    names = AliasChoices(
        option.name,
        *spellings,
        f"{spellings[0]}s",
        option.name.replace("repeat_", "repetition_"),
    )
    declaration = Field(
        None,
        validation_alias=names,
        ge=option.metadata.get("min", _SMALLEST.get(option_type)),
        le=option.metadata.get("max", _LARGEST.get(option_type)),
    )
    return _SAMPLER_TYPES.get(option.name, option_type) | None, declaration


#: The options of the sampler that a request may set, with their names, types and limits.
_SAMPLER_FIELDS: dict[str, Any] = {
    option.name: _sampler_field(option)
    for option in dataclasses.fields(SamplerOptions)
    if option.name != "samplers"
}

if TYPE_CHECKING:
    SamplerFields = Fields
else:
    SamplerFields = create_model("SamplerFields", __base__=Fields, **_SAMPLER_FIELDS)


# --- all endpoints that generate text -------------------------------------------------------------


class AnswerFormat(Fields):
    """The form that an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: Schema | bool | None = Field(
        None, validation_alias=AliasChoices("schema", AliasPath("json_schema", "schema"))
    )
    #: Whether a schema that no grammar can enforce is refused. False also leaves objects open.
    strict: bool | None = Field(
        None, validation_alias=AliasChoices("strict", AliasPath("json_schema", "strict"))
    )

    def schema_of(self, where: str) -> Schema | bool | None:
        """Return the schema of the answer; None for free text. Raise `BodyError`."""
        match self.type:
            case "text":
                return None
            case "json_object":  # llama.cpp's server takes a schema here
                return self.schema_ or {"type": "object"}
            case "json_schema":
                if self.schema_ is None:
                    raise BodyError(where, "it has no schema")
                return self.schema_


class GenerationRequest(SamplerFields):
    """The fields of all endpoints that generate text: when an answer ends, and its form."""

    #: The most tokens to generate; -1 for no limit.
    max_tokens: Annotated[Integer, Field(ge=-1)] | None = Field(
        None,
        validation_alias=AliasChoices(
            "max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"
        ),
    )
    #: Texts before which the answer ends.
    stop: Annotated[
        tuple[str, ...],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        AfterValidator(lambda texts: tuple(filter(None, texts))),
    ] = Field((), validation_alias=AliasChoices("stop", "stop_sequences"))
    #: Whether the end-of-text token is never chosen.
    ignore_eos: bool = False
    #: A grammar in GBNF that the answer follows.
    grammar: str | None = None
    #: A JSON schema that the answer conforms to.
    json_schema: Schema | bool | None = None
    #: More variables for the chat template.
    chat_template_kwargs: dict[str, Any] = {}
    #: Whether the answer is streamed.
    stream: bool = False
    #: Settings of speculative decoding.
    speculative: SpeculativeWishes = SpeculativeWishes()
    #: The form of the answer, where each API has it.
    form: AnswerFormat | None = Field(
        None,
        validation_alias=AliasChoices(
            "response_format",
            AliasPath("text", "format"),
            AliasPath("output_config", "format"),
            "output_format",
        ),
    )

    #: The name of `form` in this API, for messages.
    form_field: ClassVar[str] = "response_format"

    def parsed(
        self,
        kind: Kind,
        defaults: Defaults,
        writer: Callable[..., Any],
        warnings: Sequence[str] = (),
    ) -> ParsedRequest:
        """Return what these fields ask for, still without the prompt.

        Args:
            kind: What is answered.
            defaults: The values of fields that are left out.
            writer: Makes the `AnswerWriter` of the API.
            warnings: What has been ignored so far.

        Raises:
            BodyError: Fields contradict each other, or the grammar cannot be enforced.
        """
        grammar, grammar_warnings = self._grammar()
        grammar = grammar or defaults.generation.grammar
        if self.ignore_eos and grammar is not None:
            raise BodyError("ignore_eos", "a text that follows a grammar must be able to end")
        given_ends = {"max_tokens", "stop", "ignore_eos"} & self.model_fields_set
        sampling = self.model_dump(include=set(_SAMPLER_FIELDS), exclude_none=True)
        biases = sampling.pop("logit_bias", None)
        request = ParsedRequest(
            kind,
            replace(defaults.sampling, **sampling),
            replace(defaults.generation, **self.model_dump(include=given_ends), grammar=grammar),
            writer,
            biases=biases,
            warnings=(*self.warnings(), *warnings, *grammar_warnings),
            streams=self.stream,
            speculative=self.speculative,
        )
        return self.with_api_fields(request)

    def with_api_fields(self, request: ParsedRequest) -> ParsedRequest:
        """Return the request with what the fields of a certain API ask for."""
        return request

    def _grammar(self) -> tuple[Grammar | None, list[str]]:
        """Return what the answer must follow, and warnings about what cannot be enforced of it.

        Raises:
            BodyError: There are several grammars, or one that is not valid.
        """
        schema = None
        if self.form is not None:
            schema = self.form.schema_of(self.form_field)
        given = {
            "grammar": self.grammar or None,
            "json_schema": self.json_schema,
            self.form_field: schema,
        }
        names = [name for name, value in given.items() if value is not None]
        if not names:
            return None, []
        if len(names) > 1:
            raise BodyError(names[1], f"{names[0]} is given as well")
        if self.grammar:
            return Grammar("gbnf", self.grammar), []
        name = names[0]
        text = json.dumps(given[name])
        must_enforce_all = schema is None or self.form is None or self.form.strict
        try:
            if must_enforce_all:
                return schema_grammar(text), []
            is_open = self.form is not None and self.form.strict is False
            grammar, left_out = lenient_schema_grammar(text, is_open=is_open)
        except UsageError as error:
            raise BodyError(name, error.message) from None
        if not left_out:
            return grammar, []
        return grammar, [f"{name}: no grammar can enforce {', '.join(left_out)}"]


# --- all chats ------------------------------------------------------------------------------------


class ChatRequest(GenerationRequest):
    """The fields of all endpoints for conversations: tools, and how much the model thinks."""

    #: The tools that the model knows.
    tools: list[ToolField] = []
    #: Which of them it may or must call.
    tool_choice: ToolChoiceField | None = None
    #: Whether an answer may have several calls.
    parallel_tool_calls: bool = True
    #: Whether the model thinks before it answers.
    enable_thinking: bool | None = None
    #: Anthropic's field for that: ``enabled``, ``disabled``, or another type with which the model
    #: decides, such as ``adaptive``.
    thinking: str | None = Field(None, validation_alias=AliasPath("thinking", "type"))
    #: How much the model thinks.
    effort: str | None = Field(
        None,
        validation_alias=AliasChoices(
            "reasoning_effort",
            AliasPath("reasoning", "effort"),
            AliasPath("output_config", "effort"),
        ),
    )

    def parsed_chat(
        self,
        messages: tuple[Message, ...],
        defaults: Defaults,
        writer: Callable[..., Any],
        warnings: Sequence[str] = (),
    ) -> ParsedRequest:
        """Return the request for the turn after these messages.

        The arguments and errors are those of `parsed`.
        """
        variables = self._template_variables()
        functions, tool_warnings = functions_of(self.tools)
        tools = chosen_tools(functions, self.tool_choice, is_parallel=self.parallel_tool_calls)
        request = self.parsed(
            "chat",
            defaults,
            writer,
            [*warnings, *tool_warnings],
        )
        return replace(
            request,
            messages=messages,
            tools=tools,
            variables=variables,
        )

    def _template_variables(self) -> dict[str, Any]:
        for name in OWN_VARIABLES & self.chat_template_kwargs.keys():
            raise BodyError(f"chat_template_kwargs.{name}", "specgen sets this variable")
        variables: dict[str, Any] = {}
        if self.thinking == "enabled":
            variables["enable_thinking"] = True
        elif self.thinking == "disabled":
            variables["enable_thinking"] = False
        elif self.enable_thinking is not None:
            variables["enable_thinking"] = self.enable_thinking
        if self.effort is not None:
            variables["reasoning_effort"] = self.effort
        if self.effort == "none":
            variables["enable_thinking"] = False
        return variables | self.chat_template_kwargs
