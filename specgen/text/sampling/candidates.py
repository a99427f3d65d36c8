"""The tokens that are left at some point of a sampler chain, with their scores.

A vocabulary has 150 thousand tokens, of which a typical chain keeps forty. So candidates begin as
the row of logits itself, and the first sampler that drops tokens picks the few that it keeps,
without sorting the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from specgen.errors import NoTokenAllowedError
from specgen.system.arrays import BoolArray, ProbArray, Scores, TokenArray, best
from specgen.text.sampling.distribution import Distribution

#: A grammar: returns which of int64[n] tokens may come next, bool[n].
Allows: TypeAlias = Callable[[TokenArray], BoolArray]

#: A grammar is first asked about at least this many of the best tokens.
_FIRST_ASKED = 16
#: If not enough of them are allowed, it is asked about this many times more, then about all tokens.
_ASKED_GROWTH = 8


class Candidates(NamedTuple):
    """Tokens and their scores, in one of two orders: by descending score, or by ascending id.

    Tokens with equal scores are always in the order of their ids. A score of minus infinity means
    that the token cannot be sampled.
    """

    #: The scores, float[m]. For a whole vocabulary this is the row of logits itself, so never write
    #: to it.
    scores: Scores
    #: The token ids, int64[m]; None for a whole vocabulary, whose ids are 0 to m - 1.
    token_ids: TokenArray | None
    #: The number of candidates that llama.cpp would count here, including those with a score of
    #: minus infinity. Dynamic temperature depends on it.
    size: int
    #: Whether the order is that of descending scores.
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
        """Return some of the candidates, with float64 scores.

        Args:
            positions: Their positions, int64[n], in the new order.
            size: The new `size`.
            is_ranked: Whether the new order is that of descending scores.
        """
        scores = self.scores[positions].astype(np.float64)
        token_ids = positions if self.token_ids is None else self.token_ids[positions]
        return Candidates(scores, token_ids, size, is_ranked)

    def first(self, n: int) -> Candidates:
        """Return the n best candidates, if the candidates are ranked."""
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
        """Return the candidates in the order of ascending ids."""
        if not self.is_ranked:
            return self
        assert self.token_ids is not None
        order = self.token_ids.argsort()
        return self._replace(
            scores=self.scores[order],
            token_ids=self.token_ids[order],
            is_ranked=False,
        )

    def softmax(self, temperature: float) -> Distribution:
        """Return the distribution at a temperature above 0.

        Tokens whose probability is too small for a float64 are left out.
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
    """Return the tokens of a row that a grammar allows and whose score is finite.

    Raises:
        NoTokenAllowedError: If there is none.
    """
    possible = np.flatnonzero(scores > -np.inf)
    kept = possible[allows(possible)]
    if not len(kept):
        raise NoTokenAllowedError
    # The scores keep the type of the row, so that samplers compute as they do with a whole row.
    return Candidates(scores[kept], kept, len(scores), is_ranked=False)


def allowed_top_k(scores: Scores, allows: Allows, k: int) -> Candidates:
    """Return the k best tokens of a row that a grammar allows; fewer if it allows fewer.

    The grammar is asked about the best tokens first, since asking about all of them is slow.

    Raises:
        NoTokenAllowedError: If it allows none.
    """
    size = min(k, len(scores))
    n_asked = max(k, _FIRST_ASKED)
    for n in (n_asked, _ASKED_GROWTH * n_asked):
        asked = best(scores, n)
        kept = asked[allows(asked)][:k]
        if len(kept) == k:
            return Candidates.whole(scores).take(kept, size, is_ranked=True)
    all_allowed = allowed(scores, allows)
    kept = all_allowed.ids()[best(all_allowed.scores, k)]
    return Candidates.whole(scores).take(kept, size, is_ranked=True)
