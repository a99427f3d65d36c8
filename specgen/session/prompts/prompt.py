"""Turn the user's prompt into tokens for the target and the draft model."""

from __future__ import annotations

import contextlib
import datetime
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from specgen.errors import PromptError, PromptLengthError, UsageError
from specgen.llama import LlamaModel
from specgen.llama.vocabulary import LlamaVocabulary
from specgen.session.prompts.template import Message, render, unmarked
from specgen.session.prompts.thoughts import begun_in, thoughts_behind
from specgen.text.grammar.free_text import ThoughtMarks

#: The tools that a model may call, in the form of OpenAI's API.
_Tools: TypeAlias = Sequence[Mapping[str, Any]]
#: The name of a second template, for conversations with tools, in some model files.
_TOOL_TEMPLATE = "tool_use"
#: What C's `isspace` takes for white space.
_SPACE = r"[ \t\n\v\f\r]*"


@dataclass(frozen=True, slots=True)
class Prompt:
    """The text before an answer as the target sees it, and its tokens. `draft_tokens` are those of
    a draft with another vocabulary, in its own template. `ends` end the answer, besides the
    target's own.
    """

    text: str
    tokens: tuple[int, ...]
    draft_tokens: tuple[int, ...] | None = None
    #: The positions of turns that the template itself adds before the first message; draft models
    #: leave them out.
    head: range = range(0)
    ends: frozenset[int] = frozenset()
    #: The marks of the thoughts that the answer may have.
    thoughts: ThoughtMarks | None = None
    #: The first message of the user, which all prompts of a conversation have; empty without a
    #: conversation.
    subject: str = ""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Makes the prompts of a target and of `own_draft`, a draft with another vocabulary. In a
    conversation, only the template names control tokens; a text that is continued names them, too,
    as in llama.cpp. `variables` are for all templates. Raise `PromptError` for an empty prompt; one
    of certainly more than `n_ctx` tokens is not even tokenized.
    """

    target: LlamaModel
    own_draft: LlamaModel | None = None
    n_ctx: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    def of_text(
        self,
        text: str,
        *,
        chat: bool | None = None,
        system: str | None = None,
        now: datetime.datetime | None = None,
    ) -> Prompt:
        """Return the prompt of a text: with `chat` a user's turn in a template, without it a text
        to continue; None: if there is a template. Raise `UsageError` if one is needed and there is
        none.
        """
        if chat is not False and self.target.chat_template() is not None:
            before = [] if system is None else [Message("system", system)]
            return self.of_messages([*before, Message("user", text)], now=now)
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
        return make_prompt(text, tokenize(self.target.vocabulary, text, parse_special=True))

    def of_messages(
        self,
        messages: Sequence[Message],
        *,
        now: datetime.datetime | None = None,
        tools: _Tools = (),
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Return the prompt of the next turn, in the models' own templates. Raise `UsageError`,
        `PromptError`.
        """
        now = now or datetime.datetime.now().astimezone()
        chat = _Conversation(messages, now, tools, {**self.variables, **(variables or {})})
        found = chat.tokens(self.target, self.n_ctx)
        if found is None:
            raise UsageError(
                f"a conversation needs a chat template, and {self.target.name} has none"
            )
        template = template_of(self.target, has_tools=bool(tools)) or ""
        return replace(
            make_prompt(*found),
            head=chat.head(self.target.vocabulary, *found),
            draft_tokens=None if self.own_draft is None else chat.draft_tokens(self.own_draft),
            thoughts=thoughts_behind(found[0], template),
            subject=next((each.content for each in messages if each.role == "user"), ""),
        )

    def of_tokens(self, parts: Sequence[int | str]) -> Prompt:
        """Return a prompt of these tokens of the target, with the texts among them. Raise
        `PromptError`.
        """
        for part in parts:
            if isinstance(part, str):
                check_length(self.target.vocabulary, part, self.n_ctx)
        tokens = tokens_of(self.target.vocabulary, parts, parse_special=True)
        return make_prompt(self._text_of(tokens), tokens)

    def followed_by(self, prompt: Prompt, answer: Sequence[int]) -> Prompt:
        draft_tokens = prompt.draft_tokens
        if draft_tokens is not None and self.own_draft is not None:
            own = self.own_draft.vocabulary.tokenize_inside(self._text_of(answer))
            draft_tokens = (*draft_tokens, *own)
        return replace(prompt, tokens=(*prompt.tokens, *answer), draft_tokens=draft_tokens)

    def continued(self, prompt: Prompt, begun: Message) -> Prompt:
        """Return a prompt with the beginning of the model's turn behind it, its reasoning in an
        open thought.
        """
        inside, marks = self.target.vocabulary.tokenize_inside, begun_in(prompt.text)
        check_length(self.target.vocabulary, begun.content, self.n_ctx)
        if marks is None:
            # What a model of gpt-oss's family writes before the text of its answer.
            is_harmony = prompt.text.endswith("<|start|>assistant")
            mark = "<|channel|>final<|message|>" if is_harmony else ""
            text, answer = mark + begun.content, inside(mark, parse_special=True)
            answer += inside(begun.content)
        else:
            answer, text = inside(begun.reasoning or ""), ""
            if begun.content:
                text = f"{begun.reasoning or ''}{marks.end}\n\n{begun.content}"
                answer += inside(marks.end, parse_special=True)
                answer += inside(f"\n\n{begun.content}")
        # A prompt whose text ends with the mark is one whose answer goes on thinking.
        thoughts = None if begun.content else prompt.thoughts
        prompt = replace(prompt, text=prompt.text + text, thoughts=thoughts)
        return self.followed_by(prompt, answer)

    def _text_of(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.target.vocabulary.token_bytes, tokens)).decode(errors="replace")


def template_of(model: LlamaModel, *, has_tools: bool) -> str | None:
    named = model.chat_template(_TOOL_TEMPLATE) if has_tools else None
    return named or model.chat_template()


def tokenize(vocabulary: LlamaVocabulary, text: str, *, parse_special: bool) -> list[int]:
    """Return a prompt's tokens, with the beginning-of-text token if the model wants one. Raise
    `PromptError`.
    """
    # A chat template may have written the beginning-of-text token already.
    add_special = not (parse_special and _begins(vocabulary, text))
    return vocabulary.tokenize(text, add_special=add_special, parse_special=parse_special)


def tokens_of(
    vocabulary: LlamaVocabulary, parts: Sequence[int | str], *, parse_special: bool
) -> list[int]:
    """Return the tokens of a text in parts, some of which are tokens already. Raise `PromptError`."""
    found: list[int] = []
    for part in parts:
        if isinstance(part, int):
            found.append(part)
        elif found:
            found += vocabulary.tokenize_inside(part, parse_special=parse_special)
        else:
            found += vocabulary.tokenize(part, add_special=True, parse_special=parse_special)
    vocabulary.check(found)
    return found


def tokenize_marked(
    vocabulary: LlamaVocabulary, marked_text: str, *, add_special: bool
) -> list[int]:
    """Return the tokens of a rendered conversation with marked contents. Like llama.cpp, it cuts
    the text at names of control tokens, the longest first, but only where nothing of the name is
    marked.
    """
    marked_text = str.__str__(marked_text)  # a `MarkedText` would find names in contents too
    controls = [special for special in vocabulary.control_tokens() if special.name in marked_text]
    names = [
        f"{_SPACE * each.strips_before}({re.escape(each.name)}){_SPACE * each.strips_after}"
        for each in controls
    ]
    around = vocabulary.tokenize("", add_special=add_special, parse_special=False)
    tokens, start = around[: int(vocabulary.add_bos)], 0
    for found in re.finditer("|".join([*names, r"\Z"]), marked_text):
        piece = unmarked(marked_text[start : found.start()])
        if piece:
            tokens += vocabulary.tokenize(piece, add_special=False, parse_special=False)
        if found.lastindex is not None:
            tokens.append(controls[found.lastindex - 1].token)
        start = found.end()
    return tokens + around[int(vocabulary.add_bos) :]


@dataclass(frozen=True, slots=True)
class _Conversation:
    """A conversation whose next turn is the answer."""

    messages: Sequence[Message]
    now: datetime.datetime
    tools: _Tools
    variables: Mapping[str, Any] | None

    def tokens(self, model: LlamaModel, n_ctx: int | None = None) -> tuple[str, list[int]] | None:
        has_tools = bool(self.tools) or any(message.role == "tool" for message in self.messages)
        template = template_of(model, has_tools=has_tools)
        if template is None:
            return None
        vocabulary = model.vocabulary
        special = vocabulary.special_tokens()
        write = functools.partial(
            render,
            template,
            self.messages,
            bos_token=vocabulary.control_text(special["bos"]),
            eos_token=vocabulary.control_text(special["eos"]),
            now=self.now,
            tools=self.tools,
            variables=self.variables,
        )
        text = write()
        check_length(vocabulary, text, n_ctx)
        tokens = tokenize(vocabulary, text, parse_special=True)
        names = [vocabulary.token_text(each) for each in set(tokens) if vocabulary.is_control(each)]
        try:
            marked_text = write(marks_contents=True)
        except PromptError:
            # Marks do not survive what this template does, and nothing else tells who wrote a name.
            contents = repr((self.messages, self.tools, self.variables))
            if any(name in contents for name in names):
                raise
            return text, tokens
        if all(text.count(name) == marked_text.count(name) for name in names):
            return text, tokens
        add_special = not _begins(vocabulary, marked_text)
        tokens = tokenize_marked(vocabulary, marked_text, add_special=add_special)
        return unmarked(marked_text), tokens

    def head(self, vocabulary: LlamaVocabulary, text: str, tokens: Sequence[int]) -> range:
        """Return the positions of the turns that the template itself adds before the first message:
        none with tools, which may be described there, or before the user's system message. The
        first token stays: attention rests on it.
        """
        first = self.messages[0].content.strip()
        if self.tools or self.messages[0].role == "system" or not first or first not in text:
            return range(0)
        head = tokenize(vocabulary, text[: text.index(first)], parse_special=True)
        stop = max((n for n, token in enumerate(head, 1) if vocabulary.is_end(token)), default=0)
        if not stop or head[:stop] != list(tokens[:stop]):
            return range(0)
        # White space between two turns belongs to neither.
        while stop < len(head) and vocabulary.token_bytes(head[stop]).isspace():
            stop += 1
        return range(int(head[0] == vocabulary.special_tokens()["bos"]), stop)

    def draft_tokens(self, model: LlamaModel) -> tuple[int, ...]:
        """Return the conversation for a draft with another vocabulary, without its template's
        `head`. Without a working template, the turns are paragraphs.
        """
        with contextlib.suppress(PromptError):
            if (found := self.tokens(model)) is not None:
                tokens, head = found[1], self.head(model.vocabulary, *found)
                return (*tokens[: head.start], *tokens[head.stop :])
        paragraphs = "".join(f"{message.content}\n\n" for message in self.messages)
        return tuple(tokenize(model.vocabulary, paragraphs, parse_special=False))


def make_prompt(text: str, tokens: Sequence[int]) -> Prompt:
    if not tokens:
        raise PromptError("the prompt is empty", hint="give something to continue")
    return Prompt(text, tuple(tokens))


def _begins(vocabulary: LlamaVocabulary, text: str) -> bool:
    bos = vocabulary.control_text(vocabulary.special_tokens()["bos"])
    return bool(bos) and text.startswith(bos)


def check_length(vocabulary: LlamaVocabulary, text: str, n_ctx: int | None) -> None:
    """Raise `PromptLengthError` if a text has certainly more than `n_ctx` tokens."""
    if n_ctx is None or len(text) <= n_ctx:
        return
    n_least = vocabulary.fewest_tokens(text)
    if n_least > n_ctx:
        what = f"the prompt has at least {n_least} tokens, but the context has {n_ctx}"
        raise PromptLengthError(what, n_least, n_ctx)
