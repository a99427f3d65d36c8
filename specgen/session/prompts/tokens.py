"""Tokenize prompts: texts, mixtures of texts and token ids, and rendered conversations."""

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
    """Return the tokens of a prompt, with a beginning-of-text token if the model uses one.

    Args:
        vocabulary: The vocabulary of the model.
        text: The prompt. If it begins with the name of the beginning-of-text token, as a chat
            template may write it, no second one is added.
        parse_special: Whether the names of control tokens in the text become these tokens.

    Raises:
        PromptError: If the text cannot be tokenized.
    """
    has_bos = parse_special and begins_with_bos(vocabulary, text)
    return vocabulary.tokenize(text, add_special=not has_bos, parse_special=parse_special)


def tokens_of(
    vocabulary: LlamaVocabulary,
    parts: Sequence[int | str],
    *,
    parse_special: bool,
) -> list[int]:
    """Return the tokens of a prompt that is given as a mixture of texts and token ids.

    Only a text at the very beginning gets a beginning-of-text token. If the prompt begins with a
    token id, the caller decides about that token.

    Args:
        vocabulary: The vocabulary of the model.
        parts: The texts and token ids, in order.
        parse_special: Whether the names of control tokens in the texts become these tokens.

    Raises:
        PromptError: If a text cannot be tokenized, or a token id is not in the vocabulary.
    """
    tokens: list[int] = []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        elif not tokens:
            tokens += vocabulary.tokenize(part, add_special=True, parse_special=parse_special)
        else:
            tokens += vocabulary.tokenize_inside(part, parse_special=parse_special)
    vocabulary.check(tokens)
    return tokens


def tokenize_marked(
    vocabulary: LlamaVocabulary,
    marked_text: str,
    *,
    add_special: bool,
) -> list[int]:
    """Return the tokens of a rendered conversation with marked contents (`marked_text.py`).

    As in llama.cpp, the text is split at the names of control tokens, and the pieces between them
    are tokenized. But marked characters are never part of a name: the names in messages are text.

    Args:
        vocabulary: The vocabulary of the model.
        marked_text: The text that the template wrote, with marks on the contents of messages.
        add_special: Whether to add the tokens that the model expects around any text, such as the
            beginning-of-text token.
    """
    # A `MarkedText` ignores marks and would find names in messages, too. Search as a plain `str`.
    marked_text = str.__str__(marked_text)
    # In llama.cpp's order, longer names come first, so that they win over names that they contain.
    controls = [special for special in vocabulary.control_tokens() if special.name in marked_text]
    patterns = []
    for special in controls:
        before = _SPACE if special.strips_before else ""
        after = _SPACE if special.strips_after else ""
        patterns.append(f"{before}({re.escape(special.name)}){after}")

    # The tokens that the vocabulary adds before and after any text.
    around = vocabulary.tokenize("", add_special=add_special, parse_special=False)
    n_before = 1 if vocabulary.add_bos else 0
    tokens = around[:n_before]
    start = 0
    # The end of the text (\Z) matches too, so that the last piece is tokenized.
    for match in re.finditer("|".join([*patterns, r"\Z"]), marked_text):
        piece = unmarked(marked_text[start : match.start()])
        if piece:
            tokens += vocabulary.tokenize(piece, add_special=False, parse_special=False)
        # The number of the matching group is that of the control token, from 1.
        if match.lastindex is not None:
            tokens.append(controls[match.lastindex - 1].token)
        start = match.end()
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
    """Refuse a text that certainly has more than `n_ctx` tokens, without tokenizing it.

    Args:
        vocabulary: The vocabulary of the model.
        text: The text.
        n_ctx: The limit; None for no limit.

    Raises:
        PromptLengthError: If even the minimum number of tokens for the text exceeds the limit.
    """
    if n_ctx is None or len(text) <= n_ctx:
        return
    n_min = vocabulary.min_token_count(text)
    if n_min > n_ctx:
        message = f"the prompt has at least {n_min} tokens, but the context has {n_ctx}"
        raise PromptLengthError(message, n_min, n_ctx)
