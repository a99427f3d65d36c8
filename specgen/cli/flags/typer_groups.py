"""How typer gets the options of commands (to add one, see `specgen/options.py`): a group has those of a dataclass
(`specgen.sampler_options.option`), and the function that makes its value. The types and defaults of other options are
those of the function's parameters::

    @takes_options(
        parallel=Option("--parallel", "-np", min=1, help="How many answers to generate at once."),
        sampling=flags.sampling,
    )
    def batch(*, parallel: int = 4, sampling: SamplerOptions) -> int: ...

typer sees a function with the group's options in place of the parameter.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from specgen.errors import UsageError
from specgen.sampler_options import LARGEST_FACTOR

Command: TypeAlias = Callable[..., int]
#: By the name of a parameter: what `typer.Option` or `typer.Argument` returns, or a `Group`.
Table: TypeAlias = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Options that several commands take, and the function that makes one value of them."""

    make: Callable[..., Any]
    #: As keyword parameters, annotated for typer.
    parameters: tuple[inspect.Parameter, ...]
    #: What makes values of texts that were given.
    parsers: Mapping[str, Callable[[Any], Any]] = dataclasses.field(default_factory=dict)
    #: Groups among the parameters of `make`: the option `top_k` of the group `sampling` is `sampling_top_k` here.
    groups: Mapping[str, Group] = dataclasses.field(default_factory=dict)

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
        return self.make(**values)

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


def panel(heading: str, **options: Any) -> Table:
    for option in options.values():
        option.rich_help_panel = heading
    return options


def group(fields_of: type[Any], *tables: Table) -> Callable[[Callable[..., Any]], Group]:
    """Make a group of the fields of a dataclass and of `tables`, whose function gets them as keywords."""
    fields = dataclasses.fields(fields_of)
    hints = typing.get_type_hints(fields_of)
    declared = {each.name: _option(each.metadata) for each in fields if each.metadata}
    parsers = {each.name: each.metadata["parse"] for each in fields if "parse" in each.metadata}
    known = {each.name: (hints[each.name], each.default) for each in fields}
    declared |= {name: each for table in tables for name, each in table.items()}
    return lambda make: _group(make, known | _parameters(make), declared, parsers)


def takes_options(*tables: Table, **options: Any) -> Callable[[Command], Command]:
    """Declare a command's options: by parameter, an option or a `Group`."""
    declared = {name: each for table in (*tables, options) for name, each in table.items()}

    def decorate(command: Command) -> Command:
        own = _parameters(command)
        made = _group(command, own, {name: declared[name] for name in own}, {})

        @functools.wraps(command)
        def whole(**values: Any) -> int:
            code: int = made(**values)
            return code

        sign(whole, made.parameters)
        del whole.__wrapped__  # typer would inspect the wrapped function instead
        return whole

    return decorate


def _option(metadata: Mapping[str, Any]) -> Any:
    settings = {name: metadata[name] for name in metadata.keys() - {"spellings", "panel", "parse"}}
    return typer.Option(*metadata["spellings"], rich_help_panel=metadata.get("panel"), **settings)


def _group(
    make: Callable[..., Any],
    known: Mapping[str, tuple[Any, Any]],
    declared: Table,
    parsers: Mapping[str, Callable[[Any], Any]],
) -> Group:
    parameters: list[inspect.Parameter] = []
    parsers = dict(parsers)
    kind: Any
    for name, option in declared.items():
        if isinstance(option, Group):
            parameters += (each.replace(name=f"{name}_{each.name}") for each in option.parameters)
            continue
        if option.parser is not None:
            parsers[name], option.parser = option.parser, None
        kind, default = known[name]
        if typing.get_origin(kind) is tuple:
            inner: Any = str if name in parsers else typing.get_args(kind)[0]
            kind, default = list[inner] | None, None
            parsers.setdefault(name, tuple)
        elif name in parsers:
            kind, default = (str | None, None) if default is None else (str, str(default))
        option.metavar = option.metavar or _metavar(kind)
        parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        parameters.append(parameter.replace(annotation=Annotated[kind, option]))
    groups = {name: each for name, each in declared.items() if isinstance(each, Group)}
    return Group(make, tuple(parameters), parsers, groups)


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
    """Return the type and the default of each parameter by its name, without `**` ones."""
    hints = typing.get_type_hints(function)
    return {
        name: (hints[name], parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
