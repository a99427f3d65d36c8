"""OpenAI's text completions, ``/v1/completions``, and Mistral's, ``/v1/fim/completions``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from specgen.events import CommittedEvent, Piece, PrefillEvent
from specgen.serve.formats.answer_writer import AnswerContext
from specgen.serve.formats.chat_completions import ChatCompletionWriter
from specgen.serve.formats.delta import Delta
from specgen.serve.formats.fields import Json, parse, unknown_fields
from specgen.serve.formats.openai_common import OpenAIRequest, OpenAIWriter, own_logprob
from specgen.serve.formats.parsed_request import (
    NO_DEFAULTS,
    Defaults,
    ParsedRequest,
    ParsedRequests,
)
from specgen.serve.formats.request_errors import BodyError, shown
from specgen.session.prompts.infill import Gap
from specgen.session.prompts.template import Message

#: A text, or tokens with texts among them.
PromptInput: TypeAlias = str | list[int | str]

# --- requests -------------------------------------------------------------------------------------


class CompletionRequest(OpenAIRequest):
    """The body of a request for text completions."""

    #: A text or tokens, or a list of these.
    prompt: Any = None
    #: The text after the answer.
    suffix: str = ""
    #: Whether the answer's text begins with the prompt.
    echo: bool = False

    def with_api_fields(self, request: ParsedRequest) -> ParsedRequest:
        """Return the request with what the fields of text completions ask for."""
        request = super().with_api_fields(request)
        if not self.echo:
            return request
        if self.suffix:
            warning = "echo: ignored, since a prompt with suffix is not repeated"
            return replace(request, warnings=(*request.warnings, warning))
        generation = request.generation
        if generation.logprobs is not None:
            # Cached tokens of the prompt would have no log-probabilities.
            generation = replace(generation, prompt_logprobs=True, uses_cache=False)
        return replace(request, generation=generation, echoes=True)


class PromptRequest(CompletionRequest):
    """A line of a batch: a prompt to answer."""

    #: The system message.
    system: str | None = None


def read_completion(body: Json, defaults: Defaults = NO_DEFAULTS) -> ParsedRequests:
    """Read a request for the continuation of texts, or with ``suffix`` for the middle.

    Returns:
        A request for each prompt.

    Raises:
        BodyError: If a field cannot be honoured.
    """
    return parsed_completions(parse(CompletionRequest, body), defaults)


def read_fim_completion(body: Json, defaults: Defaults = NO_DEFAULTS) -> ParsedRequests:
    """Read a request of Mistral's API for the text in a gap, or without ``suffix`` for more text.

    It has the fields of a request for a text completion, but the answer has the form of a chat
    completion.

    Raises:
        BodyError: If a field cannot be honoured.
    """
    requests = read_completion(body, defaults)
    return tuple(replace(request, writer=FimWriter) for request in requests)


def parsed_completions(fields: CompletionRequest, defaults: Defaults) -> ParsedRequests:
    """Return a request for each prompt of a body.

    Args:
        fields: The fields of the body.
        defaults: The values of fields that are left out.

    Raises:
        BodyError: If a field cannot be honoured.
    """
    is_line = isinstance(fields, PromptRequest)
    if is_line:
        request = fields.parsed("prompt", defaults, ChatCompletionWriter)
        request = replace(request, splits_reasoning=True)
    else:
        request = fields.parsed("completion", defaults, CompletionWriter)
    if fields.prompt is None:
        # A line of a batch may be a chat, too.
        other_names = ("messages",) if is_line else ()
        unknown = unknown_fields(type(fields), fields.model_extra or {}, other_names)
        raise BodyError("prompt", f"it is missing{unknown}")
    # Editors complete at the beginning of a file, too, where no text is before the gap.
    prompts = prompt_inputs("prompt", fields.prompt, may_be_empty=bool(fields.suffix)).values()
    return tuple(_with_prompt(request, fields, prompt) for prompt in prompts)


def _with_prompt(
    request: ParsedRequest,
    fields: CompletionRequest,
    prompt: PromptInput,
) -> ParsedRequest:
    """Return the request with a prompt: tokens, a text, or a text with a gap.

    Raises:
        BodyError: If there is a text after tokens.
    """
    if not isinstance(prompt, str):
        if fields.suffix:
            raise BodyError("suffix", "it needs a prompt that is a text, not tokens")
        return replace(request, tokens=tuple(prompt))
    if isinstance(fields, PromptRequest) and fields.system is not None:
        messages = (Message("system", fields.system), Message("user", prompt))
        return replace(request, kind="chat", messages=messages)
    if fields.suffix:
        return replace(request, gap=Gap(prompt, fields.suffix))
    return replace(request, text=prompt)


def prompt_inputs(
    field: str,
    value: Any,
    *,
    may_be_empty: bool = False,
) -> dict[str, PromptInput]:
    """Return the inputs in a field, by their places in the body.

    Args:
        field: The name of the field.
        value: Its value: an input, or a list of inputs.
        may_be_empty: Whether a text may be empty.

    Raises:
        BodyError: If the field has something else, or an empty text that is not allowed.
    """
    # A list is one input if it has tokens, even with texts among them; booleans are not tokens.
    is_token_list = isinstance(value, list) and any(type(item) is int for item in value)
    if is_token_list or not isinstance(value, list) or not value:
        return {field: _prompt_input(field, value, may_be_empty=may_be_empty)}
    inputs: dict[str, PromptInput] = {}
    for number, item in enumerate(value):
        where = f"{field}[{number}]"
        inputs[where] = _prompt_input(where, item, may_be_empty=may_be_empty)
    return inputs


def _prompt_input(
    where: str,
    value: Any,
    *,
    may_be_empty: bool,
) -> PromptInput:
    """Return an input if it is a text or tokens; raise `BodyError` if it is neither."""
    if isinstance(value, dict) and list(value) == ["prompt_string"]:
        value = value["prompt_string"]
    if value == "" and not may_be_empty:
        raise BodyError(where, "it is empty")
    if isinstance(value, str):
        return value
    if value and isinstance(value, list) and all(type(each) in (int, str) for each in value):
        return value
    raise BodyError(where, f"{shown(value)} is not a text, or a list of texts or of tokens")


# --- answers --------------------------------------------------------------------------------------


class CompletionWriter(OpenAIWriter):
    """Writes text completions."""

    object_type = "text_completion"
    chunk_type = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, context: AnswerContext) -> None:
        super().__init__(context)
        #: The prompt with which each answer's text begins, if it is wanted.
        self._echoed = [""] * len(self._answers)
        #: The number of characters of each answer so far, including the prompt.
        self._n_characters = [0] * len(self._answers)

    def begin(self, _n_prompt_tokens: int) -> list[Json]:
        """Return a chunk with the prompt of each answer, if wanted without log-probabilities.

        With log-probabilities, the prompt is sent as it is read.
        """
        if not self._first.echoes or self._first.generation.prompt_logprobs:
            return []
        return [self._echo(number, text, ()) for number, text in enumerate(self._context.prompts)]

    def _write_progress(
        self,
        number: int,
        event: PrefillEvent,
    ) -> list[Json]:
        chunks: list[Json] = []
        if event.pieces:
            text = "".join(piece.text for piece in event.pieces)
            chunks.append(self._echo(number, text, event.pieces))
        return chunks + super()._write_progress(number, event)

    def _echo(
        self,
        number: int,
        text: str,
        pieces: Sequence[Piece],
    ) -> Json:
        """Return a chunk with a part of the prompt, and count that part to the answer's text."""
        chunk = self._chunk(number, {"content": text})
        if pieces:
            self._add_logprobs(number, chunk, pieces)
        self._echoed[number] += text
        self._n_characters[number] += len(text)
        return chunk

    def _write_deltas(
        self,
        number: int,
        deltas: list[Delta],
        event: CommittedEvent | None,
    ) -> list[Json]:
        """Return the chunks, and count the characters for later text offsets."""
        chunks = super()._write_deltas(number, deltas, event)
        if event is not None:
            self._n_characters[number] += len(event.text)
        return chunks

    def _delta_field(self, delta: Json) -> Json:
        return {"text": delta.get("content", "")}

    def _answer_field(self, number: int) -> Json:
        return {"text": self._echoed[number] + self._answers[number].text("content")}

    def _logprobs_of(
        self,
        number: int,
        pieces: Sequence[Piece],
    ) -> dict[str, list[Any]]:
        """Return lists with an item for each token that the target chose."""
        lengths = (len(piece.text) for piece in pieces)
        offsets = itertools.accumulate(lengths, initial=self._n_characters[number])
        logprobs: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for piece, offset in zip(pieces, offsets, strict=False):
            own = own_logprob(piece)
            if own is not None:
                logprobs["tokens"].append(own.text)
                logprobs["token_logprobs"].append(piece.logprob)
                logprobs["top_logprobs"].append(_logprobs_by_text(piece))
                logprobs["text_offset"].append(offset)
        return logprobs


class FimWriter(ChatCompletionWriter):
    """Writes chat completions in the form of Mistral's API, whose streams always have the usage."""

    always_has_usage = True


def _logprobs_by_text(piece: Piece) -> dict[str, float] | None:
    """Return the log-probabilities of the likely tokens, by their texts, likeliest first.

    Returns:
        None for the first token of a prompt, which has no log-probability.
    """
    if piece.logprob is None:
        return None
    # If tokens have the same text, the likeliest is set last and wins.
    by_text = {top.text: top.logprob for top in reversed(piece.top_logprobs)}
    return dict(reversed(by_text.items()))
