"""``specgen config``: shows the defaults in force, and where each comes from."""

from __future__ import annotations

import json
from typing import Any

from specgen.cli import flags
from specgen.cli.command import Command
from specgen.cli.model_loading import Setup
from specgen.cli.output import Output
from specgen.cli.user_defaults import config_file, option_keys

#: Where a value comes from, by Typer's words for it.
_SOURCES = {"COMMANDLINE": "flag", "DEFAULT_MAP": "file"}


class ConfigCommand(Command):
    """A command that shows its options instead of using them."""

    def invoke(self, ctx: Any) -> int:
        """Print a line for each option that may be in the file."""
        path = config_file()
        if path.exists():
            print(f"# {path}")
        else:
            print(f"# {path} (there is no such file)")
        for option in self.params:
            if option_keys(option):
                print(_line(option, ctx))
        return 0


def _line(option: Any, ctx: Any) -> str:
    """Return a line of the file that sets an option, as a comment if it has its default."""
    key = option_keys(option)[0]
    value = ctx.params[option.name]
    source = ctx.get_parameter_source(option.name).name
    if source == "ENVIRONMENT":
        return f"{key} = {_text(value)}  # environment {option.envvar}"
    if source in _SOURCES:
        return f"{key} = {_text(value)}  # {_SOURCES[source]}"
    if isinstance(option.show_default, str):  # the default in words
        return f"# {key} is not set: {option.show_default}"
    if value is None:
        return f"# {key} is not set"
    return f"# {key} = {_text(value)}  # default"


#: The class of this command (`specgen.cli.app`).
COMMAND_CLASS = ConfigCommand


def _text(value: Any) -> str:
    """Return a value in TOML's form."""
    is_plain = isinstance(value, (bool, int, float, list, tuple))
    return json.dumps(value if is_plain else str(value), ensure_ascii=False, default=str)


@flags.takes_options
def config(
    *,
    setup: Setup = flags.setup,
    template: flags.Template = flags.template.without("--chat"),
    output: Output = flags.output,
) -> int:
    """Show the defaults of options, and where each comes from.

    They come from specgen, your file config.toml in the configuration folder, environment
    variables, and the options that you give here; later ones take precedence. The output can be
    used as the file; specgen's own defaults are comments in it.
    """
    del setup, template, output  # ConfigCommand shows their options instead
    return 0
