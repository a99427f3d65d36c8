"""GGUF files: their metadata, read by the functions of gguf.h, their MTP layers, and the check
before llama.cpp reads a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.errors import BackendError
from specgen.llama.library import forget_log, ggml
from specgen.system.files import parts_of

if TYPE_CHECKING:
    from typing_extensions import Self

#: Types of values in gguf.h.
_STRING, _ARRAY = 8, 9
#: The functions that read numbers of 32 bits, by the type.
_READERS: dict[int | None, tuple[str, Any]] = {
    4: ("gguf_get_val_u32", ctypes.c_uint32),
    5: ("gguf_get_val_i32", ctypes.c_int32),
    6: ("gguf_get_val_f32", ctypes.c_float),
}
#: A file's architecture is found in so many of its first bytes.
_N_SEARCHED = 4096


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file, without its data. It is valid as long as the metadata that it comes from."""

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
    """The metadata of a GGUF file, as a context manager. Raises `BackendError` if it is none."""

    def __init__(self, file: Path) -> None:
        read = ggml("gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, _InitParameters)
        self._tensors = ctypes.c_void_p()
        forget_log()
        tensors = ctypes.pointer(self._tensors)
        self.handle = read(os.fsencode(file), _InitParameters(True, tensors))
        if not self.handle:
            raise BackendError(f"{file}: not a GGUF file")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        ggml("gguf_free", None, ctypes.c_void_p)(self.handle)
        ggml("ggml_free", None, ctypes.c_void_p)(self._tensors)

    def find(self, key: str) -> int:
        find = ggml("gguf_find_key", ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p)
        return int(find(self.handle, key.encode()))

    def get(self, name: str, result: Any, key: str) -> Any:
        if (index := self.find(key)) < 0:
            return None
        return ggml(name, result, ctypes.c_void_p, ctypes.c_int64)(self.handle, index)

    def value(self, key: str) -> float | None:
        reader = _READERS.get(self.get("gguf_get_kv_type", ctypes.c_int, key))
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
        about = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t)
        text, index = ggml("gguf_get_arr_str", ctypes.c_char_p, *about), self.find(key)
        for number in range(self.length(key) or 0):
            yield text(self.handle, index, number) or b""

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


@contextlib.contextmanager
def opened_parts(file: Path) -> Iterator[tuple[GgufMetadata, list[GgufTensor]]]:
    with ExitStack() as resources:
        parts = [resources.enter_context(GgufMetadata(part)) for part in parts_of(file)]
        yield parts[0], [tensor for part in parts for tensor in part.tensors()]


def architecture_of(path: Path) -> str:
    """Return the architecture that a file names in its first bytes; empty if it names none or
    cannot be read.
    """
    with contextlib.suppress(OSError, struct.error), path.open("rb") as file:
        _, _, rest = file.read(_N_SEARCHED).partition(b"general.architecture")
        kind, length = struct.unpack_from("<IQ", rest)
        if kind == _STRING:
            return rest[12 : 12 + length].decode("utf-8", "replace")
    return ""
