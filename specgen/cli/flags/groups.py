"""Options of the command line, declared in tables.

A command has a table of its options. Their types and defaults are those of the function's parameters::

    @takes_options(
        parallel=Option("--parallel", "-np", min=1, help="How many answers to generate at once."),
        sampling=flags.sampling,
    )
    def batch(*, parallel: int = 4, sampling: SamplerOptions) -> int: ...

`sampling` is a group: options that several commands take, and the function that makes one value of them. typer
sees a function with the group's options in place of the parameter.
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

Command: TypeAlias = Callable[..., int]
#: By the name of a parameter: what `typer.Option` or `typer.Argument` returns.
Table: TypeAlias = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Options that several commands take, and the function that makes one value of them."""

    make: Callable[..., Any]
    #: The options as keyword parameters, annotated for typer.
    parameters: tuple[inspect.Parameter, ...]
    #: The parameters that `make` takes as tuples.
    tuples: frozenset[str] = frozenset()
    #: Groups among the parameters of `make`: the option `top_k` of the group `sampling` is `sampling_top_k` here.
    groups: Mapping[str, Group] = dataclasses.field(default_factory=dict)

    def __call__(self, **values: Any) -> Any:
        for name in self.tuples & values.keys():
            values[name] = tuple(values[name] or ())
        for name, inner in self.groups.items():
            names = {f"{name}_{each.name}": each.name for each in inner.parameters}
            given = {names[each]: values.pop(each) for each in names.keys() & values.keys()}
            values[name] = inner(**given)
        return self.make(**values)

    def without(self, *names: str) -> Group:
        """Return the group without the parameters of these names, which keep their defaults. Names that the
        group does not have are ignored."""
        kept = tuple(each for each in self.parameters if each.name not in names)
        return dataclasses.replace(self, parameters=kept)

    def but(self, **defaults: Any) -> Group:
        """Return the group with other defaults."""
        changed = tuple(
            each.replace(default=defaults.get(each.name, each.default)) for each in self.parameters
        )
        return dataclasses.replace(self, parameters=changed)

    def later(self) -> Group:
        """Return the group with a function as its value. The function makes the group's value; its keywords,
        from `parse`, replace options of the command line."""
        return Group(lambda **values: functools.partial(self, **values), self.parameters)

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Return the options that a command line names, for `later`. Raise `COMMAND_LINE_ERROR`."""
        given: dict[str, Any] = {}

        def take(context: typer.Context, **values: Any) -> None:
            for name, value in values.items():
                source = context.get_parameter_source(name)
                if source is not None and source.name == "COMMANDLINE":
                    given[name] = value

        context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [context.replace(annotation=typer.Context), *self.parameters]
        take.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        take.__annotations__ = {each.name: each.annotation for each in parameters}
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command()(take)
        app(arguments, standalone_mode=False)
        return given

    def spellings(self) -> list[str]:
        """Return all spellings of all options, ``--on/--off`` as two."""
        options = [parameter.annotation.__metadata__[0] for parameter in self.parameters]
        names = [name for each in options for name in (each.default, *(each.param_decls or ()))]
        return [part for name in names if isinstance(name, str) for part in name.split("/")]

    def spelling(self, name: str) -> str:
        """Return the first spelling of an option."""
        (found,) = (each for each in self.parameters if each.name == name)
        spelling: str = found.annotation.__metadata__[0].default  # where typer keeps it
        return spelling


def panel(heading: str, **options: Any) -> Table:
    """Return the options, which the help shows below this heading."""
    for option in options.values():
        option.rich_help_panel = heading
    return options


def group(fields_of: type[Any], *tables: Table) -> Callable[[Callable[..., Any]], Group]:
    """Make a group of a function and the tables of its options.

    Options that are not parameters of the function are fields of the dataclass `fields_of`. They have the
    field's type and default, and the function receives them as keywords. A field that is a tuple is an option
    that may be given several times. A table may have other groups.
    """
    declared = {name: each for table in tables for name, each in table.items()}
    return lambda make: _group(make, _fields(fields_of) | _parameters(make), declared)


def takes_options(*tables: Table, **options: Any) -> Callable[[Command], Command]:
    """Declare a command's options: by parameter, an option or a `Group`.

    The spellings must be unique: this is checked when the command is defined.
    """
    declared = {name: each for table in (*tables, options) for name, each in table.items()}

    def decorate(command: Command) -> Command:
        own = _parameters(command)
        made = _group(command, own, {name: declared[name] for name in own})
        _check_spellings(command.__name__, made.parameters)

        @functools.wraps(command)
        def whole(**values: Any) -> int:
            code: int = made(**values)
            return code

        whole.__signature__ = inspect.Signature(made.parameters)  # type: ignore[attr-defined]
        whole.__annotations__ = {each.name: each.annotation for each in made.parameters}
        del whole.__wrapped__  # typer would inspect the wrapped function instead
        return whole

    return decorate


def _group(
    make: Callable[..., Any], known: Mapping[str, tuple[Any, Any]], declared: Table
) -> Group:
    """Return the group of the declared options, whose types and defaults are known."""
    parameters: list[inspect.Parameter] = []
    tuples = set()
    for name, option in declared.items():
        if isinstance(option, Group):
            parameters += (each.replace(name=f"{name}_{each.name}") for each in option.parameters)
            continue
        kind, default = known[name]
        if typing.get_origin(kind) is tuple:
            kind, default = list[typing.get_args(kind)[0]] | None, None  # type: ignore[misc]
            tuples.add(name)
        parameters.append(_parameter(name, kind, default, option))
    groups = {name: each for name, each in declared.items() if isinstance(each, Group)}
    return Group(make, tuple(parameters), frozenset(tuples), groups)


def _parameter(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    option.metavar = option.metavar or _metavar(kind)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, option],
    )


def _metavar(kind: Any) -> str | None:
    """Return what the help shows as the value of an option: FILE, or the choices; None for other types."""
    inner = [each for each in typing.get_args(kind) if each is not type(None)]
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(map(str, inner))
    if inner:
        return _metavar(inner[0])
    return "FILE" if kind is Path else None


def _parameters(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Return the type and the default of each parameter by its name, without `**` ones."""
    hints = typing.get_type_hints(function)
    return {
        name: (hints[name], parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }


def _fields(dataclass: type[Any]) -> dict[str, tuple[Any, Any]]:
    hints = typing.get_type_hints(dataclass)
    return {each.name: (hints[each.name], each.default) for each in dataclasses.fields(dataclass)}


def _check_spellings(command: str, parameters: Sequence[inspect.Parameter]) -> None:
    spellings = Group(dict, tuple(parameters)).spellings()
    twice = {name for name in spellings if spellings.count(name) > 1}
    if twice:
        raise TypeError(f"{command} has two options named {', '.join(sorted(twice))}")


def utf8(value: str) -> str:
    """Return the value, as an option's `parser`. Raise `typer.BadParameter` if it is not UTF-8: such bytes
    arrive as lone surrogates, which cannot be encoded later."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise typer.BadParameter(
            f"it is not UTF-8 at character {error.start}; check the terminal's locale"
        ) from None
    return value
