"""A conversation with a model: questions and answers, and the commands among them."""

from __future__ import annotations

import datetime
import re
from collections.abc import Generator
from dataclasses import replace

from specgen.errors import PromptError, UsageError
from specgen.events import CommittedEvent, Event, FinishedEvent, NoticeEvent, PromptEvent
from specgen.serve.chat.conversation import Change, ChatLog, Conversation
from specgen.session.engine import Engine
from specgen.session.prompts import Prompt
from specgen.session.session import Session

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
