"""Prompts that go on behind others: of tokens, and with the beginning of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specgen.llama import LlamaVocabulary
from specgen.session.prompts.prompt import Prompt, Prompts, check_length, make_prompt
from specgen.session.prompts.template import Message
from specgen.session.prompts.thoughts import begun_in


def of_tokens(prompts: Prompts, parts: Sequence[int | str]) -> Prompt:
    """Return a prompt of these tokens of the target, with the texts among them. Raise `PromptError`."""
    for part in parts:
        if isinstance(part, str):
            check_length(prompts.target.vocabulary, part, prompts.n_ctx)
    tokens = tokens_of(prompts.target.vocabulary, parts, parse_special=True)
    return make_prompt(_text_of(prompts, tokens), tokens)


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


def followed_by(prompts: Prompts, prompt: Prompt, answer: Sequence[int]) -> Prompt:
    """Return a prompt with the beginning of an answer behind it, for both models."""
    draft_tokens = prompt.draft_tokens
    if draft_tokens is not None and prompts.own_draft is not None:
        own = prompts.own_draft.vocabulary.tokenize_inside(_text_of(prompts, answer))
        draft_tokens = (*draft_tokens, *own)
    return replace(prompt, tokens=(*prompt.tokens, *answer), draft_tokens=draft_tokens)


def continued(prompts: Prompts, prompt: Prompt, begun: Message) -> Prompt:
    """Return a prompt with the beginning of the model's turn behind it, its reasoning in an open thought."""
    inside, marks = prompts.target.vocabulary.tokenize_inside, begun_in(prompt.text)
    check_length(prompts.target.vocabulary, begun.content, prompts.n_ctx)
    if marks is None:
        mark = mark_before_answer(prompt.text)
        answer, text = inside(mark, parse_special=True), mark + begun.content
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
    return followed_by(prompts, prompt, answer)


def _text_of(prompts: Prompts, tokens: Sequence[int]) -> str:
    return b"".join(map(prompts.target.vocabulary.token_bytes, tokens)).decode(errors="replace")


def mark_before_answer(prompt: str) -> str:
    """Return what a model of gpt-oss's family writes between a prompt and the text of its answer."""
    is_harmony = prompt.endswith("<|start|>assistant")
    return "<|channel|>final<|message|>" if is_harmony else ""
