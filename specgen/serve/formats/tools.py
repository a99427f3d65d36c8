"""The tools in a request: which functions a model knows, and which it may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AliasChoices, BeforeValidator, Field

from specgen.serve.formats.fields import Fields, Schema
from specgen.serve.formats.request_errors import BodyError, shown
from specgen.serve.formats.tool_calls.function import Function

_NAME = re.compile(r"[^\s\"'\\<>{}()\[\]]{1,128}")
#: The types of tools that clients run. Tools of other types run at the provider of an API.
_RUN_BY_CLIENTS = ("function", "custom")
#: The parameters of a custom tool, whose only argument is a free text.
_FREE_TEXT: Schema = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def _flattened(value: Any) -> Any:
    """Return a tool or a tool choice as one flat object.

    In chat completions it has an object within it, ``{"type": "function", "function": {...}}``; in
    the other APIs it is flat. A choice may also be just its type. Invalid values are returned as
    they are, for pydantic to refuse.
    """
    if isinstance(value, str):
        return {"type": value}
    if not isinstance(value, dict):
        return value
    kind = str(value.get("type", "function"))
    inner_fields = value.get(kind)  # the object within is named after the type
    fields = {name: field for name, field in value.items() if name != kind}
    if isinstance(inner_fields, dict):
        fields |= inner_fields
    return fields


class ToolDefinition(Fields):
    """A tool, as its client describes it."""

    type: str = "function"
    name: str = ""
    description: str = ""
    #: The JSON schema of the arguments.
    parameters: Schema = Field({}, validation_alias=AliasChoices("parameters", "input_schema"))
    #: The format that a custom tool expects of its free text.
    format: dict[str, Any] = {}
    #: Whether the tool is described to the model only after a search has found it.
    defer_loading: bool = False


class ToolChoice(Fields):
    """Which tools may be called, and whether one must be."""

    #: ``auto``, ``none``, ``required`` (or ``any``), ``allowed_tools``, or the type of the only
    #: tool that may be called, and must be.
    type: str = "function"
    #: The name of that only tool.
    name: str = ""
    #: With ``allowed_tools``: whether one of them must be called.
    mode: Literal["auto", "required"] = "auto"
    #: With ``allowed_tools``: the tools that may be called.
    tools: list[Annotated[ToolChoice, BeforeValidator(_flattened)]] = []
    #: Anthropic's field for at most one call.
    disable_parallel_tool_use: bool = False


ToolField: TypeAlias = Annotated[ToolDefinition, BeforeValidator(_flattened)]
ToolChoiceField: TypeAlias = Annotated[ToolChoice, BeforeValidator(_flattened)]


@dataclass(frozen=True, slots=True)
class RequestTools:
    """The functions of a request, and how the model may call them."""

    #: The functions that the prompt describes to the model.
    functions: tuple[Function, ...]
    #: The functions that the model may call.
    callable: tuple[Function, ...]
    #: Whether the answer must be a call.
    must_call: bool = False
    #: Whether the answer may have several calls.
    is_parallel: bool = True


def functions_of(tools: Sequence[ToolDefinition]) -> tuple[dict[str, Function], list[str]]:
    """Return the functions that clients run, by their names, and warnings about other tools.

    Raises:
        BodyError: If a tool is not valid.
    """
    functions: dict[str, Function] = {}
    warnings: list[str] = []
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        if tool.type not in _RUN_BY_CLIENTS:
            warnings.append(
                f"{where}: ignored, since specgen has no tools of type {shown(tool.type)}"
            )
            continue
        if not _NAME.fullmatch(tool.name):
            rule = "is not a name of 1 to 128 characters without spaces, quotes and brackets"
            raise BodyError(f"{where}.name", f"{shown(tool.name)} {rule}")
        if tool.name in functions:
            raise BodyError(f"{where}.name", f"there are two tools named {shown(tool.name)}")
        if tool.format not in ({}, {"type": "text"}):
            warnings.append(f"{where}.format: ignored, the input is a free text")
        schema = _parameters_schema(tool, where)
        functions[tool.name] = Function(tool.name, tool.description, schema)
    return functions, warnings


def _parameters_schema(tool: ToolDefinition, where: str) -> Schema:
    """Return the schema of a tool's arguments, an object; raise `BodyError` if it is not valid."""
    if tool.type == "custom" and not tool.parameters:
        return _FREE_TEXT
    # Templates read the properties even of functions without parameters.
    schema = {
        "type": "object",
        "properties": {},
        **tool.parameters,
    }
    properties = schema["properties"] or {}
    required = schema.get("required") or []
    if not isinstance(properties, dict):
        raise BodyError(
            f"{where}.parameters.properties", f"give an object, not {shown(properties)}"
        )
    if not isinstance(required, list):
        raise BodyError(f"{where}.parameters.required", f"give a list, not {shown(required)}")
    return schema | {"properties": properties}


def chosen_tools(
    functions: Mapping[str, Function],
    choice: ToolChoice | None,
    *,
    is_parallel: bool,
) -> RequestTools | None:
    """Return the functions of a request with the client's choice; None if none may be called.

    Args:
        functions: The functions of the request by their names.
        choice: The client's choice of what may or must be called.
        is_parallel: Whether the client accepts several calls in an answer.

    Raises:
        BodyError: If the choice is unknown, or names a function that is not there.
    """
    choice = choice or ToolChoice(type="auto")
    if choice.type == "none" or (choice.type == "auto" and not functions):
        return None
    if not functions:
        raise BodyError("tool_choice", f"{shown(choice.type)} requires tools, but there are none")

    is_single_function = False
    must_call = choice.type != "auto"
    match choice.type:
        case "auto" | "required" | "any":
            names = list(functions)
        case "function" | "custom" | "tool":
            names = [choice.name]
            is_single_function = True
        case "allowed_tools":
            names = [tool.name for tool in choice.tools if tool.type in _RUN_BY_CLIENTS]
            must_call = choice.mode == "required"
        case kind:
            raise BodyError("tool_choice", f"{shown(kind)} is not a valid choice")
    for name in names:
        if name not in functions:
            raise BodyError("tool_choice", f"there is no function {shown(name)} among tools")
    if not names:
        return None
    return RequestTools(
        tuple(functions.values()),
        tuple(functions[name] for name in dict.fromkeys(names)),
        must_call=must_call,
        is_parallel=is_parallel and not choice.disable_parallel_tool_use and not is_single_function,
    )
