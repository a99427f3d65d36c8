"""A sparse distribution over tokens: what the target or a draft says of the next one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from specgen.errors import BackendError
from specgen.system.arrays import ProbArray, TokenArray, best

#: The probabilities of a certain token, shared: greedy decoding makes such a distribution for each token.
_ALL: ProbArray = np.ones(1)
_ALL.flags.writeable = False


class NoTokenAllowedError(BackendError):
    """A grammar that allows no token at all."""

    def __init__(self) -> None:
        super().__init__(
            "the grammar allows no token here",
            hint="a rule of the grammar cannot be completed with this model's tokens; change the grammar",
        )


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
        return self.reweighted(self._excess(other, scale))

    def reweighted(self, weights: ProbArray) -> Distribution | None:
        """Return normalize(max(0, weights)) over the same tokens; None if no weight is above 0."""
        kept = weights > 0.0
        if not kept.any():
            return None
        weights = weights[kept]
        return Distribution(self.token_ids[kept], weights / weights.sum())

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
