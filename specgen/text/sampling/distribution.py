"""A sparse distribution over tokens, and what a row of logits says by itself: its largest values, its most likely
tokens, and log-probabilities at temperature 1, before samplers and grammar."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from specgen.errors import BackendError
from specgen.system.arrays import Logits, ProbArray, TokenArray

#: float32[m] or float64[m]: logits as the samplers so far have left them.
Scores: TypeAlias = npt.NDArray[np.floating[Any]]

#: Size of the groups whose maxima bound the n-th largest score from below.
_GROUP = 64
#: A smaller vocabulary is partitioned at once, without groups.
_SMALL = 2048
#: If a row's largest logit is this near to 0, the sum of all e^logit is an ordinary float32, and terms
#: that underflow to 0 do not matter.
_EXP_RANGE = 60.0
#: The probabilities of a certain token, shared: greedy decoding makes such a distribution for each token.
_ALL: ProbArray = np.ones(1)
_ALL.flags.writeable = False


@dataclass(frozen=True, slots=True)
class Distribution:
    """A probability distribution over token ids, stored by its support.

    `token_ids` is int64[m], strictly increasing; `probs` is float64[m], positive, and sums
    to 1 up to rounding.
    """

    token_ids: TokenArray
    probs: ProbArray

    def probability(self, token_id: int) -> float:
        index = int(self.token_ids.searchsorted(token_id))
        if index < len(self.token_ids) and self.token_ids[index] == token_id:
            return float(self.probs[index])
        return 0.0

    def probabilities(self, token_ids: TokenArray) -> ProbArray:
        position = self.token_ids.searchsorted(token_ids)
        position[position == len(self.token_ids)] = 0
        return np.where(self.token_ids[position] == token_ids, self.probs[position], 0.0)

    def without(self, token_id: int) -> Distribution | None:
        """Return the distribution without a token, renormalised: the next sibling is drawn from it if
        tokens are drawn without replacement. None if nothing is left."""
        kept = self.token_ids != token_id
        if kept.all():
            return self
        remaining = self.probs[kept]
        if not len(remaining):
            return None
        return Distribution(self.token_ids[kept], remaining / remaining.sum())

    def ranked(self, n: int) -> list[tuple[int, float]]:
        """Return the n most likely tokens and their probabilities, best first, the lower id first among
        equals; fewer if there are fewer."""
        order = best(self.probs, n)
        return list(zip(self.token_ids[order].tolist(), self.probs[order].tolist(), strict=True))

    @property
    def mode(self) -> int:
        return int(self.token_ids[self.probs.argmax()])

    def draw(self, rng: np.random.Generator) -> int:
        """Draw a token by inverting the cumulative distribution. This takes one uniform number, or none
        if there is only one token to draw.

        No other randomness is used. So plain and speculative decoding draw equal tokens from equal
        distributions if their generators are in equal states. A certain token (greedy, or the only
        one that a grammar allows) does not change the generator's state.
        """
        if len(self.token_ids) == 1:
            return int(self.token_ids[0])
        cumulative = self.probs.cumsum()
        index = int(cumulative.searchsorted(rng.random() * cumulative[-1], side="right"))
        return int(self.token_ids[min(index, len(self.token_ids) - 1)])

    def minus(self, other: Distribution, scale: float = 1.0) -> Distribution | None:
        """Return normalize(max(0, scale * self - other)): the residual of a rejected draft.

        None if nothing is left; with a scale of 1 this means that the two are equal. (Leviathan
        et al., arXiv:2211.17192, Algorithm 1; Chen et al., arXiv:2302.01318, Algorithm 2.)
        """
        remaining = self._excess(other, scale)
        kept = remaining > 0.0
        if not kept.any():
            return None
        remaining = remaining[kept]
        return Distribution(self.token_ids[kept], remaining / remaining.sum())

    def excess(self, other: Distribution, scale: float = 1.0) -> float:
        return float(np.maximum(self._excess(other, scale), 0.0).sum())

    def _excess(self, other: Distribution, scale: float) -> ProbArray:
        difference = self.probs * scale
        position = other.token_ids.searchsorted(self.token_ids)
        position[position == len(other.token_ids)] = 0
        shared = other.token_ids[position] == self.token_ids
        difference[shared] -= other.probs[position[shared]]
        return difference

    @staticmethod
    def certain(token_id: int) -> Distribution:
        return _certain(token_id)

    @staticmethod
    def mixture(weight: float, first: Distribution, second: Distribution) -> Distribution:
        if weight <= 0.0:
            return second
        if weight >= 1.0:
            return first
        token_ids = np.concatenate((first.token_ids, second.token_ids))
        probs = np.concatenate((weight * first.probs, (1.0 - weight) * second.probs))
        order = token_ids.argsort(kind="stable")  # merges two runs in linear time
        token_ids, probs = token_ids[order], probs[order]
        twice = np.flatnonzero(token_ids[1:] == token_ids[:-1])
        probs[twice] += probs[twice + 1]
        kept = np.ones(len(probs), np.bool_)
        kept[twice + 1] = False
        return Distribution(token_ids[kept], probs[kept])


@lru_cache(maxsize=4096)
def _certain(token_id: int) -> Distribution:
    token_ids: TokenArray = np.array((token_id,), np.int64)
    token_ids.flags.writeable = False
    return Distribution(token_ids, _ALL)


# --- rows of logits --------------------------------------------------------------------------------


def best(scores: Scores, n: int) -> TokenArray:
    """Return the positions of the n largest of float[m], largest first, the lowest first among equals.

    Scores of minus infinity are left out, so there may be fewer than n. Scores must not be NaN.
    One pass finds the maxima of small groups. The n-th largest maximum bounds the n-th largest
    score from below, so that only a few scores are ever sorted.
    """
    positions = _likely(scores, n) if 0 < n < len(scores) else None
    values = scores if positions is None else scores[positions]
    # Positions ascend, and a stable sort keeps equals in that order.
    order = (-values).argsort(kind="stable")[:n]
    if values[order[-1]] == -np.inf:
        order = order[: np.count_nonzero(values[order] > -np.inf)]
    return order if positions is None else positions[order]


def _likely(scores: Scores, n: int) -> TokenArray:
    """Return ascending positions of some scores, which include the n largest (0 < n < m)."""
    group = min(_GROUP, len(scores) // (2 * n))
    if group < 4 or len(scores) < _SMALL:
        bound = np.partition(scores, len(scores) - n)[len(scores) - n]
        return np.flatnonzero(scores >= bound)
    # A group is a column of a table, not a stretch of the row, so that maxima are taken by whole SIMD
    # registers (17 microseconds instead of 140 for 152 thousand logits).
    n_groups = len(scores) // group
    n_grouped = n_groups * group
    table = scores[:n_grouped].reshape(group, n_groups)
    maxima = table.max(axis=0)
    bound = np.partition(maxima, n_groups - n)[n_groups - n]
    columns = np.flatnonzero(maxima >= bound)
    if len(columns) > 4 * n:  # ties
        return np.flatnonzero(scores >= bound)
    rows, hits = np.nonzero(table[:, columns] >= bound)
    rest = np.flatnonzero(scores[n_grouped:] >= bound)
    return np.concatenate((rows * n_groups + columns[hits], rest + n_grouped))


def argmax(logits: Logits) -> int:
    """Return the most likely token of a row, float32[n_vocab]; the lowest id among equals.

    Raise `BackendError` if the largest logit is not finite: NaN would win every comparison.
    """
    token_id = int(logits.argmax())
    check_finite(float(logits[token_id]))
    return token_id


def top_probability(logits: Logits) -> float:
    """Return the largest probability of a row at temperature 1, before any truncation."""
    top = float(logits[logits.argmax()])
    check_finite(top)
    if abs(top) < _EXP_RANGE:  # spares a pass over the row
        masses = np.exp(logits)
        return math.exp(top) / float(masses.sum())
    with np.errstate(over="ignore"):  # from one end of float32 to the other
        masses = logits - np.float32(top)
    np.exp(masses, out=masses)  # in place: another row of a large vocabulary leaves the CPU's cache
    return 1.0 / float(masses.sum())


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
