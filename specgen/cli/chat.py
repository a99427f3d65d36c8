"""``specgen chat``: a conversation."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

from specgen.cli import flags
from specgen.cli.flags import option
from specgen.cli.inputs import not_utf8, read_text
from specgen.cli.model_loading import Setup, opened
from specgen.cli.output import SIGNALS, Interrupt, Output, console_on, say, say_error
from specgen.errors import OutputError, SpecgenError, UsageError, WorkerLostError
from specgen.sampler_options import utf8
from specgen.system.quantities import counted

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

    from specgen.events import Event
    from specgen.session.conversation import Chat, Conversation
    from specgen.train.online_learning import Learner

_talk = partial(option, panel="Conversation")


@flags.takes_options
def chat(
    *,
    system: str | None = _talk(
        None, "--system -sys", "The system message.", metavar="TEXT", parse=utf8
    ),
    files: list[Path] | None = _talk(
        None,
        "--file -f",
        "A file whose text is put before the first message; may be repeated.",
        show_default="none",
    ),
    name: str | None = _talk(
        None,
        "--session",
        "Keep the conversation on disk under this name, and continue it if it exists.",
        metavar="NAME",
        show_default="not kept",
    ),
    setup: Setup = flags.setup,
    output: Output = flags.output.without("--newline", "--html"),
) -> int:
    """Talk with a model, at a terminal or in a pipe.

    Each turn decodes only what is new. In a pipe each line is a message, and only answers go to
    standard output. The message /help lists the commands, such as /undo and /save.
    """
    answer = output.needs(setup.answer)
    output = replace(output, newline=False)  # each answer ends its line
    path = None if name is None else _session_file(name)
    text = "".join(f"{file}:\n\n{read_text(file).rstrip()}\n\n" for file in files or ())
    from specgen.session.prompts.thoughts import showing_thoughts

    setup = replace(setup, answer=showing_thoughts(answer))
    wanted = setup.wanted_session(quiet=output.quiet)
    with contextlib.ExitStack() as stack:
        from specgen.session.calibration import calibrate
        from specgen.session.choose_models import name_of
        from specgen.session.conversation import Chat, check_template
        from specgen.session.engine import Engine
        from specgen.train.online_learning import Learner

        conversation = stack.enter_context(_kept(path))
        kernels, stop = setup.machine.kernels, Interrupt(ends_process=False)
        with without_echo():  # what is typed meanwhile is the first message
            session = stack.enter_context(opened(wanted, kernels, output, check_template))
            news = calibrate(session, status=output.status)
            engine = stack.enter_context(Engine(session, interrupted=stop))
            engine.notify(news)
            stack.callback(session.measurements.save)
            now = datetime.datetime.now().astimezone()
            talk = Chat(session, engine, conversation, path, now=now)
            stack.callback(talk.keep)
            learner = stack.enter_context(Learner(session, engine, engine.notify))
            system = conversation.system if system is None else system
            given = replace(conversation, system=system, files=text or conversation.files)
            if given != conversation:
                talk.change(given)
            drafts = f"{name_of(session.draft_source)} drafts"
            drafts = drafts if session.draft is not None else "nothing drafts"
            about = f"{session.target.name}; {drafts}; {talk.n_ctx} tokens of context"
        return _Dialogue(talk, stop, output, about).run(learner)


@contextlib.contextmanager
def _kept(path: Path | None) -> Iterator[Conversation]:
    """Yield the conversation in a file, which no other process can continue meanwhile."""
    from specgen.session.conversation import Conversation, read_conversation
    from specgen.system.files import locked

    if path is None:
        yield Conversation()
        return
    hint = "end that one, or use another --session"
    held = UsageError(f"{path}: another specgen chat has it open", hint)
    with locked(path.with_name(f"{path.name}.lock"), held):
        conversation = read_conversation(path) if path.exists() else Conversation()
        yield conversation


def _session_file(name: str) -> Path:
    from specgen.system.folders import data_folder

    if not name.strip() or name.startswith(".") or Path(name).name != name or "\\" in name:
        raise UsageError(f"--session {name!r} is not a valid name", "give a word without slashes")
    return data_folder() / "chats" / f"{name}.json"


def _greeting(conversation: Conversation) -> str:
    greeting = f"going on with a conversation of {counted(len(conversation.turns), 'turn')}"
    return f"{greeting}; the last one has no answer: /regen" if conversation.is_open else greeting


#: How many turns are shown where a conversation goes on, and the most lines of each answer.
_N_RECALLED, _N_LINES = 2, 8


class _Dialogue:
    """Answers messages and carries out commands. What a command returns is the exit code of a
    signal, or None; it raises `SpecgenError` if it is not possible, and `EOFError` to end the
    conversation.
    """

    def __init__(self, chat: Chat, stop: Interrupt, output: Output, about: str) -> None:
        self._chat, self._stop, self._output, self._about = chat, stop, output, about

    def run(self, learner: Learner) -> int:
        failed, is_typed = 0, is_person()
        if self._chat.conversation.turns:
            self._output.note(_greeting(self._chat.conversation))
        if is_typed and not self._output.quiet:
            self._recall()
            say(f"{self._about}\n/help lists the commands; Ctrl-D ends the conversation")
        for message in _messages(is_typed):
            code: int | None = None
            try:
                learner.between_answers(begins=True)
                code = self._take(message)
            except EOFError:
                break
            except SpecgenError as error:
                is_lost = isinstance(error, OutputError) and not is_typed
                if is_lost or isinstance(error, WorkerLostError):
                    raise
                # The conversation goes on without this answer; a pipe's exit code shows the error.
                say_error(error.message, error.hint)
                failed = error.exit_code
            except KeyboardInterrupt:  # a second Ctrl-C: the unfinished answer is kept
                if not is_typed:
                    raise
                self._chat.keep()
            finally:
                learner.between_answers()
            if is_typed:
                say("")  # between turns
            if code and not (is_typed and code == 128 + signal.SIGINT):
                return code
        return 0 if is_typed else failed

    def _take(self, message: str) -> int | None:
        found = _COMMAND.fullmatch(message.rstrip())
        if found is None:
            return self._answer(self._chat.ask(message))
        name, argument = found[1].lower(), (found[2] or "").strip()
        name = _ALIASES.get(name, name)
        if name not in _COMMANDS:
            hint = "/help lists the commands; a space before the slash makes it a message"
            raise UsageError(f"there is no command /{name}", hint)
        takes, _, command = _COMMANDS[name]
        right = {"": not argument, "FILE": bool(argument), "on|off": argument in ("on", "off")}
        if not right.get(takes, True):
            raise UsageError(f"{message.strip()!r}: usage: /{name} {takes}".rstrip())
        return command(self, argument)

    def _answer(self, events: Generator[Event, None, None]) -> int:
        """Show an answer; return the exit code of the signal that ended it, or 0."""
        with without_echo(), self._stop:
            finished = self._output.show_events(events, in_chat=True)
        is_cut = finished is not None and finished.finish_reason in ("length", "context")
        if is_cut and not self._output.has_summary and not self._output.json:
            self._output.note("the answer was cut off (-n and -c allow more)")
        return self._stop.exit_code

    def _recall(self) -> None:
        """Show the last turns, dimmed, and of a long answer the last lines."""
        from specgen.render.rows import clean

        for turn in self._chat.conversation.turns[-_N_RECALLED:]:
            *_, answer = clean(turn.answer or "").rpartition("</think>")
            lines = answer.strip().splitlines()
            cut = ["..."] if len(lines) > _N_LINES else []
            text = "\n".join([f"> {clean(turn.question)}", *cut, *lines[-_N_LINES:]])
            console_on(sys.stderr).print(f"{text}\n", style="dim")

    # --- commands

    def help(self, _argument: str) -> None:
        usages = {f"/{name} {takes}".strip(): does for name, (takes, does, _) in _COMMANDS.items()}
        for usage, does in usages.items():
            say(f"{usage:<{max(map(len, usages))}}  {does}")
        say("A backslash at the end of a line goes on with another one. Ctrl-C stops an answer.")

    def regenerate(self, _argument: str) -> int:
        if self._chat.is_greedy:
            say("note: at temperature 0 an answer is always the same (--temp 0.8 lets it vary)")
        return self._answer(self._chat.regenerate())

    def undo(self, _argument: str) -> None:
        if not (turns := self._chat.conversation.turns):
            raise UsageError("there is no turn to take back")
        self._change(turns=turns[:-1])

    def reset(self, _argument: str) -> None:
        self._change(turns=())

    def _change(self, **parts: Any) -> None:
        self._chat.change(replace(self._chat.conversation, **parts))
        say(f"the conversation has {counted(len(self._chat.conversation.turns), 'turn')} now")

    def system(self, text: str) -> None:
        self._chat.change(replace(self._chat.conversation, system=text or None))
        say(f"the system message was {'changed' if text else 'removed'}")

    def save(self, file: str) -> None:
        from specgen.session.conversation import save_conversation

        try:
            save_conversation(Path(file).expanduser(), self._chat.conversation)
        except OutputError as error:  # a mistyped name does not end the conversation
            raise UsageError(error.message, error.hint) from None
        say(f"saved to {file}")

    def load(self, file: str) -> None:
        from specgen.session.conversation import read_conversation

        self._chat.change(read_conversation(Path(file).expanduser()))
        say(_greeting(self._chat.conversation))
        self._recall()

    def draft(self, choice: str) -> None:
        self._chat.drafts = choice == "on"
        say(f"drafts from now on: {self._chat.draft_name}")

    def think(self, _argument: str) -> None:
        from specgen.render.rows import clean
        from specgen.session.prompts.thoughts import split_thought

        last = self._chat.last
        if last is None or not (thought := split_thought(last[0].text, last[1].text)[0]):
            raise UsageError("the last answer of this run has no thinking block")
        console_on(sys.stderr).print(clean(thought), style="dim", soft_wrap=True)

    def stats(self, _argument: str) -> None:
        from specgen.render.summary import print_summary
        from specgen.render.tables import totals

        if self._chat.last is None:
            raise UsageError("there is no answer yet")
        prompt, last = self._chat.last
        print_summary(console_on(sys.stderr), last, prompt)
        n_used, n_ctx = last.n_prompt_tokens + last.n_tokens, self._chat.n_ctx
        parts = totals(len(self._chat.answers), self._chat.answers)
        say(f"in all: {', '.join(parts)}, {n_used} of {n_ctx} tokens of context in use")

    def quit(self, _argument: str) -> None:
        raise EOFError


#: A word after a slash, alone or before a space; so paths and comments of C are no commands.
_COMMAND = re.compile(r"/([A-Za-z?]+)(?:\s+(.*))?", re.DOTALL)
#: By name: what the command takes, what it does, and what carries it out.
_COMMANDS: dict[str, tuple[str, str, Callable[[_Dialogue, str], int | None]]] = {
    "help": ("", "show the commands (also /?)", _Dialogue.help),
    "regen": ("", "answer the last question again", _Dialogue.regenerate),
    "undo": ("", "remove the last question and its answer", _Dialogue.undo),
    "reset": ("", "remove all turns; system message and files stay (also /clear)", _Dialogue.reset),
    "system": ("TEXT", "change the system message; without TEXT there is none", _Dialogue.system),
    "save": ("FILE", "write the conversation to a file", _Dialogue.save),
    "load": ("FILE", "go on with the conversation in a file", _Dialogue.load),
    "draft": ("on|off", "let later answers be drafted for, or not", _Dialogue.draft),
    "think": ("", "show what the model thought before its last answer", _Dialogue.think),
    "stats": ("", "show figures of the last answer and the conversation", _Dialogue.stats),
    "quit": ("", "end the conversation (also /bye, /exit)", _Dialogue.quit),
}
#: Names that other programs have for these commands.
_ALIASES = {"?": "help", "clear": "reset", "bye": "quit", "exit": "quit"}


# --- messages, from a person at a terminal or from a pipe


def _messages(are_typed: bool) -> Iterator[str]:
    if not are_typed:
        return piped_messages(sys.stdin.buffer)
    if console_on(sys.stdin).is_dumb_terminal:
        return piped_messages(_prompted(sys.stdin.buffer))
    return typed_messages()


def _prompted(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield lines that are typed at a terminal without escape codes, such as Emacs's shell."""
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        if not (line := stream.readline()):
            return
        yield line


def piped_messages(stream: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a stream. A backslash at the end of a line continues the message on the
    next one; empty lines are skipped. Raise `PromptError` for a line that is not UTF-8.
    """
    message = ""
    for number, raw in enumerate(stream, start=1):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise not_utf8("standard input", error, number) from None
        message += f"{line[:-1]}\n" if line.endswith("\\") else line
        if not line.endswith("\\"):
            if message.strip():
                yield message
            message = ""
    if message.strip():
        yield message.removesuffix("\n")


def typed_messages() -> Iterator[str]:
    """Yield messages that a person types, with an editor's keys and a history.

    A backslash at the end of a line starts another line, and so does Alt-Enter; a paste stays one
    message. Ctrl-C clears the line, Ctrl-D in an empty one ends. Commands are completed.
    """
    with without_echo():  # to import it takes a while
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.output import create_output

        names = [f"/{name}" for name in (*_COMMANDS, *_ALIASES)]
        session: PromptSession[str] = PromptSession(
            "> ",
            history=_history(),
            completer=WordCompleter(names, sentence=True),
            complete_while_typing=False,
            multiline=True,
            prompt_continuation=lambda width, _number, _is_soft: " " * width,
            key_bindings=_keys(),
            # Answers may go into a pipe; the typed text must be visible all the same.
            output=create_output(stdout=sys.stdout if sys.stdout.isatty() else sys.stderr),
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


def _history() -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from specgen.system.folders import data_folder

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            # A full disk, or bytes that are not UTF-8, must not keep the message from being sent.
            with contextlib.suppress(OSError, UnicodeError):
                super().store_string(string)

    path = data_folder() / "chat-history"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.read_bytes()
        return Kept(str(path))
    return InMemoryHistory()


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    return keys


@contextlib.contextmanager
def _ending_by_signals(editor: PromptSession[str]) -> Iterator[None]:
    """Let a signal of `kill`, or of a closed terminal, end the editor, which then restores the
    terminal. Raise `SystemExit` with the signal's exit code.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        ended, loop = SystemExit(128 + number), editor.app.loop
        if loop is None:  # before or after the editor runs
            raise ended
        loop.call_soon_threadsafe(lambda: editor.app.exit(exception=ended))

    before = [(number, signal.signal(number, end)) for number in SIGNALS if number != signal.SIGINT]
    try:
        yield
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


def is_person() -> bool:
    is_shown = sys.stdout.isatty() or sys.stderr.isatty()
    return sys.stdin is not None and sys.stdin.isatty() and is_shown
