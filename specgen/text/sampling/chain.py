"""The chain of samplers: from a row of logits to the distribution that a token is sampled from.

Logit biases come first, then `SamplerOptions.samplers`; those that are switched off cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from specgen.errors import BackendError
from specgen.sampler_options import SamplerOptions
from specgen.system.arrays import Logits, ProbArray, TokenArray
from specgen.text.sampling import samplers
from specgen.text.sampling.candidates import Allows, Candidates, allowed, allowed_top_k
from specgen.text.sampling.distribution import Distribution
from specgen.text.sampling.dry import DryBreakers
from specgen.text.sampling.raw_probabilities import not_finite
from specgen.text.sampling.steps import (
    Adjustment,
    Exclusion,
    Step,
    Temperature,
    Transform,
    chain_steps,
)

#: The history for samplers that do not depend on the text.
NO_HISTORY: TokenArray = np.zeros(0, np.int64)
NO_HISTORY.flags.writeable = False


class Sampler:
    """A chain of samplers, made once for its options.

    It has no state, so that one sampler serves all branches of a draft tree.
    """

    def __init__(self, options: SamplerOptions, breakers: DryBreakers | None = None) -> None:
        self.options = options
        self.breakers = breakers
        steps = chain_steps(options, breakers or DryBreakers())
        #: How many of the last tokens of the text the chain depends on; -1 means all of them.
        self.n_history = _longest_history(steps)
        #: Adjustments at the start of the chain change the row itself, and are undone afterwards.
        self._adjustments: list[Adjustment] = []
        for step in steps:
            if not isinstance(step, Adjustment):
                break
            self._adjustments.append(step)
        self._steps = steps[len(self._adjustments) :]
        #: Whether the chain keeps only its most likely token: the temperature is 0 or less.
        self.greedy = options.greedy
        #: Whether that is the best token of the adjusted row, so that nothing need be computed.
        self._takes_best = self.greedy and all(map(_keeps_best, self._steps))
        #: A temperature at the end of the chain is left to the softmax.
        self._temperature = 1.0
        last = self._steps[-1] if self._steps else None
        if isinstance(last, Temperature) and last.value > 0.0:
            self._temperature = last.value
            self._steps.pop()
        #: How many of a row's most likely tokens the chain keeps, in the same proportion.
        self.n_likeliest = self._count_unchanged()

    def _count_unchanged(self) -> int:
        if self._adjustments:
            return 0
        n_unchanged = 1 if self._takes_best else 0
        if self._temperature == 1.0:
            kept = [step.n_best if isinstance(step, Transform) else 0 for step in self._steps]
            n_unchanged = max(n_unchanged, min(kept, default=0))
        return n_unchanged

    @property
    def is_random(self) -> bool:
        """Whether the distribution may have more than one token."""
        return not self.greedy or any(isinstance(step, Exclusion) for step in self._steps)

    def distribution(
        self,
        logits: Logits,
        history: TokenArray = NO_HISTORY,
        allows: Allows | None = None,
    ) -> Distribution:
        """Return the chain's distribution for a row of logits.

        XTC gives the mixture of its two outcomes: exact, and without a random number.

        Args:
            logits: float32[n_vocab]. It is written to, and restored.
            history: The last tokens of the text, int64[n]: at least `n_history`, if there are so
                many.
            allows: A grammar, which is asked about as few tokens as possible.

        Raises:
            BackendError: The largest logit is not finite, or biases leave no token.
            NoTokenAllowedError: The grammar allows no token.
        """
        if not self._adjustments:
            return self._after_adjustments(logits, history, allows)
        undo: list[tuple[TokenArray, Logits]] = []
        try:
            for adjustment in self._adjustments:
                token_ids, amounts = _within(*adjustment.affected(history), len(logits))
                before = logits[token_ids]
                undo.append((token_ids, before))
                with np.errstate(over="ignore"):  # a large penalty gives minus infinity
                    logits[token_ids] = adjustment.change(before, amounts)
            return self._after_adjustments(logits, history, allows)
        finally:
            for token_ids, before in reversed(undo):
                logits[token_ids] = before

    def _after_adjustments(
        self,
        logits: Logits,
        history: TokenArray,
        allows: Allows | None,
    ) -> Distribution:
        """Return the distribution for a row in which the first adjustments are made."""
        best_id = int(logits.argmax())
        top = float(logits[best_id])
        if top == -np.inf and self._adjustments:
            raise BackendError("the logit biases and penalties leave no token to choose")
        if not math.isfinite(top):
            raise not_finite(top)
        if self._takes_best:
            if allows is not None and not allows(np.array([best_id]))[0]:
                best_id = int(allowed_top_k(logits, allows, 1).ids()[0])
            return Distribution.certain(best_id)
        if allows is None:
            return self._run(Candidates.whole(logits), 0, history)
        candidates, n_done = self._masked(logits, history, allows)
        return self._run(candidates, n_done, history)

    def _masked(
        self,
        logits: Logits,
        history: TokenArray,
        allows: Allows,
    ) -> tuple[Candidates, int]:
        """Apply a grammar's mask, as late in the chain as possible.

        Returns:
            The candidates after the mask and the first steps, and the number of these steps.
        """
        candidates = Candidates.whole(logits)
        for n_done, step in enumerate(self._steps):
            if isinstance(step, Transform) and step.n_best:
                return allowed_top_k(candidates.scores, allows, step.n_best), n_done + 1
            if not isinstance(step, (Adjustment, Temperature)):
                return allowed(candidates.scores, allows), n_done
            # Adjustments and temperatures treat each token by itself, so the mask may come later.
            candidates = _applied(step, candidates, history)
        return allowed(candidates.scores, allows), len(self._steps)

    def _run(
        self,
        candidates: Candidates,
        n_done: int,
        history: TokenArray,
    ) -> Distribution:
        """Run the steps after the first `n_done`."""
        for n, step in enumerate(self._steps[n_done:], n_done + 1):
            if not isinstance(step, Exclusion):
                candidates = _applied(step, candidates, history)
                continue
            without_top = samplers.xtc(candidates, step.threshold)
            if without_top is not candidates:
                return mixture(
                    step.probability,
                    self._run(without_top, n, history),
                    self._run(candidates, n, history),
                )
        return candidates.softmax(self._temperature)


def mixture(
    weight: float,
    first: Distribution,
    second: Distribution,
) -> Distribution:
    """Return weight * first + (1 - weight) * second."""
    if weight <= 0.0:
        return second
    if weight >= 1.0:
        return first
    token_ids = np.concatenate((first.token_ids, second.token_ids))
    probs = np.concatenate((weight * first.probs, (1.0 - weight) * second.probs))
    token_ids, places = np.unique(token_ids, return_inverse=True)
    return Distribution(token_ids, np.bincount(places, probs).astype(np.float64))


def _longest_history(steps: Sequence[Step]) -> int:
    lengths = [step.n_history for step in steps if isinstance(step, Adjustment)]
    if min(lengths, default=0) < 0:
        return -1
    return max(lengths, default=0)


def _keeps_best(step: Step) -> bool:
    return isinstance(step, Temperature) or (isinstance(step, Transform) and step.keeps_best)


def _applied(
    step: Adjustment | Temperature | Transform,
    candidates: Candidates,
    history: TokenArray,
) -> Candidates:
    if isinstance(step, Transform):
        return step.apply(candidates)
    if isinstance(step, Temperature):
        return samplers.temperature(candidates, step.value)
    return _adjusted(candidates, step, history)


def _adjusted(
    candidates: Candidates,
    step: Adjustment,
    history: TokenArray,
) -> Candidates:
    """Return the candidates by id, with new scores for the tokens that a step affects."""
    candidates = candidates.by_id()
    token_ids, amounts = step.affected(history)
    scores = candidates.scores.astype(np.float64)
    if candidates.token_ids is None:
        positions, amounts = _within(token_ids, amounts, len(scores))
    else:
        _, positions, affected = np.intersect1d(
            candidates.token_ids, token_ids, assume_unique=True, return_indices=True
        )
        amounts = amounts[affected]
    scores[positions] = step.change(scores[positions], amounts)
    return candidates._replace(scores=scores)


def _within(
    token_ids: TokenArray,
    amounts: ProbArray,
    n_vocab: int,
) -> tuple[TokenArray, ProbArray]:
    """Drop the ids that the row does not have: two models may share only some tokens."""
    if not len(token_ids) or 0 <= token_ids[0] <= token_ids[-1] < n_vocab:
        return token_ids, amounts
    start, end = token_ids.searchsorted((0, n_vocab))
    return token_ids[start:end], amounts[start:end]
