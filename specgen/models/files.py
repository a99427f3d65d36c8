"""Model files: their names, sizes and digests, and the files that specgen makes for a target."""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TypeVar

from specgen.errors import ModelFileError
from specgen.system.files import named_file

_File = TypeVar("_File", bound=PurePath)
#: The name of one of the files of a large model: "name-00002-of-00003.gguf".
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Name and size, which tell model files apart. A digest of gigabytes would take too long."""

    #: The name of the model's first file.
    name: str
    #: The total size of all files of the model.
    size_bytes: int

    @property
    def key(self) -> str:
        """A digest, used as the name of folders for this model file."""
        return hashlib.sha256(f"{self.name}, {self.size_bytes}".encode()).hexdigest()[:16]


def identify(path: Path) -> FileIdentity | None:
    """Return the identity of a model file; None if there is no such file, or it is unreadable."""
    try:
        sizes = [part.stat().st_size for part in parts_of(path) if named_file(part)]
    except OSError:
        return None
    if not sizes or named_file(path) is None:
        return None
    return FileIdentity(path.name, sum(sizes))


def identity_of(path: Path) -> FileIdentity:
    """Return the identity of a model file.

    Raises:
        ModelFileError: If there is no such file, or it cannot be read.
    """
    identity = identify(path)
    if identity is None:
        check_model_path(path)
        # The file is there now, but was not when `identify` looked.
        raise ModelFileError(f"{path}: no such file")
    return identity


def check_model_path(path: Path) -> None:
    """Check that a path leads to the first file of a model, and that its other files exist.

    The content of the files is not read.

    Raises:
        ModelFileError: If not. Its message tells what the path leads to, or what is missing.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ModelFileError(f"{path}: a directory, not a model file", _hint_in(path))
        if not stat.S_ISREG(mode):  # reading a pipe would block
            hint = "give the path of a .gguf file"
            raise ModelFileError(f"{path}: a pipe or a device, not a model file", hint)
        parts = parts_of(path)
        missing = [part.name for part in parts if not part.exists()]
    except FileNotFoundError:
        hint = "give the path of a .gguf file, or a name that `specgen models list` shows"
        raise ModelFileError(f"{path}: no such file", hint) from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    if path.name != parts[0].name:
        message = f"{path}: not the first file of a split model"
        raise ModelFileError(message, f"give the first: {parts[0]}")
    if missing:
        raise ModelFileError(
            f"{path}: the model is split into {len(parts)} files; missing: {', '.join(missing)}",
            "put all of its files into one folder",
        )


def _hint_in(folder: Path) -> str:
    """Return what to give instead of a folder."""
    names = sorted(str(file) for file in folder.glob("*.gguf"))
    if names:
        return f"name the file: {', '.join(names[:3])}"
    if any(folder.glob("*.safetensors")):
        return "llama.cpp's convert_hf_to_gguf.py turns its safetensors files into GGUF"
    return "it contains no .gguf file: give the path of one, or a name from `specgen models list`"


def parts_of(file: _File) -> list[_File]:
    """Return the paths of all files of the model that `file` belongs to, in order."""
    shard = SHARD.fullmatch(file.name)
    if shard is None:
        return [file]
    stem = shard["stem"]
    n_parts = int(shard["count"])
    return [
        file.with_name(f"{stem}-{number:05d}-of-{n_parts:05d}.gguf")
        for number in range(1, n_parts + 1)
    ]


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it cannot be accessed."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def file_sha256(path: Path, report: Callable[[int], None] = lambda _n_bytes: None) -> str:
    """Return the SHA-256 of a file; `report` receives the number of bytes that are read so far."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            report(file.tell())
    return digest.hexdigest()


# --- what is made for a target --------------------------------------------------------------------


def heads_file(cache: Path, target: FileIdentity) -> Path:
    """Return the path of the decoder heads that `specgen draft make` trains for a target."""
    return cache / "made" / target.key / f"{Path(target.name).stem}-heads.gguf"


def learning_folder(data: Path, target: FileIdentity) -> Path:
    """Return the folder of the answers from which drafts for a target learn."""
    return data / "learning" / f"{Path(target.name).stem}-{target.key}"
