"""The steps of a chain: the samplers that the options switch on, in the order of the options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import numpy as np

from specgen.options import SamplerName, SamplerOptions
from specgen.system.arrays import ProbArray, TokenArray
from specgen.text.sampling.candidates import Candidates, Scores
from specgen.text.sampling.dry import DryBreakers, dry_penalties
from specgen.text.sampling.masking import Allows, allowed_min_p, allowed_top_k
from specgen.text.sampling.penalties import logit_bias, occurrences, penalties
from specgen.text.sampling.temperatures import dynamic_temperature
from specgen.text.sampling.truncation import min_p, top_k, top_n_sigma, top_p, typical


@dataclass(frozen=True, slots=True)
class Edit:
    """Changes the scores of a few tokens: logit bias, penalties, DRY."""

    #: From the text so far, int64[n_history], to the affected tokens and the amounts: increasing ids
    #: int64[m], float64[m].
    affected: Callable[[TokenArray], tuple[TokenArray, ProbArray]]
    #: From the scores of these tokens and the amounts to the new scores.
    change: Callable[[Scores, ProbArray], Scores]


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
    #: The same on a whole vocabulary that a grammar masks, for samplers that do not need the whole
    #: mask.
    apply_masked: Callable[[Scores, Allows], Candidates] | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """XTC: removes the most likely tokens with this probability."""

    probability: float
    threshold: float


Step: TypeAlias = Edit | Scale | Cut | Fork


def steps_for(options: SamplerOptions, breakers: DryBreakers) -> list[Step]:
    """Return the steps that have an effect, in order, up to a temperature that leaves a single token."""
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
    """Return the step with this name; None if it is switched off."""
    match name:
        case "penalties":
            return _penalties(options)
        case "dry":
            return _dry(options, breakers)
        case "temperature":
            return _temperature(options)
        case "xtc":
            off = options.xtc_probability <= 0.0 or options.xtc_threshold > 0.5
            return None if off else Fork(options.xtc_probability, options.xtc_threshold)
        case _:
            return _cut(name, options)


def _cut(
    name: Literal["top_k", "top_p", "min_p", "typ_p", "top_n_sigma"], options: SamplerOptions
) -> Cut | None:
    k, p, n = options.top_k, options.min_p, options.top_n_sigma
    match name:
        case "top_k":
            cut = Cut(partial(top_k, k=k), True, partial(allowed_top_k, k=k))
            return cut if k > 0 else None
        case "top_p":
            return Cut(partial(top_p, p=options.top_p), True) if options.top_p < 1.0 else None
        case "min_p":
            cut = Cut(partial(min_p, p=p), True, partial(allowed_min_p, p=p))
            return cut if p > 0.0 else None
        case "typ_p":
            typical_p = options.typical_p
            return Cut(partial(typical, p=typical_p)) if typical_p < 1.0 else None
        case "top_n_sigma":
            return Cut(partial(top_n_sigma, n=n), True) if n > 0.0 else None


def _temperature(options: SamplerOptions) -> Step | None:
    t, spread = options.temperature, options.dynatemp_range
    if spread > 0.0:
        exponent = options.dynatemp_exponent
        return Cut(partial(dynamic_temperature, t=max(t, 0.0), spread=spread, exponent=exponent))
    return None if t == 1.0 else Scale(t)


def _bias(pairs: tuple[tuple[int, float], ...]) -> Edit:
    biases: dict[int, float] = {}
    for token_id, bias in pairs:
        biases[token_id] = biases.get(token_id, 0.0) + bias
    token_ids = np.array(sorted(biases), np.int64)
    amounts = np.array([biases[token_id] for token_id in sorted(biases)], np.float64)
    return Edit(lambda _: (token_ids, amounts), logit_bias)


def _penalties(options: SamplerOptions) -> Edit | None:
    if not uses_penalties(options):
        return None
    return Edit(
        partial(occurrences, last_n=options.repeat_last_n),
        partial(
            penalties,
            repeat=options.repeat_penalty,
            frequency=options.frequency_penalty,
            presence=options.presence_penalty,
        ),
    )


def _dry(options: SamplerOptions, breakers: DryBreakers) -> Edit | None:
    if not uses_dry(options):
        return None
    affected = partial(
        dry_penalties,
        breakers=breakers,
        multiplier=options.dry_multiplier,
        base=options.dry_base,
        allowed_length=options.dry_allowed_length,
        last_n=options.dry_last_n,
    )
    return Edit(affected, np.subtract)


def n_history(options: SamplerOptions) -> int:
    """Return how many of the last tokens of the text the steps need; -1 is all of them."""
    windows = [0]
    if uses_penalties(options):
        windows.append(options.repeat_last_n)
    if uses_dry(options):
        windows.append(options.dry_last_n)
    return -1 if min(windows) < 0 else max(windows)


def uses_penalties(options: SamplerOptions) -> bool:
    """Return whether the penalties are switched on."""
    amounts = (options.repeat_penalty, options.frequency_penalty, options.presence_penalty)
    return (
        "penalties" in options.samplers
        and options.repeat_last_n != 0
        and amounts != (1.0, 0.0, 0.0)
    )


def uses_dry(options: SamplerOptions) -> bool:
    """Return whether DRY is switched on."""
    return (
        "dry" in options.samplers
        and options.dry_multiplier != 0.0
        and options.dry_base >= 1.0
        and options.dry_last_n != 0
    )
