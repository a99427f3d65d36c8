"""Where the messages of a conversation come from: a person at a terminal, or a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from specgen.errors import PromptError

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings

#: What stands before a person's messages.
_PROMPT = "> "


class Messages(Protocol):
    """Gives the messages one after the other."""

    def __iter__(self) -> Iterator[str]: ...


class PipedMessages:
    """Each line of a stream is a message; a backslash at its end goes on with the next line. Empty lines
    are none. Raises `PromptError` for a line that is not UTF-8."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[str]:
        message = ""
        for number, raw in enumerate(self._stream, start=1):
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


class TypedMessages:
    """What a person types, with the keys of an editor and the history that is kept in `history`.

    A backslash at the end goes on with another line, and so does Alt-Enter; a paste stays one message.
    Ctrl-C clears the line, Ctrl-D in an empty one ends. `commands` are completed.
    """

    def __init__(self, history: Path, commands: tuple[str, ...]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import DynamicCompleter, WordCompleter
        from prompt_toolkit.history import FileHistory, History, InMemoryHistory
        from prompt_toolkit.output import create_output

        words = WordCompleter(list(commands), sentence=True)
        kept: History = InMemoryHistory()
        try:
            history.parent.mkdir(parents=True, exist_ok=True)
            history.touch(mode=0o600)
            kept = FileHistory(str(history))
        except OSError:  # nothing is kept then
            pass
        # Answers may go into a pipe: what is typed is seen all the same.
        output = create_output(stdout=sys.stdout if sys.stdout.isatty() else sys.stderr)
        self._session: PromptSession[str] = PromptSession(
            _PROMPT,
            history=kept,
            completer=DynamicCompleter(lambda: words),
            complete_while_typing=False,
            multiline=True,
            prompt_continuation=lambda width, _number, _is_soft: " " * width,
            key_bindings=_keys(),
            output=output,
        )

    def __iter__(self) -> Iterator[str]:
        while True:
            try:
                message = self._session.prompt()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            if message.strip():
                yield message


def _keys() -> KeyBindings:
    """Enter sends, unless a backslash stands before it."""
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
    """Whether somebody types the messages at a terminal that can be written to anywhere."""
    return (
        sys.stdin is not None
        and sys.stdin.isatty()
        and (sys.stdout.isatty() or sys.stderr.isatty())
        and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    )


__all__ = ["Messages", "PipedMessages", "TypedMessages", "is_person"]
