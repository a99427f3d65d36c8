"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from specgen import __version__
from specgen.cli import draft, models
from specgen.cli.batch import batch
from specgen.cli.bench import bench
from specgen.cli.chat import chat
from specgen.cli.command import Command, without_flag_types
from specgen.cli.config import ConfigCommand, config
from specgen.cli.defaults import in_words
from specgen.cli.doctor import DoctorCommand, doctor
from specgen.cli.fim import fim
from specgen.cli.flags.groups import COMMAND_LINE_ERROR
from specgen.cli.process import end_process, flush_or_abandon_stdout, output_errors
from specgen.cli.run import run
from specgen.cli.serve import serve
from specgen.cli.tune import tune
from specgen.cli.verify import verify
from specgen.cli.worker import worker
from specgen.errors import EXIT_INTERRUPTED, MemoryLimitError, OutputError, SpecgenError


class _Group(typer.core.TyperGroup):
    """The group of commands. It handles errors of standard output for every command."""

    def get_params(self, ctx: Any) -> Any:
        return without_flag_types(super().get_params(ctx))

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


app = typer.Typer(
    name="specgen",
    cls=_Group,
    help="Make a local GGUF model generate faster without changing what it says.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for each in (run, chat, fim, batch, serve, verify, tune, bench):
    app.command(cls=Command)(each)
app.add_typer(models.app, name="models", cls=_Group)
app.add_typer(draft.app, name="draft", cls=_Group)
app.command(cls=ConfigCommand)(config)
app.command(cls=Command)(worker)
app.command(cls=DoctorCommand)(doctor)

#: What the dynamic loader says if there is no memory for a library.
_NO_ROOM = "failed to map segment"


@app.callback()
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
    try:
        code = app(arguments, prog_name="specgen", standalone_mode=False)
    except SpecgenError as error:
        if isinstance(error, OutputError):
            flush_or_abandon_stdout()
        _complain(error.message, error.hint)
        code = error.exit_code
    except COMMAND_LINE_ERROR as error:
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
    message = in_words(error.format_message())  # type: ignore[attr-defined]
    for each in getattr(error.__cause__, "errors", list)():  # pydantic's, which know the value
        message = message.replace(": it is not ", f": {each['input']!r} is not ")
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
