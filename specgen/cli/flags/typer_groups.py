"""How typer gets the options of commands (to add one, see `specgen/options.py`). An option is
declared once, by `specgen.sampler_options.option`: as a field of a dataclass, of which `group`
makes a group of options for several commands, or as the default of a function's parameter, which a
group may be, too::

    @takes_options
    def batch(
        *,
        parallel: int = option(4, "--parallel -np", "How many answers to generate at once.", min=1),
        sampling: SamplerOptions = flags.sampling,
    ) -> int: ...

typer sees a function with the group's options in place of the parameter.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from specgen.errors import UsageError
from specgen.sampler_options import LARGEST_FACTOR

#: The default of an option that must be given.
REQUIRED: Any = inspect.Parameter.empty


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Options that several commands take, and the function that makes one value of them."""

    make: Callable[..., Any]
    #: As keyword parameters, annotated for typer.
    parameters: tuple[inspect.Parameter, ...]
    #: What makes values of texts that were given.
    parsers: Mapping[str, Callable[[Any], Any]]
    #: Groups among the parameters of `make`: the option `top_k` of the group `sampling` is
    #: `sampling_top_k` here.
    groups: Mapping[str, Group]
    #: Of parameters of `make` that are options.
    defaults: Mapping[str, Any]

    def __call__(self, **values: Any) -> Any:
        for name, inner in self.groups.items():
            names = {f"{name}_{each.name}": each.name for each in inner.parameters}
            given = {names[each]: values.pop(each) for each in names.keys() & values.keys()}
            values[name] = inner(**given)
        for name, value in [*values.items()]:
            if isinstance(value, float) and not abs(value) <= LARGEST_FACTOR:
                hint = f"give a number between {-LARGEST_FACTOR:g} and {LARGEST_FACTOR:g}"
                raise UsageError(f"{self.spelling(name)} is {value}", hint)
            if (parse := self.parsers.get(name)) is None:
                continue
            del values[name]
            if value is not None and value != []:
                try:
                    values[name] = parse(tuple(value) if isinstance(value, list) else value)
                except ValueError as error:
                    raise UsageError(f"{self.spelling(name)}: {error}") from None
        return self.make(**{**self.defaults, **values})

    def without(self, *names: str) -> Group:
        kept = tuple(each for each in self.parameters if each.name not in names)
        return dataclasses.replace(self, parameters=kept)

    def but(self, **defaults: Any) -> Group:
        changed = (p.replace(default=defaults.get(p.name, p.default)) for p in self.parameters)
        return dataclasses.replace(self, parameters=tuple(changed))

    def spelling(self, name: str) -> str:
        (found,) = (each for each in self.parameters if each.name == name)
        spelling: str = found.annotation.__metadata__[0].default  # where typer keeps it
        return spelling


def argument(metavar: str, help: str, default: Any = None, **settings: Any) -> Any:  # noqa: A002
    """Declare a parameter that is an argument, as `specgen.sampler_options.option` does an option."""
    settings |= {"metavar": metavar, "help": help, "show_default": False}
    return dataclasses.field(default=default, metadata=settings)


def group(fields_of: type[Any], **groups: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a group of the fields of a dataclass and of the parameters of its function, which gets
    the fields as keywords; `groups` are those among the fields. (Its type is Any: it may be the
    default of a parameter.)
    """
    hints = typing.get_type_hints(fields_of)
    fields = {
        each.name: (hints[each.name], groups.get(each.name, each))
        for each in dataclasses.fields(fields_of)
    }
    return lambda make: _group(make, fields)


def takes_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let typer call a command whose parameters have options, arguments and groups as their
    defaults.
    """
    made = _group(command, {})

    @functools.wraps(command)
    def whole(**values: Any) -> Any:
        return made(**values)

    sign(whole, made.parameters)
    del whole.__wrapped__  # typer would inspect the wrapped function instead
    return whole


def _group(make: Callable[..., Any], fields: Mapping[str, tuple[Any, Any]]) -> Group:
    parameters: list[inspect.Parameter] = []
    parsers: dict[str, Callable[[Any], Any]] = {}
    groups: dict[str, Group] = {}
    own = {} if isinstance(make, type) else _parameters(make)
    for name, (kind, declared) in {**fields, **own}.items():
        if isinstance(declared, Group):
            groups[name] = declared
            parameters += (each.replace(name=f"{name}_{each.name}") for each in declared.parameters)
        elif declared.metadata:
            parameters.append(_parameter(name, kind, declared, parsers))
    is_option = dataclasses.Field
    defaults = {
        name: each.default for name, (_, each) in own.items() if isinstance(each, is_option)
    }
    return Group(make, tuple(parameters), parsers, groups, defaults)


def _parameter(name: str, kind: Any, field: Any, parsers: dict[str, Any]) -> inspect.Parameter:
    settings, default = dict(field.metadata), field.default
    spellings, panel = settings.pop("spellings", None), settings.pop("panel", None)
    if (parse := settings.pop("parse", None)) is not None:
        parsers[name] = parse
    if typing.get_origin(kind) is tuple:
        inner: Any = str if name in parsers else typing.get_args(kind)[0]
        kind, default = list[inner] | None, None
        parsers.setdefault(name, tuple)
    elif name in parsers:
        kind, default = (str | None, None) if default is None else (str, str(default))
    settings["metavar"] = settings.get("metavar") or _metavar(kind)
    how = typer.Argument if spellings is None else functools.partial(typer.Option, *spellings)
    parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
    return parameter.replace(annotation=Annotated[kind, how(rich_help_panel=panel, **settings)])


def sign(function: Any, parameters: Sequence[inspect.Parameter]) -> None:
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {each.name: each.annotation for each in parameters}


def _metavar(kind: Any) -> str | None:
    """Say what the help shows as a value: FILE, or the choices."""
    inner = [each for each in typing.get_args(kind) if each is not type(None)]
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(map(str, inner))
    if inner:
        return _metavar(inner[0])
    return {int: "N", float: "NUMBER", Path: "FILE", str: "TEXT"}.get(kind)


def _parameters(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    hints = typing.get_type_hints(function)
    return {
        name: (hints[name], parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
