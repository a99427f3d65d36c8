"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Collection, Sequence
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from specgen import __version__
from specgen.cli.process import end_process, flush_or_abandon_stdout, output_errors
from specgen.errors import EXIT_INTERRUPTED, MemoryLimitError, OutputError, SpecgenError


class _Group(typer.core.TyperGroup):
    """The group of commands. It handles errors of standard output for every command."""

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        with output_errors():  # --version and --help write here
            return super().make_context(*arguments, **settings)

    def invoke(self, ctx: Any) -> Any:
        with output_errors():
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specgen {__version__}")
        raise typer.Exit


#: By its name: where a command is, and what the help says of it, so that the modules of the other commands are
#: not imported (a third of the time until `specgen run` loads its model). Modules stand for groups.
COMMANDS = {
    "run": ("specgen.cli.run", "Generate an answer to a prompt, faster and unchanged."),
    "chat": ("specgen.cli.chat", "Talk with a model, at a terminal or in a pipe."),
    "fim": ("specgen.cli.fim", "Fill a gap in a file, or between two texts, and print the middle."),
    "batch": (
        "specgen.cli.batch",
        "Answer each line of a file, many at once; run it again to resume.",
    ),
    "serve": (
        "specgen.cli.serve",
        "Serve OpenAI's API and llama.cpp's over HTTP, several answers at once.",
    ),
    "verify": ("specgen.cli.verify", "Check that drafting does not change what your model says."),
    "tune": (
        "specgen.cli.tune",
        "Measure what drafting is worth for your models on this machine, and say why.",
    ),
    "bench": (
        "specgen.cli.bench",
        "Measure what drafting gains over plain decoding, on your own prompts.",
    ),
    "worker": (
        "specgen.cli.worker",
        "Offer this machine's devices to specgen on other machines (`--rpc`), by llama.cpp's RPC.",
    ),
    "doctor": (
        "specgen.cli.doctor",
        "Show what this machine and this build of llama.cpp can do, and check that it decodes.",
    ),
    "models": ("specgen.cli.models", "List, show and download models."),
    "draft": ("specgen.cli.draft", "Find, make or train the best draft for a target."),
}


def make_app(wanted: Collection[str] = COMMANDS.keys()) -> typer.Typer:
    """Return the command line with the commands of these names. The others are in its help only."""
    app = typer.Typer(
        name="specgen",
        cls=_Group,
        help="Make a local GGUF model generate faster without changing what it says.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_specgen)
    for name, (module, text) in COMMANDS.items():
        if name not in wanted:
            app.command(name, help=text)(_not_imported)
        elif isinstance(
            group := getattr(importlib.import_module(module), "app", None), typer.Typer
        ):
            app.add_typer(group, name=name)
        else:
            app.command(name)(getattr(importlib.import_module(module), name))
    return app


def _not_imported() -> None:
    raise NotImplementedError


def _commands_in(arguments: Sequence[str]) -> Collection[str]:
    """Return the command that is called; all, if a shell asks how an argument could go on."""
    if "_SPECGEN_COMPLETE" in os.environ:
        return COMMANDS
    return [word for word in arguments if not word.startswith("-")][:1]


#: Typer's base of errors in the use of the command line; it has no public name.
_CommandLineError: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)

#: What the dynamic loader says if there is no memory for a library.
_NO_ROOM = "failed to map segment"


def _specgen(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            help="Show the version and exit.",
            callback=_show_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit. Errors become exit codes only here."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names need not be UTF-8. They are shown with escapes, as on standard error.
        sys.stdout.reconfigure(errors="backslashreplace")
    if arguments is None:
        arguments = sys.argv[1:]
    try:
        app = make_app(_commands_in(arguments))
        code = app(arguments, prog_name="specgen", standalone_mode=False)
    except SpecgenError as error:
        if isinstance(error, OutputError):
            flush_or_abandon_stdout()
        _complain(error.message, error.hint)
        code = error.exit_code
    except _CommandLineError as error:
        code = _complain_of_usage(error)
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except (MemoryError, ImportError) as error:
        if isinstance(error, ImportError) and _NO_ROOM not in str(error):
            raise
        _complain("there is not enough memory", "close other programs, or take a smaller model")
        code = MemoryLimitError.exit_code
    end_process(code or 0)


def _complain_of_usage(error: Exception) -> int:
    message: str = error.format_message()  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    if context is not None and type(error).__name__ == "NoArgsIsHelpError":
        print(message, file=sys.stderr)
        return 2
    command = context.command_path if context is not None else "specgen"
    _complain(" ".join(message.split()), f"see `{command} --help`")
    return 2


def _complain(message: str, hint: str | None) -> None:
    with contextlib.suppress(OSError):  # the exit code still says what happened
        print(f"error: {message}", file=sys.stderr)
        if hint:
            print(f"hint: {hint}", file=sys.stderr)
