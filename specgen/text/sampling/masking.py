"""A grammar as a mask on the whole vocabulary, which is computed for as few tokens as possible.

A chain rarely needs the whole mask: greedy needs the best token that is allowed, top-k the k best.
Asking the grammar costs 0.1 to 1 microsecond a token, which for a whole vocabulary is longer than
many a decode. So it is asked about the best tokens first, in groups of increasing size. The result
is exactly that of masking everything first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from specgen.errors import BackendError
from specgen.system.arrays import BoolArray, TokenArray
from specgen.text.sampling.candidates import Candidates, Scores, best
from specgen.text.sampling.truncation import least_for_min_p

#: For int64[n] token ids, whether each may come next: bool[n].
Allows: TypeAlias = Callable[[TokenArray], BoolArray]

#: Each group multiplies the number of tokens that the grammar was asked about by this.
_GROWTH = 4
#: The least tokens in the first group: finding them costs more than asking about them.
_FIRST = 16
#: At most this many tokens are ranked before the grammar is asked. Ranking a whole vocabulary takes
#: 6 ms; asking about it takes half a millisecond where the grammar allows little.
_MOST_RANKED = 4096


class NoTokenAllowedError(BackendError):
    """A grammar that allows no token at all."""

    def __init__(self) -> None:
        super().__init__(
            "the grammar allows no token here",
            hint="a rule of the grammar cannot be completed with this model's tokens; change the grammar",
        )


def allowed_top_k(scores: Scores, allows: Allows, k: int) -> Candidates:
    """Apply top-k to float[n_vocab] scores masked by `allows`.

    Raise `NoTokenAllowedError` if nothing is allowed.
    """
    kept = _allowed_best(scores, k, allows)
    return Candidates.whole(scores).take(kept, min(k, len(scores)), is_ranked=True)


def allowed_min_p(scores: Scores, allows: Allows, p: float) -> Candidates:
    """Apply min-p to float[n_vocab] scores masked by `allows`: keep the best allowed token and those not
    too far below it.

    Raise `NoTokenAllowedError` if nothing is allowed.
    """
    top = scores[_allowed_best(scores, 1, allows)[0]]
    near = np.flatnonzero((scores <= top) & (scores >= least_for_min_p(float(top), p)))
    kept = near[allows(near)]
    return Candidates.whole(scores).take(kept, len(kept), is_ranked=False)


def allowed(scores: Scores, allows: Allows) -> Candidates:
    """Return all tokens that `allows` permits and whose scores, float[n_vocab], are above minus infinity.

    Raise `NoTokenAllowedError` if nothing is allowed.
    """
    possible = np.flatnonzero(scores > -np.inf)
    kept = possible[allows(possible)]
    if not len(kept):
        raise NoTokenAllowedError
    # In the type of the row: the samplers that follow compute as they do with a whole row.
    return Candidates(scores[kept], kept, len(scores), is_ranked=False)


def _allowed_best(scores: Scores, n: int, allows: Allows) -> TokenArray:
    """Return the n best positions that are allowed, fewer if there are fewer, ranked."""
    found: list[TokenArray] = []
    n_found = n_asked = 0
    n_known = max(n, _FIRST)
    while n_found < n and n_asked < len(scores):
        if n_known > max(n, _MOST_RANKED):
            # Few tokens are allowed: asking about all is cheaper than ranking them first.
            kept = np.flatnonzero(scores > -np.inf)
            kept = kept[allows(kept)]
            found = [kept[best(scores[kept], n)]] if len(kept) else []
            break
        group = best(scores, n_known)[n_asked:]
        if not len(group):
            break
        found.append(group[allows(group)])
        n_found += len(found[-1])
        n_asked += len(group)
        n_known = _GROWTH * n_asked
    whole = np.concatenate(found) if found else np.zeros(0, np.int64)
    if not len(whole):
        raise NoTokenAllowedError
    return whole[:n]
