"""Turn a text or a conversation into a prompt: tokens for the target and for its draft model."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specgen.errors import PromptError, UsageError
from specgen.llama import LlamaModel
from specgen.llama.vocabulary import LlamaVocabulary
from specgen.session.prompts.chat import ChatTurns, Tools
from specgen.session.prompts.template import Message
from specgen.session.prompts.thoughts import begun_in, thoughts_after
from specgen.session.prompts.tokens import check_length, tokenize, tokens_of
from specgen.text.grammar.free_text import ThoughtMarks

#: How a prompt for models of the gpt-oss family ends.
_HARMONY_END = "<|start|>assistant"
#: What such a model writes before the text of its answer.
_HARMONY_FINAL = "<|channel|>final<|message|>"


@dataclass(frozen=True, slots=True)
class Prompt:
    """The text before an answer."""

    #: The text as the target sees it, with the names of control tokens.
    text: str
    #: The text in tokens of the target.
    tokens: tuple[int, ...]
    #: The prompt for a draft with another vocabulary, in its own tokens and its own template; None
    #: if there is no such draft.
    draft_tokens: tuple[int, ...] | None = None
    #: The positions of turns that the template itself adds before the first message. Draft models
    #: skip them.
    skipped_prefix: range = range(0)
    #: Tokens that end the answer, in addition to the target's end-of-text tokens.
    ends: frozenset[int] = frozenset()
    #: Texts that end the answer, in addition to those of the request.
    stop: tuple[str, ...] = ()
    #: The marks around the thoughts that the answer may have; None if it has none.
    thoughts: ThoughtMarks | None = None
    #: The user's first message, which identifies a conversation; empty without a conversation.
    subject: str = ""
    #: The number of its first tokens that do not depend on the user: the system message and the
    #: tools of an agent. It is 0 without tools, and once one of them was called.
    n_instructions: int = 0
    #: A sentence for the user about the template that replaces a missing one; empty if none does.
    notice: str = ""

    @classmethod
    def of(cls, text: str, tokens: Sequence[int]) -> Prompt:
        """Return a prompt with these tokens.

        Raises:
            PromptError: If there are no tokens.
        """
        if not tokens:
            raise PromptError("the prompt is empty", hint="give something to continue")
        return cls(text, tuple(tokens))


@dataclass(frozen=True, slots=True)
class Prompts:
    """Makes the prompts of a target and its draft.

    In a conversation, only the template can write control tokens. In a text that is continued as it
    is, the user can write them too, as in llama.cpp. An empty prompt raises `PromptError`.
    """

    #: The target.
    target: LlamaModel
    #: The draft's model if its drafts are translated from another vocabulary, else None.
    translated_draft: LlamaModel | None = None
    #: A prompt that certainly has more tokens is refused before it is tokenized; None refuses none.
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
            chat: Whether the text is a user's turn in a chat template (True) or is continued as it
                is (False). None uses a template if the model has one, or for a system message.
            system: A system message before it.
            now: The time that templates write; None is the present.

        Raises:
            UsageError: If there is a system message, and `chat` is False.
            PromptError: If the text is empty, too long, or refused by the template.
        """
        if chat is False and system is not None:
            raise UsageError(
                "a system message needs the chat template, and the prompt is to be used as it is"
            )
        is_conversation = chat
        if is_conversation is None:
            has_template = self.target.chat_template() is not None
            is_conversation = has_template or system is not None
        if is_conversation:
            messages = [Message("user", text)]
            if system is not None:
                messages.insert(0, Message("system", system))
            return self.of_messages(messages, now=now)
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
        """Return the prompt for the next turn of a conversation, in the models' own templates.

        If the target has none, a substitute is used, and the prompt has a notice.

        Args:
            messages: The conversation so far.
            now: The time that templates write; None is the present.
            tools: The tools that the model may call.
            variables: Variables for the templates. They take precedence over `self.variables`.

        Raises:
            PromptError: If there are no messages, the template refuses them, or they are too long.
        """
        if not messages:
            raise PromptError("the conversation has no messages", hint="give at least one")
        now = now or datetime.datetime.now().astimezone()
        chat = ChatTurns(messages, now, tools, {**self.variables, **(variables or {})})
        template = chat.template_for(self.target)
        rendered = chat.rendered(self.target.vocabulary, template.text, self.n_ctx)
        draft_tokens: tuple[int, ...] | None = None
        if self.translated_draft is not None:
            draft_tokens = chat.draft_tokens(self.translated_draft)
        user_messages = (message.content for message in messages if message.role == "user")
        return replace(
            Prompt.of(rendered.text, rendered.tokens),
            skipped_prefix=chat.skipped_prefix(self.target.vocabulary, rendered),
            draft_tokens=draft_tokens,
            stop=template.stop,
            thoughts=thoughts_after(rendered.text, template.text),
            subject=next(user_messages, ""),
            n_instructions=chat.n_instructions(self.target.vocabulary, template.text, rendered),
            notice=template.notice,
        )

    def of_tokens(self, parts: Sequence[int | str]) -> Prompt:
        """Return a prompt that is given as token ids of the target and texts, in any order.

        Raises:
            PromptError: If it is empty, too long, or has a token id that the target lacks.
        """
        for part in parts:
            if isinstance(part, str):
                check_length(self.target.vocabulary, part, self.n_ctx)
        tokens = tokens_of(self.target.vocabulary, parts, parse_special=True)
        return Prompt.of(self._text_of(tokens), tokens)

    def followed_by(
        self,
        prompt: Prompt,
        answer: Sequence[int],
    ) -> Prompt:
        """Return a prompt with the tokens of an answer appended, also for the draft.

        Its `text` stays as it is.
        """
        draft_tokens = prompt.draft_tokens
        if draft_tokens is not None and self.translated_draft is not None:
            vocabulary = self.translated_draft.vocabulary
            draft_answer = vocabulary.tokenize_inside(self._text_of(answer))
            draft_tokens = (*draft_tokens, *draft_answer)
        return replace(prompt, tokens=(*prompt.tokens, *answer), draft_tokens=draft_tokens)

    def after(self, earlier: Sequence[int], prompt: Prompt) -> Prompt:
        """Return a prompt that continues an earlier one and its answer.

        Args:
            earlier: The tokens of the earlier prompt and its answer.
            prompt: The prompt; its own beginning-of-text token is left out.

        Raises:
            PromptError: If a token is not in the vocabulary of the target.
        """
        vocabulary = self.target.vocabulary
        vocabulary.check(earlier)
        tokens = _without_bos(vocabulary, prompt.tokens)
        earlier_text = self._text_of(earlier)
        draft_tokens = prompt.draft_tokens
        if draft_tokens is not None and self.translated_draft is not None:
            draft_vocabulary = self.translated_draft.vocabulary
            earlier_draft_tokens = draft_vocabulary.tokenize(
                earlier_text, add_special=True, parse_special=False
            )
            draft_tokens = (*earlier_draft_tokens, *_without_bos(draft_vocabulary, draft_tokens))
        return replace(
            prompt,
            text=earlier_text + prompt.text,
            tokens=(*earlier, *tokens),
            draft_tokens=draft_tokens,
            skipped_prefix=range(0),
            n_instructions=0,
        )

    def continued(self, prompt: Prompt, beginning: Message) -> Prompt:
        """Return a prompt with the beginning of the model's turn appended, for it to go on.

        Args:
            prompt: The prompt up to where the model's turn begins.
            beginning: The beginning of that turn. Its reasoning is used only if the prompt opens
                a thought.

        Raises:
            PromptError: If the content is too long.
        """
        inside = self.target.vocabulary.tokenize_inside
        check_length(self.target.vocabulary, beginning.content, self.n_ctx)
        marks = begun_in(prompt.text)
        if marks is None:
            mark = _HARMONY_FINAL if prompt.text.endswith(_HARMONY_END) else ""
            text = mark + beginning.content
            answer = inside(mark, parse_special=True) + inside(beginning.content)
        else:
            reasoning = beginning.reasoning or ""
            # While `Prompt.text` ends with the mark that opens a thought, the answer is taken to
            # begin within the thought. So reasoning without content after it must not be appended
            # to the text, although its tokens are.
            text = ""
            answer = inside(reasoning)
            if beginning.content:
                text = f"{reasoning}{marks.end}\n\n{beginning.content}"
                answer += inside(marks.end, parse_special=True)
                answer += inside(f"\n\n{beginning.content}")
        thoughts = None if beginning.content else prompt.thoughts
        prompt = replace(prompt, text=prompt.text + text, thoughts=thoughts)
        return self.followed_by(prompt, answer)

    def _text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens of the target, in which control tokens are empty."""
        data = b"".join(map(self.target.vocabulary.token_bytes, tokens))
        return data.decode(errors="replace")


def _without_bos(vocabulary: LlamaVocabulary, tokens: Sequence[int]) -> Sequence[int]:
    """Return tokens without a beginning-of-text token at their beginning."""
    bos = vocabulary.special_tokens()["bos"]
    return tokens[1:] if tokens and tokens[0] == bos else tokens
