"""The base of all writers: answers become chunks of a stream, and whole responses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from specgen.events import CommittedEvent, Event, FinishedEvent, PrefillEvent
from specgen.serve.formats.answers import Answer
from specgen.serve.formats.delta import Delta
from specgen.serve.formats.fields import Json
from specgen.serve.formats.figures import answer_figures
from specgen.serve.formats.parsed_request import ParsedRequest


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """The requests of one body, and what every response to them repeats."""

    #: The requests of one body, which differ in their prompts only.
    requests: Sequence[ParsedRequest]
    #: The prompt of each answer, as text: all answers to the first request, then the next one's.
    prompts: Sequence[str]
    #: The unique part of the response's id.
    identity: str
    #: The time of the request, in seconds since 1970.
    created: int
    #: The name of the model.
    model: str
    #: The tokens of each prompt, for formats that return them.
    prompt_tokens: Sequence[Sequence[int]] = ()


class AnswerWriter(ABC):
    """Writes answers in the form of an API, in chunks and whole.

    Answers are numbered like `AnswerContext.prompts`.
    """

    #: How chunks are streamed: as server-sent events, as server-sent events that are named after
    #: their ``type``, or as JSON lines.
    stream_format: ClassVar[Literal["events", "named", "lines"]] = "events"
    #: The event that keeps a stream open while nothing else is sent; None if the API has none.
    keep_alive_event: ClassVar[Json | None] = None

    def __init__(self, context: AnswerContext) -> None:
        self._context = context
        #: The first request, for everything that all requests have in common.
        self._first = context.requests[0]
        self._answers = [
            Answer(context.requests[number // self._first.n], prompt)
            for number, prompt in enumerate(context.prompts)
        ]

    def begin(self, _n_prompt_tokens: int) -> list[Json]:
        """Return the chunks that come before the answers."""
        return []

    def feed(self, number: int, event: Event) -> list[Json]:
        """Return the chunks for an event of an answer.

        The last chunk of the last answer has the figures of all.
        """
        answer = self._answers[number]
        match event:
            case CommittedEvent():
                deltas = answer.feed([piece.text for piece in event.pieces])
                return self._write_deltas(number, deltas, event)
            case PrefillEvent():
                return self._write_progress(number, event)
            case FinishedEvent():
                return [
                    *self._write_deltas(number, answer.finish(event), None),
                    *self._write_end(number),
                ]
        return []

    def is_over(self, number: int, time_s: float) -> bool:
        """Return whether an answer is past its time limit and has a line break, so that it ends.

        Args:
            number: The number of the answer.
            time_s: The time since its first token.
        """
        limit_s = self._first.time_limit_s
        return 0.0 < limit_s < time_s and "\n" in self._answers[number].text("content")

    def fail(self, error: Json) -> list[Json]:
        """Return the last chunks of a failed answer.

        Args:
            error: The body of an error response in OpenAI's form.
        """
        return [error]

    @abstractmethod
    def whole(self) -> Json:
        """Return the whole response, when all answers are finished."""

    def _write_progress(
        self,
        _number: int,
        _event: PrefillEvent,
    ) -> list[Json]:
        """Return the chunks about the prefill of an answer's prompt."""
        return []

    @abstractmethod
    def _write_deltas(
        self,
        number: int,
        deltas: list[Delta],
        event: CommittedEvent | None,
    ) -> list[Json]:
        """Write additions to an answer, and return the chunks for them.

        Args:
            number: The number of the answer.
            deltas: The additions to its text, thoughts and calls.
            event: The event with the tokens; None at the end of the answer.
        """

    @abstractmethod
    def _write_end(self, number: int) -> list[Json]:
        """Return the chunks at the end of an answer."""

    def _figures(self, number: int | None = None) -> Json:
        """Return token usage, timings, drafting figures and warnings.

        Args:
            number: The number of the answer; None for all answers together.
        """
        answers = self._answers
        if number is not None:
            answers = [answers[number]]
        finished = [answer.finished for answer in answers if answer.finished is not None]
        n_reasoning = sum(answer.n_reasoning_tokens for answer in answers)
        figures = answer_figures(finished, n_reasoning, self._first.n)
        settings = self._first.speculative
        figures["speculative"] |= {
            "draft": settings.draft,
            "max": settings.max,
            "verifier": settings.verifier,
        }
        warnings = list(self._first.warnings)
        warnings += (
            _context_warning(event) for event in finished if event.finish_reason == "context"
        )
        if warnings:
            figures["warnings"] = warnings
        return figures


def _context_warning(finished: FinishedEvent) -> str:
    n_prompt = finished.n_prompt_tokens
    contents = f"{n_prompt} tokens of the prompt and {finished.n_tokens} of the answer"
    return f"max_tokens: the context is full, with {contents}"


class BlockWriter(AnswerWriter):
    """Writes one answer, whole or as named events, in blocks: thoughts, texts and calls."""

    stream_format = "named"

    def __init__(self, context: AnswerContext) -> None:
        super().__init__(context)
        #: The block that is being written, with everything that was added to it; None if none is.
        self._block: Delta | None = None
        #: The closed blocks, in the form of the API.
        self._blocks: list[Json] = []

    def _write_deltas(
        self,
        _number: int,
        deltas: list[Delta],
        _event: CommittedEvent | None,
    ) -> list[Json]:
        """Continue the open block, or close it and open the next one, and return the events."""
        events: list[Json] = []
        for delta in deltas:
            if self._block is not None and delta.continues(self._block):
                self._block = self._block.with_more(delta)
            else:
                events += self._close_open_block()
                self._block = delta
                events += self._open_block(delta)
            events += self._extend_block(self._block, delta.text)
            if delta.is_end:
                events += self._close_open_block()
        return events

    def _close_open_block(self, status: str = "completed") -> list[Json]:
        """Close the open block, if there is one, and return the events for that.

        Args:
            status: Whether the block is ``completed`` or ``incomplete``.
        """
        block = self._block
        self._block = None
        if block is None:
            return []
        return self._close_block(block, status)

    @abstractmethod
    def _open_block(self, block: Delta) -> list[Json]:
        """Begin a block, and return the events for that."""

    @abstractmethod
    def _extend_block(self, block: Delta, text: str) -> list[Json]:
        """Return the events for `text`, which was just added at the end of a block."""

    @abstractmethod
    def _close_block(self, block: Delta, status: str) -> list[Json]:
        """Add a finished block to `_blocks`, and return the events at its end."""
