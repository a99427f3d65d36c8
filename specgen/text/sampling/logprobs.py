"""Log-probabilities of tokens, as the model gives them: at temperature 1, before samplers and
grammar, as llama.cpp's server and OpenAI's interface report them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specgen.system.arrays import Logits
from specgen.text.sampling import top_k


def log_probabilities(logits: Logits, token_ids: Sequence[int]) -> list[float]:
    """Return the natural logarithms of these tokens' probabilities, from a row of logits, float32[n_vocab];
    -inf for an impossible token."""
    top = float(logits.max())
    normalizer = top + float(np.log(np.exp(logits - np.float32(top)).sum(dtype=np.float64)))
    return [float(logits[token_id]) - normalizer for token_id in token_ids]


def most_likely(logits: Logits, n: int) -> list[int]:
    """Return the n most likely tokens of a row, float32[n_vocab], the likeliest first."""
    if n < 1:
        return []
    token_ids, _ = top_k(logits, n)
    return [int(token_id) for token_id in token_ids]
