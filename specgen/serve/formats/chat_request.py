"""Reads requests in OpenAI's older form, chat completions and text completions, and llama.cpp's for a gap.

The command line gives the defaults of fields that are not there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from specgen.options import GenerationOptions, SamplerOptions
from specgen.serve.formats.chat_answer import InfillWriter
from specgen.serve.formats.fields import (
    AnswerBody,
    AnswerFormat,
    BodyError,
    Fields,
    Integer,
    Parts,
    Tool,
    ToolChoice,
    Word,
    parse,
    shown,
    text_of,
)
from specgen.serve.formats.request import (
    Conversation,
    Kind,
    Request,
    arguments_of,
    read_tools,
    request_of,
)
from specgen.session.prompts.infill import ContextFile, Gap
from specgen.session.prompts.template import Message, Role, ToolCall

_MOST_LOGPROBS = 100


def _as_text(value: Any) -> Any:
    """Return the arguments of a call as a text; some clients send the object."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


class _CalledFunction(Fields):
    name: Word
    arguments: Annotated[str, BeforeValidator(_as_text)] = ""


class _Call(Fields):
    id: Word
    function: _CalledFunction


class _Message(Fields):
    role: Literal["assistant", "developer", "system", "tool", "user"]
    content: Parts | None = None
    reasoning_content: Parts | None = Field(
        None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )
    tool_calls: list[_Call] = []
    tool_call_id: str | None = None


class _StreamOptions(Fields):
    include_usage: bool = False


def _as_number(value: Any) -> Any:
    """Return how many likely tokens a chat's boolean asks for beside the chosen one; -1 for no logprobs."""
    return int(value) - 1 if isinstance(value, bool) else value


class _OpenAIBody(AnswerBody):
    response_format: AnswerFormat | None = None
    logprobs: (
        Annotated[Integer, BeforeValidator(_as_number), Field(ge=-1, le=_MOST_LOGPROBS)] | None
    ) = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=_MOST_LOGPROBS)] = 0
    n: Annotated[Integer, Field(ge=1, lt=2**31)] = 1
    stream_options: _StreamOptions = _StreamOptions()

    def request(
        self, kind: Kind, sampling: SamplerOptions, generation: GenerationOptions
    ) -> Request:
        """Return the request without its prompt."""
        request = request_of(
            kind,
            self,
            sampling,
            generation,
            form=self.response_format,
            n=self.n,
            has_usage_alone=self.stream_options.include_usage,
        )
        if self.logprobs is None:
            return request
        n_top = None if self.logprobs < 0 else max(self.logprobs, self.top_logprobs)
        return replace(request, generation=replace(request.generation, logprobs=n_top))


class _ChatBody(_OpenAIBody):
    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[Tool] = []
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    reasoning_format: Literal["none", "auto", "deepseek"] = "none"


class _CompletionBody(_OpenAIBody):
    prompt: Any
    suffix: str = ""
    #: The system message of a line of a batch.
    system: str | None = None


class _File(Fields):
    filename: str = "tmp"
    text: str


class _InfillBody(_OpenAIBody):
    input_prefix: str = ""
    #: The text with which the gap already starts.
    prompt: str = ""
    input_suffix: str = ""
    input_extra: list[_File] = []


def read_request(
    kind: Kind,
    body: Mapping[str, Any],
    sampling: SamplerOptions,
    generation: GenerationOptions,
) -> Request:
    """Read a body that asks for one answer to one prompt; `sampling` and `generation` give the defaults of
    its fields. Raise `BodyError`."""
    if kind == "chat":
        request, *others = read_chat(body, sampling, generation)
    else:
        request, *others = read_completion(body, sampling, generation, kind=kind)
    if others:
        raise BodyError("prompt", "several prompts in one request are not supported here")
    if request.gap is not None:
        raise BodyError("suffix", "it is not supported here")
    if request.n > 1:
        raise BodyError("n", "several answers to one request are not supported here")
    return request


def read_chat(
    body: Mapping[str, Any], sampling: SamplerOptions, generation: GenerationOptions
) -> tuple[Request, ...]:
    """Read a body for the next turn of a conversation. Raise `BodyError`."""
    asked = parse(_ChatBody, body)
    warnings: list[str] = []
    tools = read_tools(
        asked.tools, asked.tool_choice, warnings, is_parallel=asked.parallel_tool_calls
    )
    request = asked.request("chat", sampling, generation)
    request = replace(
        request,
        messages=_messages(asked.messages),
        tools=tools,
        variables=asked.variables(asked.reasoning_effort),
        splits_reasoning=asked.reasoning_format != "none",
        warnings=(*request.warnings, *warnings),
    )
    return (request,)


def _messages(turns: list[_Message]) -> tuple[Message, ...]:
    found = Conversation()
    for number, turn in enumerate(turns):
        where = f"messages[{number}]"
        if turn.content is None and turn.role != "assistant":
            raise BodyError(f"{where}.content", "it is missing")
        # A turn with calls only has no text. Templates read an empty text as none.
        text = text_of(f"{where}.content", turn.content or [])
        if turn.role == "tool":
            found.add_result(f"{where}.tool_call_id", turn.tool_call_id, text)
            continue
        calls = tuple(
            ToolCall(call.id, call.function.name, arguments_of(call.function.arguments))
            for call in turn.tool_calls
        )
        thought = turn.reasoning_content
        reasoning = None if thought is None else text_of(f"{where}.reasoning_content", thought)
        role: Role = "system" if turn.role == "developer" else turn.role
        found.add(Message(role, text, calls, reasoning=reasoning))
    return tuple(found.messages)


def read_completion(
    body: Mapping[str, Any],
    sampling: SamplerOptions,
    generation: GenerationOptions,
    *,
    kind: Kind = "completion",
) -> tuple[Request, ...]:
    """Read a body for the continuation of texts, or with `suffix` for the middle between two: a request for
    each prompt. Raise `BodyError`."""
    asked = parse(_CompletionBody, body)
    empty = asked.request(kind, sampling, generation)
    found: list[Request] = []
    for prompt in _prompts(asked.prompt):
        if isinstance(prompt, list):
            found.append(replace(empty, tokens=tuple(prompt)))
        elif asked.system is not None and kind == "prompt":
            turns = (Message("system", asked.system), Message("user", prompt))
            found.append(replace(empty, kind="chat", messages=turns))
        elif asked.suffix:
            found.append(replace(empty, gap=Gap(prompt, asked.suffix)))
        else:
            found.append(replace(empty, text=prompt))
    return tuple(found)


def _prompts(value: Any) -> list[str | list[int]]:
    is_several = isinstance(value, list) and value and isinstance(value[0], str | list)
    prompts: list[str | list[int]] = []
    for each in value if is_several else [value]:
        is_tokens = isinstance(each, list) and all(type(token) is int for token in each)
        if not each or not (isinstance(each, str) or is_tokens):
            what = f"{shown(each)} is not a text, or a list of texts or of tokens"
            raise BodyError("prompt", "it is empty" if each == "" else what)
        prompts.append(each)
    return prompts


def read_infill(
    body: Mapping[str, Any], sampling: SamplerOptions, generation: GenerationOptions
) -> tuple[Request, ...]:
    """Read a body in the form of llama.cpp's server, for a text with a gap. Raise `BodyError`."""
    asked = parse(_InfillBody, body)
    if not (asked.input_prefix or asked.prompt or asked.input_suffix):
        raise BodyError("input_prefix", "there is no text before or after the gap")
    if asked.n > 1:
        raise BodyError("n", f"{shown(asked.n)} answers; a gap has one")
    files = tuple(ContextFile(file.filename, file.text) for file in asked.input_extra)
    gap = Gap(asked.input_prefix + asked.prompt, asked.input_suffix, context=files)
    empty = asked.request("completion", sampling, generation)
    # The last chunk has the usage.
    return (replace(empty, gap=gap, has_usage_alone=False, writer=InfillWriter),)
