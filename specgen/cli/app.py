"""The application: the commands by name, and the exit codes of errors. Nothing heavy is imported
before a command needs it.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NoReturn

import typer
import typer.core
import typer.main

from specgen import __version__
from specgen.cli.command import COMMAND_LINE_ERROR, Command, in_words, without_flag_types
from specgen.errors import (
    EXIT_BROKEN_PIPE,
    EXIT_INTERRUPTED,
    MemoryLimitError,
    OutputError,
    SpecgenError,
    UsageError,
)
from specgen.system.processes import left_running

#: By name: what the help says of a command or a group of commands. Its module is imported when it
#: is called.
COMMANDS = {
    "run": "Generate an answer to a prompt, faster and unchanged.",
    "chat": "Talk with a model, at a terminal or in a pipe.",
    "fim": "Fill a gap in a file, or between two texts, and print the middle.",
    "batch": "Answer each line of a file, many at once; run it again to resume.",
    "serve": "Serve OpenAI's, Anthropic's and llama.cpp's APIs over HTTP, several answers at once.",
    "verify": "Check that drafting does not change what your model says.",
    "tune": "Measure what drafting is worth for your models on this machine.",
    "bench": "Measure what drafting gains over plain decoding, on your own prompts.",
    "config": "Show the defaults of options, and where each comes from.",
    "worker": "Offer this machine's devices to specgen on other machines (`--rpc`), by llama.cpp's RPC.",
    "doctor": "Show what this machine and this build of llama.cpp can do, and check that it decodes.",
    "models": "List, show, download and remove models.",
    "draft": "Find, make or train the best draft for a target.",
}
#: Names that other tools have for commands, and ours.
_NAMES_ELSEWHERE = {
    "ls": "models list",
    "list": "models list",
    "pull": "models pull",
    "rm": "models rm",
}
#: Error numbers that mean that standard output cannot be written.
_NOT_WRITTEN = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EAGAIN}
#: Error numbers of names that cannot be looked up: too long, in a folder without access, or in a
#: circle of links.
_NOT_LOOKED_UP = {errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP}
_CLOSED_PIPE = errno.EINVAL if os.name == "nt" else errno.EPIPE


class _Group(typer.core.TyperGroup):
    """A group of commands, which handles errors of standard output for all of them."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [
            (name, " ".join((each.help or "").partition("\n\n")[0].split()))
            for name, each in self.commands.items()
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

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


class _CommandLine(_Group):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.load(*COMMANDS.keys() & args[:1])
        return super().resolve_command(ctx, args)

    def load(self, *names: str) -> None:
        """Put commands, from the modules of their names, in place of the lines that stand for them."""
        self.commands.update({name: _imported(name) for name in names})


def _imported(name: str) -> Any:
    module = importlib.import_module(f"specgen.cli.{name}")
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    if isinstance(app := getattr(module, "app", None), typer.Typer):
        alone.add_typer(app, name=name, cls=_Group)
        return typer.main.get_group(alone).commands[name]
    alone.command(name, cls=getattr(module, "COMMAND_CLASS", Command))(getattr(module, name))
    return typer.main.get_command(alone)


def command_line() -> _CommandLine:
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
    help="Make a local GGUF model generate faster without changing what it says.",
    epilog="Begin with `specgen run 'Why is the sky blue?'`; `specgen COMMAND -h` has options and examples.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(lambda: None)

_Version = typer.Option(
    "--version", "-V", help="Show the version and exit.", callback=_show_version, is_eager=True
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
        code = _complain(error)
    end_process(code or 0)


def _complain(error: Exception) -> int:
    """Print an error that users may meet, and return its exit code. Raise any other."""
    from specgen.cli.output import say_error

    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message(), file=sys.stderr)  # type: ignore[attr-defined]
        return UsageError.exit_code
    if isinstance(error, COMMAND_LINE_ERROR):
        error = _usage_error(error)
    elif isinstance(error, OutputError):
        flush_or_abandon_stdout()
    elif isinstance(error, OSError):
        if error.errno not in _NOT_LOOKED_UP or error.filename is None:
            raise error
        error = UsageError(f"{os.fsdecode(error.filename)[:200]}: {error.strerror}")
    elif not isinstance(error, SpecgenError):
        # The dynamic loader, if there is no memory for a library.
        if isinstance(error, ImportError) and "failed to map segment" not in str(error):
            raise error
        hint = "close other programs, or take a smaller model"
        error = MemoryLimitError("there is not enough memory", hint)
    assert isinstance(error, SpecgenError)
    say_error(error.message, error.hint)
    return error.exit_code


def _usage_error(error: Any) -> UsageError:
    message = in_words(error.format_message())
    for each in getattr(error.__cause__, "errors", list)():  # pydantic's, which know the value
        message = message.replace(": it is not ", f": {each['input']!r} is not ")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "specgen"
    hint = f"see `{command} --help`"
    unknown = re.fullmatch(r"No such command '(\w+)'\.", message)
    if unknown and unknown[1] in _NAMES_ELSEWHERE:
        hint = f"it is `specgen {_NAMES_ELSEWHERE[unknown[1]]}` here"
    if "unexpected extra argument" in message and command.endswith(" run"):
        hint = "put a prompt of several words into quotes"
    return UsageError(" ".join(message.split()), hint)


# --- standard streams, and the end of the process


class _Lossy(io.FileIO):
    """Standard error: what cannot be written, as on a full disk, is lost, and does not end an
    answer.
    """

    def write(self, data: Any, /) -> int:
        with contextlib.suppress(OSError):
            super().write(data)
        return len(data)


def open_missing_streams() -> None:
    """Open the null device for each closed standard stream, as of daemons: the next file would get
    its number. To standard output, writing fails with EBADF, so that no lost answer counts as
    written.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            flags = os.O_WRONLY if name == "stderr" else os.O_RDONLY
            descriptor = os.open(os.devnull, flags)  # the lowest free number: that of the stream
            os.set_inheritable(descriptor, True)
            stream = open(  # noqa: SIM115 - open to the end of the process, as those it replaces
                descriptor, mode, encoding="utf-8", errors="backslashreplace", closefd=False
            )
            setattr(sys, name, stream)
    errors, encoding = io.BufferedWriter(_Lossy(2, "w", closefd=False)), sys.stderr.encoding
    sys.stderr = io.TextIOWrapper(errors, encoding, "backslashreplace", line_buffering=True)


@contextlib.contextmanager
def output_errors() -> Iterator[None]:
    """Turn errors of writing to standard output into `OutputError`, or `typer.Exit` if a pipe's
    reader went away.
    """
    try:
        yield
    except OSError as error:
        # Windows reports a closed pipe by another error.
        is_closed_pipe = isinstance(error, BrokenPipeError) or error.errno == _CLOSED_PIPE
        if not is_closed_pipe and error.errno not in _NOT_WRITTEN:
            raise
        _abandon_stdout()
        if is_closed_pipe:
            raise typer.Exit(EXIT_BROKEN_PIPE) from None
        is_closed = error.errno == errno.EBADF
        reason = "standard output is closed" if is_closed else error.strerror
        hint = "make room on the disk" if error.errno == errno.ENOSPC else None
        raise OutputError(f"the output could not be written: {reason}", hint) from error


def flush_or_abandon_stdout() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        _abandon_stdout()


def _abandon_stdout() -> None:
    """Discard the rest of stdout's buffer: the interpreter flushes it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def end_process(code: int) -> NoReturn:
    """Exit with this code: in the usual way, or at once if native code was left running."""
    if not left_running.is_set():
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
