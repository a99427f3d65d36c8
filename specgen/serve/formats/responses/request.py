"""Translates the body of a request for a response into that of a chat completion.

What a local server lacks, but what does not change the meaning of the answer, is left out with a warning:
tools that run at OpenAI, for example. Agents send new fields with each of their versions, so unknown ones are
left out as well.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from specgen.serve.formats.openai.body import BodyError, shown, utf8
from specgen.serve.formats.openai.request import KNOWN_FIELDS, field_name
from specgen.serve.formats.openai.translation import Translation
from specgen.serve.formats.responses.input_items import ConversationBuilder
from specgen.serve.formats.responses.tools import translated_choice, translated_tools
from specgen.serve.formats.responses.writer import ResponseWriter

#: Fields that would change the meaning of the answer: the values that ask for nothing, and what is lacking.
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "background": ((None, False), "answers are not kept, so send the request without it"),
    "conversation": ((None,), "conversations are not kept: send all items as input"),
    "previous_response_id": ((None, ""), "responses are not kept: send all items as input"),
    "prompt": ((None,), "prompts are not kept: send the text as instructions"),
    "n": ((None, 1), "a response has one answer"),
    "messages": ((None,), "the messages of a response are its input"),
    "functions": ((None, []), "the functions of a response are its tools"),
    "response_format": ((None,), "the format of a response is text.format"),
    "reasoning_effort": ((None,), "the effort of a response is reasoning.effort"),
}
#: Fields that are ignored, with a warning: the values that ask for nothing, and what is lacking.
_LACKING: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "logprobs": ((None, False), "responses come without log-probabilities"),
    "top_logprobs": ((None, 0), "responses come without log-probabilities"),
    "max_tool_calls": ((None,), "it limits tools that specgen lacks"),
    "truncation": ((None, "disabled"), "an input that is too long is refused"),
}
#: Fields that ask for nothing that a warning is worth.
_SILENT = frozenset(["client_metadata", "stream_options"])
#: Fields that are read here; what else a chat has, samplers for example, it reads itself.
_OWN = frozenset(
    [
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "reasoning",
        "text",
        "tool_choice",
        "tools",
    ]
)
#: Fields that the server reads for all of its paths.
_OF_THE_SERVER = frozenset(["cache_prompt", "id_slot", "speculative"])
#: What requests may ask to include. The thoughts of a local model are no secret.
_ENCRYPTED = "reasoning.encrypted_content"
#: The fields of a response that repeat the request.
_ECHO: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": None,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "user": None,
}


def translated_response_request(body: Mapping[str, Any]) -> Translation:
    """Return the request as one for a chat completion. Raise `BodyError`."""
    for name, (nothing, what) in _REFUSED.items():
        if body.get(name) not in nothing:
            raise BodyError(name, what)
    warnings: list[str] = []
    names = {"messages": "input"}
    limit = body.get("max_output_tokens")
    chat: dict[str, Any] = {"reasoning_format": "auto"}
    for name, value in body.items():
        if name in _OWN or name in _REFUSED or name in _SILENT:
            continue
        if field_name(name) == "max_tokens" and None not in (limit, value):
            raise BodyError(name, "max_output_tokens is given as well")
        if name in _LACKING:
            nothing, what = _LACKING[name]
            if value not in nothing:
                warnings.append(f"{name}: ignored, since {what}")
        elif field_name(name) in KNOWN_FIELDS["chat"] or name in _OF_THE_SERVER:
            chat[name] = value
        elif value is not None:
            warnings.append(f"{shown(name)}: ignored, since there is no such field")
    if limit is not None:
        chat["max_tokens"] = limit
        names["max_tokens"] = "max_output_tokens"
    conversation = ConversationBuilder(warnings)
    conversation.add_instructions(body.get("instructions"))
    conversation.add_input(body.get("input"))
    chat["messages"] = conversation.messages
    names |= conversation.names
    tools = translated_tools(body.get("tools"), warnings)
    names |= tools.names
    chat |= {"tools": tools.chat, "tool_choice": translated_choice(body.get("tool_choice"), tools)}
    chat |= _format(body.get("text"), names)
    chat |= _reasoning(body.get("reasoning"), names, warnings)
    writer = functools.partial(
        ResponseWriter,
        echo=_echo(body),
        custom=tools.custom,
        has_encrypted=_has_encrypted(body.get("include"), warnings),
    )
    return Translation(chat, writer, tuple(warnings), names)


def _echo(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the response that repeat the request."""
    echo = {
        name: default if body.get(name) is None else body[name] for name, default in _ECHO.items()
    }
    for name, value in echo.items():
        utf8(name, json.dumps(value, ensure_ascii=False))
    return echo


def _format(text: Any, names: dict[str, str]) -> dict[str, Any]:
    """Return the chat's fields for `text`: the form of the answer."""
    if text is None:
        return {}
    if not isinstance(text, dict):
        raise BodyError("text", f"{shown(text)} is not an object")
    names |= {"response_format": "text.format", "verbosity": "text.verbosity"}
    return {"response_format": text.get("format"), "verbosity": text.get("verbosity")}


def _reasoning(reasoning: Any, names: dict[str, str], warnings: list[str]) -> dict[str, Any]:
    """Return the chat's fields for `reasoning`. Thoughts come back whole, so a summary is not needed."""
    if reasoning is None:
        return {}
    if not isinstance(reasoning, dict):
        raise BodyError("reasoning", f"{shown(reasoning)} is not an object")
    summary = reasoning.get("summary")
    if summary not in (None, "auto"):
        warnings.append("reasoning.summary: ignored, since thoughts come back as they are")
    names["reasoning_effort"] = "reasoning.effort"
    return {"reasoning_effort": reasoning.get("effort")}


def _has_encrypted(include: Any, warnings: list[str]) -> bool:
    if include is None:
        return False
    if not isinstance(include, list):
        raise BodyError("include", f"{shown(include)} is not a list")
    warnings += [
        f"include: ignored {shown(what)}, which responses do not have"
        for what in include
        if what != _ENCRYPTED
    ]
    return _ENCRYPTED in include
