"""A vocabulary's own tokenizer, for text from the middle of another."""

from __future__ import annotations

from specgen.backend.base import Vocabulary

#: A prefix for texts, if the tokenizer puts a space before every text. No tokenizer merges it with
#: a letter or a space.
_ANCHOR = "\n"


class ExactTokenizer:
    """Tokenizes text byte for byte, without what a tokenizer adds at the beginning."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._anchor = "" if self._bytes(self._tokenize("a")) == b"a" else _ANCHOR

    def tokenize(self, text: str) -> list[int] | None:
        """The tokenizer's tokens; None if their bytes are not those of the text."""
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
