"""How often a model's drafted tokens are accepted, by the confidence of the model.

A drafter's confidence falls into one of several bins. The acceptance rate of each bin is counted
over all texts, starting from a prior. How far the current text deviates from these rates is one
more number, in log-odds.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from specgen.method.draft import ROOT, Draft
from specgen.system.arrays import ProbArray

#: The upper ends of the confidence bins, except for the last one, which ends at 1. Bins are
#: narrower where most tokens are.
BIN_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99)
N_BINS = len(BIN_EDGES) + 1
#: The middle of each bin.
_BIN_MIDDLES = [(low + high) / 2 for low, high in itertools.pairwise((0.0, *BIN_EDGES, 1.0))]
#: The prior number of draft steps in each bin: about the mean of two draft models (135M and 0.5B)
#: in the first steps of answers to Spec-Bench questions.
_PRIOR_SEEN = np.array([0.4, 0.9, 1.0, 1.1, 1.0, 1.0, 0.9, 0.9, 1.1, 1.1, 1.0, 2.1])
#: The prior acceptance of a bin counts as this many judged tokens.
_N_PRIOR = 9.0
#: Each new observation multiplies the weight of all earlier ones by this factor, so that about 1500
#: are remembered.
_DECAY = 1.0 - 1.0 / 1500.0
#: The learning rate of the current text's deviation, in log-odds per observation.
_TEXT_RATE = 0.12
#: The maximum deviation of a text, in log-odds.
_MAX_DEVIATION = 2.5
#: The confidences in all texts together count as this many draft steps of the current text.
_N_STEPS_OF_OTHERS = 20.0
#: Acceptance rates stay at least this far from 0 and from 1.
MIN_RATE = 0.002
#: Tokens with this many better siblings or more are counted together.
N_RANKS = 3
#: Returns the acceptance rates of a drafter's tokens, given its origin and the number of better
#: siblings.
RatesOf: TypeAlias = Callable[[str, int], "AcceptanceRates"]


@dataclass(slots=True)
class AcceptanceCounts:
    """One drafter's counts in all texts, by confidence bin."""

    #: Tokens that were judged, float64[N_BINS].
    n_judged: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    #: Judged tokens that were accepted, float64[N_BINS].
    n_accepted: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    #: Draft steps, whether or not their token was judged, float64[N_BINS].
    n_seen: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    #: The time that the drafter may lose, in plain decodes; see `policy.CreditGate`.
    credit: float = 0.0


class AcceptanceRates:
    """How likely a drafted token is accepted in one text, if all tokens before it are.

    The probability depends on the drafter's confidence, in [0, 1]. It combines the `counts` from
    all texts with the deviation of this text.
    """

    def __init__(
        self,
        origin: str = "model",
        counts: AcceptanceCounts | None = None,
    ) -> None:
        self.counts = counts if counts is not None else AcceptanceCounts()
        intercept, slope = _prior_line(origin)
        #: The acceptance of each bin that is expected before anything is counted.
        self._prior = [intercept + slope * middle for middle in _BIN_MIDDLES]
        #: This text's deviation from all texts, in log-odds.
        self._deviation = 0.0
        #: This text's draft steps in each bin.
        self._seen_here = [0.0] * N_BINS
        #: A cache of each bin's acceptance; None if it was not computed since the last judgement.
        self._curve: list[float | None] = [None] * N_BINS

    def acceptance(self, confidence: float) -> float:
        """Return the acceptance probability of a token with this confidence."""
        index = bisect.bisect_left(BIN_EDGES, confidence)
        cached = self._curve[index]
        if cached is not None:
            return cached
        # The mean over all texts, with the prior, then shifted by this text's deviation.
        n_accepted = _N_PRIOR * self._prior[index] + self.counts.n_accepted.item(index)
        mean = n_accepted / (_N_PRIOR + self.counts.n_judged.item(index))
        odds = mean / (1.0 - mean) * math.exp(self._deviation)
        acceptance = min(1.0 - MIN_RATE, max(MIN_RATE, odds / (1.0 + odds)))
        self._curve[index] = acceptance
        return acceptance

    def curve(self) -> list[float]:
        """Return the acceptance probability of each bin."""
        return [self.acceptance(middle) for middle in _BIN_MIDDLES]

    def frequencies(self) -> ProbArray:
        """Return the expected share of draft steps in each bin: float64[N_BINS], with sum 1.

        It is learnt from all texts together, and more and more from this one.
        """
        seen = self.counts.n_seen + _PRIOR_SEEN
        seen = seen * (_N_STEPS_OF_OTHERS / seen.sum()) + self._seen_here
        return np.asarray(seen / seen.sum(), np.float64)

    def mean(self) -> float:
        """Return the acceptance probability of a token whose confidence is not known yet."""
        return float(np.array(self.curve()) @ self.frequencies())

    def count_steps(self, confidences: Iterable[float]) -> None:
        """Count the confidences of draft steps."""
        # A list, since NumPy is slower for the few numbers of a round.
        seen = self.counts.n_seen.tolist()
        for confidence in confidences:
            index = bisect.bisect_left(BIN_EDGES, confidence)
            seen = [count * _DECAY for count in seen]
            seen[index] += 1.0
            self._seen_here[index] += 1.0
        self.counts.n_seen[:] = seen

    def judge(self, confidence: float, *, accepted: bool) -> None:
        """Learn whether a token was accepted. All tokens before it were."""
        index = bisect.bisect_left(BIN_EDGES, confidence)
        outcome = 1.0 if accepted else 0.0
        surprise = outcome - self.acceptance(confidence)
        deviation = self._deviation + _TEXT_RATE * surprise
        self._deviation = min(_MAX_DEVIATION, max(-_MAX_DEVIATION, deviation))
        # Only this bin decays: the others do not become less certain while they are not observed.
        n_judged = self.counts.n_judged
        n_judged[index] = n_judged.item(index) * _DECAY + 1.0
        n_accepted = self.counts.n_accepted
        n_accepted[index] = n_accepted.item(index) * _DECAY + outcome
        self._curve = [None] * N_BINS


def _prior_line(origin: str) -> tuple[float, float]:
    """Return a drafter's expected acceptance as a line: its value at confidence 0, and its slope.

    The likeliest token of a model is right about as often as its probability says. Tokens with
    better siblings, whose origin ends with a colon and their rank, are right less often.
    """
    if ":" in origin:
        return 0.0, 0.8
    return 0.05, 0.93


def judge_drafts(
    rates_of: RatesOf,
    drafts: Sequence[Draft],
    text: Sequence[int],
    n_accepted: int,
) -> None:
    """Learn which drafted tokens agree with the text that followed, even if they were not verified.

    A sampled chain is judged by `n_accepted` instead, with the drafter's confidence before each
    token was sampled. Other sampled drafts are not judged. Neither are calibrated ones, whose
    drafters learn by themselves.

    Args:
        rates_of: Returns the acceptance rates, which learn.
        drafts: The drafts of a round as they were proposed. Only each drafter's first one counts.
        text: The tokens that the round committed.
        n_accepted: The number of accepted tokens.
    """
    # In reverse, so that a drafter's first draft overwrites its later ones.
    first_drafts = {draft.origins[0]: draft for draft in reversed(drafts) if len(draft)}
    for origin, draft in first_drafts.items():
        if draft.is_calibrated:
            continue
        if not draft.is_sampled:
            _judge_along_text(rates_of, draft, origin, text)
        elif draft.is_chain:
            n_judged = min(len(draft), n_accepted + 1)  # the accepted tokens and the first rejected
            for node, confidence in enumerate(draft.step_confidences[:n_judged]):
                rates_of(origin, 0).judge(confidence, accepted=node < n_accepted)


def _judge_along_text(
    rates_of: RatesOf,
    draft: Draft,
    origin: str,
    text: Sequence[int],
) -> None:
    """Follow the text through a draft, and judge all children of each node on the way."""
    node = ROOT
    for token in text:
        right_child = None
        for child in draft.children[node]:
            is_right = draft.tokens[child] == token
            if is_right:
                right_child = child
            probability = draft.probabilities[child]
            confidence = 1.0 if probability is None else probability
            rates_of(origin, draft.ranks[child]).judge(confidence, accepted=is_right)
        if right_child is None:
            return
        node = right_child
