"""Where specgen keeps its files, on every system, and the variables that move them."""

from __future__ import annotations

import os
from pathlib import Path

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


def packed_folder() -> Path:
    """Return the folder of weights as specgen's kernels read them (`specgen.llama.packed_weights`)."""
    return cache_folder() / "packed"


def memory_file() -> Path:
    """Return the file of what was learnt on this machine; it need not exist."""
    return cache_folder() / "learnt.json"


def user_registry_file() -> Path:
    """Return the user's own list of models, which adds to the one that specgen brings."""
    return config_folder() / "models.toml"


def saved_drafts_file() -> Path:
    """Return the file of the drafts that were found best; it need not exist."""
    return config_folder() / "drafts.json"
