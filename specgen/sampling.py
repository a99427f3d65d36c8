"""From logits to a distribution over tokens, in llama.cpp's order and with its meaning.

The default chain of llama.cpp is top-k, top-p, min-p, temperature. Each step sees what the
one before left, renormalised; top-p and min-p therefore act on probabilities at temperature
1, and the temperature only reshapes the survivors.

A vocabulary has 150 thousand entries and a chain like the default keeps forty, so a
distribution is held sparsely: the tokens that can be drawn, and their probabilities.
Everything here is a pure function of its arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from specgen.arrays import Logits, ProbArray, TokenArray
from specgen.errors import BackendError
from specgen.options import SamplerOptions

#: Size of the groups whose maxima bound the k-th largest logit from below.
_GROUP = 64
#: Below every finite logit is only minus infinity.
_LOWEST = float(np.finfo(np.float32).min)
#: How many candidates to sort at first for top-p over a whole vocabulary.
_NUCLEUS_START = 512


@dataclass(frozen=True, slots=True)
class Distribution:
    """A probability distribution over token ids, by its support.

    `token_ids` is int64[m], strictly increasing; `probs` is float64[m], positive, and sums
    to 1 up to rounding.
    """

    token_ids: TokenArray
    probs: ProbArray

    def probability(self, token_id: int) -> float:
        """The probability of one token; 0 outside the support."""
        index = int(self.token_ids.searchsorted(token_id))
        if index < len(self.token_ids) and self.token_ids[index] == token_id:
            return float(self.probs[index])
        return 0.0

    def draw(self, rng: np.random.Generator) -> int:
        """One token, by inverting the cumulative distribution: one uniform number a token.

        The uniform is all the randomness there is, so plain and speculative decoding that
        draw from equal distributions with generators in equal states draw equal tokens.
        """
        cumulative = self.probs.cumsum()
        index = int(cumulative.searchsorted(rng.random() * cumulative[-1], side="right"))
        return int(self.token_ids[min(index, len(self.token_ids) - 1)])

    def minus(self, other: Distribution) -> Distribution | None:
        """normalize(max(0, self - other)): the residual of a refused draft.

        None if nothing is left, that is, if the two are equal. (Leviathan et al.,
        arXiv:2211.17192, Algorithm 1; Chen et al., arXiv:2302.01318, Algorithm 2.)
        """
        remaining = self.probs.copy()
        position = other.token_ids.searchsorted(self.token_ids)
        position[position == len(other.token_ids)] = 0
        shared = other.token_ids[position] == self.token_ids
        remaining[shared] -= other.probs[position[shared]]
        kept = remaining > 0.0
        if not kept.any():
            return None
        remaining = remaining[kept]
        return Distribution(self.token_ids[kept], remaining / remaining.sum())

    @staticmethod
    def certain(token_id: int) -> Distribution:
        """All the mass on one token."""
        return Distribution(np.array([token_id], np.int64), np.ones(1))


def argmax(logits: Logits) -> int:
    """The most likely token of a row, float32[n_vocab]; the lowest id among equals.

    Raises `BackendError` if the row is not made of numbers: NaN would win every comparison.
    """
    token_id = int(logits.argmax())
    _check_finite(float(logits[token_id]))
    return token_id


def top_probability(logits: Logits) -> float:
    """The largest probability of a row at temperature 1, before any truncation."""
    top = logits.max()
    _check_finite(float(top))
    return 1.0 / float(np.exp(logits - top).sum(dtype=np.float64))


def distribution(logits: Logits, options: SamplerOptions) -> Distribution:
    """The distribution that `options` makes of a row of logits, float32[n_vocab].

    Raises `BackendError` if the row has no finite maximum.
    """
    if options.greedy:
        return Distribution.certain(argmax(logits))
    top = float(logits.max())  # NaN if any logit is
    _check_finite(top)
    if 0 < options.top_k < len(logits):
        token_ids, scores = top_p(*top_k(logits, options.top_k), options.top_p)
        token_ids, scores = min_p(token_ids, scores, options.min_p)
    elif options.top_p < 1.0:
        token_ids, scores = _top_p_of_all(logits, top, options.top_p)
        token_ids, scores = min_p(token_ids, scores, options.min_p)
    else:  # nothing that needs an order
        token_ids = np.flatnonzero(logits >= max(_least(top, options.min_p), _LOWEST))
        scores = logits[token_ids].astype(np.float64)
    probs = np.exp((scores - top) / options.temperature)
    order = token_ids.argsort(kind="stable")
    token_ids, probs = token_ids[order], probs[order] / probs.sum()
    if not probs.all():  # too unlikely to have a probability
        token_ids, probs = token_ids[probs > 0.0], probs[probs > 0.0]
    return Distribution(token_ids, probs)


def top_k(logits: Logits, k: int) -> tuple[TokenArray, ProbArray]:
    """The k largest logits as (ids int64[m], logits float64[m]), largest first.

    k <= 0 keeps every finite logit. Among equal logits the lower id is kept. Cost: one pass
    for the maxima of small groups; the k-th largest of those bounds the k-th largest logit
    from below, so that only a few candidates are ever sorted.
    """
    n_vocab = len(logits)
    if 0 < k < n_vocab:
        candidates = np.flatnonzero(logits >= _lower_bound(logits, k))
    else:
        k = n_vocab
        candidates = np.arange(n_vocab)
    scores = logits[candidates].astype(np.float64)
    order = (-scores).argsort(kind="stable")[:k]  # candidates ascend, so equals keep that order
    token_ids, scores = candidates[order], scores[order]
    if scores[-1] == -np.inf:
        n_finite = int(np.count_nonzero(scores > -np.inf))
        return token_ids[:n_finite], scores[:n_finite]
    return token_ids, scores


def top_p(token_ids: TokenArray, scores: ProbArray, p: float) -> tuple[TokenArray, ProbArray]:
    """The shortest run of most likely tokens whose mass reaches p (nucleus sampling,
    arXiv:1904.09751). Expects and returns tokens sorted by descending logit; p >= 1 keeps all.
    """
    if p >= 1.0:
        return token_ids, scores
    cumulative = np.exp(scores - scores[0]).cumsum()
    n_kept = int(cumulative.searchsorted(p * cumulative[-1])) + 1
    return token_ids[:n_kept], scores[:n_kept]


def min_p(token_ids: TokenArray, scores: ProbArray, p: float) -> tuple[TokenArray, ProbArray]:
    """Tokens at least p times as likely as the most likely one (arXiv:2407.01082).

    Expects and returns tokens sorted by descending logit; p <= 0 keeps all.
    """
    n_kept = len(scores) - int(scores[::-1].searchsorted(_least(float(scores[0]), p)))
    return token_ids[:n_kept], scores[:n_kept]


def _least(top: float, p: float) -> float:
    """The smallest logit that min-p keeps beside a largest one of `top`."""
    if p <= 0.0:
        return -math.inf
    return min(top + math.log(p), top)


def _top_p_of_all(logits: Logits, top: float, p: float) -> tuple[TokenArray, ProbArray]:
    """`top_p` of a whole row, whose maximum is `top`, without sorting it: more candidates
    until their mass suffices."""
    total = float(np.exp(logits - np.float32(top)).sum(dtype=np.float64))
    n_candidates = _NUCLEUS_START
    while n_candidates < len(logits):
        token_ids, scores = top_k(logits, n_candidates)
        cumulative = np.exp(scores - scores[0]).cumsum()
        if cumulative[-1] >= p * total:
            n_kept = int(cumulative.searchsorted(p * total)) + 1
            return token_ids[:n_kept], scores[:n_kept]
        n_candidates *= 8
    return top_p(*top_k(logits, 0), p)


def _lower_bound(logits: Logits, k: int) -> np.float32:
    """A number that at least k of the logits reach, and few more than k."""
    n_groups = len(logits) // _GROUP
    if n_groups < 2 * k:
        return np.float32(np.partition(logits, len(logits) - k)[len(logits) - k])
    # A group is a column, not a stretch of the row: the maxima are then taken by whole SIMD
    # registers (12 microseconds instead of 140 for 152 thousand logits).
    maxima = logits[: n_groups * _GROUP].reshape(_GROUP, n_groups).max(axis=0)
    return np.float32(np.partition(maxima, n_groups - k)[n_groups - k])


def _check_finite(logit: float) -> None:
    if not math.isfinite(logit):
        raise BackendError(
            f"the model's largest logit is {logit}: the file is damaged, or this build of "
            "llama.cpp computes wrongly on this machine",
            hint="run `specgen doctor`",
        )
