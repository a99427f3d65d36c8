"""The file of a conversation: a line of JSON for each change, written at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from specgen.errors import PromptError, UsageError
from specgen.serve.chat.conversation import Change, ChangeKind, Conversation
from specgen.system.atomic_files import replace_bytes
from specgen.system.json_lines import (
    AppendedFile,
    DamagedLineError,
    locked,
    take_lines,
    to_line,
    write_errors,
)

_KINDS: tuple[str, ...] = get_args(ChangeKind)
#: Conversations are private: only the user may read the file.
_MODE = 0o600


class ChatLog:
    """Appends the changes of a conversation to its file, which stays open."""

    def __init__(self, file: AppendedFile) -> None:
        self._file = file
        #: Bytes that could not be written; the next write begins with them.
        self._unwritten = b""

    @staticmethod
    @contextlib.contextmanager
    def opened(path: Path) -> Iterator[tuple[ChatLog, Conversation, bool]]:
        """Open a file, and make it if it does not exist. Yield the log that appends to it, its conversation,
        and whether a torn line at its end, which a killed process leaves, was dropped.

        No other process can open it meanwhile. Raise `UsageError` if another one has it open, `PromptError`
        if a line is damaged, and `OutputError` if it cannot be written, also at the end.
        """
        held = UsageError(
            f"{path}: another specgen chat has it open",
            hint="end that one, or use another --session",
        )
        with (
            locked(path.with_name(f"{path.name}.lock"), held),
            AppendedFile.opened(path, _MODE) as file,
        ):
            with write_errors(path):
                data = path.read_bytes()
            conversation, n_bytes = _read(path, data)
            file.cut(n_bytes)
            log = ChatLog(file)
            if n_bytes and not data[:n_bytes].endswith(b"\n"):
                log._unwritten = b"\n"
            yield log, conversation, n_bytes < len(data)
            if log._unwritten.strip():
                log._write()

    def append(self, change: Change) -> None:
        """Write a change; it is on the disk when this returns. Raise `OutputError` if that fails; the
        change is then written with the next one, or at the end."""
        self._unwritten += change_line(change)
        self._write()

    def _write(self) -> None:
        self._file.append(self._unwritten)
        self._unwritten = b""


def read(path: Path) -> tuple[Conversation, bool]:
    """Return the conversation in a file, and whether a torn line at its end was left out. Raise
    `PromptError` if the file cannot be read, or a line is damaged."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PromptError(f"{path}: cannot be read: {error.strerror}") from error
    conversation, n_bytes = _read(path, data)
    return conversation, n_bytes < len(data)


def save(path: Path, conversation: Conversation) -> None:
    """Write a conversation to a file, which is replaced whole. Raise `OutputError`."""
    with write_errors(path):
        replace_bytes(path, b"".join(map(change_line, conversation.changes())))


def change_line(change: Change) -> bytes:
    """Return a change as a line of the file."""
    return to_line(_to_json(change))


def _read(path: Path, data: bytes) -> tuple[Conversation, int]:
    """Return the conversation in a file's bytes, and the size of its whole lines in bytes."""
    conversation = Conversation()
    try:
        n_bytes = take_lines(data, lambda line: conversation.apply(_from_json(line)))
    except DamagedLineError as error:
        raise PromptError(
            f"{path}: line {error.number} is damaged, or not part of a conversation",
            hint="repair or remove that line, or use another file",
        ) from None
    return conversation, n_bytes


def _to_json(change: Change) -> dict[str, Any]:
    if change.kind == "load":
        return {"change": change.kind, "changes": [_to_json(each) for each in change.changes]}
    if change.kind in ("undo", "reset"):
        return {"change": change.kind}
    return {"change": change.kind, "text": change.text}


def _from_json(line: Mapping[str, Any]) -> Change:
    """Return the change in a line. Raise `ValueError`, `KeyError`, `TypeError` or `AttributeError` if it is
    none."""
    kind, text = line["change"], line.get("text")
    if kind not in _KINDS or not isinstance(text, str | None):
        raise ValueError(kind)
    return Change(kind, text, tuple(_from_json(each) for each in line.get("changes", ())))
