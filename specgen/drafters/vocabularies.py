"""Two vocabularies: whether they are the same, and texts spelled in the tokens of either.

The sizes of vocabularies do not show whether token ids mean the same. Two of the same size may number their tokens
differently, and models of one family often differ in the padding at the end of their tables, which never matters.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left
from functools import cached_property
from itertools import accumulate, compress, count
from operator import ne
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from specgen.errors import PairError
from specgen.method.backend import Vocabulary
from specgen.system.arrays import TokenArray

if TYPE_CHECKING:
    from specgen.llama import LlamaVocabulary

#: Tokens, and the end of each in bytes from the start of the text. Bytes that the vocabulary cannot represent belong
#: to no token.
Spelled: TypeAlias = list[tuple[int, int]]
#: The most differing tokens that a message shows.
_N_SHOWN = 4
#: llama.cpp's attribute bit of tokens that no text contains.
_ATTRIBUTE_UNUSED = 1 << 1
#: A prefix for texts, if the tokenizer puts a space before every text. No tokenizer merges it with
#: a letter or a space.
_ANCHOR = "\n"
#: Longer than any run of this byte in a vocabulary.
_BEHIND_ALL = b"\xff" * 64
#: Runs of bytes that are not UTF-8, in text decoded with "surrogateescape".
_STRAY = re.compile("([\udc80-\udcff]+)")


def check_pair(
    target: LlamaVocabulary, draft: LlamaVocabulary, target_name: str, draft_name: str
) -> int:
    """Return the number of tokens that both models share; ids from there on are padding of one of them.

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
        shown = [f"{_name(target, i)} and {_name(draft, i)}" for i in differing[:_N_SHOWN]]
        why = f"{len(differing)} of {n_shared} tokens differ: {_listed(shown, len(differing))}"
    elif extra:
        shown = [_name(larger, i) for i in extra[:_N_SHOWN]]
        why = f"{len(extra)} tokens exist in {owner} only: {_listed(shown, len(extra))}"
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
    """Return whether an entry only fills the table up, by the marks of programs that convert models."""
    entry = table.token_entry(token_id)
    is_unused = bool(table.token_attributes(token_id) & _ATTRIBUTE_UNUSED)
    return is_unused or not entry or entry.startswith((b"[PAD", b"<pad"))


def _name(table: LlamaVocabulary, token_id: int) -> str:
    if token_id < 0:
        return "none"
    return f"{token_id} {table.token_entry(token_id).decode('utf-8', 'replace')!r}"


def _listed(shown: list[str], n_all: int) -> str:
    return ", ".join(shown) + (", ..." if n_all > len(shown) else "")


def n_unfinished(data: bytes) -> int:
    """Count the bytes of an incomplete character at the end of `data`: 0 to 3. Bytes that cannot start a
    character are not counted."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data[-3:])
    return len(decoder.getstate()[0])


def counterpart(token: int, source: Vocabulary, destination: Vocabulary) -> int | None:
    """Return another vocabulary's token for a control token: by name if the other has a token of the
    same name, else by role; None if there is none. In the middle of a text the only roles are those of ends: of a
    turn, or of a text. (Each tokenizer decides how a text begins.)"""
    is_end = source.is_end(token)
    named = destination.tokenize(source.token_text(token), add_special=False, parse_special=True)
    is_one_control = len(named) == 1 and not destination.token_bytes(named[0])
    if is_one_control and destination.is_end(named[0]) == is_end:
        return named[0]
    if not is_end:
        return None
    own, theirs = source.special_tokens(), destination.special_tokens()
    # An end of turn and an end of text replace each other where a vocabulary has only one.
    roles = ("eos", "eot") if token == own["eos"] != own["eot"] else ("eot", "eos")
    candidates = [theirs[role] for role in roles if theirs[role] >= 0]
    return next(iter((*candidates, *destination.end_tokens())), None)


class Lexicon:
    """The tokens of a vocabulary by their bytes, and texts spelled with them, byte for byte.

    Characters go through the vocabulary's own tokenizer. Bytes that are no character (an incomplete character at the
    end of the text so far, or bytes that are not UTF-8) are spelled with the longest tokens that there are for them.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._anchor = "" if self._bytes(self._tokenize("a")) == b"a" else _ANCHOR

    @cached_property
    def tokens(self) -> dict[bytes, int]:
        """Every token that stands for text, by its bytes; of several (that of a byte and that of a character, for
        example), the one that the tokenizer uses. Reading a whole vocabulary takes a tenth of a second or more."""
        tokens: dict[bytes, int] = {}
        for token_id in range(self.vocabulary.n_tokens):
            data = self.vocabulary.token_bytes(token_id)
            is_new = bool(data) and data not in tokens
            if is_new or (data and self._exact(data.decode(errors="replace")) == [token_id]):
                tokens[data] = token_id
        return tokens

    def with_prefix(self, prefix: bytes) -> TokenArray:
        """Return the tokens whose bytes start with `prefix`, or equal it: int64[m], sorted by bytes."""
        keys, token_ids = self._sorted
        start = bisect_left(keys, prefix)
        return token_ids[start : bisect_left(keys, prefix + _BEHIND_ALL, start)]

    def spell(self, data: bytes) -> Spelled:
        """Return the canonical spelling of a text by itself."""
        spelled: Spelled = []
        offset = 0
        for number, run in enumerate(_STRAY.split(data.decode("utf-8", "surrogateescape"))):
            raw = run.encode("utf-8", "surrogateescape")
            found = self._of_bytes(raw) if number % 2 or not raw else self._of_text(run)
            spelled += ((token, offset + end) for token, end in found)
            offset += len(raw)
        return spelled

    def spell_after(self, before: bytes, data: bytes) -> Spelled:
        """Return the spelling of `data` where `before` precedes it; the ends count from the start of
        `data`.

        Tokenizers look at the text before, so both are spelled together. A token may reach over the border,
        if `before` ends where the tokenizer would not end a token. The bytes of that token after the border
        are then spelled by themselves.
        """
        border = len(before)
        joint = self.spell(before + data)
        spelled = [(token, end - border) for token, end in joint if end > border]
        if border and spelled and all(end != border for _, end in joint):
            spelled[:1] = self.spell(data[: spelled[0][1]])
        return spelled

    @cached_property
    def _sorted(self) -> tuple[list[bytes], TokenArray]:
        keys = sorted(self.tokens)
        return keys, np.array([self.tokens[key] for key in keys], np.int64)

    def _of_text(self, text: str) -> Spelled:
        tokens = self._exact(text)
        if tokens is not None:
            sizes = (len(self.vocabulary.token_bytes(token)) for token in tokens)
            return list(zip(tokens, accumulate(sizes), strict=True))
        if len(text) == 1:
            return self._of_bytes(text.encode())
        # A part of the text has no token: separate it from the rest.
        first, second = text[: len(text) // 2], text[len(text) // 2 :]
        n_first = len(first.encode())
        behind = [(token, n_first + end) for token, end in self._of_text(second)]
        return self._of_text(first) + behind

    def _of_bytes(self, data: bytes) -> Spelled:
        spelled: Spelled = []
        start = 0
        while start < len(data):
            longest = (end for end in range(len(data), start, -1) if data[start:end] in self.tokens)
            end = next(longest, None)
            if end is not None:
                spelled.append((self.tokens[data[start:end]], end))
            start = end or start + 1
        return spelled

    def _exact(self, text: str) -> list[int] | None:
        """Return the tokenizer's tokens, without the token or space that it adds at the start; None if their bytes are
        not those of the text."""
        tokens = self._tokenize(self._anchor + text)
        data, found = text.encode(), self._bytes(tokens)
        if not found.endswith(data):
            return None
        n_added = len(found) - len(data)  # by the anchor, and by the tokenizer before it
        # A token without bytes stands for something unknown: an anchor that has no token.
        while tokens and (n_added > 0 or not self._bytes(tokens[:1])):
            n_added -= len(self._bytes(tokens[:1]))
            tokens = tokens[1:]
        return tokens if n_added == 0 else None

    def _tokenize(self, text: str) -> list[int]:
        return self.vocabulary.tokenize(text, add_special=False, parse_special=False)

    def _bytes(self, tokens: list[int]) -> bytes:
        return b"".join(map(self.vocabulary.token_bytes, tokens))
