"""Ollama's endpoints: ``/api/chat`` and ``/api/generate``.

Their requests are read as OpenAI's; their answers have a form of their own.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from specgen.events import CommittedEvent
from specgen.serve.formats.answer_writer import AnswerContext, AnswerWriter
from specgen.serve.formats.chat_completions import read_chat
from specgen.serve.formats.completions import read_completion
from specgen.serve.formats.delta import Delta
from specgen.serve.formats.fields import Fields, Json, Schema, parse
from specgen.serve.formats.figures import own_figures
from specgen.serve.formats.openai_common import logprob_entries
from specgen.serve.formats.parsed_request import Defaults, ParsedRequests

# --- requests -------------------------------------------------------------------------------------


class OllamaRequest(Fields):
    """The fields of both endpoints that differ from OpenAI's."""

    #: Samplers, and when the answer ends.
    options: dict[str, Any] = {}
    stream: bool = True
    #: A JSON schema, or ``json`` for any object.
    format: Schema | Literal["", "json"] = ""
    #: Whether the model thinks, or how much.
    think: bool | str | None = None

    def openai_body(self, **fields: Any) -> Json:
        """Return the body of a request in OpenAI's form, with these fields of a text or a chat."""
        body = {
            **(self.model_extra or {}),
            **self.options,
            **fields,
            "stream": self.stream,
        }
        max_tokens = body.pop("num_predict", None)
        if isinstance(max_tokens, int):
            max_tokens = max(max_tokens, -1)
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        if self.format == "json":
            body["response_format"] = {"type": "json_object"}
        elif self.format:
            body["response_format"] = {"type": "json_schema", "schema": self.format}
        if isinstance(self.think, str):
            body["reasoning_effort"] = self.think
        elif self.think is not None:
            body["enable_thinking"] = self.think
        return body


class OllamaChatRequest(OllamaRequest):
    """The body of a request for the next turn of a conversation: ``/api/chat``."""

    #: Messages in OpenAI's form, with Ollama's fields.
    messages: list[Any] = []


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


def read_ollama_chat(body: Json, defaults: Defaults) -> ParsedRequests:
    """Read a request for the next turn of a chat; one without messages only loads the model."""
    asked = parse(OllamaChatRequest, body)
    if asked.messages:
        requests = read_chat(asked.openai_body(messages=asked.messages), defaults)
    else:
        requests = _loading_only(asked, defaults)
    return _for_ollama(requests, answer_field="message")


def read_ollama_generate(body: Json, defaults: Defaults) -> ParsedRequests:
    """Read a request for the answer to a text, for what follows it, or for what fills a gap.

    One without a text only loads the model.
    """
    asked = parse(OllamaGenerateRequest, body)
    if not asked.prompt:
        requests = _loading_only(asked, defaults)
    elif asked.raw or asked.suffix:
        fields = asked.openai_body(prompt=asked.prompt, suffix=asked.suffix)
        requests = read_completion(fields, defaults)
    else:
        messages: list[Json] = []
        if asked.system:
            messages.append({"role": "system", "content": asked.system})
        messages.append(
            {
                "role": "user",
                "content": asked.prompt,
                "images": asked.images,
            }
        )
        requests = read_chat(asked.openai_body(messages=messages), defaults)
    return _for_ollama(requests, answer_field="response")


def _loading_only(asked: OllamaRequest, defaults: Defaults) -> ParsedRequests:
    body = {
        "prompt": " ",
        "max_tokens": 0,
        "stream": asked.stream,
    }
    return read_completion(body, defaults)


def _for_ollama(
    requests: ParsedRequests, *, answer_field: Literal["message", "response"]
) -> ParsedRequests:
    writer = functools.partial(OllamaWriter, answer_field=answer_field)
    return tuple(replace(request, n=1, writer=writer) for request in requests)


# --- answers --------------------------------------------------------------------------------------


class OllamaWriter(AnswerWriter):
    """Writes one answer, whole or in lines.

    Args:
        context: What all writers know.
        answer_field: The field that has the answer.
    """

    form: ClassVar[Literal["lines"]] = "lines"

    def __init__(
        self, context: AnswerContext, *, answer_field: Literal["message", "response"]
    ) -> None:
        super().__init__(context)
        self._answer_field = answer_field
        self._logprobs: list[Json] = []

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

    def _add(
        self,
        _number: int,
        deltas: list[Delta],
        event: CommittedEvent | None,
    ) -> list[Json]:
        lines: list[Json] = []
        for delta in deltas:
            if delta.kind == "content":
                lines.append(self._line(delta.text, ""))
            elif delta.kind == "thought":
                lines.append(self._line("", delta.text))
        n_top = self._first.generation.logprobs
        if event is not None and n_top is not None:
            found = logprob_entries(event.pieces, n_top)
            lines = lines or [self._line("", "")]
            lines[0]["logprobs"] = found
            self._logprobs += found
        return lines

    def _end(self, _number: int) -> list[Json]:
        return [{**self._line("", "", self._answers[0].calls), **self._ending()}]

    def _line(
        self,
        text: str,
        thought: str,
        calls: Sequence[Delta] = (),
    ) -> Json:
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
        created = datetime.datetime.fromtimestamp(self._context.created, datetime.timezone.utc)
        return {
            "model": self._context.model,
            "created_at": created.isoformat(),
            **answer,
            "done": False,
        }

    def _ending(self) -> Json:
        """Return the fields of the last line."""
        reason: str = self._answers[0].finish_reason
        if self._first.generation.max_tokens == 0:
            reason = "load"
        elif reason == "tool_calls":
            reason = "stop"
        figures = self._figures()
        prompt_ns = int(1e6 * figures["timings"]["prompt_ms"])
        answer_ns = int(1e6 * figures["timings"]["predicted_ms"])
        return {
            "done": True,
            "done_reason": reason,
            "total_duration": prompt_ns + answer_ns,
            "load_duration": 0,
            "prompt_eval_count": figures["usage"]["prompt_tokens"],
            "prompt_eval_duration": prompt_ns,
            "eval_count": figures["usage"]["completion_tokens"],
            "eval_duration": answer_ns,
            **own_figures(figures),
        }


def _call_object(call: Delta) -> Json:
    return {"function": {"name": call.name, "arguments": json.loads(call.text)}}


def ollama_embeddings(
    vectors: Sequence[str],
    n_tokens: int,
    model: str,
    warnings: Sequence[str],
) -> bytes:
    """Return the body of a response with embeddings.

    Clients of the older endpoint read ``embedding``. For the arguments see `embedding_response`.
    """
    rest: Json = {
        "model": model,
        "prompt_eval_count": n_tokens,
        "warnings": list(warnings),
    }
    data = ", ".join(vectors)
    return (f'{{"embedding": {vectors[0]}, "embeddings": [{data}], {json.dumps(rest)[1:]}').encode()
