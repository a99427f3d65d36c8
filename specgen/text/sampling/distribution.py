"""The distribution of the next token, which samplers make and verifiers compare."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from specgen.system.arrays import ProbArray, TokenArray


@dataclass(frozen=True, slots=True)
class Distribution:
    """The tokens that may come next, and their probabilities."""

    #: The token ids, int64[m], strictly increasing.
    token_ids: TokenArray
    #: The probabilities, float64[m], all positive, with sum 1.
    probs: ProbArray

    @staticmethod
    @lru_cache(maxsize=4096)  # greedy decoding needs one for each token
    def certain(token_id: int) -> Distribution:
        """Return the distribution in which one token has probability 1."""
        distribution = Distribution(np.array((token_id,), np.int64), np.ones(1))
        distribution.token_ids.flags.writeable = False
        distribution.probs.flags.writeable = False
        return distribution

    def probability(self, token_id: int) -> float:
        """Return the probability of one token."""
        index = int(self.token_ids.searchsorted(token_id))
        if index < len(self.token_ids) and self.token_ids[index] == token_id:
            return float(self.probs[index])
        return 0.0

    def probabilities(self, token_ids: TokenArray) -> ProbArray:
        """Return the probabilities of int64[n] tokens, float64[n]."""
        positions = self.token_ids.searchsorted(token_ids)
        positions[positions == len(self.token_ids)] = 0  # any valid index: the ids differ there
        return np.where(self.token_ids[positions] == token_ids, self.probs[positions], 0.0)

    @property
    def mode(self) -> int:
        """The most likely token."""
        return int(self.token_ids[self.probs.argmax()])

    def sample(self, rng: np.random.Generator) -> int:
        """Sample a token, with one uniform random number.

        If there is only one token, no random number is used. So decoding with and without drafts
        samples the same tokens from the same seed.
        """
        if len(self.token_ids) == 1:
            return int(self.token_ids[0])
        cumulative = self.probs.cumsum()
        index = int(cumulative.searchsorted(rng.random() * cumulative[-1], side="right"))
        return int(self.token_ids[min(index, len(self.token_ids) - 1)])

    def minus(
        self,
        other: Distribution,
        scale: float = 1.0,
    ) -> Distribution | None:
        """Return the residual after a rejected draft: normalize(max(0, scale * self - other)).

        Returns:
            The residual; None if it is 0 everywhere.
        """
        return self.reweighted(scale * self.probs - other.probabilities(self.token_ids))

    def excess(self, other: Distribution, scale: float = 1.0) -> float:
        """Return the sum of max(0, scale * self - other)."""
        difference = scale * self.probs - other.probabilities(self.token_ids)
        return float(np.maximum(difference, 0.0).sum())

    def reweighted(self, weights: ProbArray) -> Distribution | None:
        """Return the same tokens with probabilities proportional to new weights, float64[m].

        Returns:
            The distribution, without tokens whose weight is not positive; None if no token is left.
        """
        kept = weights > 0.0
        if not kept.any():
            return None
        weights = weights[kept]
        return Distribution(self.token_ids[kept], weights / weights.sum())
