"""Options whose values are text."""

from __future__ import annotations

import typer


def utf8(value: str) -> str:
    """The value, for an option's `parser`. Raises `typer.BadParameter` if it is not UTF-8: such
    bytes arrive as lone surrogates, which nothing that is made of the text can hold."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise typer.BadParameter(
            f"it is not UTF-8 at character {error.start}; check the terminal's locale"
        ) from None
    return value
