"""GGUF files: their metadata and tensors, read with the functions of gguf.h."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.errors import BackendError
from specgen.llama.ggml_signatures import GgufInitParams
from specgen.llama.library import forget_log, native
from specgen.models.files import parts_of

if TYPE_CHECKING:
    from typing_extensions import Self

#: Types of values in gguf.h.
_STRING = 8
_ARRAY = 9
#: The functions of gguf.h that read numbers of 16 and 32 bits, by the number of their type.
_NUMBER_READERS: dict[int | None, str] = {
    2: "gguf_get_val_u16",
    4: "gguf_get_val_u32",
    5: "gguf_get_val_i32",
    6: "gguf_get_val_f32",
}
#: The functions of gguf.h that read any single value that is not a text, by the number of its type.
_VALUE_READERS: dict[int | None, str] = {
    0: "gguf_get_val_u8",
    1: "gguf_get_val_i8",
    3: "gguf_get_val_i16",
    **_NUMBER_READERS,
    7: "gguf_get_val_bool",
    10: "gguf_get_val_u64",
    11: "gguf_get_val_i64",
    12: "gguf_get_val_f64",
}
#: The C types of the numbers in arrays, by the number of their type in gguf.h.
NUMBER_TYPES: dict[int, Any] = {
    0: ctypes.c_uint8,
    1: ctypes.c_int8,
    2: ctypes.c_uint16,
    3: ctypes.c_int16,
    4: ctypes.c_uint32,
    5: ctypes.c_int32,
    6: ctypes.c_float,
    7: ctypes.c_bool,
    10: ctypes.c_uint64,
    11: ctypes.c_int64,
    12: ctypes.c_double,
}
#: `architecture_of` searches this many bytes at the beginning of a file.
_N_SEARCHED_BYTES = 4096


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file, without its data. It is valid as long as its `GgufMetadata` is open."""

    #: GGML's pointer to it.
    handle: int
    #: Its name, such as ``blk.0.attn_q.weight``.
    name: str
    #: GGML's number for its type.
    type: int
    #: Four dimensions in GGML's order: the length of rows comes first.
    shape: tuple[int, ...]
    #: The size of its data.
    n_bytes: int


class GgufMetadata:
    """The metadata of a GGUF file, as a context manager."""

    def __init__(self, file: Path) -> None:
        """Read a file's metadata; raise `BackendError` if it is not a GGUF file."""
        self._tensors = ctypes.c_void_p()
        forget_log()
        params = GgufInitParams(no_alloc=True, tensors=ctypes.pointer(self._tensors))
        self.handle = native.gguf_init_from_file(os.fsencode(file), params)
        if not self.handle:
            raise BackendError(f"{file}: not a GGUF file")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        native.gguf_free(self.handle)
        native.ggml_free(self._tensors)

    def find(self, key: str) -> int:
        """Return the index of a key; negative if the file does not have it."""
        return int(native.gguf_find_key(self.handle, key.encode()))

    def get(self, function: str, key: str) -> Any:
        """Return what a function of gguf.h returns for a key; None if the file does not have it."""
        index = self.find(key)
        if index < 0:
            return None
        return getattr(native, function)(self.handle, index)

    def value(self, key: str) -> float | None:
        """Return a number; None if the file does not have it, or has a value of another type."""
        reader = _NUMBER_READERS.get(self.get("gguf_get_kv_type", key))
        if reader is None:
            return None
        return float(self.get(reader, key))

    def number(self, key: str) -> int:
        """Return a whole number; 0 if the file does not have it."""
        return int(self.value(key) or 0)

    def length(self, key: str) -> int | None:
        """Return the length of an array; None if the file does not have it."""
        if self.get("gguf_get_kv_type", key) != _ARRAY:
            return None
        return int(self.get("gguf_get_arr_n", key))

    def numbers(self, key: str) -> list[Any]:
        """Return an array of numbers or booleans; empty if the file does not have it."""
        n = self.length(key)
        if not n:
            return []
        number_type = NUMBER_TYPES.get(self.get("gguf_get_arr_type", key))
        if number_type is None:
            return []
        return list((number_type * n).from_address(self.get("gguf_get_arr_data", key)))

    def text(self, key: str) -> str:
        """Return a text; empty if the file does not have it."""
        if self.get("gguf_get_kv_type", key) != _STRING:
            return ""
        value: bytes = self.get("gguf_get_val_str", key) or b""
        return value.decode("utf-8", "replace")

    def names(self) -> list[str]:
        """Return the keys of all values."""
        keys = [
            native.gguf_get_key(self.handle, index)
            for index in range(native.gguf_get_n_kv(self.handle))
        ]
        return [key.decode("utf-8", "replace") for key in keys]

    def single_values(self) -> dict[str, Any]:
        """Return all values but lists, by key: texts, booleans, and numbers that are finite."""
        values: dict[str, Any] = {}
        for key in self.names():
            value_type = self.get("gguf_get_kv_type", key)
            if value_type == _STRING:
                values[key] = self.text(key)
            elif value_type in _VALUE_READERS:
                value = self.get(_VALUE_READERS[value_type], key)
                if math.isfinite(value):
                    values[key] = value
        return values

    def texts(self, key: str) -> Iterator[bytes]:
        """Yield the texts of an array; none if the file does not have it."""
        n = self.length(key)
        if n is None or self.get("gguf_get_arr_type", key) != _STRING:
            return
        index = self.find(key)
        get_text = native.gguf_get_arr_str
        for number in range(n):
            yield get_text(self.handle, index, number) or b""

    @property
    def n_tensors(self) -> int:
        """The number of tensors."""
        return int(native.gguf_get_n_tensors(self.handle))

    @property
    def end_of_tensors(self) -> int:
        """The size that the file needs to have all of its tensors, in bytes."""
        end = int(native.gguf_get_data_offset(self.handle))
        start = end
        for index in range(self.n_tensors):
            offset = int(native.gguf_get_tensor_offset(self.handle, index))
            size = int(native.gguf_get_tensor_size(self.handle, index))
            end = max(end, start + offset + size)
        return end if self.n_tensors else 0

    def tensors(self) -> Iterator[GgufTensor]:
        """Yield the tensors of the file."""
        tensor = native.ggml_get_first_tensor(self._tensors)
        while tensor:
            name = native.ggml_get_name(tensor)
            index = native.gguf_find_tensor(self.handle, name)
            yield GgufTensor(
                handle=tensor,
                name=name.decode("utf-8", "replace"),
                type=native.gguf_get_tensor_type(self.handle, index),
                shape=tuple(native.gguf_get_tensor_ne(self.handle, index)[:4]),
                n_bytes=native.ggml_nbytes(tensor),
            )
            tensor = native.ggml_get_next_tensor(self._tensors, tensor)


@contextlib.contextmanager
def opened_parts(file: Path) -> Iterator[tuple[GgufMetadata, list[GgufTensor]]]:
    """Open all files of a model; yield the metadata of the first one, and the tensors of all.

    Raises:
        BackendError: If one is not a GGUF file.
    """
    with ExitStack() as resources:
        parts = [resources.enter_context(GgufMetadata(part)) for part in parts_of(file)]
        yield parts[0], [tensor for part in parts for tensor in part.tensors()]


def architecture_of(path: Path) -> str:
    """Return the architecture that a file names near its beginning, without parsing the file.

    It is empty if the file names none, or cannot be read.
    """
    with contextlib.suppress(OSError, struct.error), path.open("rb") as file:
        _, _, value = file.read(_N_SEARCHED_BYTES).partition(b"general.architecture")
        # After the key come the type (uint32), the length (uint64), and the text itself.
        type_number, length = struct.unpack_from("<IQ", value)
        if type_number == _STRING:
            start = struct.calcsize("<IQ")
            return value[start : start + length].decode("utf-8", "replace")
    return ""
