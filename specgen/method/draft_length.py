"""How long a draft gets: to a fixed confidence, or as far as another token is expected to save time. (For the words
see `policy.py`.)"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specgen.method.draft import NO_DRAFT, ROOT, Draft
from specgen.method.tables import AcceptanceRates, origin_of_rank

#: The logarithms of `whole` at which the values of looks are computed, and the distance of two.
_LOG_GRID = np.linspace(math.log(0.01), 0.0, 20)
_LOG_LEAST, _LOG_STEP = float(_LOG_GRID[0]), float(_LOG_GRID[1] - _LOG_GRID[0])


@dataclass(frozen=True, slots=True)
class Stop:
    """How far a draft goes: while its model gives a token at least `p_min` (llama.cpp's rule), and the product of all
    its tokens' probabilities is at least `bound`. Drafts of fewer than `n_min` tokens are not verified.

    `confidences` has one number for each look so far; the last one belongs to the token that is about to be drafted.
    So whether a token is drafted never depends on the token. `needs_confidence` says whether `wants_token` uses them,
    each of which costs a pass over the logits."""

    p_min: float = 0.0
    n_min: int = 0
    bound: float = 0.0
    needs_confidence: bool = False

    def wants_token(self, confidences: Sequence[float]) -> bool:
        """Return whether to draft the token at the last look."""
        return confidences[-1] >= self.p_min and math.prod(confidences) >= self.bound

    def wants_decode(self, confidences: Sequence[float]) -> bool:
        """Return whether another look, after all these tokens, is worth a decode of the drafter."""
        return True

    def cut(self, draft: Draft) -> Draft:
        """Return the nodes of a finished draft that are worth verifying: the first tokens of a chain, or nodes of a
        tree, likeliest first. A draft that was drawn at random stays whole, since the text would be biased."""
        if draft.is_drawn:
            return draft
        if draft.is_chain and self.bound > 0.0:
            known = (1.0 if each is None else each for each in draft.probabilities)
            products = itertools.accumulate(known, operator.mul)
            draft = draft.first(sum(product >= self.bound for product in products))
        return draft if len(draft) >= self.n_min else NO_DRAFT


@dataclass(frozen=True, slots=True, kw_only=True)
class WhilePaying(Stop):
    """Drafts as long as another token is expected to save time: optimal stopping.

    `rates` returns the acceptance rates of an origin. An accepted token is worth `token_s` seconds; n drafted tokens
    add `extra_s[n]` to the target's batch. A look of the drafter `origin` takes `next_s`, and has the `values` of
    `values_of_looks`; without these, nothing is drafted."""

    origin: str
    rates: Callable[[str], AcceptanceRates]
    token_s: float
    extra_s: Sequence[float]
    next_s: float = 0.0
    values: Sequence[Sequence[float]] = ()
    needs_confidence: bool = True

    def wants_token(self, confidences: Sequence[float]) -> bool:
        if confidences[-1] < self.p_min or not self.values:
            return False
        n, whole = len(confidences), self._whole(confidences)
        gain_s = whole * self.token_s - (self.extra_s[n] - self.extra_s[n - 1])
        return gain_s + max(0.0, self.value(n, whole)) > 0.0

    def wants_decode(self, confidences: Sequence[float]) -> bool:
        return bool(self.values) and self.value(len(confidences), self._whole(confidences)) > 0.0

    def value(self, n_drafted: int, whole: float) -> float:
        """Return the seconds that a look at the next token is expected to save; below 0 it does not pay."""
        values = self.values[n_drafted]
        place = (max(math.log(whole), _LOG_LEAST) - _LOG_LEAST) / _LOG_STEP if whole > 0.0 else 0.0
        index = min(int(place), len(values) - 2)
        return values[index] + (place - index) * (values[index + 1] - values[index])

    def cut(self, draft: Draft) -> Draft:
        if draft.is_drawn:
            return draft
        wholes = self.wholes(draft)
        if draft.is_chain:
            return draft.first(_best_number(wholes, self.token_s, self.extra_s))
        return draft.only(best_nodes(wholes, self.token_s, self.extra_s))

    def worth_of(self, draft: Draft) -> float:
        """Return the seconds that verifying a draft is expected to save."""
        wholes = self.wholes(draft)[: len(self.extra_s) - 1]
        return sum(wholes) * self.token_s - self.extra_s[len(wholes)]

    def acceptance(self, origin: str, confidence: float | None, rank: int = 0) -> float:
        """Return the acceptance of a token; `rank` siblings are better."""
        rates = self.rates(origin_of_rank(origin, rank))
        return rates.acceptance(1.0 if confidence is None else confidence)

    def wholes(self, draft: Draft) -> list[float]:
        """Return, for each node of a draft, the probability that it and its ancestors are accepted."""
        wholes: list[float] = []
        for parent, origin, rank, confidence in zip(
            draft.parents, draft.origins, draft.ranks(), draft.probabilities, strict=True
        ):
            acceptance = self.acceptance(origin, confidence, rank)
            wholes.append(acceptance if parent == ROOT else acceptance * wholes[parent])
        return wholes

    def _whole(self, confidences: Sequence[float]) -> float:
        acceptance = self.rates(self.origin).acceptance
        return math.prod([acceptance(each) for each in confidences])


def values_of_looks(
    extra_s: Sequence[float], next_s: float, token_s: float, rates: AcceptanceRates
) -> list[list[float]]:
    """Return V, the value in seconds of a look at the next token: by n, the tokens of the draft so far, and by W,
    their whole, on the grid.

    V(n, W) = -next_s + the mean over bins b of max(0, W acceptance[b] token_s - (extra_s[n + 1] - extra_s[n])
    + max(0, V(n + 1, W acceptance[b]))), and V(n_max, W) = 0: look, then add the token or not, then look again or not.
    `rates` say how often the next token falls in a bin of confidence, and how often one of that bin is accepted.
    """
    frequencies = rates.frequencies()
    # Axes: W on the grid, bin b. The token that is looked at turns W into W acceptance[b].
    log_wholes = np.add.outer(_LOG_GRID, np.log(rates.curve()))
    gains_s = token_s * np.exp(log_wholes)  # W acceptance[b] token_s
    values = np.zeros(len(_LOG_GRID))
    found = [values.tolist()]
    for row_s in np.diff(extra_s)[::-1]:  # extra_s[n + 1] - extra_s[n], from the longest draft back
        # max(0, V(n + 1, W acceptance[b])), between the grid's places
        after_s = np.interp(log_wholes, _LOG_GRID, np.maximum(values, 0.0))
        values = np.maximum(after_s + gains_s - row_s, 0.0) @ frequencies - next_s
        found.append(values.tolist())
    return found[::-1]


def best_nodes(wholes: Sequence[float], token_s: float, extra_s: Sequence[float]) -> list[int]:
    """Return the nodes of a tree that are worth most together, likeliest first. The probability that a path is
    accepted does not grow along it: the n likeliest nodes form a tree, the best one (Sequoia, arXiv:2402.12374)."""
    order = sorted(range(len(wholes)), key=wholes.__getitem__, reverse=True)
    return order[: _best_number([wholes[node] for node in order], token_s, extra_s)]


def _best_number(wholes: Sequence[float], token_s: float, extra_s: Sequence[float]) -> int:
    """Return how many of the first nodes save most time together."""
    n_accepted = itertools.accumulate(wholes[: len(extra_s) - 1], initial=0.0)
    values_s = [n * token_s - cost_s for n, cost_s in zip(n_accepted, extra_s, strict=False)]
    return values_s.index(max(values_s))
