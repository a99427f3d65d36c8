"""Read the metadata of a model file by the functions of gguf.h, and change a copy in memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgen.errors import BackendError
from specgen.llama.library import forget_log, ggml

#: Types of values in gguf.h, and the sizes in bytes of those that arrays may be cut to.
_UINT32, _INT32, _FLOAT32, _STRING, _ARRAY = 4, 5, 6, 8, 9
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_FIRST_PART = re.compile(r"-00001-of-(\d{5})\.gguf$")


def parts_of(file: Path) -> list[Path]:
    """Return the files of a model that is split into several, of which `file` is the first."""
    found = _FIRST_PART.search(file.name)
    if found is None:
        return [file]
    names = (f"-{part:05d}-of-{found[1]}.gguf" for part in range(1, int(found[1]) + 1))
    return [file.with_name(_FIRST_PART.sub(name, file.name)) for name in names]


#: A file's architecture is found in so many of its first bytes.
_N_SEARCHED = 4096


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file, without its data."""

    #: The native tensor. Valid as long as the metadata that it comes from.
    handle: int
    name: str
    #: GGML's number of its type, and its shape, GGML's first dimension first.
    type: int
    shape: tuple[int, ...]
    n_bytes: int


class _InitParameters(ctypes.Structure):
    """gguf_init_params of gguf.h."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("tensors", ctypes.POINTER(ctypes.c_void_p)))


class GgufMetadata:
    """The metadata of a GGUF file, with functions of gguf.h as methods; without a file, empty metadata. Raises
    `BackendError` if the file is none. `resources` frees the memory when it is closed."""

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
        find = ggml("gguf_find_key", ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p)
        index = find(self.handle, key.encode())
        if index < 0:
            return None
        return ggml(name, result, ctypes.c_void_p, ctypes.c_int64)(self.handle, index)

    def value(self, key: str) -> float | None:
        """Return a number of 32 bits; None if the key is missing or has another value."""
        readers: dict[int | None, tuple[str, Any]] = {
            _UINT32: ("gguf_get_val_u32", ctypes.c_uint32),
            _INT32: ("gguf_get_val_i32", ctypes.c_int32),
            _FLOAT32: ("gguf_get_val_f32", ctypes.c_float),
        }
        reader = readers.get(self.get("gguf_get_kv_type", ctypes.c_int, key))
        return None if reader is None else float(self.get(*reader, key))

    def number(self, key: str) -> int:
        return int(self.value(key) or 0)

    def length(self, key: str) -> int | None:
        if self.get("gguf_get_kv_type", ctypes.c_int, key) != _ARRAY:
            return None
        return int(self.get("gguf_get_arr_n", ctypes.c_size_t, key))

    def array(self, key: str, of: type[ctypes.c_bool | ctypes.c_int32]) -> list[int]:
        n = self.length(key) or 0
        data = self.get("gguf_get_arr_data", ctypes.c_void_p, key) if n else None
        return list((of * n).from_address(data)) if data else []

    def text(self, key: str) -> str:
        if self.get("gguf_get_kv_type", ctypes.c_int, key) != _STRING:
            return ""
        value: bytes = self.get("gguf_get_val_str", ctypes.c_char_p, key) or b""
        return value.decode("utf-8", "replace")

    def texts(self, key: str) -> Iterator[bytes]:
        if self.length(key) is None or self.get("gguf_get_arr_type", ctypes.c_int, key) != _STRING:
            return
        find = ggml("gguf_find_key", ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p)
        about = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t)
        text = ggml("gguf_get_arr_str", ctypes.c_char_p, *about)
        index = find(self.handle, key.encode())
        for number in range(self.length(key) or 0):
            yield text(self.handle, index, number) or b""

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
        types = (ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p)
        write = ggml("gguf_set_arr_data", None, ctypes.c_void_p, *types, ctypes.c_size_t)
        write(self.handle, key.encode(), kind, values, len(kept))

    def tensors(self) -> Iterator[GgufTensor]:
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
            yield GgufTensor(
                tensor,
                name(tensor).decode("utf-8", "replace"),
                kind(self.handle, index),
                tuple(shape(self.handle, index)[:4]),
                n_bytes(tensor),
            )
            tensor = following(self._tensors, tensor)


def architecture_of(path: Path) -> str:
    """Return the architecture that a file names in its first bytes, where converters write it; empty if it names none or
    cannot be read."""
    with contextlib.suppress(OSError, struct.error), path.open("rb") as file:
        _, _, rest = file.read(_N_SEARCHED).partition(b"general.architecture")
        kind, length = struct.unpack_from("<IQ", rest)
        if kind == _STRING:
            return rest[12 : 12 + length].decode("utf-8", "replace")
    return ""
