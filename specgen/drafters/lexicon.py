"""Spell texts, byte for byte, with the tokens of a vocabulary.

Different vocabularies have only bytes in common, so text passes from one to another as bytes.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left
from functools import cached_property
from typing import TypeAlias

import numpy as np

from specgen.system.arrays import TokenArray
from specgen.text.vocabulary import Vocabulary

#: Put before texts if the tokenizer adds a space to the beginning of every text: the space is then
#: added to this. No tokenizer merges it with a letter or a space.
_ANCHOR = "\n"
#: Appended to a prefix, this sorts after all tokens with the prefix: no vocabulary has a token with
#: that many of these bytes.
_HIGHEST = b"\xff" * 64
#: Matches runs of bytes that are not UTF-8, in text decoded with "surrogateescape".
_STRAY = re.compile("([\udc80-\udcff]+)")
#: Tokens, each with the position in the text at which its bytes end. Bytes that no token has are
#: left out, so a token may start after the end of the previous one.
Spelling: TypeAlias = list[tuple[int, int]]


def n_incomplete_bytes(data: bytes) -> int:
    """Return the number of bytes, 0 to 3, of an incomplete character at the end of UTF-8 text.

    Bytes that are not the beginning of any character do not count.
    """
    if data[-1:].isascii():
        return 0
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data[-3:])
    undecoded, _ = decoder.getstate()
    return len(undecoded)


def counterpart(
    token: int,
    source: Vocabulary,
    destination: Vocabulary,
) -> int | None:
    """Return the control token of another vocabulary that corresponds to a control token.

    It is the one with the same name, or else, for a token that ends a turn or a text, one that does
    the same.

    Args:
        token: A control token of `source`.
        source: The vocabulary of the token.
        destination: The other vocabulary.

    Returns:
        The token of `destination`; None if there is none.
    """
    is_end = source.is_end(token)
    named = destination.tokenize(source.token_text(token), add_special=False, parse_special=True)
    # Control tokens have no bytes.
    is_one_control = len(named) == 1 and not destination.token_bytes(named[0])
    if is_one_control and destination.is_end(named[0]) == is_end:
        return named[0]
    if not is_end:
        return None
    own = source.special_tokens()
    theirs = destination.special_tokens()
    # An end of turn and an end of text replace each other where a vocabulary has only one.
    ends_text = token == own["eos"] and own["eos"] != own["eot"]
    for role in ("eos", "eot") if ends_text else ("eot", "eos"):
        if theirs[role] >= 0:
            return theirs[role]
    return next(iter(destination.end_tokens()), None)


class Lexicon:
    """Spells texts with the tokens of a vocabulary, byte for byte.

    Valid characters go through the vocabulary's own tokenizer. Other bytes are spelled with the
    longest possible tokens. Bytes that no token has are left out.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        letter = vocabulary.tokenize("a", add_special=False, parse_special=False)
        adds_space = b"".join(map(vocabulary.token_bytes, letter)) != b"a"
        self._anchor = _ANCHOR if adds_space else ""

    @cached_property
    def tokens(self) -> dict[bytes, int]:
        """Every token that stands for text, by its bytes.

        If several tokens have the same bytes (a byte token and a character token, for example), it
        is the one that the tokenizer uses. Reading a vocabulary takes a tenth of a second or more.
        """
        tokens: dict[bytes, int] = {}
        for token_id in range(self.vocabulary.n_tokens):
            data = self.vocabulary.token_bytes(token_id)
            if not data:
                continue
            if data in tokens:
                spelling = self._tokenize(data.decode(errors="replace"))
                if spelling != [(token_id, len(data))]:
                    continue
            tokens[data] = token_id
        return tokens

    @cached_property
    def _sorted(self) -> tuple[list[bytes], TokenArray]:
        """The bytes of all tokens, sorted, and the tokens in the same order, int64[n]."""
        keys = sorted(self.tokens)
        return keys, np.array([self.tokens[key] for key in keys], np.int64)

    def load(self) -> None:
        """Read the vocabulary now, so that later calls are fast."""
        self.with_prefix(b"")

    def with_prefix(self, prefix: bytes) -> TokenArray:
        """Return the tokens whose bytes start with `prefix`, sorted by their bytes: int64[m]."""
        keys, token_ids = self._sorted
        start = bisect_left(keys, prefix)
        return token_ids[start : bisect_left(keys, prefix + _HIGHEST, start)]

    def spell(self, data: bytes) -> Spelling:
        """Return the spelling of a text."""
        spelling: Spelling = []
        offset = 0
        runs = _STRAY.split(data.decode("utf-8", "surrogateescape"))
        for number, run in enumerate(runs):
            run_bytes = run.encode("utf-8", "surrogateescape")
            is_stray = number % 2 == 1  # `split` alternates between text and matches
            if is_stray:
                spelling += self._spell_bytes(run_bytes, offset)
            elif run:
                spelling += self._spell_text(run, offset)
            offset += len(run_bytes)
        return spelling

    def spell_after(self, before: bytes, data: bytes) -> Spelling:
        """Return the spelling of `data` as the continuation of `before`.

        Both are spelled together, since the tokens of a text depend on what precedes it. A token
        that spans the border between them is replaced with the spelling of its part after the
        border. Positions count from the start of `data`.

        Example:
            The tokens are "a", "b", "c" and "ab". Then "bc" after "a" is spelled "b", "c": together
            they are "ab", "c", where "ab" spans the border.
        """
        if not data:
            return []
        border = len(before)
        joint = self.spell(before + data)
        spelling = [(token, end - border) for token, end in joint if end > border]
        has_border = border == 0 or any(end == border for _, end in joint)
        if spelling and not has_border:
            _, first_end = spelling[0]
            spelling[:1] = self.spell(data[:first_end])
        return spelling

    def _spell_text(self, text: str, offset: int) -> Spelling:
        """Spell characters; the text starts at position `offset`.

        If the tokenizer cannot spell all of it, each half is spelled separately, and so on, down to
        the characters that it cannot spell: these are spelled as bytes.
        """
        spelling = self._tokenize(text, offset)
        if spelling is not None:
            return spelling
        if len(text) <= 1:
            return self._spell_bytes(text.encode(), offset)
        half = len(text) // 2
        middle = offset + len(text[:half].encode())
        return self._spell_text(text[:half], offset) + self._spell_text(text[half:], middle)

    def _spell_bytes(self, data: bytes, offset: int) -> Spelling:
        """Spell bytes with the longest possible tokens, and leave out bytes without a token."""
        spelling: Spelling = []
        start = 0
        while start < len(data):
            for end in range(len(data), start, -1):
                token = self.tokens.get(data[start:end])
                if token is not None:
                    spelling.append((token, offset + end))
                    start = end
                    break
            else:
                start += 1
        return spelling

    def _tokenize(self, text: str, offset: int = 0) -> Spelling | None:
        """Tokenize characters, and remove what the tokenizer adds.

        Args:
            text: The characters.
            offset: The position at which they start.

        Returns:
            The spelling; None if the bytes of the tokens are not exactly those of the text.
        """
        data = text.encode()
        token_bytes = self.vocabulary.token_bytes
        tokens = self.vocabulary.tokenize(
            self._anchor + text, add_special=False, parse_special=False
        )
        pieces = [token_bytes(token) for token in tokens]
        spelled = b"".join(pieces)
        if not spelled.endswith(data):
            return None
        spelling: Spelling = []
        # Positions count from the start of the text. The anchor, and anything else that the
        # tokenizer adds before the text, is at negative positions.
        end = len(data) - len(spelled)
        for token, piece in zip(tokens, pieces, strict=True):
            # A token without bytes before the text stands for an anchor that has no token.
            is_before_text = end < 0 or not (piece or spelling)
            end += len(piece)
            if not is_before_text:
                spelling.append((token, offset + end))
            elif end > 0:  # one token has the end of the anchor and the start of the text
                return None
        return spelling
