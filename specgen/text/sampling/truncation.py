"""The samplers that drop candidates: top-k, top-p, min-p, typical, top-n-sigma, XTC.

Pure functions from `Candidates` to `Candidates`; each does the same as the llama.cpp sampler of its
name. They treat the scores of the samplers before as logits. So probabilities are those at temperature
1, unless the temperature came first, renormalised over the candidates that are left.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from specgen.system.arrays import TokenArray
from specgen.text.sampling.candidates import Candidates, Scores, best

#: The number of tokens of a whole vocabulary to sort at first, if a sampler needs a share of its mass.
_NUCLEUS_START = 512


def top_k(candidates: Candidates, k: int) -> Candidates:
    """Keep the k most likely tokens; k <= 0 keeps all. Among equals the lower id is kept."""
    if k <= 0 or (candidates.is_ranked and len(candidates.scores) <= k):
        return candidates
    size = min(k, candidates.size)
    if candidates.is_ranked:
        return candidates.first(k)._replace(size=size)
    return candidates.take(best(candidates.scores, k), size, is_ranked=True)


def top_p(candidates: Candidates, p: float) -> Candidates:
    """Keep the shortest run of most likely tokens whose mass reaches p: nucleus sampling (Holtzman et al.,
    arXiv:1904.09751). p >= 1 keeps all.

    llama.cpp adds in float32, so a token at the very edge may be on the other side there.
    """
    if p >= 1.0:
        return candidates
    if candidates.is_ranked:
        cumulative = np.exp(candidates.scores - candidates.scores[0]).cumsum()
        return candidates.first(int(cumulative.searchsorted(p * cumulative[-1])) + 1)
    masses, total = _masses(candidates.scores)
    kept = _shortest(candidates.scores, masses, p * total, "left")
    return candidates.take(kept, len(kept), is_ranked=True)


def min_p(candidates: Candidates, p: float) -> Candidates:
    """Keep the tokens at least p times as likely as the most likely one (Nguyen et al., arXiv:2407.01082).
    p <= 0 keeps all."""
    if p <= 0.0:
        return candidates
    return _at_least(candidates, least_for_min_p(candidates.top(), p))


def least_for_min_p(top: float, p: float) -> float:
    """Return the smallest score that min-p keeps if the largest one is `top`."""
    return min(top + math.log(p), top)


def typical(candidates: Candidates, p: float) -> Candidates:
    """Keep the shortest run of most typical tokens whose mass exceeds p. The most typical tokens are those
    whose surprise, -log probability, is nearest to its mean, the entropy (Meister et al.,
    arXiv:2202.00666). p >= 1 keeps all.

    Tokens with probability 0 are left out. In llama.cpp one such token makes the entropy NaN, and
    the kept tokens are then arbitrary.
    """
    if p >= 1.0:
        return candidates
    masses, total = _masses(candidates.scores)
    possible = np.flatnonzero(masses)
    probs = masses[possible].astype(np.float64) / total
    surprise = -np.log(probs)
    distance = np.abs(surprise - (probs * surprise).sum())
    kept = possible[_shortest(-distance, probs, p, "right")]
    kept.sort()
    return candidates.take(kept, len(kept), candidates.is_ranked)


def top_n_sigma(candidates: Candidates, n: float) -> Candidates:
    """Keep the tokens whose score is at most n standard deviations below the largest one (Tang et al.,
    arXiv:2411.07641). n <= 0 keeps all.

    The standard deviation is that of all finite scores. llama.cpp keeps the others in its
    list, with a score of minus infinity.
    """
    if n <= 0.0 or candidates.size <= 1:
        return candidates
    scores = candidates.scores
    finite = scores if scores.min() > -np.inf else scores[scores > -np.inf]
    deviation = float(finite.std(dtype=np.float64))
    return _at_least(candidates, candidates.top() - n * deviation)._replace(size=candidates.size)


def xtc(candidates: Candidates, threshold: float) -> Candidates:
    """Remove the most likely candidates: of those with a probability of at least `threshold` only the least
    likely one is kept ("exclude top choices", by p-e-w,
    github.com/oobabooga/text-generation-webui/pull/6335). A threshold above 1/2 keeps all.

    XTC removes tokens only with a given probability, which the chain takes into account. Return
    `candidates` itself if there is nothing to remove.
    """
    if threshold > 0.5:
        return candidates
    masses, total = _masses(candidates.scores)
    # The token that is kept is never one that cannot be drawn, not even at threshold 0.
    above = np.flatnonzero(masses >= max(threshold * total, float(np.finfo(masses.dtype).tiny)))
    if len(above) < 2:
        return candidates
    # The last of the least likely tokens ranks last, in either order of the candidates.
    lowest = above[len(above) - 1 - int(candidates.scores[above][::-1].argmin())]
    kept = np.ones(len(masses), np.bool_)
    kept[above] = False
    kept[lowest] = True
    n_removed = len(above) - 1
    return candidates.take(np.flatnonzero(kept), candidates.size - n_removed, candidates.is_ranked)


def _at_least(candidates: Candidates, least: float) -> Candidates:
    """Return the candidates whose score is at least `least`, without those of minus infinity."""
    scores = candidates.scores
    if candidates.is_ranked:
        return candidates.first(len(scores) - int(scores[::-1].searchsorted(least)))
    kept = np.flatnonzero(scores >= max(least, float(np.finfo(scores.dtype).min)))
    return candidates.take(kept, len(kept), is_ranked=False)


def _masses(scores: Scores) -> tuple[Scores, float]:
    """Return exp(scores - largest), which are probabilities that are not normalised, and their sum."""
    with np.errstate(over="ignore"):  # from one end of float32 to the other
        masses = np.exp(scores - scores.max())
    return masses, float(masses.sum(dtype=np.float64))


def _shortest(
    order_by: Scores, masses: Scores, enough: float, side: Literal["left", "right"]
) -> TokenArray:
    """Return positions of the shortest run, by descending `order_by`, whose mass reaches `enough` (side
    "left") or exceeds it ("right"); all if it never does. Sort as few as possible."""
    n = _NUCLEUS_START
    while True:
        positions = best(order_by, n)
        cumulative = masses[positions].cumsum(dtype=np.float64)
        n_kept = int(cumulative.searchsorted(enough, side)) + 1
        if n_kept <= len(positions) or n >= len(order_by):
            return positions[:n_kept]
        n *= 8
