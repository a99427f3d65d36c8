"""Bytes in the tokens that a vocabulary's own tokenizer would use, and control tokens in another vocabulary."""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from specgen.method.backend import Vocabulary
from specgen.system.arrays import TokenArray


def n_unfinished(data: bytes) -> int:
    """Count the bytes of an incomplete character at the end of `data`: 0 to 3. Bytes that cannot start a
    character are not counted."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data[-3:])
    return len(decoder.getstate()[0])


class ControlTokens:
    """Maps control tokens from one vocabulary to another: by name if the other has a token of the
    same name, else by role. Tokens without a counterpart are left out; they never become text.

    In the middle of a text the only roles are those of ends: of a turn, or of a text. (Each tokenizer
    decides how a text begins.)
    """

    def __init__(self, source: Vocabulary, destination: Vocabulary) -> None:
        self._source = source
        self._destination = destination
        self._known: dict[int, int | None] = {}

    def find(self, token: int) -> int | None:
        """Return the other vocabulary's token for a control token of the first; None if there is none."""
        if token not in self._known:
            named = self._by_name(token)
            self._known[token] = self._by_role(token) if named is None else named
        return self._known[token]

    def _by_name(self, token: int) -> int | None:
        name = self._source.token_text(token)
        found = self._destination.tokenize(name, add_special=False, parse_special=True)
        if len(found) == 1 and not self._destination.token_bytes(found[0]):
            is_end = self._destination.is_end(found[0])
            return found[0] if is_end == self._source.is_end(token) else None
        return None

    def _by_role(self, token: int) -> int | None:
        if not self._source.is_end(token):
            return None
        own, theirs = self._source.special_tokens(), self._destination.special_tokens()
        # An end of turn and an end of text replace each other where a vocabulary has only one.
        roles = ("eos", "eot") if token == own["eos"] != own["eot"] else ("eot", "eos")
        candidates = [theirs[role] for role in roles if theirs[role] >= 0]
        return next(iter((*candidates, *self._destination.end_tokens())), None)


#: A prefix for texts, if the tokenizer puts a space before every text. No tokenizer merges it with
#: a letter or a space.
_ANCHOR = "\n"


class ExactTokenizer:
    """Tokenizes text byte for byte, without the token or space that a tokenizer adds at the start."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._anchor = "" if self._bytes(self._tokenize("a")) == b"a" else _ANCHOR

    def tokenize(self, text: str) -> list[int] | None:
        """Return the tokenizer's tokens; None if their bytes are not those of the text."""
        tokens = self._tokenize(self._anchor + text)
        data, found = text.encode(), self._bytes(tokens)
        if not found.endswith(data):
            return None
        n_added = len(found) - len(data)  # by the anchor, and by the tokenizer before it
        first = 0
        # A token without bytes stands for something unknown: an anchor that has no token.
        while first < len(tokens) and (n_added > 0 or not self._bytes(tokens[first : first + 1])):
            n_added -= len(self._bytes(tokens[first : first + 1]))
            first += 1
        return tokens[first:] if n_added == 0 else None

    def _tokenize(self, text: str) -> list[int]:
        return self._vocabulary.tokenize(text, add_special=False, parse_special=False)

    def _bytes(self, tokens: list[int]) -> bytes:
        return b"".join(map(self._vocabulary.token_bytes, tokens))


#: Longer than any run of this byte in a vocabulary.
_BEHIND_ALL = b"\xff" * 64


class Lexicon:
    """The tokens of a vocabulary by their bytes; control tokens have none and are not in it.

    Reading a whole vocabulary takes a tenth of a second or more, so it is read when first
    needed.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = ExactTokenizer(vocabulary)

    def __len__(self) -> int:
        return len(self.tokens)

    def load(self) -> None:
        """Read the vocabulary."""
        _ = self._sorted

    def find(self, data: bytes) -> int | None:
        """Return the token that stands for exactly these bytes; if there are several, the one that the
        tokenizer uses."""
        return self.tokens.get(data)

    def with_prefix(self, prefix: bytes) -> TokenArray:
        """Return the tokens whose bytes start with `prefix`, or equal it: int64[m], sorted by bytes."""
        keys, token_ids = self._sorted
        start = bisect_left(keys, prefix)
        return token_ids[start : bisect_left(keys, prefix + _BEHIND_ALL, start)]

    @cached_property
    def tokens(self) -> dict[bytes, int]:
        """Every token that stands for text, by its bytes."""
        vocabulary = self._vocabulary
        tokens: dict[bytes, int] = {}
        for token_id in range(vocabulary.n_tokens):
            data = vocabulary.token_bytes(token_id)
            if data and (data not in tokens or self._chosen(data) == token_id):
                tokens[data] = token_id
        return tokens

    @cached_property
    def _sorted(self) -> tuple[list[bytes], TokenArray]:
        keys = sorted(self.tokens)
        return keys, np.array([self.tokens[key] for key in keys], np.int64)

    def _chosen(self, data: bytes) -> int | None:
        """Return the single token that the tokenizer uses for these bytes; None if there is none. Several
        tokens may stand for the same bytes: that of a byte and that of the character with this byte, for
        example."""
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return None
        found = self._tokenizer.tokenize(text)
        return found[0] if found is not None and len(found) == 1 else None


#: Runs of bytes that are not UTF-8, in text decoded with "surrogateescape".
_STRAY = re.compile("([\udc80-\udcff]+)")


@dataclass(slots=True)
class Spelling:
    """Tokens, and the end of each in bytes from the start of the text.

    Bytes that the vocabulary cannot represent belong to no token.
    """

    tokens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def add(self, token: int, end: int) -> None:
        self.tokens.append(token)
        self.ends.append(end)

    def after(self, offset: int) -> Spelling:
        """Return the tokens that end after `offset`."""
        first = sum(end <= offset for end in self.ends)
        return Spelling(self.tokens[first:], self.ends[first:])


class Speller:
    """Spells bytes with the tokens of a vocabulary, byte for byte.

    Characters go through the vocabulary's own tokenizer. Bytes that are no character (an incomplete
    character at the end of the text so far, or bytes that are not UTF-8) are spelled with the
    longest tokens that there are for them.
    """

    def __init__(self, vocabulary: Vocabulary, lexicon: Lexicon) -> None:
        self._vocabulary = vocabulary
        self._lexicon = lexicon
        self._tokenizer = ExactTokenizer(vocabulary)

    def spell(self, data: bytes) -> Spelling:
        """Return the canonical spelling of a text by itself."""
        spelling = Spelling()
        offset = 0
        for run, is_stray in _runs(data):
            if is_stray:
                self._add_bytes(spelling, run.encode("utf-8", "surrogateescape"), offset)
            else:
                self._add_text(spelling, run, offset)
            offset += len(run.encode("utf-8", "surrogateescape"))
        return spelling

    def spell_after(self, before: bytes, data: bytes) -> Spelling:
        """Return the spelling of `data` where `before` precedes it; the ends count from the start of
        `data`.

        Tokenizers look at the text before, so both are spelled together. A token may reach over the border,
        if `before` ends where the tokenizer would not end a token. The bytes of that token after the border
        are then spelled by themselves.
        """
        border = len(before)
        joint = self.spell(before + data)
        spelling = joint.after(border)
        spelling.ends = [end - border for end in spelling.ends]
        if border and border not in joint.ends and spelling.tokens:
            over = self.spell(data[: spelling.ends[0]])
            spelling.tokens[:1] = over.tokens
            spelling.ends[:1] = over.ends
        return spelling

    def _add_text(self, spelling: Spelling, text: str, offset: int) -> None:
        tokens = self._tokenizer.tokenize(text)
        if tokens is not None:
            for token in tokens:
                offset += len(self._vocabulary.token_bytes(token))
                spelling.add(token, offset)
        elif len(text) == 1:
            self._add_bytes(spelling, text.encode(), offset)
        else:  # a part of the text has no token: separate it from the rest
            half = len(text) // 2
            self._add_text(spelling, text[:half], offset)
            self._add_text(spelling, text[half:], offset + len(text[:half].encode()))

    def _add_bytes(self, spelling: Spelling, data: bytes, offset: int) -> None:
        start = 0
        while start < len(data):
            for end in range(len(data), start, -1):
                token = self._lexicon.find(data[start:end])
                if token is not None:
                    spelling.add(token, offset + end)
                    start = end
                    break
            else:
                start += 1


def _runs(data: bytes) -> Iterator[tuple[str, bool]]:
    """Split a text into runs of whole characters and runs of bytes that are no character, the latter as
    surrogates. Yield each run with a flag that is true for such bytes."""
    text = data.decode("utf-8", "surrogateescape")
    for number, run in enumerate(_STRAY.split(text)):
        if run:
            yield run, number % 2 == 1
