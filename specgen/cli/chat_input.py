"""The messages of a conversation: from a person at a terminal, or from a pipe."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING

from specgen.errors import PromptError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

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
