"""What the bodies of all APIs share: how their fields are checked, and the options of an answer.

Agents send new fields with each of their versions. A field that specgen lacks is ignored with a warning; only
what cannot be understood is refused, by the name of the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from specgen.errors import UsageError
from specgen.options import GenerationOptions, Grammar, SamplerOptions, VerifierName
from specgen.session.prompts.template import OWN_VARIABLES
from specgen.text.grammar.json_schema import schema_grammar

#: The most characters of a field's name that an error repeats.
_LONGEST_NAME = 100
#: The largest integer: later layers have 64 bits or fewer.
_LARGEST = 2**63 - 1


class BodyError(UsageError):
    """A field of a request that cannot be honoured: `field` is its name, `what` the reason."""

    def __init__(self, field: str, what: str) -> None:
        self.field = sendable(field)[:_LONGEST_NAME]
        super().__init__(f"{self.field}: {sendable(what)}")


def sendable(text: str) -> str:
    """Return a text in which half a surrogate pair, which UTF-8 cannot express, is an escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def shown(value: Any) -> str:
    """Return a value as JSON, cut to fit a line."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- types of fields ------------------------------------------------------------------------------


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Integer: TypeAlias = Annotated[int, BeforeValidator(_whole), Field(ge=-_LARGEST, le=_LARGEST)]
_FromMinusOne: TypeAlias = Annotated[Integer, Field(ge=-1)]
_NotNegative: TypeAlias = Annotated[float, Field(ge=0)]
_Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
#: The id of a token as the key of an object: Python does not read numbers of any length.
_TokenKey: TypeAlias = Annotated[str, Field(pattern=r"^[0-9]{1,19}$")]
Word: TypeAlias = Annotated[str, Field(min_length=1)]
Schema: TypeAlias = dict[str, Any]


class Fields(BaseModel):
    """An object of a body. Null means that a field is not there, and unknown fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: each for name, each in value.items() if each is not None}


class Part(Fields):
    """A part of a message: a text, or something that no local model reads."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None


def _as_parts(value: Any) -> Any:
    return [{"text": value}] if isinstance(value, str) else value


#: A content: a text, or a list of parts.
Parts: TypeAlias = Annotated[list[Part], BeforeValidator(_as_parts)]


def text_of(where: str, parts: Sequence[Part], separator: str = "") -> str:
    """Return the texts of a content, joined. Raise `BodyError` for a part that is none."""
    texts: list[str] = []
    for number, part in enumerate(parts):
        text = part.refusal if part.text is None else part.text
        if text is None:
            what = f"parts of type {shown(part.type)} are not supported, only texts are"
            raise BodyError(f"{where}[{number}]", what)
        texts.append(text)
    return separator.join(texts)


class Speculative(Fields):
    """A request's wishes about drafts; None keeps the server's setting."""

    model_config = ConfigDict(extra="forbid")

    draft: bool = True
    #: The most tokens drafted in a round.
    max: Annotated[Integer, Field(ge=0, lt=2**31)] | None = None
    verifier: VerifierName | None = None
    #: Whether a stream says of each token where it comes from.
    pieces: bool = False


class _NamedSchema(Fields):
    schema_: Schema | None = Field(None, validation_alias="schema")


class AnswerFormat(_NamedSchema):
    """The form of an answer, with its JSON schema where the APIs have it."""

    type: str
    json_schema: _NamedSchema | None = None

    def schema_of(self, where: str) -> Schema | None:
        """Return the schema; None for a free text."""
        found = (self.json_schema or self).schema_
        if self.type == "text":
            return None
        if self.type == "json_object":  # llama.cpp's servers take a schema here
            return found or {"type": "object"}
        if self.type != "json_schema" or found is None:
            what = f"type {shown(self.type)} is not text, json_object, or json_schema with a schema"
            raise BodyError(where, what)
        return found


class Tool(Fields):
    """A tool, in the forms of all APIs."""

    type: str = "function"
    name: str | None = None
    description: str | None = None
    parameters: Schema | None = None
    input_schema: Schema | None = None
    #: Of a tool that takes a free text.
    format: dict[str, Any] | None = None
    function: Tool | None = None


class Choice(Fields):
    """How tools may be called, in the forms of all APIs."""

    type: str = "function"
    name: str | None = None
    function: Choice | None = None
    #: Of ``allowed_tools``.
    mode: Literal["auto", "required"] = "auto"
    tools: list[Choice] = []
    allowed_tools: Choice | None = None
    disable_parallel_tool_use: bool = False


#: A choice; a text is its type.
ToolChoice: TypeAlias = Annotated[
    Choice, BeforeValidator(lambda value: {"type": value} if isinstance(value, str) else value)
]


# --- bodies ---------------------------------------------------------------------------------------

#: Fields whose loss nobody would miss.
_SILENT = frozenset(
    [
        *("betas", "cache_control", "client_metadata", "context_management", "metadata", "model"),
        *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier"),
        *("stream_options", "user", "parallel_tool_calls", "display"),
    ]
)
#: Values by which known fields ask for nothing that specgen lacks.
_ASKS_NOTHING: Mapping[str, Any] = {
    "best_of": 1,
    "cache_prompt": True,
    "id_slot": -1,
    "modalities": ["text"],
    "summary": "auto",
    "truncation": "disabled",
    "verbosity": "medium",
}


class Body(Fields):
    """A body of a request, or an object in one. Unknown fields are kept for warnings."""

    model_config = ConfigDict(extra="allow")

    def warnings(self) -> list[str]:
        ignored = [
            f"{name[:_LONGEST_NAME]}: ignored, since specgen has no such field"
            for name, value in (self.model_extra or {}).items()
            if value not in (False, "", [], {}, _ASKS_NOTHING.get(name)) and name not in _SILENT
        ]
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Body):
                ignored += [f"{name}.{each}" for each in value.warnings()]
        return ignored


class AnswerBody(Body):
    """The options of an answer: OpenAI's and Anthropic's fields, samplers by llama.cpp's names."""

    temperature: _NotNegative | None = None
    top_k: Integer | None = None
    top_p: _Share | None = None
    min_p: _Share | None = None
    seed: _FromMinusOne | None = None
    typical_p: _Share | None = None
    top_n_sigma: float | None = None
    repeat_last_n: _FromMinusOne | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: _NotNegative | None = None
    dry_base: _NotNegative | None = None
    dry_allowed_length: Annotated[Integer, Field(ge=0)] | None = None
    dry_last_n: _FromMinusOne | None = Field(
        None, validation_alias=AliasChoices("dry_last_n", "dry_penalty_last_n")
    )
    dry_breakers: list[str] | None = Field(
        None, validation_alias=AliasChoices("dry_breakers", "dry_sequence_breakers")
    )
    xtc_probability: _Share | None = None
    xtc_threshold: _Share | None = None
    dynatemp_range: _NotNegative | None = None
    dynatemp_exponent: _NotNegative | None = None
    logit_bias: dict[_TokenKey, float] | None = None
    max_tokens: _FromMinusOne | None = Field(
        None,
        validation_alias=AliasChoices(
            "max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"
        ),
    )
    stop: Annotated[list[Word], BeforeValidator(_listed)] | None = Field(
        None, validation_alias=AliasChoices("stop", "stop_sequences")
    )
    ignore_eos: bool | None = None
    grammar: str | None = None
    json_schema: Schema | None = None
    chat_template_kwargs: dict[str, Any] = {}
    stream: bool = False
    speculative: Speculative = Speculative()

    #: Where the body has the form of an answer.
    format_field: ClassVar[str] = "response_format"

    def sampling(self, default: SamplerOptions) -> SamplerOptions:
        """Return how tokens are drawn; fields that are not there keep the default."""
        names = {field.name for field in fields(SamplerOptions)} & AnswerBody.model_fields.keys()
        given = {name: getattr(self, name) for name in names}
        if self.dry_breakers is not None:
            given["dry_breakers"] = tuple(self.dry_breakers)
        if self.logit_bias is not None:
            given["logit_bias"] = tuple((int(key), bias) for key, bias in self.logit_bias.items())
        return replace(
            default, **{name: value for name, value in given.items() if value is not None}
        )

    def generation(
        self, default: GenerationOptions, form: AnswerFormat | None = None
    ) -> GenerationOptions:
        """Return when the answer ends, and its grammar; `form` is the one of the API. Raise `BodyError`."""
        grammar = self._grammar(form) or default.grammar
        if self.ignore_eos and grammar is not None:
            raise BodyError("ignore_eos", "a text that follows a grammar has an end")
        return replace(
            default,
            max_tokens=default.max_tokens if self.max_tokens is None else self.max_tokens,
            stop=default.stop if self.stop is None else tuple(self.stop),
            ignore_eos=default.ignore_eos if self.ignore_eos is None else self.ignore_eos,
            grammar=grammar,
        )

    def _grammar(self, form: AnswerFormat | None) -> Grammar | None:
        schema = None if form is None else form.schema_of(self.format_field)
        asked = {"grammar": self.grammar, "json_schema": self.json_schema}
        asked[self.format_field] = schema
        names = [name for name, value in asked.items() if value is not None]
        if not names:
            return None
        if len(names) > 1:
            raise BodyError(names[1], f"{names[0]} is given as well")
        if self.grammar is not None:
            return Grammar("gbnf", self.grammar)
        try:
            return schema_grammar(json.dumps(asked[names[0]]))
        except UsageError as error:
            raise BodyError(names[0], error.message) from None

    def variables(self, effort: str | None = None, thinks: bool | None = None) -> Mapping[str, Any]:
        """Return the variables that the body sets for the chat template. Raise `BodyError`."""
        found: dict[str, Any] = {} if thinks is None else {"enable_thinking": thinks}
        if effort is not None:
            found["reasoning_effort"] = effort
        if effort == "none":
            found["enable_thinking"] = False
        for name in self.chat_template_kwargs:
            if name in OWN_VARIABLES:
                raise BodyError(f"chat_template_kwargs.{name}", "specgen sets this variable")
        return found | self.chat_template_kwargs


# --- reading --------------------------------------------------------------------------------------

_Model = TypeVar("_Model", bound=Fields)
#: What is wrong with a value, by pydantic's types of errors.
_WRONG = {
    "bool_type": "{} is not true or false",
    "dict_type": "{} is not an object",
    "extra_forbidden": "there is no such field",
    "finite_number": "{} is not a number",
    "float_type": "{} is not a number",
    "greater_than_equal": "{} is less than {ge:g}",
    "int_from_float": "{} is not a whole number",
    "int_type": "{} is not a whole number",
    "less_than": "{} is not less than {lt:g}",
    "less_than_equal": "{} is more than {le:g}",
    "list_type": "{} is not a list",
    "literal_error": "{} is none of {expected}",
    "missing": "it is missing",
    "model_type": "{} is not an object",
    "string_too_short": "it is empty",
    "string_type": "{} is not a text",
    "too_short": "it is empty",
}


def parse(model: type[_Model], body: Mapping[str, Any]) -> _Model:
    """Return a body as a model. Raise `BodyError` for the first value that is wrong."""
    for name, value in body.items():
        text = json.dumps({name: value}, ensure_ascii=False)
        if sendable(text) != text:  # JSON's escapes can make it
            raise BodyError(name, "it has half a surrogate pair, which is no text")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    what = _WRONG.get(first["type"], "{} is not valid here")
    given = shown(first["input"])
    raise BodyError(_field(first["loc"]), what.format(given, **first.get("ctx", {})))


def _field(place: Sequence[str | int]) -> str:
    """Return the name of a field: ``messages[0].content``."""
    text = "".join(
        f"[{each}]" if isinstance(each, int) else f".{each}" for each in place if each != "[key]"
    )
    return text.removeprefix(".") or "body"
