"""The models whose rows depend on their batch although specgen's kernels compute, and why.

The kernels compute every operator whose rows llama.cpp's own code rounds differently in a batch, but for
those named here. `unequal_rows.find_unequal_operator` finds such an operator by measurement.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from specgen.backend.llama.gguf_metadata import GgufMetadata, parts_of
from specgen.errors import BackendError

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


def row_exception(path: Path, architecture: str) -> str:
    """Return why rows of a model depend on their batch, with the operator; empty if they do not."""
    if architecture in _ARCHITECTURES:
        return _ARCHITECTURES[architecture]
    tiled = sorted(_TILED_TYPES[kind] for kind in _multiplied_types(path) & set(_TILED_TYPES))
    if not tiled:
        return ""
    return (
        f"llama.cpp adds up products of {' and '.join(tiled)} weights in another order for 8 and more "
        "rows (MUL_MAT)"
    )


def _multiplied_types(path: Path) -> set[int]:
    """Return the types of the matrices of a model's products; none if a file cannot be read. (Rows of the
    embeddings are only copied.)"""
    with ExitStack() as resources:
        try:
            parts = [GgufMetadata(resources, part) for part in parts_of(path)]
        except BackendError:
            return set()
        tensors = [tensor for part in parts for tensor in part.tensors()]
        return {tensor.type for tensor in tensors if "token_embd" not in tensor.name}


__all__ = ["row_exception"]
