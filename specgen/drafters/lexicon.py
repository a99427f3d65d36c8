"""The tokens of a vocabulary by their bytes, and texts that are spelled with them.

Different vocabularies have only their bytes in common, so text passes from one to another as bytes.
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

#: A prefix for texts, if the tokenizer puts a space before every text. No tokenizer merges it with
#: a letter or a space.
_ANCHOR = "\n"
#: Longer than any run of this byte in a vocabulary: what starts with a prefix sorts before the
#: prefix and this.
_HIGHEST = b"\xff" * 64
#: Runs of bytes that are not UTF-8, in text decoded with "surrogateescape".
_STRAY = re.compile("([\udc80-\udcff]+)")
#: Tokens, each with the end of its bytes, counted from the start of the text. There may be bytes
#: without a token in between.
Spelling: TypeAlias = list[tuple[int, int]]


def n_incomplete_bytes(data: bytes) -> int:
    """Count the bytes of an incomplete character at the end of UTF-8 text, 0 to 3.

    Bytes that cannot begin a character do not count.
    """
    if data[-1:].isascii():
        return 0
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data[-3:])
    return len(decoder.getstate()[0])


def counterpart(
    token: int,
    source: Vocabulary,
    destination: Vocabulary,
) -> int | None:
    """Return another vocabulary's token for a control token; None if there is none.

    It is the control token of the same name, else one of the same role. In the middle of a text
    there are two roles only: the end of a turn, and the end of a text.
    """
    is_end = source.is_end(token)
    named = destination.tokenize(source.token_text(token), add_special=False, parse_special=True)
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

    Characters go through the vocabulary's own tokenizer. Bytes that are not characters are spelled
    with the longest tokens that there are. Bytes that no token has are left out.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        letter = vocabulary.tokenize("a", add_special=False, parse_special=False)
        adds_space = b"".join(map(vocabulary.token_bytes, letter)) != b"a"
        self._anchor = _ANCHOR if adds_space else ""

    @cached_property
    def tokens(self) -> dict[bytes, int]:
        """Every token that stands for text, by its bytes.

        Of several tokens (that of a byte and that of a character, for example) it has the one that
        the tokenizer uses. Reading a whole vocabulary takes a tenth of a second or more.
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
        keys = sorted(self.tokens)
        return keys, np.array([self.tokens[key] for key in keys], np.int64)

    def load(self) -> None:
        """Read the vocabulary now."""
        self.with_prefix(b"")

    def with_prefix(self, prefix: bytes) -> TokenArray:
        """Return the tokens whose bytes start with `prefix`: int64[m], sorted by their bytes."""
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
            is_stray = number % 2 == 1  # `split` returns text and separators in turns
            if is_stray:
                spelling += self._spell_bytes(run_bytes, offset)
            elif run:
                spelling += self._spell_text(run, offset)
            offset += len(run_bytes)
        return spelling

    def spell_after(self, before: bytes, data: bytes) -> Spelling:
        """Return the spelling of `data` after `before`; ends count from the start of `data`.

        Both are spelled together, since a token depends on what precedes it. But a token that spans
        the border between them is replaced by the spelling of its part after the border.

        Example:
            With the tokens "a", "b", "ab" and "c", "bc" after "a" is spelled "b", "c": together
            they are "ab", "c", and "ab" spans the border.
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
        """Spell characters. A part that has no token is found by halving the text."""
        spelling = self._tokenize(text, offset)
        if spelling is not None:
            return spelling
        if len(text) <= 1:
            return self._spell_bytes(text.encode(), offset)
        half = len(text) // 2
        middle = offset + len(text[:half].encode())
        return self._spell_text(text[:half], offset) + self._spell_text(text[half:], middle)

    def _spell_bytes(self, data: bytes, offset: int) -> Spelling:
        """Spell bytes with the longest tokens that there are; leave out those without a token."""
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
        """Tokenize characters at an offset, without what the tokenizer adds.

        Returns:
            The spelling; None if the tokens' bytes are not those of the text.
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
        # Counted from the start of the text: the anchor, and what the tokenizer added, is below 0.
        end = len(data) - len(spelled)
        for token, piece in zip(tokens, pieces, strict=True):
            # A token without bytes stands for something unknown: an anchor that has no token.
            is_added = end < 0 or not (piece or spelling)
            end += len(piece)
            if not is_added:
                spelling.append((token, offset + end))
            elif end > 0:  # it reaches into the text
                return None
        return spelling
