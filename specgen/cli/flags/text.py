"""Options whose values are text."""

from __future__ import annotations

import typer


def utf8(value: str) -> str:
    """Return the value, as an option's `parser`. Raises `typer.BadParameter` if it is not UTF-8: such bytes
    arrive as lone surrogates, which cannot be encoded later."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise typer.BadParameter(
            f"it is not UTF-8 at character {error.start}; check the terminal's locale"
        ) from None
    return value
