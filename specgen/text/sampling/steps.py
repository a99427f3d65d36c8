"""The steps of a sampler chain, built from the options.

A new sampler needs a name, a letter and options in `specgen/sampler_options.py`, a function in
`samplers.py`, and a case in `_step` here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from specgen.option_fields import LARGEST_FACTOR
from specgen.sampler_options import SamplerName, SamplerOptions
from specgen.system.arrays import ProbArray, Scores, TokenArray
from specgen.text.sampling import samplers
from specgen.text.sampling.candidates import Candidates
from specgen.text.sampling.dry import DryBreakers, dry_penalties


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Changes the scores of a few tokens: logit biases, penalties, DRY."""

    #: Takes the end of the text, int64[n_history]. Returns the tokens to change, int64[m],
    #: increasing, and an amount for each, float64[m].
    affected: Callable[[TokenArray], tuple[TokenArray, ProbArray]]
    #: Takes the scores of these tokens and the amounts. Returns the new scores.
    change: Callable[[Scores, ProbArray], Scores]
    #: The number of tokens at the end of the text that `affected` depends on; -1 means all.
    n_history: int = 0


@dataclass(frozen=True, slots=True)
class Temperature:
    """A fixed temperature."""

    #: The temperature; at 0 or below, only the best token is kept.
    value: float


@dataclass(frozen=True, slots=True)
class Transform:
    """Any other sampler, except XTC. It depends only on the candidates."""

    #: Takes the candidates, and returns those that are left.
    apply: Callable[[Candidates], Candidates]
    #: Whether the most likely candidate is always kept, and remains the most likely one.
    keeps_best: bool = False
    #: For top-k, the number of candidates that it keeps, so that a grammar need only be asked about
    #: a few tokens; 0 for other samplers.
    n_best: int = 0


@dataclass(frozen=True, slots=True)
class Exclusion:
    """XTC, which excludes the most likely tokens at random."""

    #: The probability that they are excluded.
    probability: float
    #: Tokens with at least this probability are excluded, except for the least likely of them.
    threshold: float


Step: TypeAlias = Adjustment | Temperature | Transform | Exclusion


def chain_steps(options: SamplerOptions, breakers: DryBreakers) -> list[Step]:
    """Return the steps that have an effect, in order.

    Biases come first, then the samplers of `options`, up to a temperature of 0: no sampler changes
    anything once only one token is left.
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
    """Return the step of a sampler; None if the options turn it off."""
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
    """Return the step of logit biases. Several biases of one token are added up."""
    biased_ids, amounts = zip(*pairs, strict=True)
    token_ids, places = np.unique(np.array(biased_ids, np.int64), return_inverse=True)
    # A larger bias would have the same effect, but make a float32 logit infinite.
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
