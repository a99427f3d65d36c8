"""OpenAI's older API: chat and text completions, and embeddings, at the end."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AliasChoices, AliasPath, Field

from specgen import __version__
from specgen.errors import PromptError
from specgen.events import CommittedEvent, Event, Piece, ReadingEvent, TokenLogprob, to_json_object
from specgen.serve.formats.answers import AnswerWriter, own_figures
from specgen.serve.formats.call_values import arguments_of
from specgen.serve.formats.request import (
    NO_DEFAULTS,
    AnswerBody,
    BodyError,
    ChatBody,
    Conversation,
    Defaults,
    Fields,
    Json,
    Kind,
    Part,
    Parts,
    Request,
    Requests,
    is_begun,
    parse,
    shown,
    text_of,
)
from specgen.serve.formats.tool_calls import Delta
from specgen.session.prompts.infill import Gap
from specgen.session.prompts.prompt import tokens_of
from specgen.session.prompts.template import Message, Role, ToolCall
from specgen.system.arrays import Hidden

if TYPE_CHECKING:
    from specgen.llama.embeddings import Embedder

_MOST_LOGPROBS = 100
#: The most inputs of a request for embeddings, as at OpenAI.
_N_INPUTS = 2048


# --- requests -------------------------------------------------------------------------------------


class _Call(Fields):
    id: str = ""
    name: str = Field(validation_alias=AliasPath("function", "name"), min_length=1)
    #: Some clients send the object.
    arguments: str | dict[str, Any] | None = Field(
        None, validation_alias=AliasPath("function", "arguments")
    )


class _Function(Fields):
    """The older form of a call: its name is also its id."""

    name: Annotated[str, Field(min_length=1)]
    arguments: str | dict[str, Any] = ""


class _Message(Fields):
    role: Literal["assistant", "developer", "function", "system", "tool", "user"]
    content: Parts = []
    name: str | None = None
    function_call: _Function | None = None
    reasoning_content: Parts = Field(
        [], validation_alias=AliasChoices("reasoning_content", "reasoning", "thinking")
    )
    tool_calls: list[_Call] = []
    tool_call_id: str | None = None
    # ollama's: pictures beside the text, and the tool whose result this is
    images: list[Any] = []
    tool_name: str | None = None


class _Body(AnswerBody):
    #: A number of likely tokens in a text completion. A chat has a boolean, and the number beside
    #: it.
    logprobs: bool | Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] = 0
    n: Annotated[int, Field(ge=1, lt=2**31, validation_alias=AliasChoices("n", "n_cmpl"))] = 1
    has_usage_alone: bool | None = Field(
        None, validation_alias=AliasPath("stream_options", "include_usage")
    )
    cache_prompt: bool = True
    return_progress: bool = False

    def common(self, defaults: Defaults) -> dict[str, Any]:
        """Return fields of the request that chats and texts share; the defaults of its end are
        among them.
        """
        generation = defaults.generation
        n_top = generation.logprobs
        if self.logprobs is not None and self.logprobs is not False:
            n_top = self.top_logprobs if self.logprobs is True else self.logprobs
        generation = replace(
            generation,
            logprobs=n_top,
            uses_cache=self.cache_prompt,
            reports_reading=self.return_progress and self.stream,
        )
        return {
            "defaults": defaults._replace(generation=generation),
            "n": self.n,
            "has_usage_alone": bool(self.has_usage_alone),
        }


class _ChatBody(_Body, ChatBody):
    messages: Annotated[list[_Message], Field(min_length=1)]
    reasoning_format: str = "auto"
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    def continues(self, messages: Sequence[Message], warnings: list[str]) -> bool:
        """Return whether the answer continues the last message, as it does if nothing says
        otherwise.
        """
        if is_begun(messages):
            wanted = self.continue_final_message
            return self.add_generation_prompt is not True if wanted is None else wanted
        if self.continue_final_message or self.add_generation_prompt is False:
            warnings.append(
                "messages: not continued, since the last one is no text of the assistant's"
            )
        return False


class TextBody(_Body):
    """A body about a text, with what llama.cpp's own paths have beside OpenAI's fields."""

    response_fields: list[str] | None = None
    t_max_predict_ms: float = 0.0
    n_indent: Annotated[int, Field(ge=0, le=1000)] = 0
    n_probs: Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] = 0
    return_tokens: bool = False


class _CompletionBody(TextBody):
    prompt: Any = None
    suffix: str = ""
    echo: bool = False
    system: str | None = None  # the system message of a line of a batch

    def common(self, defaults: Defaults) -> dict[str, Any]:
        found, echoes = super().common(defaults), self.echo and not self.suffix
        sampling, generation = found["defaults"]
        if echoes and generation.logprobs is not None:
            generation = replace(generation, prompt_logprobs=True, uses_cache=False)
        return {**found, "defaults": Defaults(sampling, generation), "echoes": echoes}


def read_request(kind: Kind, body: Json, defaults: Defaults = NO_DEFAULTS) -> Request:
    """Read a body that asks for one answer. Raise `BodyError`."""
    if kind == "chat":
        request, *others = read_chat(body, defaults)
    else:
        request, *others = read_completion(body, defaults, kind=kind)
    if others:
        raise BodyError("prompt", "several prompts in one request are not supported here")
    if request.gap is not None:
        raise BodyError("suffix", "it is not supported here")
    if request.n > 1:
        raise BodyError("n", "several answers to one request are not supported here")
    return request


def read_chat(body: Json, defaults: Defaults = NO_DEFAULTS) -> Requests:
    asked, warnings = parse(_ChatBody, body), list[str]()
    messages = _messages(asked.messages)
    return asked.chat(
        messages,
        continues=asked.continues(messages, warnings),
        warnings=warnings,
        splits_reasoning=asked.reasoning_format != "none",
        **asked.common(defaults),
    )


def _messages(turns: list[_Message]) -> tuple[Message, ...]:
    found, last = Conversation(), ""
    for turn in turns:
        before, last = last, turn.role
        # A turn with calls only has no text. Templates read an empty text as none.
        text = text_of([*turn.content, *[Part(type="image")] * len(turn.images)])
        if turn.role == "function" or turn.role == "tool":  # noqa: PLR1714 - so that mypy sees it
            identity = turn.name if turn.role == "function" else turn.tool_call_id
            found.add_result(identity, text, turn.tool_name)
            continue
        calls = [
            ToolCall(call.id, call.name, arguments_of(call.arguments)) for call in turn.tool_calls
        ]
        if (call := turn.function_call) is not None:
            calls.append(ToolCall(call.name, call.name, arguments_of(call.arguments)))
        thought = text_of(turn.reasoning_content)
        role: Role = "system" if turn.role == "developer" else turn.role
        # Turns stay apart, but templates want roles to alternate where a system message is the
        # user's.
        if role == "system" or (role == "user" and before in ("developer", "system")):
            found.join_text(role, text)
        else:
            found.messages.append(Message(role, text, tuple(calls), reasoning=thought or None))
    return tuple(found.messages)


def read_completion(
    body: Json, defaults: Defaults = NO_DEFAULTS, *, kind: Kind = "completion"
) -> Requests:
    """Read a body for the continuation of texts, or with `suffix` for the middle: a request for
    each prompt.
    """
    asked = parse(_CompletionBody, body)
    empty = asked.request(kind, splits_reasoning=kind == "prompt", **asked.common(defaults))
    found: list[Request] = []
    for prompt in _inputs("prompt", asked.prompt).values():
        if not isinstance(prompt, str):
            found.append(replace(empty, tokens=tuple(prompt)))
        elif asked.system is not None and kind == "prompt":
            turns = (Message("system", asked.system), Message("user", prompt))
            found.append(replace(empty, kind="chat", messages=turns))
        elif asked.suffix:
            found.append(replace(empty, gap=Gap(prompt, asked.suffix)))
        else:
            found.append(replace(empty, text=prompt))
    return tuple(found)


def _inputs(field: str, value: Any) -> dict[str, str | list[int | str]]:
    """Return the inputs in a field by their places: texts, or tokens with texts among them. Raise
    `BodyError`.
    """
    is_several = isinstance(value, list) and value and all(type(each) is not int for each in value)
    found: dict[str, str | list[int | str]] = {}
    for number, each in enumerate(value if is_several else [value]):
        where = f"{field}[{number}]" if is_several else field
        if isinstance(each, dict) and [*each] == ["prompt_string"]:
            each = each["prompt_string"]  # noqa: PLW2901
        is_tokens = isinstance(each, list) and all(type(part) in (int, str) for part in each)
        if not each or not (isinstance(each, str) or is_tokens):
            what = f"{shown(each)} is not a text, or a list of texts or of tokens"
            raise BodyError(where, "it is empty" if each == "" else what)
        found[where] = each
    return found


# --- answers --------------------------------------------------------------------------------------


class ChatWriter(AnswerWriter):
    """Writes chat completions or text completions."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._has_logprobs = self._first.generation.logprobs is not None
        self._is_text = self._first.kind == "completion"
        self._head = {
            "id": f"{'cmpl' if self._is_text else 'chatcmpl'}-{self._identity}",
            "object": "text_completion" if self._is_text else "chat.completion",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": f"build-{__version__}",
        }
        #: By answer: its log-probabilities, the number of its characters, and its prompt as far as
        #: it is a part of it.
        self._logprobs: list[dict[str, list[Any]]] = [{} for _ in self._answers]
        self._n_characters = [0] * len(self._answers)
        self._echoed = [""] * len(self._answers)
        #: By answer: the events since its last chunk, if they are wanted.
        self._events: list[list[Json]] = [[] for _ in self._answers]

    def begin(self, _n_prompt_tokens: int) -> list[Json]:
        """Return the first chunk of each answer: the role in a chat, the prompt if it is wanted."""
        numbers = range(len(self._answers))
        if not self._is_text:
            return [self._chunk(each, {"role": "assistant", "content": ""}) for each in numbers]
        if not self._first.echoes or self._first.generation.prompt_logprobs:
            return []
        return [self._echo(each, self._prompts[each]) for each in numbers]

    def feed(self, number: int, event: Event) -> list[Json]:
        chunks = super().feed(number, event)
        if self._first.streams and self._first.speculative.events:
            self._events[number].append(to_json_object(event))
            if chunks:
                chunks[0]["events"], self._events[number] = self._events[number], []
        return chunks

    def _read(self, number: int, event: ReadingEvent) -> list[Json]:
        chunks = []
        if event.pieces and self._is_text:
            text = "".join(piece.text for piece in event.pieces)
            chunks = [self._echo(number, text, event.pieces)]
        if self._first.generation.reports_reading:
            progress = {
                "total": event.n_prompt_tokens,
                "cache": event.n_cached_tokens,
                "processed": event.n_read,
                "time_ms": round(1000.0 * event.spent_s),
            }
            chunks.append({**self._chunk(number, {}), "prompt_progress": progress})
        return chunks

    def _echo(self, number: int, text: str, pieces: Sequence[Piece] = ()) -> Json:
        chunk = self._chunk(number, {"content": text})
        if pieces:
            self._add_logprobs(number, chunk, pieces)
        self._echoed[number] += text
        self._n_characters[number] += len(text)
        return chunk

    def whole(self) -> Json:
        choices = [self._choice(number) for number in range(len(self._answers))]
        return {**self._head, "choices": choices, **self._figures()}

    def _choice(self, number: int) -> Json:
        answer = self._answers[number]
        content = self._echoed[number] + answer.text("content")
        thought = answer.text("thought")
        calls = [_call(each) for each in answer.calls]
        message: Json = {"role": "assistant", "content": content}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        said = {"text": content} if self._is_text else {"message": message}
        logprobs = self._logprobs[number] if self._has_logprobs else None
        return {"index": number, **said, "logprobs": logprobs, **self._ending(number)}

    def _add(self, number: int, deltas: list[Delta], event: CommittedEvent | None) -> list[Json]:
        told = (delta for delta in deltas if delta.text or delta.kind == "call")
        chunks = [self._chunk(number, _message(delta)) for delta in told]
        if event is None or not self._has_logprobs:
            return chunks
        chunks = chunks or [self._chunk(number, {})]
        self._add_logprobs(number, chunks[0], event.pieces)
        self._n_characters[number] += len(event.text)
        return chunks

    def _add_logprobs(self, number: int, chunk: Json, pieces: Sequence[Piece]) -> None:
        if self._is_text:
            found = _text_logprobs(pieces, self._n_characters[number])
        else:
            found = {"content": logprob_entries(pieces, self._first.generation.logprobs)}
        chunk["choices"][0]["logprobs"] = found
        for name, values in found.items():
            self._logprobs[number].setdefault(name, []).extend(values)

    def _end(self, number: int) -> list[Json]:
        chunks = [self._chunk(number, {}, self._ending(number))]
        if all(each.finished is not None for each in self._answers):
            found = self._figures()
            if self._first.has_usage_alone:
                chunks.append({**chunks[-1], "choices": []})
            else:  # clients that did not ask for it would count it twice
                found = own_figures(found)
            chunks[-1] |= found
        return chunks

    def _ending(self, number: int) -> Json:
        answer = self._answers[number]
        reason, stop = answer.finish_reason, answer.stop_string
        has_stop = reason == "stop" and stop is not None
        return {"finish_reason": reason} | ({"stop_reason": stop} if has_stop else {})

    def _chunk(self, number: int, delta: Json, ending: Json | None = None) -> Json:
        said = {"text": delta.get("content", "")} if self._is_text else {"delta": delta}
        choice = {"index": number, **said, "logprobs": None, "finish_reason": None}
        suffix = "" if self._is_text else ".chunk"
        head = {**self._head, "object": f"{self._head['object']}{suffix}"}
        return {**head, "choices": [choice | (ending or {})]}


def _message(delta: Delta) -> Json:
    if delta.kind == "call":
        return {"tool_calls": [{"index": delta.number, **_call(delta)}]}
    if delta.kind == "arguments":
        return {"tool_calls": [{"index": delta.number, "function": {"arguments": delta.text}}]}
    return {"content" if delta.kind == "content" else "reasoning_content": delta.text}


def _call(delta: Delta) -> Json:
    function = {"name": delta.name, "arguments": delta.text}
    return {"id": delta.identity, "type": "function", "function": function}


def logprob_entries(pieces: Sequence[Piece], n_top: int | None) -> list[Json]:
    """Return an entry for each token that the target chose; forced tokens have no
    log-probabilities.
    """
    return [
        {**_entry(own), "top_logprobs": [_entry(top) for top in piece.top_logprobs[:n_top]]}
        for piece in pieces
        for own in _own(piece)
    ]


def _text_logprobs(pieces: Sequence[Piece], start: int) -> dict[str, list[Any]]:
    """Return the same as lists, with each token's offset in the text, `start` characters in."""
    offsets = itertools.accumulate((len(piece.text) for piece in pieces), initial=start)
    found = [
        (piece, own.text, offset)
        for piece, offset in zip(pieces, offsets, strict=False)
        for own in _own(piece)
    ]
    return {
        "tokens": [text for _, text, _ in found],
        "token_logprobs": [piece.logprob for piece, *_ in found],
        "top_logprobs": [None if each.logprob is None else _by_text(each) for each, *_ in found],
        "text_offset": [offset for *_, offset in found],
    }


def _own(piece: Piece) -> list[TokenLogprob]:
    return [top for top in piece.top_logprobs if top.token_id == piece.token_id]


def _by_text(piece: Piece) -> dict[str, float]:
    """Return the log-probabilities of likely tokens; of those with the same text, the likeliest
    one's.
    """
    found = {top.text: top.logprob for top in reversed(piece.top_logprobs)}
    return dict(reversed(found.items()))


def _entry(top: TokenLogprob) -> Json:
    data = list(top.bytes)
    return {"id": top.token_id, "token": top.text, "logprob": top.logprob, "bytes": data}


# --- embeddings -----------------------------------------------------------------------------------


class _EmbeddingBody(Fields):
    input: Any = Field(None, validation_alias=AliasChoices("input", "prompt"))
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """The tokens of the inputs, the form of the vectors, and how many values are wanted (None:
    all).
    """

    tokens: tuple[list[int], ...]
    is_base64: bool = False
    dimensions: int | None = None
    warnings: tuple[str, ...] = ()

    def encoded(self, vector: Hidden) -> str:
        from specgen.llama.embeddings import unit

        if self.dimensions is not None:
            vector = unit(vector[: self.dimensions])
        if self.is_base64:
            return json.dumps(base64.b64encode(vector.astype("<f4").tobytes()).decode())
        return json.dumps(vector.tolist())


def read_embedding_request(body: Json, embedder: Embedder) -> EmbeddingRequest:
    asked = parse(_EmbeddingBody, body)
    warnings = asked.warnings()
    if asked.dimensions is not None and asked.dimensions > embedder.n_embd:
        raise BodyError("dimensions", f"{asked.dimensions} is more than {embedder.n_embd}")
    if asked.dimensions not in (None, embedder.n_embd):
        warnings.append("dimensions: only vectors of a model that was trained for it can be cut")
    inputs = _inputs("input", asked.input)
    if len(inputs) > _N_INPUTS:
        raise BodyError("input", f"at most {_N_INPUTS} inputs are allowed")
    tokens = [_tokens(embedder, where, each) for where, each in inputs.items()]
    is_base64 = asked.encoding_format == "base64"
    return EmbeddingRequest(tuple(tokens), is_base64, asked.dimensions, tuple(warnings))


def _tokens(embedder: Embedder, where: str, text: str | list[int | str]) -> list[int]:
    try:
        if isinstance(text, str):
            return embedder.tokenize(text)
        found = tokens_of(embedder.model.vocabulary, text, parse_special=False)
        embedder.check(found)
    except PromptError as error:
        raise BodyError(where, error.message) from None
    return found


def embedding_response(
    vectors: Sequence[str], n_tokens: int, model: str, warnings: Sequence[str]
) -> bytes:
    """Return the body of a response with vectors that are JSON already: there may be millions of
    values.
    """
    data = ", ".join(
        f'{{"object": "embedding", "index": {index}, "embedding": {vector}}}'
        for index, vector in enumerate(vectors)
    )
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    rest: Json = {"model": model, "usage": usage}
    if warnings:
        rest["warnings"] = list(warnings)
    return f'{{"object": "list", "data": [{data}], {json.dumps(rest)[1:]}'.encode()
