"""Check whether two models have the same vocabulary.

Two vocabularies of the same size may number their tokens differently. Models of one family often
differ in the padding at the end of their vocabularies, which does not matter.
"""

from __future__ import annotations

from itertools import compress, count
from operator import ne
from typing import TYPE_CHECKING

from specgen.errors import PairError

if TYPE_CHECKING:
    from specgen.llama import LlamaVocabulary

#: llama.cpp's attribute bit of tokens that no text contains.
_ATTRIBUTE_UNUSED = 1 << 1


def check_pair(
    target: LlamaVocabulary,
    draft: LlamaVocabulary,
    target_name: str,
    draft_name: str,
) -> int:
    """Return the number of tokens that two models share. Later tokens are padding of one of them.

    Args:
        target: The target's vocabulary.
        draft: The draft's vocabulary.
        target_name: The target's name, for messages.
        draft_name: The draft's name, for messages.

    Raises:
        PairError: If the vocabularies differ. The message names the first tokens that do.
    """
    difference = _difference(target, draft, target_name, draft_name)
    if difference is not None:
        raise PairError(
            f"{draft_name} cannot draft for {target_name}: {difference}",
            hint="use a draft of the same model family, or --draft ngram, "
            "which works with every model",
        )
    return min(target.n_tokens, draft.n_tokens)


def _difference(
    target: LlamaVocabulary,
    draft: LlamaVocabulary,
    target_name: str,
    draft_name: str,
) -> str | None:
    """Return a description of how two vocabularies differ; None if they do not."""
    if target.kind != draft.kind:
        return "their tokenizers are of different kinds"

    n_shared = min(target.n_tokens, draft.n_tokens)
    # No Python loop, since there may be hundreds of thousands of entries. It ends with the shorter
    # vocabulary.
    differing = list(compress(count(), map(ne, target.token_entries(), draft.token_entries())))
    if differing:
        shown = "each has a vocabulary of its own"
        if 2 * len(differing) <= n_shared:
            shown = f"{_show(target, differing[0])} and {_show(draft, differing[0])}"
        return f"{len(differing)} of {n_shared} tokens differ: {shown}"

    larger = draft
    owner = draft_name
    if target.n_tokens > n_shared:
        larger = target
        owner = target_name
    extra = [token for token in range(n_shared, larger.n_tokens) if not _is_padding(larger, token)]
    if extra:
        return f"{len(extra)} tokens exist in {owner} only: {_show(larger, extra[0])}"

    specials = draft.special_tokens()
    for role, token in target.special_tokens().items():
        if specials[role] != token:
            shown = f"{_show(target, token)} and {_show(draft, specials[role])}"
            return f"their {role} tokens differ: {shown}"

    if target.add_bos != draft.add_bos:
        which = target_name if target.add_bos else draft_name
        return f"only {which} begins a text with a bos token"
    return None


def _is_padding(vocabulary: LlamaVocabulary, token_id: int) -> bool:
    """Return whether an entry only fills the vocabulary, as model converters mark it."""
    entry = vocabulary.token_entry(token_id)
    is_unused = bool(vocabulary.token_attributes(token_id) & _ATTRIBUTE_UNUSED)
    return is_unused or not entry or entry.startswith((b"[PAD", b"<pad"))


def _show(vocabulary: LlamaVocabulary, token_id: int) -> str:
    return f"{token_id} {vocabulary.token_text(token_id)!r}" if token_id >= 0 else "none"
