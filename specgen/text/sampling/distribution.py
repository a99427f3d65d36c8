"""The distribution of the next token, which samplers make and verifiers compare."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from specgen.system.arrays import ProbArray, TokenArray


@dataclass(frozen=True, slots=True)
class Distribution:
    """Probabilities of tokens: `token_ids`, int64[m], increases strictly; `probs`, float64[m], are
    positive, sum 1.
    """

    token_ids: TokenArray
    probs: ProbArray

    @staticmethod
    @lru_cache(maxsize=4096)  # greedy decoding takes one for each token
    def certain(token_id: int) -> Distribution:
        found = Distribution(np.array((token_id,), np.int64), np.ones(1))
        found.token_ids.flags.writeable = found.probs.flags.writeable = False
        return found

    def probability(self, token_id: int) -> float:
        index = int(self.token_ids.searchsorted(token_id))
        is_there = index < len(self.token_ids) and self.token_ids[index] == token_id
        return float(self.probs[index]) if is_there else 0.0

    def probabilities(self, token_ids: TokenArray) -> ProbArray:
        position = self.token_ids.searchsorted(token_ids)
        position[position == len(self.token_ids)] = 0
        return np.where(self.token_ids[position] == token_ids, self.probs[position], 0.0)

    @property
    def mode(self) -> int:
        return int(self.token_ids[self.probs.argmax()])

    def sample(self, rng: np.random.Generator) -> int:
        """Sample a token with one uniform number; a certain token takes none. So plain and
        speculative decoding draw equal tokens in equal states of their generators.
        """
        if len(self.token_ids) == 1:
            return int(self.token_ids[0])
        cumulative = self.probs.cumsum()
        index = int(cumulative.searchsorted(rng.random() * cumulative[-1], side="right"))
        return int(self.token_ids[min(index, len(self.token_ids) - 1)])

    def minus(self, other: Distribution, scale: float = 1.0) -> Distribution | None:
        """Return normalize(max(0, scale * self - other)), the residual of a rejected draft; None if
        nothing is left.
        """
        return self.reweighted(scale * self.probs - other.probabilities(self.token_ids))

    def excess(self, other: Distribution, scale: float = 1.0) -> float:
        difference = scale * self.probs - other.probabilities(self.token_ids)
        return float(np.maximum(difference, 0.0).sum())

    def reweighted(self, weights: ProbArray) -> Distribution | None:
        kept = weights > 0.0
        if not kept.any():
            return None
        weights = weights[kept]
        return Distribution(self.token_ids[kept], weights / weights.sum())
