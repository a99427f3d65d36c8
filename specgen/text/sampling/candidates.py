"""The tokens that the samplers of a chain have left, with their scores.

A vocabulary has 150 thousand tokens, and a usual chain keeps forty. So candidates begin as the row
of logits itself, and the first sampler that drops tokens picks the few that it keeps, without
sorting the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from specgen.errors import NoTokenAllowedError
from specgen.system.arrays import BoolArray, ProbArray, Scores, TokenArray, best
from specgen.text.sampling.distribution import Distribution

#: A grammar: from int64[n] token ids to whether each may come next, bool[n].
Allows: TypeAlias = Callable[[TokenArray], BoolArray]

#: A grammar is asked about this many of the best tokens, then about as many times more, then about
#: all of them.
_FIRST_ASKED = 16
_ASKED_GROWTH = 8


class Candidates(NamedTuple):
    """Tokens and their scores, either ranked (equals by ascending id) or by ascending id.

    A score of minus infinity means that the token cannot be sampled.
    """

    #: float[m]. For the whole vocabulary this is the row of logits itself: it is never written to.
    scores: Scores
    #: int64[m]; None for the whole vocabulary, whose ids are 0 to m - 1.
    token_ids: TokenArray | None
    #: How many candidates llama.cpp would count, with those of minus infinity. Dynamic temperature
    #: depends on it.
    size: int
    #: Whether the scores descend.
    is_ranked: bool

    @classmethod
    def whole(cls, scores: Scores) -> Candidates:
        """Return the candidates of a whole row of logits."""
        return cls(scores, None, len(scores), is_ranked=False)

    def take(
        self,
        positions: TokenArray,
        size: int,
        is_ranked: bool,
    ) -> Candidates:
        """Return the candidates at int64[n] positions, which are in the order of `is_ranked`."""
        scores = self.scores[positions].astype(np.float64)
        token_ids = positions if self.token_ids is None else self.token_ids[positions]
        return Candidates(scores, token_ids, size, is_ranked)

    def first(self, n: int) -> Candidates:
        """Return the n best of ranked candidates."""
        assert self.is_ranked
        assert self.token_ids is not None
        return Candidates(self.scores[:n], self.token_ids[:n], n, is_ranked=True)

    def ids(self) -> TokenArray:
        """Return the token ids, int64[m]."""
        return np.arange(len(self.scores)) if self.token_ids is None else self.token_ids

    def top(self) -> float:
        """Return the largest score."""
        return float(self.scores[0] if self.is_ranked else self.scores.max())

    def by_id(self) -> Candidates:
        """Return the candidates by ascending id."""
        if not self.is_ranked:
            return self
        assert self.token_ids is not None
        order = self.token_ids.argsort()
        return self._replace(
            scores=self.scores[order], token_ids=self.token_ids[order], is_ranked=False
        )

    def softmax(self, temperature: float) -> Distribution:
        """Return the distribution at a temperature above 0.

        Tokens with a probability too small for a float64 are left out.
        """
        # In place: for a whole vocabulary new arrays cost as much as the arithmetic.
        probs: ProbArray = self.scores.astype(np.float64)
        probs -= self.top()
        probs /= temperature
        np.exp(probs, out=probs)
        token_ids = self.ids()
        if self.is_ranked:
            order = token_ids.argsort()
            token_ids = token_ids[order]
            probs = probs[order]
        probs /= probs.sum()
        if not probs.all():
            is_possible = probs > 0.0
            token_ids = token_ids[is_possible]
            probs = probs[is_possible]
        return Distribution(token_ids, probs)


def allowed(scores: Scores, allows: Allows) -> Candidates:
    """Return the possible tokens of a row that a grammar allows.

    Raises:
        NoTokenAllowedError: There is none.
    """
    possible = np.flatnonzero(scores > -np.inf)
    kept = possible[allows(possible)]
    if not len(kept):
        raise NoTokenAllowedError
    # The scores keep the row's type, so that samplers compute the same as with a whole row.
    return Candidates(scores[kept], kept, len(scores), is_ranked=False)


def allowed_top_k(
    scores: Scores,
    allows: Allows,
    k: int,
) -> Candidates:
    """Return the k best tokens of a row that a grammar allows, asking about the best ones first.

    Raises:
        NoTokenAllowedError: There is none.
    """
    size = min(k, len(scores))
    n_asked = max(k, _FIRST_ASKED)
    for n in (n_asked, _ASKED_GROWTH * n_asked):
        asked = best(scores, n)
        kept = asked[allows(asked)][:k]
        if len(kept) == k:
            return Candidates.whole(scores).take(kept, size, is_ranked=True)
    possible = allowed(scores, allows)
    kept = possible.ids()[best(possible.scores, k)]
    return Candidates.whole(scores).take(kept, size, is_ranked=True)
