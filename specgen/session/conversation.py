"""A conversation at the command line: its turns, the file that keeps them, and its answers."""

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

#: The share of the context that is kept free for an answer, unless answers are limited to less.
_ANSWER_SHARE = 1 / 4
#: If turns have to be left out, the others take at most this share of the context.
_KEPT_SHARE = 1 / 2


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user asked, and the answer."""

    question: str
    #: None if there is no answer (yet).
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns of a conversation, and what comes before them."""

    #: The system message.
    system: str | None = None
    #: The text of files, before the first question.
    files: str = ""
    #: All but the last one have an answer.
    turns: tuple[Turn, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether the last question has no answer."""
        return bool(self.turns) and self.turns[-1].answer is None

    def asking(self, question: str) -> Conversation:
        """Return the conversation with another question, which replaces one without an answer."""
        turns = self.turns[:-1] if self.is_open else self.turns
        return replace(self, turns=(*turns, Turn(question)))

    def messages(self, n_left_out: int = 0) -> list[Message]:
        """Return the messages up to the last question, without the first `n_left_out` turns."""
        messages: list[Message] = []
        if self.system is not None:
            messages.append(Message("system", self.system))
        before = self.files
        for turn in self.turns[n_left_out:]:
            messages.append(Message("user", before + turn.question))
            messages.append(_answer_message(turn.answer or ""))
            before = ""
        return messages[:-1]


def _answer_message(text: str) -> Message:
    """Return an answer with its thoughts apart: templates choose whether the model sees them."""
    reader = ThoughtReader()
    thought, answer = reader.feed(text)
    more_thought, more_answer = reader.finish()
    thought += more_thought
    return Message("assistant", answer + more_answer, reasoning=thought or None)


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
    """Replace a file by a conversation; only the user may read it. Raise `OutputError`."""
    with write_errors(path):
        replace_bytes(path, to_line(asdict(conversation)))


class Chat:
    """Asks an engine for a conversation's answers, and keeps them in a file.

    Interrupted answers are kept as they are.
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
        """Continue a conversation.

        Args:
            session: The loaded models.
            engine: Generates the answers.
            conversation: The turns so far.
            path: The file that keeps the conversation; None keeps it nowhere.
            now: The time for templates. It stays the same, so that the caches stay valid.
        """
        self._session = session
        self._engine = engine
        self._path = path
        self._now = now
        self.conversation = conversation
        #: What the file has.
        self._kept = conversation
        #: Whether the next answers use drafts.
        self.drafts = True
        #: The summaries of the answers of this run.
        self.answers: list[FinishedEvent] = []
        #: The first and the last event of the last answer.
        self.last: tuple[PromptEvent, FinishedEvent] | None = None
        #: How many of the first turns are left out, because they do not fit into the context.
        self._n_left_out = 0
        #: How often the last question was answered again.
        self._n_again = 0

    @property
    def draft_name(self) -> str:
        """What drafts for the next answers, or ``none``."""
        return self._session.draft_name if self.drafts else "none"

    @property
    def n_ctx(self) -> int:
        """The size of the context in tokens."""
        return self._engine.n_ctx

    @property
    def is_greedy(self) -> bool:
        """Whether a question always gets the same answer."""
        return self._session.options.sampler.greedy

    def ask(self, question: str) -> Generator[Event, None, None]:
        """Answer a question, and yield the events. Turns that do not fit are left out.

        Raises:
            PromptError: The question alone does not fit.
        """
        asked = self.conversation.asking(question)
        prompt, n_gone = self._make_prompt(asked)
        self._change_to(asked)
        self._n_again = 0
        yield from self._answer(prompt, n_gone)

    def regenerate(self) -> Generator[Event, None, None]:
        """Answer the last question again; a given seed is increased each time.

        Raises:
            UsageError: There is no question.
        """
        if not self.conversation.turns:
            raise UsageError("there is no question to answer again")
        prompt, n_gone = self._make_prompt(self.conversation)
        if not self.conversation.is_open:
            self._n_again += 1
        yield from self._answer(prompt, n_gone)

    def change(self, conversation: Conversation) -> None:
        """Go on with another conversation, also if it cannot be kept. Raise `OutputError` then."""
        self._n_left_out = 0
        self._change_to(conversation)

    def keep(self) -> None:
        """Write the conversation, unless the file has it already.

        An interrupt or a full disk may have prevented that before.

        Raises:
            OutputError: It cannot be written.
        """
        if self._path is not None and self._kept is not self.conversation:
            save_conversation(self._path, self.conversation)
            self._kept = self.conversation

    def _change_to(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.keep()

    def _make_prompt(self, conversation: Conversation) -> tuple[Prompt, int]:
        """Return the prompt of the answer, and how many more turns are left out of it.

        If turns have to be left out, it is more than necessary: whenever some go, the rest is
        decoded again.
        """
        last = len(conversation.turns) - 1

        def prompt(n_left_out: int) -> Prompt:
            messages = conversation.messages(n_left_out)
            return self._session.prompts.of_messages(messages, now=self._now)

        def n_tokens(n_left_out: int) -> int:
            return len(prompt(n_left_out).tokens)

        n_alone = n_tokens(last)
        if n_alone > self.n_ctx:
            raise PromptError(
                f"the message, with the system message and files, has {n_alone} tokens; "
                f"the context has {self.n_ctx}",
                hint=f"use --ctx-size {n_alone + 1} or more, or a shorter message",
            )
        n_before = self._n_left_out
        if n_before < last and n_tokens(n_before) > self.n_ctx - self._n_kept_free:
            # Leave out the fewest turns with which the prompt is short enough.
            n_goal = int(self.n_ctx * _KEPT_SHARE)
            self._n_left_out = bisect_left(
                range(last), -n_goal, lo=n_before + 1, key=lambda first: -n_tokens(first)
            )
        return prompt(self._n_left_out), self._n_left_out - n_before

    @property
    def _n_kept_free(self) -> int:
        """How many tokens of the context are kept free for an answer."""
        n_usual = int(self.n_ctx * _ANSWER_SHARE)
        max_tokens = self._session.options.generation.max_tokens
        if max_tokens < 0:
            return n_usual
        return min(n_usual, max_tokens)

    def _answer(self, prompt: Prompt, n_gone: int) -> Generator[Event, None, None]:
        """Generate an answer, yield its events, and keep its text, even if it is cut off."""
        sampling = self._session.options.sampler
        if self._n_again and sampling.seed >= 0:
            sampling = replace(sampling, seed=sampling.seed + self._n_again)
        request = self._engine.insert(prompt, sampling=sampling, draft=self.drafts)
        events = self._engine.stream(request)
        marker = ThoughtMarker(prompt.text)
        text = ""
        is_whole = False
        begun: PromptEvent | None = None
        try:
            for event in events:
                if isinstance(event, PromptEvent):
                    begun = event
                    self.last = None
                elif isinstance(event, CommittedEvent):
                    text += marker.feed(event.text)
                elif isinstance(event, FinishedEvent) and begun is not None:
                    is_whole = event.finish_reason != "interrupted"
                    self.last = (begun, event)
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
                self._change_to(replace(self.conversation, turns=tuple(turns)))

    def _gone(self, n_gone: int) -> str:
        """Return the notice that turns are left out."""
        turns = "the oldest turn is" if n_gone == 1 else f"the {n_gone} oldest turns are"
        message = f"the context of {self.n_ctx} tokens is full: {turns} left out from here on"
        kept = []
        if self.conversation.system is not None:
            kept.append("the system message")
        if self.conversation.files:
            kept.append("the files")
        if kept:
            message += f" ({' and '.join(kept)} kept)"
        return message


def check_template(session: Session) -> None:
    """Raise `UsageError` if the target has no chat template."""
    if session.target.chat_template() is None:
        raise UsageError(
            f"a conversation needs a chat template, and {session.target.name} has none",
            hint="`specgen run` continues a text without a template",
        )
