"""Whether a draft model can draft for a target: do token ids mean the same in both?

The sizes of the vocabularies do not show this. Two of the same size may number their tokens
differently, and models of one family often differ in the padding at the end of their tables, which
never matters. So the tables are compared, entry by entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress, count
from operator import ne
from typing import TYPE_CHECKING

from specgen.errors import PairError

if TYPE_CHECKING:
    from specgen.llama import LlamaVocabulary

#: The most differing tokens that a message shows.
_N_SHOWN = 4
#: llama.cpp's attribute bit of tokens that no text contains.
_ATTRIBUTE_UNUSED = 1 << 1


def check_pair(
    target: LlamaVocabulary, draft: LlamaVocabulary, target_name: str, draft_name: str
) -> int:
    """Return the number of tokens that both models share; ids from there on are padding of one of them.

    Raise `PairError`, which names the tokens that differ.
    """
    pair = f"{draft_name} cannot draft for {target_name}"
    hint = "take a draft of the same model family, or --draft ngram, which fits every model"
    if target.kind != draft.kind:
        raise PairError(f"{pair}: their tokenizers are of different kinds", hint)

    n_shared = min(target.n_tokens, draft.n_tokens)
    differing = list(compress(count(), map(ne, target.token_entries(), draft.token_entries())))
    if differing:
        raise PairError(
            f"{pair}: {len(differing)} of {n_shared} tokens differ: "
            + _show(differing, lambda i: f"{_text(target, i)} and {_text(draft, i)}"),
            hint,
        )

    larger, larger_name = (
        (target, target_name) if target.n_tokens > n_shared else (draft, draft_name)
    )
    extra = [i for i in range(n_shared, larger.n_tokens) if not _is_padding(larger, i)]
    if extra:
        raise PairError(
            f"{pair}: {len(extra)} tokens exist in {larger_name} only: "
            + _show(extra, lambda i: _text(larger, i)),
            hint,
        )

    draft_special = draft.special_tokens()
    for role, token_id in target.special_tokens().items():
        if draft_special[role] != token_id:
            raise PairError(
                f"{pair}: their {role} tokens differ: {_name(target, token_id)} and "
                f"{_name(draft, draft_special[role])}",
                hint,
            )
    if target.add_bos != draft.add_bos:
        which = target_name if target.add_bos else draft_name
        raise PairError(f"{pair}: only {which} begins a text with a bos token", hint)
    return n_shared


def _is_padding(table: LlamaVocabulary, token_id: int) -> bool:
    """Return whether an entry only fills the table up, by the marks of programs that convert models."""
    if table.token_attributes(token_id) & _ATTRIBUTE_UNUSED:
        return True
    entry = table.token_entry(token_id)
    return not entry or entry.startswith((b"[PAD", b"<pad"))


def _show(token_ids: Sequence[int], describe: Callable[[int], str]) -> str:
    shown = [f"{token_id} is {describe(token_id)}" for token_id in token_ids[:_N_SHOWN]]
    return ", ".join(shown) + (", ..." if len(token_ids) > _N_SHOWN else "")


def _text(table: LlamaVocabulary, token_id: int) -> str:
    return repr(table.token_entry(token_id).decode("utf-8", "replace"))


def _name(table: LlamaVocabulary, token_id: int) -> str:
    return f"{token_id} {_text(table, token_id)}" if token_id >= 0 else "none"
