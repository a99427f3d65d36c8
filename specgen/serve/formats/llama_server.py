"""The endpoints of llama.cpp's own server: ``/completion`` and ``/infill``.

Their requests have OpenAI's fields and more, and so have their answers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from specgen.events import CommittedEvent, Event, Piece
from specgen.serve.formats.answer_writer import AnswerContext
from specgen.serve.formats.completions import (
    CompletionRequest,
    CompletionWriter,
    parsed_completions,
)
from specgen.serve.formats.delta import Delta
from specgen.serve.formats.fields import Fields, Json, parse
from specgen.serve.formats.figures import own_figures
from specgen.serve.formats.openai_common import MAX_LOGPROBS, OpenAIRequest, logprob_entries
from specgen.serve.formats.parsed_request import (
    NO_DEFAULTS,
    Defaults,
    ParsedRequest,
    ParsedRequests,
)
from specgen.serve.formats.request_errors import BodyError, shown
from specgen.session.prompts.infill import ContextFile, Gap
from specgen.system.files import as_json

# --- requests -------------------------------------------------------------------------------------


class LlamaServerRequest(OpenAIRequest):
    """The fields of both endpoints that OpenAI's do not have."""

    #: The only fields that a whole response shall have; all if missing.
    response_fields: list[str] | None = None
    #: The time after which an answer ends as soon as it has a line break; 0 for no limit.
    t_max_predict_ms: float = 0.0
    #: The minimum indentation, in characters: the answer ends before a line with less.
    n_indent: Annotated[int, Field(ge=0, le=1000)] = 0
    #: The number of likely tokens whose log-probabilities are wanted.
    n_probs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    #: Whether a whole response has the tokens of the answer.
    return_tokens: bool = False


class LlamaCompletionRequest(LlamaServerRequest, CompletionRequest):
    """The body of a request for the continuation of texts."""


class InfillFile(Fields):
    """Another file of the repository."""

    filename: str = "tmp"
    text: str
    #: The time at which an editor read it, which specgen ignores.
    time: Any = None


class InfillRequest(LlamaServerRequest):
    """The body of a request for the text in a gap."""

    #: The text before the gap.
    input_prefix: str = ""
    #: The text with which the gap already starts.
    prompt: str = ""
    #: The text after the gap.
    input_suffix: str = ""
    input_extra: list[InfillFile] = []


def read_llama_cpp_completion(
    body: Json,
    defaults: Defaults,
    *,
    or_openai: bool = False,
) -> ParsedRequests:
    """Read a request for the continuation of texts.

    Args:
        body: The body of the request.
        defaults: The values of the fields that it leaves out.
        or_openai: Whether the endpoint is also OpenAI's. If so, a request that only a client of
            OpenAI's API makes (several prompts or answers, or the usage in a chunk of its own) gets
            its answer in OpenAI's form.

    Raises:
        BodyError: If a field cannot be honoured.
    """
    fields = parse(LlamaCompletionRequest, body)
    requests = parsed_completions(fields, defaults)
    is_openai = len(requests) > 1 or fields.n > 1 or requests[0].has_usage_chunk
    if or_openai and is_openai:
        return requests
    return tuple(_as_llama_cpp(fields, request) for request in requests)


def read_infill(body: Json, defaults: Defaults = NO_DEFAULTS) -> ParsedRequests:
    """Read a request for the text in a gap.

    Editors also send requests without any text, to warm the server up.

    Raises:
        BodyError: If a field cannot be honoured.
    """
    fields = parse(InfillRequest, body)
    if fields.n > 1:
        raise BodyError("n", f"give 1, not {shown(fields.n)}: a gap gets one answer")
    gap = Gap(
        prefix=fields.input_prefix + fields.prompt,
        suffix=fields.input_suffix,
        context=tuple(ContextFile(file.filename, file.text) for file in fields.input_extra),
    )
    request = fields.parsed("completion", defaults, LlamaServerWriter)
    return (_as_llama_cpp(fields, replace(request, gap=gap)),)


def _as_llama_cpp(fields: LlamaServerRequest, request: ParsedRequest) -> ParsedRequest:
    """Return the request with llama.cpp's own fields, and with its form of answers."""
    generation = replace(request.generation, n_indent=fields.n_indent)
    if fields.n_probs:
        generation = replace(generation, logprobs=fields.n_probs)
    writer = functools.partial(
        LlamaServerWriter, fields=fields.response_fields, has_tokens=fields.return_tokens
    )
    return replace(
        request,
        generation=generation,
        has_usage_chunk=False,  # in llama.cpp's form, the last chunk of each answer has the usage
        writer=writer,
        time_limit_s=fields.t_max_predict_ms / 1000.0,
    )


# --- answers --------------------------------------------------------------------------------------


class LlamaServerWriter(CompletionWriter):
    """Writes text completions with llama.cpp's fields next to OpenAI's.

    Args:
        context: What all writers know.
        fields: The paths of the only fields that a whole response shall have; None or empty for
            all fields.
        has_tokens: Whether a whole response has the tokens of the answer.
    """

    def __init__(
        self,
        context: AnswerContext,
        *,
        fields: Sequence[str] | None = None,
        has_tokens: bool = False,
    ) -> None:
        super().__init__(context)
        self._fields = fields
        self._has_tokens = has_tokens
        #: The tokens of each answer.
        self._tokens: list[list[int]] = [[] for _ in self._answers]
        #: How many of them chunks have had. There may be more, whose text is held back.
        self._n_sent_tokens = [0] * len(self._answers)
        #: The log-probabilities of each answer.
        self._probabilities: list[list[Json]] = [[] for _ in self._answers]

    def begin(self, n_prompt_tokens: int) -> list[Json]:
        """Return the prompt of each answer, if it is wanted."""
        return [self._with_llama_fields(chunk) for chunk in super().begin(n_prompt_tokens)]

    def feed(self, number: int, event: Event) -> list[Json]:
        """Return the chunks for an event of an answer."""
        return [self._with_llama_fields(chunk) for chunk in super().feed(number, event)]

    def whole(self) -> Any:
        """Return the whole response: one object, or a list of one for each answer."""
        bodies = [self._whole_answer(number) for number in range(len(self._answers))]
        if len(bodies) == 1:
            return bodies[0]
        return bodies

    def _write_deltas(
        self,
        number: int,
        deltas: list[Delta],
        event: CommittedEvent | None,
    ) -> list[Json]:
        """Return OpenAI's chunks, the first one with llama.cpp's fields about the tokens."""
        chunks = super()._write_deltas(number, deltas, event)
        pieces: tuple[Piece, ...] = ()
        if event is not None:
            pieces = event.pieces
        tokens = [piece.token_id for piece in pieces]
        self._tokens[number] += tokens
        if chunks:
            chunks[0]["tokens"] = self._take_unsent_tokens(number)
        if event is not None and self._has_logprobs:
            entries = logprob_entries(pieces, self._first.generation.logprobs)
            chunks[0]["completion_probabilities"] = entries
            self._probabilities[number] += entries
        return chunks

    def _take_unsent_tokens(self, number: int) -> list[int]:
        """Return the tokens of an answer that no chunk has had yet; this chunk will have them."""
        n_sent = self._n_sent_tokens[number]
        self._n_sent_tokens[number] = len(self._tokens[number])
        return self._tokens[number][n_sent:]

    def _write_end(self, number: int) -> list[Json]:
        last_chunk = {
            **self._ending_chunk(number),
            "tokens": self._take_unsent_tokens(number),
            **own_figures(self._figures(number)),
        }
        return [last_chunk]

    def _whole_answer(self, number: int) -> Json:
        """Return the whole response for one answer, or only the requested fields of it."""
        body = self._with_llama_fields(
            {
                **self._head(self.object_type),
                "choices": [self._choice(number)],
                **self._figures(number),
            }
        )
        body["tokens"] = []
        if self._has_tokens:
            body["tokens"] = self._tokens[number]
        if self._has_logprobs:
            body["completion_probabilities"] = self._probabilities[number]
        if not self._fields:
            return body
        values = {path: _value_at(body, path) for path in self._fields}
        return {path: value for path, value in values.items() if value is not None}

    def _with_llama_fields(self, body: Json) -> Json:
        """Add llama.cpp's fields to a chunk or a whole response about one answer."""
        (choice,) = body["choices"]
        body["index"] = choice["index"]
        body["content"] = choice["text"]
        body["stop"] = choice["finish_reason"] is not None
        if body["stop"]:
            body |= self._final_fields(choice, body["timings"])
        return body

    def _final_fields(self, choice: Json, timings: Json) -> Json:
        """Return the fields that only the last chunk and a whole response have."""
        request = self._first
        answer = self._answers[choice["index"]]
        finished = answer.finished
        stop_type = "limit"
        if "stop_reason" in choice:  # a stop text ended the answer
            stop_type = "word"
        elif choice["finish_reason"] == "stop":
            stop_type = "eos"
        return {
            "generation_settings": {
                **as_json(request.sampling),
                "n_predict": request.generation.max_tokens,
                "stream": request.streams,
            },
            "prompt": self._context.prompts[choice["index"]],
            "has_new_line": "\n" in answer.text("content"),
            "stop_type": stop_type,
            "stopping_word": choice.get("stop_reason", ""),
            "truncated": finished is not None and finished.finish_reason == "context",
            "tokens_predicted": timings["predicted_n"],
            "tokens_evaluated": timings["cache_n"] + timings["prompt_n"],
            "tokens_cached": timings["cache_n"],
        }


def _value_at(body: Any, path: str) -> Any:
    """Return the value at a path such as ``timings/predicted_n``; None if there is none."""
    for name in path.split("/"):
        if not isinstance(body, dict):
            return None
        body = body.get(name)
    return body
