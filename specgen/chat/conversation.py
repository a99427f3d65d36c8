"""The messages of a conversation, and which of them go into the context."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from specgen.engine.chat_template import Message

#: What can happen to a conversation.
#:
#: - ``system``: its system message is `text` from now on; None is no system message;
#: - ``files``: what stands before the user's first turn is `text`;
#: - ``question``: the user said `text`. It takes the place of a question without an answer;
#: - ``answer``: the last question's answer is `text`, also if it had another one;
#: - ``undo``: the last turn is taken back;
#: - ``reset``: all turns are taken back;
#: - ``load``: nothing is as it was, and `changes` happen.
ChangeKind: TypeAlias = Literal["system", "files", "question", "answer", "undo", "reset", "load"]


@dataclass(frozen=True, slots=True)
class Change:
    """A step of a conversation; a conversation is the sum of its changes."""

    kind: ChangeKind
    text: str | None = None
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user said, and the answer; None where there is none (yet)."""

    question: str
    answer: str | None = None


@dataclass(slots=True)
class Conversation:
    """Turns, with a system message and the text of files before them.

    The context may have no room for all turns: the first `n_left_out` are then not in `messages`.
    """

    system: str | None = None
    #: Stands before the user's first turn that is in the context; may be empty.
    files: str = ""
    #: All but the last one have an answer.
    turns: tuple[Turn, ...] = ()
    n_left_out: int = 0

    @property
    def is_open(self) -> bool:
        """Whether the last question has no answer."""
        return bool(self.turns) and self.turns[-1].answer is None

    def copy(self) -> Conversation:
        """The conversation as it is now."""
        return replace(self)

    def apply(self, change: Change) -> None:
        """Let a change happen. Raises `ValueError` if it does not fit: it takes back, or answers,
        what is not there."""
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
        """The fewest changes that make a conversation that says the same."""
        found = [Change("system", self.system)] if self.system is not None else []
        found += [Change("files", self.files)] if self.files else []
        for turn in self.turns:
            found.append(Change("question", turn.question))
            if turn.answer is not None:
                found.append(Change("answer", turn.answer))
        return tuple(found)

    def messages(self, n_left_out: int | None = None) -> list[Message]:
        """The messages to which the last question's answer is the next one, without the first
        `n_left_out` turns (None: as many as are left out now)."""
        turns = self.turns[self.n_left_out if n_left_out is None else n_left_out :]
        found = [] if self.system is None else [Message("system", self.system)]
        before = self.files
        for turn in turns:
            found += [
                Message("user", before + turn.question),
                Message("assistant", turn.answer or ""),
            ]
            before = ""
        return found[:-1]

    def make_room(self, n_tokens: Callable[[int], int], n_most: int, n_goal: int) -> int:
        """Leave turns out from the front if the messages take more than `n_most` tokens: as few as
        let them take no more than `n_goal`, or all but the last. (As llama.cpp does, more go than
        have to: each time that some go, the rest is decoded anew.) `n_tokens` counts the tokens of
        the messages without so many turns. Returns how many turns went."""
        before, last = self.n_left_out, len(self.turns) - 1
        if before >= last or n_tokens(before) <= n_most:
            return 0
        self.n_left_out = bisect_left(
            range(last), True, lo=before + 1, key=lambda first: n_tokens(first) <= n_goal
        )
        return self.n_left_out - before
