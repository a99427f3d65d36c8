"""Packed weights that are kept in the cache folder, so that the next process maps them instead of
packing them.

The kernels read weights in a layout of their own (docs/kernels.md). Packing takes as long as
reading the file several times, and memory that no other process shares. So they are written when
the process ends, if the disk has room, for the same model file, kernels and layers on this machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specgen.llama.kernels.attached import Kernels, attached, ggml_version
from specgen.system.files import (
    NEW,
    digest_of,
    existing_parent,
    make_room,
    new_beside,
    parts_of,
    version_of,
)
from specgen.system.processes import is_failing

_SUFFIX = ".packed"
#: Smaller models are packed in a moment.
LEAST_BYTES = 32 << 20
#: The largest share of the disk that the files may fill, and the share that must stay free.
MOST_SHARE = 0.1
FREE_SHARE = 0.1

_log = logging.getLogger("specgen.llama.kernels.packed_weights")
_folder: Path | None = None


def keep_packed_weights(folder: Path | None) -> None:
    """Keep the packed weights of models that are loaded from now on in a folder; None: keep none."""
    global _folder  # noqa: PLW0603 - like the attached kernels, it holds for the process
    _folder = folder


def kept_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files(folder))


def room_bytes(folder: Path) -> int:
    disk = shutil.disk_usage(existing_parent(folder))
    free = disk.free + kept_bytes(folder) - int(FREE_SHARE * disk.total)
    return max(0, min(free, int(MOST_SHARE * disk.total)))


class PackedWeights:
    """The file of packed weights of a model that is being loaded, or that may be written."""

    def __init__(self, path: Path, kernels: Kernels) -> None:
        self._path = path
        self._native = kernels.native
        self._handle = self._native.open_packed(os.fsencode(path))

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        self._native.load_packed(self._handle)
        try:
            yield
        finally:
            self._native.load_packed(None)
        with contextlib.suppress(OSError):
            if self._native.used_packed(self._handle):
                os.utime(self._path)  # the least recently used goes first
            else:
                self._path.unlink()  # damaged, or of other weights

    @property
    def n_new_bytes(self) -> int:
        """The bytes of what was packed anew, not read from the file; 0 if they are too few to be
        worth one.
        """
        n_bytes = int(self._native.packed_file_bytes(self._handle))
        return n_bytes if n_bytes >= LEAST_BYTES else 0

    @property
    def lacks_room(self) -> bool:
        with contextlib.suppress(OSError):
            return self.n_new_bytes > room_bytes(self._path.parent)
        return False

    def close(self) -> None:
        """Write the file, if there is none and the disk has room. The model's weights must still be
        loaded. Nothing is written while an exception, such as Ctrl-C, ends the process.
        """
        try:
            if self.n_new_bytes and not is_failing() and not self._path.exists():
                self._write(self.n_new_bytes)
        except OSError as error:
            _log.info("packed weights are not kept: %s: %s", self._path, error.strerror)
        finally:
            self._native.close_packed(self._handle)

    def _write(self, n_bytes: int) -> None:
        folder = self._path.parent
        folder.mkdir(parents=True, exist_ok=True)
        if not make_room(_files(folder), n_bytes, room_bytes(folder)):
            _log.info("packed weights (%.1f GB) are not kept: too little room", n_bytes / 1e9)
            return
        with new_beside(self._path) as new:
            if problem := self._native.write_packed(self._handle, os.fsencode(new)):
                raise OSError(problem, os.strerror(problem), str(new))
            new.replace(self._path)
        _log.info("kept packed weights (%.1f GB): %s", n_bytes / 1e9, self._path)


def packed_weights_of(file: Path, **loaded: Any) -> PackedWeights | None:
    """Return the packed weights of a model file; None if they are not kept. `loaded` decides which
    tensors are packed.
    """
    kernels = attached()
    if _folder is None or kernels is None or not kernels.computes_products:
        return None
    identity = {
        "parts": [(part.name, *version_of(part)[1:]) for part in parts_of(file)],
        # By their contents, so that installations of the same specgen share the files.
        "kernels": [kernels.instructions, kernels.digest, ggml_version()],
        **loaded,
    }
    return PackedWeights(_folder / f"{file.stem[:60]}-{digest_of(identity)[:16]}{_SUFFIX}", kernels)


def is_packed_first(file: Path) -> bool:
    kernels = attached()
    is_packing = _folder is not None and kernels is not None and kernels.computes_products
    names = [path.name for path in _files(_folder)] if _folder is not None else []
    return is_packing and not any(name.startswith(f"{file.stem[:60]}-") for name in names)


def _files(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [path for path in folder.iterdir() if path.suffix in (_SUFFIX, NEW)]
    return []
