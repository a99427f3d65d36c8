"""A text in a file, with what a context computed of it, so that it need not be prefilled again.

The file holds a line of JSON, the tokens as int32, and llama.cpp's form of a sequence's state.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specgen.llama import LlamaBackend, build
from specgen.llama.kernels.attached import attached
from specgen.options import ContextOptions
from specgen.system.files import digest_of

_FORMAT = "specgen text 1"
#: The first bytes of every file.
MAGIC = json.dumps({"format": _FORMAT}).removesuffix("}").encode()
_LONGEST_HEADER = 4096
#: Bytes that are written at once.
CHUNK = 16 << 20


@dataclass(frozen=True, slots=True)
class CachedContext:
    """A context of the target, with a name for all that the states in it depend on."""

    backend: LlamaBackend
    #: Digest of the model, the code that computes, and the options: of all but the text.
    key: str

    @classmethod
    def of(cls, backend: LlamaBackend, options: ContextOptions) -> CachedContext:
        """Return a context with its key. The options are those that it was made with."""
        model = backend.model
        kernels = attached()
        about = [
            "target",
            [model.name, *model.versions],
            [
                model.kernels,
                kernels.digest if kernels is not None else "",
                build().llama_version,
            ],
            options.n_gpu_layers,
            [options.cache_type_k, options.cache_type_v, options.flash_attention],
        ]
        return cls(backend, digest_of(about)[:16])

    @property
    def goes_back(self) -> bool:
        """Whether it can drop any number of a text's last tokens."""
        return self.backend.rollback == "cells" and not self.backend.model.n_window


class RestoreResult(enum.Enum):
    """What became of a text that was to be loaded."""

    LOADED = enum.auto()
    #: llama.cpp does not accept the state.
    REFUSED = enum.auto()
    #: The file's checksum is wrong.
    DAMAGED = enum.auto()


@dataclass(frozen=True, slots=True)
class SavedText:
    """A text in a file; its state is read only when it is restored."""

    path: Path
    #: The key of the `CachedContext`.
    key: str
    #: int32[n_tokens]
    tokens: NDArray[np.int32]
    #: The seconds that it took to prefill a token; 0 if that is not known.
    token_s: float
    #: Where the tokens begin in the file.
    start: int
    #: The bytes of tokens and state, and their checksum.
    n_bytes: int
    crc32: int

    @classmethod
    def read(cls, path: Path) -> SavedText | None:
        """Return the text in a file; None if it holds none, or not all of it. Raise `OSError`."""
        with (
            path.open("rb") as file,
            contextlib.suppress(ValueError, KeyError, TypeError, AttributeError),
        ):
            header = json.loads(file.readline(_LONGEST_HEADER))
            if header.pop("format") != _FORMAT:
                return None
            n_tokens = header.pop("n_tokens")
            start = file.tell()
            tokens = np.frombuffer(file.read(4 * n_tokens), "<i4")
            saved = cls(path, **header, tokens=tokens, start=start)
            n_bytes = os.fstat(file.fileno()).st_size - start
            if len(tokens) == n_tokens and saved.n_bytes == n_bytes:
                return saved
        return None

    def n_shared(self, tokens: NDArray[np.int32]) -> int:
        """Return the length of the prefix that it has in common with another text."""
        n = min(len(self.tokens), len(tokens))
        differing = np.flatnonzero(self.tokens[:n] != tokens[:n])
        if not len(differing):
            return n
        return int(differing[0])

    def restore(self, backend: LlamaBackend, sequence: int) -> RestoreResult:
        """Let a sequence hold the text. Raise `OSError`."""
        data = np.memmap(self.path, np.uint8, "r", self.start, (self.n_bytes,))
        if zlib.crc32(data.data) != self.crc32:
            return RestoreResult.DAMAGED
        state = data[4 * len(self.tokens) :]
        if not backend.restore_text(sequence, self.tokens.tolist(), state):
            return RestoreResult.REFUSED
        return RestoreResult.LOADED


def _never() -> bool:
    return False


def write_text(
    path: Path,
    key: str,
    text: Sequence[int] | NDArray[np.int32],
    state: NDArray[np.uint8],
    token_s: float = 0.0,
    is_stopped: Callable[[], bool] = _never,
) -> bool:
    """Append a text to a file, in the form that `SavedText.read` reads. Raise `OSError`.

    Args:
        path: The file, which exists.
        key: The key of the `CachedContext` that computed the state.
        text: The tokens.
        state: uint8[n_bytes]: llama.cpp's form of the state.
        token_s: The seconds that it took to prefill a token; 0 if that is not known.
        is_stopped: Asked between pieces: whether to give up.

    Returns:
        Whether all of it was written.
    """
    tokens = np.array(text, "<i4").view(np.uint8)
    header = {
        "format": _FORMAT,
        "key": key,
        "n_tokens": len(text),
        "token_s": token_s,
        "n_bytes": len(tokens) + len(state),
        "crc32": zlib.crc32(state.data, zlib.crc32(tokens.data)),
    }
    with path.open("ab") as file:
        file.write(json.dumps(header).encode() + b"\n" + tokens.tobytes())
        for start in range(0, len(state), CHUNK):
            if is_stopped():
                return False
            file.write(state[start : start + CHUNK].data)
    return True
