"""A conversation: its turns, the file that keeps them, and its answers."""

from __future__ import annotations

import datetime
import json
from bisect import bisect_left
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from specgen.errors import PromptError, UsageError
from specgen.events import CommittedEvent, Event, FinishedEvent, NoticeEvent, PromptEvent
from specgen.session.engine import Engine
from specgen.session.prompts import Prompt
from specgen.session.prompts.template import Message
from specgen.session.prompts.thoughts import ThoughtMarker, ThoughtReader
from specgen.session.session import Session
from specgen.system.files import replace_bytes, to_line, write_errors

#: A quarter of the context is kept free for an answer, unless answers are limited to less.
_ANSWER_SHARE = 4
#: If turns have to be left out, the others take at most half of the context.
_KEPT_SHARE = 2


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user said, and the answer; the answer is None if there is none (yet)."""

    question: str
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, all but the last one with an answer, a system message, and the text of files before
    them.
    """

    system: str | None = None
    files: str = ""
    turns: tuple[Turn, ...] = ()

    @property
    def is_open(self) -> bool:
        return bool(self.turns) and self.turns[-1].answer is None

    def asking(self, question: str) -> Conversation:
        """Return the conversation with another question, which replaces one that has no answer."""
        turns = self.turns[:-1] if self.is_open else self.turns
        return replace(self, turns=(*turns, Turn(question)))

    def messages(self, n_left_out: int = 0) -> list[Message]:
        found = [] if self.system is None else [Message("system", self.system)]
        before = self.files
        for turn in self.turns[n_left_out:]:
            found.append(Message("user", before + turn.question))
            found.append(_answered(turn.answer or ""))
            before = ""
        return found[:-1]


def _answered(text: str) -> Message:
    """Return the message of an answer, with its thoughts apart: templates choose whether the model
    sees them again.
    """
    reader = ThoughtReader()
    thought, answer = map("".join, zip(reader.feed(text), reader.finish(), strict=True))
    return Message("assistant", answer, reasoning=thought or None)


def read_conversation(path: Path) -> Conversation:
    """Return the conversation in a file. Raise `PromptError` if it cannot be read, or has none."""
    from pydantic import TypeAdapter

    try:
        found = json.loads(path.read_bytes())
        return TypeAdapter(Conversation).validate_python(found, extra="forbid")
    except OSError as error:
        raise PromptError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        hint = "repair it, or use another file"
        raise PromptError(f"{path}: damaged, or not a conversation", hint) from None


def save_conversation(path: Path, conversation: Conversation) -> None:
    """Write a conversation to a file, which is replaced whole; only the user may read it. Raise
    `OutputError`.
    """
    with write_errors(path):
        replace_bytes(path, to_line(asdict(conversation)))


class Chat:
    """Asks an engine for a conversation's answers, and keeps them in the file `path`, if there is
    one. Interrupted ones are kept as they are. `now` is the time for templates; it stays the same,
    so that the caches stay valid.
    """

    def __init__(
        self,
        session: Session,
        engine: Engine,
        conversation: Conversation,
        path: Path | None = None,
        *,
        now: datetime.datetime,
    ) -> None:
        self._session, self._engine, self._path, self._now = session, engine, path, now
        self.conversation = self._kept = conversation
        #: Whether the next answers use drafts.
        self.drafts = True
        #: The last events of the answers of this run, and the first and the last event of the last
        #: answer.
        self.answers: list[FinishedEvent] = []
        self.last: tuple[PromptEvent, FinishedEvent] | None = None
        #: The turns that have no room in the context, and how often the last question was answered
        #: again.
        self._n_left_out = self._n_again = 0

    def ask(self, question: str) -> Generator[Event, None, None]:
        """Answer a question; yield the events. Turns that do not fit are left out. Raise
        `PromptError`.
        """
        asked = self.conversation.asking(question)
        prompt, n_gone = self._make_prompt(asked)
        self._keep(asked)
        self._n_again = 0
        yield from self._answer(prompt, n_gone)

    def regenerate(self) -> Generator[Event, None, None]:
        """Answer the last question again; a given seed is increased each time. Raise `UsageError`."""
        if not self.conversation.turns:
            raise UsageError("there is no question to answer again")
        prompt, n_gone = self._make_prompt(self.conversation)
        if not self.conversation.is_open:
            self._n_again += 1
        yield from self._answer(prompt, n_gone)

    def change(self, conversation: Conversation) -> None:
        """Go on with another conversation. Raise `OutputError` if it cannot be kept; it goes on all
        the same.
        """
        self._n_left_out = 0
        self._keep(conversation)

    @property
    def draft_name(self) -> str:
        return self._session.draft_name if self.drafts else "none"

    @property
    def n_ctx(self) -> int:
        return self._engine.n_ctx

    @property
    def is_greedy(self) -> bool:
        return self._session.options.sampler.greedy

    def keep(self) -> None:
        """Write the conversation, unless the file has it: an interrupt or a full disk may have kept
        it from that.
        """
        if self._path is not None and self._kept is not self.conversation:
            save_conversation(self._path, self.conversation)
            self._kept = self.conversation

    def _keep(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.keep()

    def _make_prompt(self, conversation: Conversation) -> tuple[Prompt, int]:
        """Return the prompt of the answer, and how many more turns were left out to fit it, until
        it takes half of the context: more than necessary, since the rest is decoded again each time
        that some go.
        """
        n_ctx, last = self.n_ctx, len(conversation.turns) - 1

        def prompt(n_left_out: int) -> Prompt:
            messages = conversation.messages(n_left_out)
            return self._session.prompts.of_messages(messages, now=self._now)

        def n_tokens(n_left_out: int) -> int:
            return len(prompt(n_left_out).tokens)

        if (n_alone := n_tokens(last)) > n_ctx:
            raise PromptError(
                f"the message, with the system message and files, has {n_alone} tokens; the context "
                f"has {n_ctx}",
                hint=f"use --ctx-size {n_alone + 1} or more, or a shorter message",
            )
        n_answer, max_tokens = n_ctx // _ANSWER_SHARE, self._session.options.generation.max_tokens
        n_most = n_ctx - (min(n_answer, max_tokens) if max_tokens >= 0 else n_answer)
        before, n_goal = self._n_left_out, n_ctx // _KEPT_SHARE
        if before < last and n_tokens(before) > n_most:
            self._n_left_out = bisect_left(
                range(last), True, lo=before + 1, key=lambda first: n_tokens(first) <= n_goal
            )
        return prompt(self._n_left_out), self._n_left_out - before

    def _answer(self, prompt: Prompt, n_gone: int) -> Generator[Event, None, None]:
        sampling = self._session.options.sampler
        if self._n_again and sampling.seed >= 0:
            sampling = replace(sampling, seed=sampling.seed + self._n_again)
        answer = self._engine.insert(prompt, sampling=sampling, draft=self.drafts)
        text, is_whole, events = "", False, self._engine.stream(answer)
        marker = ThoughtMarker(prompt.text)
        first: PromptEvent | None = None
        try:
            for event in events:
                if isinstance(event, PromptEvent):
                    first, self.last = event, None
                elif isinstance(event, CommittedEvent):
                    text += marker.feed(event.text)
                elif isinstance(event, FinishedEvent) and first is not None:
                    is_whole, self.last = event.finish_reason != "interrupted", (first, event)
                    self.answers.append(event)
                yield event
                if isinstance(event, PromptEvent) and n_gone:
                    yield NoticeEvent(event.sequence, event.time_s, self._gone(n_gone))
        finally:
            events.close()  # cancels an answer that nobody waits for
            text += marker.finish()
            if text or is_whole:
                *turns, last = self.conversation.turns
                turns.append(replace(last, answer=text))
                self._keep(replace(self.conversation, turns=tuple(turns)))

    def _gone(self, n_gone: int) -> str:
        turns = "the oldest turn is" if n_gone == 1 else f"the {n_gone} oldest turns are"
        message = f"the context of {self.n_ctx} tokens is full: {turns} left out from here on"
        kept = ["the system message"] if self.conversation.system is not None else []
        kept += ["the files"] if self.conversation.files else []
        return f"{message} ({' and '.join(kept)} kept)" if kept else message


def check_template(session: Session) -> None:
    if session.target.chat_template() is None:
        raise UsageError(
            f"a conversation needs a chat template, and {session.target.name} has none",
            hint="`specgen run` continues a text without a template",
        )
