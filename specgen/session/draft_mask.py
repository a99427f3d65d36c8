"""The mask token of a parallel draft: from the options, or from what its file says."""

from __future__ import annotations

import re

from specgen.errors import UsageError
from specgen.llama import LlamaModel

#: The key of a mask token. Ordinary models have one too (Gemma's <mask>), so that it says nothing by itself.
_MASK_KEY = "tokenizer.ggml.mask_token_id"
#: Where a file has the names of its model. Converters copy them from the model's page.
_NAME_KEYS = ("general.name", "general.basename", "general.finetune", "general.base_model.0.name")
#: The method's name, which all published parallel drafts have in theirs: PARD-Qwen2.5-0.5B, PARD2-Qwen3-8B.
_PARD = re.compile(r"(?<![a-z])pard-?2?(?![a-z0-9])", re.IGNORECASE)


def is_parallel_draft(model: LlamaModel) -> bool:
    """Return whether a model's names say that it predicts several tokens at once."""
    names = (model.name, *(model.metadata(key) or "" for key in _NAME_KEYS))
    return any(_PARD.search(name) for name in names)


def mask_token(model: LlamaModel, wanted: str) -> int | None:
    """Return the mask token with which a model predicts several tokens at once; None if it predicts one.

    `wanted` is ``auto`` (what the file says), ``off``, a token's number, or its text. Raises `UsageError`
    if the model has no such token.
    """
    if wanted == "off":
        return None
    if wanted != "auto":
        return _named(model, wanted)
    found = model.metadata(_MASK_KEY) if is_parallel_draft(model) else None
    return int(found) if found is not None and 0 <= int(found) < _n_tokens(model) else None


def lacks_mask(model: LlamaModel) -> bool:
    """Return whether a model is a parallel draft by its name, but its file names no mask token. Converters
    for llama.cpp do not write it."""
    return is_parallel_draft(model) and mask_token(model, "auto") is None


def _named(model: LlamaModel, wanted: str) -> int:
    if wanted.isdecimal():
        number, n_tokens = int(wanted), _n_tokens(model)
        if number >= n_tokens:
            raise UsageError(
                f"--draft-mask {wanted}: {model.name} has {n_tokens} tokens",
                hint=f"give a number up to {n_tokens - 1}",
            )
        return number
    vocabulary = model.vocabulary
    tokens = vocabulary.tokenize(wanted, add_special=False, parse_special=True)
    if len(tokens) == 1:
        return tokens[0]
    # No text has the tokens that fill a vocabulary, which is why they serve as masks: [PAD151665].
    for token in range(vocabulary.n_tokens):
        if vocabulary.token_text(token) == wanted:
            return token
    raise UsageError(
        f"--draft-mask {wanted}: {model.name} has no such token", hint="give the token's number"
    )


def _n_tokens(model: LlamaModel) -> int:
    return model.vocabulary.n_tokens
