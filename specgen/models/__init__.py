"""Models by name: what there is, what is on this disk, and downloads that resume.

Nothing here prints, and nothing heavy (requests, huggingface_hub, rich) is imported before
it is needed.
"""

from specgen.models.fetching import fetch, locate
from specgen.models.places import cache_folder, config_folder, models_folder, user_registry_file
from specgen.models.progress import (
    LineProgress,
    Progress,
    RichProgress,
    SilentProgress,
    stderr_progress,
)
from specgen.models.registry import (
    NGRAM,
    HubSource,
    Model,
    Pair,
    PypiSource,
    Registry,
    load_registry,
)
from specgen.models.sizes import human_bytes

__all__ = [
    "NGRAM",
    "HubSource",
    "LineProgress",
    "Model",
    "Pair",
    "Progress",
    "PypiSource",
    "Registry",
    "RichProgress",
    "SilentProgress",
    "cache_folder",
    "config_folder",
    "fetch",
    "human_bytes",
    "load_registry",
    "locate",
    "models_folder",
    "stderr_progress",
    "user_registry_file",
]
