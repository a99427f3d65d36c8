"""Declares options as fields of dataclasses, with everything that the command line needs.

`specgen/options.py` and `specgen/sampler_options.py` declare most of them, and
`specgen/cli/flags/typer_groups.py` turns the fields into options of the command line.
`specgen/option_values.py` checks their values, wherever these come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

#: The maximum for factors and biases. Logits are float32, so that values near its largest number
#: (3e38) would give infinities.
LARGEST_FACTOR = 1e30


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
    check: Callable[[Any], Any] | None = None,
    aliases: str | None = None,
    show_default: str | bool | None = None,
    envvar: str | None = None,
    autocompletion: Callable[[str], list[str]] | None = None,
    count: bool | None = None,
) -> Any:
    """Declare a field that is an option.

    Args:
        default: The value of the field if the option is not given.
        spellings: The option's names on the command line, separated by spaces, with the most
            readable one first.
        help: The text in `--help` and docs/cli.md.
        panel: The heading there under which the option is listed.
        metavar: The placeholder for its value there; None: the name of its type.
        min: The minimum value.
        max: The maximum value.
        parse: Converts the given text to the value; if the field is a tuple, converts a tuple of
            texts. It raises `ValueError` with a message for the user.
        check: Takes a value of the right type within the limits, and returns it in its usual form.
            It raises `ValueError` with a message for the user.
        aliases: More names of the option in programs and in requests, separated by spaces. Its
            long names on the command line are among them already.
        show_default: The default in words, or False to show no default.
        envvar: An environment variable that sets the option.
        autocompletion: Takes the beginning of a value, and returns the values that a shell
            suggests.
        count: Whether the value is the number of times that the option is given.

    Returns:
        The dataclass field.
    """
    settings = {
        "panel": panel,
        "metavar": metavar,
        "min": min,
        "max": max,
        "parse": parse,
        "check": check,
        "aliases": aliases,
        "show_default": show_default,
        "envvar": envvar,
        "autocompletion": autocompletion,
        "count": count,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    return field(default=default, metadata={"spellings": spellings.split(), "help": help, **given})


def utf8(given: Any) -> Any:
    """Return the value of an option, a text or several, if it is valid UTF-8.

    Raises:
        ValueError: If it is not. Python passes other bytes on as lone surrogates.
    """
    text = given if isinstance(given, str) else "".join(given)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"it is not UTF-8 at character {error.start}; check the terminal's locale"
        ) from None
    return given
