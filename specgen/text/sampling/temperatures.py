"""The samplers that reshape a distribution as a whole: temperature, fixed and dynamic."""

from __future__ import annotations

import math

import numpy as np

from specgen.system.arrays import ProbArray
from specgen.text.sampling.candidates import Candidates
from specgen.text.sampling.distribution import Distribution


def temperature(candidates: Candidates, t: float) -> Candidates:
    """Divide scores by t; t <= 0 keeps only the most likely token, the lowest id among equals.

    For a whole vocabulary the result is a new float64[n_vocab], which is exact enough that different
    scores stay different. So it does not matter whether top-k comes before or after.
    """
    if t <= 0.0:
        position = 0 if candidates.is_ranked else int(candidates.scores.argmax())
        return candidates.take(np.array([position]), candidates.size, is_ranked=True)
    if t == 1.0:
        return candidates
    return candidates._replace(scores=candidates.scores.astype(np.float64) / t)


def dynamic_temperature(
    candidates: Candidates, t: float, spread: float, exponent: float
) -> Candidates:
    """Choose a temperature between t - spread (at least 0) and t + spread: high where the model is unsure,
    low where it is sure. It follows the entropy, divided by the largest entropy of this number of
    candidates, to the power `exponent`. A spread of 0 or less gives the fixed temperature t.

    (llama.cpp's temp_ext, "entropy" dynamic temperature by kalomaze; Zhu et al.,
    arXiv:2309.02772, for the idea.)
    """
    if spread <= 0.0:
        return temperature(candidates, t)
    if candidates.size <= 1:
        return candidates
    low, high = max(0.0, t - spread), t + spread
    scores = candidates.scores.astype(np.float64)
    masses = np.exp(scores - candidates.top())
    probs = masses[masses > 0.0] / masses.sum()
    entropy = -float((probs * np.log(probs)).sum())
    share = min(max(entropy / math.log(candidates.size), 0.0), 1.0)
    return temperature(candidates, low + (high - low) * share**exponent)


def softmax(candidates: Candidates, t: float) -> Distribution:
    """Return the distribution over the candidates at temperature t > 0.

    Tokens whose probability is too small for a float64 are left out.
    """
    # In place: for a whole vocabulary new arrays cost as much as the arithmetic.
    probs: ProbArray = candidates.scores.astype(np.float64)
    probs -= candidates.top()
    probs /= t
    np.exp(probs, out=probs)
    token_ids = candidates.ids()
    if candidates.is_ranked:
        order = token_ids.argsort()
        token_ids, probs = token_ids[order], probs[order]
    probs /= probs.sum()
    if not probs.all():
        token_ids, probs = token_ids[probs > 0.0], probs[probs > 0.0]
    return Distribution(token_ids, probs)
