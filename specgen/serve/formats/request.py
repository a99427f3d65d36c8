"""Requests as the rest of specgen knows them, and what their bodies have in common in all APIs.
Agents send new fields with each version: one that specgen lacks is ignored with a warning, and only
what makes no sense is refused.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)

from specgen.errors import UsageError
from specgen.options import GenerationOptions, Grammar, SamplerOptions, VerifierName
from specgen.sampler_options import LARGEST_FACTOR
from specgen.serve.formats.call_forms import CallForm, form_of
from specgen.serve.formats.tool_calls import Function, calls_grammar
from specgen.session.prompts import Prompt, Prompts
from specgen.session.prompts.infill import Gap
from specgen.session.prompts.template import OWN_VARIABLES, Message, Role, ToolCall
from specgen.session.prompts.thoughts import THOUGHT_CONTROLS
from specgen.text.grammar.json_schema import lenient_schema_grammar, schema_grammar

#: An object of JSON: a body, an event, or a chunk of a stream.
Json: TypeAlias = dict[str, Any]
#: ``chat`` continues a conversation, ``completion`` a text, and ``prompt`` answers a text as
#: `specgen run` does.
Kind: TypeAlias = Literal["chat", "completion", "prompt"]
#: Fields whose loss nobody would miss.
_SILENT = frozenset(
    [
        *("annotations", "betas", "cache_control", "cache_prompt", "client_metadata", "id", "type"),
        *("context_management", "id_slot", "keep_alive", "t_max_prompt_ms", "user", "summary"),
        *("logprobs", "metadata", "model", "name", "prompt_cache_key", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "signature", "status", "stream_options", "strict"),
    ]
)
#: Variables of chat templates that say how much is thought; few templates read both.
_THINKING = frozenset(["enable_thinking", "reasoning_effort"])
#: The parameters of a custom tool: a free text.
_FREE_TEXT: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class BodyError(UsageError):
    """A field of a request that cannot be honoured: `field` is its name, `what` the reason."""

    def __init__(self, field: str, what: str) -> None:
        self.field = field[:100]
        super().__init__(f"{self.field}: {what}")


def shown(value: Any) -> str:
    """Return a value as JSON, cut to fit a line."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Defaults(NamedTuple):
    """What holds for the fields that a body leaves out."""

    sampling: SamplerOptions = SamplerOptions()
    generation: GenerationOptions = GenerationOptions()


NO_DEFAULTS = Defaults()


# --- fields of bodies -----------------------------------------------------------------------------

Integer: TypeAlias = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Schema: TypeAlias = dict[str, Any]


class Fields(BaseModel):
    """An object of a body. Null means that a field is not there."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: each for name, each in value.items() if each is not None}

    def warnings(self) -> list[str]:
        """Return a warning for each name of fields that are ignored, also in objects within."""
        names = dict.fromkeys(self.ignored())
        return [f"{name[:100]}: ignored, since specgen has no such field" for name in names]

    def ignored(self) -> Iterator[str]:
        for name, value in (self.model_extra or {}).items():
            if value not in (False, "", [], {}) and name not in _SILENT:
                yield name
        for name in type(self).model_fields:
            value = getattr(self, name)
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, Fields):
                    yield from (f"{name}.{inner}" for inner in each.ignored())


_Model = TypeVar("_Model", bound=Fields)


def parse(model: type[_Model], body: Json) -> _Model:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    what = first["msg"]
    if first["type"] != "missing":
        what += f"; it is {shown(first['input'])}"
    place = (f"[{each}]" if isinstance(each, int) else f".{each}" for each in first["loc"])
    raise BodyError("".join(place).removesuffix(".[key]").removeprefix("."), what)


class Part(Fields):
    """A part of a message: a text, or something that no local model reads."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None


def _as_parts(value: Any) -> Any:
    value = {"text": value} if isinstance(value, str) else value
    return [value] if isinstance(value, dict) else value


#: Lets a list of parts be a text, or one part.
AS_PARTS = BeforeValidator(_as_parts)
Parts: TypeAlias = Annotated[list[Part], AS_PARTS]


def text_of(parts: Sequence[Part], separator: str = "\n") -> str:
    """Return a content's texts as lines. What no local model reads is named: a refusal would end an
    agent.
    """
    found: list[str | None] = []
    for part in parts:
        found.append(part.refusal if part.text is None else part.text)
        if found[-1] is None and not part.type.endswith("text"):
            kind = part.type.removeprefix("input_").removesuffix("_url")
            found[-1] = f"[{kind[:40]} left out: this model reads text]"
    return separator.join(filter(None, found))


class Speculative(Fields):
    """A request's wishes about drafts; None keeps the server's setting. `events`: a stream has
    those of each round.
    """

    draft: bool = True
    max: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    verifier: VerifierName | None = None
    events: bool = False


class AnswerFormat(Fields):
    """The form of an answer, with its JSON schema where the APIs have it."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: Schema | bool | None = Field(
        None, validation_alias=AliasChoices("schema", AliasPath("json_schema", "schema"))
    )
    strict: bool | None = Field(
        None, validation_alias=AliasChoices("strict", AliasPath("json_schema", "strict"))
    )

    def schema_of(self, where: str) -> Schema | bool | None:
        if self.type == "json_schema" and self.schema_ is None:
            raise BodyError(where, "it has no schema")
        if self.type == "json_object":  # llama.cpp's servers take a schema here
            return self.schema_ or {"type": "object"}
        return None if self.type == "text" else self.schema_


def _flat(value: Any) -> Any:
    """Return a tool or a choice without the inner object of a chat's: {"type": "function",
    "function": {...}}.
    """
    if not isinstance(value, dict):
        return {"type": value} if isinstance(value, str) else value
    kind = str(value.get("type", "function"))
    inner = value.get(kind)
    rest = {name: each for name, each in value.items() if name != kind}
    return {**rest, **inner} if isinstance(inner, dict) else rest


class Tool(Fields):
    """A tool; `format` is that of a custom one, which takes a free text."""

    type: str = "function"
    name: str = ""
    description: str = ""
    parameters: Schema = Field({}, validation_alias=AliasChoices("parameters", "input_schema"))
    format: dict[str, Any] = {}
    defer_loading: bool = False  # for a search to find


class Choice(Fields):
    """How tools may be called; `mode` and `tools` are those of ``allowed_tools``."""

    type: str = "function"
    name: str = ""
    mode: Literal["auto", "required"] = "auto"
    tools: list[Annotated[Choice, BeforeValidator(_flat)]] = []
    disable_parallel_tool_use: bool = False


#: A token, or a text and so all of its tokens; false means that they never come.
_Bias: TypeAlias = tuple[
    int | str, Annotated[float, BeforeValidator(lambda n: -LARGEST_FACTOR if n is False else n)]
]


def _biases(value: Any) -> Any:
    """Return biases as pairs, as llama.cpp's server also takes them."""
    is_token = re.compile(r"-?[0-9]{1,18}").fullmatch
    if isinstance(value, dict):
        value = tuple((int(key) if is_token(key) else key, bias) for key, bias in value.items())
    return value


def _sampler_fields() -> dict[str, Any]:
    """Return the fields of samplers: llama.cpp's names, with types and limits of the options."""
    found: dict[str, Any] = {}
    for each in (each for each in fields(SamplerOptions) if each.name != "samplers"):
        several: dict[str, Any] = {
            "logit_bias": Annotated[tuple[_Bias, ...], BeforeValidator(_biases)],
            "dry_breakers": tuple[str, ...],
            "top_k": Annotated[int, BeforeValidator(lambda k: 0 if k == -1 else k)],
        }
        number = type(each.default)
        spellings = [each.replace("-", "_").lstrip("_") for each in each.metadata["spellings"]]
        other = each.name.replace("repeat_", "repetition_")
        names = AliasChoices(each.name, *spellings, f"{spellings[0]}s", other)
        most = {int: 2**63 - 1, float: LARGEST_FACTOR}.get(number)
        least = each.metadata.get("min", most and -most)
        limits = Field(None, validation_alias=names, ge=least, le=each.metadata.get("max", most))
        found[each.name] = (several.get(each.name, number) | None, limits)
    return found


if TYPE_CHECKING:
    _Samplers = Fields
else:
    _Samplers = create_model("_Samplers", __base__=Fields, **_sampler_fields())


class AnswerBody(_Samplers):
    """The options of an answer: OpenAI's and Anthropic's fields, and those of samplers."""

    max_tokens: Annotated[Integer, Field(ge=-1)] | None = Field(
        None,
        validation_alias=AliasChoices(
            "max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"
        ),
    )
    stop: Annotated[
        tuple[str, ...],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        AfterValidator(lambda texts: tuple(filter(None, texts))),
    ] = Field((), validation_alias=AliasChoices("stop", "stop_sequences"))
    ignore_eos: bool = False
    grammar: str | None = None
    json_schema: Schema | bool | None = None
    chat_template_kwargs: dict[str, Any] = {}
    stream: bool = False
    speculative: Speculative = Speculative()
    #: The form of an answer, where each API has it, and the name of that place in warnings.
    form: AnswerFormat | None = Field(
        None,
        validation_alias=AliasChoices(
            "response_format",
            AliasPath("text", "format"),
            AliasPath("output_config", "format"),
            "output_format",
        ),
    )
    form_field: ClassVar[str] = "response_format"

    def request(
        self, kind: Kind, defaults: Defaults, warnings: Sequence[str] = (), **more: Any
    ) -> Request:
        """Return the request with these defaults, and `more` of its fields. Raise `BodyError`."""
        sampling, generation = defaults
        samplers = self.model_dump(include={*_Samplers.model_fields}, exclude_none=True)
        biases = samplers.pop("logit_bias", None)
        ends, told = {"max_tokens", "stop", "ignore_eos"} & self.model_fields_set, [*warnings]
        grammar = self._grammar(told) or generation.grammar
        if self.ignore_eos and grammar is not None:
            raise BodyError("ignore_eos", "a text that follows a grammar has an end")
        return Request(
            kind,
            replace(sampling, **samplers),
            replace(generation, **self.model_dump(include=ends), grammar=grammar),
            biases=biases,
            warnings=(*self.warnings(), *told),
            streams=self.stream,
            speculative=self.speculative,
            **more,
        )

    def _grammar(self, warnings: list[str]) -> Grammar | None:
        """Return what the answer must follow; if not strict, without what no grammar enforces.
        Raise `BodyError`.
        """
        form = self.form
        schema = None if form is None else form.schema_of(self.form_field)
        given = {"grammar": self.grammar or None, "json_schema": self.json_schema}
        asked = {k: v for k, v in (given | {self.form_field: schema}).items() if v is not None}
        if not asked:
            return None
        name, *others = asked
        if others:
            raise BodyError(others[0], f"{name} is given as well")
        if self.grammar:
            return Grammar("gbnf", self.grammar)
        try:
            if form is None or form.strict or schema is None:
                return schema_grammar(json.dumps(asked[name]))
            text, is_open = json.dumps(schema), form.strict is False
            grammar, left_out = lenient_schema_grammar(text, is_open=is_open)
        except UsageError as error:
            raise BodyError(name, error.message) from None
        if left_out:
            warnings.append(f"{name}: no grammar can enforce {', '.join(left_out)}")
        return grammar


class ChatBody(AnswerBody):
    """A body for the next turn of a conversation."""

    tools: list[Annotated[Tool, BeforeValidator(_flat)]] = []
    tool_choice: Annotated[Choice, BeforeValidator(_flat)] | None = None
    parallel_tool_calls: bool = True
    enable_thinking: bool | None = None
    #: With other types, ``adaptive`` for example, the model decides.
    thinking: str | None = Field(None, validation_alias=AliasPath("thinking", "type"))
    effort: str | None = Field(
        None,
        validation_alias=AliasChoices(
            "reasoning_effort",
            AliasPath("reasoning", "effort"),
            AliasPath("output_config", "effort"),
        ),
    )

    def chat(
        self,
        messages: tuple[Message, ...],
        defaults: Defaults,
        warnings: Sequence[str] = (),
        **more: Any,
    ) -> tuple[Request]:
        """Return the request for the turn after these messages, with `more` of its fields. Raise
        `BodyError`.
        """
        told, variables = [*warnings], dict[str, Any]()
        thinks = {"enabled": True, "disabled": False}.get(self.thinking or "", self.enable_thinking)
        if thinks is not None:
            variables["enable_thinking"] = thinks
        if self.effort is not None:
            variables["reasoning_effort"] = self.effort
        if self.effort == "none":
            variables["enable_thinking"] = False
        for name in OWN_VARIABLES & self.chat_template_kwargs.keys():
            raise BodyError(f"chat_template_kwargs.{name}", "specgen sets this variable")
        variables |= self.chat_template_kwargs
        more |= {"messages": messages, "tools": self._tools(told), "variables": variables}
        return (self.request("chat", defaults, told, **more),)

    def _tools(self, warnings: list[str]) -> Tools | None:
        """Return the functions that run at the client, and those that the choice allows. Raise
        `BodyError`.
        """
        found: dict[str, Function] = {}
        for number, tool in enumerate(self.tools):
            where, name = f"tools[{number}]", tool.name
            if tool.type not in ("function", "custom"):
                warnings.append(f"{where}: ignored, since {shown(tool.type)} does not run here")
                continue
            if not re.fullmatch(r"[^\s\"'\\<>{}()\[\]]{1,128}", name):
                rule = "is not a name of 1 to 128 characters without spaces, quotes and brackets"
                raise BodyError(f"{where}.name", f"{shown(name)} {rule}")
            if name in found:
                raise BodyError(f"{where}.name", f"{shown(name)} is given twice")
            if tool.format not in ({}, {"type": "text"}):
                warnings.append(f"{where}.format: ignored, the input is a free text")
            is_text = tool.type == "custom" and not tool.parameters
            # Templates read the properties even of functions without parameters.
            schema = {"type": "object", "properties": {}, **tool.parameters}
            schema["properties"] = schema["properties"] or {}
            for part, kind in (("properties", dict), ("required", list)):
                if not isinstance(schema.get(part) or kind(), kind):
                    raise BodyError(f"{where}.parameters.{part}", f"it is {shown(schema[part])}")
            found[name] = Function(name, tool.description, _FREE_TEXT if is_text else schema)
        return self._allowed(found)

    def _allowed(self, found: Mapping[str, Function]) -> Tools | None:
        functions, choice = tuple(found.values()), self.tool_choice or Choice(type="auto")
        kind, names = choice.type, [*found]
        must_call = kind != "auto" and (kind != "allowed_tools" or choice.mode == "required")
        if kind == "none" or (kind == "auto" and not functions):
            return None
        if not functions:
            raise BodyError("tool_choice", f"{shown(kind)} needs tools")
        is_one = kind in ("function", "custom", "tool")
        if is_one:
            names = [choice.name]
        elif kind == "allowed_tools":
            names = [each.name for each in choice.tools if each.type in ("function", "custom")]
        elif kind not in ("auto", "required", "any"):
            raise BodyError("tool_choice", f"{shown(kind)} is not a choice that specgen knows")
        if unknown := [name for name in names if name not in found]:
            what = f"there is no function {shown(unknown[0])} among tools"
            raise BodyError("tool_choice", what)
        allowed = tuple({name: found[name] for name in names}.values())
        is_parallel = self.parallel_tool_calls and not choice.disable_parallel_tool_use
        return Tools(functions, allowed, must_call, is_parallel and not is_one) if allowed else None


# --- requests -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions that the model knows, and may call: it must (`must_call`), or several
    (`is_parallel`).
    """

    functions: tuple[Function, ...]
    callable: tuple[Function, ...]
    must_call: bool = False
    is_parallel: bool = True


@dataclass(frozen=True, slots=True)
class Request:
    """The prompt of an answer, how its tokens are sampled, and when it ends. A ``chat`` has
    `messages`; the others have a `text`, the `tokens` of one, or a `gap` in one.
    """

    kind: Kind
    sampling: SamplerOptions
    generation: GenerationOptions
    messages: tuple[Message, ...] = ()
    continues: bool = False  # the last message is the beginning of the answer
    text: str = ""
    tokens: tuple[int | str, ...] | None = None  # with texts between them
    gap: Gap | None = None
    tools: Tools | None = None
    call_form: CallForm | None = None  # how the model writes calls: see `with_call_form`
    variables: Mapping[str, Any] = field(default_factory=dict)  # more of them for the template
    #: Of tokens and texts: `for_model` makes these tokens.
    biases: tuple[tuple[int | str, float], ...] | None = None
    splits_reasoning: bool = False  # a thinking block is no part of the answer
    warnings: tuple[str, ...] = ()  # what was ignored
    n: int = 1  # answers that are wanted
    streams: bool = False
    echoes: bool = False  # the text begins with the prompt
    has_usage_alone: bool = False  # in a last chunk of a stream
    speculative: Speculative = field(default_factory=Speculative)
    lines_s: float = 0.0  # an answer of at least a line ends after so many seconds; 0: no limit
    writer: Callable[..., Any] | None = None  # the `AnswerWriter` of the API; None is OpenAI's

    def prompt(
        self,
        prompts: Prompts,
        now: datetime.datetime,
        *,
        chat: bool | None = None,
        system: str | None = None,
    ) -> Prompt:
        """Return the prompt of a request without a gap. Raise `UsageError`, `PromptError`."""
        if self.kind == "chat":
            tools = tuple(each.definition for each in self.tools.functions) if self.tools else ()
            # A text that follows a grammar is whole.
            grammar = self.generation.grammar
            is_free = grammar is None or (grammar.mark and not grammar.is_call)
            continues = self.continues and bool(is_free)
            messages = self.messages[:-1] if continues else self.messages
            prompt = prompts.of_messages(messages, now=now, tools=tools, variables=self.variables)
            if not self.splits_reasoning:
                prompt = replace(prompt, thoughts=None)
            return prompts.continued(prompt, self.messages[-1]) if continues else prompt
        if self.tokens is not None:
            return prompts.of_tokens(self.tokens)
        if self.kind == "completion":
            return prompts.of_text(self.text, chat=False)
        return prompts.of_text(self.text, chat=chat, system=system, now=now)


#: A request for each prompt of a body.
Requests: TypeAlias = tuple[Request, ...]


def with_call_form(
    request: Request, template: str | None, has_token: Callable[[str], bool] = lambda _name: False
) -> Request:
    """Return the request for a model with this chat template: with the form of its calls, a grammar
    if one is needed, and the variables it reads. Calls that cannot be read stay text, with a
    warning, or raise `BodyError` if they are a must.
    """
    request = _with_read_variables(request, template or "")
    tools, generation = request.tools, request.generation
    if request.splits_reasoning:
        generation = replace(generation, shown_controls=THOUGHT_CONTROLS)
        request = replace(request, generation=generation)
    if tools is None:
        return request
    form = form_of(template or "", has_token)
    if form is None:
        what = "the model's chat template takes no tools, or writes calls in an unknown form"
        if tools.must_call:
            raise BodyError("tool_choice", what)
        return replace(request, warnings=(*request.warnings, f"tools: {what}; calls stay text"))
    if generation.grammar is not None and generation.grammar.form == "gbnf":
        raise BodyError("grammar", "it excludes tools; a JSON schema does not")
    other = None if tools.must_call else generation.grammar
    if tools.must_call and generation.ignore_eos:
        raise BodyError("ignore_eos", "a text that follows a grammar has an end")
    is_strict = tools.must_call or other is not None
    try:
        how: dict[str, Any] = {"is_parallel": tools.is_parallel, "must_call": tools.must_call}
        grammar, warnings = calls_grammar(form, tools.callable, other=other, **how)
        generation = replace(generation, grammar=grammar)
    except UsageError as error:
        if is_strict:
            raise BodyError("tools", error.message) from None
        warnings = []
    controls = dict.fromkeys((*generation.shown_controls, *form.controls))
    generation = replace(generation, shown_controls=tuple(controls))
    told = warnings if is_strict else []
    if not re.search(r"\b(?:tools|functions)\b", template or ""):
        told = [*told, "the model's chat template does not describe them to the model"]
    told = [*request.warnings, *(f"tools: {each}" for each in told)]
    return replace(request, generation=generation, call_form=form, warnings=tuple(told))


def _with_read_variables(request: Request, template: str) -> Request:
    given = request.variables
    words = set(re.findall(r"\w+", template))
    read = {name: value for name, value in given.items() if name in words}
    unread = given.keys() - read - (_THINKING if _THINKING & read.keys() else frozenset())
    ignored = [f"{name}: ignored, since the chat template does not read it" for name in unread]
    return replace(request, variables=read, warnings=(*request.warnings, *sorted(ignored)))


def is_begun(messages: Sequence[Message]) -> bool:
    """Return whether the last message can be the beginning of an answer."""
    last = messages[-1]
    return len(messages) > 1 and last.role == "assistant" and not last.tool_calls


class Conversation:
    """The messages of a chat, as they grow."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def add_result(self, identity: str | None, text: str, name: str | None = None) -> None:
        """Add the result of a call. If the call is gone (agents shorten conversations), it is the
        user's text.
        """
        calls = (call for message in self.messages for call in message.tool_calls)
        found = (call.name for call in calls if call.identity == (identity or ""))
        if names := [each for each in found if name in (None, each)]:
            self.messages.append(Message("tool", text, tool_call_id=identity, name=names[-1]))
        else:
            self.join_text("user", f"[result of an earlier call]\n{text}")

    def join_text(self, role: Role, text: str) -> None:
        """Add a text to a role's turn; a system message behind the beginning is the user's, as
        templates want it.
        """
        if role == "system" and any(message.role != "system" for message in self.messages):
            role = "user"
        last = self._turn(role)
        self.messages[-1] = replace(last, content=_paragraphs(last.content, text))

    def join_thought(self, thought: str) -> None:
        last = self._turn("assistant")
        self.messages[-1] = replace(last, reasoning=_paragraphs(last.reasoning, thought))

    def join_call(self, where: str, identity: str | None, name: str | None, arguments: Any) -> None:
        """Add a call to the model's turn. Raise `BodyError` if it has no id or no name."""
        if not identity or not name:
            raise BodyError(where, "a call needs an id and a name")
        last = self._turn("assistant")
        calls = (*last.tool_calls, ToolCall(identity, name, arguments))
        self.messages[-1] = replace(last, tool_calls=calls)

    def _turn(self, role: Role) -> Message:
        if not self.messages or self.messages[-1].role != role:
            self.messages.append(Message(role, ""))
        return self.messages[-1]


def _paragraphs(*texts: str | None) -> str:
    return "\n\n".join(filter(None, texts))
