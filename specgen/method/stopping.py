"""Where a draft stops: at thresholds, or once no further token is expected to save time."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specgen.method.acceptance import MIN_RATE, AcceptanceRates, RatesOf
from specgen.method.draft import NO_DRAFT, ROOT, Draft
from specgen.system.arrays import interpolate

#: The values of draft steps are computed at these logarithms of the cumulative acceptance.
_LOG_GRID = np.linspace(math.log(0.01), 0.0, 20)
#: The same as a list, in which single values are looked up faster.
_LOG_GRID_LIST: list[float] = _LOG_GRID.tolist()


@dataclass(frozen=True, slots=True)
class DraftStep:
    """The decision after a draft step, which gave the drafter's distribution of the next token."""

    #: Whether the token at this position joins the draft.
    keep_token: bool
    #: Whether to make another draft step, which takes a decode of the drafter.
    continue_drafting: bool
    #: The probability that the target accepts all tokens up to and including this one.
    cumulative_acceptance: float


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """Stops a draft at thresholds for its probabilities, without considering costs."""

    #: The minimum probability of a token, as in llama.cpp.
    p_min: float = 0.0
    #: Drafts with fewer tokens than this are not verified.
    n_min: int = 0
    #: The minimum product of the probabilities of all tokens.
    bound: float = 0.0
    #: Whether a draft step needs the drafter's confidence, which takes a pass over the logits.
    needs_confidence: bool = False

    def after_draft_step(
        self,
        n_drafted: int,
        cumulative_acceptance: float,
        confidence: float,
    ) -> DraftStep:
        """Decide about the next token, which is not chosen yet.

        Args:
            n_drafted: The number of tokens that were drafted before it.
            cumulative_acceptance: The cumulative acceptance after the previous step; 1 at first.
            confidence: The drafter's largest probability for the next token.
        """
        cumulative_acceptance *= confidence
        keep_token = confidence >= self.p_min and cumulative_acceptance >= self.bound
        return DraftStep(
            keep_token=keep_token,
            continue_drafting=True,
            cumulative_acceptance=cumulative_acceptance,
        )

    def cut(self, draft: Draft) -> Draft:
        """Return the part of a draft that is worth verifying.

        A sampled draft is returned unchanged, since choosing among its tokens would bias the text.
        """
        if draft.is_sampled:
            return draft
        if draft.is_chain and self.bound > 0.0:
            # Tokens without a probability count as certain.
            known_probs = (1.0 if prob is None else prob for prob in draft.probabilities)
            products = itertools.accumulate(known_probs, operator.mul)
            draft = draft.first(sum(product >= self.bound for product in products))
        return draft if len(draft) >= self.n_min else NO_DRAFT


@dataclass(frozen=True, slots=True, kw_only=True)
class CostAwareStopping(StoppingRule):
    """Drafts as long as another token is expected to save time: optimal stopping."""

    #: The origin of the drafter's tokens, by which `rates_of` finds its acceptance rates.
    origin: str
    #: Returns acceptance rates, given an origin and a rank.
    rates_of: RatesOf
    #: The seconds that an accepted token saves.
    token_s: float
    #: The seconds that n drafted tokens add to the target's batch, at index n.
    extra_s: Sequence[float]
    #: The seconds of a draft step.
    next_s: float = 0.0
    #: The values of draft steps, from `draft_step_values`. If empty, nothing is drafted.
    values: Sequence[Sequence[float]] = ()
    needs_confidence: bool = True

    def after_draft_step(
        self,
        n_drafted: int,
        cumulative_acceptance: float,
        confidence: float,
    ) -> DraftStep:
        """Decide about the next token by the time that it and further draft steps should save."""
        if not self.values:
            return DraftStep(
                keep_token=False,
                continue_drafting=False,
                cumulative_acceptance=cumulative_acceptance,
            )
        cumulative_acceptance *= self.rates_of(self.origin, 0).acceptance(confidence)
        row_s = self.extra_s[n_drafted + 1] - self.extra_s[n_drafted]
        gain_s = cumulative_acceptance * self.token_s - row_s
        next_step_s = self.value(n_drafted + 1, cumulative_acceptance)
        # A token that costs more than it saves may still be worth keeping for those after it.
        keep_token = confidence >= self.p_min and gain_s + max(0.0, next_step_s) > 0.0
        return DraftStep(
            keep_token=keep_token,
            continue_drafting=next_step_s > 0.0,
            cumulative_acceptance=cumulative_acceptance,
        )

    def value(
        self,
        n_drafted: int,
        cumulative_acceptance: float,
    ) -> float:
        """Return the seconds that a draft step is expected to save; negative if it loses time.

        Args:
            n_drafted: The number of tokens that were drafted before it.
            cumulative_acceptance: The cumulative acceptance of these tokens.
        """
        log_acceptance = math.log(max(cumulative_acceptance, MIN_RATE))
        return interpolate(log_acceptance, _LOG_GRID_LIST, self.values[n_drafted])

    def cut(self, draft: Draft) -> Draft:
        """Return the part of a draft that saves most time, with the likeliest nodes first.

        A sampled draft is returned unchanged; see `StoppingRule`.
        """
        if draft.is_sampled:
            return draft
        best_part = draft.only(self.best_nodes(self.cumulative_acceptances(draft)))
        return best_part if len(best_part) >= self.n_min else NO_DRAFT

    def best_nodes(self, cumulative_acceptances: Sequence[float]) -> list[int]:
        """Return the nodes that are best together, the likeliest first: those that save most time.

        Cumulative acceptances fall along each path. So the n likeliest nodes form a tree, which is
        the best tree with n nodes (Sequoia, arXiv:2402.12374).
        """
        nodes = range(len(cumulative_acceptances))
        order = sorted(nodes, key=cumulative_acceptances.__getitem__, reverse=True)
        merits = self._merits([cumulative_acceptances[node] for node in order])
        return order[: merits.index(max(merits))]

    def _merits(self, cumulative_acceptances: Sequence[float]) -> list[float]:
        """Return how good it is to verify the first n nodes, at index n; more is better."""
        return self._savings_s(cumulative_acceptances)

    def worth_of(self, draft: Draft) -> float:
        """Return the seconds that verifying a draft is expected to save."""
        return self._savings_s(self.cumulative_acceptances(draft))[-1]

    def _savings_s(self, cumulative_acceptances: Sequence[float]) -> list[float]:
        """Return the seconds that verifying the first n nodes should save, at index n."""
        n_accepted = itertools.accumulate(cumulative_acceptances, initial=0.0)
        return [
            n * self.token_s - batch_s for n, batch_s in zip(n_accepted, self.extra_s, strict=False)
        ]

    def cumulative_acceptances(self, draft: Draft) -> list[float]:
        """Return, for each node, the probability that it and its ancestors are accepted."""
        cumulative_acceptances: list[float] = []
        for node, parent in enumerate(draft.parents):
            acceptance = self._acceptance(draft, node)
            if parent != ROOT:
                acceptance *= cumulative_acceptances[parent]
            cumulative_acceptances.append(acceptance)
        return cumulative_acceptances

    def _acceptance(self, draft: Draft, node: int) -> float:
        """Return the probability that a node is accepted if its ancestors are."""
        # A drafter that knows no probability counts as certain.
        probability = draft.probabilities[node]
        confidence = 1.0 if probability is None else probability
        if draft.is_calibrated:
            return min(1.0 - MIN_RATE, max(MIN_RATE, confidence))
        rates = self.rates_of(draft.origins[node], draft.ranks[node])
        return rates.acceptance(confidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class FastestRound(CostAwareStopping):
    """Cuts a draft that is already made, so that its round generates the most tokens per second.

    `CostAwareStopping` takes the time that an accepted token saves from recent rounds. But n-gram
    matches come in runs: if this round accepts many tokens, so will the next ones, and each token
    saves less time. So this rule uses the speed of the round itself. In replays of Spec-Bench
    answers, that is 1% faster.
    """

    #: The seconds of the target's batch without a draft.
    plain_s: float

    def _merits(self, cumulative_acceptances: Sequence[float]) -> list[float]:
        """Return the expected tokens per second with the first n nodes, at index n."""
        # The target adds one token to those that it accepts.
        n_tokens = itertools.accumulate(cumulative_acceptances, initial=1.0)
        return [
            n / (self.plain_s + extra_s) for n, extra_s in zip(n_tokens, self.extra_s, strict=False)
        ]


def draft_step_values(
    extra_s: Sequence[float],
    next_s: float,
    token_s: float,
    rates: AcceptanceRates,
) -> list[list[float]]:
    """Return the seconds that draft steps should save, by dynamic programming from the last one.

    With n tokens drafted, whose cumulative acceptance is W, the value of a draft step is

        V(n, W) = -next_s + the mean over bins b of
                  max(0, W acceptance[b] token_s - (extra_s[n + 1] - extra_s[n])
                         + max(0, V(n + 1, W acceptance[b])))

    and V(n_max, W) = 0. In words: make the step, then keep the token or not, then make another step
    or not.

    Args:
        extra_s: The seconds that n drafted tokens add to the target's batch, at index n.
        next_s: The seconds of a draft step.
        token_s: The seconds that an accepted token saves.
        rates: The drafter's acceptance rates, by bin of confidence.

    Returns:
        For each n, V(n, W) at the logarithms of W in `_LOG_GRID`.
    """
    frequencies = rates.frequencies()
    # Axes: W on the grid, bin b. A drafted token turns W into W acceptance[b].
    log_acceptances = np.add.outer(_LOG_GRID, np.log(rates.curve()))
    gains_s = token_s * np.exp(log_acceptances)  # W acceptance[b] token_s
    values = [np.zeros(len(_LOG_GRID))]
    for row_s in np.diff(extra_s)[::-1]:  # extra_s[n + 1] - extra_s[n], from the longest draft back
        # max(0, V(n + 1, W acceptance[b])), interpolated on the grid
        after_s = np.interp(log_acceptances, _LOG_GRID, np.maximum(values[-1], 0.0))
        values.append(np.maximum(after_s + gains_s - row_s, 0.0) @ frequencies - next_s)
    return [step_values.tolist() for step_values in reversed(values)]
