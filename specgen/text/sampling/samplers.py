"""The samplers: pure functions from `Candidates` to `Candidates`; each does the same as the
llama.cpp sampler of its name. `chain.py` puts them in order: a new sampler needs a case in its
`_step`.

A vocabulary has 150 thousand tokens, and a usual chain keeps forty: it begins with the row of
logits itself, and the first sampler that drops tokens picks the few that it keeps, without sorting
the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from specgen.errors import NoTokenAllowedError
from specgen.system.arrays import BoolArray, ProbArray, Scores, TokenArray, best
from specgen.text.sampling.distribution import Distribution

#: For int64[n] token ids, whether each may come next: bool[n].
Allows: TypeAlias = Callable[[TokenArray], BoolArray]

#: The number of tokens of a whole vocabulary to sort at first, if a sampler needs a share of its
#: mass.
_NUCLEUS_START = 512
#: The least tokens that a grammar is asked about, and how many times as many then, before all are.
_FIRST, _MORE = 16, 8


class Candidates(NamedTuple):
    """Tokens and scores, ranked (among equals by ascending id) or by ascending id; minus infinity
    cannot be drawn.
    """

    #: float[m]. For the whole vocabulary this is the row of logits itself: it is never written to.
    scores: Scores
    #: int64[m]; None is the whole vocabulary: the ids are 0 to m - 1.
    token_ids: TokenArray | None
    #: The number that llama.cpp would count, with minus infinity, on which dynamic temperature
    #: depends.
    size: int
    is_ranked: bool

    @classmethod
    def whole(cls, scores: Scores) -> Candidates:
        return cls(scores, None, len(scores), False)

    def take(self, positions: TokenArray, size: int, is_ranked: bool) -> Candidates:
        """Return the candidates at int64[n] positions, which must be in the order that `is_ranked`
        states.
        """
        scores = self.scores[positions].astype(np.float64)
        token_ids = positions if self.token_ids is None else self.token_ids[positions]
        return Candidates(scores, token_ids, size, is_ranked)

    def first(self, n: int) -> Candidates:
        assert self.is_ranked
        assert self.token_ids is not None
        return Candidates(self.scores[:n], self.token_ids[:n], n, True)

    def ids(self) -> TokenArray:
        return np.arange(len(self.scores)) if self.token_ids is None else self.token_ids

    def top(self) -> float:
        return float(self.scores[0] if self.is_ranked else self.scores.max())

    def by_id(self) -> Candidates:
        if not self.is_ranked:
            return self
        assert self.token_ids is not None
        order = self.token_ids.argsort()
        return self._replace(
            scores=self.scores[order], token_ids=self.token_ids[order], is_ranked=False
        )


# --- a grammar as a mask ----------------------------------------------------------------------------


def allowed(scores: Scores, allows: Allows) -> Candidates:
    """Return the tokens above minus infinity that `allows` permits. Raise `NoTokenAllowedError`."""
    possible = np.flatnonzero(scores > -np.inf)
    kept = possible[allows(possible)]
    if not len(kept):
        raise NoTokenAllowedError
    # In the type of the row: the samplers that follow compute as they do with a whole row.
    return Candidates(scores[kept], kept, len(scores), is_ranked=False)


def allowed_top_k(scores: Scores, allows: Allows, k: int) -> Candidates:
    """Return the k best tokens that `allows` permits, asked about the best first. Raise
    `NoTokenAllowedError`.
    """
    for n in (max(k, _FIRST), _MORE * max(k, _FIRST)):
        kept = best(scores, n)
        kept = kept[allows(kept)][:k]
        if len(kept) == k:
            break
    else:
        possible = allowed(scores, allows)
        kept = possible.ids()[best(possible.scores, k)]
    return Candidates.whole(scores).take(kept, min(k, len(scores)), is_ranked=True)


# --- biases and penalties ---------------------------------------------------------------------------
# They take and return the scores of the affected tokens only, in the precision of these.


def penalties(
    scores: Scores, counts: ProbArray, repeat: float, frequency: float, presence: float
) -> Scores:
    """Lower the scores of tokens that occurred `counts` times, float64[n]. `repeat` divides
    positive scores and multiplies others (CTRL, Keskar et al., arXiv:1909.05858, only divides,
    which favours negative ones).
    """
    scores = np.where(scores <= 0.0, scores * repeat, scores / repeat)
    return scores - (counts.astype(scores.dtype) * frequency + presence)


def occurrences(history: TokenArray, last_n: int) -> tuple[TokenArray, ProbArray]:
    """Return the tokens among the last n, and how often each occurs: increasing ids int64[m],
    float64[m].
    """
    token_ids, counts = np.unique(last(history, last_n), return_counts=True)
    return token_ids, counts.astype(np.float64)


def last(history: TokenArray, n: int) -> TokenArray:
    return history if n < 0 else history[max(0, len(history) - n) :]


# --- temperature ------------------------------------------------------------------------------------


def temperature(candidates: Candidates, t: float) -> Candidates:
    """Divide scores by t, as float64, which keeps them different; t <= 0 keeps only the likeliest
    with the lowest id.
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
    """Choose a temperature between t - spread and t + spread, high where the model is unsure: by
    the entropy relative to its largest, to the power `exponent` (llama.cpp's temp_ext; Zhu et al.,
    arXiv:2309.02772, for the idea).
    """
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
    """Return the distribution at temperature t > 0, without probabilities too small for a float64."""
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


# --- samplers that drop candidates ------------------------------------------------------------------
# They treat the scores of the samplers before as logits. So probabilities are those at temperature 1, unless the
# temperature came first, renormalised over the candidates that are left.


def top_k(candidates: Candidates, k: int) -> Candidates:
    """Keep the k most likely tokens (k >= 1). Among equals the lower id is kept."""
    if candidates.is_ranked and len(candidates.scores) <= k:
        return candidates
    size = min(k, candidates.size)
    if candidates.is_ranked:
        return candidates.first(k)._replace(size=size)
    return candidates.take(best(candidates.scores, k), size, is_ranked=True)


def top_p(candidates: Candidates, p: float) -> Candidates:
    """Keep the shortest run of likeliest tokens whose mass reaches p < 1 (Holtzman et al.,
    arXiv:1904.09751). llama.cpp adds in float32, so a token at the very edge may be on the other
    side there.
    """
    if candidates.is_ranked:
        cumulative = np.exp(candidates.scores - candidates.scores[0]).cumsum()
        return candidates.first(int(cumulative.searchsorted(p * cumulative[-1])) + 1)
    masses, total = _masses(candidates.scores)
    kept = _shortest(candidates.scores, masses, p * total, "left")
    return candidates.take(kept, len(kept), is_ranked=True)


def min_p(candidates: Candidates, p: float) -> Candidates:
    """Keep tokens at least p > 0 times as likely as the likeliest (Nguyen et al.,
    arXiv:2407.01082).
    """
    top = candidates.top()
    return _at_least(candidates, min(top + math.log(p), top))


def typical(candidates: Candidates, p: float) -> Candidates:
    """Keep the shortest run of tokens whose surprise is nearest to the entropy and whose mass
    exceeds p < 1 (Meister et al., arXiv:2202.00666), without probability 0, which makes llama.cpp's
    entropy NaN and its result arbitrary.
    """
    masses, total = _masses(candidates.scores)
    possible = np.flatnonzero(masses)
    probs = masses[possible].astype(np.float64) / total
    surprise = -np.log(probs)
    distance = np.abs(surprise - (probs * surprise).sum())
    kept = possible[_shortest(-distance, probs, p, "right")]
    kept.sort()
    return candidates.take(kept, len(kept), candidates.is_ranked)


def top_n_sigma(candidates: Candidates, n: float) -> Candidates:
    """Keep tokens at most n > 0 standard deviations, of all finite scores, below the largest (Tang
    et al., arXiv:2411.07641). llama.cpp keeps the others with minus infinity.
    """
    if candidates.size <= 1:
        return candidates
    scores = candidates.scores
    finite = scores if scores.min() > -np.inf else scores[scores > -np.inf]
    deviation = float(finite.std(dtype=np.float64))
    return _at_least(candidates, candidates.top() - n * deviation)._replace(size=candidates.size)


def xtc(candidates: Candidates, threshold: float) -> Candidates:
    """Of the candidates of at least `threshold` (1/2 at most) keep only the least likely ("exclude
    top choices", p-e-w, github.com/oobabooga/text-generation-webui/pull/6335). The chain knows the
    chance of it. Unchanged: `candidates`.
    """
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
    """Return the shortest run, by descending `order_by`, whose mass reaches `enough` or exceeds it."""
    n = _NUCLEUS_START
    while True:
        positions = best(order_by, n)
        cumulative = masses[positions].cumsum(dtype=np.float64)
        n_kept = int(cumulative.searchsorted(enough, side)) + 1
        if n_kept <= len(positions) or n >= len(order_by):
            return positions[:n_kept]
        n *= 8
