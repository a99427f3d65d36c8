"""Packed weights in the cache folder, so that the next process maps them instead of packing.

The kernels read weights in a layout of their own (docs/kernels.md). Packing takes several times as
long as reading the file, and needs memory that processes cannot share. So the packed weights are
written to a file when the model is freed, if the disk has room. Later processes use the file if
they load the same layers of the same model file, with the same kernels.

Packed weights that exceed the memory that they may use are streamed from such a file. If it does
not exist, each tensor is packed into it while the model is loaded.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from specgen.llama.gguf_file import GgufTensor, opened_parts
from specgen.llama.kernels.attached import Kernels, attached, ggml_version
from specgen.models.files import parts_of, size_of
from specgen.system.files import (
    NEW_SUFFIX,
    digest_of,
    existing_parent,
    make_room,
    new_beside,
    version_of,
)
from specgen.system.processes import is_failing

_SUFFIX = ".packed"
#: No file is written for fewer bytes, which are packed in a moment.
MIN_BYTES = 32 << 20
#: The maximum share of the disk that the files may fill.
MAX_SHARE = 0.1
#: The share of the disk that must stay free.
FREE_SHARE = 0.1
#: The maximum share of the free space that the files may fill for the sake of one that is streamed.
STREAMED_FREE_SHARE = 0.5
#: Part of the names of tensors with the matrices of experts.
_EXPERTS = "_exps."

_log = logging.getLogger("specgen.llama.kernels.packed_weights")
#: The folder of the files; None if packed weights are not kept.
_folder: Path | None = None


def keep_packed_weights(folder: Path | None) -> None:
    """Keep packed weights in a folder, for models that are loaded from now on; None keeps none."""
    global _folder  # noqa: PLW0603 - like the attached kernels, it holds for the process
    _folder = folder


class StreamedSize(NamedTuple):
    """The size of weights that are streamed."""

    #: The size of all of them, packed.
    packed_bytes: int
    #: How many bytes of them may be in memory.
    max_bytes: int


class PackedWeights:
    """The file of packed weights of a model that is being loaded; it need not exist yet."""

    def __init__(
        self,
        path: Path,
        kernels: Kernels,
        streamed: StreamedSize | None = None,
    ) -> None:
        """Open the file, if it exists.

        Args:
            path: The file.
            kernels: The kernels that pack.
            streamed: The size of the weights if they must be streamed; None: they are not.
        """
        self.path = path
        self._native = kernels.native
        self._streamed = streamed
        self._handle = self._native.open_packed(os.fsencode(path))
        #: The size of the file after it was written, by `load` or `close`; 0 if it was not.
        self.written_bytes = 0

    @property
    def is_stored(self) -> bool:
        """Whether the file exists and is complete, so that nothing needs to be packed."""
        return bool(self._native.is_whole_packed(self._handle))

    @property
    def has_problem(self) -> bool:
        """Whether weights that must be streamed cannot be: loading is then of no use."""
        return bool(self._native.packed_problem(self._handle))

    @property
    def streamed_bytes(self) -> int:
        """The number of bytes that each pass over the model reads from the file."""
        return int(self._native.streamed_bytes(self._handle))

    def load(self, load_model: Callable[[], Any]) -> Any:
        """Load a model with the weights in the file, if it has them; else pack them.

        Weights that must be streamed are packed into the file.

        Args:
            load_model: Loads the model, and returns llama.cpp's pointer to it; None if that fails.

        Returns:
            The result of `load_model`.

        Raises:
            OSError: If weights that must be streamed cannot be written to the file.
        """
        model = self._load(load_model)
        if not model and self._native.packed_problem(self._handle) == errno.EBADMSG:
            # The file is damaged, or has other weights: `_load` has deleted it.
            self._native.close_packed(self._handle)
            self._handle = self._native.open_packed(os.fsencode(self.path))
            model = self._load(load_model)
        if not model and self.has_problem:
            error_number = self._native.packed_problem(self._handle)
            raise OSError(error_number, os.strerror(error_number), str(self.path))
        return model

    def _load(self, load_model: Callable[[], Any]) -> Any:
        """Load a model once, as `load` does. A file that turns out to be of no use is deleted."""
        with contextlib.ExitStack() as files:
            new: Path | None = None
            if self._streamed is not None:
                if not self.is_stored:
                    new = files.enter_context(self._new_file(self._streamed.packed_bytes))
                new_path = os.fsencode(new or self.path)
                self._native.limit_packed(self._handle, self._streamed.max_bytes, new_path)
            self._native.load_packed(self._handle)
            try:
                model = load_model()
            finally:
                self._native.load_packed(None)
            with contextlib.suppress(OSError):
                if self._native.used_packed(self._handle):
                    # Mark it as used: `make_room` deletes the least recently used files first.
                    os.utime(self.path)
                elif model or self._native.packed_problem(self._handle) == errno.EBADMSG:
                    # It does not exist, is damaged, or has other weights. If the model was not
                    # loaded for another reason, such as too little memory, the file may be good.
                    self.path.unlink()
            if model:
                self._finish(new)
        return model

    @contextlib.contextmanager
    def _new_file(self, n_bytes: int) -> Iterator[Path]:
        """Make room for a file of `n_bytes`, and create an empty one, to be moved to its place.

        Raises:
            OSError: If there is no room, or the file cannot be created.
        """
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        max_bytes = room_bytes(folder, is_streamed=self._streamed is not None)
        if not make_room(_files_in(folder), n_bytes, max_bytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        with _locked_new_file(self.path) as new:
            yield new

    def _finish(self, new: Path | None) -> None:
        """Keep the new file that the model was packed into, if it was, and begin to stream."""
        error_number = self._native.finish_packed(self._handle)
        if new is None or not self.streamed_bytes:
            return
        try:
            if error_number:
                raise OSError(error_number, os.strerror(error_number), str(new))
            new.replace(self.path)
        except OSError as error:
            # The file stays as long as this process uses it, without a name.
            _log.info("packed weights are not kept: %s: %s", self.path, error.strerror)
            return
        self.written_bytes = self.path.stat().st_size
        _log.info("packed weights (%.1f GB): %s", self.written_bytes / 1e9, self.path)

    @property
    def n_new_bytes(self) -> int:
        """The bytes that were packed, not read from the file; 0 if they are too few for a file."""
        n_bytes = int(self._native.packed_file_bytes(self._handle))
        return n_bytes if n_bytes >= MIN_BYTES else 0

    @property
    def lacks_room(self) -> bool:
        """Whether the disk has too little room for the new bytes."""
        if self.streamed_bytes:
            return False
        try:
            return self.n_new_bytes > room_bytes(self.path.parent)
        except OSError:
            return False

    def close(self) -> None:
        """Write the file if weights were packed and the disk has room. Call it before freeing them.

        Nothing is written while an exception, such as Ctrl-C, ends the process.
        """
        try:
            n_bytes = 0 if self.streamed_bytes else self.n_new_bytes
            if n_bytes and not is_failing() and not self.path.exists():
                self._write(n_bytes)
        except OSError as error:
            _log.info("packed weights are not kept: %s: %s", self.path, error.strerror)
        finally:
            self.discard()

    def discard(self) -> None:
        """Close the file without writing anything."""
        self._native.close_packed(self._handle)
        self._handle = None

    def _write(self, n_bytes: int) -> None:
        """Write the file of `n_bytes`.

        Raises:
            OSError: If there is no room, or it cannot be written.
        """
        with self._new_file(n_bytes) as new:
            error_number = self._native.write_packed(self._handle, os.fsencode(new))
            if error_number:
                raise OSError(error_number, os.strerror(error_number), str(new))
            new.replace(self.path)
        self.written_bytes = n_bytes
        _log.info("kept packed weights (%.1f GB): %s", n_bytes / 1e9, self.path)


def packed_weights_of(
    file: Path,
    max_bytes: int | None = None,
    **load_options: Any,
) -> PackedWeights | None:
    """Return the packed weights of a model that is about to be loaded.

    Args:
        file: The model's first file.
        max_bytes: How many bytes may be in memory; larger weights are streamed. None: all.
        **load_options: The load options that decide which tensors are packed, as JSON values.

    Returns:
        None if packed weights are not kept, the kernels do not compute products, or the weights
        must be streamed and cannot be.
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
    path = _folder / f"{_name_prefix(file)}{digest_of(identity)[:16]}{_SUFFIX}"
    if max_bytes is None or not must_stream(file, max_bytes):
        return PackedWeights(path, kernels)
    if _streaming_of(file, path.exists()) not in (Streaming.STORED, Streaming.NEW_FILE):
        return None
    return PackedWeights(path, kernels, StreamedSize(weight_sizes(file).packed_bytes, max_bytes))


def is_packed_first(file: Path) -> bool:
    """Return whether loading a model probably packs its weights, since no file has its name.

    For a quick answer, the digest in the names of files is ignored.
    """
    kernels = attached()
    if _folder is None or kernels is None or not kernels.computes_products:
        return False
    return not _has_file(file)


def _has_file(model: Path) -> bool:
    """Return whether there is a file for a model, or for an earlier version of it."""
    prefix = _name_prefix(model)
    return _folder is not None and any(
        path.name.startswith(prefix) and path.suffix == _SUFFIX for path in _files_in(_folder)
    )


def _name_prefix(model: Path) -> str:
    """Return the readable beginning of the names of a model's files."""
    return f"{model.stem[:60]}-"


# --- weights larger than the memory that they may use ---------------------------------------------


class WeightSizes(NamedTuple):
    """How large the weights of a model are."""

    #: The tensors in the model's file.
    file_bytes: int
    #: The weights that the kernels would pack, packed; 0 if the kernels do not compute.
    packed_bytes: int
    #: Whether the model is a mixture of experts.
    has_experts: bool

    @property
    def in_memory_bytes(self) -> int:
        """The memory that the weights need if all of them are kept there."""
        return self.packed_bytes or self.file_bytes


class Streaming(enum.Enum):
    """How weights can be streamed that exceed the memory that they may use."""

    #: From a file of packed weights, which exists.
    STORED = "stored"
    #: From a new one, for which there is room.
    NEW_FILE = "new file"
    #: Not by the kernels, since the disk has no room for a new file. The other reasons below lead
    #: to the same: the system reads the model's own file, whose weights are not packed.
    NO_ROOM = "no room"
    #: Not by the kernels: packed weights are not kept (`--packed-cache off`).
    NOT_KEPT = "not kept"
    #: Not by the kernels: they do not stream mixtures of experts.
    EXPERTS = "experts"
    #: Not by the kernels: llama.cpp's compute.
    OTHER_KERNELS = "other kernels"


def must_stream(file: Path, max_bytes: int | None) -> bool:
    """Return whether the weights of a model exceed the memory that they may use.

    Args:
        file: The model's first file.
        max_bytes: That memory; None: there is no limit.

    Raises:
        OSError: If the file cannot be read.
        BackendError: If it is not a GGUF file.
    """
    return max_bytes is not None and weight_sizes(file).in_memory_bytes > max_bytes


def streaming_of(file: Path) -> Streaming:
    """Return how the weights of a model can be streamed, before they are loaded.

    For a quick answer, a file that was packed by other kernels counts as one of this model.

    Raises:
        OSError: If the model's file cannot be read.
        BackendError: If it is not a GGUF file.
    """
    kernels = attached()
    if kernels is None or not kernels.computes_products:
        return Streaming.OTHER_KERNELS
    return _streaming_of(file, _has_file(file))


def _streaming_of(file: Path, is_stored: bool) -> Streaming:
    """Return how weights that the kernels compute can be streamed."""
    if _folder is None:
        return Streaming.NOT_KEPT
    sizes = weight_sizes(file)
    if sizes.has_experts:
        return Streaming.EXPERTS
    if is_stored:
        return Streaming.STORED
    try:
        has_room = sizes.packed_bytes <= room_bytes(_folder, is_streamed=True)
    except OSError:
        has_room = False
    return Streaming.NEW_FILE if has_room else Streaming.NO_ROOM


def weight_sizes(file: Path) -> WeightSizes:
    """Return how large the weights of a model are, before they are loaded.

    Raises:
        OSError: If the file cannot be read.
        BackendError: If it is not a GGUF file.
    """
    kernels = attached()
    is_packed = kernels is not None and kernels.computes_products
    return _read_sizes(file, version_of(file), is_packed)


@lru_cache(maxsize=8)
def _read_sizes(
    file: Path,
    _version: tuple[int, int, int],
    is_packed: bool,
) -> WeightSizes:
    """Read the sizes; the version makes `lru_cache` forget those of a changed file."""
    kernels = attached()
    with opened_parts(file) as (_, tensors):
        names = {tensor.name for tensor in tensors}
        packed_bytes = 0
        if kernels is not None and is_packed:
            packed = [tensor for tensor in tensors if _is_multiplied(tensor, names)]
            packed_bytes = sum(kernels.native.packed_size(tensor.handle) for tensor in packed)
        return WeightSizes(
            sum(tensor.n_bytes for tensor in tensors),
            packed_bytes,
            any(_EXPERTS in name for name in names),
        )


def _is_multiplied(tensor: GgufTensor, names: set[str]) -> bool:
    """Return whether a tensor is a matrix of a product, judging by its name.

    Args:
        tensor: The tensor.
        names: The names of all tensors of the model.
    """
    if tensor.name == "token_embd.weight":
        return "output.weight" not in names
    return tensor.shape[1] > 1 and "_embd." not in tensor.name


# --- the folder -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked_new_file(path: Path) -> Iterator[Path]:
    """Create an empty file next to `path`, as `new_beside` does.

    It is locked. Those that are not were left by killed processes, and are deleted.

    Raises:
        OSError: If it cannot be created.
    """
    import fcntl

    for other in _files_in(path.parent):
        if other.suffix != NEW_SUFFIX:
            continue
        with contextlib.suppress(OSError), other.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            other.unlink()
    with new_beside(path) as new, new.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield new


def kept_bytes(folder: Path) -> int:
    """Return the size of all files of packed weights in a folder."""
    return sum(size_of(path) for path in _files_in(folder))


def room_bytes(folder: Path, *, is_streamed: bool = False) -> int:
    """Return the maximum total size of the files of packed weights in a folder.

    Args:
        folder: The folder.
        is_streamed: Whether it is for weights that must be streamed: without a file, each pass
            over them takes much longer.

    Raises:
        OSError: If the disk cannot be asked.
    """
    disk = shutil.disk_usage(existing_parent(folder))
    free_bytes = disk.free + kept_bytes(folder)
    n_bytes = min(free_bytes - int(FREE_SHARE * disk.total), int(MAX_SHARE * disk.total))
    if is_streamed:
        n_bytes = max(n_bytes, int(STREAMED_FREE_SHARE * free_bytes))
    return max(0, n_bytes)


def _files_in(folder: Path) -> list[Path]:
    """Return the files of packed weights, and those that are being written."""
    try:
        return [path for path in folder.iterdir() if path.suffix in (_SUFFIX, NEW_SUFFIX)]
    except OSError:
        return []
