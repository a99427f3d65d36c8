"""Checks whether blocks can be left out of a target, and writes files without them."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from specgen.errors import MemoryLimitError, ModelFileError, OutputError
from specgen.llama import LlamaModel, requantize
from specgen.models.files import model_parts
from specgen.system.atomic_files import new_beside
from specgen.system.json_lines import write_errors

#: Architectures whose blocks are all alike. In others a block's number decides what it computes (which
#: tokens it sees, how positions are rotated, whether it has experts), so that the blocks after one that is
#: left out would change.
ARCHITECTURES = ("llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "starcoder2")
#: Metadata that makes blocks differ in these architectures, too.
_DIFFERENCES = ("leading_dense_block_count", "nextn_predict_layers", "interleave_moe_layer_step")
#: Metadata that is one number if all blocks have the same value, and a list otherwise.
_MAYBE_LISTS = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
#: A model with fewer blocks is not pruned.
_LEAST_BLOCKS = 4
#: Bytes of a number in a Q4_0 matrix, and in a vector.
_MATRIX_BYTES, _VECTOR_BYTES = 18 / 32, 4
#: Memory that decoding takes in addition to the weights; the same is kept free on the disk.
_CONTEXT_BYTES = 200 * 2**20


def check_prunable(model: LlamaModel) -> None:
    """Raise `ModelFileError` if blocks of a model cannot be left out."""
    architecture = model.metadata("general.architecture") or "unknown"
    own = f"a model of the architecture {architecture!r}"
    reason = None
    if model.has_recurrent_state:
        reason = "it has a recurrent state"
    elif architecture not in ARCHITECTURES:
        reason = f"{own} may have blocks that differ by their place"
    elif model.n_window:
        reason = "some of its blocks may have a sliding window"
    elif model.n_layer < _LEAST_BLOCKS:
        reason = f"it has {model.n_layer} blocks only"
    else:
        for key in _DIFFERENCES:
            if model.metadata(f"{architecture}.{key}") not in (None, "0", "1"):
                reason = f"its blocks differ by their place ({architecture}.{key})"
        for key in _MAYBE_LISTS:
            if (model.metadata(f"{architecture}.{key}") or "").startswith("["):
                reason = f"its blocks differ ({architecture}.{key})"
    if reason is not None:
        raise ModelFileError(
            f"{model.name}: no blocks can be left out: {reason}",
            hint="make another draft: --kind heads, or --kind distilled",
        )


def pruned_bytes(target: Path, left_out: Collection[int] = ()) -> int:
    """Return the approximate size of a Q4_0 file without some blocks."""
    return sum(_bytes_in_q4_0(target, left_out).values())


def bytes_a_token(target: Path, left_out: Collection[int] = ()) -> int:
    """Return the approximate bytes of that file that decoding a token loads: all, except the embeddings if
    the output matrix is a separate tensor."""
    found = _bytes_in_q4_0(target, left_out)
    if "output.weight" in found:
        found.pop("token_embd.weight", None)
    return sum(found.values())


def _bytes_in_q4_0(target: Path, left_out: Collection[int]) -> dict[str, int]:
    from gguf import GGUFReader

    found: dict[str, int] = {}
    for part in model_parts(target):
        for tensor in GGUFReader(part).tensors:
            block = tensor.name.split(".")[1] if tensor.name.startswith("blk.") else ""
            if block.isdecimal() and int(block) in left_out:
                continue
            is_matrix = sum(int(n) > 1 for n in tensor.shape) > 1
            size = _MATRIX_BYTES if is_matrix else _VECTOR_BYTES
            found[tensor.name] = int(int(tensor.n_elements) * size)
    return found


def check_space(target: Path, folder: Path) -> None:
    """Raise `OutputError` if the disk has no room for a Q4_0 copy of the target, and `MemoryLimitError` if
    the memory has none in addition to what is loaded."""
    import psutil

    needed = pruned_bytes(target) + _CONTEXT_BYTES
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutputError(
            f"{folder}: a draft cut from the target takes up to {needed / 2**30:.1f} GiB, "
            f"{free / 2**30:.1f} GiB are free",
            hint="make room on the disk, or name another cache folder in SPECGEN_CACHE",
        )
    available = psutil.virtual_memory().available
    if available < needed:
        raise MemoryLimitError(
            f"a draft cut from the target takes up to {needed / 2**30:.1f} GiB of memory beside it, "
            f"{available / 2**30:.1f} GiB are free",
            hint="close other programs, or make decoder heads: --kind heads",
        )


def write_pruned(target: Path, left_out: Collection[int], output: Path, n_threads: int) -> None:
    """Write a copy of the target in Q4_0 without some blocks. Raise `BackendError`, `OutputError`."""
    with write_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        with new_beside(output) as new:
            requantize(target, new, n_threads, left_out=left_out)
            new.replace(output)
