"""Packed weights in the cache folder, so that the next process maps them instead of packing.

The kernels read weights in a layout of their own (docs/kernels.md). Packing takes as long as
reading the file several times, and memory that no other process shares. So the packed weights are
written when the process ends, if the disk has room. They are used for the same model file, kernels
and layers on the same machine.
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
from specgen.models.files import parts_of
from specgen.system.files import NEW, digest_of, existing_parent, make_room, new_beside, version_of
from specgen.system.processes import is_failing

_SUFFIX = ".packed"
#: Smaller models are packed in a moment.
LEAST_BYTES = 32 << 20
#: The largest share of the disk that the files may fill.
MOST_SHARE = 0.1
#: The share of the disk that must stay free.
FREE_SHARE = 0.1

_log = logging.getLogger("specgen.llama.kernels.packed_weights")
_folder: Path | None = None


def keep_packed_weights(folder: Path | None) -> None:
    """Keep the packed weights of models that are loaded from now on; None keeps none."""
    global _folder  # noqa: PLW0603 - like the attached kernels, it holds for the process
    _folder = folder


class PackedWeights:
    """The file of packed weights of a model that is being loaded; it need not exist yet."""

    def __init__(self, path: Path, kernels: Kernels) -> None:
        self._path = path
        self._native = kernels.native
        self._handle = self._native.open_packed(os.fsencode(path))

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Use the file for the model that is loaded in the block."""
        self._native.load_packed(self._handle)
        try:
            yield
        finally:
            self._native.load_packed(None)
        with contextlib.suppress(OSError):
            if self._native.used_packed(self._handle):
                os.utime(self._path)  # the least recently used file is deleted first
            else:
                self._path.unlink()  # it is damaged, or has other weights

    @property
    def n_new_bytes(self) -> int:
        """The bytes that were packed, not read from the file; 0 if they are too few for a file."""
        n_bytes = int(self._native.packed_file_bytes(self._handle))
        return n_bytes if n_bytes >= LEAST_BYTES else 0

    @property
    def lacks_room(self) -> bool:
        """Whether the disk has too little room for them."""
        try:
            return self.n_new_bytes > room_bytes(self._path.parent)
        except OSError:
            return False

    def close(self) -> None:
        """Write the file, if there is none and the disk has room.

        The model's weights must still be loaded. Nothing is written while an exception, such as
        Ctrl-C, ends the process.
        """
        try:
            n_bytes = self.n_new_bytes
            if n_bytes and not is_failing() and not self._path.exists():
                self._write(n_bytes)
        except OSError as error:
            _log.info("packed weights are not kept: %s: %s", self._path, error.strerror)
        finally:
            self._native.close_packed(self._handle)

    def _write(self, n_bytes: int) -> None:
        folder = self._path.parent
        folder.mkdir(parents=True, exist_ok=True)
        if not make_room(_files_in(folder), n_bytes, room_bytes(folder)):
            _log.info("packed weights (%.1f GB) are not kept: too little room", n_bytes / 1e9)
            return
        with new_beside(self._path) as new:
            error_number = self._native.write_packed(self._handle, os.fsencode(new))
            if error_number:
                raise OSError(error_number, os.strerror(error_number), str(new))
            new.replace(self._path)
        _log.info("kept packed weights (%.1f GB): %s", n_bytes / 1e9, self._path)


def packed_weights_of(file: Path, **loaded: Any) -> PackedWeights | None:
    """Return the packed weights of a model file; None if they are not kept.

    Args:
        file: the model's file.
        **loaded: the options of loading that decide which tensors are packed.
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
    name = f"{_name_prefix(file)}{digest_of(identity)[:16]}{_SUFFIX}"
    return PackedWeights(_folder / name, kernels)


def is_packed_first(file: Path) -> bool:
    """Return whether loading a model packs its weights, since no file seems to have them."""
    kernels = attached()
    if _folder is None or kernels is None or not kernels.computes_products:
        return False
    prefix = _name_prefix(file)
    return not any(path.name.startswith(prefix) for path in _files_in(_folder))


def _name_prefix(model: Path) -> str:
    return f"{model.stem[:60]}-"


# --- the folder -----------------------------------------------------------------------------------


def kept_bytes(folder: Path) -> int:
    """Return the size of all files of packed weights in a folder."""
    return sum(path.stat().st_size for path in _files_in(folder))


def room_bytes(folder: Path) -> int:
    """Return how much the files of packed weights in a folder may fill, those there included."""
    disk = shutil.disk_usage(existing_parent(folder))
    free_bytes = disk.free + kept_bytes(folder) - int(FREE_SHARE * disk.total)
    return max(0, min(free_bytes, int(MOST_SHARE * disk.total)))


def _files_in(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.suffix in (_SUFFIX, NEW)]
    except OSError:
        return []
