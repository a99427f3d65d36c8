"""Reads the weights of GGUF files as floats, and writes copies of a file with other scales.

A GGUF file stores a quantised matrix in blocks of 32 or 256 weights: small integers, and one or two
float16 scales that they are multiplied by. Training finds a factor for the scales of each block, as
in PEQA (Kim et al., arXiv:2305.14152). The trained file keeps the size, speed and tokenizer of the
original, and nothing learnt is lost in quantising again. (LoRA's low-rank changes are smaller than
the quantisation steps of a four-bit type, so quantising again would round them away.)
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
_TYPE_NAMES = {number: name for name, number in TYPE_NUMBERS.items()}
#: The period of gemma3's layers if the file gives none: five layers attend to a sliding window,
#: the sixth to the whole text.
_GEMMA3_PERIOD = 6
#: The base of RoPE in gemma3's sliding-window layers if the file gives none.
_GEMMA3_LOCAL_BASE = 10_000.0
#: Types that store plain numbers, without blocks or scales.
_FLOAT_TYPES = frozenset(["f32", "f16", "bf16"])
#: The number of weights that share a trained factor in these types.
_FLOAT_BLOCK = 32
_MAX_FLOAT16 = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The shape of a transformer."""

    #: One of `ARCHITECTURES`.
    architecture: str
    #: The number of layers.
    n_layer: int
    #: The size of a hidden state.
    n_embd: int
    #: The number of heads of queries.
    n_head: int
    #: The number of heads of keys and values.
    n_head_kv: int
    #: The size of a head's queries, keys and values.
    head_size: int
    #: Added to the mean square in RMS norms to avoid dividing by zero.
    norm_epsilon: float
    #: The base of RoPE's frequencies in each layer.
    rope_bases: tuple[float, ...]
    #: The divisor of positions in each layer (linear RoPE scaling).
    rope_factors: tuple[float, ...]
    #: The number of latest tokens that each layer attends to; 0 for all.
    windows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GgufWeights:
    """A transformer read from a file."""

    #: Its shape.
    hyperparameters: Hyperparameters
    #: The dequantised tensors, by their names in the file.
    tensors: dict[str, FloatArray]
    #: The type in which each tensor is stored, by the same names.
    types: dict[str, str]


def read_weights(path: Path) -> GgufWeights:
    """Read and dequantise a model that consists of one file.

    Raises:
        ModelFileError: If the file cannot be read, lacks a tensor that every transformer has, or is
            of a kind that cannot be trained.
    """
    reader = _opened(path)
    hyperparameters = _hyperparameters(path, reader)
    tensors = {}
    types = {}
    for tensor in reader.tensors:
        stored = _stored(path, tensor)
        # GGUF lists the fastest axis first, NumPy last.
        tensors[tensor.name] = dequantize(stored).reshape(tensor.shape[::-1])
        types[tensor.name] = stored.type_name
    layers = (f"blk.{layer}.attn_q.weight" for layer in range(hyperparameters.n_layer))
    for name in ("token_embd.weight", "output_norm.weight", *layers):
        if name not in tensors:
            raise ModelFileError(f"{path}: the tensor {name} is missing")
    return GgufWeights(hyperparameters, tensors, types)


def write_weights(
    original: Path,
    changes: Mapping[str, FloatArray],
    output: Path,
) -> None:
    """Write a copy of a file with other scales.

    Args:
        original: The file to copy.
        changes: The changes of the blocks' factors, named and shaped as by `initial_changes`.
        output: The file to write.

    Raises:
        OSError: If `output` cannot be written.
        ModelFileError: If `original` cannot be read.
    """
    shutil.copyfile(original, output)
    tensors = {tensor.name: tensor for tensor in _opened(original).tensors}
    with output.open("r+b") as file:
        for name, changes_of_layers in changes.items():
            matrix = name.removesuffix(".factors")
            for layer, layer_changes in enumerate(changes_of_layers):
                tensor = tensors[f"blk.{layer}.{matrix}.weight"]
                scaled = scaled_bytes(_stored(original, tensor), np.asarray(layer_changes))
                file.seek(int(tensor.data_offset))
                file.write(scaled.tobytes())


def _opened(path: Path) -> Any:
    """Return a `GGUFReader` of a file."""
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, IndexError) as error:
        raise ModelFileError(f"{path}: not a complete GGUF file") from error


def _stored(path: Path, tensor: Any) -> Weights:
    """Return a reader's tensor as a matrix, still quantised; a vector becomes one row."""
    type_name = _TYPE_NAMES.get(int(tensor.tensor_type))
    if type_name is None:
        unknown = tensor.tensor_type.name
        raise ModelFileError(f"{path}: {tensor.name} has the unknown type {unknown}")
    n_columns = int(tensor.shape[0])
    shape = (int(tensor.n_elements) // n_columns, n_columns)
    return Weights(type_name, shape, np.asarray(tensor.data).reshape(-1).view(np.uint8))


def _hyperparameters(path: Path, reader: Any) -> Hyperparameters:
    """Return the hyperparameters in a file's metadata.

    Raises:
        ModelFileError: If the model cannot be trained, or metadata are missing.
    """
    metadata = _Metadata(path, reader, reader.fields["general.architecture"].contents())
    if metadata.architecture not in ARCHITECTURES:
        raise ModelFileError(
            f"{path}: cannot train a model of the architecture {metadata.architecture!r}",
            hint=f"these can be trained: {', '.join(ARCHITECTURES)}",
        )
    n_layer = int(metadata.value("block_count"))
    n_embd = int(metadata.value("embedding_length"))
    n_head = int(metadata.value("attention.head_count"))
    head_size = int(metadata.value("attention.key_length", n_embd // n_head))
    _check_implemented(metadata, head_size)
    layers = [_attention_of(metadata, layer) for layer in range(n_layer)]
    return Hyperparameters(
        metadata.architecture,
        n_layer,
        n_embd,
        n_head,
        n_head_kv=int(metadata.value("attention.head_count_kv", n_head)),
        head_size=head_size,
        norm_epsilon=float(metadata.value("attention.layer_norm_rms_epsilon")),
        rope_bases=tuple(layer.rope_base for layer in layers),
        rope_factors=tuple(layer.rope_factor for layer in layers),
        windows=tuple(layer.window for layer in layers),
    )


@dataclass(frozen=True, slots=True)
class _Metadata:
    """The metadata of a model."""

    #: The model's file.
    path: Path
    #: A `GGUFReader` of the file.
    reader: Any
    #: The architecture, with which the keys of its metadata begin.
    architecture: str

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of the architecture.

        Args:
            key: The key without the architecture.
            default: The value if the key is missing; None if it must exist.

        Raises:
            ModelFileError: If the key is missing and there is no default.
        """
        field = self.reader.fields.get(f"{self.architecture}.{key}")
        contents = default if field is None else field.contents()
        if contents is None:
            raise ModelFileError(f"{self.path}: the metadata {self.architecture}.{key} is missing")
        return contents

    @property
    def rope_scaling(self) -> str:
        """How the positions of RoPE are scaled: ``none``, ``linear``, or in another way."""
        return str(self.value("rope.scaling.type", "linear"))

    @property
    def rope_factor(self) -> float:
        """The divisor of positions, as llama.cpp reads it; old files have another name for it."""
        if self.rope_scaling == "none":
            return 1.0
        factor = self.value("rope.scaling.factor", self.value("rope.scale_linear", 1.0))
        return float(factor) or 1.0  # 0 stands for no scaling


def _check_implemented(metadata: _Metadata, head_size: int) -> None:
    """Raise `ModelFileError` if a model has what `specgen.train.distillation` does not implement.

    Args:
        metadata: The metadata of the model.
        head_size: The size of a head's keys.
    """
    unsupported = {
        "expert_count": metadata.value("expert_count", 0) > 0,
        "final_logit_softcapping": metadata.value("final_logit_softcapping", 0.0) > 0,
        "rope.dimension_count": metadata.value("rope.dimension_count", head_size) != head_size,
        "rope.scaling.attn_factor": metadata.value("rope.scaling.attn_factor", 1.0) != 1.0,
        "rope.scaling.type": metadata.rope_scaling not in ("none", "linear"),
        "split.count": "split.count" in metadata.reader.fields,
    }
    for key, is_unsupported in unsupported.items():
        if is_unsupported:
            raise ModelFileError(f"{metadata.path}: cannot train a model with this {key}")


class _LayerAttention(NamedTuple):
    """How the attention of a layer differs from that of other layers."""

    #: The base of RoPE's frequencies.
    rope_base: float
    #: The divisor of positions (linear RoPE scaling).
    rope_factor: float = 1.0
    #: The number of latest tokens that it attends to; 0 for all.
    window: int = 0


def _attention_of(metadata: _Metadata, layer: int) -> _LayerAttention:
    """Return the attention of a layer.

    All layers are alike, except that most of gemma3's attend only to a sliding window.
    """
    if metadata.architecture == "gemma3":
        window = int(metadata.value("attention.sliding_window", 0))
        period = int(metadata.value("attention.sliding_window_pattern", _GEMMA3_PERIOD))
        # The last layer of each period attends to the whole text.
        if window and layer % period < period - 1:
            local_base = float(metadata.value("rope.freq_base_swa", _GEMMA3_LOCAL_BASE))
            return _LayerAttention(local_base, window=window)
    base = float(metadata.value("rope.freq_base", 10_000.0))
    return _LayerAttention(base, metadata.rope_factor)


def model_rows(path: Path, tokens: NDArray[Any]) -> tuple[FloatArray, FloatArray]:
    """Return the rows of some tokens in a model's embeddings and in its output matrix.

    Many models use the embeddings as the output matrix too. The model may consist of several files.

    Returns:
        Two arrays, float32[len(tokens), n_embd] each.

    Raises:
        ModelFileError: If a file cannot be read, or has no embeddings.
    """
    tensors = {}
    for part in parts_of(path):
        tensors.update({tensor.name: tensor for tensor in _opened(part).tensors})
    embeddings = tensors.get("token_embd.weight")
    if embeddings is None:
        raise ModelFileError(f"{path}: the token embeddings are missing")
    output = tensors.get("output.weight", embeddings)
    return _rows(_stored(path, embeddings), tokens), _rows(_stored(path, output), tokens)


def _rows(stored: Weights, indices: NDArray[Any]) -> FloatArray:
    """Dequantise only the rows with these indices: float32[len(indices), n_columns]."""
    n_rows, n_columns = stored.shape
    data = stored.data.reshape(n_rows, -1)[indices].reshape(-1)
    return dequantize(Weights(stored.type_name, (len(indices), n_columns), data))


class _BlockLayout(NamedTuple):
    """How a type stores a block of weights."""

    #: The number of weights in a block.
    n_weights: int
    #: The size of a block.
    n_bytes: int
    #: The byte offsets of the float16 numbers to multiply in order to scale all of its weights.
    scale_offsets: tuple[int, ...]


#: The layouts by type. Types with two offsets store a scale and a minimum.
_LAYOUTS = {
    "q4_0": _BlockLayout(32, 18, (0,)),
    "q4_1": _BlockLayout(32, 20, (0, 2)),
    "q5_0": _BlockLayout(32, 22, (0,)),
    "q5_1": _BlockLayout(32, 24, (0, 2)),
    "q8_0": _BlockLayout(32, 34, (0,)),
    "iq4_nl": _BlockLayout(32, 18, (0,)),
    "q2_k": _BlockLayout(256, 84, (80, 82)),
    "q3_k": _BlockLayout(256, 110, (108,)),
    "q4_k": _BlockLayout(256, 144, (0, 2)),
    "q5_k": _BlockLayout(256, 176, (0, 2)),
    "q6_k": _BlockLayout(256, 210, (208,)),
    "iq4_xs": _BlockLayout(256, 136, (0,)),
}


def block_size(types: Sequence[str], n_columns: int) -> int | None:
    """Return the number of weights in a row that can share a factor in all of these types.

    Returns:
        The least common multiple of the types' block sizes; None if a type has no known scales.
    """
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
    matrices: Mapping[str, FloatArray],
    types: Mapping[str, Sequence[str]],
) -> dict[str, FloatArray]:
    """Return the changes to begin training with: zeros, for all matrices with scales.

    A block's weights are multiplied by a factor, which is 1 plus its change.

    Args:
        matrices: The matrices of all layers, stacked, float32[n_layer, n_outputs, n_inputs], by
            "NAME.weight".
        types: The types in which a matrix is stored in the different layers, by the same names.

    Returns:
        float32[n_layer, n_outputs, n_inputs / block_size], by "NAME.factors".
    """
    changes = {}
    for name, values in matrices.items():
        size = block_size(types[name], values.shape[-1])
        if size is not None:
            shape = (*values.shape[:-1], values.shape[-1] // size)
            changes[f"{name.removesuffix('.weight')}.factors"] = np.zeros(shape, np.float32)
    return changes


def apply_changes(matrix: Any, changes: Any) -> Any:
    """Return a matrix with its blocks multiplied by 1 + `changes`.

    Args:
        matrix: A NumPy or JAX array, float32[n_outputs, n_inputs].
        changes: float32[n_outputs, n_blocks].
    """
    blocks = matrix.reshape(*changes.shape, -1)
    return (blocks * (1.0 + changes)[..., None]).reshape(matrix.shape)


def scaled_bytes(weights: Weights, changes: FloatArray) -> NDArray[np.uint8]:
    """Return a matrix with its blocks multiplied by 1 + `changes`, as bytes in its own type.

    Only the scales of a quantised matrix change; its small integers are copied.

    Args:
        weights: The matrix as it is stored.
        changes: float32[n_rows, n_groups]. Each applies to one block of the matrix or to a group of
            neighbouring blocks, so `n_groups` divides the number of blocks in a row.
    """
    if weights.type_name in _FLOAT_TYPES:
        changed = apply_changes(dequantize(weights), changes)
        return quantize(changed, weights.type_name).data

    layout = _LAYOUTS[weights.type_name]
    n_rows, n_columns = weights.shape
    n_blocks = n_columns // layout.n_weights
    blocks = weights.data.reshape(n_rows, n_blocks, layout.n_bytes).copy()
    # The blocks of a group share its change: float32[n_rows, n_blocks].
    factors = 1.0 + np.repeat(changes, n_blocks // changes.shape[1], axis=1)
    for offset in layout.scale_offsets:
        scale_bytes = np.s_[..., offset : offset + 2]
        # Two bytes of each block become a float16: [n_rows, n_blocks, 2] to [n_rows, n_blocks].
        scales = np.ascontiguousarray(blocks[scale_bytes]).view(np.float16)[..., 0]
        scaled = scales.astype(np.float32) * factors
        scaled = np.clip(scaled, -_MAX_FLOAT16, _MAX_FLOAT16).astype(np.float16)
        blocks[scale_bytes] = scaled[..., None].view(np.uint8)
    return blocks.reshape(-1)
