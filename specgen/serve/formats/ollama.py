"""Ollama's endpoints: ``/api/chat`` and ``/api/generate``.

Their requests are read as OpenAI's; their answers have a form of their own.
"""

from __future__ import annotations

import functools
import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import AliasChoices, AliasPath, Field

from specgen.events import CommittedEvent
from specgen.serve.formats.answer_writer import AnswerContext, AnswerWriter
from specgen.serve.formats.chat_completions import ChatCompletionRequest, parsed_chat_completion
from specgen.serve.formats.completions import (
    CompletionRequest,
    parsed_completions,
    read_completion,
)
from specgen.serve.formats.delta import Delta
from specgen.serve.formats.fields import Fields, Integer, Json, Schema, parse
from specgen.serve.formats.figures import own_figures
from specgen.serve.formats.ollama_models import timestamp
from specgen.serve.formats.openai_common import logprob_entries
from specgen.serve.formats.parsed_request import Defaults, ParsedRequests
from specgen.serve.formats.request_errors import BodyError, shown

# --- requests -------------------------------------------------------------------------------------


class OllamaRequest(Fields):
    """The fields of both endpoints that differ from OpenAI's."""

    #: Sampler options, and limits of the answer.
    options: dict[str, Any] = {}
    #: The maximum number of tokens of the answer, which is one of these options. As in Ollama, only
    #: a positive number is a limit.
    num_predict: Integer | None = Field(
        None,
        validation_alias=AliasChoices(AliasPath("options", "num_predict"), "num_predict"),
    )
    stream: bool = True
    #: A JSON schema, or ``json`` for any object.
    format: Schema | Literal["", "json"] = ""
    #: Whether the model thinks, or, as a text, how much it thinks.
    think: bool | str | None = None

    def openai_body(self, **fields: Any) -> Json:
        """Translate the common fields into the body of a request in OpenAI's form.

        Args:
            fields: The fields of the endpoint, already in OpenAI's form.
        """
        body = {
            **(self.model_extra or {}),
            **self.options,
            **fields,
            "stream": self.stream,
        }
        body.pop("num_predict", None)
        if self.num_predict is not None:
            body["max_tokens"] = self.num_predict if self.num_predict > 0 else -1
        if self.format == "json":
            body["response_format"] = {"type": "json_object"}
        elif self.format:
            body["response_format"] = {"type": "json_schema", "schema": self.format}
        if isinstance(self.think, str):
            body["reasoning_effort"] = self.think
        elif self.think is not None:
            body["enable_thinking"] = self.think
        return body


class _ChatInOpenAIForm(ChatCompletionRequest):
    """A request for a chat, translated into OpenAI's form."""

    form_field: ClassVar[str] = "format"


class _CompletionInOpenAIForm(CompletionRequest):
    """A request for the continuation of a text, translated into OpenAI's form."""

    form_field: ClassVar[str] = "format"


class OllamaChatRequest(OllamaRequest):
    """The body of a request for the next turn of a conversation: ``/api/chat``."""

    #: Messages in OpenAI's form, with Ollama's fields.
    messages: list[Any] = []
    #: Whether the oldest turns are left out if the conversation does not fit into the context.
    truncate: bool = True


class OllamaGenerateRequest(OllamaRequest):
    """The body of a request for the answer to a text: ``/api/generate``."""

    prompt: str = ""
    #: The text after the answer.
    suffix: str = ""
    #: The system message.
    system: str = ""
    images: list[Any] = []
    #: Whether the text is continued as it is, without the chat template.
    raw: bool = False
    #: The tokens of an earlier request and its answer, which the prompt follows.
    context: tuple[Integer, ...] = ()


def read_ollama_chat(body: Json, defaults: Defaults) -> ParsedRequests:
    """Read a request for the next turn of a chat. Without messages, it only loads the model.

    Raises:
        BodyError: If a field cannot be honoured.
    """
    fields = parse(OllamaChatRequest, body)
    if fields.messages:
        requests = _chat(fields.openai_body(messages=fields.messages), defaults)
    else:
        requests = _loading_only(fields, defaults)
    requests = tuple(replace(request, leaves_out_turns=fields.truncate) for request in requests)
    return _for_ollama(requests, answer_field="message")


def read_ollama_generate(body: Json, defaults: Defaults) -> ParsedRequests:
    """Read a request for the answer to a text, for its continuation, or for the text in a gap.

    Without a text, it only loads the model.

    Raises:
        BodyError: If a field cannot be honoured.
    """
    fields = parse(OllamaGenerateRequest, body)
    for name in ("context", "system"):
        if fields.raw and getattr(fields, name):
            raise BodyError(name, "with raw, the prompt must contain the whole conversation")
    if not fields.prompt and not fields.suffix:
        requests = _loading_only(fields, defaults)
    elif fields.raw or fields.suffix:
        text_body = fields.openai_body(prompt=fields.prompt, suffix=fields.suffix)
        requests = parsed_completions(parse(_CompletionInOpenAIForm, text_body), defaults)
    else:
        chat_body = fields.openai_body(messages=_generate_messages(fields))
        requests = _chat(chat_body, defaults)
    requests = tuple(
        replace(request, earlier_tokens=fields.context, needs_template=False)
        for request in requests
    )
    has_context = bool(fields.prompt) and not fields.raw
    return _for_ollama(requests, answer_field="response", has_context=has_context)


def _chat(openai_body: Json, defaults: Defaults) -> ParsedRequests:
    """Read a request for a chat that was translated into OpenAI's form."""
    return (parsed_chat_completion(parse(_ChatInOpenAIForm, openai_body), defaults),)


def _generate_messages(fields: OllamaGenerateRequest) -> list[Json]:
    """Return the conversation that the prompt is turned into."""
    messages: list[Json] = []
    if fields.system:
        messages.append({"role": "system", "content": fields.system})
    messages.append(
        {
            "role": "user",
            "content": fields.prompt,
            "images": fields.images,
        }
    )
    return messages


def _loading_only(fields: OllamaRequest, defaults: Defaults) -> ParsedRequests:
    """Return a request that loads the model and generates no token."""
    body = {
        "prompt": " ",
        "max_tokens": 0,
        "stream": fields.stream,
    }
    return read_completion(body, defaults)


def _for_ollama(
    requests: ParsedRequests,
    *,
    answer_field: Literal["message", "response"],
    has_context: bool = False,
) -> ParsedRequests:
    writer = functools.partial(OllamaWriter, answer_field=answer_field, has_context=has_context)
    return tuple(replace(request, n=1, writer=writer) for request in requests)


# --- unloading ------------------------------------------------------------------------------------

#: The units of durations in seconds, as Go writes them. A number without a unit is in seconds.
_UNITS_S = {
    "h": 3600.0,
    "m": 60.0,
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
    "\u00b5s": 1e-6,
    "ns": 1e-9,
    "": 1.0,
}
#: A part of a duration, such as ``1h`` and ``30m`` in ``1h30m``.
_DURATION_PART = re.compile(r"(\d+\.?\d*|\.\d+)(h|ms|m|s|us|\u00b5s|ns|$)", re.ASCII)
#: Longer times than this, in seconds, are unlimited. It is about 30 years.
_MAX_KEEP_S = 1e9


def keep_alive_s(body: Json) -> float | None:
    """Return how long a request wants the model to stay loaded after it, in seconds.

    Returns:
        0 to unload it right after the request; infinity for no limit, which is a negative number
        in a request; None if the request does not tell.

    Raises:
        BodyError: If the field is neither a number of seconds nor a duration.
    """
    value = body.get("keep_alive")
    if value is None:
        return None
    seconds = _duration_s(value) if isinstance(value, str) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise BodyError("keep_alive", f"give seconds, or a duration such as 5m, not {shown(value)}")
    if 0.0 <= seconds <= _MAX_KEEP_S:
        return float(seconds)
    return math.inf


def _duration_s(text: str) -> float | None:
    """Return a duration such as ``1h30m``, ``0.5s`` or ``-1`` in seconds; None if it is not one."""
    digits = text.removeprefix("-")
    seconds = 0.0
    place = 0
    while place < len(digits):
        part = _DURATION_PART.match(digits, place)
        if part is None:
            return None
        seconds += float(part[1]) * _UNITS_S[part[2]]
        place = part.end()
    if not digits:
        return None
    return seconds if digits == text else -seconds


def unload_answer(
    path: str,
    body: Json,
    model: str,
) -> Json | None:
    """Return the response to a request that does nothing but unload the model.

    Args:
        path: The path of the endpoint.
        body: The body of the request.
        model: The name of the model.

    Returns:
        None if the request wants an answer first.
    """
    answer: Json
    if path == "/api/chat" and not body.get("messages"):
        answer = {"message": {"role": "assistant", "content": ""}}
    elif path == "/api/generate" and not body.get("prompt") and not body.get("suffix"):
        answer = {"response": ""}
    else:
        return None
    return {
        "model": model,
        "created_at": timestamp(time.time()),
        **answer,
        "done": True,
        "done_reason": "unload",
    }


# --- answers --------------------------------------------------------------------------------------


class OllamaWriter(AnswerWriter):
    """Writes one answer, whole or as JSON lines.

    Args:
        context: The context of all writers.
        answer_field: The field of the answer: ``message`` in a chat, otherwise ``response``.
        has_context: Whether the last line has the tokens of the prompt and the answer, with which
            the next request can go on.
    """

    stream_format: ClassVar[Literal["lines"]] = "lines"

    def __init__(
        self,
        context: AnswerContext,
        *,
        answer_field: Literal["message", "response"],
        has_context: bool = False,
    ) -> None:
        super().__init__(context)
        self._answer_field = answer_field
        self._has_context = has_context
        #: The tokens of the answer.
        self._tokens: list[int] = []
        #: The log-probabilities of the answer.
        self._logprobs: list[Json] = []
        #: The number of calls that were already written.
        self._n_written_calls = 0

    def fail(self, error: Json) -> list[Json]:
        """Return the last line of a failed answer."""
        return [{"error": error["error"]["message"]}]

    def whole(self) -> Json:
        """Return the whole response."""
        (answer,) = self._answers
        body = self._line(answer.text("content"), answer.text("thought"), answer.calls)
        if self._logprobs:
            body["logprobs"] = self._logprobs
        return {**body, **self._ending()}

    def _write_deltas(
        self,
        _number: int,
        deltas: list[Delta],
        event: CommittedEvent | None,
    ) -> list[Json]:
        """Return a line for each addition, and one for calls that are complete now."""
        lines: list[Json] = []
        if event is not None:
            self._tokens += (piece.token_id for piece in event.pieces)
        for delta in deltas:
            if delta.kind == "content":
                lines.append(self._line(delta.text, ""))
            elif delta.kind == "thought":
                lines.append(self._line("", delta.text))
        lines += self._call_lines()
        n_top = self._first.generation.logprobs
        if event is not None and n_top is not None:
            entries = logprob_entries(event.pieces, n_top)
            lines = lines or [self._line("", "")]
            lines[0]["logprobs"] = entries
            self._logprobs += entries
        return lines

    def _call_lines(self) -> list[Json]:
        """Return a line with the calls that were not written yet; none if there are no such calls.

        As in Ollama, it comes before the last line, in which some clients read only the figures.
        """
        calls = self._answers[0].calls[self._n_written_calls :]
        self._n_written_calls += len(calls)
        if not calls:
            return []
        return [self._line("", "", calls)]

    def _write_end(self, _number: int) -> list[Json]:
        return [{**self._line("", ""), **self._ending()}]

    def _line(
        self,
        text: str,
        thought: str,
        calls: Sequence[Delta] = (),
    ) -> Json:
        """Return a line that is not the last, or the common fields of the last line."""
        answer: Json = {}
        if thought:
            answer["thinking"] = thought
        if calls:
            answer["tool_calls"] = [_call_object(call) for call in calls]
        if self._answer_field == "message":
            answer = {
                "message": {
                    "role": "assistant",
                    "content": text,
                    **answer,
                }
            }
        else:
            answer["response"] = text
        return {
            "model": self._context.model,
            "created_at": timestamp(self._context.created),
            **answer,
            "done": False,
        }

    def _ending(self) -> Json:
        """Return the fields that only the last line and a whole response have."""
        reason: str = self._answers[0].finish_reason
        if self._first.generation.max_tokens == 0:  # see `_loading_only`
            reason = "load"
        elif reason == "tool_calls":
            reason = "stop"
        figures = self._figures()
        prompt_ns = int(1e6 * figures["timings"]["prompt_ms"])
        answer_ns = int(1e6 * figures["timings"]["predicted_ms"])
        conversation: Json = {}
        if self._has_context:
            conversation["context"] = [*self._context.prompt_tokens[0], *self._tokens]
        return {
            "done": True,
            "done_reason": reason,
            "total_duration": prompt_ns + answer_ns,
            "load_duration": 0,
            "prompt_eval_count": figures["usage"]["prompt_tokens"],
            "prompt_eval_duration": prompt_ns,
            "eval_count": figures["usage"]["completion_tokens"],
            "eval_duration": answer_ns,
            **conversation,
            **own_figures(figures),
        }


def _call_object(call: Delta) -> Json:
    function = {
        "index": call.number,
        "name": call.name,
        "arguments": json.loads(call.text),
    }
    return {"id": call.identity, "function": function}


def ollama_embeddings(
    vectors: Sequence[str],
    n_tokens: int,
    model: str,
    warnings: Sequence[str],
) -> bytes:
    """Return the body of a response with embeddings, with the arguments of `embedding_response`.

    Clients of the older endpoint read ``embedding``, the first vector.
    """
    rest: Json = {
        "model": model,
        "prompt_eval_count": n_tokens,
        "warnings": list(warnings),
    }
    data = ", ".join(vectors)
    # Without its opening bracket, `rest` continues the object.
    return (f'{{"embedding": {vectors[0]}, "embeddings": [{data}], {json.dumps(rest)[1:]}').encode()
