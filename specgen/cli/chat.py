"""``specgen chat``: a conversation."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

from specgen.cli import flags
from specgen.cli.flags import option
from specgen.cli.inputs import STDIO, input_name, read_input
from specgen.cli.model_loading import Setup, opened
from specgen.cli.output import SIGNALS, Interrupt, Output, console_on, say, say_error
from specgen.errors import OutputError, PromptError, SpecgenError, UsageError, WorkerLostError
from specgen.option_fields import utf8
from specgen.system.files import decode_lines, path_of
from specgen.system.quantities import counted

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

    from specgen.events import Event
    from specgen.session.conversation import Chat, Conversation, Turn
    from specgen.session.engine import Engine
    from specgen.session.session import Session
    from specgen.train.online_learning import Learner

_talk = partial(option, panel="Conversation")


@flags.takes_options
def chat(
    *,
    system: str | None = _talk(
        None,
        "--system -sys",
        "The system message.",
        metavar="TEXT",
        parse=utf8,
    ),
    files: tuple[Path, ...] = _talk(
        (),
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

    Only the new part of each turn is decoded. In a pipe, each line is a message, and only answers
    go to standard output. The message /help lists the commands, such as /undo and /save.
    """
    # 1. Read what the options name.
    answer = output.with_logprobs(setup.answer)
    output = replace(output, newline=False)  # each answer ends its line
    session_file = None if name is None else _session_file(name)
    files_text = "".join(f"{file}:\n\n{read_input(file).rstrip()}\n\n" for file in files)
    from specgen.session.conversation import Chat
    from specgen.session.prompts.chat import check_template
    from specgen.session.prompts.thoughts import showing_thoughts
    from specgen.train.online_learning import Learner

    setup = replace(setup, answer=showing_thoughts(answer))
    wanted = setup.wanted_session(quiet=output.quiet)
    with contextlib.ExitStack() as stack:
        # 2. Open the conversation, and load the models that go on with it.
        conversation = stack.enter_context(_open_conversation(session_file))
        stop = Interrupt(ends_process=False)
        with without_echo():  # what the user types during loading becomes the first message
            session = stack.enter_context(
                opened(
                    wanted,
                    setup.machine.kernels,
                    output,
                    check=lambda session: check_template(session.target),
                )
            )
            engine = stack.enter_context(_opened_engine(session, stop, output))
            stack.callback(session.measurements.save)
            now = datetime.datetime.now().astimezone()
            talk = Chat(session, engine, conversation, session_file, now=now)
            stack.callback(talk.keep)
            learner = stack.enter_context(Learner(session, engine, engine.notify))

            # 3. Options take precedence over the conversation on disk.
            if system is not None:
                conversation = replace(conversation, system=system)
            if files_text:
                conversation = replace(conversation, files=files_text)
            if conversation != talk.conversation:
                talk.change(conversation)

        # 4. Answer messages until the user ends the conversation.
        about = f"{_models_of(session)}; {talk.n_ctx} tokens of context"
        return _Dialogue(talk, learner, stop, output).run(about)


@contextlib.contextmanager
def _opened_engine(
    session: Session,
    stop: Interrupt,
    output: Output,
) -> Iterator[Engine]:
    """Open the engine of a session, with the notices for the user, and the costs of drafting."""
    from specgen.session.calibration import calibrate
    from specgen.session.engine import Engine
    from specgen.session.prompts.chat import missing_template_notice

    notice = missing_template_notice(session.target)
    if notice:
        output.note(notice)
    calibration_notice = calibrate(session, status=output.status)
    with Engine(session, interrupted=stop) as engine:
        engine.notify(calibration_notice)
        yield engine


def _models_of(session: Session) -> str:
    """Return the names of a session's target and draft, for the greeting."""
    from specgen.session.choose_models import name_of

    draft = "none" if session.draft is None else name_of(session.draft_source)
    return f"{session.target.name}; draft: {draft}"


@contextlib.contextmanager
def _open_conversation(path: Path | None) -> Iterator[Conversation]:
    """Yield the conversation in a file, which is locked during the block, or else a new one.

    Raises:
        UsageError: If another process has locked the file.
    """
    from specgen.session.conversation import Conversation, read_conversation
    from specgen.system.files import locked

    if path is None:
        yield Conversation()
        return
    hint = "end that one, or use another --session"
    in_use = UsageError(f"{path}: another specgen chat has it open", hint)
    with locked(path.with_name(f"{path.name}.lock"), in_use):
        if path.exists():
            yield read_conversation(path)
        else:
            yield Conversation()


def _session_file(name: str) -> Path:
    """Return the file of the conversation with this name.

    Raises:
        UsageError: If the name could lead out of the folder, or the file would be hidden.
    """
    from specgen.system.folders import data_folder

    if not name.strip() or name.startswith(".") or Path(name).name != name or "\\" in name:
        raise UsageError(f"--session {name!r} is not a valid name", "give a word without slashes")
    return data_folder() / "chats" / f"{name}.json"


def _greeting(conversation: Conversation) -> str:
    """Return a note on the conversation that is continued."""
    greeting = f"continuing a conversation of {counted(len(conversation.turns), 'turn')}"
    if conversation.is_open:
        greeting += "; the last one has no answer: /regen"
    return greeting


#: The number of turns that are shown when a conversation is continued.
_N_RECALLED_TURNS = 2
#: The maximum number of lines that are shown of each answer then: its last ones.
_MAX_RECALLED_LINES = 8


class _Dialogue:
    """Answers messages and carries out commands.

    Each command has a method. If the command generates an answer, the method returns the exit code
    of the signal that ended the answer, or 0; other commands return None. It raises `SpecgenError`
    if the command cannot be carried out, and `EOFError` to end the conversation.
    """

    def __init__(
        self,
        chat: Chat,
        learner: Learner,
        stop: Interrupt,
        output: Output,
    ) -> None:
        self._chat = chat
        self._learner = learner
        self._stop = stop
        self._output = output
        #: Whether a person types the messages; otherwise they come from a pipe.
        self._is_typed = is_person()
        #: The exit code of the last error; 0 if there was none.
        self._error_code = 0

    def run(self, about: str) -> int:
        """Take messages until they end, and return the exit code.

        Args:
            about: A line about the models, shown to a person before the first message.
        """
        if self._chat.conversation.turns:
            self._output.note(_greeting(self._chat.conversation))
        if self._is_typed and not self._output.quiet:
            self._recall()
            say(f"{about}\n/help lists the commands; Ctrl-D ends the conversation")
        for message in _messages(self._is_typed):
            try:
                signal_code = self._turn(message)
            except EOFError:
                break
            if self._is_typed:
                say("")  # between turns
                if signal_code == 128 + signal.SIGINT:
                    continue  # Ctrl-C ends only the answer
            if signal_code:
                return signal_code
        if self._is_typed:
            return 0  # the person has seen the errors
        return self._error_code

    def _turn(self, message: str) -> int:
        """Take a message, and return the exit code of the signal that ended its answer, or 0.

        After most errors, the conversation continues without this answer.

        Raises:
            SpecgenError: If a worker is lost, or the output of a pipe cannot be written.
            EOFError: If the message ends the conversation.
        """
        try:
            self._learner.before_answers()
            return self._take(message) or 0
        except SpecgenError as error:
            output_is_lost = isinstance(error, OutputError) and not self._is_typed
            if output_is_lost or isinstance(error, WorkerLostError):
                raise
            say_error(error.message, error.hint)
            self._error_code = error.exit_code
        except KeyboardInterrupt:  # a second Ctrl-C: the unfinished answer is kept
            if not self._is_typed:
                raise
            self._chat.keep()
        finally:
            self._learner.after_answers()
        return 0

    def _take(self, message: str) -> int | None:
        """Carry out a command, or answer any other message.

        It returns and raises what the commands' methods do.
        """
        command_match = _COMMAND.fullmatch(message.rstrip())
        if command_match is None:
            return self._answer(self._chat.ask(message))
        name = command_match[1].lower()
        name = _ALIASES.get(name, name)
        argument = (command_match[2] or "").strip()
        command = _COMMANDS.get(name)
        if command is None:
            hint = "/help lists the commands; a space before the slash makes it a message"
            raise UsageError(f"there is no command /{name}", hint)
        if not command.accepts(argument):
            raise UsageError(f"{message.strip()!r}: usage: /{name} {command.takes}".rstrip())
        return command.run(self, argument)

    def _answer(self, events: Generator[Event, None, None]) -> int:
        """Show an answer; return the exit code of the signal that ended it, or 0."""
        with without_echo(), self._stop:
            finished = self._output.show_events(events, in_chat=True)
        is_cut = finished is not None and finished.finish_reason in ("length", "context")
        if is_cut and not self._output.has_summary and not self._output.json:
            self._output.note("the answer was cut off (-n and -c allow more)")
        return self._stop.exit_code

    def _recall(self) -> None:
        """Show the last turns, dimmed, and only the last lines of long answers."""
        from specgen.render.rows import clean

        for turn in self._chat.conversation.turns[-_N_RECALLED_TURNS:]:
            # Without the thinking block; a turn that was interrupted early has no answer.
            _, _, answer = clean(turn.answer or "").rpartition("</think>")
            lines = answer.strip().splitlines()
            if len(lines) > _MAX_RECALLED_LINES:
                lines = ["...", *lines[-_MAX_RECALLED_LINES:]]
            text = "\n".join([f"> {clean(turn.question)}", *lines])
            console_on(sys.stderr).print(f"{text}\n", style="dim")

    # --- commands

    def help(self, _argument: str) -> None:
        """Show the commands (also /?)."""
        usages = [f"/{name} {command.takes}".strip() for name, command in _COMMANDS.items()]
        width = max(map(len, usages))
        for usage, command in zip(usages, _COMMANDS.values(), strict=True):
            say(f"{usage:<{width}}  {command.run.__doc__}")
        say("A backslash at the end of a line continues the message. Ctrl-C stops an answer.")

    def regenerate(self, _argument: str) -> int:
        """Answer the last question again."""
        if self._chat.is_greedy:
            say("note: at temperature 0 the answer is always the same (--temp 0.8 varies it)")
        return self._answer(self._chat.regenerate())

    def undo(self, _argument: str) -> None:
        """Remove the last question and its answer."""
        turns = self._chat.conversation.turns
        if not turns:
            raise UsageError("there is no turn to undo")
        self._change(turns=turns[:-1])

    def reset(self, _argument: str) -> None:
        """Remove all turns; system message and files stay (also /clear)."""
        self._change(turns=())

    def _change(self, *, turns: tuple[Turn, ...]) -> None:
        """Replace the turns of the conversation, and say how many it has now."""
        self._chat.change(replace(self._chat.conversation, turns=turns))
        say(f"the conversation now has {counted(len(turns), 'turn')}")

    def system(self, text: str) -> None:
        """Change the system message; without TEXT, remove it."""
        self._chat.change(replace(self._chat.conversation, system=text or None))
        say(f"the system message was {'changed' if text else 'removed'}")

    def save(self, file: str) -> None:
        """Write the conversation to a file."""
        from specgen.session.conversation import save_conversation

        try:
            save_conversation(path_of(file), self._chat.conversation)
        except OutputError as error:  # a mistyped name does not end the conversation
            raise UsageError(error.message, error.hint) from None
        say(f"saved to {file}")

    def load(self, file: str) -> None:
        """Continue the conversation in a file."""
        from specgen.session.conversation import read_conversation

        self._chat.change(read_conversation(path_of(file)))
        say(_greeting(self._chat.conversation))
        self._recall()

    def draft(self, choice: str) -> None:
        """Turn drafting on or off for later answers."""
        self._chat.drafts = choice == "on"
        say(f"draft from now on: {self._chat.draft_name}")

    def think(self, _argument: str) -> None:
        """Show the model's thinking before its last answer."""
        from specgen.render.rows import clean
        from specgen.session.prompts.thoughts import split_thought

        thought = ""
        if self._chat.last is not None:
            prompt, finished = self._chat.last
            thought, _ = split_thought(prompt.text, finished.text)
        if not thought:
            raise UsageError("the last answer of this session has no thinking block")
        console_on(sys.stderr).print(clean(thought), style="dim", soft_wrap=True)

    def stats(self, _argument: str) -> None:
        """Show figures of the last answer and the conversation."""
        from specgen.render.summary import print_summary
        from specgen.render.tables import totals

        if self._chat.last is None:
            raise UsageError("there is no answer yet")
        prompt, finished = self._chat.last
        print_summary(console_on(sys.stderr), finished, prompt)
        figures = totals(len(self._chat.answers), self._chat.answers)
        n_used = finished.n_prompt_tokens + finished.n_tokens
        context = f"{n_used} of {self._chat.n_ctx} tokens of context in use"
        say(f"so far: {', '.join(figures)}, {context}")

    def quit(self, _argument: str) -> None:
        """End the conversation (also /bye, /exit)."""
        raise EOFError


@dataclass(frozen=True, slots=True)
class _ChatCommand:
    """A message that begins with a slash."""

    #: Its argument, as /help shows it: "", "FILE", "TEXT" (which may be left out) or "on|off".
    takes: str
    #: The method that carries it out with the argument. /help shows the method's docstring.
    run: Callable[[_Dialogue, str], int | None]

    def accepts(self, argument: str) -> bool:
        """Return whether the command can be called with this argument."""
        if self.takes == "on|off":
            return argument in ("on", "off")
        if self.takes == "FILE":
            return argument != ""
        if self.takes == "TEXT":
            return True
        return argument == ""


#: A slash and a word, alone or before a space. Paths and C comments (`/* */`) are not commands.
_COMMAND = re.compile(r"/([A-Za-z?]+)(?:\s+(.*))?", re.DOTALL)
_COMMANDS = {
    "help": _ChatCommand("", _Dialogue.help),
    "regen": _ChatCommand("", _Dialogue.regenerate),
    "undo": _ChatCommand("", _Dialogue.undo),
    "reset": _ChatCommand("", _Dialogue.reset),
    "system": _ChatCommand("TEXT", _Dialogue.system),
    "save": _ChatCommand("FILE", _Dialogue.save),
    "load": _ChatCommand("FILE", _Dialogue.load),
    "draft": _ChatCommand("on|off", _Dialogue.draft),
    "think": _ChatCommand("", _Dialogue.think),
    "stats": _ChatCommand("", _Dialogue.stats),
    "quit": _ChatCommand("", _Dialogue.quit),
}
#: Other programs' names for these commands.
_ALIASES = {"?": "help", "clear": "reset", "bye": "quit", "exit": "quit"}


# --- messages, from a person at a terminal or from a pipe


class _CtrlC:
    """Ctrl-C at an empty prompt: the first prints how to leave, and the next one leaves."""

    def __init__(self) -> None:
        self._was_told = False

    def reset(self) -> None:
        """Note that something was typed, so that the next Ctrl-C is a first one."""
        self._was_told = False

    def leaves(self, line_end: str = "") -> bool:
        """Handle a Ctrl-C: return whether to leave; if not, print how to, after `line_end`."""
        if self._was_told:
            return True
        self._was_told = True
        say(f"{line_end}another Ctrl-C, Ctrl-D or /quit ends the conversation")
        return False


def _messages(are_typed: bool) -> Iterator[str]:
    """Return the messages of a person at a terminal, or those in a pipe."""
    if not are_typed:
        return piped_messages(sys.stdin.buffer)
    if console_on(sys.stdin).is_dumb_terminal:
        return piped_messages(_prompted(sys.stdin.buffer))
    return typed_messages()


def _prompted(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines that a person types at a terminal without escape codes, as in Emacs."""
    ctrl_c = _CtrlC()
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = stream.readline()
        except KeyboardInterrupt:  # the terminal has dropped what was typed
            if ctrl_c.leaves(line_end="\n"):
                return
            continue
        if not line:
            return
        ctrl_c.reset()
        yield line


def piped_messages(stream: Iterable[bytes]) -> Iterator[str]:
    """Yield the messages in a stream: each line that is not empty.

    A backslash at the end of a line continues the message on the next one.

    Raises:
        PromptError: If a line is not text.
    """
    message = ""
    for line in decode_lines(stream, input_name(STDIO), PromptError):
        if line.endswith("\\"):
            message += f"{line[:-1]}\n"
            continue
        message += line
        if message.strip():
            yield message
        message = ""
    if message.strip():
        yield message.removesuffix("\n")


def typed_messages() -> Iterator[str]:
    """Yield the messages that a person types, in an editor with a history and completion.

    A backslash at the end of a line starts another line, and so does Alt-Enter; pasted text stays
    one message. Ctrl-C clears the line. On an empty one, it tells how to leave, and a second one
    ends the messages, as does Ctrl-D.
    """
    with without_echo():  # the import takes a while, and the editor shows what is typed meanwhile
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
            # Answers may go into a pipe; what is typed must be visible even then.
            output=create_output(stdout=sys.stdout if sys.stdout.isatty() else sys.stderr),
        )
    ctrl_c = _CtrlC()
    while True:
        try:
            with _ending_by_signals(session):
                message = session.prompt()
        except KeyboardInterrupt:
            if session.default_buffer.text:
                ctrl_c.reset()
            elif ctrl_c.leaves():
                return
            continue
        except EOFError:
            return
        ctrl_c.reset()
        if message.strip():
            yield message


def _history() -> History:
    """Return the history of typed messages: in a file, or in memory if that cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from specgen.system.folders import data_folder

    class TolerantHistory(FileHistory):
        """A file whose errors are ignored."""

        def store_string(self, string: str) -> None:
            # The message is sent even if the disk is full, or it has bytes that are not UTF-8.
            with contextlib.suppress(OSError, UnicodeError):
                super().store_string(string)

    path = data_folder() / "chat-history"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.read_bytes()
        return TolerantHistory(str(path))
    return InMemoryHistory()


def _keys() -> KeyBindings:
    """Return what Enter does (it sends the message, except after a backslash), and Alt-Enter."""
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
    """Let any signal but that of Ctrl-C end the editor, so that the editor restores the terminal.

    Raises:
        SystemExit: If a signal comes; with the signal's exit code.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        system_exit = SystemExit(128 + number)
        loop = editor.app.loop
        if loop is None:  # before or after the editor runs
            raise system_exit
        loop.call_soon_threadsafe(lambda: editor.app.exit(exception=system_exit))

    numbers = [number for number in SIGNALS if number != signal.SIGINT]
    former_handlers = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former_handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def without_echo() -> Iterator[None]:
    """Hide what a person types at a terminal during the block, such as during an answer.

    It is not lost: the next message begins with it.
    """
    if os.name == "nt" or sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    import termios

    descriptor = sys.stdin.fileno()
    former_attributes = termios.tcgetattr(descriptor)
    attributes = list(former_attributes)
    local_flags = 3  # the index of lflag in these lists
    attributes[local_flags] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSANOW, attributes)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, former_attributes)


def is_person() -> bool:
    """Return whether a person types at a terminal and sees the output."""
    is_shown = sys.stdout.isatty() or sys.stderr.isatty()
    return sys.stdin is not None and sys.stdin.isatty() and is_shown
