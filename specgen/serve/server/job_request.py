"""Turn the body of a request into a job for the engine."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from specgen.options import GenerationOptions, SamplerOptions, VerifierName
from specgen.serve.formats.messages.request import translated_messages_request
from specgen.serve.formats.openai.body import BodyError, boolean_of, text_of
from specgen.serve.formats.openai.request import (
    Request,
    check_tokens,
    read_request,
    with_call_form,
)
from specgen.serve.formats.openai.translation import Translation
from specgen.serve.formats.responses.request import translated_response_request
from specgen.serve.server.errors import RequestError
from specgen.serve.server.jobs import AnswerRequest
from specgen.serve.server.options import Limits
from specgen.session.loaded_models import Models
from specgen.session.prompts import Prompt, template_of
from specgen.session.prompts.infill import ContextFile, Gap, infill_prompt

#: ``chat``, ``completion`` and ``responses`` are OpenAI's; ``messages`` is Anthropic's; ``infill`` is
#: llama.cpp's, for a text with a gap.
Endpoint: TypeAlias = Literal["chat", "completion", "infill", "messages", "responses"]
#: The endpoints whose requests become those of a chat.
_TRANSLATE: Mapping[Endpoint, Callable[[Mapping[str, Any]], Translation]] = {
    "messages": translated_messages_request,
    "responses": translated_response_request,
}
#: Fields of llama.cpp's server whose accepted values change nothing, since specgen always acts so.
_DONE_ANYWAY: dict[str, tuple[Any, ...]] = {"cache_prompt": (True,), "id_slot": (-1,)}


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """A request's wishes about drafts, from its field `speculative`."""

    draft: bool = True
    #: The most tokens drafted in a round, and the verifier; None keeps the server's setting.
    max: int | None = None
    verifier: VerifierName | None = None
    #: Whether a stream says of each token where it comes from.
    pieces: bool = False

    @staticmethod
    def of(value: Any) -> DraftSettings:
        """Return the wishes in a field's value. Raise `BodyError`."""
        name = "speculative"
        if value is None:
            return DraftSettings()
        if not isinstance(value, dict):
            raise BodyError(name, 'it is no object like {"draft": true, "max": 8}')
        for field in value:
            if field not in ("draft", "max", "verifier", "pieces"):
                raise BodyError(f"{name}.{field}", "there is no such field")
        found = DraftSettings(
            draft=boolean_of(f"{name}.draft", value.get("draft"), default=True),
            pieces=boolean_of(f"{name}.pieces", value.get("pieces")),
            max=_whole(f"{name}.max", value.get("max"), 0),
        )
        verifier = value.get("verifier")
        if verifier is None:
            return found
        if verifier not in get_args(VerifierName):
            known = ", ".join(get_args(VerifierName))
            raise BodyError(f"{name}.verifier", f"it is none of {known}")
        return replace(found, verifier=verifier)


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """The content of a body: `n` answers to each of its `requests`, which differ only in their prompts.

    If there is a `gap`, the answer fills it."""

    endpoint: Endpoint
    requests: tuple[Request, ...]
    n: int = 1
    gap: Gap | None = None
    #: Whether the answer is streamed, and whether a separate last chunk has the usage.
    streams: bool = False
    has_usage_alone: bool = False
    wish: DraftSettings = DraftSettings()
    #: How the request was translated, and the answer will be, if the endpoint has another API's form.
    translation: Translation | None = None

    @property
    def n_answers(self) -> int:
        """The number of answers in all."""
        return self.n * len(self.requests)


def read_server_request(
    endpoint: Endpoint, body: Mapping[str, Any], loaded: Models, limits: Limits
) -> ServerRequest:
    """Read a body; the options of the command line give the defaults of its fields, and the target's chat
    template the form of tool calls. Raise `BodyError`."""
    options, template = loaded.options, template_of(loaded.target, has_tools=True)

    def read(endpoint: Endpoint, body: Mapping[str, Any]) -> ServerRequest:
        asked = _read(endpoint, body, options.sampler, options.generation, limits)
        requests = tuple(with_call_form(request, template) for request in asked.requests)
        return replace(asked, requests=requests)

    if endpoint not in _TRANSLATE:
        return read(endpoint, body)
    translation = _TRANSLATE[endpoint](body)
    try:
        asked = read("chat", translation.chat)
    except BodyError as error:
        raise translation.refusal(error) from None
    requests = tuple(
        replace(request, warnings=translation.warnings_of(request.warnings))
        for request in asked.requests
    )
    return replace(asked, endpoint=endpoint, requests=requests, translation=translation)


def _read(
    endpoint: Endpoint,
    body: Mapping[str, Any],
    sampling: SamplerOptions,
    generation: GenerationOptions,
    limits: Limits,
) -> ServerRequest:
    fields = dict(body)
    for name, allowed in _DONE_ANYWAY.items():
        value = fields.pop(name, None)
        if value is not None and value not in allowed:
            raise BodyError(name, f"{value!r} is not supported")
    wish = DraftSettings.of(fields.pop("speculative", None))
    streams = boolean_of("stream", fields.pop("stream", None))
    usage = fields.pop("stream_options", None)
    if not isinstance(usage, dict | None):
        raise BodyError("stream_options", "it is no object")
    alone = boolean_of("stream_options.include_usage", (usage or {}).get("include_usage"))
    is_infill = endpoint == "infill"  # which has one answer, whose last chunk has the usage
    alone = alone and not is_infill
    n = 1 if is_infill else _whole("n", fields.pop("n", None), 1) or 1
    gap = None
    if is_infill:
        gap = _gap(fields)
    elif endpoint == "completion":
        suffix = fields.pop("suffix", None)
        if suffix:
            gap = Gap(text_of("prompt", fields.get("prompt")), text_of("suffix", suffix))
    prompts: list[Any] = [None]
    if endpoint == "completion" and gap is None and _is_several(fields.get("prompt")):
        prompts = fields["prompt"]
    if n * len(prompts) > limits.n_answers > 0:
        raise BodyError("n", f"{n * len(prompts)} answers; at most {limits.n_answers} are allowed")
    kind: Literal["chat", "completion"] = "chat" if endpoint == "chat" else "completion"
    requests: list[Request] = []
    for prompt in prompts:
        own = fields
        if gap is not None:
            own = {**fields, "prompt": "-"}  # a placeholder: the gap has the text
        elif prompt is not None:
            own = {**fields, "prompt": prompt}
        requests.append(read_request(kind, own, sampling, generation))
    return ServerRequest(endpoint, tuple(requests), n, gap, streams, alone, wish)


def _is_several(prompt: Any) -> bool:
    """Return whether a prompt is a list of prompts: texts, or lists of tokens."""
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))


def _gap(fields: dict[str, Any]) -> Gap:
    """Take llama.cpp's fields out of a body and return their gap. `prompt` is the text with which the gap
    already starts."""
    prefix = text_of("input_prefix", fields.pop("input_prefix", None) or "")
    begun = text_of("prompt", fields.pop("prompt", None) or "")
    suffix = text_of("input_suffix", fields.pop("input_suffix", None) or "")
    extra = fields.pop("input_extra", None) or []
    if not isinstance(extra, list):
        raise BodyError("input_extra", "it is no list of objects with filename and text")
    files: list[ContextFile] = []
    for number, each in enumerate(extra):
        where = f"input_extra[{number}]"
        if not isinstance(each, dict):
            raise BodyError(where, "it is no object with filename and text")
        name = text_of(f"{where}.filename", each.get("filename") or "tmp")
        files.append(ContextFile(name, text_of(f"{where}.text", each.get("text"))))
    if not (prefix or begun or suffix):
        raise BodyError("input_prefix", "there is no text before or after the gap")
    return Gap(prefix + begun, suffix, context=tuple(files))


def answer_requests(
    asked: ServerRequest, loaded: Models, n_ctx: int, limits: Limits
) -> list[AnswerRequest]:
    """Return what to submit to an engine with contexts of `n_ctx` tokens: all answers to the first prompt,
    then those to the next. Raise `UsageError`, `PromptError`, and `RequestError` for a prompt that does not
    fit."""
    asks: list[AnswerRequest] = []
    wish = asked.wish
    for request in asked.requests:
        check_tokens(request, loaded.target.vocabulary.n_tokens)
        generation = _within(request.generation, limits.answer_tokens)
        prompt = _prompt(asked, request, loaded, n_ctx, generation)
        _check_length(len(prompt.tokens), n_ctx, limits.prompt_tokens)
        for number in range(asked.n):
            sampling = request.sampling
            if sampling.seed >= 0:
                sampling = replace(sampling, seed=sampling.seed + number)
            asks.append(
                AnswerRequest(prompt, sampling, generation, wish.draft, wish.max, wish.verifier)
            )
    return asks


def n_prompt_tokens(asked: ServerRequest, loaded: Models, n_ctx: int) -> int:
    """Return the number of tokens of a request's first prompt. Raise `UsageError`, `PromptError`."""
    (request, *_) = asked.requests
    return len(_prompt(asked, request, loaded, n_ctx, request.generation).tokens)


def _prompt(
    asked: ServerRequest,
    request: Request,
    loaded: Models,
    n_ctx: int,
    generation: GenerationOptions,
) -> Prompt:
    if asked.gap is not None:
        # The far ends of a long text matter little: the text is cut to leave room for an answer.
        n_answer = generation.max_tokens if generation.max_tokens >= 0 else n_ctx // 4
        n_room = max(n_ctx // 4, n_ctx - n_answer)
        return infill_prompt(loaded.target, loaded.own_vocabulary, asked.gap, n_room).prompt
    prompts = replace(loaded.prompts, n_ctx=n_ctx)
    if request.kind == "chat":
        return prompts.of_messages(
            request.messages,
            now=_now(),
            tools=request.tool_definitions,
            variables=request.template_variables,
        )
    if request.tokens is not None:
        return prompts.of_tokens(request.tokens)
    return prompts.of_text(request.text, chat=False)


def _check_length(n_tokens: int, n_ctx: int, n_most: int) -> None:
    if n_tokens > n_ctx:
        raise RequestError(
            400,
            f"the prompt has {n_tokens} tokens, but the context has {n_ctx}",
            code="context_length_exceeded",
        )
    if n_tokens > n_most > 0:
        raise RequestError(
            400,
            f"the prompt has {n_tokens} tokens; at most {n_most} are allowed",
            code="context_length_exceeded",
        )


def _within(generation: GenerationOptions, n_most: int) -> GenerationOptions:
    """Return the same with at most `n_most` tokens (0: no limit)."""
    if n_most <= 0 or 0 <= generation.max_tokens <= n_most:
        return generation
    return replace(generation, max_tokens=n_most)


def _whole(name: str, value: Any, least: int) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        raise BodyError(name, f"it is no whole number of {least} or more")
    return value


def _now() -> datetime.datetime:
    return datetime.datetime.now().astimezone()
