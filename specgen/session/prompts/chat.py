"""A conversation as a model reads it: rendered with its chat template, and tokenized."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from specgen.errors import PromptError
from specgen.llama import LlamaModel
from specgen.llama.vocabulary import LlamaVocabulary
from specgen.session.prompts.marked_text import unmarked
from specgen.session.prompts.template import Message, render
from specgen.session.prompts.tokens import (
    begins_with_bos,
    check_length,
    tokenize,
    tokenize_marked,
)

#: The tools that a model may call, in the form of OpenAI's API.
Tools: TypeAlias = Sequence[Mapping[str, Any]]
#: The name of a second template, for conversations with tools, in some model files.
_TOOL_TEMPLATE = "tool_use"


def template_of(model: LlamaModel, *, has_tools: bool) -> str | None:
    """Return a model's chat template, perhaps its own for tools; None if it has none."""
    named = model.chat_template(_TOOL_TEMPLATE) if has_tools else None
    return named or model.chat_template()


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as a template writes it, and its tokens."""

    text: str
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatTurns:
    """A conversation up to the turn that the model will write."""

    messages: Sequence[Message]
    now: datetime.datetime
    tools: Tools
    #: More variables for templates.
    variables: Mapping[str, Any]

    def rendered(self, model: LlamaModel, n_ctx: int | None = None) -> RenderedChat | None:
        """Return the conversation for a model; None if it has no chat template.

        Only the template names control tokens: such a name in a message stays plain text.

        Raises:
            PromptError: The template fails, or the text has certainly more than `n_ctx` tokens.
        """
        has_tools = bool(self.tools) or any(message.role == "tool" for message in self.messages)
        template = template_of(model, has_tools=has_tools)
        if template is None:
            return None
        vocabulary = model.vocabulary
        special = vocabulary.special_tokens()

        def write(*, marks_contents: bool) -> str:
            return render(
                template,
                self.messages,
                bos_token=vocabulary.control_text(special["bos"]),
                eos_token=vocabulary.control_text(special["eos"]),
                now=self.now,
                tools=self.tools,
                variables=self.variables,
                marks_contents=marks_contents,
            )

        text = write(marks_contents=False)
        check_length(vocabulary, text, n_ctx)
        plain = RenderedChat(text, tokenize(vocabulary, text, parse_special=True))
        controls = [token for token in set(plain.tokens) if vocabulary.is_control(token)]
        names = [vocabulary.token_text(token) for token in controls]
        try:
            marked_text = write(marks_contents=True)
        except PromptError:
            # Marks do not survive what this template does, and nothing else tells who wrote a name.
            contents = repr((self.messages, self.tools, self.variables))
            if any(name in contents for name in names):
                raise
            return plain
        if all(text.count(name) == marked_text.count(name) for name in names):
            return plain
        add_special = not begins_with_bos(vocabulary, marked_text)
        tokens = tokenize_marked(vocabulary, marked_text, add_special=add_special)
        return RenderedChat(unmarked(marked_text), tokens)

    def skipped_prefix(self, vocabulary: LlamaVocabulary, rendered: RenderedChat) -> range:
        """Return the positions of the turns that the template itself adds before the first message.

        There are none with tools, which may be described there, or before the user's own system
        message. The beginning-of-text token is not skipped: attention rests on it.
        """
        first = self.messages[0]
        content = first.content.strip()
        has_own_beginning = bool(self.tools) or first.role == "system"
        if has_own_beginning or not content or content not in rendered.text:
            return range(0)
        before = rendered.text[: rendered.text.index(content)]
        tokens = tokenize(vocabulary, before, parse_special=True)
        ends = [n for n, token in enumerate(tokens, 1) if vocabulary.is_end(token)]
        if not ends:
            return range(0)
        stop = ends[-1]
        if tokens[:stop] != list(rendered.tokens[:stop]):
            return range(0)
        # White space between two turns belongs to neither.
        while stop < len(tokens) and vocabulary.token_bytes(tokens[stop]).isspace():
            stop += 1
        has_bos = tokens[0] == vocabulary.special_tokens()["bos"]
        return range(1 if has_bos else 0, stop)

    def draft_tokens(self, model: LlamaModel) -> tuple[int, ...]:
        """Return the conversation for a draft with another vocabulary, without its skipped prefix.

        Without a working template, the turns are paragraphs.
        """
        with contextlib.suppress(PromptError):
            rendered = self.rendered(model)
            if rendered is not None:
                skipped = self.skipped_prefix(model.vocabulary, rendered)
                tokens = rendered.tokens
                return (*tokens[: skipped.start], *tokens[skipped.stop :])
        paragraphs = "".join(f"{message.content}\n\n" for message in self.messages)
        return tuple(tokenize(model.vocabulary, paragraphs, parse_special=False))
