"""The APIs of other local servers, llama.cpp's own paths and ollama's: their requests are read as
OpenAI's, and their answers have more fields, or another form.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from specgen.events import CommittedEvent, Event
from specgen.serve.formats.answers import AnswerWriter, own_figures
from specgen.serve.formats.openai import (
    ChatWriter,
    TextBody,
    logprob_entries,
    read_chat,
    read_completion,
)
from specgen.serve.formats.request import (
    NO_DEFAULTS,
    BodyError,
    Defaults,
    Fields,
    Json,
    Request,
    Requests,
    Schema,
    parse,
    shown,
)
from specgen.serve.formats.tool_calls import Delta
from specgen.session.prompts.infill import ContextFile, Gap
from specgen.system.files import as_json

# --- llama.cpp ------------------------------------------------------------------------------------


class _File(Fields):
    filename: str = "tmp"
    text: str
    time: Any = None  # when an editor saw it


class _InfillBody(TextBody):
    input_prefix: str = ""
    prompt: str = ""  # the text with which the gap already starts
    input_suffix: str = ""
    input_extra: list[_File] = []


def read_llama_cpp_completion(
    body: Json, defaults: Defaults, *, or_openai: bool = False
) -> Requests:
    """Read a body of llama.cpp's path; what only OpenAI's clients ask for gets their form
    (`or_openai`).
    """
    found = read_completion(body, defaults)
    if or_openai and (len(found) > 1 or found[0].n > 1 or found[0].has_usage_alone):
        return found
    asked = parse(TextBody, body)
    return tuple(_as_llama_cpp(asked, each) for each in found)


def read_infill(body: Json, defaults: Defaults = NO_DEFAULTS) -> Requests:
    """Read a body for a text with a gap. Editors send one without a text, to warm the server up."""
    asked = parse(_InfillBody, body)
    if asked.n > 1:
        raise BodyError("n", f"{shown(asked.n)} answers; a gap has one")
    files = tuple(ContextFile(file.filename, file.text) for file in asked.input_extra)
    gap = Gap(asked.input_prefix + asked.prompt, asked.input_suffix, context=files)
    empty = asked.request("completion", **asked.common(defaults))
    return (_as_llama_cpp(asked, replace(empty, gap=gap)),)


def _as_llama_cpp(asked: TextBody, request: Request) -> Request:
    generation = replace(request.generation, n_indent=asked.n_indent)
    if asked.n_probs:
        generation = replace(generation, logprobs=asked.n_probs)
    # The last chunk has the usage.
    return replace(
        request,
        generation=generation,
        has_usage_alone=False,
        writer=functools.partial(
            LlamaCppWriter, fields=asked.response_fields, has_tokens=asked.return_tokens
        ),
        lines_s=asked.t_max_predict_ms / 1000.0,
    )


class LlamaCppWriter(ChatWriter):
    """Writes text completions with llama.cpp's fields beside the others; of a whole one only
    `fields`, if any.
    """

    def __init__(
        self,
        *args: Any,
        fields: Sequence[str] | None = None,
        has_tokens: bool = False,
        **named: Any,
    ) -> None:
        super().__init__(*args, **named)
        self._fields, self._has_tokens = fields, has_tokens
        self._tokens: list[list[int]] = [[] for _ in self._answers]
        self._probabilities: list[list[Json]] = [[] for _ in self._answers]

    def begin(self, n_prompt_tokens: int) -> list[Json]:
        return [self._filled(each) for each in super().begin(n_prompt_tokens)]

    def feed(self, number: int, event: Event) -> list[Json]:
        return [self._filled(each) for each in super().feed(number, event)]

    def _add(self, number: int, deltas: list[Delta], event: CommittedEvent | None) -> list[Json]:
        chunks = super()._add(number, deltas, event)
        tokens = [piece.token_id for piece in event.pieces] if event is not None else []
        for chunk in chunks[:1]:
            chunk["tokens"] = tokens
        self._tokens[number] += tokens
        if event is not None and self._has_logprobs:
            found = logprob_entries(event.pieces, self._first.generation.logprobs)
            chunks[0]["completion_probabilities"] = found
            self._probabilities[number] += found
        return chunks

    def _end(self, number: int) -> list[Json]:
        chunk = self._chunk(number, {}, self._ending(number))
        return [{**chunk, **own_figures(self._figures(number))}]

    def whole(self) -> Any:
        found = [self._whole(number) for number in range(len(self._answers))]
        return found if len(found) > 1 else found[0]

    def _whole(self, number: int) -> Json:
        choices = [self._choice(number)]
        body = self._filled({**self._head, "choices": choices, **self._figures(number)})
        body["tokens"] = self._tokens[number] if self._has_tokens else []
        if self._has_logprobs:
            body["completion_probabilities"] = self._probabilities[number]
        if not self._fields:
            return body
        found = {path: _at(body, path) for path in self._fields}
        return {path: value for path, value in found.items() if value is not None}

    def _filled(self, body: Json) -> Json:
        (choice,) = body["choices"]
        reason, number = choice["finish_reason"], choice["index"]
        body |= {"index": number, "content": choice["text"], "stop": reason is not None}
        if reason is not None:
            timings, stop_type = body["timings"], "eos" if reason == "stop" else "limit"
            stop_type = "word" if "stop_reason" in choice else stop_type
            request, finished = self._first, self._answers[number].finished
            body |= {
                "generation_settings": {
                    **as_json(request.sampling),
                    "n_predict": request.generation.max_tokens,
                    "stream": request.streams,
                },
                "prompt": self._prompts[number],
                "has_new_line": "\n" in self._answers[number].text("content"),
                "stop_type": stop_type,
                "stopping_word": choice.get("stop_reason", ""),
                "truncated": finished is not None and finished.finish_reason == "context",
                "tokens_predicted": timings["predicted_n"],
                "tokens_evaluated": timings["cache_n"] + timings["prompt_n"],
                "tokens_cached": timings["cache_n"],
            }
        return body


def _at(body: Any, path: str) -> Any:
    for name in path.split("/"):
        body = body.get(name) if isinstance(body, dict) else None
    return body


# --- ollama ---------------------------------------------------------------------------------------


class _Body(Fields):
    messages: list[Any] = []
    options: dict[str, Any] = {}
    stream: bool = True
    format: Schema | Literal["", "json"] = ""
    think: bool | str | None = None
    # of /api/generate
    prompt: str = ""
    suffix: str = ""
    system: str = ""
    images: list[Any] = []
    raw: bool = False

    def openai(self, **fields: Any) -> dict[str, Any]:
        """Return the body of a request at OpenAI, with these fields of a text or a chat."""
        found = {**(self.model_extra or {}), **self.options, **fields, "stream": self.stream}
        n_most = found.pop("num_predict", None)
        if n_most is not None:
            found["max_tokens"] = -1 if isinstance(n_most, int) and n_most < 0 else n_most
        if self.format == "json":
            found["response_format"] = {"type": "json_object"}
        elif self.format:
            found["response_format"] = {"type": "json_schema", "schema": self.format}
        if isinstance(self.think, str):
            found["reasoning_effort"] = self.think
        elif self.think is not None:
            found["enable_thinking"] = self.think
        return found


def read_ollama(body: Json, defaults: Defaults, *, field: str) -> Requests:
    """Read a body for the next turn of a chat (`field` is ``message``), or for the answer to a
    text, what follows it, or what comes before a suffix (``response``). One without a text only
    lets the model be loaded.
    """
    asked = parse(_Body, body)
    system = [{"role": "system", "content": asked.system}] if asked.system else []
    turn = {"role": "user", "content": asked.prompt, "images": asked.images}
    is_chat = field == "message"
    if not (asked.messages if is_chat else asked.prompt):
        fields = {"prompt": " ", "max_tokens": 0, "stream": asked.stream}
        requests = read_completion(fields, defaults)
    elif not is_chat and (asked.raw or asked.suffix):
        fields = asked.openai(prompt=asked.prompt, suffix=asked.suffix)
        requests = read_completion(fields, defaults)
    else:
        turns = asked.messages if is_chat else [*system, turn]
        requests = read_chat(asked.openai(messages=turns), defaults)
    writer = functools.partial(OllamaWriter, field=field)
    return tuple(replace(request, n=1, writer=writer) for request in requests)


def ollama_embeddings(
    vectors: Sequence[str], n_tokens: int, model: str, warnings: Sequence[str]
) -> bytes:
    """Return the body of a response with vectors that are JSON already. Clients of the older path
    read `embedding`.
    """
    rest: Json = {"model": model, "prompt_eval_count": n_tokens, "warnings": [*warnings]}
    data = ", ".join(vectors)
    first = f'{{"embedding": {vectors[0]}, "embeddings": [{data}], '
    return f"{first}{json.dumps(rest)[1:]}".encode()


class OllamaWriter(AnswerWriter):
    """Writes one answer, whole or in lines. `field` has the answer: ``message`` in a chat, or
    ``response``.
    """

    form: ClassVar[Literal["lines"]] = "lines"

    def __init__(self, *args: Any, field: str, **named: Any) -> None:
        super().__init__(*args, **named)
        self._field = field
        self._logprobs: list[Json] = []

    def fail(self, error: Json) -> list[Json]:
        return [{"error": error["error"]["message"]}]

    def whole(self) -> Json:
        (answer,) = self._answers
        logprobs = {"logprobs": self._logprobs} if self._logprobs else {}
        text, thought = answer.text("content"), answer.text("thought")
        return {**self._line(text, thought, answer.calls), **logprobs, **self._ending()}

    def _add(self, _number: int, deltas: list[Delta], event: CommittedEvent | None) -> list[Json]:
        lines = [
            self._line(delta.text, "") if delta.kind == "content" else self._line("", delta.text)
            for delta in deltas
            if delta.kind in ("content", "thought")
        ]
        n_top = self._first.generation.logprobs
        if event is not None and n_top is not None:
            found = logprob_entries(event.pieces, n_top)
            lines = lines or [self._line("", "")]
            lines[0]["logprobs"] = found
            self._logprobs += found
        return lines

    def _end(self, _number: int) -> list[Json]:
        return [{**self._line("", "", self._answers[0].calls), **self._ending()}]

    def _line(self, text: str, thought: str, calls: list[Delta] | None = None) -> Json:
        said: Json = {"thinking": thought} if thought else {}
        if calls:
            said["tool_calls"] = [
                {"function": {"name": call.name, "arguments": json.loads(call.text)}}
                for call in calls
            ]
        if self._field == "message":
            said = {"message": {"role": "assistant", "content": text, **said}}
        else:
            said["response"] = text
        created = datetime.datetime.fromtimestamp(self._created, datetime.timezone.utc)
        return {"model": self._model, "created_at": created.isoformat(), **said, "done": False}

    def _ending(self) -> Json:
        figures, reason = self._figures(), str(self._answers[0].finish_reason)
        if self._first.generation.max_tokens == 0:
            reason = "load"
        timings, usage = figures["timings"], figures["usage"]
        prompt_ns, answer_ns = (int(1e6 * timings[each]) for each in ("prompt_ms", "predicted_ms"))
        return {
            "done": True,
            "done_reason": "stop" if reason == "tool_calls" else reason,
            "total_duration": prompt_ns + answer_ns,
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": prompt_ns,
            "eval_count": usage["completion_tokens"],
            "eval_duration": answer_ns,
            **own_figures(figures),
        }
