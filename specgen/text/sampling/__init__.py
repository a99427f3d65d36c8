"""From logits to a distribution over tokens: llama.cpp's samplers, in its order and with its meaning, as pure functions
of arrays. `chain` puts those that the options ask for into a `Sampler`; `samplers` and `dry` hold them."""

from specgen.text.sampling.chain import NO_HISTORY, Sampler, likeliest
from specgen.text.sampling.dry import DryBreakers
from specgen.text.sampling.samplers import Allows

__all__ = [
    "NO_HISTORY",
    "Allows",
    "DryBreakers",
    "Sampler",
    "likeliest",
]
