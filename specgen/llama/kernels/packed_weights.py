"""Packed weights in the cache folder, so that the next process maps them instead of packing.

The kernels read weights in a layout of their own (docs/kernels.md). Packing takes several times as
long as reading the file, and needs memory that processes cannot share. So the packed weights are
written to a file when the model is freed, if the disk has room. Later processes use the file if
they load the same layers of the same model file, with the same kernels.
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
#: No file is written for fewer bytes, which are packed in a moment.
MIN_BYTES = 32 << 20
#: The maximum share of the disk that the files may fill.
MAX_SHARE = 0.1
#: The share of the disk that must stay free.
FREE_SHARE = 0.1

_log = logging.getLogger("specgen.llama.kernels.packed_weights")
#: The folder of the files; None if packed weights are not kept.
_folder: Path | None = None


def keep_packed_weights(folder: Path | None) -> None:
    """Keep packed weights in a folder, for models that are loaded from now on; None keeps none."""
    global _folder  # noqa: PLW0603 - like the attached kernels, it holds for the process
    _folder = folder


class PackedWeights:
    """The file of packed weights of a model that is being loaded; it need not exist yet."""

    def __init__(self, path: Path, kernels: Kernels) -> None:
        self._path = path
        self._native = kernels.native
        self._handle = self._native.open_packed(os.fsencode(path))
        #: The size of the file after `close` has written it; 0 if it did not.
        self.written_bytes = 0

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Use the file, if it exists and is valid, for the model that is loaded in the block."""
        self._native.load_packed(self._handle)
        try:
            yield
        finally:
            self._native.load_packed(None)
        with contextlib.suppress(OSError):
            if self._native.used_packed(self._handle):
                # Mark it as used: `make_room` deletes the least recently used files first.
                os.utime(self._path)
            else:
                # It does not exist, is damaged, or has other weights.
                self._path.unlink()

    @property
    def n_new_bytes(self) -> int:
        """The bytes that were packed, not read from the file; 0 if they are too few for a file."""
        n_bytes = int(self._native.packed_file_bytes(self._handle))
        return n_bytes if n_bytes >= MIN_BYTES else 0

    @property
    def lacks_room(self) -> bool:
        """Whether the disk has too little room for the new bytes."""
        try:
            return self.n_new_bytes > room_bytes(self._path.parent)
        except OSError:
            return False

    def close(self) -> None:
        """Write the file if weights were packed and the disk has room. Call it before freeing them.

        Nothing is written while an exception, such as Ctrl-C, ends the process.
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
        """Write the file of `n_bytes`, unless the room for all files is smaller.

        Raises:
            OSError: If it cannot be written.
        """
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
        self.written_bytes = n_bytes
        _log.info("kept packed weights (%.1f GB): %s", n_bytes / 1e9, self._path)


def packed_weights_of(file: Path, **load_options: Any) -> PackedWeights | None:
    """Return the packed weights of a model that is about to be loaded.

    Args:
        file: The model's first file.
        **load_options: The load options that decide which tensors are packed, as JSON values.

    Returns:
        None if packed weights are not kept, or the kernels do not compute products.
    """
    kernels = attached()
    if _folder is None or kernels is None or not kernels.computes_products:
        return None
    # The file's name contains a digest of everything that decides its content.
    identity = {
        # The size and time of each part; [1:] leaves out the inode, which differs between copies.
        "parts": [(part.name, *version_of(part)[1:]) for part in parts_of(file)],
        # The library's digest, not its path: installations of the same specgen share the files.
        "kernels": [kernels.instructions, kernels.digest, ggml_version()],
        **load_options,
    }
    name = f"{_name_prefix(file)}{digest_of(identity)[:16]}{_SUFFIX}"
    return PackedWeights(_folder / name, kernels)


def is_packed_first(file: Path) -> bool:
    """Return whether loading a model probably packs its weights, since no file has its name.

    For a quick answer, the digest in the names of files is ignored.
    """
    kernels = attached()
    if _folder is None or kernels is None or not kernels.computes_products:
        return False
    prefix = _name_prefix(file)
    return not any(path.name.startswith(prefix) for path in _files_in(_folder))


def _name_prefix(model: Path) -> str:
    """Return the readable beginning of the names of a model's files."""
    return f"{model.stem[:60]}-"


# --- the folder -----------------------------------------------------------------------------------


def kept_bytes(folder: Path) -> int:
    """Return the size of all files of packed weights in a folder."""
    return sum(path.stat().st_size for path in _files_in(folder))


def room_bytes(folder: Path) -> int:
    """Return the maximum total size of the files of packed weights in a folder.

    Raises:
        OSError: If the disk cannot be asked.
    """
    disk = shutil.disk_usage(existing_parent(folder))
    free_bytes = disk.free + kept_bytes(folder) - int(FREE_SHARE * disk.total)
    return max(0, min(free_bytes, int(MAX_SHARE * disk.total)))


def _files_in(folder: Path) -> list[Path]:
    """Return the files of packed weights, and those that are being written."""
    try:
        return [path for path in folder.iterdir() if path.suffix in (_SUFFIX, NEW)]
    except OSError:
        return []
