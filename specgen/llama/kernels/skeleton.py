"""Skeletons of model files: files of the same make that load quickly, to try kernels on.

A skeleton has its model's metadata and tensors, but fewer layers and fewer tokens, whose texts are
left out. Its weights are zeros, which are holes of a sparse file.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specgen.llama.gguf_file import GgufMetadata, GgufTensor, opened_parts
from specgen.llama.library import ggml
from specgen.llama.operators import new_tensor, no_data

#: A skeleton has at most this many layers, unless later ones have tensors of other kinds. Patterns
#: of layers repeat after at most 8.
_MOST_LAYERS = 8
#: It has at most this many bytes, unless later layers have tensors of other kinds.
_MOST_BYTES = 2**27
_MOST_TOKENS = 4096
#: The metadata that is kept, besides that of the architecture.
_KEPT_KEYS = ("general.architecture", "general.alignment")
#: More than the alignment of tensors.
_PADDING_BYTES = 4096
_TENSOR_OF_LAYER = re.compile(r"blk\.(\d+)\.(.*)")
#: The sizes in bytes of the values in arrays, by GGUF's numbers of their types. Texts have none.
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

_POINTER: Any = ctypes.c_void_p
_TEXT: Any = ctypes.c_char_p


def write_skeleton(file: Path, output: Path) -> None:
    """Write the skeleton of a model.

    Raises:
        BackendError: if the file is not a GGUF file.
        OSError: if the skeleton cannot be written.
    """
    with opened_parts(file) as (metadata, tensors), _NewMetadata() as new, no_data() as context:
        new.copy(metadata)
        n_tokens = new.length("tokenizer.ggml.tokens") or 0
        layers = _reduce_metadata(new, tensors, n_tokens)
        n_bytes = 0
        for tensor in tensors:
            handle = tensor.handle
            layer, name = _layer_and_name(tensor)
            if layer is not None:
                # Leave out the tensors of other layers; the kept layers are counted from 0.
                if layer not in layers:
                    continue
                name = f"blk.{layers.index(layer)}.{name}"
            elif n_tokens > _MOST_TOKENS and n_tokens in tensor.shape:
                # The embeddings and the output matrix have fewer tokens.
                shape = [_MOST_TOKENS if size == n_tokens else size for size in tensor.shape]
                handle = new_tensor(context, tensor.type, shape[::-1])
            n_bytes += new.add_tensor(handle, name) + _PADDING_BYTES
        header = new.as_bytes()
    with output.open("wb") as stream:
        stream.write(header)
        stream.truncate(len(header) + n_bytes)  # which lengthens the file, by a hole


def _reduce_metadata(
    metadata: _NewMetadata, tensors: Sequence[GgufTensor], n_tokens: int
) -> list[int]:
    """Change metadata to that of a skeleton, and return the model's layers that it keeps."""
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
        metadata.set_number(f"{architecture}.vocab_size", min(n_tokens, _MOST_TOKENS))
    return layers


def _layers_to_keep(tensors: Iterable[GgufTensor], n_layers: int, n_mtp_layers: int) -> list[int]:
    """Return the layers of a skeleton.

    They are the first ones, as many as have tensors of all kinds, and the MTP layers at the end.
    """
    n_trunk_layers = n_layers - n_mtp_layers
    tensors_of: list[list[tuple[str, GgufTensor]]] = [[] for _ in range(n_trunk_layers)]
    for tensor in tensors:
        layer, name = _layer_and_name(tensor)
        if layer is not None and layer < n_trunk_layers:
            tensors_of[layer].append((name, tensor))

    known_kinds: set[tuple[str, int, tuple[int, ...]]] = set()
    n_bytes = 0
    n_kept = 0
    for layer, of_layer in enumerate(tensors_of):
        n_bytes += sum(tensor.n_bytes for _name, tensor in of_layer)
        kinds = {(name, tensor.type, tensor.shape) for name, tensor in of_layer}
        is_small = layer < _MOST_LAYERS and n_bytes <= _MOST_BYTES
        if is_small or not kinds <= known_kinds:
            n_kept = layer + 1
        known_kinds |= kinds
    return [*range(n_kept), *range(n_trunk_layers, n_layers)]


def _layer_and_name(tensor: GgufTensor) -> tuple[int | None, str]:
    """Return a tensor's layer, None if it belongs to none, and its name within the layer."""
    match = _TENSOR_OF_LAYER.fullmatch(tensor.name)
    if match is None:
        return None, tensor.name
    return int(match[1]), match[2]


class _NewMetadata(GgufMetadata):
    """Metadata that is not read from a file, and can be changed and written."""

    def __init__(self) -> None:
        self.handle = ggml("gguf_init_empty", _POINTER)()
        self._tensors = ctypes.c_void_p()

    def copy(self, other: GgufMetadata) -> None:
        """Take over all values of other metadata."""
        ggml("gguf_set_kv", None, _POINTER, _POINTER)(self.handle, other.handle)

    def names(self) -> list[str]:
        """Return the keys of all values."""
        count = ggml("gguf_get_n_kv", ctypes.c_int64, _POINTER)(self.handle)
        get_key = ggml("gguf_get_key", _TEXT, _POINTER, ctypes.c_int64)
        return [get_key(self.handle, index).decode("utf-8", "replace") for index in range(count)]

    def remove(self, key: str) -> None:
        """Remove a value."""
        ggml("gguf_remove_key", ctypes.c_int64, _POINTER, _TEXT)(self.handle, key.encode())

    def set_number(self, key: str, value: int) -> None:
        """Set a value to a number."""
        set_u32 = ggml("gguf_set_val_u32", None, _POINTER, _TEXT, ctypes.c_uint32)
        set_u32(self.handle, key.encode(), value)

    def set_text(self, key: str, value: str) -> None:
        """Set a value to a text."""
        set_str = ggml("gguf_set_val_str", None, _POINTER, _TEXT, _TEXT)
        set_str(self.handle, key.encode(), value.encode())

    def pick(self, key: str, indices: Iterable[int]) -> None:
        """Keep some values of an array of numbers; arrays of texts stay as they are."""
        place = self.find(key)
        type_number = ggml("gguf_get_arr_type", ctypes.c_int, _POINTER, ctypes.c_int64)(
            self.handle, place
        )
        size = _VALUE_BYTES.get(type_number)
        if size is None:
            return
        get_data = ggml("gguf_get_arr_data", _POINTER, _POINTER, ctypes.c_int64)
        address: int = get_data(self.handle, place)
        values = [ctypes.string_at(address + index * size, size) for index in indices]
        set_data = ggml(
            "gguf_set_arr_data", None, _POINTER, _TEXT, ctypes.c_int, _TEXT, ctypes.c_size_t
        )
        set_data(self.handle, key.encode(), type_number, b"".join(values), len(values))

    def add_tensor(self, handle: int, name: str) -> int:
        """Add a tensor under a name, and return its size in bytes."""
        ggml("ggml_set_name", _POINTER, _POINTER, _TEXT)(handle, name.encode())
        ggml("gguf_add_tensor", None, _POINTER, _POINTER)(self.handle, handle)
        return int(ggml("ggml_nbytes", ctypes.c_size_t, _POINTER)(handle))

    def as_bytes(self) -> bytes:
        """Return the metadata as at the beginning of a file."""
        size = ggml("gguf_get_meta_size", ctypes.c_size_t, _POINTER)(self.handle)
        buffer = ctypes.create_string_buffer(size)
        ggml("gguf_get_meta_data", None, _POINTER, _POINTER)(self.handle, buffer)
        return buffer.raw
