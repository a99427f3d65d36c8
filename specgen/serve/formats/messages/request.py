"""Translates the body of a Messages request into that of a chat completion.

Agents send new fields with each of their versions, and ask for what only Anthropic's servers have. What does
not change the meaning of the answer is ignored: with a warning, unless nobody would miss it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specgen.options import SamplerOptions
from specgen.serve.formats.messages.conversation import ConversationBuilder
from specgen.serve.formats.messages.writer import MessageWriter
from specgen.serve.formats.openai.body import BodyError, boolean_of, shown
from specgen.serve.formats.openai.translation import Translation

#: Fields that ask for nothing that a warning is worth.
_SILENT = frozenset(
    ["betas", "cache_control", "context_management", "metadata", "model", "service_tier"]
)
#: Fields that a chat reads itself, under the same names.
_SAME = frozenset(
    [
        "max_tokens",
        "speculative",
        "stream",
        *(each.name for each in dataclasses.fields(SamplerOptions)),
    ]
)
#: Fields that are read here.
_OWN = frozenset(
    [
        "messages",
        "output_config",
        "output_format",
        "stop_sequences",
        "system",
        "thinking",
        "tool_choice",
        "tools",
    ]
)
_CHOICES = {"any": "required", "auto": "auto", "none": "none"}


def translated_messages_request(body: Mapping[str, Any]) -> Translation:
    """Return the request as one for a chat completion. Raise `BodyError`."""
    names = {
        "chat_template_kwargs.enable_thinking": "thinking",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
    }
    chat: dict[str, Any] = {"reasoning_format": "auto"}
    chat |= {name: value for name, value in body.items() if name in _SAME}
    warnings = [
        f"{shown(name)}: ignored, since specgen has no such field"
        for name, value in body.items()
        if name not in _SAME | _OWN | _SILENT and value is not None
    ]
    conversation = ConversationBuilder()
    conversation.add_system(body.get("system"))
    conversation.add_messages(body.get("messages"))
    chat["messages"] = conversation.messages
    chat["tools"] = _tools(body.get("tools"), names, warnings)
    chat |= _choice(body.get("tool_choice"))
    chat |= _thinking(body.get("thinking"), warnings)
    chat |= _output(body)
    stops = body.get("stop_sequences")
    if stops:
        chat["stop"] = stops
    return Translation(chat, MessageWriter, tuple(warnings), conversation.names | names)


def _tools(value: Any, names: dict[str, str], warnings: list[str]) -> list[dict[str, Any]]:
    """Return the functions that the client runs. Those that Anthropic runs or defines are left out."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise BodyError("tools", f"{shown(value)} is not a list of tools")
    functions: list[dict[str, Any]] = []
    for number, tool in enumerate(value):
        where = f"tools[{number}]"
        if not isinstance(tool, dict):
            raise BodyError(where, f"{shown(tool)} is not a tool")
        kind = tool.get("type")
        if kind not in (None, "custom"):
            warnings.append(f"{where}: ignored, since specgen has no tool of type {shown(kind)}")
            continue
        known = f"tools[{len(functions)}]"
        names |= {
            known: where,
            f"{known}.function": where,
            f"{known}.function.parameters": f"{where}.input_schema",
        }
        function = {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": tool.get("input_schema"),
        }
        functions.append({"type": "function", "function": function})
    return functions


def _choice(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "tool":
        choice: Any = {"type": "function", "function": {"name": value.get("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        choice = _CHOICES[kind]
    else:
        raise BodyError(
            "tool_choice", f"{shown(value)} has none of the types auto, any, tool, none"
        )
    name = "disable_parallel_tool_use"
    alone = boolean_of(f"tool_choice.{name}", value.get(name))
    return {"tool_choice": choice} | ({"parallel_tool_calls": False} if alone else {})


def _thinking(value: Any, warnings: list[str]) -> dict[str, Any]:
    """Return the variable of chat templates that switches thinking; with ``adaptive`` the model decides."""
    if value is None:
        return {}
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("adaptive", "disabled", "enabled"):
        what = f"{shown(value)} has none of the types enabled, disabled, adaptive"
        raise BodyError("thinking", what)
    if value.get("budget_tokens") is not None:
        warnings.append("thinking.budget_tokens: ignored, since only max_tokens limits thoughts")
    if kind == "adaptive":
        return {}
    return {"chat_template_kwargs": {"enable_thinking": kind == "enabled"}}


def _output(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the effort and the format of the answer; `output_format` is an older place for the format."""
    value = body.get("output_config")
    if not isinstance(value, dict | None):
        raise BodyError("output_config", f"{shown(value)} is not an object")
    config = value or {}
    found: dict[str, Any] = {}
    if config.get("effort") is not None:
        found["reasoning_effort"] = config["effort"]
    form = config.get("format") or body.get("output_format")
    if form is not None:
        schema = form.get("schema") if isinstance(form, dict) else None
        if not isinstance(schema, dict) or form.get("type") != "json_schema":
            what = f"{shown(form)} is not of type json_schema, with a schema"
            raise BodyError("output_config.format", what)
        found["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    return found
