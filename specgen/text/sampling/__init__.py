"""From logits to a distribution over tokens: llama.cpp's samplers, in its order and with its
meaning, as pure functions of arrays. `chain` puts those that the options ask for into a `Sampler`;
`samplers` and `dry` hold them.
"""
