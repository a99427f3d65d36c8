"""Low-rank changes to the matrices of a transformer's layers (LoRA, Hu et al., arXiv:2106.09685)."""

from __future__ import annotations

import numpy as np

from specgen.backend.llama.operators import FloatArray
from specgen.workshop.distil.transformer import LAYER_MATRICES, Parameters


def start(layers: Parameters, rank: int, rng: np.random.Generator) -> Parameters:
    """What is added to the layers' matrices before training, which is nothing.

    For each of `LAYER_MATRICES`, ``lora_a`` float32[n_layer, rank, n_inputs] is random with variance
    1 / n_inputs, ``lora_b`` float32[n_layer, n_outputs, rank] is zero; B @ A is what is added.
    """
    found: Parameters = {}
    for name in LAYER_MATRICES:
        n_layer, n_outputs, n_inputs = layers[f"{name}.weight"].shape
        a = rng.standard_normal((n_layer, rank, n_inputs), dtype=np.float32)
        found[f"{name}.lora_a"] = a / np.float32(np.sqrt(n_inputs))
        found[f"{name}.lora_b"] = np.zeros((n_layer, n_outputs, rank), np.float32)
    return found


def merged(layers: Parameters, changes: Parameters) -> dict[str, FloatArray]:
    """The layers' matrices with the changes added, by their names in a GGUF file."""
    found = {}
    for name in LAYER_MATRICES:
        matrices = layers[f"{name}.weight"]
        a, b = (np.asarray(changes[f"{name}.lora_{part}"]) for part in "ab")
        for layer, matrix in enumerate(matrices):
            found[f"blk.{layer}.{name}.weight"] = np.asarray(matrix + b[layer] @ a[layer])
    return found
