"""Skeletons of model files: small files of the same structure, to try kernels on.

A skeleton has the metadata and tensors of its model, but fewer layers and fewer tokens, and no
texts of tokens. Its weights are zeros, stored as the hole of a sparse file.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from specgen.llama.gguf_file import NUMBER_TYPES, GgufMetadata, GgufTensor, opened_parts
from specgen.llama.library import native
from specgen.llama.operators import metadata_context, new_tensor

#: The maximum number of layers, unless later ones have tensors of other kinds. Patterns of layers
#: repeat after at most 8.
_MAX_LAYERS = 8
#: The maximum size of the layers, unless later ones have tensors of other kinds.
_MAX_BYTES = 2**27
_MAX_TOKENS = 4096
#: The metadata that is kept in addition to that of the architecture.
_KEPT_KEYS = ("general.architecture", "general.alignment")
#: Added to the size of each tensor: more than the alignment of tensors.
_PADDING_BYTES = 4096
_TENSOR_OF_LAYER = re.compile(r"blk\.(\d+)\.(.*)")


def write_skeleton(file: Path, output: Path) -> None:
    """Write the skeleton of a model.

    Raises:
        BackendError: If the file is not a GGUF file.
        OSError: If the skeleton cannot be written.
    """
    with (
        opened_parts(file) as (metadata, tensors),
        _NewMetadata() as new,
        metadata_context() as context,
    ):
        # 1. Copy the metadata, with fewer layers and tokens.
        new.copy(metadata)
        n_tokens = new.length("tokenizer.ggml.tokens") or 0
        layers = _reduce_metadata(new, tensors, n_tokens)

        # 2. Describe the tensors. Their data will be zeros.
        n_bytes = 0
        for tensor in tensors:
            handle = tensor.handle
            layer, name = _layer_and_name(tensor)
            if layer is not None:
                # Leave out the tensors of other layers; the kept layers are counted from 0.
                if layer not in layers:
                    continue
                name = f"blk.{layers.index(layer)}.{name}"
            elif n_tokens > _MAX_TOKENS and n_tokens in tensor.shape:
                # The embeddings and the output matrix have fewer tokens.
                shape = [_MAX_TOKENS if size == n_tokens else size for size in tensor.shape]
                handle = new_tensor(context, tensor.type, shape[::-1])
            n_bytes += new.add_tensor(handle, name) + _PADDING_BYTES
        header = new.as_bytes()

    # 3. Write the file. `truncate` lengthens it with a hole, which takes no room on the disk.
    with output.open("wb") as stream:
        stream.write(header)
        stream.truncate(len(header) + n_bytes)


def _reduce_metadata(
    metadata: _NewMetadata,
    tensors: Sequence[GgufTensor],
    n_tokens: int,
) -> list[int]:
    """Change the metadata of a model to that of its skeleton.

    Args:
        metadata: The metadata, which is changed.
        tensors: The tensors of the model.
        n_tokens: The size of its vocabulary.

    Returns:
        The numbers of the model's layers that the skeleton keeps, ascending.
    """
    architecture = metadata.text("general.architecture")
    n_layers = metadata.number(f"{architecture}.block_count")
    n_mtp_layers = metadata.number(f"{architecture}.nextn_predict_layers")
    layers = _layers_to_keep(tensors, n_layers, n_mtp_layers)
    for key in metadata.names():
        if key not in _KEPT_KEYS and not key.startswith(f"{architecture}."):
            metadata.remove(key)
        elif metadata.length(key) == n_layers and len(layers) < n_layers:
            metadata.pick(key, layers)  # it has a value for each layer
    metadata.set_number(f"{architecture}.block_count", len(layers))
    metadata.set_text("tokenizer.ggml.model", "no_vocab")
    if n_tokens:
        metadata.set_number(f"{architecture}.vocab_size", min(n_tokens, _MAX_TOKENS))
    return layers


def _layers_to_keep(
    tensors: Iterable[GgufTensor],
    n_layers: int,
    n_mtp_layers: int,
) -> list[int]:
    """Return the layers of a skeleton: some of the first ones, and all MTP layers at the end.

    The first ones are those up to `_MAX_LAYERS` and `_MAX_BYTES`, or up to the last layer that has
    a tensor of a new kind. A kind is a name, a type and a shape.
    """
    n_trunk_layers = n_layers - n_mtp_layers
    tensors_by_layer: list[list[tuple[str, GgufTensor]]] = [[] for _ in range(n_trunk_layers)]
    for tensor in tensors:
        layer, name = _layer_and_name(tensor)
        if layer is not None and layer < n_trunk_layers:
            tensors_by_layer[layer].append((name, tensor))

    known_kinds: set[tuple[str, int, tuple[int, ...]]] = set()
    n_bytes = 0
    n_kept = 0
    for layer, layer_tensors in enumerate(tensors_by_layer):
        n_bytes += sum(tensor.n_bytes for _name, tensor in layer_tensors)
        kinds = {(name, tensor.type, tensor.shape) for name, tensor in layer_tensors}
        is_small = layer < _MAX_LAYERS and n_bytes <= _MAX_BYTES
        has_new_kind = not kinds <= known_kinds
        if is_small or has_new_kind:
            n_kept = layer + 1
        known_kinds |= kinds
    return [*range(n_kept), *range(n_trunk_layers, n_layers)]


def _layer_and_name(tensor: GgufTensor) -> tuple[int | None, str]:
    """Return the number of a tensor's layer (None outside of layers), and its name within it."""
    match = _TENSOR_OF_LAYER.fullmatch(tensor.name)
    if match is None:
        return None, tensor.name
    return int(match[1]), match[2]


class _NewMetadata(GgufMetadata):
    """Metadata that is not read from a file, and can be changed and written."""

    def __init__(self) -> None:
        self.handle = native.gguf_init_empty()
        self._tensors = ctypes.c_void_p()

    def copy(self, other: GgufMetadata) -> None:
        """Copy all values of other metadata."""
        native.gguf_set_kv(self.handle, other.handle)

    def remove(self, key: str) -> None:
        """Remove a value."""
        native.gguf_remove_key(self.handle, key.encode())

    def set_number(self, key: str, value: int) -> None:
        """Set a value to a number."""
        native.gguf_set_val_u32(self.handle, key.encode(), value)

    def set_text(self, key: str, value: str) -> None:
        """Set a value to a text."""
        native.gguf_set_val_str(self.handle, key.encode(), value.encode())

    def pick(self, key: str, indices: Iterable[int]) -> None:
        """Keep only some values of an array of numbers; an array of texts stays as it is."""
        type_number: int = self.get("gguf_get_arr_type", key)
        if type_number not in NUMBER_TYPES:
            return
        numbers = self.numbers(key)
        values = [numbers[index] for index in indices]
        data = bytes((NUMBER_TYPES[type_number] * len(values))(*values))
        native.gguf_set_arr_data(self.handle, key.encode(), type_number, data, len(values))

    def add_tensor(self, handle: int, name: str) -> int:
        """Add a tensor under a name, and return its size in bytes."""
        native.ggml_set_name(handle, name.encode())
        native.gguf_add_tensor(self.handle, handle)
        return int(native.ggml_nbytes(handle))

    def as_bytes(self) -> bytes:
        """Return the bytes with which a file of these metadata and tensors begins."""
        buffer = ctypes.create_string_buffer(native.gguf_get_meta_size(self.handle))
        native.gguf_get_meta_data(self.handle, buffer)
        return buffer.raw
