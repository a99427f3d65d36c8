"""What the benchmarks that write model files share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from numpy.typing import NDArray

#: A tensor as it is stored in a file: the bytes or numbers of its rows, and GGML's type if they are
#: bytes.
Stored: TypeAlias = tuple[NDArray[Any], GGMLQuantizationType | None]


def copy_metadata(
    reader: GGUFReader,
    writer: GGUFWriter,
    *,
    without: str | None = None,
    changed: Mapping[str, Any] | None = None,
) -> None:
    """Copy a file's metadata, except for its architecture.

    Args:
        reader: The file to copy from.
        writer: The file to copy to.
        without: The beginning of keys that are left out.
        changed: New values of some keys.
    """
    for key, field in reader.fields.items():
        is_left_out = without is not None and key.startswith(without)
        if is_left_out or key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        value = (changed or {}).get(key, field.contents())
        sub_type = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, kind, sub_type=sub_type)


def write_file(writer: GGUFWriter, tensors: Mapping[str, Stored]) -> None:
    """Write the metadata that were added to `writer`, and the tensors; close the file."""
    for name, (data, ggml_type) in tensors.items():
        writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes, raw_dtype=ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for data, _ in tensors.values():
        writer.write_tensor_data(np.ascontiguousarray(data))
    writer.close()
