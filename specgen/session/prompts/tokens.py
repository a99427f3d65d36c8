"""Tokenize prompts: texts, texts with tokens among them, and rendered conversations."""

from __future__ import annotations

import re
from collections.abc import Sequence

from specgen.errors import PromptLengthError
from specgen.llama.vocabulary import LlamaVocabulary
from specgen.session.prompts.marked_text import unmarked

#: White space, as C's `isspace` defines it.
_SPACE = r"[ \t\n\v\f\r]*"


def tokenize(
    vocabulary: LlamaVocabulary,
    text: str,
    *,
    parse_special: bool,
) -> list[int]:
    """Return a prompt's tokens, with the beginning-of-text token if the model wants one.

    Args:
        vocabulary: The model's vocabulary.
        text: The prompt. A chat template may have written the beginning-of-text token already.
        parse_special: Whether names of control tokens become these tokens.

    Raises:
        PromptError: The text cannot be tokenized.
    """
    has_bos = parse_special and begins_with_bos(vocabulary, text)
    return vocabulary.tokenize(text, add_special=not has_bos, parse_special=parse_special)


def tokens_of(
    vocabulary: LlamaVocabulary,
    parts: Sequence[int | str],
    *,
    parse_special: bool,
) -> list[int]:
    """Return the tokens of a text in parts, some of which are tokens. Raise `PromptError`."""
    tokens: list[int] = []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        elif tokens:
            tokens += vocabulary.tokenize_inside(part, parse_special=parse_special)
        else:
            tokens += vocabulary.tokenize(part, add_special=True, parse_special=parse_special)
    vocabulary.check(tokens)
    return tokens


def tokenize_marked(
    vocabulary: LlamaVocabulary,
    marked_text: str,
    *,
    add_special: bool,
) -> list[int]:
    """Return the tokens of a rendered conversation with marked contents (`marked_text.py`).

    Like llama.cpp, it cuts the text at names of control tokens, the longest first, but only where
    nothing of the name is marked.
    """
    marked_text = str.__str__(marked_text)  # a `MarkedText` would find names in contents too
    controls = [special for special in vocabulary.control_tokens() if special.name in marked_text]
    patterns = []
    for special in controls:
        before = _SPACE if special.strips_before else ""
        after = _SPACE if special.strips_after else ""
        patterns.append(f"{before}({re.escape(special.name)}){after}")

    # What the vocabulary adds around any text: first the beginning-of-text token, if at all.
    around = vocabulary.tokenize("", add_special=add_special, parse_special=False)
    n_before = 1 if vocabulary.add_bos else 0
    tokens = around[:n_before]
    start = 0
    for found in re.finditer("|".join([*patterns, r"\Z"]), marked_text):
        piece = unmarked(marked_text[start : found.start()])
        if piece:
            tokens += vocabulary.tokenize(piece, add_special=False, parse_special=False)
        if found.lastindex is not None:
            tokens.append(controls[found.lastindex - 1].token)
        start = found.end()
    return tokens + around[n_before:]


def begins_with_bos(vocabulary: LlamaVocabulary, text: str) -> bool:
    """Return whether a text begins with the name of the beginning-of-text token."""
    bos = vocabulary.control_text(vocabulary.special_tokens()["bos"])
    return bos != "" and text.startswith(bos)


def check_length(
    vocabulary: LlamaVocabulary,
    text: str,
    n_ctx: int | None,
) -> None:
    """Raise `PromptLengthError` if a text has certainly more than `n_ctx` tokens."""
    if n_ctx is None or len(text) <= n_ctx:
        return
    n_least = vocabulary.min_token_count(text)
    if n_least > n_ctx:
        message = f"the prompt has at least {n_least} tokens, but the context has {n_ctx}"
        raise PromptLengthError(message, n_least, n_ctx)
