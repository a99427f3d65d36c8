"""Typer's errors for wrong command lines, in our words."""

from __future__ import annotations

from typing import Any

import typer

from specgen.option_values import described

#: The base class of Typer's errors for wrong command lines, which has no public name.
COMMAND_LINE_ERROR: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


def reason(error: Any) -> str | None:
    """Return why Typer refused a value; None if pydantic, with which it checks, did not."""
    if not hasattr(error.__cause__, "errors"):
        return None
    first_error = error.__cause__.errors(include_url=False)[0]
    return described(first_error).removesuffix(".")
