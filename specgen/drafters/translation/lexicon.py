"""An inverted vocabulary: from bytes to the tokens that stand for them."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property

import numpy as np

from specgen.arrays import TokenArray
from specgen.backend.base import Vocabulary
from specgen.drafters.translation.exact_tokenizer import ExactTokenizer

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
        """The token that stands for exactly these bytes; if there are several, the one that the
        tokenizer uses."""
        return self.tokens.get(data)

    def beginning_with(self, prefix: bytes) -> TokenArray:
        """The tokens whose bytes begin with `prefix`, or are it: int64[m], sorted by bytes."""
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
        """The single token as which these bytes are tokenized; None if there is none. Several tokens
        may stand for the same bytes: that of a byte and that of the character with this byte, for
        example."""
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return None
        found = self._tokenizer.tokenize(text)
        return found[0] if found is not None and len(found) == 1 else None
