"""Checks the values of options, with pydantic.

The limits and the messages are the same in Python, in a server's requests and on the command line.
pydantic is imported only when there is a value to check, so that `specgen --help` is quick.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from specgen.errors import UsageError, did_you_mean
from specgen.option_fields import LARGEST_FACTOR

if TYPE_CHECKING:
    from pydantic import TypeAdapter

#: The limits of numbers that declare none, by their type.
_LARGEST = {int: 2**63 - 1, float: LARGEST_FACTOR}
#: The settings of an option that decide which values are valid.
_CHECKING_SETTINGS = ("min", "max", "parse", "check")
#: The maximum number of characters of a value in a message.
_MAX_SHOWN = 60


class Options:
    """The base of dataclasses of options: checks values, and converts them to the fields' types.

    Default values are not checked.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if not _is_default(field, value):
                checked = checked_option(type(self), field.name, value)
                object.__setattr__(self, field.name, checked)
        self.check_together()

    def check_together(self) -> None:
        """Raise `UsageError` if the options contradict each other; subclasses extend this."""


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default_factory is dataclasses.MISSING:
        return value is field.default
    default = field.default_factory()
    return type(value) is type(default) and bool(value == default)


# --- names ----------------------------------------------------------------------------------------


def names_of(field: dataclasses.Field[Any]) -> list[str]:
    """Return the names of an option in programs and in requests, the name of its field first.

    These are the name of its field, its long names on the command line, and its aliases.
    """
    names = [field.name]
    for spelling in field.metadata["spellings"]:
        flag, _, _ = spelling.partition("/")  # --chat of --chat/--raw
        if flag.startswith("--"):
            names.append(flag.removeprefix("--").replace("-", "_"))
    names += field.metadata.get("aliases", "").split()
    return list(dict.fromkeys(names))


def field_names_of(*options: type[Any]) -> dict[str, str]:
    """Return the name of each option's field in these dataclasses, by any name of the option."""
    return {
        name: field.name
        for kind in options
        for field in dataclasses.fields(kind)
        if field.metadata  # other fields are not options
        for name in names_of(field)
    }


def by_field_names(
    given: Mapping[str, Any],
    names: Mapping[str, str],
    other_names: Iterable[str] = (),
) -> dict[str, Any]:
    """Return options by the names of their fields. An option that is None counts as not given.

    Args:
        given: The options, by any of their names.
        names: The names of the fields of all options, by any name of each (`field_names_of`).
        other_names: More names to suggest if a name is wrong.

    Raises:
        UsageError: If there is no such option, or one is given twice.
    """
    options: dict[str, Any] = {}
    given_names: dict[str, str] = {}
    for name, value in given.items():
        if name not in names:
            suggestion = did_you_mean(name, [*names, *other_names])
            raise UsageError(f"there is no option {shown_value(name)}{suggestion}")
        if value is None:
            continue
        field_name = names[name]
        if field_name in options:
            raise UsageError(
                f"{given_names[field_name]} and {name} are the same option; give one of them"
            )
        options[field_name] = value
        given_names[field_name] = name
    return options


# --- values ---------------------------------------------------------------------------------------


def checked_option(options: type[Any], name: str, value: Any) -> Any:
    """Return the value of a field of a dataclass of options, in the field's type.

    Raises:
        UsageError: If the value is invalid.
    """
    adapter = _adapter_of_field(options, name)  # type: ignore[arg-type]  # a class has a hash
    return _validated(adapter, name, value)


def checked_value(
    name: str,
    kind: Any,
    value: Any,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Return a value in the type that it should have.

    Args:
        name: Its name, for the message.
        kind: The type.
        value: The value.
        settings: The settings of `option_fields.option`; empty if the value is not an option.

    Raises:
        UsageError: If the value is invalid.
    """
    checks = {key: settings[key] for key in _CHECKING_SETTINGS if key in settings}
    return _validated(_adapter(kind, **checks), name, value)


def required(name: str, kind: type[Any], value: Any) -> None:
    """Check that an argument is of a class.

    Raises:
        UsageError: If it is not.
    """
    if not isinstance(value, kind):
        raise UsageError(
            f"{name}: give a value of the type {kind.__name__}, not {shown_value(value)}"
        )


@functools.cache
def _adapter(kind: Any, **settings: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(value_type(kind, settings))


@functools.cache
def _adapter_of_field(options: type[Any], name: str) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(field_type(options, name))


def _validated(adapter: TypeAdapter[Any], name: str, value: Any) -> Any:
    from pydantic import ValidationError

    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first_error = error.errors(include_url=False)[0]
    # Names in the location are those of types in a union, which mean nothing to users.
    indices = [key for key in first_error["loc"] if isinstance(key, int)]
    raise UsageError(f"{name}{place_of(indices)}: {described(first_error)}")


# --- types for pydantic ---------------------------------------------------------------------------


def field_type(options: type[Any], name: str) -> Any:
    """Return the type of a field of a dataclass of options, with its limits, for pydantic."""
    types = typing.get_type_hints(options)
    (field,) = (field for field in dataclasses.fields(options) if field.name == name)
    return value_type(types[name], field.metadata)


def value_type(kind: Any, settings: Mapping[str, Any]) -> Any:
    """Return the type of a value with its limits, for pydantic.

    Args:
        kind: The type, which may be a union with None.
        settings: The settings of `option_fields.option`; empty if the value is not an option.
    """
    from pydantic import AfterValidator, BeforeValidator

    parts = typing.get_args(kind)
    if type(None) in parts:
        others = [part for part in parts if part is not type(None)]
        return value_type(functools.reduce(operator.or_, others), settings) | None
    value = _type_within_limits(kind, settings)
    parse = settings.get("parse")
    if typing.get_origin(kind) is tuple:
        # Items that are texts anyway stay as they are.
        parse_items = None if parts[0] is str else parse
        value = Annotated[value, BeforeValidator(functools.partial(_listed, parse, parse_items))]
    elif parse is not None:
        value = Annotated[value, BeforeValidator(functools.partial(_parsed, parse))]
    check = settings.get("check")
    if check is not None:
        value = Annotated[value, AfterValidator(check)]
    return value


def _type_within_limits(kind: Any, settings: Mapping[str, Any]) -> Any:
    """Return the type of a single value for pydantic, with the option's minimum and maximum."""
    from pydantic import BeforeValidator, Field, FiniteFloat, InstanceOf

    if kind in _LARGEST:
        smallest = settings.get("min", -_LARGEST[kind])
        largest = settings.get("max", _LARGEST[kind])
        number = FiniteFloat if kind is float else int
        limits = Field(ge=smallest, le=largest)
        return Annotated[number, limits, BeforeValidator(_number)]
    if kind is str:  # pydantic would decode bytes
        return Annotated[str, Field(strict=True)]
    if kind is Path:
        return Annotated[Path, BeforeValidator(_path)]
    if kind == tuple[Path, ...]:
        return tuple[_type_within_limits(Path, {}), ...]  # type: ignore[misc]
    if dataclasses.is_dataclass(kind):
        return Annotated[kind, InstanceOf()]  # type: ignore[type-arg]
    return kind


def _number(value: Any) -> Any:
    """Return a number of another library as Python's own, and refuse True and False."""
    if isinstance(value, bool):
        from pydantic_core import PydanticKnownError

        raise PydanticKnownError("float_type")
    if type(value) in (int, float):
        return value
    with contextlib.suppress(TypeError):  # not a whole number
        return operator.index(value)
    return value


def _path(value: Any) -> Any:
    """Return the path that a text names; other values stay as they are.

    Raises:
        ValueError: If the text is empty, which Python takes for the working directory.
    """
    if value == "":
        raise ValueError("the path is empty")
    # pydantic accepts only texts in UTF-8, and names of files need not be.
    return Path(value) if isinstance(value, str) else value


def _listed(
    parse: Callable[[Any], Any] | None,
    parse_items: Callable[[Any], Any] | None,
    value: Any,
) -> Any:
    """Return a tuple for a single text, for texts that stand for other values, or for an object.

    Args:
        parse: Parses a single text as on the command line.
        parse_items: Parses several texts.
        value: The value. Others stay as they are.
    """
    if isinstance(value, Mapping):
        return tuple(value.items())
    if isinstance(value, str):
        return (value,) if parse is None else parse((value,))
    if parse_items is None or not isinstance(value, (list, tuple)) or not value:
        return value
    if all(isinstance(item, str) for item in value):
        return parse_items(tuple(value))
    return value


def _parsed(parse: Callable[[Any], Any], value: Any) -> Any:
    """Parse a text as on the command line; other values stay as they are."""
    return parse(value) if isinstance(value, str) else value


# --- messages -------------------------------------------------------------------------------------


#: What is wanted in place of a wrong value, by pydantic's types of errors. The names in braces are
#: details of the errors.
_WANTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than_equal": "{ge} or more",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "is_instance_of": "a value of the type {class}",
    "less_than_equal": "{le} or less",
    "list_type": "a list",
    "literal_error": "one of {expected}",
    "mapping_type": "an object",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "path_type": "a path",
    "string_too_long": "a text of {max_length} characters or fewer",
    "string_too_short": "a text of {min_length} characters or more",
    "string_type": "a text",
    "too_long": "a list of {max_length} or fewer",
    "too_short": "a list of {min_length} or more",
    "tuple_type": "a list",
}


def described(
    error: Mapping[str, Any],
    shown: Callable[[Any], str] | None = None,
    alternatives: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return what is wrong with a value: what is wanted, and what was given.

    Args:
        error: One of the errors of pydantic's `ValidationError`.
        shown: Shows the value; None shows it as Python would.
        alternatives: The errors about the other types that the value may have.
    """
    show = shown or shown_value
    given = show(error["input"])
    if error["type"] in ("greater_than_equal", "less_than_equal"):
        given = given.strip("'\"")  # a number on the command line is a text
    wanted = [_wanted(each) for each in (error, *alternatives)]
    if wanted[0] is not None:
        known_wanted = dict.fromkeys(each for each in wanted if each is not None)
        return f"give {', or '.join(known_wanted)}, not {given}"
    if error["type"] == "value_error":  # raised by a function of ours
        return str(error["ctx"]["error"])
    if error["type"] == "missing":
        return "it is missing"
    return f"{error['msg']}; it is {given}"


def _wanted(error: Mapping[str, Any]) -> str | None:
    """Return what is wanted in place of a wrong value; None if pydantic's own words tell."""
    wanted = _WANTED.get(error["type"])
    if wanted is None:
        return None
    details = {name: _in_words(each) for name, each in error.get("ctx", {}).items()}
    return wanted.format_map(details)


def _in_words(limit: Any) -> str:
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


def shown_value(value: Any) -> str:
    """Return a value as in Python, cut to 60 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write integers of thousands of digits
        return "a number of thousands of digits"
    text = " ".join(text.split())
    if len(text) > _MAX_SHOWN:
        return f"{text[: _MAX_SHOWN - 3]}..."
    return text


def place_of(keys: Sequence[int | str]) -> str:
    """Return the place of a value within another one, such as ``.messages[0].role``."""
    place = ""
    for key in keys:
        if isinstance(key, int):
            place += f"[{key}]"
        else:
            place += f".{key}"
    # Pydantic marks a wrong key of an object with "[key]".
    return place.removesuffix(".[key]")
