"""From logits to a distribution over tokens: llama.cpp's samplers, in its order and with its
meaning, as pure functions of NumPy arrays.

`chain` puts the samplers that the options ask for into a `Sampler`; `samplers` and `dry` hold them;
`distribution` is the result, and what is read from a row of logits without samplers.
"""

from specgen.text.sampling.chain import NO_HISTORY, Sampler
from specgen.text.sampling.distribution import Distribution, argmax, top_probability
from specgen.text.sampling.dry import DryBreakers
from specgen.text.sampling.samplers import Allows, NoTokenAllowedError

__all__ = [
    "NO_HISTORY",
    "Allows",
    "Distribution",
    "DryBreakers",
    "NoTokenAllowedError",
    "Sampler",
    "argmax",
    "top_probability",
]
