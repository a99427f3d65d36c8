"""What OpenAI's chat completions and text completions have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, AliasPath, Field

from specgen import __version__
from specgen.events import CommittedEvent, Event, Piece, PrefillEvent, TokenLogprob, to_json_object
from specgen.serve.formats.answer_writer import AnswerContext, AnswerWriter
from specgen.serve.formats.answers import Answer
from specgen.serve.formats.delta import Delta
from specgen.serve.formats.fields import Json
from specgen.serve.formats.figures import own_figures, vllm_metrics
from specgen.serve.formats.generation_request import GenerationRequest
from specgen.serve.formats.parsed_request import ParsedRequest

#: The maximum number of likely tokens whose log-probabilities a request may ask for.
MAX_LOGPROBS = 100


class OpenAIRequest(GenerationRequest):
    """The fields of chat completions and of text completions."""

    #: In a text completion, the number of likely tokens whose log-probabilities are wanted. In a
    #: chat, whether log-probabilities are wanted at all.
    logprobs: bool | Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    #: In a chat, the number of likely tokens.
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    #: The number of answers to each prompt.
    n: Annotated[
        int,
        Field(
            ge=1,
            lt=2**31,
            validation_alias=AliasChoices("n", "n_cmpl"),
        ),
    ] = 1
    #: Whether a stream ends with a chunk that has the usage and nothing else.
    has_usage_chunk: bool | None = Field(
        None, validation_alias=AliasPath("stream_options", "include_usage")
    )
    #: llama.cpp: whether a prefix of the prompt may come from the cache.
    cache_prompt: bool = True
    #: llama.cpp: whether a stream has the progress of the prefill.
    return_progress: bool = False

    def with_api_fields(self, request: ParsedRequest) -> ParsedRequest:
        """Apply the fields of OpenAI's older API to a request."""
        n_logprobs = request.generation.logprobs
        if self.logprobs is True:  # a chat
            n_logprobs = self.top_logprobs
        elif self.logprobs is not None and self.logprobs is not False:  # a number
            n_logprobs = self.logprobs
        warnings = request.warnings
        if self.top_logprobs and self.logprobs is not True:
            warnings = (*warnings, "top_logprobs: ignored, since logprobs is not true")
        generation = replace(
            request.generation,
            logprobs=n_logprobs,
            uses_cache=self.cache_prompt,
            reports_prefill=self.return_progress and self.stream,
        )
        return replace(
            request,
            generation=generation,
            warnings=warnings,
            n=self.n,
            has_usage_chunk=bool(self.has_usage_chunk),
        )


class OpenAIWriter(AnswerWriter):
    """Writes chat completions or text completions."""

    #: The field ``object`` of a whole response.
    object_type: str
    #: The field ``object`` of a chunk.
    chunk_type: str
    #: The prefix of ids.
    id_prefix: str
    #: Whether the last chunk of a stream has the usage without being asked.
    always_has_usage: ClassVar[bool] = False

    def __init__(self, context: AnswerContext) -> None:
        super().__init__(context)
        self._has_logprobs = self._first.generation.logprobs is not None
        #: The log-probabilities of each answer, as lists by the names of their fields.
        self._logprobs: list[dict[str, list[Any]]] = [{} for _ in self._answers]
        #: specgen's events of each answer since its last chunk, if the request wants them.
        self._events: list[list[Json]] = [[] for _ in self._answers]

    # --- what chats and texts have in different forms ---------------------------------------------

    @abstractmethod
    def _delta_field(self, delta: Json) -> Json:
        """Return the addition to an answer as a field of the choice in a chunk."""

    @abstractmethod
    def _answer_field(self, number: int) -> Json:
        """Return the whole answer as a field of the choice in a whole response."""

    @abstractmethod
    def _logprobs_of(
        self,
        number: int,
        pieces: Sequence[Piece],
    ) -> dict[str, list[Any]]:
        """Return the log-probabilities of pieces that are about to be added to an answer.

        Returns:
            Lists by the names of their fields.
        """

    # --- chunks and whole responses ---------------------------------------------------------------

    def feed(self, number: int, event: Event) -> list[Json]:
        """Return the chunks for an event of an answer, with specgen's own events if wanted."""
        chunks = super().feed(number, event)
        if self._first.streams and self._first.speculative.events:
            # Events without chunks wait for the next chunk.
            self._events[number].append(to_json_object(event))
            if chunks:
                chunks[0]["events"] = self._events[number]
                self._events[number] = []
        return chunks

    def whole(self) -> Json:
        """Return the whole response."""
        choices = [self._choice(number) for number in range(len(self._answers))]
        return {
            **self._head(self.object_type),
            "choices": choices,
            **self._figures(),
        }

    def _figures(self, number: int | None = None) -> Json:
        """Return the figures of all APIs, and those that vLLM has in this one."""
        figures = super()._figures(number)
        finished = [answer.finished for answer in self._answers]
        # Like vLLM's, they describe a single answer.
        if len(finished) == 1 and finished[0] is not None:
            metrics = vllm_metrics(finished[0])
            if metrics is not None:
                figures["metrics"] = {"speculative_decoding": metrics}
        return figures

    def _head(self, object_type: str) -> Json:
        """Return the fields that all chunks and whole responses begin with."""
        return {
            "id": f"{self.id_prefix}-{self._context.identity}",
            "object": object_type,
            "created": self._context.created,
            "model": self._context.model,
            "system_fingerprint": f"build-{__version__}",
        }

    def _choice(self, number: int) -> Json:
        """Return the item of ``choices`` that has a whole answer."""
        return {
            "index": number,
            **self._answer_field(number),
            "logprobs": self._logprobs[number] if self._has_logprobs else None,
            **self._ending(self._answers[number]),
        }

    def _chunk(
        self,
        number: int,
        delta: Json,
        ending: Json | None = None,
    ) -> Json:
        """Return a chunk about one answer.

        Args:
            number: The number of the answer.
            delta: The addition to the answer, with the fields of a chat's delta.
            ending: The fields that the choice has at the end of the answer.
        """
        choice = {
            "index": number,
            **self._delta_field(delta),
            "logprobs": None,
            "finish_reason": None,
            **(ending or {}),
        }
        return {**self._head(self.chunk_type), "choices": [choice]}

    def _ending_chunk(self, number: int) -> Json:
        return self._chunk(number, {}, self._ending(self._answers[number]))

    def _write_progress(
        self,
        number: int,
        event: PrefillEvent,
    ) -> list[Json]:
        """Return a chunk with the progress of the prefill, if the request wants it."""
        if not self._first.generation.reports_prefill:
            return []
        progress = {
            "total": event.n_prompt_tokens,
            "cache": event.n_cached_tokens,
            "processed": event.n_prefilled,
            "time_ms": round(1000.0 * event.spent_s),
        }
        return [{**self._chunk(number, {}), "prompt_progress": progress}]

    def _write_deltas(
        self,
        number: int,
        deltas: list[Delta],
        event: CommittedEvent | None,
    ) -> list[Json]:
        chunks = [
            self._chunk(number, _delta_object(delta))
            for delta in deltas
            if delta.text or delta.kind == "call"
        ]
        if event is not None and self._has_logprobs:
            # The first chunk has the log-probabilities of all tokens of the event. If their text is
            # held back, that chunk is empty otherwise.
            if not chunks:
                chunks.append(self._chunk(number, {}))
            self._add_logprobs(number, chunks[0], event.pieces)
        return chunks

    def _add_logprobs(
        self,
        number: int,
        chunk: Json,
        pieces: Sequence[Piece],
    ) -> None:
        """Add the log-probabilities of pieces to a chunk, and to those of the whole answer."""
        logprobs = self._logprobs_of(number, pieces)
        chunk["choices"][0]["logprobs"] = logprobs
        for name, values in logprobs.items():
            self._logprobs[number].setdefault(name, []).extend(values)

    def _write_end(self, number: int) -> list[Json]:
        """Return the last chunks of an answer: why it ended, and after all answers the figures."""
        chunks = [self._ending_chunk(number)]
        if any(answer.finished is None for answer in self._answers):
            return chunks
        # The last chunk of the last answer has the figures.
        figures = self._figures()
        if self._first.has_usage_chunk:
            chunks.append({**chunks[-1], "choices": []})
        elif not self.always_has_usage:  # OpenAI's clients would count it twice
            figures = own_figures(figures)
        chunks[-1] |= figures
        return chunks

    def _ending(self, answer: Answer) -> Json:
        """Return the fields of a choice that say why its answer ended."""
        ending: Json = {"finish_reason": answer.finish_reason}
        if answer.finish_reason == "stop" and answer.stop_string is not None:
            ending["stop_reason"] = answer.stop_string
        return ending


def _delta_object(delta: Delta) -> Json:
    """Return an addition to an answer with the fields of a chat's delta."""
    match delta.kind:
        case "call":
            return {"tool_calls": [{"index": delta.number, **call_object(delta)}]}
        case "arguments":
            function = {"arguments": delta.text}
            return {"tool_calls": [{"index": delta.number, "function": function}]}
        case "content":
            return {"content": delta.text}
        case "thought":
            return {"reasoning_content": delta.text}


def call_object(call: Delta) -> Json:
    """Return a call in OpenAI's form."""
    function = {"name": call.name, "arguments": call.text}
    return {
        "id": call.identity,
        "type": "function",
        "function": function,
    }


# --- log-probabilities ----------------------------------------------------------------------------


def own_logprob(piece: Piece) -> TokenLogprob | None:
    """Return the entry of a piece's token among its likely tokens; None if the token was forced."""
    for top in piece.top_logprobs:
        if top.token_id == piece.token_id:
            return top
    return None


def logprob_entries(pieces: Sequence[Piece], n_top: int | None) -> list[Json]:
    """Return an entry for each token that was not forced, with the likeliest tokens at its place.

    Args:
        pieces: The tokens.
        n_top: The number of likeliest tokens; None for all that are known.
    """
    entries: list[Json] = []
    for piece in pieces:
        own = own_logprob(piece)
        if own is not None:
            top_entries = [logprob_entry(top) for top in piece.top_logprobs[:n_top]]
            entries.append({**logprob_entry(own), "top_logprobs": top_entries})
    return entries


def logprob_entry(token: TokenLogprob) -> Json:
    """Return a token with its log-probability, in OpenAI's form."""
    return {
        "id": token.token_id,
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.bytes),
    }
