"""Groups of options that several commands take, each defined once.

A group is a function whose parameters are options, annotated for typer; it returns one value made of them. A
command names the groups that it takes::

    @takes_options(sampler=sampling)
    def run(prompt: flags.Prompt, sampler: SamplerOptions) -> int: ...

typer then sees a function with the group's options in place of `sampler`.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any, TypeAlias

Group: TypeAlias = Callable[..., Any]
Command: TypeAlias = Callable[..., int]


def takes_options(**groups: Group) -> Callable[[Command], Command]:
    """Make the named parameters from the options of these groups.

    Option names must be unique: this is checked when the command is defined.
    """

    def decorate(command: Command) -> Command:
        members = {name: _parameters(group) for name, group in groups.items()}
        parameters: list[inspect.Parameter] = []
        for parameter in _parameters(command):
            parameters += members.get(parameter.name, [parameter])
        names = [parameter.name for parameter in parameters]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise TypeError(f"{command.__name__} has two options named {', '.join(sorted(twice))}")

        @functools.wraps(command)
        def whole(**values: Any) -> int:
            for name, group in groups.items():
                given = {member.name: values.pop(member.name) for member in members[name]}
                values[name] = group(**given)
            return command(**values)

        whole.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        whole.__annotations__ = {
            parameter.name: parameter.annotation for parameter in parameters
        } | {"return": int}
        del whole.__wrapped__  # typer would inspect the wrapped function instead
        return whole

    return decorate


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters, keyword-only, with their annotations as values."""
    hints = typing.get_type_hints(function, include_extras=True)
    return [
        parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(function).parameters.values()
    ]
