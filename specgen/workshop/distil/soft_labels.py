"""What a target found likely, in the tokens of a draft with another vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specgen.drafters.translation import Translation


class SoftLabels:
    """Translates the target's likeliest tokens, place by place, for a pair of vocabularies.

    The target's distribution is over its own tokens. Where one of the draft's tokens begins where one of the
    target's does, each of the target's likely tokens stands for the draft's token that its text begins with, and
    the token that the target chose for the draft's token that is in the text. Elsewhere the draft's token
    begins inside of one of the target's, which then is known: all of the probability is the text's own token.
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
        """The likeliest of the draft's tokens and their probabilities for each of `draft_tokens`, which are the
        text of `answer`, in the target's tokens: int32 and float16[n_draft_tokens, n_top], where a token may
        stand more than once, and those that the draft has no token for have no probability.

        `top_tokens` and `top_probabilities` are the target's, int32 and float16[n_answer, n_top].
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
        """The draft's token that the text of a target's token begins with; -1 if there is none."""
        found = self._first.get(token)
        if found is None:
            found = self._first[token] = self._translation.first_token(token)
        return found
