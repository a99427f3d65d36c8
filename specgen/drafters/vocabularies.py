"""Whether two vocabularies are the same. Two of one size may number their tokens differently, and
models of one family often differ in the padding at the end of their tables, which never matters.
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
    target: LlamaVocabulary, draft: LlamaVocabulary, target_name: str, draft_name: str
) -> int:
    """Return the number of tokens that both models share; ids from there on are padding of one of
    them.

    Raise `PairError`, which names the tokens that differ.
    """
    n_shared = min(target.n_tokens, draft.n_tokens)
    larger, owner = (target, target_name) if target.n_tokens > n_shared else (draft, draft_name)
    differing = list(compress(count(), map(ne, target.token_entries(), draft.token_entries())))
    extra = [i for i in range(n_shared, larger.n_tokens) if not _is_padding(larger, i)]
    own, theirs = target.special_tokens(), draft.special_tokens()
    roles = [role for role in own if own[role] != theirs[role]]
    if target.kind != draft.kind:
        why = "their tokenizers are of different kinds"
    elif differing:
        shown = f"{_name(target, differing[0])} and {_name(draft, differing[0])}"
        shown = shown if 2 * len(differing) <= n_shared else "each has a vocabulary of its own"
        why = f"{len(differing)} of {n_shared} tokens differ: {shown}"
    elif extra:
        why = f"{len(extra)} tokens exist in {owner} only: {_name(larger, extra[0])}"
    elif roles:
        names = f"{_name(target, own[roles[0]])} and {_name(draft, theirs[roles[0]])}"
        why = f"their {roles[0]} tokens differ: {names}"
    elif target.add_bos != draft.add_bos:
        which = target_name if target.add_bos else draft_name
        why = f"only {which} begins a text with a bos token"
    else:
        return n_shared
    raise PairError(
        f"{draft_name} cannot draft for {target_name}: {why}",
        hint="take a draft of the same model family, or --draft ngram, which fits every model",
    )


def _is_padding(table: LlamaVocabulary, token_id: int) -> bool:
    """Return whether an entry only fills the table up, by the marks of programs that convert
    models.
    """
    entry = table.token_entry(token_id)
    is_unused = bool(table.token_attributes(token_id) & _ATTRIBUTE_UNUSED)
    return is_unused or not entry or entry.startswith((b"[PAD", b"<pad"))


def _name(table: LlamaVocabulary, token_id: int) -> str:
    return f"{token_id} {table.token_text(token_id)!r}" if token_id >= 0 else "none"
