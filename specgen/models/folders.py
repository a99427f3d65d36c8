"""Where specgen keeps its files, on every system, and the variables that move them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.models.files import has_size

if TYPE_CHECKING:
    from specgen.models.registry import CatalogueModel

#: If it is set, this folder replaces the user's cache folder.
CACHE_VARIABLE = "SPECGEN_CACHE"
#: If it is set, this folder replaces the user's configuration folder.
CONFIG_VARIABLE = "SPECGEN_CONFIG"
#: If it is set, this folder replaces the user's data folder.
DATA_VARIABLE = "SPECGEN_DATA"


def cache_folder() -> Path:
    """Return the folder of files that can be made or fetched again; it need not exist."""
    if override := os.environ.get(CACHE_VARIABLE):
        return Path(override).expanduser()
    import platformdirs

    return platformdirs.user_cache_path("specgen", appauthor=False)


def config_folder() -> Path:
    """Return the folder of files that the user writes; it need not exist."""
    if override := os.environ.get(CONFIG_VARIABLE):
        return Path(override).expanduser()
    import platformdirs

    return platformdirs.user_config_path("specgen", appauthor=False)


def data_folder() -> Path:
    """Return the folder of files that the user wants to keep, such as conversations; it need not exist."""
    if override := os.environ.get(DATA_VARIABLE):
        return Path(override).expanduser()
    import platformdirs

    return platformdirs.user_data_path("specgen", appauthor=False)


def models_folder() -> Path:
    """Return the folder of downloaded models."""
    return cache_folder() / "models"


def memory_file() -> Path:
    """Return the file of what was learnt on this machine; it need not exist."""
    return cache_folder() / "learnt.json"


def user_registry_file() -> Path:
    """Return the user's own list of models, which adds to the one that specgen brings."""
    return config_folder() / "models.toml"


def saved_drafts_file() -> Path:
    """Return the file of the drafts that were found best; it need not exist."""
    return config_folder() / "drafts.json"


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
        """Where the wheel of part `index` is downloaded to."""
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
