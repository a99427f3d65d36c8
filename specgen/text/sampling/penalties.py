"""The samplers that change the scores of a few tokens: biases, and penalties for tokens that the
text has already. For DRY see `specgen.text.sampling.dry`.

They take and return float[n], the scores of the affected tokens only. The arithmetic is done in the
precision of the scores, which for logits is llama.cpp's.
"""

from __future__ import annotations

import numpy as np

from specgen.system.arrays import ProbArray, TokenArray
from specgen.text.sampling.candidates import Scores


def logit_bias(scores: Scores, bias: ProbArray) -> Scores:
    """Add float64[n] biases to scores. Minus infinity forbids a token."""
    return scores + bias.astype(scores.dtype)


def penalties(
    scores: Scores, counts: ProbArray, repeat: float, frequency: float, presence: float
) -> Scores:
    """Lower the scores of tokens that occurred `counts` (float64[n], all positive) times.

    `repeat` divides positive scores and multiplies the others (CTRL, Keskar et al.,
    arXiv:1909.05858, which only divides: that would favour a token whose score is negative);
    1 changes nothing. `frequency` is subtracted for every occurrence, `presence` once.
    """
    scores = np.where(scores <= 0.0, scores * repeat, scores / repeat)
    return scores - (counts.astype(scores.dtype) * frequency + presence)


def occurrences(history: TokenArray, last_n: int) -> tuple[TokenArray, ProbArray]:
    """Return the tokens among the last n of int64[n_history] (n < 0: all) and how often each occurs:
    increasing ids int64[m], counts float64[m]."""
    token_ids, counts = np.unique(last(history, last_n), return_counts=True)
    return token_ids, counts.astype(np.float64)


def last(history: TokenArray, n: int) -> TokenArray:
    """Return the last n tokens; all if n is negative."""
    return history if n < 0 else history[max(0, len(history) - n) :]
