"""A conversation as a model sees it: rendered with its chat template, and tokenized."""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from specgen.errors import ModelFileError, PromptError
from specgen.llama import LlamaModel
from specgen.llama.vocabulary import LlamaVocabulary
from specgen.session.prompts.marked_text import unmarked
from specgen.session.prompts.sandbox import check_syntax
from specgen.session.prompts.template import Message, render
from specgen.session.prompts.template_fit import render_fitted
from specgen.session.prompts.tokens import (
    begins_with_bos,
    check_length,
    tokenize,
    tokenize_marked,
)
from specgen.text.built_in_templates import BUILT_IN
from specgen.text.overlap import common_prefix_length

#: The tools that a model may call, in the format of OpenAI's API.
Tools: TypeAlias = Sequence[Mapping[str, Any]]
#: The name of the second template that some model files have, for conversations with tools.
_TOOL_TEMPLATE = "tool_use"
_CHATML = "chatml"
#: The mark at the end of a turn in ChatML.
_CHATML_END = "<|im_end|>"
#: Any question will do to find out where the user's begins.
_OTHER_QUESTION = "?"


def template_of(model: LlamaModel, *, has_tools: bool) -> str | None:
    """Return a model's chat template; None if it has none.

    Args:
        model: The model.
        has_tools: Whether to prefer its template for tools, if it has a separate one.
    """
    named = model.chat_template(_TOOL_TEMPLATE) if has_tools else None
    return named or model.chat_template()


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template, of a model or in place of a missing one."""

    #: The template (Jinja).
    text: str
    #: Texts that end an answer, since a model without a template may have no such tokens.
    stop: tuple[str, ...] = ()
    #: A sentence for the user if it replaces a missing template, else empty.
    notice: str = ""


def substitute_template(model: LlamaModel) -> ChatTemplate:
    """Return the template for conversations with a model that has no default one.

    It is the model's template for tools, if it has one, or else ChatML, as in llama.cpp.
    """
    name = _TOOL_TEMPLATE
    text = model.chat_template(_TOOL_TEMPLATE)
    stop: tuple[str, ...] = ()
    if text is None:
        name = _CHATML
        text = BUILT_IN[_CHATML]
        stop = (_CHATML_END,)
    notice = (
        f"a conversation needs a chat template, and {model.name} has no default one: "
        f"{name} is used; choose another with --chat-template"
    )
    return ChatTemplate(text, stop, notice)


def missing_template_notice(model: LlamaModel) -> str:
    """Return a sentence about what replaces a missing template; empty if none is missing."""
    if model.chat_template() is not None:
        return ""
    return substitute_template(model).notice


def template_problem(model: LlamaModel) -> str:
    """Return a description of the first syntax error in a model's templates; empty if none."""
    for name in (None, _TOOL_TEMPLATE):
        template = model.chat_template(name)
        problem = check_syntax(template) if template else ""
        if problem:
            return f"{model.name}: its chat template is not valid: {problem}"
    return ""


def check_template(model: LlamaModel) -> None:
    """Check that a model's chat templates have no syntax error.

    Raises:
        ModelFileError: If one has.
    """
    problem = template_problem(model)
    if problem:
        raise ModelFileError(
            problem, "choose another with --chat-template; `specgen run --raw` uses none"
        )


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The text that a template makes of a conversation, and its tokens."""

    #: The text, with the names of control tokens.
    text: str
    #: The text in tokens of the model.
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatTurns:
    """A conversation up to the turn that the model will write."""

    #: The messages so far.
    messages: Sequence[Message]
    #: The current time, which some templates write.
    now: datetime.datetime
    #: The tools that the model may call.
    tools: Tools
    #: More variables for templates.
    variables: Mapping[str, Any]

    def template_for(self, model: LlamaModel) -> ChatTemplate:
        """Return the chat template of a model for this conversation, or what replaces it."""
        own_template = self._own_template(model)
        if own_template is None:
            return substitute_template(model)
        return ChatTemplate(own_template)

    def _own_template(self, model: LlamaModel) -> str | None:
        has_results = any(message.role == "tool" for message in self.messages)
        return template_of(model, has_tools=bool(self.tools) or has_results)

    def rendered(
        self,
        vocabulary: LlamaVocabulary,
        template: str,
        n_ctx: int | None = None,
    ) -> RenderedChat:
        """Render and tokenize the conversation.

        Only the template can write control tokens: the name of one in a message stays plain text.

        Args:
            vocabulary: The vocabulary of the model.
            template: The chat template.
            n_ctx: A text that certainly has more tokens is refused; None refuses none.

        Returns:
            The text and its tokens.

        Raises:
            PromptError: If the template fails, or the text is too long.
        """
        write = self._writer(vocabulary, template)
        fitted = render_fitted(
            write,
            template,
            self.messages,
            has_tools=bool(self.tools),
            variables=self.variables,
        )
        check_length(vocabulary, fitted.text, n_ctx)
        tokens = tokenize(vocabulary, fitted.text, parse_special=True)
        plain = RenderedChat(fitted.text, tokens)

        # Did the template write the names of all control tokens, or are some of them in messages?
        # To find out, render again with every character of the messages marked (`marked_text.py`).
        names = [
            vocabulary.token_text(token) for token in set(tokens) if vocabulary.is_control(token)
        ]
        try:
            marked_text = write(fitted.messages, marks_contents=True)
        except PromptError:
            # This template fails on marked messages. The plain text is safe only if no message
            # contains one of the names.
            contents = repr((self.messages, self.tools, self.variables))
            if any(name in contents for name in names):
                raise
            return plain
        if all(plain.text.count(name) == marked_text.count(name) for name in names):
            return plain  # the template wrote all of them
        add_special = not begins_with_bos(vocabulary, marked_text)
        tokens = tokenize_marked(vocabulary, marked_text, add_special=add_special)
        return RenderedChat(unmarked(marked_text), tokens)

    def _writer(
        self,
        vocabulary: LlamaVocabulary,
        template: str,
    ) -> Callable[..., str]:
        """Return `render` with all arguments except the messages, and whether to mark them."""
        special_tokens = vocabulary.special_tokens()
        return functools.partial(
            render,
            template,
            bos_token=vocabulary.control_text(special_tokens["bos"]),
            eos_token=vocabulary.control_text(special_tokens["eos"]),
            now=self.now,
            tools=self.tools,
            variables=self.variables,
        )

    def skipped_prefix(
        self,
        vocabulary: LlamaVocabulary,
        rendered: RenderedChat,
    ) -> range:
        """Return the positions of turns that the template itself adds before the first message.

        Draft models skip them, such as a default system message. The range is empty if there are
        none, if tools may be described there, or if the user gave a system message. The
        beginning-of-text token is never skipped, since models pay much attention to it.
        """
        first = self.messages[0]
        content = first.content.strip()
        has_own_beginning = bool(self.tools) or first.role == "system"
        if has_own_beginning or not content or content not in rendered.text:
            return range(0)
        before, _, _ = rendered.text.partition(content)
        tokens = tokenize(vocabulary, before, parse_special=True)
        # The lengths of `tokens` up to the end of each turn.
        ends = [n for n, token in enumerate(tokens, 1) if vocabulary.is_end(token)]
        if not ends:
            return range(0)
        stop = ends[-1]
        # Cut off before the first message, the text may be tokenized differently.
        if tokens[:stop] != list(rendered.tokens[:stop]):
            return range(0)
        # Also skip white space between this turn and the next.
        while stop < len(tokens) and vocabulary.token_bytes(tokens[stop]).isspace():
            stop += 1
        has_bos = tokens[0] == vocabulary.special_tokens()["bos"]
        return range(1 if has_bos else 0, stop)

    def n_instructions(
        self,
        vocabulary: LlamaVocabulary,
        template: str,
        rendered: RenderedChat,
    ) -> int:
        """Return the number of first tokens that do not depend on what the user writes.

        These are the system message and the tools of an agent, with which its next conversation is
        likely to begin. The result is 0 without tools, and once one of them was called.

        Args:
            vocabulary: The vocabulary of the model.
            template: The chat template.
            rendered: What the template makes of this conversation.
        """
        has_calls = any(message.tool_calls for message in self.messages)
        if not self.tools or has_calls:
            return 0
        # Where it diverges from another conversation with the same instructions.
        system_messages = [message for message in self.messages if message.role == "system"]
        try:
            fitted = render_fitted(
                self._writer(vocabulary, template),
                template,
                [*system_messages, Message("user", _OTHER_QUESTION)],
                has_tools=True,
                variables=self.variables,
            )
        except PromptError:
            return 0
        other_tokens = tokenize(vocabulary, fitted.text, parse_special=True)
        return common_prefix_length(rendered.tokens, other_tokens)

    def draft_tokens(self, model: LlamaModel) -> tuple[int, ...]:
        """Return the conversation in tokens of a draft with another vocabulary.

        It is rendered with the draft's own template, without the turns that this adds before the
        first message. If the draft has no template, or it fails, each turn becomes a paragraph.
        """
        vocabulary = model.vocabulary
        template = self._own_template(model)
        if template is not None:
            with contextlib.suppress(PromptError):
                rendered = self.rendered(vocabulary, template)
                skipped = self.skipped_prefix(vocabulary, rendered)
                tokens = rendered.tokens
                return (*tokens[: skipped.start], *tokens[skipped.stop :])
        paragraphs = [f"{message.content}\n\n" for message in self.messages]
        return tuple(tokenize(vocabulary, "".join(paragraphs), parse_special=False))
