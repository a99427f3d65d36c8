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
    options: SamplerOptions,
    breakers: DryBreakers,
) -> Step | None:
    """Return the step of a sampler; None if the options switch it off."""
    match name:
        case "penalties" if _has_penalties(options):
            return _penalties(options)
        case "dry" if _has_dry(options):
            return _dry(options, breakers)
        case "top_n_sigma" if options.top_n_sigma > 0.0:
            return Transform(partial(samplers.top_n_sigma, n=options.top_n_sigma), keeps_best=True)
        case "top_k" if options.top_k > 0:
            keep = partial(samplers.top_k, k=options.top_k)
            return Transform(keep, keeps_best=True, n_best=options.top_k)
        case "typ_p" if options.typical_p < 1.0:
            return Transform(partial(samplers.typ_p, p=options.typical_p))
        case "top_p" if options.top_p < 1.0:
            return Transform(partial(samplers.top_p, p=options.top_p), keeps_best=True)
        case "min_p" if options.min_p > 0.0:
            return Transform(partial(samplers.min_p, p=options.min_p), keeps_best=True)
        case "xtc" if options.xtc_probability > 0.0 and options.xtc_threshold <= 0.5:
            return Exclusion(options.xtc_probability, options.xtc_threshold)
        case "temperature" if options.dynatemp_range > 0.0:
            return _dynamic_temperature(options)
        case "temperature" if options.temperature != 1.0:
            return Temperature(options.temperature)
    return None


def _bias(pairs: tuple[tuple[int, float], ...]) -> Adjustment:
    numbers, amounts = zip(*pairs, strict=True)
    token_ids, places = np.unique(np.array(numbers, np.int64), return_inverse=True)
    # A larger bias has no other effect, and would make a float32 logit infinite.
    sums = np.minimum(np.bincount(places, amounts), LARGEST_FACTOR)
    return Adjustment(lambda _history: (token_ids, sums), samplers.biases)


def _has_penalties(options: SamplerOptions) -> bool:
    if options.repeat_last_n == 0:
        return False
    has_repeat_penalty = options.repeat_penalty != 1.0
    return has_repeat_penalty or options.frequency_penalty != 0.0 or options.presence_penalty != 0.0


def _penalties(options: SamplerOptions) -> Adjustment:
    change = partial(
        samplers.penalties,
        repeat=options.repeat_penalty,
        frequency=options.frequency_penalty,
        presence=options.presence_penalty,
    )
    affected = partial(samplers.occurrences, last_n=options.repeat_last_n)
    return Adjustment(affected, change, options.repeat_last_n)


def _has_dry(options: SamplerOptions) -> bool:
    return options.dry_multiplier != 0.0 and options.dry_base >= 1.0 and options.dry_last_n != 0


def _dry(options: SamplerOptions, breakers: DryBreakers) -> Adjustment:
    affected = partial(
        dry_penalties,
        breakers=breakers,
        multiplier=options.dry_multiplier,
        base=options.dry_base,
        allowed_length=options.dry_allowed_length,
        last_n=options.dry_last_n,
    )
    return Adjustment(affected, np.subtract, options.dry_last_n)


def _dynamic_temperature(options: SamplerOptions) -> Transform:
    scale = partial(
        samplers.dynamic_temperature,
        t=max(options.temperature, 0.0),
        spread=options.dynatemp_range,
        exponent=options.dynatemp_exponent,
    )
    return Transform(scale)
