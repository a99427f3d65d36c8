"""What all commands have in common: the user's defaults, and two kinds of help."""

from __future__ import annotations

from typing import Any

import typer
import typer.core

from specgen.cli.defaults import defaults_for
from specgen.cli.llama_cpp_options import translated

#: Typer's base of errors in the use of the command line; it has no public name.
COMMAND_LINE_ERROR: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


def without_flag_types(parameters: Any) -> Any:
    """Return options; the help shows no type of flags."""
    for each in parameters:
        if getattr(each, "is_flag", False) or getattr(each, "count", False):
            each.metavar = ""
    return parameters


class Command(typer.core.TyperCommand):
    """A command whose options have the user's defaults."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        #: Whether the short help was asked for.
        self._is_short = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            args = translated(ctx, args)
            self._is_short = "-h" in args and "--help" not in args
            try:
                given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
            except COMMAND_LINE_ERROR as error:
                error.ctx = ctx  # type: ignore[attr-defined]
                raise
            if not _asks_for_help(self, ctx, given):
                ctx.default_map = self._defaults(ctx, given)
        return super().parse_args(ctx, args)

    def _defaults(self, ctx: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Return the user's defaults. Raise `UsageError` if their file has a mistake."""
        return defaults_for(ctx, given)

    def get_params(self, ctx: Any) -> Any:
        return without_flag_types(super().get_params(ctx))

    def get_help(self, ctx: Any) -> str:
        if not self._is_short:
            return super().get_help(ctx)
        from specgen.cli.short_help import short_help

        return short_help(self, ctx)


def _asks_for_help(command: Command, ctx: Any, given: dict[str, Any]) -> bool:
    eager = [each.name for each in command.get_params(ctx) if each.is_eager]
    return any(given.get(name) for name in eager)
