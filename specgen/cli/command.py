"""What all commands have in common: the user's defaults, llama.cpp's spellings, and examples in the help."""

from __future__ import annotations

from typing import Any

import typer
import typer.core

from specgen.cli.defaults import defaults_for
from specgen.cli.examples import EXAMPLES
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
        # Typer shows each paragraph as a line.
        self.epilog = "\n\n".join(EXAMPLES.get(self.name or "", ()))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            args = translated(ctx, args)
            try:
                given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
            except COMMAND_LINE_ERROR as error:
                error.ctx = ctx  # type: ignore[attr-defined]
                raise
            eager = [each.name for each in self.get_params(ctx) if each.is_eager]
            if not any(given.get(name) for name in eager):  # no help is asked for
                ctx.default_map = self._defaults(ctx, given)
        return super().parse_args(ctx, args)

    def _defaults(self, ctx: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Return the user's defaults. Raise `UsageError` if their file has a mistake."""
        return defaults_for(ctx, given)

    def get_params(self, ctx: Any) -> Any:
        return without_flag_types(super().get_params(ctx))
