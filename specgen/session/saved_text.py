"""A text in a file, with the state that a context computed for it, to avoid prefilling it again.

The file has a header (a line of JSON), the tokens as int32, and the state of a sequence in
llama.cpp's format.
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
from specgen.method.drafter import never
from specgen.options import ContextOptions
from specgen.system.files import digest_of

_FORMAT = "specgen text 1"
#: The first bytes of every file.
MAGIC = json.dumps({"format": _FORMAT}).removesuffix("}").encode()
#: A header is a line of at most this many bytes.
_MAX_HEADER_BYTES = 4096
#: The number of bytes that are written at once.
CHUNK = 16 << 20


@dataclass(frozen=True, slots=True)
class CachedContext:
    """A context of the target, with a key for everything that its states depend on."""

    #: The context.
    backend: LlamaBackend
    #: A digest of everything but the text that affects a state: the model, the kernels, options. A
    #: saved state can be loaded only by a context with the same key.
    key: str

    @classmethod
    def of(
        cls,
        backend: LlamaBackend,
        options: ContextOptions,
    ) -> CachedContext:
        """Return a context with its key.

        Args:
            backend: The context.
            options: The options that it was made with.
        """
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
        """Whether the context can drop any number of tokens from the end of a text."""
        return self.backend.rollback == "cells" and not self.backend.model.n_window


class RestoreResult(enum.Enum):
    """The outcome of loading a saved text."""

    #: The sequence now holds the text.
    LOADED = enum.auto()
    #: llama.cpp does not accept the state.
    REFUSED = enum.auto()
    #: The checksum of the file is wrong.
    DAMAGED = enum.auto()


@dataclass(frozen=True, slots=True)
class SavedText:
    """A text in a file; its state is read only when it is restored."""

    #: The file.
    path: Path
    #: The key of the `CachedContext`.
    key: str
    #: The text: int32[n_tokens].
    tokens: NDArray[np.int32]
    #: Seconds per token of its prefill; 0 if unknown.
    token_s: float
    #: The position in the file, in bytes, where the tokens begin; the state follows them.
    start: int
    #: The size of the tokens and the state in bytes.
    n_bytes: int
    #: The checksum of the tokens and the state.
    crc32: int

    @classmethod
    def read(cls, path: Path) -> SavedText | None:
        """Read the header and the tokens of a file.

        Returns:
            The text; None if the file is of another kind or version, damaged, or incomplete.

        Raises:
            OSError: If the file cannot be read.
        """
        with (
            path.open("rb") as file,
            # Any of these means that the header is not one of ours.
            contextlib.suppress(ValueError, KeyError, TypeError, AttributeError),
        ):
            header = json.loads(file.readline(_MAX_HEADER_BYTES))
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
        """Return the length of the longest common prefix with another text, in tokens."""
        n = min(len(self.tokens), len(tokens))
        differing = np.flatnonzero(self.tokens[:n] != tokens[:n])
        if not len(differing):
            return n
        return int(differing[0])

    def restore(
        self,
        backend: LlamaBackend,
        sequence: int,
    ) -> RestoreResult:
        """Replace the text of a sequence with this one, by loading the state from the file.

        Raises:
            OSError: If the file cannot be read.
        """
        data = np.memmap(self.path, np.uint8, "r", self.start, (self.n_bytes,))
        if zlib.crc32(data.data) != self.crc32:
            return RestoreResult.DAMAGED
        state = data[4 * len(self.tokens) :]
        if not backend.restore_text(sequence, self.tokens.tolist(), state):
            return RestoreResult.REFUSED
        return RestoreResult.LOADED


def write_text(
    path: Path,
    key: str,
    text: Sequence[int] | NDArray[np.int32],
    state: NDArray[np.uint8],
    token_s: float = 0.0,
    is_stopped: Callable[[], bool] = never,
) -> bool:
    """Write a text with its state to a new file, in the format that `SavedText.read` reads.

    Args:
        path: The file, which exists and is empty.
        key: The key of the `CachedContext` that computed the state.
        text: The tokens.
        state: uint8[n_bytes]: the state of a sequence in llama.cpp's format.
        token_s: Seconds per token of the prefill; 0 if unknown.
        is_stopped: Checked between chunks; writing is given up once it returns True.

    Returns:
        Whether the file is complete.

    Raises:
        OSError: If the file cannot be written.
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
