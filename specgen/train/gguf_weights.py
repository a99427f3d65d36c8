"""The weights of GGUF files as numbers, and copies of a file with other scales of its blocks of
weights.

A GGUF file stores a matrix in blocks with a float16 scale each. Training finds a factor for every
scale (PEQA, Kim et al., arXiv:2305.14152): the file keeps its size, speed and tokenizer, and
nothing learnt is lost by quantising again. (Low-rank changes, LoRA, are smaller than the steps of a
four-bit type, which rounds them away.)
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specgen.errors import ModelFileError
from specgen.llama.operators import TYPE_NUMBERS, FloatArray, Weights, dequantize, quantize
from specgen.models.files import parts_of

#: The architectures that `specgen.train.distillation` implements.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
_NAMES = {number: name for name, number in TYPE_NUMBERS.items()}
#: In gemma3 every sixth layer sees the whole text, unless the file gives another period.
_GEMMA3_PERIOD, _GEMMA3_LOCAL_BASE = 6, 10_000.0
#: Types without blocks, and the number of weights that share a factor in them.
_FLOAT_TYPES, _FLOAT_BLOCK = frozenset(["f32", "f16", "bf16"]), 32
_MOST_FLOAT16 = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The shape of a transformer."""

    architecture: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_size: int
    #: Added to the mean square under the root by which a norm divides.
    norm_epsilon: float
    #: For each layer: the base of rotation angles, the divisor of positions, and its window (0:
    #: all).
    rope_bases: tuple[float, ...]
    rope_factors: tuple[float, ...]
    windows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GgufWeights:
    """A transformer: its hyperparameters, and its tensors and their types by their names in the
    file.
    """

    hyperparameters: Hyperparameters
    tensors: dict[str, FloatArray]
    types: dict[str, str]


def read_weights(path: Path) -> GgufWeights:
    """Read and dequantise a model in one file. Raise `ModelFileError` if it cannot be read or
    trained.
    """
    reader = _opened(path)
    hyperparameters = _hyperparameters(path, reader)
    tensors, types = {}, {}
    for tensor in reader.tensors:
        stored = _stored(path, tensor)
        tensors[tensor.name] = dequantize(stored).reshape(tensor.shape[::-1])
        types[tensor.name] = stored.type_name
    layers = (f"blk.{layer}.attn_q.weight" for layer in range(hyperparameters.n_layer))
    for name in ("token_embd.weight", "output_norm.weight", *layers):
        if name not in tensors:
            raise ModelFileError(f"{path}: there is no tensor {name}")
    return GgufWeights(hyperparameters, tensors, types)


def write_weights(original: Path, changes: Mapping[str, FloatArray], output: Path) -> None:
    """Write a copy of a file with blocks multiplied, by `changes` as of `initial_changes`. Raise
    `OSError`.
    """
    shutil.copyfile(original, output)
    tensors = {tensor.name: tensor for tensor in _opened(original).tensors}
    with output.open("r+b") as file:
        for name, of_layers in changes.items():
            for layer, values in enumerate(of_layers):
                tensor = tensors[f"blk.{layer}.{name.removesuffix('.factors')}.weight"]
                stored = _stored(original, tensor)
                file.seek(int(tensor.data_offset))
                file.write(scaled_bytes(stored, np.asarray(values)).tobytes())


def _opened(path: Path) -> Any:
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, IndexError) as error:
        raise ModelFileError(f"{path}: is no whole GGUF file") from error


def _stored(path: Path, tensor: Any) -> Weights:
    """Return a tensor as it is stored; a vector is a matrix of one row."""
    name = _NAMES.get(int(tensor.tensor_type))
    if name is None:
        raise ModelFileError(f"{path}: {tensor.name} has the type {tensor.tensor_type.name}")
    n_columns = int(tensor.shape[0])
    shape = (int(tensor.n_elements) // n_columns, n_columns)
    return Weights(name, shape, np.asarray(tensor.data).reshape(-1).view(np.uint8))


def _hyperparameters(path: Path, reader: Any) -> Hyperparameters:
    architecture = reader.fields["general.architecture"].contents()
    if architecture not in ARCHITECTURES:
        raise ModelFileError(
            f"{path}: cannot train a model of the architecture {architecture!r}",
            hint=f"these can be trained: {', '.join(ARCHITECTURES)}",
        )

    def value(key: str, default: Any = None) -> Any:
        field = reader.fields.get(f"{architecture}.{key}")
        found = default if field is None else field.contents()
        if found is None:
            raise ModelFileError(f"{path}: there is no {architecture}.{key}")
        return found

    n_layer, n_embd, n_head = (
        int(value(key)) for key in ("block_count", "embedding_length", "attention.head_count")
    )
    head_size = int(value("attention.key_length", n_embd // n_head))
    scaling = value("rope.scaling.type", "none")
    unusual = {
        "expert_count": value("expert_count", 0) > 0,
        "final_logit_softcapping": value("final_logit_softcapping", 0.0) > 0,
        "rope.dimension_count": value("rope.dimension_count", head_size) != head_size,
        "rope.scaling.type": scaling not in ("none", "linear"),
        "split.count": "split.count" in reader.fields,
    }
    for key, is_so in unusual.items():
        if is_so:
            raise ModelFileError(f"{path}: cannot train a model with this {key}")
    base = float(value("rope.freq_base", 10_000.0))
    factor = float(value("rope.scaling.factor", 1.0)) if scaling == "linear" else 1.0
    window = int(value("attention.sliding_window", 0)) if architecture == "gemma3" else 0
    period = int(value("attention.sliding_window_pattern", _GEMMA3_PERIOD))
    is_local = [bool(window) and layer % period < period - 1 for layer in range(n_layer)]
    local_base = float(value("rope.freq_base_swa", _GEMMA3_LOCAL_BASE))
    return Hyperparameters(
        architecture,
        n_layer,
        n_embd,
        n_head,
        int(value("attention.head_count_kv", n_head)),
        head_size,
        float(value("attention.layer_norm_rms_epsilon")),
        tuple(local_base if local else base for local in is_local),
        tuple(1.0 if local else factor for local in is_local),
        tuple(window if local else 0 for local in is_local),
    )


def model_rows(path: Path, tokens: NDArray[Any]) -> tuple[FloatArray, FloatArray]:
    """Return tokens' rows of a model's embeddings and of its output matrix, which may be the same
    one.
    """
    readers = map(_opened, parts_of(path))
    tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    embeddings = tensors.get("token_embd.weight")
    if embeddings is None:
        raise ModelFileError(f"{path}: it has no token embeddings")
    matrices = embeddings, tensors.get("output.weight", embeddings)
    first, second = (_rows(_stored(path, matrix), tokens) for matrix in matrices)
    return first, second


def _rows(stored: Weights, indices: NDArray[Any]) -> FloatArray:
    n_rows, n_columns = stored.shape
    data = stored.data.reshape(n_rows, -1)[indices].reshape(-1)
    return dequantize(Weights(stored.type_name, (len(indices), n_columns), data))


class _Layout(NamedTuple):
    """A type's block: its weights, its bytes, and the offsets of the float16 numbers that scale the
    weights.
    """

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
    """Return how many weights of a row share a factor in these types; None if one has no scales."""
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
    """Return zeros, since a factor is 1 plus its change: for each "NAME.weight" whose `types` have
    scales, float32[n_layer, n_outputs, n_inputs], "NAME.factors", float32[n_layer, n_outputs,
    n_inputs / block_size].
    """
    found = {}
    for name, values in matrices.items():
        size = block_size(types[name], values.shape[-1])
        if size is not None:
            shape = (*values.shape[:-1], values.shape[-1] // size)
            found[f"{name.removesuffix('.weight')}.factors"] = np.zeros(shape, np.float32)
    return found


def apply_changes(matrix: Any, changes: Any) -> Any:
    """Return a matrix, NumPy's or JAX's [n_outputs, n_inputs], with its blocks multiplied by 1 +
    `changes`.
    """
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
        part = np.s_[..., first : first + 2]
        scales = np.ascontiguousarray(blocks[part]).view(np.float16)[..., 0].astype(np.float32)
        scales = np.clip(scales * factors, -_MOST_FLOAT16, _MOST_FLOAT16)
        blocks[part] = scales.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(-1)
