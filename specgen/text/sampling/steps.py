"""The steps of a chain of samplers, and which of them the options ask for.

A new sampler needs a name, a letter and its options in `specgen/sampler_options.py`, a function in
`samplers.py`, and a case in `_step` here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from specgen.sampler_options import LARGEST_FACTOR, SamplerName, SamplerOptions
from specgen.system.arrays import ProbArray, Scores, TokenArray
from specgen.text.sampling import samplers
from specgen.text.sampling.candidates import Candidates
from specgen.text.sampling.dry import DryBreakers, dry_penalties


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Changes the scores of a few tokens: logit biases, penalties, DRY."""

    #: From the text so far, int64[n_history], to the tokens to change, as increasing ids int64[m],
    #: with an amount for each, float64[m].
    affected: Callable[[TokenArray], tuple[TokenArray, ProbArray]]
    #: From the scores of these tokens and the amounts to the new scores.
    change: Callable[[Scores, ProbArray], Scores]
    #: How many of the last tokens of the text it depends on; -1 means all of them.
    n_history: int = 0


@dataclass(frozen=True, slots=True)
class Temperature:
    """A fixed temperature."""

    value: float


@dataclass(frozen=True, slots=True)
class Transform:
    """A sampler that depends on the candidates alone: all the others, except XTC."""

    apply: Callable[[Candidates], Candidates]
    #: Whether the most likely candidate always stays, and stays the most likely one.
    keeps_best: bool = False
    #: For top-k: the number of candidates that it keeps, so that a grammar is asked about few
    #: tokens. Otherwise 0.
    n_best: int = 0


@dataclass(frozen=True, slots=True)
class Exclusion:
    """XTC: excludes the most likely tokens with this probability."""

    probability: float
    threshold: float


Step: TypeAlias = Adjustment | Temperature | Transform | Exclusion


def chain_steps(options: SamplerOptions, breakers: DryBreakers) -> list[Step]:
    """Return the steps that have an effect, in order.

    Biases come first, then `SamplerOptions.samplers`, up to a temperature that leaves one token.
    """
    steps: list[Step] = []
    if options.logit_bias:
        steps.append(_bias(options.logit_bias))
    for name in options.samplers:
        step = _step(name, options, breakers)
        if step is not None:
            steps.append(step)
        if isinstance(step, Temperature) and step.value <= 0.0:
            break
    return steps


def _step(
    name: SamplerName,
    o: SamplerOptions,
    breakers: DryBreakers,
) -> Step | None:
    """Return the step of a sampler; None if the options switch it off."""
    match name:
        case "penalties":
            return _penalties(o)
        case "dry":
            return _dry(o, breakers)
        case "top_n_sigma" if o.top_n_sigma > 0.0:
            return Transform(partial(samplers.top_n_sigma, n=o.top_n_sigma), keeps_best=True)
        case "top_k" if o.top_k > 0:
            return Transform(partial(samplers.top_k, k=o.top_k), keeps_best=True, n_best=o.top_k)
        case "typ_p" if o.typical_p < 1.0:
            return Transform(partial(samplers.typ_p, p=o.typical_p))
        case "top_p" if o.top_p < 1.0:
            return Transform(partial(samplers.top_p, p=o.top_p), keeps_best=True)
        case "min_p" if o.min_p > 0.0:
            return Transform(partial(samplers.min_p, p=o.min_p), keeps_best=True)
        case "xtc" if o.xtc_probability > 0.0 and o.xtc_threshold <= 0.5:
            return Exclusion(o.xtc_probability, o.xtc_threshold)
        case "temperature" if o.dynatemp_range > 0.0:
            return _dynamic_temperature(o)
        case "temperature" if o.temperature != 1.0:
            return Temperature(o.temperature)
    return None


def _bias(pairs: tuple[tuple[int, float], ...]) -> Adjustment:
    numbers, amounts = zip(*pairs, strict=True)
    token_ids, places = np.unique(np.array(numbers, np.int64), return_inverse=True)
    # A larger bias has no other effect, and would make a float32 logit infinite.
    sums = np.minimum(np.bincount(places, amounts), LARGEST_FACTOR)
    return Adjustment(lambda _history: (token_ids, sums), samplers.biases)


def _penalties(o: SamplerOptions) -> Adjustment | None:
    is_off = (o.repeat_penalty, o.frequency_penalty, o.presence_penalty) == (1.0, 0.0, 0.0)
    if is_off or o.repeat_last_n == 0:
        return None
    change = partial(
        samplers.penalties,
        repeat=o.repeat_penalty,
        frequency=o.frequency_penalty,
        presence=o.presence_penalty,
    )
    affected = partial(samplers.occurrences, last_n=o.repeat_last_n)
    return Adjustment(affected, change, o.repeat_last_n)


def _dry(o: SamplerOptions, breakers: DryBreakers) -> Adjustment | None:
    if o.dry_multiplier == 0.0 or o.dry_base < 1.0 or o.dry_last_n == 0:
        return None
    affected = partial(
        dry_penalties,
        breakers=breakers,
        multiplier=o.dry_multiplier,
        base=o.dry_base,
        allowed_length=o.dry_allowed_length,
        last_n=o.dry_last_n,
    )
    return Adjustment(affected, np.subtract, o.dry_last_n)


def _dynamic_temperature(o: SamplerOptions) -> Transform:
    return Transform(
        partial(
            samplers.dynamic_temperature,
            t=max(o.temperature, 0.0),
            spread=o.dynatemp_range,
            exponent=o.dynatemp_exponent,
        )
    )
