"""Turn what the user asks into a prompt: tokens for the target and for its draft model."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specgen.errors import PromptError, UsageError
from specgen.llama import LlamaModel
from specgen.session.prompts.chat import ChatTurns, Tools, template_of
from specgen.session.prompts.template import Message
from specgen.session.prompts.thoughts import begun_in, thoughts_after
from specgen.session.prompts.tokens import check_length, tokenize, tokens_of
from specgen.text.grammar.free_text import ThoughtMarks

#: How a prompt of gpt-oss's family ends, and what its model writes before the text of its answer.
_HARMONY_END = "<|start|>assistant"
_HARMONY_FINAL = "<|channel|>final<|message|>"


@dataclass(frozen=True, slots=True)
class Prompt:
    """The text before an answer."""

    #: As the target sees it.
    text: str
    tokens: tuple[int, ...]
    #: The prompt of a draft with another vocabulary, in its own template.
    draft_tokens: tuple[int, ...] | None = None
    #: The positions of turns that the template itself adds before the first message. Draft models
    #: leave them out.
    skipped_prefix: range = range(0)
    #: Tokens that end the answer, besides the target's own.
    ends: frozenset[int] = frozenset()
    #: The marks of the thoughts that the answer may have.
    thoughts: ThoughtMarks | None = None
    #: The user's first message, which all prompts of a conversation have; empty without a
    #: conversation.
    subject: str = ""

    @classmethod
    def of(cls, text: str, tokens: Sequence[int]) -> Prompt:
        """Return the prompt of a text. Raise `PromptError` if it is empty."""
        if not tokens:
            raise PromptError("the prompt is empty", hint="give something to continue")
        return cls(text, tuple(tokens))


@dataclass(frozen=True, slots=True)
class Prompts:
    """Makes the prompts of a target and its draft.

    In a conversation, only the template names control tokens; a text that is continued names them,
    too, as in llama.cpp. An empty prompt raises `PromptError`.
    """

    target: LlamaModel
    #: A draft with another vocabulary.
    own_draft: LlamaModel | None = None
    #: A prompt of certainly more tokens is refused before it is tokenized.
    n_ctx: int | None = None
    #: More variables for chat templates.
    variables: Mapping[str, Any] = field(default_factory=dict)

    def of_text(
        self,
        text: str,
        *,
        chat: bool | None = None,
        system: str | None = None,
        now: datetime.datetime | None = None,
    ) -> Prompt:
        """Return the prompt of a text.

        Args:
            text: The user's turn, or the text to continue.
            chat: Whether it is a turn in the chat template; None: if there is one.
            system: A system message before it, which needs the template.
            now: The time for templates; None is the present.

        Raises:
            UsageError: A template is needed, and there is none.
            PromptError: The text is empty, too long, or refused by the template.
        """
        if chat is not False and self.target.chat_template() is not None:
            messages = [Message("user", text)]
            if system is not None:
                messages.insert(0, Message("system", system))
            return self.of_messages(messages, now=now)
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
        check_length(self.target.vocabulary, text, self.n_ctx)
        return Prompt.of(text, tokenize(self.target.vocabulary, text, parse_special=True))

    def of_messages(
        self,
        messages: Sequence[Message],
        *,
        now: datetime.datetime | None = None,
        tools: Tools = (),
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Return the prompt of the next turn, in the models' own templates.

        Args:
            messages: The conversation so far.
            now: The time for templates; None is the present.
            tools: The tools that the model may call.
            variables: Variables for the templates, besides those of all prompts.

        Raises:
            UsageError: The target has no template.
            PromptError: It refuses the messages, or they are too long.
        """
        now = now or datetime.datetime.now().astimezone()
        chat = ChatTurns(messages, now, tools, {**self.variables, **(variables or {})})
        rendered = chat.rendered(self.target, self.n_ctx)
        if rendered is None:
            raise UsageError(
                f"a conversation needs a chat template, and {self.target.name} has none"
            )
        template = template_of(self.target, has_tools=bool(tools)) or ""
        draft_tokens: tuple[int, ...] | None = None
        if self.own_draft is not None:
            draft_tokens = chat.draft_tokens(self.own_draft)
        users = (message.content for message in messages if message.role == "user")
        return replace(
            Prompt.of(rendered.text, rendered.tokens),
            skipped_prefix=chat.skipped_prefix(self.target.vocabulary, rendered),
            draft_tokens=draft_tokens,
            thoughts=thoughts_after(rendered.text, template),
            subject=next(users, ""),
        )

    def of_tokens(self, parts: Sequence[int | str]) -> Prompt:
        """Return a prompt of tokens of the target, with texts among them. Raise `PromptError`."""
        for part in parts:
            if isinstance(part, str):
                check_length(self.target.vocabulary, part, self.n_ctx)
        tokens = tokens_of(self.target.vocabulary, parts, parse_special=True)
        return Prompt.of(self._text_of(tokens), tokens)

    def followed_by(self, prompt: Prompt, answer: Sequence[int]) -> Prompt:
        """Return a prompt with more tokens of the target after it."""
        draft_tokens = prompt.draft_tokens
        if draft_tokens is not None and self.own_draft is not None:
            own = self.own_draft.vocabulary.tokenize_inside(self._text_of(answer))
            draft_tokens = (*draft_tokens, *own)
        return replace(prompt, tokens=(*prompt.tokens, *answer), draft_tokens=draft_tokens)

    def continued(self, prompt: Prompt, begun: Message) -> Prompt:
        """Return a prompt with the beginning of the model's turn after it.

        Its reasoning goes into a thought that the prompt has opened.
        """
        inside = self.target.vocabulary.tokenize_inside
        check_length(self.target.vocabulary, begun.content, self.n_ctx)
        marks = begun_in(prompt.text)
        if marks is None:
            mark = _HARMONY_FINAL if prompt.text.endswith(_HARMONY_END) else ""
            text = mark + begun.content
            answer = inside(mark, parse_special=True) + inside(begun.content)
        else:
            reasoning = begun.reasoning or ""
            # If a prompt's text ends with the mark, its answer goes on thinking. So the reasoning
            # becomes part of the text only with an answer after it.
            text = ""
            answer = inside(reasoning)
            if begun.content:
                text = f"{reasoning}{marks.end}\n\n{begun.content}"
                answer += inside(marks.end, parse_special=True)
                answer += inside(f"\n\n{begun.content}")
        thoughts = None if begun.content else prompt.thoughts
        prompt = replace(prompt, text=prompt.text + text, thoughts=thoughts)
        return self.followed_by(prompt, answer)

    def _text_of(self, tokens: Sequence[int]) -> str:
        data = b"".join(map(self.target.vocabulary.token_bytes, tokens))
        return data.decode(errors="replace")
