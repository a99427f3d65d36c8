"""A conversation at the command line: its turns, the file that stores them, and its answers."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from specgen.errors import PromptError, UsageError
from specgen.events import CommittedEvent, Event, FinishedEvent, NoticeEvent, PromptEvent
from specgen.session.engine import Engine
from specgen.session.prompts import Prompt
from specgen.session.prompts.context_window import room_for_prompt, turns_to_leave_out
from specgen.session.prompts.template import Message
from specgen.session.prompts.thoughts import ThoughtMarker, ThoughtReader
from specgen.session.session import Session
from specgen.system.files import replace_bytes, to_line, write_errors


@dataclass(frozen=True, slots=True)
class Turn:
    """A question of the user, and the answer."""

    #: What the user wrote.
    question: str
    #: What the model wrote; of an interrupted answer, the part up to there. None if there is no
    #: answer yet.
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns of a conversation, and what comes before them."""

    #: The system message.
    system: str | None = None
    #: The text of files, before the first question.
    files: str = ""
    #: The turns, the oldest first. All but the last one have an answer.
    turns: tuple[Turn, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether the last question has no answer yet."""
        return bool(self.turns) and self.turns[-1].answer is None

    def asking(self, question: str) -> Conversation:
        """Return this conversation with a new question at its end.

        If the last question has no answer yet, the new one replaces it.
        """
        turns = self.turns[:-1] if self.is_open else self.turns
        return replace(self, turns=(*turns, Turn(question)))

    def answered(self, answer: str) -> Conversation:
        """Return this conversation with another answer to its last question."""
        *turns, last = self.turns
        return replace(self, turns=(*turns, replace(last, answer=answer)))

    def messages(self, n_left_out: int = 0) -> list[Message]:
        """Return the messages up to the last question, without the first `n_left_out` turns.

        The system message and the files are always included.
        """
        # The answer to the last question is what the model will write (again).
        return self.all_messages(n_left_out)[:-1]

    def all_messages(self, n_left_out: int = 0) -> list[Message]:
        """Return the messages with the last answer, without the first `n_left_out` turns."""
        messages: list[Message] = []
        if self.system is not None:
            messages.append(Message("system", self.system))
        before_question = self.files
        for turn in self.turns[n_left_out:]:
            messages.append(Message("user", before_question + turn.question))
            messages.append(_answer_message(turn.answer or ""))
            before_question = ""
        return messages


def _answer_message(text: str) -> Message:
    """Return the message for an answer, with its thoughts in a separate field.

    The chat template then decides whether the model sees the thoughts of earlier turns.
    """
    thought, answer = ThoughtReader.read(text)
    return Message("assistant", answer, reasoning=thought or None)


def read_conversation(path: Path) -> Conversation:
    """Return the conversation that a file contains.

    Raises:
        PromptError: If the file cannot be read, or is not a conversation.
    """
    from pydantic import TypeAdapter

    try:
        document = json.loads(path.read_bytes())
        return TypeAdapter(Conversation).validate_python(document, extra="forbid")
    except OSError as error:
        raise PromptError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        hint = "repair it, or use another file"
        raise PromptError(f"{path}: damaged, or not a conversation", hint) from None


def save_conversation(path: Path, conversation: Conversation) -> None:
    """Write a conversation to a file, which only the user may read. An existing file is replaced.

    Raises:
        OutputError: If the file cannot be written.
    """
    with write_errors(path):
        replace_bytes(path, to_line(asdict(conversation)))


class PromptWindow:
    """Makes the prompts of a conversation, without its oldest turns once the context is full.

    Args:
        session: The loaded models.
        n_ctx: The size of the context in tokens.
        now: The time for templates. It never changes, so that all prompts of the conversation
            begin with the same tokens and the caches stay valid.
    """

    def __init__(
        self,
        session: Session,
        n_ctx: int,
        now: datetime.datetime,
    ) -> None:
        self._session = session
        self._n_ctx = n_ctx
        self._now = now
        #: The number of oldest turns that are left out, because they do not fit into the context.
        self._n_left_out = 0

    def reset(self) -> None:
        """Leave out no turn, since another conversation begins."""
        self._n_left_out = 0

    def prompt_of(
        self,
        conversation: Conversation,
        max_tokens: int,
    ) -> tuple[Prompt, int]:
        """Return the prompt of the next answer, and the number of turns newly left out of it.

        Args:
            conversation: The conversation; its last question is to be answered.
            max_tokens: The maximum number of tokens of the answer; negative for no limit.

        Raises:
            PromptError: If the last question alone does not fit into the context.
        """
        last = len(conversation.turns) - 1

        @functools.cache
        def prompt(n_left_out: int) -> Prompt:
            messages = conversation.messages(n_left_out)
            return self._session.prompts.of_messages(messages, now=self._now)

        def n_tokens(n_left_out: int) -> int:
            return len(prompt(n_left_out).tokens)

        n_alone = n_tokens(last)
        if n_alone > self._n_ctx:
            raise PromptError(
                f"the message, with the system message and files, has {n_alone} tokens; "
                f"the context has {self._n_ctx}",
                hint=self._session.fitting_hint(n_alone + 1, "a shorter message"),
            )
        n_before = self._n_left_out
        n_room = room_for_prompt(self._n_ctx, max_tokens)
        self._n_left_out = turns_to_leave_out(last + 1, self._n_ctx, n_room, n_tokens)
        return prompt(self._n_left_out), max(0, self._n_left_out - n_before)

    def notice(self, conversation: Conversation, n_turns: int) -> str:
        """Return the notice that `n_turns` more turns are left out from now on."""
        turns = "the oldest turn is" if n_turns == 1 else f"the {n_turns} oldest turns are"
        message = f"the context of {self._n_ctx} tokens is full: {turns} left out from here on"
        kept_parts = []
        if conversation.system is not None:
            kept_parts.append("the system message")
        if conversation.files:
            kept_parts.append("the files")
        if kept_parts:
            message += f" ({' and '.join(kept_parts)} kept)"
        return message


class Chat:
    """Generates the answers of a conversation, and stores the conversation in a file.

    The text of an interrupted answer is stored as far as it got.
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
            path: The file that stores the conversation; None stores it nowhere.
            now: The time for templates, in all prompts.
        """
        self._session = session
        self._engine = engine
        self._path = path
        self._window = PromptWindow(session, engine.n_ctx, now)
        self.conversation = conversation
        #: The conversation as the file contains it.
        self._saved = conversation
        #: Whether the next answers are generated with drafts.
        self.drafts = True
        #: The summaries of the answers of this run.
        self.answers: list[FinishedEvent] = []
        #: The first and the last event of the last answer; None until it is finished.
        self.last: tuple[PromptEvent, FinishedEvent] | None = None
        #: The number of times that the last question was answered again.
        self._n_again = 0

    @property
    def draft_name(self) -> str:
        """The name of the draft for the next answers, or ``none``."""
        return self._session.draft_name if self.drafts else "none"

    @property
    def n_ctx(self) -> int:
        """The size of the context in tokens."""
        return self._engine.n_ctx

    @property
    def is_greedy(self) -> bool:
        """Whether a question always gets the same answer."""
        return not self._session.settings.sampler.is_random

    def ask(self, question: str) -> Generator[Event, None, None]:
        """Answer a question, and yield the events of the answer.

        The oldest turns are left out of the prompt if they do not fit into the context.

        Raises:
            PromptError: If the question alone does not fit into the context.
            OutputError: If the conversation cannot be written to its file.
        """
        asked = self.conversation.asking(question)
        prompt, n_newly_left_out = self._make_prompt(asked)
        self._change_to(asked)
        self._n_again = 0
        yield from self._answer(prompt, n_newly_left_out)

    def regenerate(self) -> Generator[Event, None, None]:
        """Answer the last question again, and yield the events of the answer.

        If the user gave a seed, each new answer to the question uses the next seed.

        Raises:
            UsageError: If there is no question.
            OutputError: If the conversation cannot be written to its file.
        """
        if not self.conversation.turns:
            raise UsageError("there is no question to answer again")
        prompt, n_newly_left_out = self._make_prompt(self.conversation)
        if not self.conversation.is_open:
            self._n_again += 1
        yield from self._answer(prompt, n_newly_left_out)

    def change(self, conversation: Conversation) -> None:
        """Continue with another conversation.

        Raises:
            OutputError: If it cannot be written to the file. The chat continues with it all the
                same.
        """
        self._window.reset()
        self._change_to(conversation)

    def keep(self) -> None:
        """Write the conversation to its file, unless the file is up to date.

        Every change is written at once, so there is something left to write only if an interrupt
        or a full disk prevented that.

        Raises:
            OutputError: If the file cannot be written.
        """
        # Conversations are immutable and replaced at each change, so identity suffices.
        if self._path is not None and self._saved is not self.conversation:
            save_conversation(self._path, self.conversation)
            self._saved = self.conversation

    def _change_to(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.keep()

    def _make_prompt(self, conversation: Conversation) -> tuple[Prompt, int]:
        """Return what `PromptWindow.prompt_of` returns."""
        return self._window.prompt_of(conversation, self._session.options.generation.max_tokens)

    def _answer(
        self,
        prompt: Prompt,
        n_newly_left_out: int,
    ) -> Generator[Event, None, None]:
        """Generate an answer, yield its events, and store its text, even if it is cut off.

        A notice is added if turns were newly left out of the prompt.
        """
        sampling = self._session.options.sampler
        if self._n_again and sampling.seed >= 0:
            sampling = replace(sampling, seed=sampling.seed + self._n_again)
        request = self._engine.insert(prompt, sampling=sampling, draft=self.drafts)
        events = self._engine.stream(request)
        marker = ThoughtMarker(prompt.text)
        text = ""
        is_complete = False
        prompt_event: PromptEvent | None = None
        try:
            for event in events:
                if isinstance(event, PromptEvent):
                    prompt_event = event
                    self.last = None
                elif isinstance(event, CommittedEvent):
                    text += marker.feed(event.text)
                elif isinstance(event, FinishedEvent) and prompt_event is not None:
                    is_complete = event.finish_reason != "interrupted"
                    self.last = (prompt_event, event)
                    self.answers.append(event)
                yield event
                if isinstance(event, PromptEvent) and n_newly_left_out:
                    notice = self._window.notice(self.conversation, n_newly_left_out)
                    yield NoticeEvent(event.sequence, event.time_s, notice)
        finally:
            events.close()  # cancels the answer if the caller stopped reading
            text += marker.finish()
            # A complete answer may be empty; an interrupted one without text is no answer.
            if text or is_complete:
                self._change_to(self.conversation.answered(text))
