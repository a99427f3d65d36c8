"""Draft models fitted to a target: a GGUF file is trained, with JAX, on the target's own text."""
