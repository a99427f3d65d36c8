"""Tokenize a prompt in which only the chat template's own text names control tokens.

llama.cpp first cuts a text at the names of special tokens, the longest names first, and then tokenizes what
is between them. This module does the same, but it does not look for control tokens in what is marked as
content (see `content_marks`): those names are tokenized as any other text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from specgen.llama.vocabulary import LlamaVocabulary, SpecialToken
from specgen.session.content_marks import unmarked

#: What C's `isspace` takes for white space.
_SPACE = " \t\n\v\f\r"

#: A part of a prompt: a token, or a range of characters that are not yet tokenized.
_Part: TypeAlias = "int | range"


def control_names(vocabulary: LlamaVocabulary, tokens: Iterable[int]) -> set[str]:
    """Return the names of the control tokens among these tokens."""
    return {vocabulary.token_text(token) for token in set(tokens) if vocabulary.is_control(token)}


def tokenize_marked(
    vocabulary: LlamaVocabulary, marked_text: str, *, add_special: bool
) -> list[int]:
    """Return the tokens of a rendered conversation with marked contents. Names of control tokens are parsed
    if no character of them is marked. `add_special` adds the beginning-of-text token if the model wants one.
    """
    text = unmarked(marked_text)
    marked_text = str.__str__(marked_text)  # a `MarkedText` would find names in contents too
    parts: list[_Part] = [range(len(text))] if text else []
    for special in vocabulary.named_tokens():
        searched = marked_text if special.is_control else text
        if special.name in searched:
            parts = list(_cut(parts, searched, special))
    around = vocabulary.tokenize("", add_special=add_special, parse_special=False)
    n_before = int(vocabulary.add_bos)
    tokens = around[:n_before]
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            piece = text[part.start : part.stop]
            tokens += vocabulary.tokenize(piece, add_special=False, parse_special=False)
    return tokens + around[n_before:]


def _cut(parts: Sequence[_Part], text: str, special: SpecialToken) -> Iterator[_Part]:
    """Cut the ranges of a text where the name of a token is."""
    name = special.name
    for part in parts:
        if isinstance(part, int):
            yield part
            continue
        start, stop = part.start, part.stop
        while (found := text.find(name, start, stop)) >= 0:
            before = text[start:found]
            if special.strips_before:
                before = before.rstrip(_SPACE)
            if before:
                yield range(start, start + len(before))
            yield special.token
            start = found + len(name)
            if special.strips_after:
                start = stop - len(text[start:stop].lstrip(_SPACE))
        if start < stop:
            yield range(start, stop)
