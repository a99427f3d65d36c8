"""The kinds of drafts that read hidden states, layers or the cache of their target."""

from __future__ import annotations

import contextlib
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from specgen.errors import BackendError
from specgen.llama.gguf_metadata import GgufMetadata
from specgen.llama.mtp_layers import holds_mtp_only

#: Architectures of GGUF files. DSpark drafts are of the architecture of DFlash.
TrainedKind: TypeAlias = Literal["eagle3", "dflash", "gemma4-assistant"]
DraftKind: TypeAlias = TrainedKind | Literal["mtp"]

_TRAINED: tuple[TrainedKind, ...] = get_args(TrainedKind)
#: A file's architecture is found in so many of its first bytes.
_N_SEARCHED = 4096


def draft_kind(path: Path) -> DraftKind | None:
    """Return of which of these kinds a file is; None if it is another draft, or cannot be read."""
    with contextlib.suppress(OSError, BackendError), ExitStack() as resources:
        with path.open("rb") as file:
            start = file.read(_N_SEARCHED)
        if any(kind.encode() in start for kind in _TRAINED):
            architecture = GgufMetadata(resources, path).text("general.architecture")
            return next((kind for kind in _TRAINED if kind == architecture), None)
    return "mtp" if holds_mtp_only(path) else None
