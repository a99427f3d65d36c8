"""The samplers as pure functions, each equivalent to the llama.cpp sampler that it names.

`steps.py` connects them with the options. DRY is in `dry.py`.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from specgen.sampler_options import SMALLEST_TEMPERATURE
from specgen.system.arrays import ProbArray, Scores, TokenArray, best
from specgen.text.sampling.candidates import Candidates

#: A sampler that keeps a share of the probability first sorts this many tokens of a vocabulary.
_NUCLEUS_START = 512
#: Whenever these are not enough, it sorts this many times more.
_NUCLEUS_GROWTH = 8


# --- biases and penalties
# They get and return only the scores of the affected tokens, and keep their precision.


def biases(scores: Scores, amounts: ProbArray) -> Scores:
    """Add a bias, float64[n], to each score: llama.cpp's `logit-bias`."""
    return scores + amounts.astype(scores.dtype)


def penalties(
    scores: Scores,
    counts: ProbArray,
    repeat: float,
    frequency: float,
    presence: float,
) -> Scores:
    """Lower the scores of tokens that occurred: llama.cpp's `penalties`.

    score / repeat - count * frequency - presence; scores of 0 and below are multiplied by `repeat`
    instead. (CTRL, Keskar et al., arXiv:1909.05858, always divides, which favours negative scores.)

    Args:
        scores: The scores of the tokens, float[n].
        counts: The number of times that each of them occurred, float64[n].
        repeat: The factor of the repetition penalty.
        frequency: The penalty for each occurrence.
        presence: The penalty for any number of occurrences.
    """
    scores = np.where(scores <= 0.0, scores * repeat, scores / repeat)
    return scores - (counts.astype(scores.dtype) * frequency + presence)


def occurrences(history: TokenArray, last_n: int) -> tuple[TokenArray, ProbArray]:
    """Count the occurrences of each token among the last ones.

    Returns:
        The token ids, int64[m], increasing, and the number of occurrences of each, float64[m].
    """
    token_ids, counts = np.unique(last(history, last_n), return_counts=True)
    return token_ids, counts.astype(np.float64)


def last(history: TokenArray, n: int) -> TokenArray:
    """Return the last n tokens, int64[m], or all of them if n is negative."""
    return history if n < 0 else history[max(0, len(history) - n) :]


# --- temperature


def temperature(candidates: Candidates, t: float) -> Candidates:
    """Divide scores by t: llama.cpp's `temp`; a t of 0, or close to it, keeps only the best token.

    Among tokens with equal scores, the lowest id is the best. Scores become float64, so that
    different ones remain different.
    """
    if t < SMALLEST_TEMPERATURE:
        position = 0 if candidates.is_ranked else int(candidates.scores.argmax())
        return candidates.take(np.array([position]), candidates.size, is_ranked=True)
    if t == 1.0:
        return candidates
    return candidates._replace(scores=candidates.scores.astype(np.float64) / t)


def dynamic_temperature(
    candidates: Candidates,
    t: float,
    spread: float,
    exponent: float,
) -> Candidates:
    """Apply a temperature that depends on how unsure the model is: llama.cpp's `temp-ext`.

    It is low + (high - low) * (entropy / largest possible entropy) ** exponent, where low is
    t - spread and high is t + spread. (The idea is from Zhu et al., arXiv:2309.02772.)
    """
    if candidates.size <= 1:
        return candidates
    low = max(0.0, t - spread)
    high = t + spread
    scores = candidates.scores.astype(np.float64)
    masses = np.exp(scores - candidates.top())
    probs = masses[masses > 0.0] / masses.sum()
    entropy = -float((probs * np.log(probs)).sum())
    share = min(max(entropy / math.log(candidates.size), 0.0), 1.0)
    return temperature(candidates, low + (high - low) * share**exponent)


# --- samplers that drop candidates
# They take the scores as logits. So probabilities here are at temperature 1, unless a temperature
# was applied before, and they are normalised over the candidates that are left.


def top_k(candidates: Candidates, k: int) -> Candidates:
    """Keep the k >= 1 most likely tokens: llama.cpp's `top-k`.

    Among tokens with equal scores, lower ids are kept.
    """
    if candidates.is_ranked and len(candidates.scores) <= k:
        return candidates
    size = min(k, candidates.size)
    if candidates.is_ranked:
        return candidates.first(k)._replace(size=size)
    return candidates.take(best(candidates.scores, k), size, is_ranked=True)


def top_p(candidates: Candidates, p: float) -> Candidates:
    """Keep the fewest most likely tokens whose probability reaches p < 1: llama.cpp's `top-p`.

    This is nucleus sampling (Holtzman et al., arXiv:1904.09751). llama.cpp adds in float32, so it
    may decide differently about the last token.
    """
    if candidates.is_ranked:
        cumulative = np.exp(candidates.scores - candidates.scores[0]).cumsum()
        return candidates.first(int(cumulative.searchsorted(p * cumulative[-1])) + 1)
    masses, total = _masses(candidates.scores)
    kept = _shortest_run(candidates.scores, masses, p * total, "left")
    return candidates.take(kept, len(kept), is_ranked=True)


def min_p(candidates: Candidates, p: float) -> Candidates:
    """Keep tokens at least p > 0 times as likely as the most likely one: llama.cpp's `min-p`.

    That is score >= largest + log(p) (Nguyen et al., arXiv:2407.01082).
    """
    top = candidates.top()
    return _at_least(candidates, min(top + math.log(p), top))


def typ_p(candidates: Candidates, p: float) -> Candidates:
    """Keep the most typical tokens, whose probability exceeds p < 1: llama.cpp's `typical`.

    A token is the more typical, the nearer its surprise -log(probability) is to the entropy
    (Meister et al., arXiv:2202.00666). Tokens with probability 0 are dropped: with them,
    llama.cpp's entropy is NaN and its result arbitrary.
    """
    masses, total = _masses(candidates.scores)
    possible = np.flatnonzero(masses)
    probs = masses[possible].astype(np.float64) / total
    surprise = -np.log(probs)
    distance = np.abs(surprise - (probs * surprise).sum())
    kept = possible[_shortest_run(-distance, probs, p, "right")]
    kept.sort()
    return candidates.take(kept, len(kept), candidates.is_ranked)


def top_n_sigma(candidates: Candidates, n: float) -> Candidates:
    """Keep tokens within n > 0 standard deviations of the largest: llama.cpp's `top-n-sigma`.

    That is score >= largest - n * deviation, with the deviation of all finite scores (Tang et al.,
    arXiv:2411.07641). llama.cpp keeps the other tokens with a score of minus infinity, so they
    still count in `size`.
    """
    if candidates.size <= 1:
        return candidates
    scores = candidates.scores
    finite = scores if scores.min() > -np.inf else scores[scores > -np.inf]
    deviation = float(finite.std(dtype=np.float64))
    kept = _at_least(candidates, candidates.top() - n * deviation)
    return kept._replace(size=candidates.size)


def xtc(candidates: Candidates, threshold: float) -> Candidates:
    """Exclude top choices, as llama.cpp's `xtc` does if its random number is low enough.

    Of the tokens whose probability is at least `threshold` (at most 1/2), only the least likely one
    is kept (by p-e-w, github.com/oobabooga/text-generation-webui/pull/6335).

    Returns:
        The remaining candidates; `candidates` itself if nothing is excluded.
    """
    masses, total = _masses(candidates.scores)
    # Even at threshold 0, the token that is kept must be one that can be sampled.
    min_mass = max(threshold * total, float(np.finfo(masses.dtype).tiny))
    above = np.flatnonzero(masses >= min_mass)
    if len(above) < 2:
        return candidates
    # Among tokens with equal scores, the last one is the least likely, so search from the end.
    from_end = int(candidates.scores[above][::-1].argmin())
    least_likely = above[len(above) - 1 - from_end]
    is_kept = np.ones(len(masses), np.bool_)
    is_kept[above] = False
    is_kept[least_likely] = True
    size = candidates.size - (len(above) - 1)
    return candidates.take(np.flatnonzero(is_kept), size, candidates.is_ranked)


# --- what several of them need


def _at_least(candidates: Candidates, min_score: float) -> Candidates:
    """Return the candidates whose score is finite and at least `min_score`."""
    scores = candidates.scores
    if candidates.is_ranked:
        n_below = int(scores[::-1].searchsorted(min_score))
        return candidates.first(len(scores) - n_below)
    kept = np.flatnonzero(scores >= max(min_score, float(np.finfo(scores.dtype).min)))
    return candidates.take(kept, len(kept), is_ranked=False)


def _masses(scores: Scores) -> tuple[Scores, float]:
    """Return unnormalised probabilities, exp(score - largest), and their sum."""
    with np.errstate(over="ignore"):  # the difference of two scores may exceed a float32
        masses = np.exp(scores - scores.max())
    return masses, float(masses.sum(dtype=np.float64))


def _shortest_run(
    order_by: Scores,
    masses: Scores,
    min_total: float,
    side: Literal["left", "right"],
) -> TokenArray:
    """Return the fewest positions, in descending order of a key, that have enough mass together.

    Only as many positions as necessary are sorted.

    Args:
        order_by: The key, float[m].
        masses: The mass at each position, float[m].
        min_total: The mass that the positions have to reach or exceed.
        side: Whether reaching it is enough ("left"), or it has to be exceeded ("right").
    """
    n = _NUCLEUS_START
    while True:
        positions = best(order_by, n)
        cumulative = masses[positions].cumsum(dtype=np.float64)
        n_kept = int(cumulative.searchsorted(min_total, side)) + 1
        if n_kept <= len(positions) or n >= len(order_by):
            return positions[:n_kept]
        n *= _NUCLEUS_GROWTH
