"""The trainable part of a quantised draft: the scales of its blocks of weights.

A GGUF file stores a matrix in blocks. Each block has a float16 scale, which multiplies all numbers of the
block. Training finds a factor for every scale (parameter-efficient and quantisation-aware adaptation, PEQA,
Kim et al., arXiv:2305.14152). The numbers within a block keep their few bits, so the file keeps its size and
speed, and nothing learnt is lost by quantising again. (Low-rank changes to the matrices, LoRA, are smaller
than the steps of a four-bit type, which rounds them away.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgen.llama.operators import FloatArray, Weights, dequantize, quantize

#: The number of weights that share a factor in types without blocks.
_FLOAT_BLOCK = 32
_FLOAT_TYPES = frozenset(["f32", "f16", "bf16"])
_MOST_FLOAT16 = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True)
class _Layout:
    """The blocks of a type: the number of weights and of bytes in a block, and the byte offsets of the
    float16 numbers that its weights are proportional to."""

    n_weights: int
    n_bytes: int
    scales: tuple[int, ...]


_LAYOUTS = {
    "q4_0": _Layout(32, 18, (0,)),
    "q4_1": _Layout(32, 20, (0, 2)),
    "q5_0": _Layout(32, 22, (0,)),
    "q5_1": _Layout(32, 24, (0, 2)),
    "q8_0": _Layout(32, 34, (0,)),
    "iq4_nl": _Layout(32, 18, (0,)),
    "q2_k": _Layout(256, 84, (80, 82)),
    "q3_k": _Layout(256, 110, (108,)),
    "q4_k": _Layout(256, 144, (0, 2)),
    "q5_k": _Layout(256, 176, (0, 2)),
    "q6_k": _Layout(256, 210, (208,)),
    "iq4_xs": _Layout(256, 136, (0,)),
}


def block_size(types: Sequence[str], n_columns: int) -> int | None:
    """Return the number of weights in a row that share a factor, for matrices of these types with rows of
    `n_columns`; None if one of the types has no such scales."""
    sizes = [1]
    for name in types:
        if name in _FLOAT_TYPES:
            sizes.append(_FLOAT_BLOCK if n_columns % _FLOAT_BLOCK == 0 else n_columns)
        elif name in _LAYOUTS:
            sizes.append(_LAYOUTS[name].n_weights)
        else:
            return None
    return math.lcm(*sizes)


def initial_changes(
    matrices: Mapping[str, FloatArray], types: Mapping[str, Sequence[str]]
) -> dict[str, FloatArray]:
    """Return the initial changes of the factors: zeros, since a factor is 1 plus its change.

    `matrices` has the matrices of all layers, float32[n_layer, n_outputs, n_inputs], and `types` the type of
    each layer's matrix. Each name "NAME.weight" whose types have scales gives "NAME.factors",
    float32[n_layer, n_outputs, n_inputs / block_size].
    """
    found = {}
    for name, values in matrices.items():
        size = block_size(types[name], values.shape[-1])
        if size is not None:
            shape = (*values.shape[:-1], values.shape[-1] // size)
            found[f"{name.removesuffix('.weight')}.factors"] = np.zeros(shape, np.float32)
    return found


def apply_changes(matrix: Any, changes: Any) -> Any:
    """Return a matrix, NumPy's or JAX's, with its blocks multiplied by 1 + `changes`. The matrix is
    [n_outputs, n_inputs], `changes` are [n_outputs, n_blocks]."""
    blocks = matrix.reshape(*changes.shape, -1)
    return (blocks * (1.0 + changes)[..., None]).reshape(matrix.shape)


def scaled_bytes(weights: Weights, changes: FloatArray) -> NDArray[np.uint8]:
    """Return the bytes of a matrix, in its own type, with its blocks multiplied by 1 + `changes`."""
    if weights.type_name in _FLOAT_TYPES:
        return quantize(apply_changes(dequantize(weights), changes), weights.type_name).data
    layout = _LAYOUTS[weights.type_name]
    n_rows, n_columns = weights.shape
    blocks = weights.data.reshape(n_rows, n_columns // layout.n_weights, layout.n_bytes).copy()
    factors = 1.0 + np.repeat(changes, blocks.shape[1] // changes.shape[1], axis=1)
    for first in layout.scales:
        place = np.s_[..., first : first + 2]
        scales = np.ascontiguousarray(blocks[place]).view(np.float16)[..., 0].astype(np.float32)
        scales = np.clip(scales * factors, -_MOST_FLOAT16, _MOST_FLOAT16)
        blocks[place] = scales.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(-1)
