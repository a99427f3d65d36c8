"""An answer that an engine was asked for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from specgen.engine.answer_settings import AnswerSettings
from specgen.engine.prompts import Prompt
from specgen.errors import SpecgenError
from specgen.events import Event, FinishedEvent


@dataclass(eq=False)
class Answer:
    """An answer that an engine was asked for: waiting, being generated, or finished."""

    #: Its number among the engine's answers, from 0: the `sequence` of its events.
    index: int
    prompt: Prompt
    settings: AnswerSettings
    seed: int
    #: Whether drafts are made for it.
    drafts: bool = True
    #: The summary, once it is finished.
    finished: FinishedEvent | None = None
    #: The error that ended it early.
    failure: SpecgenError | None = None
    is_cancelled: bool = False
    #: Events that `Engine.stream` has not yielded yet.
    events: deque[Event] = field(default_factory=deque)

    @property
    def is_done(self) -> bool:
        """Whether it is finished or has failed."""
        return self.finished is not None or self.failure is not None

    @property
    def text(self) -> str:
        """The whole text. Raises the error that ended the answer early, or `RuntimeError` if it is
        not done."""
        if self.failure is not None:
            raise self.failure
        if self.finished is None:
            raise RuntimeError(f"answer {self.index} is not done")
        return self.finished.text
