"""The file of a conversation: a line of JSON for each change, written as it happens."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from specgen.atomic import replace_bytes
from specgen.chat.conversation import Change, ChangeKind, Conversation
from specgen.errors import OutputError, PromptError, UsageError

_KINDS: tuple[str, ...] = get_args(ChangeKind)
#: Conversations are nobody else's business.
_MODE = 0o600


class ChatLog:
    """Appends the changes of a conversation to its file; it is open for as long as this is."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        #: What could not be written: it goes before what comes next.
        self._unwritten = b""

    @staticmethod
    @contextlib.contextmanager
    def opened(path: Path) -> Iterator[tuple[ChatLog, Conversation, bool]]:
        """Open a file, which is made if it does not exist: what appends to it, the conversation that
        it has, and whether half a line at its end, as a killed process leaves it, was dropped.

        Nobody else can open it meanwhile. Raises `UsageError` if somebody else has it open,
        `PromptError` if a line is damaged, and `OutputError` if it cannot be written, also at the
        end.
        """
        import filelock

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(path.with_name(f"{path.name}.lock"), timeout=0)
            lock.acquire()
        except filelock.Timeout:
            raise UsageError(
                f"{path}: another specgen chat goes on with it",
                hint="end that one, or take another",
            ) from None
        except OSError as error:
            raise _error(path, error) from error
        with contextlib.ExitStack() as stack:
            stack.callback(lock.release)
            try:
                flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
                descriptor = os.open(path, flags, _MODE)
                stack.callback(os.close, descriptor)
                data = path.read_bytes()
                conversation, n_bytes = _read(path, data)
                os.ftruncate(descriptor, n_bytes)
            except OSError as error:
                raise _error(path, error) from error
            log = ChatLog(path, descriptor)
            if n_bytes and not data[:n_bytes].endswith(b"\n"):
                log._unwritten = b"\n"
            yield log, conversation, n_bytes < len(data)
            if log._unwritten.strip():
                log._write()

    def append(self, change: Change) -> None:
        """Write a change, and have it on the disk when this returns. Raises `OutputError` if that
        cannot be done; it is then written with the next one, or at the end."""
        self._unwritten += to_line(change)
        self._write()

    def _write(self) -> None:
        start = os.lseek(self._descriptor, 0, os.SEEK_END)
        data = self._unwritten
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, start)
            raise _error(self._path, error) from error
        self._unwritten = b""


def read(path: Path) -> tuple[Conversation, bool]:
    """The conversation in a file, and whether half a line at its end was left out. Raises
    `PromptError` if it cannot be read, or a line is damaged."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PromptError(f"{path}: cannot be read: {error.strerror}") from error
    conversation, n_bytes = _read(path, data)
    return conversation, n_bytes < len(data)


def save(path: Path, conversation: Conversation) -> None:
    """Write a conversation to a file, which is replaced whole. Raises `OutputError`."""
    try:
        replace_bytes(path, b"".join(map(to_line, conversation.changes())))
    except OSError as error:
        raise _error(path, error) from error


def to_line(change: Change) -> bytes:
    """A change as a line of JSON; half a surrogate pair becomes an escape."""
    text = json.dumps(_to_json(change), ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _read(path: Path, data: bytes) -> tuple[Conversation, int]:
    """The conversation in a file's bytes, and how many of them are whole lines."""
    conversation, n_bytes = Conversation(), 0
    lines = data.split(b"\n")
    for number, raw in enumerate(lines, start=1):
        is_last = number == len(lines)
        if raw.strip():
            try:
                conversation.apply(_from_json(json.loads(raw)))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                if is_last:
                    break
                raise PromptError(
                    f"{path}: line {number} is damaged, or not of a conversation",
                    hint="mend or remove that line, or take another file",
                ) from None
        n_bytes += len(raw) + (not is_last)
    return conversation, n_bytes


def _to_json(change: Change) -> dict[str, Any]:
    if change.kind == "load":
        return {"change": change.kind, "changes": [_to_json(each) for each in change.changes]}
    if change.kind in ("undo", "reset"):
        return {"change": change.kind}
    return {"change": change.kind, "text": change.text}


def _from_json(line: Mapping[str, Any]) -> Change:
    """Raises `ValueError`, `KeyError`, `TypeError` or `AttributeError` if it is no change."""
    kind, text = line["change"], line.get("text")
    if kind not in _KINDS or not isinstance(text, str | None):
        raise ValueError(kind)
    return Change(kind, text, tuple(_from_json(each) for each in line.get("changes", ())))


def _error(path: Path, error: OSError) -> OutputError:
    hint = "make room on the disk" if error.errno == errno.ENOSPC else None
    return OutputError(f"{path}: cannot be written: {error.strerror}", hint)
