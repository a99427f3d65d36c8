"""The models whose rows depend on their batch although specgen's kernels compute, and why.

The kernels compute every operator whose rows llama.cpp's own code rounds differently in a batch, but for
those named here. `unequal_rows.find_unequal_operator` finds such an operator by measurement.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path

from specgen.backend.llama.file_check import InitParameters
from specgen.backend.llama.library import forget_log, ggml_function

#: By architecture.
_ARCHITECTURES = {
    "minimax-01": "llama.cpp computes its lightning attention in blocks as long as the batch "
    "(SCALE of q_decay_exp)",
    "chameleon": "llama.cpp excludes the tokens of images only in the first row of a batch "
    "(SET of result_output)",
}
#: Types without a packed form that llama.cpp multiplies otherwise from 8 rows on, by GGML's number.
_TILED_TYPES = {
    16: "iq2_xxs",
    17: "iq2_xs",
    18: "iq3_xxs",
    19: "iq1_s",
    21: "iq3_s",
    22: "iq2_s",
    29: "iq1_m",
}
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")


def row_exception(path: Path, architecture: str) -> str:
    """Return why rows of a model depend on their batch, with the operator; empty if they do not."""
    if architecture in _ARCHITECTURES:
        return _ARCHITECTURES[architecture]
    types = {kind for part in _parts(path) for name, kind in _tensors(part) if _is_multiplied(name)}
    tiled = sorted(_TILED_TYPES[kind] for kind in types & set(_TILED_TYPES))
    if not tiled:
        return ""
    return (
        f"llama.cpp adds up products of {' and '.join(tiled)} weights in another order for 8 and more "
        "rows (MUL_MAT)"
    )


def _is_multiplied(name: str) -> bool:
    """Whether a tensor is a matrix of a product. (Rows of the embeddings are only copied.)"""
    return "token_embd" not in name


def _parts(path: Path) -> list[Path]:
    """Return the files of a model: its shards, or the one file."""
    shard = _SHARD.fullmatch(path.name)
    if shard is None:
        return [path]
    name = re.compile(re.escape(shard["stem"]) + rf"-\d{{5}}-of-{shard['count']}\.gguf")
    return sorted(part for part in path.parent.iterdir() if name.fullmatch(part.name))


def _tensors(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the name and GGML's number of the type of each tensor; none if llama.cpp cannot read the file."""
    pointer, index = ctypes.c_void_p, ctypes.c_int64
    read = ggml_function("gguf_init_from_file", pointer, ctypes.c_char_p, InitParameters)
    count = ggml_function("gguf_get_n_tensors", ctypes.c_int64, pointer)
    name = ggml_function("gguf_get_tensor_name", ctypes.c_char_p, pointer, index)
    kind = ggml_function("gguf_get_tensor_type", ctypes.c_int, pointer, index)
    forget_log()
    metadata = read(os.fsencode(path), InitParameters(no_alloc=True, context=None))
    if not metadata:
        return
    try:
        for i in range(count(metadata)):
            yield (name(metadata, i) or b"").decode("utf-8", "replace"), kind(metadata, i)
    finally:
        ggml_function("gguf_free", None, pointer)(metadata)


__all__ = ["row_exception"]
