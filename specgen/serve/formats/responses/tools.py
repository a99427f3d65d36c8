"""Translates the tools of a request: functions are flat here, and those of a chat are nested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specgen.serve.formats.openai.body import BodyError, shown

#: The parameters of a custom tool: a free text.
_FREE_TEXT: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_CALLABLE = ("function", "custom")


@dataclass(frozen=True, slots=True)
class TranslatedTools:
    """The tools in the form of a chat. `custom` are the names of those that take a free text, and `names` the
    fields of the chat's body with those of the request."""

    chat: list[Any] = field(default_factory=list)
    custom: set[str] = field(default_factory=set)
    names: dict[str, str] = field(default_factory=dict)


def translated_tools(value: Any, warnings: list[str]) -> TranslatedTools:
    """Return the functions and custom tools of a request; `warnings` get the kinds that only run elsewhere.
    Raise `BodyError`."""
    found = TranslatedTools()
    if value is None:
        return found
    if not isinstance(value, list):
        raise BodyError("tools", f"{shown(value)} is not a list of tools")
    for number, tool in enumerate(value):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise BodyError(f"tools[{number}]", f"{shown(tool)} is not an object with a type")
        if kind not in _CALLABLE:
            warnings.append(f"tools[{number}]: ignored, since {shown(kind)} does not run here")
            continue
        function = {name: tool.get(name) for name in ("name", "description", "parameters")}
        if kind == "custom":
            function["parameters"] = _FREE_TEXT
            if isinstance(tool.get("name"), str):
                found.custom.add(tool["name"])
            if tool.get("format") not in (None, {"type": "text"}):
                warnings.append(f"tools[{number}].format: ignored, the input is a free text")
        found.names[f"tools[{len(found.chat)}].function"] = f"tools[{number}]"
        found.chat.append({"type": "function", "function": function})
    return found


def translated_choice(value: Any, tools: TranslatedTools) -> Any:
    """Return `tool_choice` in the form of a chat. Raise `BodyError` for tools that only run elsewhere."""
    if not isinstance(value, dict):
        # A request whose tools were all left out may still say how to choose.
        return None if value == "auto" and not tools.chat else value
    if value.get("type") == "allowed_tools":
        allowed = value.get("tools")
        if not isinstance(allowed, list):
            raise BodyError("tool_choice.tools", f"{shown(allowed)} is not a list of tools")
        known = [_named(tool) for tool in allowed if _is_callable(tool)]
        choice = {"mode": value.get("mode"), "tools": known}
        return {"type": "allowed_tools", "allowed_tools": choice} if known else "none"
    if not _is_callable(value):
        raise BodyError("tool_choice", f"{shown(value.get('type'))} does not run here")
    return _named(value)


def _is_callable(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") in _CALLABLE


def _named(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.get("name")}}
