"""MTP layers."""

from __future__ import annotations

import contextlib
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Literal, NamedTuple

from specgen.errors import BackendError
from specgen.llama.gguf_file import opened_parts
from specgen.system.files import version_of

# They stand behind the last layer of a model, and were trained with it: from a token and the
# model's hidden state before it they predict the next one (DeepSeek-V3, arXiv:2412.19437, section
# 2.2). GGUF files call them NextN; some makers put them into a file of their own (`mtp-*.gguf`),
# with copies of the embeddings and the output matrix.

#: The architectures whose MTP layers llama.cpp computes.
_MTP_ARCHITECTURES = frozenset(
    (
        *("bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa"),
        *("glm4moe", "hy_v3", "mimo2", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next"),
        "step35",
    )
)
#: Those with more than one MTP layer: each drafts one token.
_SEVERAL_LAYERS = frozenset({"hy_v3", "mimo2", "step35"})
#: How files of MTP layers alone are named.
_PREFIX = "mtp-"
#: In other files the key of their number stands in so many of the first bytes.
_N_MTP_SEARCHED = 2**16
_N_LAYERS_KEY = b".nextn_predict_layers"
_FIRST_OF_TRUNK = "blk.0.attn_norm.weight"


def holds_mtp_only(path: Path) -> bool:
    """Return whether a file holds MTP layers for another file's model; False if it cannot be read."""
    with contextlib.suppress(OSError, BackendError):
        with path.open("rb") as file:
            begin = file.read(_N_MTP_SEARCHED)
        if not path.name.startswith(_PREFIX) and _N_LAYERS_KEY not in begin:
            return False
        names = _layers_of(path).tensors
        return _FIRST_OF_TRUNK not in names and any(".nextn." in name for name in names)
    return False


def mtp_of(target: Path) -> Path | Literal["mtp"] | None:
    """Return "mtp" if the target's own MTP layers draft, else the file beside it that fits, and is
    named most alike.
    """
    if not why_no_mtp(target):
        return "mtp"
    files = sorted(
        path for path in target.parent.glob(f"{_PREFIX}*.gguf") if path.name != target.name
    )
    shape = None
    with contextlib.suppress(OSError, BackendError):
        shape = _layers_of(target).shape
    fitting = [path for path in files if holds_mtp_only(path) and _layers_of(path).shape == shape]

    def likeness(path: Path) -> int:
        pairs = zip(path.name.removeprefix(_PREFIX), target.name, strict=False)
        return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))

    return max(fitting, key=likeness, default=None)


class _Layers(NamedTuple):
    """What a file's metadata say of its layers, and the names of its tensors."""

    architecture: str
    n_layers: int
    n_mtp: int
    n_embd: int
    tensors: frozenset[str]

    @property
    def shape(self) -> tuple[str, int, int]:
        return self.architecture, self.n_embd, self.n_layers - self.n_mtp


def _layers_of(path: Path) -> _Layers:
    """Read a file's metadata, once while it is the same (some 40 ms). Raise `OSError` or
    `BackendError`.
    """
    return _read_layers(path, version_of(path))


@lru_cache(maxsize=8)
def _read_layers(path: Path, _version: tuple[int, int, int]) -> _Layers:
    with opened_parts(path) as (about, tensors):
        architecture = about.text("general.architecture")
        n_layers, n_mtp, n_embd = (
            about.number(f"{architecture}.{key}")
            for key in ("block_count", "nextn_predict_layers", "embedding_length")
        )
        names = frozenset(tensor.name for tensor in tensors)
        return _Layers(architecture, n_layers, n_mtp, n_embd, names)


def why_no_mtp(path: Path) -> str:
    try:
        architecture, _, n_mtp, _, names = _layers_of(path)
    except (OSError, BackendError):
        return "it is not a GGUF file"
    if not n_mtp:
        return "it has no MTP layers"
    if not any(".nextn." in name for name in names):
        return "its MTP layers were removed from the file"
    if "token_embd.weight" not in names:
        return "it has only MTP layers, and not the model that they belong to"
    if architecture not in _MTP_ARCHITECTURES:
        return f"llama.cpp does not compute the MTP layers of its architecture ({architecture})"
    if n_mtp > 1 and architecture not in _SEVERAL_LAYERS:
        return f"llama.cpp computes a single MTP layer of its architecture ({architecture}), not {n_mtp}"
    return ""
