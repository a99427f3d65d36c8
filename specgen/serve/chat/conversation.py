"""The messages of a conversation, those of them that go into the context, and the file that keeps them."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from specgen.errors import PromptError, UsageError
from specgen.session.prompts.template import Message
from specgen.system.files import replace_bytes
from specgen.system.json_lines import (
    AppendedFile,
    DamagedLineError,
    locked,
    take_lines,
    to_line,
    write_errors,
)

#: The kinds of changes of a conversation.
#:
#: - ``system``: the system message becomes `text`; None removes it;
#: - ``files``: the text before the user's first turn becomes `text`;
#: - ``question``: the user said `text`; it replaces a question without an answer;
#: - ``answer``: the last question's answer becomes `text`, also if it had another one;
#: - ``undo``: the last turn is removed;
#: - ``reset``: all turns are removed;
#: - ``load``: the conversation is replaced by the result of `changes`.
ChangeKind: TypeAlias = Literal["system", "files", "question", "answer", "undo", "reset", "load"]
_KINDS: tuple[str, ...] = get_args(ChangeKind)
#: Conversations are private: only the user may read the file.
_MODE = 0o600


@dataclass(frozen=True, slots=True)
class Change:
    """A step of a conversation, and a line of its file; its changes, in order, make the conversation."""

    kind: ChangeKind
    text: str | None = None
    changes: tuple[Change, ...] = ()

    @property
    def line(self) -> dict[str, Any]:
        """The change as an object of JSON."""
        if self.kind == "load":
            return {"change": self.kind, "changes": [each.line for each in self.changes]}
        has_text = self.kind not in ("undo", "reset")
        return {"change": self.kind} | ({"text": self.text} if has_text else {})

    @staticmethod
    def of_line(line: Mapping[str, Any]) -> Change:
        """Return the change of an object. Raise `ValueError`, `KeyError`, `TypeError` or `AttributeError` if it
        is none."""
        kind, text = line["change"], line.get("text")
        if kind not in _KINDS or not isinstance(text, str | None):
            raise ValueError(kind)
        return Change(kind, text, tuple(map(Change.of_line, line.get("changes", ()))))


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user said, and the answer; the answer is None if there is none (yet)."""

    question: str
    answer: str | None = None


@dataclass(slots=True)
class Conversation:
    """Turns, with a system message and the text of files before them.

    If the context is too small for all turns, the first `n_left_out` are not in `messages`.
    """

    system: str | None = None
    #: The text before the user's first turn in the context; may be empty.
    files: str = ""
    #: All but the last one have an answer.
    turns: tuple[Turn, ...] = ()
    n_left_out: int = 0

    @property
    def is_open(self) -> bool:
        """Whether the last question has no answer."""
        return bool(self.turns) and self.turns[-1].answer is None

    def apply(self, change: Change) -> None:
        """Apply a change. Raise `ValueError` if it does not fit, since it removes or answers a turn that
        does not exist."""
        text = change.text
        if change.kind == "load":
            loaded = Conversation()
            for each in change.changes:
                loaded.apply(each)
            self.system, self.files, self.turns = loaded.system, loaded.files, loaded.turns
            self.n_left_out = 0
        elif change.kind == "system":
            self.system = text
        elif change.kind == "reset":
            self.turns = ()
        elif change.kind == "undo":
            if not self.turns:
                raise ValueError("there is no turn to take back")
            self.turns = self.turns[:-1]
        elif text is None:
            raise ValueError(f"a change of kind {change.kind} needs a text")
        elif change.kind == "files":
            self.files = text
        elif change.kind == "question":
            self.turns = (*(self.turns[:-1] if self.is_open else self.turns), Turn(text))
        else:
            if not self.turns:
                raise ValueError("there is no question to answer")
            self.turns = (*self.turns[:-1], Turn(self.turns[-1].question, text))
        if self.n_left_out >= len(self.turns):
            self.n_left_out = 0

    def changes(self) -> tuple[Change, ...]:
        """Return the fewest changes that make an equal conversation."""
        found = [Change("system", self.system)] if self.system is not None else []
        found += [Change("files", self.files)] if self.files else []
        for turn in self.turns:
            found.append(Change("question", turn.question))
            if turn.answer is not None:
                found.append(Change("answer", turn.answer))
        return tuple(found)

    def messages(self, n_left_out: int | None = None) -> list[Message]:
        """Return the messages before the last question's answer, without the first `n_left_out` turns (None:
        as many as are left out now)."""
        turns = self.turns[self.n_left_out if n_left_out is None else n_left_out :]
        found = [] if self.system is None else [Message("system", self.system)]
        before = self.files
        for turn in turns:
            found.append(Message("user", before + turn.question))
            found.append(Message("assistant", turn.answer or ""))
            before = ""
        return found[:-1]

    def make_room(self, n_tokens: Callable[[int], int], n_most: int, n_goal: int) -> int:
        """Leave out turns from the front if the messages take more than `n_most` tokens; return how many.

        As few as possible go until the messages take at most `n_goal` tokens, or only the last turn is
        left. (More go than necessary, as in llama.cpp, since the rest is decoded again each time that some
        go.) `n_tokens` counts the tokens of the messages without a number of turns."""
        before, last = self.n_left_out, len(self.turns) - 1
        if before >= last or n_tokens(before) <= n_most:
            return 0
        self.n_left_out = bisect_left(
            range(last), True, lo=before + 1, key=lambda first: n_tokens(first) <= n_goal
        )
        return self.n_left_out - before


class ChatLog:
    """Appends the changes of a conversation to its file, which stays open."""

    def __init__(self, file: AppendedFile, unwritten: bytes) -> None:
        self._file = file
        #: Bytes that could not be written; the next write begins with them.
        self._unwritten = unwritten

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
            ends_line = not n_bytes or data[:n_bytes].endswith(b"\n")
            log = ChatLog(file, b"" if ends_line else b"\n")
            yield log, conversation, n_bytes < len(data)
            if log._unwritten.strip():
                log.append()

    def append(self, *changes: Change) -> None:
        """Write changes; they are on the disk when this returns. Raise `OutputError` if that fails; they are
        then written with the next ones, or at the end."""
        self._unwritten += b"".join(to_line(change.line) for change in changes)
        self._file.append(self._unwritten)
        self._unwritten = b""


def read_conversation(path: Path) -> Conversation:
    """Return the conversation in a file, without a torn line at its end. Raise `PromptError` if the file
    cannot be read, or a line is damaged."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PromptError(f"{path}: cannot be read: {error.strerror}") from error
    return _read(path, data)[0]


def save_conversation(path: Path, conversation: Conversation) -> None:
    """Write a conversation to a file, which is replaced whole. Raise `OutputError`."""
    with write_errors(path):
        replace_bytes(path, b"".join(to_line(change.line) for change in conversation.changes()))


def _read(path: Path, data: bytes) -> tuple[Conversation, int]:
    """Return the conversation in a file's bytes, and the size of its whole lines in bytes."""
    conversation = Conversation()
    try:
        n_bytes = take_lines(data, lambda line: conversation.apply(Change.of_line(line)))
    except DamagedLineError as error:
        raise PromptError(
            f"{path}: line {error.number} is damaged, or not part of a conversation",
            hint="repair or remove that line, or use another file",
        ) from None
    return conversation, n_bytes
