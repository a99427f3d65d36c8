"""How options that were declared once become the options of commands.

An option is declared by `option`, as a field of a dataclass or as the default of a command's
parameter. A `group` is all options of a dataclass; it is the default of a parameter, too::

    @dataclass(frozen=True)
    class Sampling:
        top_k: int = option(40, "--top-k", "Keep the k most likely tokens.", min=0)

    sampling = group(Sampling)

    @takes_options
    def batch(
        *,
        parallel: int = option(4, "--parallel -np", "How many answers to generate at once.", min=1),
        sampling: Sampling = sampling,
    ) -> int: ...

Typer reads the options of a command from the signature of a function. `takes_options` therefore
returns a function whose signature has the options of a group in place of the group::

    def batch(
        *,
        parallel: Annotated[int, typer.Option("--parallel", "-np", help="How many...", min=1)] = 4,
        sampling__top_k: Annotated[int, typer.Option("--top-k", help="Keep the...", min=0)] = 40,
    ) -> int: ...

When Typer calls that function, the function passes `sampling__top_k` to the group, which makes a
`Sampling` from it, and calls the `batch` above with that.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from specgen.errors import UsageError
from specgen.option_values import checked_value

#: The default of an option that must be given.
REQUIRED: Any = inspect.Parameter.empty
#: The placeholder for a value in the help, by the type of the value.
_METAVARS = {int: "N", float: "NUMBER", Path: "FILE", str: "TEXT"}


def argument(metavar: str, help: str, default: Any = None, **settings: Any) -> Any:  # noqa: A002
    """Declare a positional argument, as `option` declares an option.

    Args:
        metavar: The name of the argument in the help.
        help: The text of the help.
        default: The value if it is not given, or `REQUIRED`.
        settings: More settings for `typer.Argument`.
    """
    settings |= {"metavar": metavar, "help": help, "show_default": False}
    return dataclasses.field(default=default, metadata=settings)


@dataclass(frozen=True, slots=True)
class DeclaredOption:
    """An option or a positional argument, as `option` or `argument` declared it."""

    #: The type of its value.
    kind: Any
    #: The value if it is not given, or `REQUIRED`.
    default: Any
    #: Settings for `typer.Option` or `typer.Argument`, and these: "spellings", the names of an
    #: option; "parse", a function that converts the text; "check", one that checks the value;
    #: "aliases", more names in programs; "panel", its heading in the help.
    settings: Mapping[str, Any]
    #: Whether the command has it. Otherwise the value is always the default.
    is_offered: bool = True
    #: The default in words in this command; None: as the settings say.
    default_in_words: str | None = None

    @property
    def spelling(self) -> str:
        """Its readable name on the command line; an argument's is its metavar."""
        names = self.settings.get("spellings") or [self.settings["metavar"]]
        first: str = names[0]
        return first.partition("/")[0]  # --chat of --chat/--raw

    def changed(self, spelling: str, **changes: Any) -> DeclaredOption:
        """Return the option with changes to its fields if it has this name, or else unchanged."""
        if self.spelling != spelling:
            return self
        return dataclasses.replace(self, **changes)

    def parameter(self, name: str) -> inspect.Parameter:
        """Return a parameter with this name, for a signature from which Typer makes the option."""
        settings = dict(self.settings)
        spellings = settings.pop("spellings", None)
        parse = settings.pop("parse", None)
        settings.pop("check", None)
        settings.pop("aliases", None)
        settings.setdefault("metavar", _metavar(self.kind))
        if self.default_in_words is not None:
            settings["show_default"] = self.default_in_words
        # `value` parses texts. It also makes paths of texts, since Typer would take an empty one
        # for the working directory.
        is_text = parse is not None or self._has_paths
        # Typer passes lists, not tuples.
        kind: Any = self.kind
        default = self.default
        if self._is_tuple:
            item_type: Any = str if is_text else typing.get_args(kind)[0]
            kind = list[item_type] | None
            default = None
        elif is_text and default is None:
            kind = str | None
        elif is_text:
            kind = str
            if default is not REQUIRED:
                default = str(default)
        settings["rich_help_panel"] = settings.pop("panel", None)
        if spellings is None:
            typer_option = typer.Argument(**settings)
        else:
            typer_option = typer.Option(*spellings, **settings)
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, typer_option],
        )

    def value(self, given: Any) -> Any:
        """Return the value of the option.

        Args:
            given: The value that Typer passes; None or an empty list if the option is not given.

        Raises:
            UsageError: If the value is out of range or cannot be parsed.
        """
        if given is None or given == []:
            return self.default
        value = tuple(given) if self._is_tuple else given
        parse = self.settings.get("parse")
        if parse is not None:
            try:
                value = parse(value)
            except ValueError as error:
                raise UsageError(f"{self.spelling}: {error}") from None
        if value == self.default:
            return value
        return checked_value(
            self.spelling,
            self.kind,
            value,
            self.settings,
        )

    @property
    def _is_tuple(self) -> bool:
        return typing.get_origin(self.kind) is tuple

    @property
    def _has_paths(self) -> bool:
        """Whether its value is a path, or has paths."""
        return Path in (self.kind, *typing.get_args(self.kind))


@dataclass(frozen=True, slots=True)
class Group:
    """Options that several commands take, and the function that makes one value of them."""

    #: The function, which takes the values of the members as keywords.
    make: Callable[..., Any]
    #: The options, and groups within the group, by the keywords of `make`.
    members: Mapping[str, DeclaredOption | Group]

    def parameters(self, prefix: str = "") -> list[inspect.Parameter]:
        """Return the parameters from which Typer makes the options; see the module's docstring.

        Args:
            prefix: What the names of the parameters begin with: the names of groups around this.
        """
        parameters = []
        for name, member in self.members.items():
            if isinstance(member, Group):
                parameters += member.parameters(f"{prefix}{name}__")
            elif member.is_offered:
                parameters.append(member.parameter(prefix + name))
        return parameters

    def __call__(self, **given: Any) -> Any:
        """Return the value of the group.

        Args:
            given: The values that Typer passes, by the names of the parameters. Options without
                one have their defaults.

        Raises:
            UsageError: If a value is wrong.
        """
        values = {}
        for name, member in self.members.items():
            if isinstance(member, Group):
                prefix = f"{name}__"
                given_to_member = {
                    parameter.removeprefix(prefix): value
                    for parameter, value in given.items()
                    if parameter.startswith(prefix)
                }
                values[name] = member(**given_to_member)
            else:
                values[name] = member.value(given.get(name))
        return self.make(**values)

    def without(self, *spellings: str) -> Group:
        """Return the group for a command without some options, which always have their defaults."""
        group = self
        for spelling in spellings:
            smaller = group.changed(spelling, is_offered=False)
            assert smaller != group, f"there is no option {spelling}"
            group = smaller
        return group

    def with_default(self, spelling: str, default: Any) -> Group:
        """Return the group for a command in which an option has another default."""
        return self.changed(spelling, default=default)

    def with_default_in_words(self, spelling: str, words: str) -> Group:
        """Return the group for a command that describes an option's default differently."""
        return self.changed(spelling, default_in_words=words)

    def changed(self, spelling: str, **changes: Any) -> Group:
        """Return the group with changes to the fields of the option with this name."""
        members = {
            name: member.changed(spelling, **changes) for name, member in self.members.items()
        }
        return dataclasses.replace(self, members=members)


def group(fields_of: type[Any], **groups: Group) -> Any:
    """Return a group of the options among a dataclass's fields, which makes the dataclass.

    Args:
        fields_of: The dataclass. Its fields without an option or a group keep their defaults.
        groups: The groups for those fields that are dataclasses of options themselves.

    Returns:
        A `Group`; the type is Any since it is the default of parameters of other types.
    """
    declared = {
        name: (kind, groups.get(name, field)) for name, (kind, field) in _fields(fields_of).items()
    }
    return Group(fields_of, _members(declared))


def extends(fields_of: type[Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function, to make a group of its parameters and of a dataclass's fields.

    The function takes the values of all of them as keywords, and returns the value of the group. A
    parameter replaces the field with the same name.
    """

    def decorate(make: Callable[..., Any]) -> Group:
        return Group(make, _members(_fields(fields_of) | _parameters(make)))

    return decorate


def takes_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command whose parameters have options, arguments or groups as their defaults.

    Returns:
        A function with the signature that Typer needs, which calls the command.
    """
    options = Group(command, _members(_parameters(command)))

    @functools.wraps(command)
    def called_by_typer(**given: Any) -> Any:
        return options(**given)

    sign(called_by_typer, options)
    return called_by_typer


def sign(function: Any, options: Group) -> None:
    """Give a function the signature from which Typer makes the options of a group."""
    parameters = options.parameters()
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


#: The types and the defaults of fields or parameters, by their names. A default is a field of a
#: dataclass, which `option` or `argument` returns, or a group.
_Declared: typing.TypeAlias = dict[str, tuple[Any, Any]]


def _fields(kind: type[Any]) -> _Declared:
    types = typing.get_type_hints(kind)
    return {each.name: (types[each.name], each) for each in dataclasses.fields(kind)}


def _parameters(function: Callable[..., Any]) -> _Declared:
    """Return the keyword-only parameters of a function, except `**others`."""
    types = typing.get_type_hints(function)
    return {
        name: (types[name], parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def _members(declared: _Declared) -> dict[str, DeclaredOption | Group]:
    """Return the options and groups among what was declared."""
    members: dict[str, DeclaredOption | Group] = {}
    for name, (kind, default) in declared.items():
        if isinstance(default, Group):
            members[name] = default
        elif default.metadata:  # a field without metadata was not made by `option`
            members[name] = DeclaredOption(kind, default.default, default.metadata)
    return members


def _metavar(kind: Any) -> str | None:
    """Return the placeholder for a value in the help, such as FILE, or the choices of a literal.

    It is None for types that take no value, such as bool.
    """
    type_arguments = [each for each in typing.get_args(kind) if each is not type(None)]
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(map(str, type_arguments))
    if type_arguments:  # of `T | None` or `list[T]`
        return _metavar(type_arguments[0])
    return _METAVARS.get(kind)
