"""How options are declared: as fields of dataclasses, with all that the command line needs.

`specgen/options.py` and `specgen/sampler_options.py` declare most of them;
`specgen/cli/flags/typer_groups.py` makes options of the command line from the fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any


def option(
    default: Any,
    spellings: str,
    help: str,  # noqa: A002
    *,
    panel: str | None = None,
    metavar: str | None = None,
    min: float | None = None,  # noqa: A002
    max: float | None = None,  # noqa: A002
    parse: Callable[[Any], Any] | None = None,
    show_default: str | bool | None = None,
    envvar: str | None = None,
    autocompletion: Callable[[str], list[str]] | None = None,
    count: bool | None = None,
) -> Any:
    """Declare a field that is an option.

    Args:
        default: The value of the field if the option is not given.
        spellings: The option's names on the command line, separated by spaces, the readable one
            first.
        help: The text in `--help` and docs/cli.md.
        panel: The heading of the option there.
        metavar: What stands for its value there; by default the name of its type.
        min: The least value.
        max: The largest value.
        parse: From the given text to the value, or from a tuple of texts if the field is a tuple.
            Raises `ValueError` with the message to show.
        show_default: The default in words, or False to show none.
        envvar: An environment variable that sets the option.
        autocompletion: From the beginning of a value to the values that a shell suggests.
        count: Whether the value is how many times the option is given.
    """
    settings = {
        "panel": panel,
        "metavar": metavar,
        "min": min,
        "max": max,
        "parse": parse,
        "show_default": show_default,
        "envvar": envvar,
        "autocompletion": autocompletion,
        "count": count,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    return field(default=default, metadata={"spellings": spellings.split(), "help": help, **given})


def utf8(given: Any) -> Any:
    """Return a text, or several, as they are.

    Raises:
        ValueError: They are not UTF-8: other bytes arrive as lone surrogates.
    """
    try:
        (given if isinstance(given, str) else "".join(given)).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"it is not UTF-8 at character {error.start}; check the terminal's locale"
        ) from None
    return given
