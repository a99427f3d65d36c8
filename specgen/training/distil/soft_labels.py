"""The tokens that a target found likely, translated into the vocabulary of a draft that is trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specgen.decoding.drafters.translation import Translation


class SoftLabels:
    """Translates the tokens that a target found likely, for a pair of vocabularies.

    The target's distribution is over its own tokens. Where a draft token starts at the start of a target token, each
    likely target token counts as the draft token that its text starts with, and the chosen target token counts
    as the draft token in the text. A draft token that starts inside of a chosen target token is certain: it gets
    all of the probability.
    """

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self._first: dict[int, int] = {}

    def translate(
        self,
        answer: Sequence[int],
        top_tokens: NDArray[np.int32],
        top_probabilities: NDArray[np.float16],
        draft_tokens: Sequence[int],
    ) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
        """Return likely draft tokens and their probabilities for each of `draft_tokens`: int32 and
        float16[n_draft_tokens, n_top]. A token may occur twice in a row: its probability is the sum. Target tokens
        without a counterpart get the probability 0.

        `answer` is the text in target tokens, `draft_tokens` the same text in draft tokens. `top_tokens` and
        `top_probabilities` are the target's, int32 and float16[n_answer, n_top].
        """
        starts: dict[int, int] = {}
        said = bytearray()
        for index, token in enumerate(answer):
            starts.setdefault(len(said), index)
            said += self._translation.target.token_bytes(token)
        shape = len(draft_tokens), top_tokens.shape[1]
        tokens, probabilities = np.zeros(shape, np.int32), np.zeros(shape, np.float16)
        offset = 0
        for row, own in enumerate(draft_tokens):
            place = starts.get(offset)
            data = self._translation.draft.token_bytes(own)
            if not said.startswith(data, offset):  # bytes before it that the draft has no token for
                starts.clear()
                place = None
            offset += len(data)
            if place is None:
                tokens[row, 0], probabilities[row, 0] = own, 1.0
                continue
            for column, token in enumerate(top_tokens[place].tolist()):
                found = own if token == answer[place] else self._draft_token(token)
                if found >= 0:
                    tokens[row, column] = found
                    probabilities[row, column] = top_probabilities[place, column]
        return tokens, probabilities

    def _draft_token(self, token: int) -> int:
        """Return the draft token that the text of a target token starts with; -1 if there is none."""
        found = self._first.get(token)
        if found is None:
            found = self._first[token] = self._translation.first_token(token)
        return found
