"""Reads the body of a request for a chat completion or a text completion.

The fields and their meaning are OpenAI's; samplers that its API lacks have llama.cpp's names. The command
line gives the defaults. A field that specgen does not know, or a value that it cannot honour, is refused: an
answer to another question than the one that was asked is worse than none. A field that only asks for
something beside the answer's meaning that specgen lacks is ignored, with a warning.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from specgen.errors import UsageError
from specgen.events import FinishedEvent
from specgen.options import GenerationOptions, Grammar, SamplerOptions
from specgen.serve.formats.openai.answer_parser import AnswerParser
from specgen.serve.formats.openai.body import BodyError, boolean_of, shown, text_of, utf8
from specgen.serve.formats.openai.messages import read_messages
from specgen.serve.formats.openai.tool_calls import ToolCallParser
from specgen.serve.formats.openai.tool_forms import CallForm, form_of
from specgen.serve.formats.openai.tool_grammar import calls_grammar
from specgen.serve.formats.openai.tools import Tools, read_tools
from specgen.session.prompts.template import OWN_VARIABLES, Message
from specgen.session.thoughts import ThoughtReader, is_thinking
from specgen.text.grammar.json_schema import schema_grammar

#: The kinds of requests: ``chat`` continues a conversation, ``completion`` continues a text, and ``prompt``
#: answers a text as `specgen run` does.
Kind: TypeAlias = Literal["chat", "completion", "prompt"]

#: Fields that do not affect the text of the answer.
_SILENT = frozenset(
    [
        "metadata",
        "model",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "stream_options",
        "user",
    ]
)
#: Fields that are ignored, with a warning: the values that ask for nothing, and what is lacking.
_LACKING: dict[str, tuple[tuple[Any, ...], str]] = {
    "prediction": ((None,), "n-grams of the conversation draft instead"),
    "store": ((None, False), "answers are not kept"),
    "verbosity": ((None, "medium"), "the model has no such setting"),
}
#: Fields of which only these values are accepted, since they ask for nothing.
_ONLY_NOTHING: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "n": (None, 1),
    "parallel_tool_calls": (None, True, False),
    "stream": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "web_search_options": (None,),
}
#: Fields that only a chat may have.
_OF_CHATS = frozenset(["parallel_tool_calls", "tool_choice", "tools"])
_REASONING_FORMATS = ("none", "auto", "deepseek")
#: Other names of fields: OpenAI's newer one, and those of llama.cpp's server.
_ALIASES = {
    "dry_penalty_last_n": "dry_last_n",
    "dry_sequence_breakers": "dry_breakers",
    "max_completion_tokens": "max_tokens",
    "n_predict": "max_tokens",
}
_MOST_LOGPROBS = 100
#: Longer names of fields resemble no known one.
_LONGEST_FIELD = 40
#: The largest integer: later layers have 64 bits or fewer.
_LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class TemplateVariable:
    """A variable for the chat template, and the `field` of the request that sets it."""

    field: str
    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Request:
    """A request: the prompt of an answer, how its tokens are sampled, and when it ends.

    A ``chat`` has `messages`; the others have a `text`, or the `tokens` of one.
    """

    kind: Kind
    sampling: SamplerOptions
    generation: GenerationOptions
    messages: tuple[Message, ...] = ()
    text: str = ""
    tokens: tuple[int, ...] | None = None
    tools: Tools | None = None
    #: How the model writes calls; known after `with_call_form`.
    call_form: CallForm | None = None
    variables: tuple[TemplateVariable, ...] = ()
    #: Whether a thinking block becomes `reasoning_content`, apart from the answer.
    splits_reasoning: bool = False
    #: What was ignored.
    warnings: tuple[str, ...] = ()

    @property
    def tool_definitions(self) -> tuple[dict[str, Any], ...]:
        """The definitions of tools for the template."""
        return self.tools.definitions if self.tools is not None else ()

    @property
    def template_variables(self) -> dict[str, Any]:
        """More variables for the template."""
        return {variable.name: variable.value for variable in self.variables}

    def thought_reader(self, prompt: str) -> ThoughtReader | None:
        """Return a reader for the thinking block of one answer to a rendered prompt; None if it is not
        split off. An answer that follows a grammar has none."""
        if not self.splits_reasoning or self.generation.grammar is not None:
            return None
        return ThoughtReader(is_begun=is_thinking(prompt))

    def parser(self, prompt: str = "") -> AnswerParser | None:
        """Return a parser for one answer to a rendered prompt; None if the answer is only text."""
        thoughts, calls = self.thought_reader(prompt), None
        if self.tools is not None and self.call_form is not None:
            names = [function.name for function in self.tools.callable]
            calls = ToolCallParser(
                self.call_form,
                names,
                one_only=not self.tools.is_parallel,
                calls_only=self.tools.must_call,
            )
        return AnswerParser(thoughts, calls) if thoughts or calls else None

    def stop_string(self, finished: FinishedEvent) -> str | None:
        """Return the stop string that ended an answer; None if something else did."""
        return finished.stopped_by if finished.stopped_by in self.generation.stop else None


def read_request(
    kind: Kind,
    body: Mapping[str, Any],
    sampling: SamplerOptions,
    generation: GenerationOptions,
) -> Request:
    """Read a body; `sampling` and `generation` give the defaults of its fields. Raise `BodyError`."""
    fields = _with_one_name_each(body)
    for name in fields:
        if name not in KNOWN_FIELDS[kind]:
            raise BodyError(name, f"there is no such field{_nearest(name)}")
    asked = _what(kind, fields)
    for name, value in fields.items():
        if name in _OF_CHATS and kind == "chat":
            continue  # read above
        if name in _ONLY_NOTHING and value not in _ONLY_NOTHING[name]:
            raise BodyError(name, f"{shown(value)} is not supported")
    for name, read in _SAMPLING.items():
        if fields.get(name) is not None:
            sampling = replace(sampling, **{name: read(name, fields[name])})
    return replace(
        asked,
        sampling=sampling,
        generation=_generation(kind, fields, generation),
        warnings=tuple(
            f"{name}: ignored, since {what}"
            for name, (nothing, what) in _LACKING.items()
            if fields.get(name) not in nothing
        ),
    )


def with_call_form(request: Request, template: str | None) -> Request:
    """Return the request for a model with this chat template: with the form of its calls, a grammar if one
    is needed, and the variables that the template reads. Raise `BodyError` if the request has tools, but the
    template writes no calls that specgen can read."""
    request = _with_read_variables(request, template or "")
    form = form_of(template or "")
    has_calls = any(message.role == "tool" or message.tool_calls for message in request.messages)
    if form is None and (request.tools is not None or has_calls):
        field = "messages" if request.tools is None else "tools"
        what = "the model's chat template takes no tools, or writes calls in an unknown form"
        raise BodyError(field, what)
    if form is None or request.tools is None:
        return request
    tools, generation = request.tools, request.generation
    if generation.grammar is not None and generation.grammar.form == "gbnf":
        raise BodyError("grammar", "it excludes tools; a JSON schema does not")
    if tools.must_call or generation.grammar is not None:
        if generation.ignore_eos:
            raise BodyError("ignore_eos", "a text that follows a grammar has an end")
        other = None if tools.must_call else generation.grammar
        grammar, warnings = calls_grammar(
            form, tools.callable, is_parallel=tools.is_parallel, other=other
        )
        generation = replace(generation, grammar=grammar)
        request = replace(request, warnings=(*request.warnings, *warnings))
    generation = replace(generation, shown_controls=form.controls)
    return replace(request, generation=generation, call_form=form)


def check_tokens(request: Request, n_tokens: int) -> None:
    """Raise `BodyError` if a bias or the prompt names a token that a vocabulary of `n_tokens` lacks."""
    biased = [("logit_bias", token) for token, _ in request.sampling.logit_bias]
    for name, token in [*biased, *(("prompt", token) for token in request.tokens or ())]:
        if not 0 <= token < n_tokens:
            raise BodyError(name, f"there is no token {token}: the model has {n_tokens} tokens")


def _nearest(name: str) -> str:
    """Return a question for the known field that an unknown one resembles most; empty if none does."""
    known = sorted(frozenset().union(*KNOWN_FIELDS.values()) | _ALIASES.keys())
    close = difflib.get_close_matches(name[:_LONGEST_FIELD], known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def _with_read_variables(request: Request, template: str) -> Request:
    """Return the request with the variables that the template reads, and warnings of fields that set none."""
    read = tuple(
        variable
        for variable in request.variables
        if re.search(rf"\b{re.escape(variable.name)}\b", template)
    )
    fields = dict.fromkeys(variable.field for variable in request.variables)
    unread = [field for field in fields if all(field != each.field for each in read)]
    told = [f"{field}: ignored, since the chat template does not read it" for field in unread]
    return replace(request, variables=read, warnings=(*request.warnings, *told))


def field_name(given: str) -> str:
    """Return the canonical name of a field that has several."""
    return _ALIASES.get(given, given)


def _with_one_name_each(body: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for given, value in body.items():
        name = field_name(given)
        if name in fields and fields[name] is not None and value is not None:
            raise BodyError(given, f"it is given twice, as {name} too")
        if fields.get(name) is None:
            fields[name] = value
    return fields


def _what(kind: Kind, fields: Mapping[str, Any]) -> Request:
    """Return the request without its options."""
    empty = Request(kind, SamplerOptions(), GenerationOptions())
    if kind == "chat":
        return replace(
            empty,
            messages=read_messages(fields.get("messages")),
            tools=read_tools(fields),
            variables=_variables(fields),
            splits_reasoning=_splits_reasoning(fields.get("reasoning_format")),
        )
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        (prompt,) = prompt
    if isinstance(prompt, list) and prompt and all(_is_integer(token) for token in prompt):
        return replace(empty, tokens=tuple(map(int, prompt)))
    if isinstance(prompt, list):
        raise BodyError("prompt", "several prompts in one request are not supported")
    if not isinstance(prompt, str) or not prompt:
        what = "it is empty" if prompt == "" else f"{shown(prompt)} is not a text"
        raise BodyError("prompt", what)
    system = fields.get("system")
    if system is None:
        return replace(empty, text=utf8("prompt", prompt))
    turns = (Message("system", text_of("system", system)), Message("user", utf8("prompt", prompt)))
    return replace(empty, kind="chat", messages=turns)


def _variables(fields: Mapping[str, Any]) -> tuple[TemplateVariable, ...]:
    """Return the variables for the template that a chat sets."""
    name, given = "chat_template_kwargs", fields.get("chat_template_kwargs")
    if not isinstance(given, dict | None):
        raise BodyError(name, f"{shown(given)} is not an object")
    found: dict[str, TemplateVariable] = {}
    effort = fields.get("reasoning_effort")
    if effort is not None:
        text_of("reasoning_effort", effort)
        found["reasoning_effort"] = TemplateVariable("reasoning_effort", "reasoning_effort", effort)
        if effort == "none":
            off = TemplateVariable("reasoning_effort", "enable_thinking", value=False)
            found["enable_thinking"] = off
    for key, value in (given or {}).items():
        if key in OWN_VARIABLES:
            raise BodyError(f"{name}.{key}", "specgen sets this variable")
        utf8(name, json.dumps({key: value}, ensure_ascii=False))
        found[key] = TemplateVariable(f"{name}.{key}", key, value)
    return tuple(found.values())


def _splits_reasoning(value: Any) -> bool:
    if value not in (None, *_REASONING_FORMATS):
        known = ", ".join(_REASONING_FORMATS)
        raise BodyError("reasoning_format", f"{shown(value)} is none of {known}")
    return value not in (None, "none")


def _generation(
    kind: Kind, fields: Mapping[str, Any], options: GenerationOptions
) -> GenerationOptions:
    if fields.get("max_tokens") is not None:
        options = replace(options, max_tokens=_integer(-1)("max_tokens", fields["max_tokens"]))
    if fields.get("stop") is not None:
        options = replace(options, stop=_stop(fields["stop"]))
    if fields.get("ignore_eos") is not None:
        options = replace(options, ignore_eos=boolean_of("ignore_eos", fields["ignore_eos"]))
    grammar = _grammar(fields)
    if grammar is not None:
        options = replace(options, grammar=grammar)
    if options.grammar is not None and options.ignore_eos:
        raise BodyError("ignore_eos", "a text that follows a grammar has an end")
    return replace(options, logprobs=_logprobs(kind, fields, options.logprobs))


def _logprobs(kind: Kind, fields: Mapping[str, Any], default: int | None) -> int | None:
    """Return the number of likely tokens to report for each token; None for no logprobs. A chat asks with a
    boolean and a number, a completion with the number alone."""
    wanted, n_top = fields.get("logprobs"), fields.get("top_logprobs")
    if wanted is None and n_top is None:
        return default
    if isinstance(wanted, bool) or wanted is None:
        if not wanted and n_top:
            raise BodyError("top_logprobs", "it needs logprobs: true")
        n = 0 if n_top is None else _integer(0, _MOST_LOGPROBS)("top_logprobs", n_top)
        return n if wanted else None
    if kind == "chat":
        raise BodyError("logprobs", f"{shown(wanted)} is not true or false")
    return _integer(0, _MOST_LOGPROBS)("logprobs", wanted)


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise BodyError(
            "stop", f"{shown(value)} is not a text, or a list of texts, without empty ones"
        )
    return tuple(utf8("stop", text) for text in texts)


def _grammar(fields: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar of an answer, given as GBNF, as a JSON schema, or as a response format."""
    given = [
        name
        for name in ("grammar", "json_schema", "response_format")
        if fields.get(name) is not None and fields[name] != {"type": "text"}
    ]
    if not given:
        return None
    if len(given) > 1:
        raise BodyError(given[1], f"{given[0]} is given as well")
    (name,) = given
    value = fields[name]
    if name == "grammar":
        return Grammar("gbnf", text_of(name, value))
    schema = value if name == "json_schema" else _schema_of_format(value)
    if not isinstance(schema, dict):
        raise BodyError(name, f"{shown(schema)} is not a JSON schema")
    try:
        return schema_grammar(json.dumps(schema))
    except UsageError as error:
        raise BodyError(name, error.message) from None


def _schema_of_format(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "json_object":
        # llama.cpp's servers take a schema here.
        return value.get("schema", {"type": "object"})
    if kind == "json_schema":
        named = value.get("json_schema", value)
        return named.get("schema") if isinstance(named, dict) else None
    raise BodyError(
        "response_format", f"{shown(value)} is no format: text, json_object, json_schema"
    )


# --- values -------------------------------------------------------------------------------------

_Read: TypeAlias = Callable[[str, Any], Any]
_ReadInteger: TypeAlias = Callable[[str, Any], int]


def _number(least: float = -math.inf, most: float = math.inf) -> _Read:
    def read(name: str, value: Any) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not abs(value) <= _LARGEST or not least <= value <= most:
            raise BodyError(name, f"{shown(value)} is not a number{_range_text(least, most)}")
        return float(value)

    return read


def _integer(least: float = -math.inf, most: float = math.inf) -> _ReadInteger:
    def read(name: str, value: Any) -> int:
        if not _is_integer(value) or not abs(value) <= _LARGEST or not least <= value <= most:
            raise BodyError(name, f"{shown(value)} is not a whole number{_range_text(least, most)}")
        return int(value)

    return read


def _is_integer(value: Any) -> bool:
    is_whole = isinstance(value, float) and value.is_integer()
    return (isinstance(value, int) and not isinstance(value, bool)) or is_whole


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Return token ids and the biases of their logits, from an object in OpenAI's form."""
    if not isinstance(value, dict) or not all(map(_is_token, value)):
        raise BodyError(name, f"{shown(value)} does not map token ids to numbers")
    read = _number()
    return tuple((int(token), read(f"{name}.{token}", bias)) for token, bias in value.items())


def _is_token(key: str) -> bool:
    """Return whether a key is the id of a token: Python does not read numbers of any length."""
    return key.isdecimal() and len(key) <= len(str(_LARGEST))


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise BodyError(name, f"{shown(value)} is not a list of texts")
    return tuple(utf8(name, text) for text in value)


def _range_text(least: float, most: float) -> str:
    if math.isinf(least) and math.isinf(most):
        return ""
    return f" of {least:g} or more" if math.isinf(most) else f" from {least:g} to {most:g}"


#: The readers of sampler fields, by the names of `SamplerOptions`.
_SAMPLING: Mapping[str, _Read] = {
    "temperature": _number(0.0),
    "top_k": _integer(),
    "top_p": _number(0.0, 1.0),
    "min_p": _number(0.0, 1.0),
    "seed": _integer(-1, 2**63 - 1),
    "typical_p": _number(0.0, 1.0),
    "top_n_sigma": _number(),
    "repeat_last_n": _integer(-1),
    "repeat_penalty": _number(0.01),
    "presence_penalty": _number(),
    "frequency_penalty": _number(),
    "dry_multiplier": _number(0.0),
    "dry_base": _number(0.0),
    "dry_allowed_length": _integer(0),
    "dry_last_n": _integer(-1),
    "dry_breakers": _texts,
    "xtc_probability": _number(0.0, 1.0),
    "xtc_threshold": _number(0.0, 1.0),
    "dynatemp_range": _number(0.0),
    "dynatemp_exponent": _number(0.0),
    "logit_bias": _biases,
}
_COMMON = {
    *_SAMPLING,
    *_SILENT,
    *_LACKING,
    *_ONLY_NOTHING,
    *("max_tokens", "stop", "ignore_eos", "logprobs", "top_logprobs"),
    *("grammar", "json_schema", "response_format"),
}
#: The fields of each kind of request.
KNOWN_FIELDS: Mapping[Kind, frozenset[str]] = {
    "chat": frozenset(
        {*_COMMON, "messages", "chat_template_kwargs", "reasoning_effort", "reasoning_format"}
    ),
    "completion": frozenset({*_COMMON, "prompt"}),
    "prompt": frozenset({*_COMMON, "prompt", "system"}),
}

__all__ = ["BodyError", "Kind", "Request", "check_tokens", "read_request", "with_call_form"]
