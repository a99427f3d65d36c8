"""Typer's errors for wrong command lines, in our words."""

from __future__ import annotations

import re

import typer

#: The base class of Typer's errors for wrong command lines, which has no public name.
COMMAND_LINE_ERROR: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)
#: Patterns of pydantic's messages about a value, which Typer passes on, and our messages.
_MESSAGES = (
    (r"Input should be a valid integer.*", "it is not a whole number"),
    (r"Input should be a valid number.*", "it is not a number"),
    (r"Input should be a valid boolean.*", "it is not true or false"),
    (r"Input should be greater than or equal to (\S+)", r"give \1 or more"),
    (r"Input should be less than or equal to (\S+)", r"give \1 or less"),
    (r"Value error, (.*?)\.?$", r"\1"),
)


def in_words(message: str) -> str:
    """Return a message of Typer with the parts that come from pydantic in our words."""
    for pattern, replacement in _MESSAGES:
        message = re.sub(pattern, replacement, message)
    return message
