"""``specgen config``: shows the current defaults, and where each comes from."""

from __future__ import annotations

import json
import re
from typing import Any

from specgen.cli import flags
from specgen.cli.command import Command
from specgen.cli.model_loading import Setup
from specgen.cli.output import Output
from specgen.cli.user_defaults import config_file, option_keys
from specgen.models.own_folders import FOLDERS_KEY, model_folders
from specgen.system.files import NOWHERE, named_path

#: Our names for where a value comes from, by Typer's.
_SOURCE_NAMES = {"COMMANDLINE": "flag", "DEFAULT_MAP": "file"}


class ConfigCommand(Command):
    """A command that shows its options instead of using them."""

    def invoke(self, ctx: Any) -> int:
        """Print a line for each option that may be in the file."""
        path = config_file()
        if path.is_relative_to(NOWHERE):
            reason = "there is no home directory that can be used"
            print(f"# {reason}: SPECGEN_CONFIG names the folder of config.toml")
        elif named_path(path):
            print(f"# {path}")
        else:
            print(f"# {path} (there is no such file)")
        folders = [str(folder) for folder in model_folders()]
        if folders:
            print(f"{FOLDERS_KEY} = {_toml(folders)}  # file")
        else:
            print(f"# {FOLDERS_KEY} is not set: no folders of your own are searched for models")
        for option in self.params:
            if option_keys(option):
                print(_line(option, ctx))
        return 0


def _line(option: Any, ctx: Any) -> str:
    """Return the line of the file that sets an option; a comment if specgen's default applies."""
    key = option_keys(option)[0]
    value = _number_if_taken(option, ctx.params[option.name])
    source = ctx.get_parameter_source(option.name).name
    if source == "ENVIRONMENT":
        return f"{key} = {_toml(value)}  # environment {option.envvar}"
    if source in _SOURCE_NAMES:
        return f"{key} = {_toml(value)}  # {_SOURCE_NAMES[source]}"
    if isinstance(option.show_default, str):  # the default in words
        return f"# {key} is not set: {option.show_default}"
    if value is None:
        return f"# {key} is not set"
    return f"# {key} = {_toml(value)}  # default"


def _number_if_taken(option: Any, value: Any) -> Any:
    """Return a text as a number if it is one and the option takes numbers, as in N|all."""
    takes_numbers = "N" in (option.metavar or "").split("|")
    if takes_numbers and isinstance(value, str) and re.fullmatch(r"\s*-?\d+\s*", value):
        return int(value)
    return value


#: The class of this command (`specgen.cli.app`).
COMMAND_CLASS = ConfigCommand


def _toml(value: Any) -> str:
    """Return a value in TOML, which writes these types as JSON does."""
    if not isinstance(value, (bool, int, float, list, tuple)):
        value = str(value)
    return json.dumps(value, ensure_ascii=False, default=str)


@flags.takes_options
def config(
    *,
    setup: Setup = flags.setup,
    template: flags.Template = flags.template.without("--chat"),
    output: Output = flags.output,
) -> int:
    """Show the defaults of options, and where each comes from.

    They come from specgen, your file config.toml in the configuration folder, environment
    variables, and the options that you give here; later ones take precedence. The output has the
    file's format, with specgen's own defaults as comments. Options that only some commands have,
    such as --port, are left out.
    """
    del setup, template, output  # ConfigCommand shows their options instead
    return 0
