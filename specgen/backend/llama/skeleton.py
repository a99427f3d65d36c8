"""Skeletons of model files: files of the same make that load quickly, to try what may end the process.

A skeleton has the metadata of its model, and tensors of the same names, types and shapes. But it has fewer layers,
fewer tokens without a text, and zeros for weights: holes of a sparse file, which take no room on a disk.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgen.backend.llama.ggml_graph import ggml, new_tensor, no_data
from specgen.backend.llama.library import forget_log
from specgen.errors import BackendError

#: A skeleton has this many layers, if they weigh no more than these bytes. Layers with tensors of the same kinds
#: may attend to different cells; such patterns repeat after at most 8 layers.
_N_LAYERS, _MOST_BYTES = 8, 2**27
#: It has no more tokens than this.
_N_TOKENS = 4096
#: Types of values in gguf.h, and the sizes in bytes of those that arrays may be cut to.
_UINT32, _INT32, _STRING, _ARRAY = 4, 5, 8, 9
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
#: The metadata that is kept besides that of the architecture.
_KEPT = ("general.architecture", "general.alignment")
_TOKENS = "tokenizer.ggml.tokens"
#: More than the alignment of tensors.
_PADDING = 4096
_OF_A_LAYER = re.compile(r"blk\.(\d+)\.(.*)")
_FIRST_PART = re.compile(r"-00001-of-(\d{5})\.gguf$")


def skeleton_of(file: Path) -> Skeleton | None:
    """Return the skeleton of a model file; None if it cannot be made. All parts of a split file are read."""
    with ExitStack() as resources:
        try:
            parts = [_Part(resources, part) for part in _parts(file)]
            return _skeleton(parts[0], [tensor for part in parts for tensor in part.tensors()])
        except BackendError:
            return None


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The skeleton of a model."""

    #: The file without its weights. Equal for models that differ in their weights and vocabularies only.
    metadata: bytes
    #: The size of the weights.
    n_bytes: int
    n_layers: int

    def write(self, file: Path) -> None:
        """Write the skeleton. Raise `OSError`."""
        with file.open("wb") as stream:
            stream.write(self.metadata)
            stream.truncate(len(self.metadata) + self.n_bytes)


@dataclass(frozen=True, slots=True)
class _Tensor:
    #: The native tensor, without data.
    handle: int
    name: str
    #: Its type and its shape, GGML's first dimension first.
    kind: tuple[int, ...]
    n_bytes: int

    @property
    def place(self) -> tuple[int | None, str]:
        """The number of its layer, if it is of one, and its name there."""
        found = _OF_A_LAYER.fullmatch(self.name)
        return (int(found[1]), found[2]) if found else (None, self.name)


class _InitParameters(ctypes.Structure):
    """gguf_init_params of gguf.h."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("tensors", ctypes.POINTER(ctypes.c_void_p)))


class _Part:
    """The metadata of a GGUF file, with functions of gguf.h as methods. Raises `BackendError`."""

    def __init__(self, resources: ExitStack, file: Path | None) -> None:
        if file is None:
            self.handle = ggml("gguf_init_empty", ctypes.c_void_p)()
        else:
            read = ggml("gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, _InitParameters)
            tensors = ctypes.c_void_p()
            forget_log()
            self.handle = read(os.fsencode(file), _InitParameters(True, ctypes.pointer(tensors)))
            if not self.handle:
                raise BackendError(f"{file}: not a GGUF file")
            self._tensors = tensors
            resources.callback(ggml("ggml_free", None, ctypes.c_void_p), tensors)
        resources.callback(ggml("gguf_free", None, ctypes.c_void_p), self.handle)

    def names(self) -> list[str]:
        name = ggml("gguf_get_key", ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64)
        count = ggml("gguf_get_n_kv", ctypes.c_int64, ctypes.c_void_p)(self.handle)
        return [name(self.handle, index).decode("utf-8", "replace") for index in range(count)]

    def get(self, name: str, result: Any, key: str) -> Any:
        """Return what a function of gguf.h says of a key's value; None if the key is missing."""
        find = ggml("gguf_find_key", ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p)
        index = find(self.handle, key.encode())
        if index < 0:
            return None
        return ggml(name, result, ctypes.c_void_p, ctypes.c_int64)(self.handle, index)

    def number(self, key: str) -> int:
        """Return a number; 0 if it is missing."""
        if self.get("gguf_get_kv_type", ctypes.c_int, key) not in (_UINT32, _INT32):
            return 0
        return int(self.get("gguf_get_val_u32", ctypes.c_uint32, key))

    def length(self, key: str) -> int | None:
        """Return the length of an array; None if the value is none."""
        if self.get("gguf_get_kv_type", ctypes.c_int, key) != _ARRAY:
            return None
        return int(self.get("gguf_get_arr_n", ctypes.c_size_t, key))

    def text(self, key: str) -> str:
        """Return a text; empty if it is missing."""
        if self.get("gguf_get_kv_type", ctypes.c_int, key) != _STRING:
            return ""
        value: bytes = self.get("gguf_get_val_str", ctypes.c_char_p, key)
        return value.decode("utf-8", "replace")

    def remove(self, key: str) -> None:
        remove = ggml("gguf_remove_key", ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p)
        remove(self.handle, key.encode())

    def set_number(self, key: str, value: int) -> None:
        write = ggml("gguf_set_val_u32", None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint32)
        write(self.handle, key.encode(), value)

    def set_text(self, key: str, value: str) -> None:
        write = ggml("gguf_set_val_str", None, ctypes.c_void_p, *2 * (ctypes.c_char_p,))
        write(self.handle, key.encode(), value.encode())

    def cut(self, key: str, kept: Sequence[int]) -> None:
        """Keep some values of an array of numbers."""
        kind: int = self.get("gguf_get_arr_type", ctypes.c_int, key)
        size = _VALUE_BYTES.get(kind)
        if size is None:  # texts
            return
        address: int = self.get("gguf_get_arr_data", ctypes.c_void_p, key)
        values = b"".join(ctypes.string_at(address + index * size, size) for index in kept)
        write = ggml(
            "gguf_set_arr_data",
            None,
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_size_t,
        )
        write(self.handle, key.encode(), kind, values, len(kept))

    def tensors(self) -> Iterator[_Tensor]:
        following = ggml("ggml_get_next_tensor", ctypes.c_void_p, *2 * (ctypes.c_void_p,))
        name = ggml("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
        n_bytes = ggml("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
        about = (ctypes.c_void_p, ctypes.c_int64)
        kind = ggml("gguf_get_tensor_type", ctypes.c_int, *about)
        shape = ggml("gguf_get_tensor_ne", ctypes.POINTER(ctypes.c_int64), *about)
        find = ggml("gguf_find_tensor", ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p)
        tensor = ggml("ggml_get_first_tensor", ctypes.c_void_p, ctypes.c_void_p)(self._tensors)
        while tensor:
            index = find(self.handle, name(tensor))
            described = (kind(self.handle, index), *shape(self.handle, index)[:4])
            yield _Tensor(
                tensor, name(tensor).decode("utf-8", "replace"), described, n_bytes(tensor)
            )
            tensor = following(self._tensors, tensor)


def _parts(file: Path) -> list[Path]:
    """Return the files of a model that is split into several, of which `file` is the first."""
    found = _FIRST_PART.search(file.name)
    if found is None:
        return [file]
    names = (f"-{part:05d}-of-{found[1]}.gguf" for part in range(1, int(found[1]) + 1))
    return [file.with_name(_FIRST_PART.sub(name, file.name)) for name in names]


def _skeleton(about: _Part, tensors: Sequence[_Tensor]) -> Skeleton | None:
    architecture = about.text("general.architecture")
    n_layers = about.number(f"{architecture}.block_count")
    n_last = about.number(f"{architecture}.nextn_predict_layers")
    kept = _kept_layers(tensors, n_layers, n_last)
    n_tokens = about.length(_TOKENS) or 0
    for key in about.names():
        if key not in _KEPT and not key.startswith(f"{architecture}."):
            about.remove(key)
        elif about.length(key) == n_layers and len(kept) < n_layers:
            about.cut(key, kept)
    about.set_number(f"{architecture}.block_count", len(kept))
    about.set_text("tokenizer.ggml.model", "no_vocab")
    if n_tokens:
        about.set_number(f"{architecture}.vocab_size", min(n_tokens, _N_TOKENS))

    with ExitStack() as resources:
        made = _Part(resources, None)
        shorter = resources.enter_context(no_data())
        ggml("gguf_set_kv", None, *2 * (ctypes.c_void_p,))(made.handle, about.handle)
        n_bytes_of = ggml("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
        add = ggml("gguf_add_tensor", None, *2 * (ctypes.c_void_p,))
        rename = ggml("ggml_set_name", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
        n_bytes = 0
        for tensor in tensors:
            layer, name = tensor.place
            handle = tensor.handle
            if layer is not None:
                if layer not in kept:
                    continue
                name = f"blk.{kept.index(layer)}.{name}"
            elif n_tokens > _N_TOKENS and n_tokens in tensor.kind[1:]:
                type_number, *shape = tensor.kind
                shape = [_N_TOKENS if size == n_tokens else size for size in shape]
                handle = new_tensor(shorter, type_number, shape[::-1])
            rename(handle, name.encode())
            add(made.handle, handle)
            n_bytes += n_bytes_of(handle) + _PADDING
        size = ggml("gguf_get_meta_size", ctypes.c_size_t, ctypes.c_void_p)(made.handle)
        metadata = ctypes.create_string_buffer(size)
        ggml("gguf_get_meta_data", None, *2 * (ctypes.c_void_p,))(made.handle, metadata)
        return Skeleton(metadata.raw, n_bytes, len(kept))


def _kept_layers(tensors: Sequence[_Tensor], n_layers: int, n_last: int) -> list[int]:
    """Return the layers of a skeleton: the first ones, as many as have tensors of all kinds that the model's
    layers have, and the last `n_last`, which predict more tokens (MTP)."""
    of_layers: list[list[_Tensor]] = [[] for _ in range(n_layers - n_last)]
    for tensor in tensors:
        layer = tensor.place[0]
        if layer is not None and layer < len(of_layers):
            of_layers[layer].append(tensor)
    kinds: set[tuple[str, tuple[int, ...]]] = set()
    n_first = n_bytes = 0
    for layer, found in enumerate(of_layers):
        n_bytes += sum(tensor.n_bytes for tensor in found)
        new = {(tensor.place[1], tensor.kind) for tensor in found} - kinds
        if new or (layer < _N_LAYERS and n_bytes <= _MOST_BYTES):
            n_first = layer + 1
        kinds |= new
    return [*range(n_first), *range(n_layers - n_last, n_layers)]


__all__ = ["Skeleton", "skeleton_of"]
