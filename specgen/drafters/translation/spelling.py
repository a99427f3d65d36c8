"""Bytes as tokens: any bytes in the tokens that a vocabulary's own tokenizer would use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from specgen.backend.base import Vocabulary
from specgen.drafters.translation.exact_tokenizer import ExactTokenizer
from specgen.drafters.translation.lexicon import Lexicon

#: Runs of bytes that are not UTF-8, in text decoded with "surrogateescape".
_STRAY = re.compile("([\udc80-\udcff]+)")


@dataclass(slots=True)
class Spelling:
    """Tokens, and the end of each in bytes from the beginning of the text.

    Bytes that the vocabulary cannot represent belong to no token.
    """

    tokens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def add(self, token: int, end: int) -> None:
        self.tokens.append(token)
        self.ends.append(end)

    def behind(self, offset: int) -> Spelling:
        """The tokens that end behind `offset`."""
        first = sum(end <= offset for end in self.ends)
        return Spelling(self.tokens[first:], self.ends[first:])


class Speller:
    """Spells bytes with the tokens of a vocabulary, byte for byte.

    Characters go through the vocabulary's own tokenizer. Bytes that are no character (a part of a
    character at the end of the text so far, or bytes that are not UTF-8) are spelled with the
    longest tokens that there are for them.
    """

    def __init__(self, vocabulary: Vocabulary, lexicon: Lexicon) -> None:
        self._vocabulary = vocabulary
        self._lexicon = lexicon
        self._tokenizer = ExactTokenizer(vocabulary)

    def spell(self, data: bytes) -> Spelling:
        """The canonical spelling of a text by itself."""
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
        """The spelling of `data` where `before` precedes it; the ends count from the beginning
        of `data`.

        Tokenizers look at the text before, so both are spelled together. A token may reach over
        the border, if `before` ends where the tokenizer would not end a token. The bytes of that
        token behind the border are then spelled by themselves.
        """
        border = len(before)
        joint = self.spell(before + data)
        spelling = joint.behind(border)
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
    """A text in runs of whole characters and runs of bytes that are no character, the latter as
    surrogates; with each, whether it is such bytes."""
    text = data.decode("utf-8", "surrogateescape")
    for number, run in enumerate(_STRAY.split(text)):
        if run:
            yield run, number % 2 == 1
