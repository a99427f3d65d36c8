"""What a row of logits says by itself, before samplers and grammar: its most likely tokens, and probabilities at
temperature 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from specgen.errors import BackendError
from specgen.system.arrays import Logits, best

#: The most blocks that a row is divided into, and how far below the largest logit that of a block has to be so that its
#: tokens do not change the sum of the row's e^logit, in float32.
_N_BLOCKS, _FAR = 64, 40.0


def argmax(logits: Logits) -> int:
    """Return the most likely token of a row, float32[n_vocab]; the lowest id among equals.

    Raise `BackendError` if the largest logit is not finite: NaN would win every comparison.
    """
    token_id = int(logits.argmax())
    check_finite(float(logits[token_id]))
    return token_id


def likeliest(logits: Logits, n: int) -> tuple[list[int], list[float]]:
    """Return the n likeliest tokens of a row, float32[n_vocab], the lowest ids first among equals, and their
    probabilities at temperature 1. The row is written to and restored.

    Raise `BackendError` if the largest logit is not finite."""
    blocks = logits.reshape(math.gcd(len(logits), _N_BLOCKS), -1)
    maxima, tokens, scores = blocks.max(axis=1), list[int](), list[float]()
    top = float(maxima.max())
    check_finite(top)
    # Blocks that would not change the sum are left out: a draft computes no logits for rare tokens.
    masses = blocks[maxima > top - _FAR]
    masses -= np.float32(top)
    np.exp(masses, out=masses)
    total = float(masses.sum())
    while len(tokens) < n:
        block = int(maxima.argmax())
        place = int(blocks[block].argmax())
        score = float(blocks[block, place])
        if score == -np.inf:
            break
        tokens.append(block * blocks.shape[1] + place)
        scores.append(score)
        blocks[block, place] = -np.inf
        maxima[block] = blocks[block].max()
    for token, score in zip(tokens, scores, strict=True):
        logits[token] = score
    return tokens, [math.exp(score - top) / total for score in scores]


def check_finite(logit: float) -> None:
    """Raise `BackendError` if the largest logit of a row is not finite."""
    if not math.isfinite(logit):
        raise BackendError(
            f"the model's largest logit is {logit}: the file is damaged, or this build of "
            "llama.cpp computes wrongly on this machine",
            hint="run `specgen doctor`",
        )


def log_probabilities(logits: Logits, token_ids: Sequence[int]) -> list[float]:
    """Return the natural logarithms of these tokens' probabilities, from a row of logits, float32[n_vocab];
    -inf for an impossible token."""
    top = float(logits.max())
    normalizer = top + float(np.log(np.exp(logits - np.float32(top)).sum(dtype=np.float64)))
    return [float(logits[token_id]) - normalizer for token_id in token_ids]


def most_likely(logits: Logits, n: int) -> list[int]:
    """Return the n most likely tokens of a row, float32[n_vocab], the likeliest first."""
    return best(logits, n).tolist() if n > 0 else []
