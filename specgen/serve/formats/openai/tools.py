"""The tools of a request: `tools`, `tool_choice` and `parallel_tool_calls`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specgen.serve.formats.openai.body import BodyError, boolean_of, shown, text_of, utf8

#: OpenAI's rule for names of functions.
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CHOICES = ("none", "auto", "required")
#: The schema of a function without parameters.
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    #: The field of the request that describes it, for error messages.
    field: str = ""

    @property
    def definition(self) -> dict[str, Any]:
        """The definition in the form that chat templates expect, with all fields that they may read."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions that the model knows, and how it may call them."""

    functions: tuple[Function, ...]
    #: Those that it may call; only one if the request names it.
    callable: tuple[Function, ...]
    #: Whether the answer has to be a call.
    must_call: bool = False
    #: Whether an answer may call more than once.
    is_parallel: bool = True

    @property
    def definitions(self) -> tuple[dict[str, Any], ...]:
        return tuple(function.definition for function in self.functions)


def read_tools(fields: Mapping[str, Any]) -> Tools | None:
    """Return the tools of a chat's body; None if the model may call none. Raise `BodyError`."""
    functions = _functions(fields.get("tools"))
    name = "parallel_tool_calls"
    is_parallel = boolean_of(name, fields.get(name), default=True)
    choice = fields.get("tool_choice")
    if not functions and choice not in (None, "none", "auto"):
        raise BodyError("tool_choice", f"{shown(choice)} needs tools")
    if not functions or choice == "none":
        return None
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        mode = allowed.get("mode") if isinstance(allowed, dict) else None
        names = allowed.get("tools") if isinstance(allowed, dict) else None
        if mode not in ("auto", "required") or not isinstance(names, list) or not names:
            raise BodyError("tool_choice", f"{shown(choice)} has no mode, or allows no tools")
        chosen = tuple(_chosen(functions, name) for name in dict.fromkeys(map(_named, names)))
        return Tools(functions, chosen, mode == "required", is_parallel)
    named = _named(choice)
    if named is None:
        return Tools(functions, functions, choice == "required", is_parallel)
    return Tools(functions, (_chosen(functions, named),), must_call=True, is_parallel=False)


def _chosen(functions: Sequence[Function], name: str | None) -> Function:
    """Return the function with a name that the request chooses."""
    for function in functions:
        if function.name == name:
            return function
    raise BodyError("tool_choice", f"there is no function {shown(name)} among tools")


def _named(choice: Any) -> str | None:
    """Return the function that a choice names; None for the other choices."""
    if choice is None or (isinstance(choice, str) and choice in _CHOICES):
        return None
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice.get("type") != "function":
        raise BodyError(
            "tool_choice",
            f"{shown(choice)} is none of {', '.join(_CHOICES)}, and names no function",
        )
    return name


def _functions(value: Any) -> tuple[Function, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise BodyError("tools", f"{shown(value)} is not a list of functions")
    functions: dict[str, Function] = {}
    for number, each in enumerate(value):
        function = _function(f"tools[{number}]", each)
        if function.name in functions:
            raise BodyError(f"{function.field}.name", f"{shown(function.name)} is given twice")
        functions[function.name] = function
    return tuple(functions.values())


def _function(where: str, value: Any) -> Function:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type") != "function":
        raise BodyError(where, f"{shown(value)} is not an object of type function")
    where = f"{where}.function"
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        rule = "has other characters than letters, digits, _ and -, or not 1 to 64 of them"
        raise BodyError(f"{where}.name", f"{shown(name)} {rule}")
    description, parameters = function.get("description"), function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise BodyError(f"{where}.parameters", f"{shown(parameters)} is not a JSON schema")
    utf8(f"{where}.parameters", json.dumps(parameters, ensure_ascii=False))
    return Function(
        name,
        text_of(f"{where}.description", "" if description is None else description),
        # Templates read the properties even of functions without any.
        {**_NO_PARAMETERS, **(parameters or {})},
        where,
    )
