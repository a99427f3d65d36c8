"""OpenAI's chat completions: ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, AliasPath, Field

from specgen.events import Piece
from specgen.serve.formats.answers import Answer
from specgen.serve.formats.conversation_builder import (
    ConversationBuilder,
    ends_with_partial_answer,
)
from specgen.serve.formats.fields import Fields, Json, Part, Parts, is_text, parse, text_of
from specgen.serve.formats.generation_request import ChatRequest
from specgen.serve.formats.openai_common import (
    OpenAIRequest,
    OpenAIWriter,
    call_object,
    logprob_entries,
)
from specgen.serve.formats.parsed_request import (
    NO_DEFAULTS,
    Defaults,
    ParsedRequest,
    ParsedRequests,
)
from specgen.serve.formats.request_errors import BodyError
from specgen.serve.formats.tool_calls.values import arguments_of
from specgen.session.prompts.template import Message, Role, ToolCall

# --- requests -------------------------------------------------------------------------------------


class ChatToolCall(Fields):
    """A call in an earlier answer."""

    id: str = ""
    name: str = Field(
        validation_alias=AliasChoices(AliasPath("function", "name"), AliasPath("custom", "name")),
        min_length=1,
    )
    #: JSON; some clients send the object itself.
    arguments: str | dict[str, Any] | None = Field(
        None, validation_alias=AliasPath("function", "arguments")
    )
    #: The free text of a custom tool's call.
    input: str | None = Field(None, validation_alias=AliasPath("custom", "input"))

    @property
    def call(self) -> ToolCall:
        """The call as chat templates expect it; a custom tool's text is its only argument."""
        if self.input is not None:
            return ToolCall(self.id, self.name, {"input": self.input})
        return ToolCall(self.id, self.name, arguments_of(self.arguments))


class ChatFunctionCall(Fields):
    """The older form of a call; its name is also its id."""

    name: Annotated[str, Field(min_length=1)]
    arguments: str | dict[str, Any] = ""


class ChatMessage(Fields):
    """A message of a conversation."""

    role: Literal["assistant", "developer", "function", "system", "tool", "user"]
    content: Parts = []
    #: In the role ``function``: the name of the function.
    name: str | None = None
    function_call: ChatFunctionCall | None = None
    #: The thinking block of an earlier answer.
    reasoning_content: Parts = Field(
        [], validation_alias=AliasChoices("reasoning_content", "reasoning", "thinking")
    )
    tool_calls: list[ChatToolCall] = []
    #: In the role ``tool``: the id of the call that returned this result.
    tool_call_id: str | None = None
    #: Ollama: pictures with the text.
    images: list[Any] = []
    #: Ollama: the name of the function that returned this result.
    tool_name: str | None = None


class ChatCompletionRequest(OpenAIRequest, ChatRequest):
    """The body of a request for a chat completion."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    #: llama.cpp: with ``none``, the content includes the thinking block.
    reasoning_format: str = "auto"
    #: vLLM: whether the answer continues the last message.
    continue_final_message: bool | None = None
    #: vLLM: whether the answer is a message of its own, the opposite of `continue_final_message`.
    add_generation_prompt: bool | None = None


def read_chat(body: Json, defaults: Defaults = NO_DEFAULTS) -> ParsedRequests:
    """Read a request for the next turn of a conversation.

    Raises:
        BodyError: If a field cannot be honoured.
    """
    fields = parse(ChatCompletionRequest, body)
    has_functions = bool(body.get("functions")) and not body.get("tools")
    return (parsed_chat_completion(fields, defaults, is_older_form=has_functions),)


def parsed_chat_completion(
    fields: ChatCompletionRequest,
    defaults: Defaults,
    *,
    is_older_form: bool = False,
) -> ParsedRequest:
    """Return the request for the next turn of a conversation.

    Args:
        fields: The fields of the body.
        defaults: The values of fields that are left out.
        is_older_form: Whether the answer has its call in OpenAI's older form, which takes only one.

    Raises:
        BodyError: If a field cannot be honoured.
    """
    messages = _messages(fields.messages)
    continues = False
    warnings: list[str] = []
    if ends_with_partial_answer(messages):
        continues = _continues_last_message(fields)
    elif fields.continue_final_message or fields.add_generation_prompt is False:
        warnings.append("messages: not continued, because the last one is not the assistant's text")
    writer = ChatCompletionWriter
    if is_older_form:
        writer = FunctionCallWriter
        fields = fields.model_copy(update={"parallel_tool_calls": False})
    request = fields.parsed_chat(messages, defaults, writer, warnings)
    return replace(request, continues=continues, splits_reasoning=fields.reasoning_format != "none")


class _Conversation(Fields):
    messages: list[ChatMessage]


def read_conversation(messages: Sequence[Any]) -> tuple[Message, ...]:
    """Read messages in OpenAI's form that are not the body of a request.

    Raises:
        BodyError: If a message has an invalid field, or one that would be ignored.
    """
    fields = parse(_Conversation, {"messages": messages})
    for number, message in enumerate(fields.messages):
        where = f"messages[{number}]"
        if message.images or not all(map(is_text, message.content)):
            raise BodyError(f"{where}.content", "this model reads text only")
        for name, reason in message.ignored():
            raise BodyError(f"{where}.{name}", reason)
    return _messages(fields.messages)


def _continues_last_message(fields: ChatCompletionRequest) -> bool:
    """Return whether the answer continues a last message of the assistant's; the default is yes."""
    if fields.continue_final_message is not None:
        return fields.continue_final_message
    return fields.add_generation_prompt is not True


def _messages(turns: list[ChatMessage]) -> tuple[Message, ...]:
    """Turn the messages of a body into messages for the chat template.

    Roles that templates do not know are replaced, and the results of calls are joined with them.
    """
    builder = ConversationBuilder()
    previous_role = ""
    for turn in turns:
        # A turn that has only calls gets an empty text, which templates treat like none.
        images = [Part(type="image")] * len(turn.images)
        text = text_of([*turn.content, *images])
        match turn.role:
            case "function":
                builder.add_result(turn.name, text, turn.tool_name)
            case "tool":
                builder.add_result(turn.tool_call_id, text, turn.tool_name)
            case "system" | "developer":
                builder.join_text("system", text)
            case "user" if previous_role in ("developer", "system"):
                # In general, consecutive turns of the user are not joined. But a later system
                # message has become the user's, and templates need alternating roles.
                builder.join_text("user", text)
            case role:
                builder.messages.append(_message(turn, role, text))
        previous_role = turn.role
    return tuple(builder.messages)


def _message(turn: ChatMessage, role: Role, text: str) -> Message:
    """Return a message with its calls, in the newer and the older form, and its thoughts."""
    calls = [tool_call.call for tool_call in turn.tool_calls]
    older_call = turn.function_call
    if older_call is not None:
        arguments = arguments_of(older_call.arguments)
        calls.append(ToolCall(older_call.name, older_call.name, arguments))
    thought = text_of(turn.reasoning_content)
    return Message(role, text, tuple(calls), reasoning=thought or None)


# --- answers --------------------------------------------------------------------------------------


class ChatCompletionWriter(OpenAIWriter):
    """Writes chat completions."""

    object_type = "chat.completion"
    chunk_type = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def begin(self, _n_prompt_tokens: int) -> list[Json]:
        """Return the first chunk of each answer, which has the role."""
        role_delta: Json = {"role": "assistant", "content": ""}
        return [self._chunk(number, role_delta) for number in range(len(self._answers))]

    def _delta_field(self, delta: Json) -> Json:
        return {"delta": delta}

    def _answer_field(self, number: int) -> Json:
        """Return the message with the content, the thoughts and the complete calls."""
        answer = self._answers[number]
        content = answer.text("content")
        message: Json = {"role": "assistant", "content": content}
        thought = answer.text("thought")
        if thought:
            message["reasoning_content"] = thought
        if answer.calls:  # an empty content is null then
            message["content"] = content or None
            message["tool_calls"] = [call_object(call) for call in answer.calls]
        return {"message": message}

    def _logprobs_of(
        self,
        _number: int,
        pieces: Sequence[Piece],
    ) -> dict[str, list[Any]]:
        return {"content": logprob_entries(pieces, self._first.generation.logprobs)}


class FunctionCallWriter(ChatCompletionWriter):
    """Writes the call of an answer in OpenAI's older form, for requests with ``functions``."""

    def _delta_field(self, delta: Json) -> Json:
        return super()._delta_field(_with_function_call(delta))

    def _answer_field(self, number: int) -> Json:
        message = super()._answer_field(number)["message"]
        return {"message": _with_function_call(message)}

    def _ending(self, answer: Answer) -> Json:
        ending = super()._ending(answer)
        if ending["finish_reason"] == "tool_calls":
            ending["finish_reason"] = "function_call"
        return ending


def _with_function_call(message: Json) -> Json:
    """Return a message or a delta with its call, if it has one, in the older form."""
    if "tool_calls" not in message:
        return message
    (call,) = message["tool_calls"]  # these requests allow only one
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "function_call": call["function"]}
