"""What all commands have in common: llama.cpp's spellings, the user's defaults, and the help."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import typer.core

from specgen.cli.help_pages import write_examples, write_options
from specgen.cli.llama_cpp_options import translated
from specgen.cli.typer_messages import COMMAND_LINE_ERROR
from specgen.cli.user_defaults import config_file, option_keys, user_defaults
from specgen.errors import ModelFileError, UnknownModelError
from specgen.system.files import named_file, path_of

#: The options that name models, as config.toml spells them.
_MODEL_KEYS = ("target", "draft", "pair")


class Command(typer.core.TyperCommand):
    """A command whose options have the user's defaults, and whose help is plain text."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        context_settings = {
            "help_option_names": ["-h", "--help", "--help-all"],
            "max_content_width": 100,
        }
        super().__init__(*arguments, **(settings | {"context_settings": context_settings}))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options into the help."""
        write_options(self, ctx, formatter, shows_all=ctx.meta.get("asks_for_all_help", False))

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the end of the help."""
        write_examples(self.name or "", formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line, after translating what is spelt as in other tools."""
        ctx.meta["asks_for_all_help"] = "--help-all" in args
        if ctx.resilient_parsing:  # the shell completes a word
            return super().parse_args(ctx, args)
        args = translated(ctx, args)
        given, extra_words = self._parse_texts(ctx, args)
        model = _model_given_first(ctx, given, extra_words)
        if model is not None:
            args = _with_target(args, model)
            given, _ = self._parse_texts(ctx, args)
        # A wrong config.toml does not keep the help from being shown. The name of the help's
        # parameter is any of its spellings, but only such options are eager.
        eager_names = [each.name for each in self.get_params(ctx) if each.is_eager]
        if not any(given.get(name) for name in eager_names):
            ctx.default_map = user_defaults(ctx, given)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. An error about a model in config.toml names the file and the key."""
        try:
            return super().invoke(ctx)
        except (ModelFileError, UnknownModelError) as error:
            place = _place_of_model(ctx, error.message)
            if place is not None:
                error.message = f"{place}: {error.message}"
            raise

    def _parse_texts(
        self,
        ctx: Any,
        args: list[str],
    ) -> tuple[dict[str, Any], list[str]]:
        """Parse the command line without converting values.

        Returns:
            The texts for the parameters, by the parameters' names; and the words that are left.
        """
        try:
            given, extra_words, _ = self.make_parser(ctx).parse_args(args=list(args))
        except COMMAND_LINE_ERROR as error:
            error.ctx = ctx  # type: ignore[attr-defined]
            raise
        return given, extra_words


def _place_of_model(ctx: Any, message: str) -> str | None:
    """Return where the user's defaults set the model that a message names.

    Returns:
        None if they do not, or the message names no model.
    """
    for option in ctx.command.params:
        keys = option_keys(option)
        if not keys or keys[0] not in _MODEL_KEYS:
            continue
        given = ctx.params.get(option.name) or []
        names = [given] if isinstance(given, str) else given
        if not any(os.fspath(path_of(name)) in message for name in names):
            continue
        if ctx.get_parameter_source(option.name).name == "DEFAULT_MAP":
            return f"{config_file()}: {keys[0]}"
    return None


def _model_given_first(
    ctx: Any,
    given: Mapping[str, Any],
    extra_words: Sequence[str],
) -> str | None:
    """Return the first argument if it is a model, where other tools take the model.

    Returns:
        None if it is not a model, a target is given, or the command is a subcommand or takes no
        target.
    """
    parameters = ctx.command.params
    target_names = [parameter.name for parameter in parameters if "--target" in parameter.opts]
    is_subcommand = ctx.parent is not None and ctx.parent.parent is not None  # as `draft find`
    if is_subcommand or not target_names or given.get(target_names[0]):
        return None
    words: list[str] = []
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            value = given.get(parameter.name) or []
            words += [value] if isinstance(value, str) else value
    words += extra_words
    if words and _is_model(words[0]):
        return words[0]
    return None


def _is_model(word: str) -> bool:
    """Return whether a word is a GGUF file, looks like one, or names a model."""
    if word.endswith(".gguf") and named_file(word):
        return True
    # A misspelt file such as model.ggfu must be an error, not a prompt.
    if re.fullmatch(r"\S+\.gg\w+", word):
        return True
    # The name of another program's model, as ollama:NAME.
    if re.fullmatch(r"[\w.-]+:\S+", word):
        from specgen.models.stored_models import prefix_of

        return prefix_of(word) is not None
    # A name has a hyphen. A word without one is a prompt, and the registry need not be loaded.
    if "-" not in word or not re.fullmatch(r"[\w.-]+", word):
        return False
    from specgen.models.registry import load_registry

    return word in load_registry().models


def _with_target(args: Sequence[str], model: str) -> list[str]:
    """Put `--target` before the model.

    An option may have the same word as its value, so one that does not follow an option is chosen
    if possible.
    """
    indices = [index for index, word in enumerate(args) if word == model]
    not_after_option = [
        index for index in indices if index == 0 or not args[index - 1].startswith("-")
    ]
    index = (not_after_option or indices)[0]
    return [*args[:index], "--target", *args[index:]]
