"""The user's own folders of models, from `config.toml` in the configuration folder."""

from __future__ import annotations

from pathlib import Path

from specgen.errors import UsageError
from specgen.system.files import correction_hint, named_path, path_of, read_toml
from specgen.system.folders import config_folder

#: The key of the folders in the file.
FOLDERS_KEY = "model-folders"


def model_folders() -> list[Path]:
    """Return the user's model folders, from config.toml.

    Raises:
        UsageError: If the file cannot be read, or does not list folders.
    """
    file = config_folder() / "config.toml"
    if named_path(file) is None:
        return []
    folders = read_toml(file).get(FOLDERS_KEY, [])
    if not isinstance(folders, list) or not all(isinstance(each, str) for each in folders):
        message = f'{file}: {FOLDERS_KEY}: give a list of folders, as in ["/data/models"]'
        raise UsageError(message, correction_hint(file))
    return [path_of(each) for each in folders]
