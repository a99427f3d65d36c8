"""Turn the user's prompt into tokens for the target and the draft model."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from specgen.errors import PromptError, PromptLengthError, UsageError
from specgen.llama import LlamaModel
from specgen.llama.vocabulary import LlamaVocabulary
from specgen.session import chat_template as chat
from specgen.session.content_marks import unmarked
from specgen.session.special_tokens import control_names, tokenize_marked

#: The tools that a model may call, in the form of OpenAI's API.
ToolDefinitions: TypeAlias = Sequence[Mapping[str, Any]]
#: The name of a second template, for conversations with tools, in some model files.
_TOOL_TEMPLATE = "tool_use"


@dataclass(frozen=True, slots=True)
class Prompt:
    """The text before an answer: `text` as the target sees it, and its `tokens`, at least one.
    `draft_tokens` is the prompt of a draft model with another vocabulary. If it is None, the draft model
    decodes the target's tokens without those at the positions `head`. The tokens `ends` end the answer,
    besides those that end any answer of the target."""

    text: str
    tokens: tuple[int, ...]
    draft_tokens: tuple[int, ...] | None = None
    head: range = range(0)
    ends: frozenset[int] = frozenset()

    def without_head(self) -> Prompt:
        """Return the prompt without the tokens of the head."""
        return Prompt(self.text, _without(self.tokens, self.head))


@dataclass(frozen=True, slots=True)
class Prompts:
    """Makes the prompts of a target and of `own_draft`, a draft model with another vocabulary, if there is
    one. In a conversation, only the template's own text names control tokens: their names in messages and in
    descriptions of tools are plain text. In a text that is continued as it is, they become these tokens, as in
    llama.cpp. `now` is the date that some templates write, by default the present one."""

    target: LlamaModel
    own_draft: LlamaModel | None = None
    #: The size of the context, if a prompt that is certainly longer is to be refused before it is tokenized.
    n_ctx: int | None = None

    def of_text(
        self,
        text: str,
        *,
        chat: bool | None = None,
        system: str | None = None,
        now: datetime.datetime | None = None,
    ) -> Prompt:
        """Return the prompt of the user's `text`.

        If `chat` is True, the text becomes a user's turn in the target's own template, and in that of
        `own_draft`. If it is False, the text is continued as it is. None uses the template if there is one.
        Raise `UsageError` if `chat` or `system` needs a template and there is none, and `PromptError` if
        the prompt is empty or the template does not accept it.
        """
        if chat is not False and self.target.chat_template() is not None:
            return self.of_messages(messages_of(text, system), now=now)
        if chat is False and system is not None:
            raise UsageError(
                "a system message needs the chat template, and the prompt is to be used as it is"
            )
        if chat or system is not None:
            wanted = "--chat" if chat else "--system"
            raise UsageError(
                f"{wanted} needs a chat template, and {self.target.name} has none",
                hint=f"leave {wanted} out: the prompt is then continued as it is",
            )
        _check_length(self.target.vocabulary, text, self.n_ctx)
        return _prompt(text, tokenize(self.target.vocabulary, text, parse_special=True))

    def of_messages(
        self,
        messages: Sequence[chat.Message],
        *,
        now: datetime.datetime | None = None,
        tools: ToolDefinitions = (),
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Return the prompt of a conversation's next turn, in the target's own template, and in that of
        `own_draft`. Templates for tools get `tools`; all get the `variables` of `chat_template.render`.
        Raise `UsageError` if there is no template, and `PromptError` if it does not accept the messages."""
        now = now or datetime.datetime.now().astimezone()
        found = chat_tokens(self.target, messages, now, tools, variables, n_ctx=self.n_ctx)
        if found is None:
            raise UsageError(
                f"a conversation needs a chat template, and {self.target.name} has none"
            )
        text, tokens = found
        prompt = _prompt(text, tokens)
        # Templates may describe the tools before the first message, and the draft needs that description.
        head = range(0)
        if not tools:
            head = head_of(self.target.vocabulary, text, prompt.tokens, messages)
        draft_tokens = None
        if self.own_draft is not None:
            draft_tokens = draft_chat_tokens(self.own_draft, messages, now, tools, variables)
        return replace(prompt, head=head, draft_tokens=draft_tokens)

    def of_tokens(self, tokens: Sequence[int]) -> Prompt:
        """Return a prompt of these tokens of the target. Raise `PromptError` if there are none, or if the
        target lacks one of them."""
        vocabulary = self.target.vocabulary
        for token in tokens:
            if not 0 <= token < vocabulary.n_tokens:
                raise PromptError(
                    f"there is no token {token}: {self.target.name} has {vocabulary.n_tokens} tokens"
                )
        if not tokens:
            raise PromptError("the prompt is empty", hint="give some tokens to continue")
        text = b"".join(map(vocabulary.token_bytes, tokens)).decode("utf-8", "replace")
        return Prompt(text, tuple(tokens))


def _prompt(text: str, tokens: Sequence[int]) -> Prompt:
    if not tokens:
        raise PromptError("the prompt is empty", hint="give some text to continue")
    return Prompt(text, tuple(tokens))


def _check_length(vocabulary: LlamaVocabulary, text: str, n_ctx: int | None) -> None:
    """Raise `PromptLengthError` if a text has certainly more than `n_ctx` tokens."""
    if n_ctx is None or len(text) <= n_ctx:
        return
    n_least = vocabulary.fewest_tokens(text)
    if n_least > n_ctx:
        raise PromptLengthError(
            f"the prompt has at least {n_least} tokens, but the context has {n_ctx}"
        )


def messages_of(text: str, system: str | None) -> list[chat.Message]:
    """Return `text` as a user's turn, after a system message if there is one."""
    user = chat.Message("user", text)
    return [user] if system is None else [chat.Message("system", system), user]


def template_of(model: LlamaModel, *, has_tools: bool) -> str | None:
    """Return the model's template for conversations with or without tools; None if it has none."""
    named = model.chat_template(_TOOL_TEMPLATE) if has_tools else None
    return named or model.chat_template()


def chat_tokens(
    model: LlamaModel,
    messages: Sequence[chat.Message],
    now: datetime.datetime,
    tools: ToolDefinitions = (),
    variables: Mapping[str, Any] | None = None,
    *,
    n_ctx: int | None = None,
) -> tuple[str, list[int]] | None:
    """Return a conversation in the model's own template, and its tokens; None if it has no template. Raise
    `PromptError` if the template does not accept the conversation, `PromptLengthError` if it has certainly
    more than `n_ctx` tokens.

    Names of control tokens become these tokens only where the template writes all of the name.
    """
    vocabulary = model.vocabulary
    text = _chat_text(model, messages, now, tools, variables)
    if text is None:
        return None
    _check_length(vocabulary, text, n_ctx)
    tokens = tokenize(vocabulary, text, parse_special=True)
    names = control_names(vocabulary, tokens)
    try:
        marked_text = _chat_text(model, messages, now, tools, variables, marks_contents=True) or ""
    except PromptError:
        # Marks do not survive what this template does, and nothing else tells who wrote a name.
        contents = repr((messages, tools, variables))
        if any(name in contents for name in names):
            raise
        return text, tokens
    if all(text.count(name) == marked_text.count(name) for name in names):
        return text, tokens
    bos = vocabulary.control_text(vocabulary.special_tokens()["bos"])
    add_special = not (bos and marked_text.startswith(bos))
    return unmarked(marked_text), tokenize_marked(vocabulary, marked_text, add_special=add_special)


def _chat_text(
    model: LlamaModel,
    messages: Sequence[chat.Message],
    now: datetime.datetime,
    tools: ToolDefinitions,
    variables: Mapping[str, Any] | None,
    *,
    marks_contents: bool = False,
) -> str | None:
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
        variables=variables,
        marks_contents=marks_contents,
    )


def head_of(
    vocabulary: LlamaVocabulary, text: str, tokens: Sequence[int], messages: Sequence[chat.Message]
) -> range:
    """Return the positions, among the tokens of the rendered conversation `text`, of the turns that the
    template itself adds before the first message, such as a default system message.

    A draft model does not need them: it drafts nearly as well without (docs/lab-notes.md), and its
    prefill is shorter. The range is empty if the first message is a system message, since that one is the
    user's. The beginning-of-text token is not in it, since attention rests on it.
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
    variables: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Return a conversation for a draft model with another vocabulary, in its own template and tokens. The
    tokens of `head_of` are left out unless there are tools.

    If the template does not accept a system message, that message goes to the start of the first turn. A
    model without a template that works, a base model for example, gets the turns as paragraphs.
    """
    for attempt in (messages, _without_system(messages)):
        try:
            found = chat_tokens(model, attempt, now, tools, variables)
        except PromptError:
            continue
        if found is not None:
            text, tokens = found
            head = range(0) if tools else head_of(model.vocabulary, text, tokens, attempt)
            return _without(tokens, head)
    paragraphs = "".join(f"{message.content}\n\n" for message in messages)
    return tuple(tokenize(model.vocabulary, paragraphs, parse_special=False))


def tokenize(vocabulary: LlamaVocabulary, text: str, *, parse_special: bool) -> list[int]:
    """Return a prompt's tokens, with the beginning-of-text token if the model wants one. Raise
    `PromptError` if the text has half a surrogate pair, which UTF-8 cannot express."""
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
