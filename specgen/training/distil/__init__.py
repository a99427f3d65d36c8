"""Draft models fitted to a target: JAX trains a GGUF file on the target's own text."""
