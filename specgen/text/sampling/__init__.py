"""From logits to the distribution of the next token, with llama.cpp's samplers.

`samplers` and `dry` compute one sampler each, in pure functions of arrays; `steps` decides which of
them the options ask for; `chain` runs them in order.
"""
