"""The chain of samplers: from a row of logits to the distribution that a token is sampled from.

Logit biases come first, then `SamplerOptions.samplers`. Samplers that are off cost nothing.
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
from specgen.text.sampling.raw_probabilities import not_finite_error
from specgen.text.sampling.steps import (
    Adjustment,
    Exclusion,
    Step,
    Temperature,
    Transform,
    chain_steps,
)

#: An empty history, for chains that do not depend on the text.
NO_HISTORY: TokenArray = np.zeros(0, np.int64)
NO_HISTORY.flags.writeable = False


class Sampler:
    """A chain of samplers, built once from its options.

    It has no state, so one sampler serves all branches of a draft tree.
    """

    def __init__(
        self,
        options: SamplerOptions,
        breakers: DryBreakers | None = None,
    ) -> None:
        self.options = options
        self.breakers = breakers
        steps = chain_steps(options, breakers or DryBreakers())
        #: The number of tokens at the end of the text that the chain depends on; -1 means all.
        self.n_history = _longest_history(steps)
        #: Adjustments at the start of the chain. They are made in the row itself, and then undone.
        self._adjustments: list[Adjustment] = []
        for step in steps:
            if not isinstance(step, Adjustment):
                break
            self._adjustments.append(step)
        #: The other steps.
        self._steps = steps[len(self._adjustments) :]
        #: Whether the chain keeps only its most likely token, because the temperature is 0.
        self.greedy = options.greedy
        #: Whether that is always the best token of the adjusted row, so that no step has to run.
        self._takes_best = self.greedy and all(map(_keeps_best, self._steps))
        #: The temperature at the end of the chain, if there is one, which the softmax applies.
        self._temperature = 1.0
        last = self._steps[-1] if self._steps else None
        if isinstance(last, Temperature) and last.value > 0.0:
            self._temperature = last.value
            self._steps.pop()
        #: The number of a row's most likely tokens that the chain keeps in any case, and whose
        #: probabilities it changes by no more than a common factor.
        self.n_likeliest = self._count_unchanged()

    def _count_unchanged(self) -> int:
        """Compute `n_likeliest`."""
        if self._adjustments:
            return 0
        n_unchanged = 1 if self._takes_best else 0
        if self._temperature == 1.0:
            # Only top-k keeps a fixed number of tokens.
            n_kept = [step.n_best if isinstance(step, Transform) else 0 for step in self._steps]
            n_unchanged = max(n_unchanged, min(n_kept, default=0))
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

        For XTC, which is applied at random, it is the exact mixture of both outcomes.

        Args:
            logits: The row, float32[n_vocab]. It is changed in place, and restored at the end.
            history: The last tokens of the text, int64[n]: at least `n_history` of them, if the
                text has that many.
            allows: A grammar. It is asked about as few tokens as possible.

        Raises:
            BackendError: If the largest logit is not finite, or biases leave no token.
            NoTokenAllowedError: If the grammar allows no token.
        """
        if not self._adjustments:
            return self._after_adjustments(logits, history, allows)
        #: The tokens that each adjustment changed, with their logits before it.
        changes: list[tuple[TokenArray, Logits]] = []
        try:
            for adjustment in self._adjustments:
                token_ids, amounts = _within(*adjustment.affected(history), len(logits))
                old_logits = logits[token_ids]
                changes.append((token_ids, old_logits))
                with np.errstate(over="ignore"):  # a large penalty gives minus infinity
                    logits[token_ids] = adjustment.change(old_logits, amounts)
            return self._after_adjustments(logits, history, allows)
        finally:
            for token_ids, old_logits in reversed(changes):
                logits[token_ids] = old_logits

    def _after_adjustments(
        self,
        logits: Logits,
        history: TokenArray,
        allows: Allows | None,
    ) -> Distribution:
        """Run the steps after the first adjustments, which are made in the row already.

        The arguments and errors are those of `distribution`.
        """
        best_id = int(logits.argmax())
        top = float(logits[best_id])
        if top == -np.inf and self._adjustments:
            raise BackendError("the logit biases and penalties leave no token to choose")
        if not math.isfinite(top):
            raise not_finite_error(top)
        # Greedy: the best token that the grammar allows. It is usually the best of all.
        if self._takes_best:
            if allows is not None and not allows(np.array([best_id]))[0]:
                best_id = int(allowed_top_k(logits, allows, 1).ids()[0])
            return Distribution.certain(best_id)
        candidates = Candidates.whole(logits)
        n_done = 0
        if allows is not None:
            candidates, n_done = self._masked(logits, history, allows)
        return self._run(candidates, n_done, history)

    def _masked(
        self,
        logits: Logits,
        history: TokenArray,
        allows: Allows,
    ) -> tuple[Candidates, int]:
        """Apply a grammar's mask as late in the chain as possible.

        Returns:
            The candidates after the mask and all steps before it, and the number of steps done.
        """
        candidates = Candidates.whole(logits)
        for n_done, step in enumerate(self._steps):
            if isinstance(step, Transform) and step.n_best:
                # Top-k and the mask together ask the grammar about few tokens.
                return allowed_top_k(candidates.scores, allows, step.n_best), n_done + 1
            if not isinstance(step, (Adjustment, Temperature)):
                return allowed(candidates.scores, allows), n_done
            # Adjustments and temperatures treat each token separately, so the mask can wait.
            candidates = _applied(step, candidates, history)
        return allowed(candidates.scores, allows), len(self._steps)

    def _run(
        self,
        candidates: Candidates,
        n_done: int,
        history: TokenArray,
    ) -> Distribution:
        """Run the steps after the first `n_done` ones, and return the distribution."""
        for n_steps, step in enumerate(self._steps[n_done:], n_done + 1):
            if not isinstance(step, Exclusion):
                candidates = _applied(step, candidates, history)
                continue
            without_top = samplers.xtc(candidates, step.threshold)
            if without_top is not candidates:
                # XTC would choose at random. Both ways are followed, and mixed.
                return mixture(
                    step.probability,
                    self._run(without_top, n_steps, history),
                    self._run(candidates, n_steps, history),
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
    """Return the number of last tokens that any step depends on; -1 means all."""
    lengths = [step.n_history for step in steps if isinstance(step, Adjustment)]
    if min(lengths, default=0) < 0:
        return -1
    return max(lengths, default=0)


def _keeps_best(step: Step) -> bool:
    """Return whether the best candidate is always the best one after a step, too."""
    return isinstance(step, Temperature) or (isinstance(step, Transform) and step.keeps_best)


def _applied(
    step: Adjustment | Temperature | Transform,
    candidates: Candidates,
    history: TokenArray,
) -> Candidates:
    """Return the candidates after a step."""
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
    """Return the candidates in the order of ids, with new scores for those that a step affects."""
    candidates = candidates.by_id()
    token_ids, amounts = step.affected(history)
    scores = candidates.scores.astype(np.float64)
    if candidates.token_ids is None:
        positions, amounts = _within(token_ids, amounts, len(scores))
    else:
        _, positions, affected = np.intersect1d(
            candidates.token_ids,
            token_ids,
            assume_unique=True,
            return_indices=True,
        )
        amounts = amounts[affected]
    scores[positions] = step.change(scores[positions], amounts)
    return candidates._replace(scores=scores)


def _within(
    token_ids: TokenArray,
    amounts: ProbArray,
    n_vocab: int,
) -> tuple[TokenArray, ProbArray]:
    """Drop the ids that a row does not have, from ascending `token_ids` and their `amounts`.

    The vocabularies of target and draft may differ in size.
    """
    if not len(token_ids) or 0 <= token_ids[0] <= token_ids[-1] < n_vocab:
        return token_ids, amounts
    start, end = token_ids.searchsorted((0, n_vocab))
    return token_ids[start:end], amounts[start:end]
