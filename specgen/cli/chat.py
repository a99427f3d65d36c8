"""``specgen chat``: a conversation."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import sys
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING

from typer import Option

from specgen.cli import flags
from specgen.cli.inputs import read_text
from specgen.cli.model_loading import Setup, opened
from specgen.cli.output import Output
from specgen.cli.process import Interrupt
from specgen.errors import OutputError, PromptError, SpecgenError, UsageError, WorkerLostError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

    from specgen.events import Event
    from specgen.serve.chat import Chat, ChatLog, Conversation
    from specgen.train.learner import Learner


@flags.takes_options(
    flags.panel(
        "Conversation",
        system=Option(
            "--system", "-sys", metavar="TEXT", parser=flags.utf8, help="The system message."
        ),
        files=Option(
            "--file",
            "-f",
            help="A file whose text is put before the first message; may be given several times.",
            show_default="none",
        ),
        name=Option(
            "--session",
            metavar="NAME",
            help="Keep the conversation on disk under this name, and continue it if it exists.",
            show_default="not kept",
        ),
    ),
    setup=flags.setup,
    stats=Option(
        "--stats/--no-stats",
        help="Print a summary on standard error after each answer.",
        rich_help_panel="Output",
    ),
    output=flags.output.without("stats", "newline"),
)
def chat(
    *,
    setup: Setup,
    system: str | None = None,
    files: list[Path] | None = None,
    name: str | None = None,
    stats: bool = False,
    output: Output,
) -> int:
    """Talk with a model, at a terminal or in a pipe.

    Each turn decodes only what is new. In a pipe each line is a message, and only answers go to
    standard output. The message /help lists the commands, such as /undo and /save.
    """
    output.check(setup.answer)
    output = replace(output, stats=stats, newline=False)  # each answer ends its line
    path = None if name is None else _session_file(name)
    text = "".join(map(_file_text, files or ()))
    sources, options = setup.find(output)
    with contextlib.ExitStack() as stack:
        from specgen.serve.chat import Change, Chat, check_template
        from specgen.session.calibration import calibrate
        from specgen.session.engine import Engine
        from specgen.train.learner import Learner

        conversation, log = stack.enter_context(_opened(path, output))
        kernels = setup.machine.kernels
        session = stack.enter_context(
            opened(options, kernels, output, sources.drafts, check_template)
        )
        view = _View(output)
        news = calibrate(session, view.interrupted)
        engine = stack.enter_context(
            Engine(session, interrupted=view.interrupted, estimate_gain=stats or output.json)
        )
        engine.notify(news)
        stack.callback(session.memory.save)
        now = datetime.datetime.now().astimezone()
        talk = Chat(session, engine, conversation, log, now=now)
        learner = stack.enter_context(Learner(session, engine, engine.notify))
        if system is not None and system != conversation.system:
            talk.change(Change("system", system))
        if text and text != conversation.files:
            talk.change(Change("files", text))
        return _talk(talk, view, learner, output)


#: By the reason for which an answer ended: what to say if it was cut off.
_CUT = {
    "length": "the answer was cut off after {} tokens (-n allows more)",
    "context": "the answer was cut off after {} tokens: the context is full (-c allows more)",
}


class _View:
    """Shows answers, and stops them."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._stop: Interrupt | None = None

    def interrupted(self) -> bool:
        """Return whether the present answer is to end."""
        return self._stop is not None and self._stop()

    def answer(self, events: Generator[Event, None, None]) -> int:
        """Show an answer; return the exit code of the signal that ended it, or 0."""
        try:
            with without_echo(), Interrupt(ends_process=False) as self._stop:
                finished = self._output.show_answer(events, in_chat=True)
                code = self._stop.exit_code
        finally:
            self._stop = None
        if finished is not None and finished.finish_reason in _CUT and not self._output.json:
            self._output.note(_CUT[finished.finish_reason].format(finished.n_tokens))
        return code


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _talk(talk: Chat, view: _View, learner: Learner, output: Output) -> int:
    """Answer messages until there are no more; return the exit code."""
    from specgen.models.files import data_folder
    from specgen.serve.chat import ALIASES, COMMANDS, parse_command

    is_typed = is_person()
    if is_typed and not output.quiet:
        _say("/help lists the commands; Ctrl-D ends the conversation")
    if is_typed:
        names = [f"/{name}" for name in (*COMMANDS, *ALIASES)]
        messages = typed_messages(data_folder() / "chat-history", names)
    else:
        messages = piped_messages(sys.stdin.buffer)
    failed = 0
    for message in messages:
        try:
            learner.between_answers(begins=True)
            command = parse_command(message)
            if command is None:
                code = view.answer(talk.ask(message))
            elif command[0] == "quit":
                break
            else:
                code = _do(*command, talk, view)
        except SpecgenError as error:
            if isinstance(error, WorkerLostError) or (
                isinstance(error, OutputError) and not is_typed
            ):
                raise
            # The conversation goes on without this answer; a pipe's exit code shows the error.
            _say(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))
            failed = error.exit_code
            continue
        except KeyboardInterrupt:  # a second Ctrl-C: the unfinished answer is kept
            if not is_typed:
                raise
            continue
        finally:
            learner.between_answers()
        if code and not (is_typed and code == 128 + signal.SIGINT):
            return code
    return 0 if is_typed else failed


def _do(name: str, argument: str, talk: Chat, view: _View) -> int:
    """Carry out a command; return the exit code of a signal, or 0. Raise `UsageError` if it is not
    possible, `PromptError`, and `OutputError` if the conversation cannot be saved."""
    from specgen.render.text import counted
    from specgen.serve.chat import Change, read_conversation, save_conversation

    if name == "regen":
        if talk.says_the_same_again:
            _say("note: at temperature 0 the new answer is the same (--temp 0.8 lets it vary)")
        return view.answer(talk.regenerate())
    if name == "help":
        _say(_help())
    elif name in ("undo", "reset"):
        try:
            talk.change(Change("undo" if name == "undo" else "reset"))
        except ValueError as error:
            raise UsageError(str(error)) from None
        _say(f"the conversation has {counted(len(talk.conversation.turns), 'turn')} now")
    elif name == "system":
        talk.change(Change("system", argument or None))
        _say("the system message was changed" if argument else "the system message was removed")
    elif name == "save":
        try:
            save_conversation(Path(argument).expanduser(), talk.conversation)
        except OutputError as error:  # a mistyped name does not end the conversation
            raise UsageError(error.message, error.hint) from None
        _say(f"saved to {argument}")
    elif name == "load":
        conversation = read_conversation(Path(argument).expanduser())
        talk.change(Change("load", changes=conversation.changes()))
        _say(_greeting(conversation))
    elif name == "draft":
        talk.drafts = argument == "on"
        _say(f"drafts from now on: {talk.draft_name}")
    elif name == "think":
        _show_thought(talk)
    else:
        _show_figures(talk)
    return 0


def _help() -> str:
    from specgen.serve.chat import COMMANDS

    usages = {f"/{name} {takes}".strip(): does for name, (takes, does) in COMMANDS.items()}
    lines = [f"{usage:<{max(map(len, usages))}}  {does}" for usage, does in usages.items()]
    lines.append(
        "A backslash at the end of a line goes on with another one. Ctrl-C stops an answer, Ctrl-D ends."
    )
    return "\n".join(lines)


def _show_thought(talk: Chat) -> None:
    from specgen.render.select import make_console
    from specgen.render.text import clean
    from specgen.session.prompts.template import thought_of

    thought = ""
    if talk.prompt is not None and talk.finished is not None:
        thought = thought_of(talk.prompt.text, talk.finished.text)
    if not thought:
        raise UsageError("the last answer of this run has no thinking block")
    console = make_console(sys.stderr, os.environ)
    console.print(clean(thought), style="dim", soft_wrap=True)


def _show_figures(talk: Chat) -> None:
    from rich.text import Text

    from specgen.render.select import make_console
    from specgen.render.streams import say
    from specgen.render.summary import print_summary, totals

    last = talk.finished
    if last is None or talk.prompt is None:
        raise UsageError("there is no answer yet")
    console = make_console(sys.stderr, os.environ)
    print_summary(console, last, draft=talk.prompt.draft, kernels=talk.prompt.kernels)
    counts = [
        (each.n_tokens, each.n_prompt_tokens, each.n_cached_tokens, each.n_drafted, each.n_accepted)
        for each in talk.answers
    ]
    parts = totals(len(counts), *map(sum, zip(*counts, strict=True)))
    parts.append(f"{last.n_prompt_tokens + last.n_tokens} of {talk.n_ctx} tokens of context in use")
    say(console, Text(f"in all: {', '.join(parts)}"))


def _session_file(name: str) -> Path:
    """Return the file of a kept conversation. Raise `UsageError` for an invalid name."""
    from specgen.models.files import data_folder

    if not name.strip() or name.startswith(".") or Path(name).name != name or "\\" in name:
        raise UsageError(
            f"--session {name!r} is not a valid name", hint="give a word without slashes"
        )
    return data_folder() / "chats" / f"{name}.jsonl"


@contextlib.contextmanager
def _opened(path: Path | None, output: Output) -> Iterator[tuple[Conversation, ChatLog | None]]:
    from specgen.serve.chat import ChatLog, Conversation

    if path is None:
        yield Conversation(), None
        return
    with ChatLog.opened(path) as (log, conversation, is_torn):
        if is_torn:
            output.note(f"the incomplete last line of {path} was dropped")
        if conversation.turns:
            output.note(_greeting(conversation))
        yield conversation, log


def _greeting(conversation: Conversation) -> str:
    from specgen.render.text import counted

    greeting = f"going on with a conversation of {counted(len(conversation.turns), 'turn')}"
    return f"{greeting}; the last one has no answer: /regen" if conversation.is_open else greeting


def _file_text(path: Path) -> str:
    """Return a file's text in the form in which the first message includes it. Raise `PromptError`."""
    return f"{path}:\n\n{read_text(path).rstrip()}\n\n"


# --- messages, from a person at a terminal or from a pipe

#: The sign in front of a person's messages.
_PROMPT = "> "


def piped_messages(stream: IO[bytes]) -> Iterator[str]:
    """Yield the lines of a stream. A backslash at the end of a line continues the message on the next one;
    empty lines are skipped. Raise `PromptError` for a line that is not UTF-8."""
    message = ""
    for number, raw in enumerate(stream, start=1):
        data = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
        try:
            line = data.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise PromptError(
                f"standard input is not UTF-8: byte {data[error.start]:#04x} on line {number}",
                hint="convert it first, for example with iconv -f LATIN1 -t UTF-8",
            ) from None
        if line.endswith("\\"):
            message += line[:-1] + "\n"
            continue
        message += line
        if message.strip():
            yield message
        message = ""
    if message.strip():
        yield message.removesuffix("\n")


def typed_messages(history: Path, commands: list[str]) -> Iterator[str]:
    """Yield messages that a person types, with an editor's keys and a history in the file `history`.

    A backslash at the end of a line starts another line, and so does Alt-Enter; a paste stays one message.
    Ctrl-C clears the line, Ctrl-D in an empty one ends. `commands` are completed.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.output import create_output

    # Answers may go into a pipe; the typed text must be visible all the same.
    output = create_output(stdout=sys.stdout if sys.stdout.isatty() else sys.stderr)
    session: PromptSession[str] = PromptSession(
        _PROMPT,
        history=_history(history),
        completer=WordCompleter(commands, sentence=True),
        complete_while_typing=False,
        multiline=True,
        prompt_continuation=lambda width, _number, _is_soft: " " * width,
        key_bindings=_keys(),
        output=output,
    )
    while True:
        try:
            with _ending_by_signals(session):
                message = session.prompt()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if message.strip():
            yield message


def _history(path: Path) -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            # A full disk, or bytes that are not UTF-8, must not keep the message from being sent.
            with contextlib.suppress(OSError, UnicodeError):
                super().store_string(string)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.read_bytes()
    except OSError:
        return InMemoryHistory()
    return Kept(str(path))


class _EndedError(Exception):
    """A signal ended the editor."""


@contextlib.contextmanager
def _ending_by_signals(editor: PromptSession[str]) -> Iterator[None]:
    """Let a signal of `kill`, or of a closed terminal, end the program in order: the editor restores the
    terminal. Raise `SystemExit` with the exit code of the signal."""
    received = 0

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal received
        received = number
        loop = editor.app.loop
        if loop is None:  # before or after the editor runs
            raise SystemExit(128 + number)
        loop.call_soon_threadsafe(lambda: editor.app.exit(exception=_EndedError()))

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = [(number, signal.signal(number, end)) for number in numbers]
    try:
        yield
    except _EndedError:
        raise SystemExit(128 + received) from None
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@contextlib.contextmanager
def without_echo() -> Iterator[None]:
    """Hide what is typed at a terminal while an answer is shown; it is read afterwards."""
    if os.name == "nt" or sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    import termios

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    changed = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(descriptor, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


def _keys() -> KeyBindings:
    """Return the keys: Enter sends, unless a backslash is before it."""
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def is_person() -> bool:
    """Return whether a person types the messages at a terminal, and one of the streams can show them."""
    return (
        sys.stdin is not None
        and sys.stdin.isatty()
        and (sys.stdout.isatty() or sys.stderr.isatty())
        and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    )
