"""Multi-token prediction (MTP) layers: which files have them, and which of them can draft.

They follow the last layer of a model and were trained with it. From a token and the model's hidden
state before it, they predict the next token (DeepSeek-V3, arXiv:2412.19437, section 2.2). GGUF
files call them NextN. Some publishers put them into a separate file (`mtp-*.gguf`), with copies of
the embeddings and the output matrix.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Literal

from specgen.errors import BackendError
from specgen.llama.model_description import ModelDescription, describe_model
from specgen.text.overlap import common_prefix_length

#: The architectures for which llama.cpp can compute MTP layers.
_MTP_ARCHITECTURES = frozenset(
    (
        *("bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa"),
        *("glm4moe", "hy_v3", "mimo2", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next"),
        "step35",
    )
)
#: The architectures for which it can compute several MTP layers, each of which drafts one token.
_SEVERAL_LAYERS = frozenset({"hy_v3", "mimo2", "step35"})
#: The prefix of the names of most files that have only MTP layers.
_PREFIX = "mtp-"
#: In files with other names, the key of the number of MTP layers is within this many bytes.
_N_SEARCHED_BYTES = 2**16
_N_LAYERS_KEY = b".nextn_predict_layers"
#: A tensor of every file that has the layers of the model itself.
_FIRST_OF_MODEL = "blk.0.attn_norm.weight"


def _has_mtp_tensors(model: ModelDescription) -> bool:
    return any(".nextn." in name for name in model.tensors)


def _shape(model: ModelDescription) -> tuple[str, int, int]:
    """Return properties that a model and MTP layers for it share."""
    n_own_layers = model.number("block_count") - model.number("nextn_predict_layers")
    return model.architecture, model.n_embd, n_own_layers


def holds_mtp_only(path: Path) -> bool:
    """Return whether a file has MTP layers without their model; False if it cannot be read."""
    with contextlib.suppress(OSError, BackendError):
        with path.open("rb") as file:
            beginning = file.read(_N_SEARCHED_BYTES)
        if not path.name.startswith(_PREFIX) and _N_LAYERS_KEY not in beginning:
            return False  # the usual case, without reading all metadata
        model = describe_model(path)
        return _has_mtp_tensors(model) and _FIRST_OF_MODEL not in model.tensors
    return False


def mtp_of(target: Path) -> Path | Literal["mtp"] | None:
    """Find MTP layers that can draft for a target.

    Returns:
        "mtp" if the target's file has usable MTP layers. Otherwise a file in the same folder with
        MTP layers for this model: of several, the one whose name shares the longest prefix with
        the target's. None if there is none.
    """
    if not why_no_mtp(target):
        return "mtp"
    target_shape = None
    with contextlib.suppress(OSError, BackendError):
        target_shape = _shape(describe_model(target))
    fitting_files: list[Path] = []
    for path in sorted(target.parent.glob(f"{_PREFIX}*.gguf")):
        is_candidate = path.name != target.name and holds_mtp_only(path)
        if is_candidate and _shape(describe_model(path)) == target_shape:
            fitting_files.append(path)

    def similarity(path: Path) -> int:
        return common_prefix_length(path.name.removeprefix(_PREFIX), target.name)

    return max(fitting_files, key=similarity, default=None)


def why_no_mtp(path: Path) -> str:
    """Return why a file's MTP layers cannot draft for the model in it; empty if they can."""
    try:
        model = describe_model(path)
    except (OSError, BackendError):
        return "it is not a GGUF file"
    architecture = model.architecture
    n_layers = model.number("nextn_predict_layers")
    if not n_layers:
        return "it has no MTP layers"
    if not _has_mtp_tensors(model):
        return "its MTP layers were removed from the file"
    if "token_embd.weight" not in model.tensors:
        return "it has only MTP layers, and not the model that they belong to"
    if architecture not in _MTP_ARCHITECTURES:
        return f"llama.cpp does not compute the MTP layers of its architecture ({architecture})"
    if n_layers > 1 and architecture not in _SEVERAL_LAYERS:
        return (
            f"llama.cpp computes a single MTP layer of its architecture ({architecture}), "
            f"not {n_layers}"
        )
    return ""
