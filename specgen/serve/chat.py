"""A conversation: its messages and those of them that go into the context, the file that keeps them, and the commands
among them."""

from __future__ import annotations

import contextlib
import datetime
import re
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from specgen.errors import PromptError, UsageError
from specgen.events import CommittedEvent, Event, FinishedEvent, NoticeEvent, PromptEvent
from specgen.session.engine import Engine
from specgen.session.prompts import Prompt
from specgen.session.prompts.template import Message
from specgen.session.session import Session
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


# --- questions, answers and commands

#: A quarter of the context is kept free for an answer, unless answers are limited to less.
_ANSWER_SHARE = 4
#: If turns have to be left out, the others take at most half of the context.
_KEPT_SHARE = 2

#: What a user can type among the messages, by name: the argument, and what it does.
COMMANDS: dict[str, tuple[str, str]] = {
    "help": ("", "show the commands (also /?)"),
    "regen": ("", "answer the last question again"),
    "undo": ("", "remove the last question and its answer"),
    "reset": ("", "remove all turns; the system message and files stay (also /clear)"),
    "system": ("TEXT", "change the system message; without TEXT there is none"),
    "save": ("FILE", "write the conversation to a file"),
    "load": ("FILE", "go on with the conversation in a file"),
    "draft": ("on|off", "let later answers be drafted for, or not"),
    "think": ("", "show what the model thought before its last answer"),
    "stats": ("", "show figures of the last answer and the conversation"),
    "quit": ("", "end the conversation (also /bye, /exit)"),
}
#: Names that other programs have for these commands.
ALIASES = {"?": "help", "clear": "reset", "bye": "quit", "exit": "quit"}
#: A word after a slash, alone or before a space; so paths and comments of C are no commands.
_COMMAND = re.compile(r"/([A-Za-z?]+)(?:\s+(.*))?", re.DOTALL)


def parse_command(line: str) -> tuple[str, str] | None:
    """Return the name and the argument of the command in a line; None if the line is a message. Raise
    `UsageError` if there is no such command, or its argument is wrong."""
    found = _COMMAND.fullmatch(line.rstrip())
    if found is None:
        return None
    name, argument = found[1].lower(), (found[2] or "").strip()
    name = ALIASES.get(name, name)
    if name not in COMMANDS:
        raise UsageError(
            f"there is no command /{name}",
            hint="/help lists the commands; to send this as a message, put a space before the slash",
        )
    takes, _ = COMMANDS[name]
    is_right = {
        "": not argument,
        "TEXT": True,
        "FILE": bool(argument),
        "on|off": argument in ("on", "off"),
    }
    if not is_right[takes]:
        raise UsageError(f"{line.strip()!r}: usage: {f'/{name} {takes}'.strip()}")
    return name, argument


class Chat:
    """Asks an engine for the answers of a conversation, and keeps the turns in a log, if there is one.

    An interrupted answer is kept as it is. If nothing came, its question has no answer: `regenerate` gives it
    one, or another question replaces it. `now` is the time that templates may write; it stays the same, so
    that the caches stay valid.
    """

    def __init__(
        self,
        session: Session,
        engine: Engine,
        conversation: Conversation,
        log: ChatLog | None = None,
        *,
        now: datetime.datetime,
    ) -> None:
        self._session, self._engine, self._log, self._now = session, engine, log, now
        self.conversation = conversation
        #: Whether the next answers use drafts.
        self.drafts = True
        #: The last events of the answers of this run, and the first and the last event of the last answer.
        self.answers: list[FinishedEvent] = []
        self.prompt: PromptEvent | None = None
        self.finished: FinishedEvent | None = None
        self._n_again = 0

    def ask(self, question: str) -> Generator[Event, None, None]:
        """Answer a question, and yield the events. If the context is too small, turns are left out from the
        front; a notice says so. Raise `PromptError` if the question alone does not fit, and any error that
        ends an answer early. The question is then not part of the conversation, unless its answer had
        begun."""
        before = replace(self.conversation)
        change = Change("question", question)
        self.conversation.apply(change)
        try:
            prompt, n_gone = self._make_prompt()
        except Exception:
            self.conversation = before
            raise
        self._keep(change)
        self._n_again = 0
        yield from self._answer(prompt, n_gone)

    def regenerate(self) -> Generator[Event, None, None]:
        """Answer the last question again, in place of its answer. A given seed is increased each time.
        Raise `UsageError` if there is no question, and what `ask` raises."""
        if not self.conversation.turns:
            raise UsageError("there is no question to answer again")
        prompt, n_gone = self._make_prompt()
        if not self.conversation.is_open:
            self._n_again += 1
        yield from self._answer(prompt, n_gone)

    def change(self, change: Change) -> None:
        """Apply a change and log it. Raise `ValueError` if it does not fit, and `OutputError` if it cannot
        be logged; it is applied then."""
        self.conversation.apply(change)
        self._keep(change)

    @property
    def draft_name(self) -> str:
        """The drafter of the next answers: a model's file, ``ngram`` or ``none``."""
        return self._session.draft_name if self.drafts else "none"

    @property
    def says_the_same_again(self) -> bool:
        """Whether regenerating an answer gives the same answer."""
        is_whole = self.finished is not None and self.finished.finish_reason != "interrupted"
        return self._session.options.sampler.greedy and is_whole and not self.conversation.is_open

    @property
    def n_ctx(self) -> int:
        """The size of the context in tokens."""
        return self._engine.n_ctx

    def _keep(self, change: Change) -> None:
        if self._log is not None:
            self._log.append(change)

    def _make_prompt(self) -> tuple[Prompt, int]:
        """Return the prompt of the answer, and how many turns were left out to fit it."""
        conversation, n_ctx = self.conversation, self.n_ctx

        def prompt(n_left_out: int) -> Prompt:
            messages = conversation.messages(n_left_out)
            return self._session.prompts.of_messages(messages, now=self._now)

        n_alone = len(prompt(len(conversation.turns) - 1).tokens)
        if n_alone > n_ctx:
            raise PromptError(
                f"the message, with the system message and files, has {n_alone} tokens; the context "
                f"has {n_ctx}",
                hint=f"use --ctx-size {n_alone + 1} or more, or a shorter message",
            )
        n_answer, max_tokens = n_ctx // _ANSWER_SHARE, self._session.options.generation.max_tokens
        n_most = n_ctx - (min(n_answer, max_tokens) if max_tokens >= 0 else n_answer)
        n_gone = conversation.make_room(
            lambda n_left_out: len(prompt(n_left_out).tokens), n_most, n_ctx // _KEPT_SHARE
        )
        return prompt(conversation.n_left_out), n_gone

    def _answer(self, prompt: Prompt, n_gone: int) -> Generator[Event, None, None]:
        sampling = self._session.options.sampler
        if self._n_again and sampling.seed >= 0:
            sampling = replace(sampling, seed=sampling.seed + self._n_again)
        answer = self._engine.insert(prompt, sampling=sampling, draft=self.drafts)
        text, is_whole = "", False
        events = self._engine.stream(answer)
        try:
            for event in events:
                if isinstance(event, PromptEvent):
                    self.prompt, self.finished = event, None
                elif isinstance(event, CommittedEvent):
                    text += event.text
                elif isinstance(event, FinishedEvent):
                    is_whole = event.finish_reason != "interrupted"
                    self.finished = event
                    self.answers.append(event)
                yield event
                if isinstance(event, PromptEvent) and n_gone:
                    yield NoticeEvent(event.sequence, event.time_s, self._gone(n_gone))
        finally:
            events.close()  # cancels an answer that nobody waits for
            if text or is_whole:
                self.change(Change("answer", text))

    def _gone(self, n_gone: int) -> str:
        turns = "the oldest turn is" if n_gone == 1 else f"the {n_gone} oldest turns are"
        message = f"the context of {self.n_ctx} tokens is full: {turns} left out from here on"
        kept = ["the system message"] if self.conversation.system is not None else []
        kept += ["the files"] if self.conversation.files else []
        return f"{message} ({' and '.join(kept)} kept)" if kept else message


def check_template(session: Session) -> None:
    """Raise `UsageError` if the target has no chat template."""
    if session.target.chat_template() is None:
        raise UsageError(
            f"a conversation needs a chat template, and {session.target.name} has none",
            hint="`specgen run` continues a text without a template",
        )
