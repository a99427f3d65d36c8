"""Turn the user's prompt into tokens for the target and the draft."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from specgen.backend.llama import LlamaModel
from specgen.backend.llama.vocabulary import LlamaVocabulary
from specgen.engine import chat_template as chat
from specgen.errors import PromptError, UsageError

#: What a model may call, each as OpenAI's API describes it.
ToolDefinitions: TypeAlias = Sequence[Mapping[str, Any]]
#: The name under which some files have a second template, for conversations with tools.
_TOOL_TEMPLATE = "tool_use"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an answer begins after: `text` as the target sees it, and its `tokens`, at least
    one. `draft_tokens` is a draft model's own view of it, where it has one of its own; else
    the draft is told the target's tokens, but for those at the places `head`. The answer ends
    at the tokens `ends` too, besides those at which any answer of the target ends."""

    text: str
    tokens: tuple[int, ...]
    draft_tokens: tuple[int, ...] | None = None
    head: range = range(0)
    ends: frozenset[int] = frozenset()

    def without_head(self) -> Prompt:
        """A prompt of the tokens that are not in the head."""
        return Prompt(self.text, _without(self.tokens, self.head))


def text_prompt(
    model: LlamaModel,
    own_draft: LlamaModel | None,
    text: str,
    chat: bool | None,
    system: str | None,
    now: datetime.datetime,
) -> Prompt:
    """What the target's answer to `text` begins after.

    With `chat`, the text is a user's turn in the target's own template, and in that of `own_draft`, a
    draft model with another vocabulary; without, it is continued as it is; None takes the template if
    there is one. `now` is the date that some templates write. Names of control tokens in the text are
    read as these, as llama.cpp does.

    Raises `UsageError` if there is no template for `chat` or `system`, `PromptError` if the prompt is
    empty or the template does not accept it.
    """
    if chat is not False and model.chat_template() is not None:
        return conversation_prompt(model, own_draft, messages_of(text, system), now)
    if chat or system is not None:
        wanted = "--chat" if chat else "--system"
        raise UsageError(
            f"{wanted} needs a chat template, and {model.name} has none",
            hint=f"leave {wanted} out: the prompt is then continued as it is",
        )
    return _tokenized(model, text)


def conversation_prompt(
    model: LlamaModel,
    own_draft: LlamaModel | None,
    messages: Sequence[chat.Message],
    now: datetime.datetime,
    tools: ToolDefinitions = (),
) -> Prompt:
    """What the next turn of a conversation begins after, in the target's own template, and in that of
    `own_draft`, a draft model with another vocabulary. `tools` are told to templates that know them.
    Raises `UsageError` if there is no template, `PromptError` if it does not accept the messages."""
    text = chat_text(model, messages, now, tools)
    if text is None:
        raise UsageError(f"a conversation needs a chat template, and {model.name} has none")
    prompt = _tokenized(model, text)
    # What the template says of tools may stand before the first message, and a draft needs it.
    head = range(0) if tools else head_of(model.vocabulary, text, prompt.tokens, messages)
    draft_tokens = None
    if own_draft is not None:
        draft_tokens = draft_chat_tokens(own_draft, messages, now, tools)
    return replace(prompt, head=head, draft_tokens=draft_tokens)


def token_prompt(model: LlamaModel, tokens: Sequence[int]) -> Prompt:
    """A prompt of tokens as they are. Raises `PromptError` if there is none, or one that the model does
    not have."""
    vocabulary = model.vocabulary
    for token in tokens:
        if not 0 <= token < vocabulary.n_tokens:
            raise PromptError(
                f"there is no token {token}: {model.name} has {vocabulary.n_tokens} tokens"
            )
    if not tokens:
        raise PromptError("the prompt is empty", hint="give some tokens to continue")
    text = b"".join(map(vocabulary.token_bytes, tokens)).decode("utf-8", "replace")
    return Prompt(text, tuple(tokens))


def _tokenized(model: LlamaModel, text: str) -> Prompt:
    tokens = tokenize(model.vocabulary, text, parse_special=True)
    if not tokens:
        raise PromptError("the prompt is empty", hint="give some text to continue")
    return Prompt(text, tuple(tokens))


def messages_of(text: str, system: str | None) -> list[chat.Message]:
    """`text` as a user's turn, after a system message if there is one."""
    user = chat.Message("user", text)
    return [user] if system is None else [chat.Message("system", system), user]


def template_of(model: LlamaModel, *, has_tools: bool) -> str | None:
    """The model's template for conversations with tools, or without; None if it has no template."""
    named = model.chat_template(_TOOL_TEMPLATE) if has_tools else None
    return named or model.chat_template()


def chat_text(
    model: LlamaModel,
    messages: Sequence[chat.Message],
    now: datetime.datetime,
    tools: ToolDefinitions = (),
) -> str | None:
    """A conversation in the model's own template; None if it has no template. Raises
    `PromptError` if the template does not accept it."""
    has_tools = bool(tools) or any(message.role == "tool" for message in messages)
    template = template_of(model, has_tools=has_tools)
    if template is None:
        return None
    special = model.vocabulary.special_tokens()
    return chat.render(
        template,
        messages,
        bos_token=model.vocabulary.control_text(special["bos"]),
        eos_token=model.vocabulary.control_text(special["eos"]),
        now=now,
        tools=tools,
    )


def head_of(
    vocabulary: LlamaVocabulary, text: str, tokens: Sequence[int], messages: Sequence[chat.Message]
) -> range:
    """The places, among the tokens of a conversation that a template wrote as `text`, of what the
    template put before the first message by itself: whole turns, as a system message of its own.

    A draft model need not read them: it drafts nearly as well without (docs/lab-notes.md), and reading takes
    time. Empty if the first message is a system message, which says what was asked for. The
    beginning-of-text token is not among them, since attention rests on it.
    """
    first = messages[0].content.strip()
    if messages[0].role == "system" or not first or first not in text:
        return range(0)
    before = text[: text.index(first)]
    head = tokenize(vocabulary, before, parse_special=True)
    ends = [place for place, token in enumerate(head) if vocabulary.is_end(token)]
    if not ends:
        return range(0)
    stop = ends[-1] + 1
    if head[:stop] != list(tokens[:stop]):
        return range(0)
    # White space between two turns belongs to neither.
    while stop < len(head) and vocabulary.token_bytes(head[stop]).isspace():
        stop += 1
    start = int(head[0] == vocabulary.special_tokens()["bos"])
    return range(start, stop)


def draft_chat_tokens(
    model: LlamaModel,
    messages: Sequence[chat.Message],
    now: datetime.datetime,
    tools: ToolDefinitions = (),
) -> tuple[int, ...]:
    """A conversation as a draft model is to see it, in its own template as far as that goes, without
    its `head_of` unless that tells of tools.

    A template that knows no system message gets it at the head of the first turn; a model
    without a template that works, a base model for example, gets the turns as paragraphs.
    """
    for attempt in (messages, _without_system(messages)):
        try:
            text = chat_text(model, attempt, now, tools)
        except PromptError:
            continue
        if text is not None:
            tokens = tokenize(model.vocabulary, text, parse_special=True)
            head = range(0) if tools else head_of(model.vocabulary, text, tokens, attempt)
            return _without(tokens, head)
    paragraphs = "".join(f"{message.content}\n\n" for message in messages)
    return tuple(tokenize(model.vocabulary, paragraphs, parse_special=False))


def tokenize(vocabulary: LlamaVocabulary, text: str, *, parse_special: bool) -> list[int]:
    """A prompt's tokens, its beginning-of-text token included where the model wants one. Raises
    `PromptError` if the text has half a surrogate pair, which UTF-8 lacks."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the prompt has half a surrogate pair, {text[error.start]!r}, at character {error.start}",
            hint="give text that UTF-8 can express",
        ) from None
    bos = vocabulary.control_text(vocabulary.special_tokens()["bos"])
    # A chat template may have written the beginning-of-text token already.
    add_special = not (parse_special and bos and text.startswith(bos))
    return vocabulary.tokenize(text, add_special=add_special, parse_special=parse_special)


def _without(tokens: Sequence[int], head: range) -> tuple[int, ...]:
    return (*tokens[: head.start], *tokens[head.stop :])


def _without_system(messages: Sequence[chat.Message]) -> list[chat.Message]:
    if messages[0].role != "system" or len(messages) == 1:
        return list(messages)
    system, first, *others = messages
    return [replace(first, content=f"{system.content}\n\n{first.content}"), *others]
