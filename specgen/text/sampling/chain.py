"""The chain of samplers: from a row of logits to the distribution that a token is drawn from.

Logit biases come first, then `SamplerOptions.samplers`; those that are switched off cost nothing.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from specgen.errors import BackendError
from specgen.sampler_options import LARGEST_FACTOR, SamplerName, SamplerOptions
from specgen.system.arrays import Logits, ProbArray, Scores, TokenArray, best
from specgen.text.sampling import samplers
from specgen.text.sampling.distribution import Distribution
from specgen.text.sampling.dry import DryBreakers, dry_penalties
from specgen.text.sampling.samplers import Allows, Candidates

#: The history for samplers that look at no text.
NO_HISTORY: TokenArray = np.zeros(0, np.int64)
NO_HISTORY.flags.writeable = False


class Sampler:
    """A chain of samplers, made once for its options, without a state: one sampler judges a tree of
    drafts.
    """

    def __init__(self, options: SamplerOptions, breakers: DryBreakers | None = None) -> None:
        self.options, self.breakers = options, breakers
        steps = steps_for(options, breakers or DryBreakers())
        #: Edits at the beginning of the chain change the row itself, and are undone afterwards.
        self._edits: list[Edit] = []
        for step in steps:
            if not isinstance(step, Edit):
                break
            self._edits.append(step)
        self._steps = steps[len(self._edits) :]
        #: Whether the chain keeps only its most likely token: the temperature is 0 or less.
        self.greedy = options.greedy
        self._takes_best = self.greedy and all(
            isinstance(step, Scale) or (isinstance(step, Cut) and step.keeps_best)
            for step in self._steps
        )
        #: A temperature that comes last is left to the softmax.
        self._temperature = 1.0
        last = self._steps[-1] if self._steps else None
        if isinstance(last, Scale) and last.temperature > 0.0:
            self._temperature = last.temperature
            self._steps.pop()
        #: How many of a row's likeliest tokens are those of the distribution, and in the same
        #: proportion.
        self.n_likeliest = int(self._takes_best and not self._edits)
        if self._temperature == 1.0 and not self._edits:
            kept = [step.n_best if isinstance(step, Cut) else 0 for step in self._steps]
            self.n_likeliest = max(self.n_likeliest, min(kept, default=0))
        #: How many of the last tokens of the text the chain looks at; -1 is all of them.
        windows = [step.n_history for step in steps if isinstance(step, Edit)]
        self.n_history = -1 if min(windows, default=0) < 0 else max(windows, default=0)

    @property
    def is_random(self) -> bool:
        return not self.greedy or any(isinstance(step, Fork) for step in self._steps)

    def distribution(
        self, logits: Logits, history: TokenArray = NO_HISTORY, allows: Allows | None = None
    ) -> Distribution:
        """Return the chain's distribution for a row of logits, float32[n_vocab], which is written
        to and restored. `history` are the last tokens of the text, int64[n], at least `n_history`
        if there are so many. `allows` is a grammar, asked about as few tokens as possible. Raise
        `BackendError` without a finite maximum, `NoTokenAllowedError`. XTC gives the mixture of
        both cases: exact, and without a random number.
        """
        if not self._edits:
            return self._of_row(logits, history, allows)
        edited: list[tuple[TokenArray, Logits]] = []
        try:
            for edit in self._edits:
                token_ids, amounts = _within(*edit.affected(history), len(logits))
                before = logits[token_ids]
                edited.append((token_ids, before))
                with np.errstate(over="ignore"):  # a large penalty: minus infinity
                    logits[token_ids] = edit.change(before, amounts)
            return self._of_row(logits, history, allows)
        finally:
            for token_ids, before in reversed(edited):
                logits[token_ids] = before

    def _of_row(self, logits: Logits, history: TokenArray, allows: Allows | None) -> Distribution:
        token_id = int(logits.argmax())
        top = float(logits[token_id])
        if top == -np.inf and self._edits:
            raise BackendError("the logit biases and penalties leave no token to choose")
        if not math.isfinite(top):
            raise _not_finite(top)
        if self._takes_best:
            if allows is not None and not allows(np.array([token_id]))[0]:
                token_id = int(samplers.allowed_top_k(logits, allows, 1).ids()[0])
            return Distribution.certain(token_id)
        candidates = Candidates.whole(logits)
        n_done = 0
        if allows is not None:
            candidates, n_done = self._masked(candidates, history, allows)
        return self._run(candidates, n_done, history)

    def _masked(
        self, candidates: Candidates, history: TokenArray, allows: Allows
    ) -> tuple[Candidates, int]:
        """Return the candidates after the mask and the first steps, and the number of these steps."""
        for n_done, step in enumerate(self._steps):
            if isinstance(step, Cut) and step.n_best:
                return samplers.allowed_top_k(candidates.scores, allows, step.n_best), n_done + 1
            if not isinstance(step, (Edit, Scale)):
                return samplers.allowed(candidates.scores, allows), n_done
            # Edits and scales treat each token by itself, so the mask may come after them.
            candidates = _applied(step, candidates, history)
        return samplers.allowed(candidates.scores, allows), len(self._steps)

    def _run(self, candidates: Candidates, n_done: int, history: TokenArray) -> Distribution:
        for n, step in enumerate(self._steps[n_done:], n_done + 1):
            if not isinstance(step, Fork):
                candidates = _applied(step, candidates, history)
                continue
            removed = samplers.xtc(candidates, step.threshold)
            if removed is not candidates:
                return mixture(
                    step.probability,
                    self._run(removed, n, history),
                    self._run(candidates, n, history),
                )
        return samplers.softmax(candidates, self._temperature)


def mixture(weight: float, first: Distribution, second: Distribution) -> Distribution:
    if weight <= 0.0:
        return second
    if weight >= 1.0:
        return first
    token_ids = np.concatenate((first.token_ids, second.token_ids))
    probs = np.concatenate((weight * first.probs, (1.0 - weight) * second.probs))
    token_ids, places = np.unique(token_ids, return_inverse=True)
    return Distribution(token_ids, np.bincount(places, probs).astype(np.float64))


def _applied(step: Edit | Scale | Cut, candidates: Candidates, history: TokenArray) -> Candidates:
    if isinstance(step, Cut):
        return step.apply(candidates)
    if isinstance(step, Scale):
        return samplers.temperature(candidates, step.temperature)
    return _edited(candidates, step, history)


def _edited(candidates: Candidates, edit: Edit, history: TokenArray) -> Candidates:
    """Return the candidates by id, with new scores for the tokens that `edit` affects."""
    candidates = candidates.by_id()
    token_ids, amounts = edit.affected(history)
    scores = candidates.scores.astype(np.float64)
    if candidates.token_ids is None:
        positions, amounts = _within(token_ids, amounts, len(scores))
    else:
        _, positions, affected = np.intersect1d(
            candidates.token_ids, token_ids, assume_unique=True, return_indices=True
        )
        amounts = amounts[affected]
    scores[positions] = edit.change(scores[positions], amounts)
    return candidates._replace(scores=scores)


def _within(
    token_ids: TokenArray, amounts: ProbArray, n_vocab: int
) -> tuple[TokenArray, ProbArray]:
    """Drop the ids that the row does not have: two models may share only some tokens."""
    if not len(token_ids) or 0 <= token_ids[0] <= token_ids[-1] < n_vocab:
        return token_ids, amounts
    start, end = token_ids.searchsorted((0, n_vocab))
    return token_ids[start:end], amounts[start:end]


# --- the steps of a chain ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Edit:
    """Changes the scores of a few tokens: logit bias, penalties, DRY."""

    #: From the text so far, int64[n_history], to the affected tokens, increasing, and amounts:
    #: int64[m], float64[m].
    affected: Callable[[TokenArray], tuple[TokenArray, ProbArray]]
    #: From the scores of these tokens and the amounts to the new scores.
    change: Callable[[Scores, ProbArray], Scores]
    #: How many of the last tokens of the text it looks at; -1 is all of them.
    n_history: int = 0


@dataclass(frozen=True, slots=True)
class Scale:
    """A fixed temperature."""

    temperature: float


@dataclass(frozen=True, slots=True)
class Cut:
    """A sampler that looks only at the candidates: all other samplers except XTC."""

    apply: Callable[[Candidates], Candidates]
    #: Whether the most likely candidate always stays, and stays the most likely one.
    keeps_best: bool = False
    #: For top-k the number of candidates that it keeps: a grammar is then asked about few tokens.
    n_best: int = 0


@dataclass(frozen=True, slots=True)
class Fork:
    """XTC: removes the most likely tokens with this probability."""

    probability: float
    threshold: float


Step: TypeAlias = Edit | Scale | Cut | Fork


def steps_for(options: SamplerOptions, breakers: DryBreakers) -> list[Step]:
    """Return the steps that have an effect, in order, up to a temperature that leaves a single
    token.
    """
    steps: list[Step] = []
    if options.logit_bias:
        steps.append(_bias(options.logit_bias))
    for name in options.samplers:
        step = _step(name, options, breakers)
        if step is not None:
            steps.append(step)
        if isinstance(step, Scale) and step.temperature <= 0.0:
            break
    return steps


def _step(name: SamplerName, options: SamplerOptions, breakers: DryBreakers) -> Step | None:
    o = options
    amounts = (o.repeat_penalty, o.frequency_penalty, o.presence_penalty)
    match name:
        case "penalties" if o.repeat_last_n != 0 and amounts != (1.0, 0.0, 0.0):
            repeat, frequency, presence = amounts
            changed = partial(
                samplers.penalties, repeat=repeat, frequency=frequency, presence=presence
            )
            window = o.repeat_last_n
            return Edit(partial(samplers.occurrences, last_n=window), changed, window)
        case "dry" if o.dry_multiplier != 0.0 and o.dry_base >= 1.0 and o.dry_last_n != 0:
            affected = partial(
                dry_penalties,
                breakers=breakers,
                multiplier=o.dry_multiplier,
                base=o.dry_base,
                allowed_length=o.dry_allowed_length,
                last_n=o.dry_last_n,
            )
            return Edit(affected, np.subtract, o.dry_last_n)
        case "top_n_sigma" if o.top_n_sigma > 0.0:
            return Cut(partial(samplers.top_n_sigma, n=o.top_n_sigma), True)
        case "top_k" if o.top_k > 0:
            return Cut(partial(samplers.top_k, k=o.top_k), True, o.top_k)
        case "typ_p" if o.typical_p < 1.0:
            return Cut(partial(samplers.typical, p=o.typical_p))
        case "top_p" if o.top_p < 1.0:
            return Cut(partial(samplers.top_p, p=o.top_p), True)
        case "min_p" if o.min_p > 0.0:
            return Cut(partial(samplers.min_p, p=o.min_p), True)
        case "xtc" if o.xtc_probability > 0.0 and o.xtc_threshold <= 0.5:
            return Fork(o.xtc_probability, o.xtc_threshold)
        case "temperature" if o.dynatemp_range > 0.0:
            t = max(o.temperature, 0.0)
            spread, exponent = o.dynatemp_range, o.dynatemp_exponent
            return Cut(partial(samplers.dynamic_temperature, t=t, spread=spread, exponent=exponent))
        case "temperature" if o.temperature != 1.0:
            return Scale(o.temperature)
    return None


def _bias(pairs: tuple[tuple[int, float], ...]) -> Edit:
    numbers, biases = zip(*pairs, strict=True)
    token_ids, places = np.unique(np.array(numbers, np.int64), return_inverse=True)
    # A larger bias says no more, and a logit of 32 bits would be infinite with it.
    amounts = np.minimum(np.bincount(places, biases), LARGEST_FACTOR)
    return Edit(
        lambda _: (token_ids, amounts), lambda scores, bias: scores + bias.astype(scores.dtype)
    )


# --- what a row of logits says by itself, before samplers and grammar -------------------------------

#: The function of the kernels' library for this, once it is attached: its source says what it does,
#: and how exactly.
native_likeliest: Callable[..., float] | None = None
_MOST = 64  # tokens it is asked for; to make the types of its results takes longer than to call it
_Tokens, _Scores = ctypes.c_int32 * _MOST, ctypes.c_float * _MOST


def likeliest(logits: Logits, n: int) -> tuple[list[int], list[float]]:
    """Return the n likeliest tokens of a row, float32[n_vocab], the lowest ids first among equals,
    and their probabilities at temperature 1. Raise `BackendError` if the largest is not finite.
    """
    found, values, total = list[int](), list[float](), 0.0
    if native_likeliest is not None and n <= _MOST and logits.flags.carray:
        row, tokens, scores = ctypes.c_float.from_buffer(logits.data), _Tokens(), _Scores()
        total = native_likeliest(ctypes.addressof(row), len(logits), n, tokens, scores)
        found, values = [token for token in tokens[:n] if token >= 0], scores[:n]
    if not 0.0 < total < math.inf:
        if not math.isfinite(top := float(logits.max())):
            raise _not_finite(top)
        found = best(logits, n).tolist()
        values, total = logits[found].tolist(), float(np.exp(logits - np.float32(top)).sum())
    return found, [math.exp(value - values[0]) / total for value in values[: len(found)]]


def _not_finite(logit: float) -> BackendError:
    return BackendError(
        f"the model's largest logit is {logit}: the file is damaged, or this build of "
        "llama.cpp computes wrongly on this machine",
        hint="run `specgen doctor`",
    )


def log_probabilities(logits: Logits, token_ids: Sequence[int]) -> list[float]:
    """Return the natural logarithms of these tokens' probabilities, from float32[n_vocab] logits."""
    top = float(logits.max())
    normalizer = top + float(np.log(np.exp(logits - np.float32(top)).sum(dtype=np.float64)))
    return [float(logits[token_id]) - normalizer for token_id in token_ids]
