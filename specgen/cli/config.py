"""``specgen config``: shows the defaults in force, and where each comes from."""

from __future__ import annotations

import json
from typing import Any

from specgen.cli import flags
from specgen.cli.command import Command, config_file, option_keys
from specgen.cli.model_loading import Setup
from specgen.cli.output import Output

_SOURCES = {"COMMANDLINE": "flag", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}


class ConfigCommand(Command):
    """A command that shows its options instead of using them."""

    def invoke(self, ctx: Any) -> int:
        path = config_file()
        print(f"# {path}" + ("" if path.exists() else " (there is no such file)"))
        for parameter in filter(option_keys, self.params):
            key = option_keys(parameter)[0]
            source = ctx.get_parameter_source(parameter.name)
            where = _SOURCES.get(source.name if source is not None else "")
            value = ctx.params.get(parameter.name)
            meant = parameter.show_default  # type: ignore[attr-defined]
            if where is not None:
                where += f" {parameter.envvar}" if where == "environment" else ""
                print(f"{key} = {_text(value)}  # {where}")
            elif isinstance(meant, str) or value is None:
                print(f"# {key} is not set" + (f": {meant}" if isinstance(meant, str) else ""))
            else:
                print(f"# {key} = {_text(value)}  # default")
        return 0


#: The class of this command (`specgen.cli.app`).
COMMAND_CLASS = ConfigCommand


def _text(value: Any) -> str:
    is_plain = isinstance(value, (bool, int, float, list, tuple))
    return json.dumps(value if is_plain else str(value), ensure_ascii=False, default=str)


@flags.takes_options
def config(
    *,
    setup: Setup = flags.setup,
    template: flags.Template = flags.template.without("chat"),
    output: Output = flags.output,
) -> int:
    """Show the defaults of options, and where each comes from.

    They come from specgen, your file config.toml in the configuration folder, environment
    variables, and the options that you give here; later ones count. It prints what could stand in
    the file; lines of specgen's own defaults are comments.
    """
    del setup, template, output  # ConfigCommand shows their options instead
    return 0
