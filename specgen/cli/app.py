"""The application: the commands by name, and the exit codes of errors."""

from __future__ import annotations

import errno
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
import typer.core
import typer.main

from specgen import __version__
from specgen.cli.command import Command
from specgen.cli.streams import end_process, flush_or_abandon_stdout, output_errors
from specgen.cli.typer_messages import COMMAND_LINE_ERROR, reason
from specgen.errors import (
    EXIT_INTERRUPTED,
    MemoryLimitError,
    OutputError,
    SpecgenError,
    UsageError,
    did_you_mean,
)

#: The line of each command or group of commands in the help, by its name, which is its module's
#: name, too. It is the first line of the command's docstring, without importing the module.
COMMANDS = {
    "run": "Generate an answer to a prompt, faster and unchanged.",
    "chat": "Talk with a model, at a terminal or in a pipe.",
    "fim": "Fill a gap in a file, or between two texts, and print the middle.",
    "batch": "Answer each line of a file, many at once; run it again to resume.",
    "serve": "Serve OpenAI's, Anthropic's, Ollama's and llama.cpp's APIs over HTTP.",
    "verify": "Check that drafting does not change your model's output.",
    "tune": "Measure what drafting gains with your models on this machine.",
    "bench": "Measure what drafting gains over plain decoding, on your own prompts.",
    "race": "Race drafting against plain decoding, and replay both answers side by side.",
    "config": "Show the defaults of options, and where each comes from.",
    "worker": "Offer this machine's devices to specgen on other machines (`--rpc`), by llama.cpp's "
    "RPC.",
    "doctor": "Show what this machine and this build of llama.cpp can do, and check that it "
    "decodes.",
    "models": "List, show, download and remove models.",
    "draft": "Find, make or train the best draft for a target.",
}
#: Our commands, by other tools' names for them.
_NAMES_ELSEWHERE = {
    "ls": "models list",
    "list": "models list",
    "pull": "models pull",
    "rm": "models rm",
    "show": "models show",
    "quantize": "models quantize",
    "help": "--help",
}
#: Typer's message about a command that does not exist, which may end with its own suggestions.
_UNKNOWN_COMMAND = re.compile(r"No such command (?P<quote>['\"])(?P<name>.+?)(?P=quote)\.")
#: Error numbers of paths that cannot be looked up: their name is too long, their folder is
#: inaccessible, or they are links in a circle.
_PATH_ERRORS = {errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP}


class _Group(typer.core.TyperGroup):
    """A group of commands, which handles errors of standard output for all of them."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands into the help, each with the first paragraph of its own."""
        rows = []
        for name, command in self.commands.items():
            first_paragraph, _, _ = (command.help or "").partition("\n\n")
            rows.append((name, " ".join(first_paragraph.split())))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        """Parse the command line, which already prints for --version and --help."""
        with output_errors():
            return super().make_context(*arguments, **settings)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with output_errors():
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result


class _CommandLine(_Group):
    """All commands. Each is a stand-in without options until `load` imports its module.

    The list of commands is therefore shown, and each command called, without importing the others.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that is called, after importing its module."""
        self.load(*COMMANDS.keys() & args[:1])  # the first word, if it is a command
        return super().resolve_command(ctx, args)

    def load(self, *names: str) -> None:
        """Replace the stand-ins with these names with the commands."""
        for name in names:
            self.commands[name] = _imported(name)


def _imported(name: str) -> Any:
    """Import the module with this name, and return its command or group of commands.

    A module with a group has it as `app`. Another has a function with its own name, and the class
    of the command as `COMMAND_CLASS` if that is not `Command`.
    """
    module = importlib.import_module(f"specgen.cli.{name}")
    # Typer builds commands from an application only: make one that has just this command.
    application = typer.Typer(add_completion=False, rich_markup_mode=None)
    group = getattr(module, "app", None)
    if group is not None:
        application.add_typer(group, name=name, cls=_Group)
        return typer.main.get_group(application).commands[name]
    command_class = getattr(module, "COMMAND_CLASS", Command)
    application.command(name, cls=command_class)(getattr(module, name))
    return typer.main.get_command(application)


def command_line() -> _CommandLine:
    """Return the group of all commands, with all their modules imported."""
    group = typer.main.get_command(app)
    assert isinstance(group, _CommandLine)
    group.load(*COMMANDS)
    return group


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specgen {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="specgen",
    cls=_CommandLine,
    help="Make a local GGUF model generate faster without changing its output.",
    epilog="Begin with `specgen run 'Why is the sky blue?'`; `specgen COMMAND -h` has options and "
    "examples.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(lambda: None)

_Version = typer.Option(
    "--version",
    "-V",
    help="Show the version and exit.",
    callback=_show_version,
    is_eager=True,
)


@app.callback()
def _specgen(version: Annotated[bool, _Version] = False) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit. Errors become exit codes only here."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names need not be UTF-8. They are shown with escapes, as on standard error.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = app(arguments, prog_name="specgen", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except (SpecgenError, COMMAND_LINE_ERROR, MemoryError, ImportError, OSError) as error:
        code = _report(error)
    end_process(code or 0)


def _report(error: Exception) -> int:
    """Print an error for the user, and return its exit code. Raise it if it is a bug in specgen."""
    from specgen.cli.output import say_error

    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
        print(error.format_message(), file=sys.stderr)  # type: ignore[attr-defined]
        return UsageError.exit_code
    if isinstance(error, OutputError):
        flush_or_abandon_stdout()
    reported = _user_error(error)
    if reported is None:
        raise error
    say_error(reported.message, reported.hint)
    return reported.exit_code


def _user_error(error: Any) -> SpecgenError | None:
    """Return the error as one of ours, with a message for the user; None if it is a bug."""
    if isinstance(error, SpecgenError):
        return error
    if isinstance(error, COMMAND_LINE_ERROR):
        return _usage_error(error)
    if isinstance(error, OSError):
        # A path that the user gave cannot be looked up; other errors are handled where they occur.
        if error.errno not in _PATH_ERRORS or error.filename is None:
            return None
        return UsageError(f"{os.fsdecode(error.filename)[:200]}: {error.strerror}")
    # A MemoryError; or an ImportError, with this message if a library does not fit into memory.
    if isinstance(error, ImportError) and "failed to map segment" not in str(error):
        return None
    return MemoryLimitError(
        "there is not enough memory", "close other programs, or use a smaller model"
    )


def _source_of(parameter: Any, context: Any) -> str:
    """Return where a parameter got its value from: a variable, an option, or an argument."""
    source = None if context is None else context.get_parameter_source(parameter.name)
    if source is not None and source.name == "ENVIRONMENT":
        return str(parameter.envvar)
    return str(parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar)


def _usage_error(error: Any) -> UsageError:
    """Return one of Typer's errors in our words, with the wrong value and a hint."""
    message = " ".join(error.format_message().split())  # on one line
    why = reason(error)
    context = getattr(error, "ctx", None)
    command = "specgen" if context is None else context.command_path
    hint = f"see `{command} --help`"
    unknown_command = _UNKNOWN_COMMAND.match(message)
    if why is not None:
        message = f"{_source_of(error.param, context)}: {why}"
    elif type(error).__name__ == "NoSuchOption":
        names = [name for option in error.ctx.command.params for name in option.opts]
        message = f"{error.message}{did_you_mean(error.option_name, names)}"
        if command == "specgen":
            hint = 'a command comes before its options: `specgen run -m model.gguf "prompt"`'
    elif unknown_command is not None:
        name = unknown_command["name"]
        message = f"No such command '{name}'"
        if name in _NAMES_ELSEWHERE:
            hint = f"it is `specgen {_NAMES_ELSEWHERE[name]}` here"
        elif " " in name and command == "specgen":
            hint = 'a command comes before the prompt: `specgen run "prompt"`'
        else:
            message += did_you_mean(name, error.ctx.command.commands)
    elif "unexpected extra argument" in message and command.endswith(" run"):
        hint = "put quotes around a prompt of several words"
    return UsageError(message, hint)
