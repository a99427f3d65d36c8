"""The messages of a conversation, and which of them go into the context."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from specgen.session.prompts.template import Message

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


@dataclass(frozen=True, slots=True)
class Change:
    """A step of a conversation; its changes, in order, make the whole conversation."""

    kind: ChangeKind
    text: str | None = None
    changes: tuple[Change, ...] = ()


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

    def copy(self) -> Conversation:
        """Return a copy of the conversation."""
        return replace(self)

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
            found += [
                Message("user", before + turn.question),
                Message("assistant", turn.answer or ""),
            ]
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
