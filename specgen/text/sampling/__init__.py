"""From logits to a distribution over tokens: llama.cpp's samplers, in its order and with its
meaning, as pure functions of NumPy arrays.

`Sampler` is the whole chain. `candidates` finds the best of many tokens; `truncation`,
`temperatures`, `penalties` and `dry` hold the samplers; `masking` applies a grammar; `distribution`
is the result.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from specgen.options import SamplerOptions
from specgen.system.arrays import Logits, ProbArray, TokenArray
from specgen.text.sampling.candidates import argmax, best, top_probability
from specgen.text.sampling.chain import NO_HISTORY, Sampler
from specgen.text.sampling.distribution import Distribution
from specgen.text.sampling.dry import BreakerVocabulary, DryBreakers
from specgen.text.sampling.masking import Allows, NoTokenAllowedError

__all__ = [
    "NO_HISTORY",
    "Allows",
    "BreakerVocabulary",
    "Distribution",
    "DryBreakers",
    "NoTokenAllowedError",
    "Sampler",
    "argmax",
    "distribution",
    "top_k",
    "top_probability",
]


def distribution(logits: Logits, options: SamplerOptions) -> Distribution:
    """Return the distribution of `Sampler(options)` for a row of logits, float32[n_vocab], without a
    history."""
    return _sampler(options).distribution(logits)


def top_k(logits: Logits, k: int) -> tuple[TokenArray, ProbArray]:
    """Return the k largest logits of a row as (ids int64[m], logits float64[m]), largest first; fewer than
    k if the others are minus infinity."""
    token_ids = best(logits, k)
    return token_ids, logits[token_ids].astype(np.float64)


@lru_cache(maxsize=16)
def _sampler(options: SamplerOptions) -> Sampler:
    return Sampler(options)
