"""Multi-token prediction (MTP) layers: which files have them, and which of them can draft.

They follow the last layer of a model and were trained with it. From a token and the model's hidden
state before it, they predict the next token (DeepSeek-V3, arXiv:2412.19437, section 2.2). GGUF
files call them NextN. Some publishers put them into a separate file (`mtp-*.gguf`), with copies of
the embeddings and the output matrix.
"""

from __future__ import annotations

import contextlib
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from specgen.errors import BackendError
from specgen.llama.gguf_file import opened_parts
from specgen.system.files import version_of
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


class _LayerInfo(NamedTuple):
    """A file's metadata about layers."""

    #: The architecture of the model.
    architecture: str
    #: The number of layers, including MTP layers.
    n_layers: int
    #: The number of MTP layers.
    n_mtp: int
    #: The size of a hidden state.
    n_embd: int
    #: The names of all tensors.
    tensors: frozenset[str]

    @property
    def has_mtp_tensors(self) -> bool:
        return any(".nextn." in name for name in self.tensors)

    @property
    def shape(self) -> tuple[str, int, int]:
        """Properties that a model and MTP layers for it share."""
        return self.architecture, self.n_embd, self.n_layers - self.n_mtp


def _layers_of(path: Path) -> _LayerInfo:
    """Return a file's metadata. Reading takes about 40 ms, so they are cached until it changes.

    Raises:
        OSError: If the file cannot be read.
        BackendError: If it is not a GGUF file.
    """
    return _read_layers(path, version_of(path))


@lru_cache(maxsize=8)
def _read_layers(path: Path, _version: tuple[int, int, int]) -> _LayerInfo:
    """Read a file's metadata; the version makes `lru_cache` forget those of a changed file."""
    with opened_parts(path) as (metadata, tensors):
        architecture = metadata.text("general.architecture")
        return _LayerInfo(
            architecture,
            n_layers=metadata.number(f"{architecture}.block_count"),
            n_mtp=metadata.number(f"{architecture}.nextn_predict_layers"),
            n_embd=metadata.number(f"{architecture}.embedding_length"),
            tensors=frozenset(tensor.name for tensor in tensors),
        )


def holds_mtp_only(path: Path) -> bool:
    """Return whether a file has MTP layers without their model; False if it cannot be read."""
    with contextlib.suppress(OSError, BackendError):
        with path.open("rb") as file:
            beginning = file.read(_N_SEARCHED_BYTES)
        if not path.name.startswith(_PREFIX) and _N_LAYERS_KEY not in beginning:
            return False  # the usual case, without reading all metadata
        layers = _layers_of(path)
        return layers.has_mtp_tensors and _FIRST_OF_MODEL not in layers.tensors
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
        target_shape = _layers_of(target).shape
    fitting_files: list[Path] = []
    for path in sorted(target.parent.glob(f"{_PREFIX}*.gguf")):
        is_candidate = path.name != target.name and holds_mtp_only(path)
        if is_candidate and _layers_of(path).shape == target_shape:
            fitting_files.append(path)

    def similarity(path: Path) -> int:
        return common_prefix_length(path.name.removeprefix(_PREFIX), target.name)

    return max(fitting_files, key=similarity, default=None)


def why_no_mtp(path: Path) -> str:
    """Return why a file's MTP layers cannot draft for the model in it; empty if they can."""
    try:
        layers = _layers_of(path)
    except (OSError, BackendError):
        return "it is not a GGUF file"
    architecture = layers.architecture
    if not layers.n_mtp:
        return "it has no MTP layers"
    if not layers.has_mtp_tensors:
        return "its MTP layers were removed from the file"
    if "token_embd.weight" not in layers.tensors:
        return "it has only MTP layers, and not the model that they belong to"
    if architecture not in _MTP_ARCHITECTURES:
        return f"llama.cpp does not compute the MTP layers of its architecture ({architecture})"
    if layers.n_mtp > 1 and architecture not in _SEVERAL_LAYERS:
        return (
            f"llama.cpp computes a single MTP layer of its architecture ({architecture}), "
            f"not {layers.n_mtp}"
        )
    return ""
