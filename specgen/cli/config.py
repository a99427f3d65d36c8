"""``specgen config``: shows the defaults in force, and where each comes from."""

from __future__ import annotations

import json
from typing import Any

from specgen.cli import flags
from specgen.cli.command import Command
from specgen.cli.defaults import config_file, option_keys
from specgen.cli.model_loading import Setup
from specgen.cli.output import Output

_SOURCES = {"COMMANDLINE": "flag", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}


class ConfigCommand(Command):
    """A command that shows its options instead of using them."""

    def invoke(self, ctx: Any) -> int:
        path = config_file()
        print(f"# {path}" + ("" if path.exists() else " (there is no such file)"))
        for parameter in self.params:
            keys = option_keys(parameter)
            if not keys:
                continue
            source = ctx.get_parameter_source(parameter.name)
            where = _SOURCES.get(source.name if source is not None else "", "default")
            value = ctx.params.get(parameter.name)
            is_set = where != "default"
            meant = parameter.show_default  # type: ignore[attr-defined]
            if where == "environment":
                where += f" {parameter.envvar}"
            if is_set:
                print(f"{keys[0]} = {_text(value)}  # {where}")
            elif isinstance(meant, str) or value is None:
                print(f"# {keys[0]} is not set" + (f": {meant}" if isinstance(meant, str) else ""))
            else:
                print(f"# {keys[0]} = {_text(value)}  # {where}")
        return 0


#: The class of this command (`specgen.cli`).
COMMAND_CLASS = ConfigCommand


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return json.dumps(
        value if isinstance(value, (bool, int, float)) else str(value), ensure_ascii=False
    )


@flags.takes_options(
    setup=flags.setup, template=flags.template.without("chat"), output=flags.output
)
def config(*, setup: Setup, template: flags.Template, output: Output) -> int:  # noqa: ARG001
    """Show the defaults of options, and where each comes from.

    Defaults are those of specgen, of your file config.toml in the configuration folder, of environment
    variables, and of the options that you give here; later ones count. A key of the file is the long name of
    an option. The table [targets."NAME"] holds for one target.

    It prints what could stand in the file; lines of specgen's own defaults are comments.
    """
    raise AssertionError("ConfigCommand shows the options")
