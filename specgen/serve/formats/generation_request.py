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
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    BeforeValidator,
    Field,
    create_model,
)

from specgen.errors import UsageError
from specgen.option_fields import LARGEST_FACTOR
from specgen.option_values import field_type, names_of
from specgen.options import GenerationOptions, Grammar, SamplerOptions
from specgen.serve.formats.fields import AnySchema, Fields, Schema
from specgen.serve.formats.parsed_request import (
    Defaults,
    ParsedRequest,
    RequestKind,
    SpeculativeSettings,
)
from specgen.serve.formats.request_errors import BodyError
from specgen.serve.formats.tools import ToolChoiceField, ToolField, chosen_tools, functions_of
from specgen.session.prompts.template import OWN_VARIABLES, Message
from specgen.text.grammar.json_schema import lenient_schema_grammar, schema_grammar
from specgen.text.grammar.patterns import choice_grammar, pattern_grammar

# --- options --------------------------------------------------------------------------------------

#: A token id as the key of a JSON object.
_TOKEN = re.compile(r"-?[0-9]{1,18}")


def _bias_pairs(value: Any) -> Any:
    """Turn biases into pairs, a form that llama.cpp's server also takes.

    OpenAI's form is an object. Open WebUI sends Ollama the text that was typed into its settings,
    such as ``5432:100, 413:-100``.
    """
    if isinstance(value, str):
        parts = [part.partition(":") for part in value.split(",") if part.strip()]
        value = {key.strip(): bias for key, _, bias in parts}
    if not isinstance(value, dict):
        return value
    pairs: list[tuple[int | str, Any]] = []
    for key, bias in value.items():
        if _TOKEN.fullmatch(key):
            pairs.append((int(key), bias))
        else:
            pairs.append((key, bias))
    return tuple(pairs)


def as_list(value: Any) -> Any:
    """Return a list of a single text; anything else as it is, for pydantic to judge."""
    return [value] if isinstance(value, str) else value


#: A token id, or a text that stands for all of its tokens; and their bias. A bias of False means
#: that they are never chosen.
_Bias: TypeAlias = tuple[
    int | str,
    Annotated[float, BeforeValidator(lambda n: -LARGEST_FACTOR if n is False else n)],
]
#: The biases of a request, which may be for texts.
_Biases: TypeAlias = Annotated[tuple[_Bias, ...], BeforeValidator(_bias_pairs)]


def _option_field(options: type[Any], name: str) -> tuple[Any, Any]:
    """Return the type and the declaration of the field for an option.

    The field has the option's names and limits. It is None if the body does not have it.

    The dataclass checks the same limits when the request is made. The check here comes before that,
    so that an error has the name that the client used, and its value as JSON.
    """
    (option,) = (option for option in dataclasses.fields(options) if option.name == name)
    kind = _Biases if name == "logit_bias" else field_type(options, name)
    return kind | None, Field(None, validation_alias=AliasChoices(*names_of(option)))


#: The options of the sampler that a request may set, with their names, types and limits. Some
#: editors send `samplers` that specgen does not have, so that this field is ignored.
_SAMPLER_FIELDS: dict[str, Any] = {
    option.name: _option_field(SamplerOptions, option.name)
    for option in dataclasses.fields(SamplerOptions)
    if option.name != "samplers"
}
_OPTION_FIELDS = _SAMPLER_FIELDS | {"max_tokens": _option_field(GenerationOptions, "max_tokens")}

if TYPE_CHECKING:
    OptionFields = Fields
else:
    OptionFields = create_model("OptionFields", __base__=Fields, **_OPTION_FIELDS)


# --- all endpoints that generate text -------------------------------------------------------------


class AnswerFormat(Fields):
    """The form that an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: AnySchema | None = Field(
        None, validation_alias=AliasChoices("schema", AliasPath("json_schema", "schema"))
    )
    #: Whether a schema that no grammar can enforce is refused. False also allows objects to have
    #: other properties.
    strict: bool | None = Field(
        None, validation_alias=AliasChoices("strict", AliasPath("json_schema", "strict"))
    )

    def schema_of(self, where: str) -> Schema | bool | None:
        """Return the schema of the answer; None for free text.

        Args:
            where: The name of the field, for the error.

        Raises:
            BodyError: If the schema is missing.
        """
        schema: Schema | bool | None = self.schema_
        match self.type:
            case "text":
                return None
            case "json_object":  # llama.cpp's server takes a schema here
                return schema or {"type": "object"}
            case "json_schema":
                if schema is None:
                    raise BodyError(where, "the schema is missing")
                return schema


def _guided(kind: str, *other_names: str) -> Any:
    """Declare a field with vLLM's older and newer names for a form of answers, and other names."""
    names = AliasChoices(f"guided_{kind}", AliasPath("structured_outputs", kind), *other_names)
    return Field(None, validation_alias=names)


class GenerationRequest(OptionFields):
    """The fields of all endpoints that generate text: when an answer ends, and its form."""

    #: Texts before which the answer ends.
    stop: Annotated[
        tuple[str, ...],
        BeforeValidator(as_list),
        AfterValidator(lambda texts: tuple(filter(None, texts))),
    ] = Field((), validation_alias=AliasChoices("stop", "stop_sequences"))
    #: Whether the end-of-text token is never chosen.
    ignore_eos: bool = False
    #: A grammar in GBNF that the answer follows.
    grammar: str | None = None
    #: A JSON schema that the answer conforms to.
    json_schema: AnySchema | None = None
    #: vLLM: a grammar, as in `grammar`.
    guided_grammar: str | None = _guided("grammar", "ebnf")
    #: vLLM: a JSON schema. Parts of it that no grammar can enforce are left out.
    guided_json: AnySchema | None = _guided("json")
    #: vLLM: whether the answer is a JSON object.
    guided_json_object: bool | None = _guided("json_object")
    #: vLLM: a regular expression that the whole answer matches.
    guided_regex: str | None = _guided("regex", "regex")
    #: vLLM: texts; the answer is one of them.
    guided_choice: tuple[str, ...] | None = _guided("choice")
    #: More variables for the chat template.
    chat_template_kwargs: dict[str, Any] = {}
    #: Whether the answer is streamed.
    stream: bool = False
    #: Settings of speculative decoding.
    speculative: SpeculativeSettings = SpeculativeSettings()
    #: The form of the answer. Each API has it in a field of its own.
    form: AnswerFormat | None = Field(
        None,
        validation_alias=AliasChoices(
            "response_format",
            AliasPath("text", "format"),
            AliasPath("output_config", "format"),
            "output_format",
        ),
    )

    #: The name of that field in this API, for messages.
    form_field: ClassVar[str] = "response_format"

    def parsed(
        self,
        kind: RequestKind,
        defaults: Defaults,
        writer: Callable[..., Any],
        warnings: Sequence[str] = (),
    ) -> ParsedRequest:
        """Return the request that these fields ask for, still without the prompt.

        Args:
            kind: Whether a conversation or a text is continued, or a prompt answered.
            defaults: The values of fields that are left out.
            writer: Makes the `AnswerWriter` of the API.
            warnings: Warnings about what has been ignored so far.

        Raises:
            BodyError: If fields contradict each other, or the grammar cannot be enforced.
        """
        grammar, grammar_warnings = self._grammar()
        grammar = grammar or defaults.generation.grammar
        if self.ignore_eos and grammar is not None:
            raise BodyError("ignore_eos", "a text that follows a grammar must be able to end")
        # Only fields that the body has replace the defaults.
        given_limits = {"max_tokens", "stop", "ignore_eos"} & self.model_fields_set
        limits = self.model_dump(include=given_limits)
        sampling = self.model_dump(include=set(_SAMPLER_FIELDS), exclude_none=True)
        biases = sampling.pop("logit_bias", None)
        request = ParsedRequest(
            kind,
            replace(defaults.sampling, **sampling),
            replace(defaults.generation, **limits, grammar=grammar),
            writer,
            biases=biases,
            warnings=(*self.warnings(), *warnings, *grammar_warnings),
            streams=self.stream,
            speculative=self.speculative,
        )
        return self.with_api_fields(request)

    def with_api_fields(self, request: ParsedRequest) -> ParsedRequest:
        """Apply the fields that only some APIs have to a request; subclasses extend this."""
        return request

    def _grammar(self) -> tuple[Grammar | None, list[str]]:
        """Return the grammar of the answer, and warnings about the parts it cannot enforce.

        Raises:
            BodyError: If there are several grammars, or one that is not valid.
        """
        form_schema = None
        if self.form is not None:
            form_schema = self.form.schema_of(self.form_field)
        possible_grammars: dict[str, Any] = {
            "grammar": self.grammar or None,
            "guided_grammar": self.guided_grammar or None,
            "guided_regex": self.guided_regex,
            "guided_choice": self.guided_choice,
            "json_schema": self.json_schema,
            "guided_json": self.guided_json,
            "guided_json_object": {"type": "object"} if self.guided_json_object else None,
            self.form_field: form_schema,
        }
        names = [name for name, value in possible_grammars.items() if value is not None]
        if not names:
            return None, []
        if len(names) > 1:
            raise BodyError(names[1], f"it cannot be combined with {names[0]}")
        name = names[0]
        value = possible_grammars[name]
        try:
            match name:
                case "grammar" | "guided_grammar":
                    return Grammar("gbnf", value), []
                case "guided_regex":
                    return pattern_grammar(value), []
                case "guided_choice":
                    return choice_grammar(value), []
            return self._schema_grammar(name, value)
        except UsageError as error:
            raise BodyError(name, error.message) from None

    def _schema_grammar(
        self,
        name: str,
        schema: Schema | bool,
    ) -> tuple[Grammar, list[str]]:
        """Return the grammar of a JSON schema, and warnings about the parts it cannot enforce.

        Args:
            name: The name of the field with the schema.
            schema: The schema.

        Raises:
            UsageError: If it is not valid, or if all of it must be enforced and cannot be.
        """
        schema_json = json.dumps(schema)
        strict: bool | None = None
        if name == "json_schema":
            strict = True
        elif name == self.form_field and self.form is not None:
            strict = self.form.strict
        if strict:
            return schema_grammar(schema_json), []
        grammar, left_out = lenient_schema_grammar(schema_json, is_open=strict is False)
        if not left_out:
            return grammar, []
        return grammar, [f"{name}: no grammar can enforce {', '.join(left_out)}"]


# --- all chats ------------------------------------------------------------------------------------


class ChatRequest(GenerationRequest):
    """The fields of all endpoints for conversations: tools, and how much the model thinks."""

    #: The tools that the model knows. OpenAI's older name is ``functions``.
    tools: list[ToolField] = Field([], validation_alias=AliasChoices("tools", "functions"))
    #: Which of the tools it may or must call.
    tool_choice: ToolChoiceField | None = Field(
        None, validation_alias=AliasChoices("tool_choice", "function_call")
    )
    #: Whether an answer may have several calls.
    parallel_tool_calls: bool = True
    #: Whether the model thinks before it answers.
    enable_thinking: bool | None = None
    #: Anthropic's field for that: ``enabled``, ``disabled``, or another type such as ``adaptive``,
    #: which lets the model decide.
    thinking: str | None = Field(None, validation_alias=AliasPath("thinking", "type"))
    #: How much the model thinks; ``none`` for not at all.
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

        The other arguments and the errors are those of `parsed`.
        """
        variables = self._template_variables()
        functions, tool_warnings = functions_of(self.tools)
        tools = chosen_tools(functions, self.tool_choice, is_parallel=self.parallel_tool_calls)
        request = self.parsed("chat", defaults, writer, [*warnings, *tool_warnings])
        return replace(request, messages=messages, tools=tools, variables=variables)

    def _template_variables(self) -> dict[str, Any]:
        """Return the variables of the chat template; ``chat_template_kwargs`` overrides the others.

        Raises:
            BodyError: If ``chat_template_kwargs`` has a variable that specgen sets itself.
        """
        own_names = OWN_VARIABLES & self.chat_template_kwargs.keys()
        if own_names:
            raise BodyError(f"chat_template_kwargs.{min(own_names)}", "specgen sets this variable")
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
