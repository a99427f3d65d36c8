"""What all commands have in common: llama.cpp's spellings, the user's defaults, and the help."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer.core

from specgen.cli.help_pages import write_examples, write_options
from specgen.cli.llama_cpp_options import translated
from specgen.cli.typer_messages import COMMAND_LINE_ERROR
from specgen.cli.user_defaults import user_defaults


class Command(typer.core.TyperCommand):
    """A command whose options have the user's defaults, and whose help is plain text."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        names = {"help_option_names": ["-h", "--help", "--help-all"], "max_content_width": 100}
        super().__init__(*arguments, **(settings | {"context_settings": names}))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options into the help."""
        write_options(self, ctx, formatter, shows_all=ctx.meta.get("asks_for_all_help", False))

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the end of the help."""
        write_examples(self.name or "", formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line, after what people are used to from other tools is replaced."""
        ctx.meta["asks_for_all_help"] = "--help-all" in args
        if ctx.resilient_parsing:  # the shell completes a word
            return super().parse_args(ctx, args)
        args = translated(ctx, args)
        given, rest = self._parsed(ctx, args)
        model = _model_given_first(ctx, given, rest)
        if model is not None:
            args = _with_target(args, model)
            given, _ = self._parsed(ctx, args)
        if not given.get("help"):
            ctx.default_map = user_defaults(ctx, given)
        return super().parse_args(ctx, args)

    def _parsed(self, ctx: Any, args: list[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the texts for the parameters, and the words for which there is none."""
        try:
            given, rest, _ = self.make_parser(ctx).parse_args(args=list(args))
        except COMMAND_LINE_ERROR as error:
            error.ctx = ctx  # type: ignore[attr-defined]
            raise
        return given, rest


def _model_given_first(ctx: Any, given: Mapping[str, Any], rest: Sequence[str]) -> str | None:
    """Return the first argument if it is a model, and no target is given.

    Other tools take the model there. It is a GGUF file, a word that looks like one, or the name of
    a model in the registry.
    """
    parameters = ctx.command.params
    targets = [each.name for each in parameters if "--target" in each.opts]
    is_subcommand = ctx.parent is not None and ctx.parent.parent is not None  # as `draft find`
    if is_subcommand or not targets or given.get(targets[0]):
        return None
    words: list[str] = []
    for each in parameters:
        if each.param_type_name == "argument":
            value = given.get(each.name) or []
            words += [value] if isinstance(value, str) else value
    words += rest
    if not words:
        return None
    first = words[0]
    is_file = first.endswith(".gguf") and Path(first).is_file()
    if is_file or re.fullmatch(r"\S+\.gg\w+", first):  # so that a misspelt name is an error
        return first
    if "-" not in first or not re.fullmatch(r"[\w.-]+", first):
        return None
    from specgen.models.registry import load_registry

    return first if first in load_registry().models else None


def _with_target(args: Sequence[str], model: str) -> list[str]:
    """Put `--target` before a model, which may be the value of an option as well."""
    places = [at for at, word in enumerate(args) if word == model]
    alone = [at for at in places if at == 0 or not args[at - 1].startswith("-")]
    at = (alone or places)[0]
    return [*args[:at], "--target", *args[at:]]
