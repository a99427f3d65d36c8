"""How far a draft goes: by thresholds, or as long as another token is expected to save time."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specgen.method.acceptance import LEAST_RATE, AcceptanceRates, Rates
from specgen.method.draft import NO_DRAFT, ROOT, Draft
from specgen.system.arrays import interpolate

#: The logarithms of `whole` at which the values of looks are computed.
_LOG_GRID = np.linspace(math.log(0.01), 0.0, 20)
_GRID: list[float] = _LOG_GRID.tolist()


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """How far a draft goes: while its model gives a token at least `p_min` (as llama.cpp), and the
    product of all its tokens' probabilities is at least `bound`. Drafts of fewer than `n_min`
    tokens are not verified. A confidence is a pass over the logits, if `needs_confidence`.
    """

    p_min: float = 0.0
    n_min: int = 0
    bound: float = 0.0
    needs_confidence: bool = False

    def after_draft_step(self, n: int, whole: float, confidence: float) -> tuple[bool, bool, float]:
        """Return what `RoundPlan.after_draft_step` does; `n` tokens were drafted before."""
        whole *= confidence
        return confidence >= self.p_min and whole >= self.bound, True, whole

    def cut(self, draft: Draft) -> Draft:
        """Return the nodes that are worth verifying, likeliest first. A drawn draft stays whole, to
        bias no text.
        """
        if draft.is_sampled:
            return draft
        if draft.is_chain and self.bound > 0.0:
            known = (1.0 if each is None else each for each in draft.probabilities)
            products = itertools.accumulate(known, operator.mul)
            draft = draft.first(sum(product >= self.bound for product in products))
        return draft if len(draft) >= self.n_min else NO_DRAFT


@dataclass(frozen=True, slots=True, kw_only=True)
class CostAwareStopping(StoppingRule):
    """Drafts as long as another token is expected to save time: optimal stopping. An accepted token
    is worth `token_s` seconds; n drafted tokens add `extra_s[n]` to the target's batch. A look of
    the drafter `origin` takes `next_s`, and has the values of `draft_step_values`; without these,
    nothing is drafted.
    """

    origin: str
    rates: Rates
    token_s: float
    extra_s: Sequence[float]
    next_s: float = 0.0
    values: Sequence[Sequence[float]] = ()
    needs_confidence: bool = True

    def after_draft_step(self, n: int, whole: float, confidence: float) -> tuple[bool, bool, float]:
        if not self.values:
            return False, False, whole
        whole *= self.rates(self.origin, 0).acceptance(confidence)
        more_s = self.value(n + 1, whole)
        gain_s = whole * self.token_s - (self.extra_s[n + 1] - self.extra_s[n])
        return confidence >= self.p_min and gain_s + max(0.0, more_s) > 0.0, more_s > 0.0, whole

    def value(self, n_drafted: int, whole: float) -> float:
        """Return the seconds that a look at the next token is expected to save; below 0 it does not
        pay.
        """
        return interpolate(math.log(max(whole, LEAST_RATE)), _GRID, self.values[n_drafted])

    def cut(self, draft: Draft) -> Draft:
        return (
            draft
            if draft.is_sampled
            else draft.only(self.best_nodes(self.cumulative_acceptances(draft)))
        )

    def best_nodes(self, cumulative_acceptances: Sequence[float]) -> list[int]:
        """Return the nodes that are worth most together, likeliest first. Wholes fall along a path,
        so the n likeliest nodes form a tree, the best one (Sequoia, arXiv:2402.12374).
        """
        order = sorted(
            range(len(cumulative_acceptances)), key=cumulative_acceptances.__getitem__, reverse=True
        )
        worths_s = self._worths([cumulative_acceptances[node] for node in order])
        return order[: worths_s.index(max(worths_s))]

    def worth_of(self, draft: Draft) -> float:
        """Return the seconds that verifying a draft is expected to save."""
        return self._worths(self.cumulative_acceptances(draft))[-1]

    def _worths(self, cumulative_acceptances: Sequence[float]) -> list[float]:
        """Return the seconds that verifying none, one, two, ... of the nodes is expected to save."""
        n_accepted = itertools.accumulate(cumulative_acceptances, initial=0.0)
        return [n * self.token_s - s for n, s in zip(n_accepted, self.extra_s, strict=False)]

    def cumulative_acceptances(self, draft: Draft) -> list[float]:
        """Return, for each node of a draft, the probability that it and its ancestors are accepted."""
        cumulative_acceptances: list[float] = []
        for node, parent in enumerate(draft.parents):
            rates = self.rates(draft.origins[node], draft.ranks[node])
            known = draft.probabilities[node]
            acceptance = rates.acceptance(1.0 if known is None else known)
            cumulative_acceptances.append(
                acceptance if parent == ROOT else acceptance * cumulative_acceptances[parent]
            )
        return cumulative_acceptances


def draft_step_values(
    extra_s: Sequence[float], next_s: float, token_s: float, rates: AcceptanceRates
) -> list[list[float]]:
    """Return V, the value in seconds of a look at the next token: by n, the tokens of the draft so
    far, and by W, their whole, on the grid.

    V(n, W) = -next_s + the mean over bins b of max(0, W acceptance[b] token_s - (extra_s[n + 1] -
    extra_s[n]) + max(0, V(n + 1, W acceptance[b]))), and V(n_max, W) = 0: look, then add the token
    or not, then look again or not.
    """
    frequencies = rates.frequencies()
    # Axes: W on the grid, bin b. The token that is looked at turns W into W acceptance[b].
    log_wholes = np.add.outer(_LOG_GRID, np.log(rates.curve()))
    gains_s = token_s * np.exp(log_wholes)  # W acceptance[b] token_s
    found = [np.zeros(len(_LOG_GRID))]
    for row_s in np.diff(extra_s)[::-1]:  # extra_s[n + 1] - extra_s[n], from the longest draft back
        # max(0, V(n + 1, W acceptance[b])), between the grid's places
        after_s = np.interp(log_wholes, _LOG_GRID, np.maximum(found[-1], 0.0))
        found.append(np.maximum(after_s + gains_s - row_s, 0.0) @ frequencies - next_s)
    return [values.tolist() for values in reversed(found)]
