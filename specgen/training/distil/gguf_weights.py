"""The weights of a GGUF file as numbers, and copies of the file with changed weights.

A changed file is a copy whose block scales are overwritten: tokenizer, chat template and types stay the same.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specgen.errors import ModelFileError
from specgen.llama.operators import TYPE_NUMBERS, FloatArray, Weights, dequantize
from specgen.training.distil import block_scales

#: The architectures that `specgen.training.distil.transformer` implements.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
_NAMES = {number: name for name, number in TYPE_NUMBERS.items()}
#: In gemma3 every sixth layer sees the whole text, unless the file gives another period.
_GEMMA3_PERIOD = 6
_GEMMA3_LOCAL_BASE = 10_000.0


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
    #: For each layer: the base of the rotation angles of queries and keys, the divisor of positions, and the
    #: number of tokens that the layer sees (0: all).
    rope_bases: tuple[float, ...]
    rope_factors: tuple[float, ...]
    windows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GgufWeights:
    """A transformer: its hyperparameters, and its tensors by their names in the file, float32[rows, columns]
    or float32[values]."""

    hyperparameters: Hyperparameters
    tensors: dict[str, FloatArray]
    #: The types of the tensors in the file.
    types: dict[str, str]

    @property
    def n_parameters(self) -> int:
        return sum(tensor.size for tensor in self.tensors.values())


def read_weights(path: Path) -> GgufWeights:
    """Read and dequantise a model in one file.

    Raise `ModelFileError` if the file cannot be read, or if it cannot be trained because of its
    architecture or the type of a tensor.
    """
    reader = _opened(path)
    hyperparameters = _hyperparameters(path, reader)
    tensors, types = {}, {}
    for tensor in reader.tensors:
        stored = _stored(path, tensor)
        tensors[tensor.name] = dequantize(stored).reshape(tensor.shape[::-1])
        types[tensor.name] = stored.type_name
    expected = ["token_embd.weight", "output_norm.weight"]
    expected += [f"blk.{layer}.attn_q.weight" for layer in range(hyperparameters.n_layer)]
    for name in expected:
        if name not in tensors:
            raise ModelFileError(f"{path}: there is no tensor {name}")
    return GgufWeights(hyperparameters, tensors, types)


def write_weights(original: Path, changes: Mapping[str, FloatArray], output: Path) -> None:
    """Write a copy of a file with the blocks of some matrices multiplied. `changes` has the names and
    shapes of `specgen.training.distil.block_scales.initial_changes`. Raise `OSError`, and `ModelFileError`
    if the original cannot be read."""
    shutil.copyfile(original, output)
    tensors = {tensor.name: tensor for tensor in _opened(original).tensors}
    with output.open("r+b") as file:
        for name, of_layers in changes.items():
            for layer, values in enumerate(of_layers):
                tensor = tensors[f"blk.{layer}.{name.removesuffix('.factors')}.weight"]
                stored = _stored(original, tensor)
                file.seek(int(tensor.data_offset))
                file.write(block_scales.scaled_bytes(stored, np.asarray(values)).tobytes())


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
