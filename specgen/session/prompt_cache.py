"""A prompt cache file: the text that the contexts held when a process ended, with what they had computed of it, so that
the next process does not read it again (llama.cpp's `--prompt-cache`).

It has a line of JSON and, for the target and each draft model, the tokens and llama.cpp's own form of a sequence's state.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgen.errors import UsageError
from specgen.llama import LlamaBackend
from specgen.options import ContextOptions
from specgen.system.files import new_beside, write_errors

_MAGIC = "specgen prompt cache 1"
_LONGEST_HEADER = 1 << 20


@dataclass(frozen=True, slots=True)
class CachedContext:
    """A context of the target or of a draft model, whose first sequence holds the text, and its options."""

    backend: LlamaBackend
    options: ContextOptions

    def identity(self) -> list[Any]:
        """Return what the state of a text depends on, as JSON reads it back."""
        options, model = self.options, self.backend.model
        about = model.path.stat()
        types = [options.cache_type_k, options.cache_type_v, options.flash_attention]
        file = [model.name, about.st_size, about.st_mtime_ns]
        return [*file, model.kernels, options.n_gpu_layers, *types]


class PromptCache:
    """A prompt cache file. Raises `UsageError` if the file is of another kind, or cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._restored: list[list[int]] = []
        self._header, self._start = _read_header(path)

    def restore(self, contexts: Sequence[CachedContext]) -> str:
        """Let the contexts, the target's first, hold the file's text. Return why they cannot; empty if they can, or if
        there is no file yet."""
        if self._header is None:
            return ""
        parts = self._header["parts"]
        if [part["identity"] for part in parts[:1]] != [contexts[0].identity()]:
            return f"{self._path} was made with another model or other settings: it is made anew"
        offset = self._start
        for context, part in zip(contexts, parts, strict=False):
            with self._path.open("rb") as file:
                file.seek(offset)
                data = np.frombuffer(file.read(part["n_bytes"]), np.uint8)
            offset += part["n_bytes"]
            if len(data) < part["n_bytes"] or zlib.crc32(data.data) != part["crc32"]:
                return f"{self._path} is damaged: it is made anew"
            backend = context.backend
            if part["identity"] != context.identity() or part["n_tokens"] > backend.n_ctx:
                continue  # a draft model that changed reads the prompt again; so does too small a context
            n_token_bytes = 4 * part["n_tokens"]
            tokens = data[:n_token_bytes].view("<i4").tolist()
            if not backend.restore_text(0, tokens, data[n_token_bytes:]):
                return f"{self._path}: llama.cpp does not take its state: the prompt is read again"
        self._restored = [list(context.backend.text(0)) for context in contexts]
        return ""

    def save(self, contexts: Sequence[CachedContext]) -> None:
        """Write the file, if the texts changed. Raise `OutputError`."""
        texts = [list(context.backend.text(0)) for context in contexts]
        if not texts[0] or texts == self._restored:
            return
        parts: list[dict[str, Any]] = []
        blobs: list[NDArray[np.uint8]] = []
        for context, text in zip(contexts, texts, strict=True):
            tokens = np.array(text, "<i4").view(np.uint8)
            blob = np.concatenate([tokens, context.backend.saved_text(0)])
            blobs.append(blob)
            part = {"identity": context.identity(), "n_tokens": len(text), "n_bytes": len(blob)}
            parts.append({**part, "crc32": zlib.crc32(blob.data)})
        header = json.dumps({"format": _MAGIC, "parts": parts}).encode() + b"\n"
        with write_errors(self._path), new_beside(self._path) as new:
            with new.open("wb") as file:
                file.write(header)
                for blob in blobs:
                    file.write(blob.data)
            new.replace(self._path)


def _read_header(path: Path) -> tuple[dict[str, Any] | None, int]:
    """Return the first line of a prompt cache, if there is one, and where the next line begins."""
    try:
        with path.open("rb") as file:
            line = file.readline(_LONGEST_HEADER)
    except FileNotFoundError:
        if path.parent.is_dir():
            return None, 0
        raise UsageError(f"--prompt-cache {path}: there is no such folder") from None
    except OSError as error:
        raise UsageError(f"--prompt-cache {path}: {error.strerror}") from error
    if not line:
        return None, 0
    header: object = None
    with contextlib.suppress(ValueError, RecursionError):
        header = json.loads(line)
    if not isinstance(header, dict) or header.get("format") != _MAGIC:
        raise UsageError(
            f"--prompt-cache {path}: this file is no prompt cache",
            hint="name another file; this one is not overwritten",
        )
    return header, len(line)
