"""Models by name: the known models, those on this disk, and downloads that resume.

Nothing here prints, and nothing heavy (requests, huggingface_hub, rich) is imported before
it is needed.
"""

from specgen.models.choices import SavedDraft, save_draft, saved_draft
from specgen.models.fetching import fetch, locate
from specgen.models.files import FileIdentity, human_bytes, identify, shard_number
from specgen.models.folders import (
    cache_folder,
    config_folder,
    data_folder,
    memory_file,
    models_folder,
    packed_folder,
    saved_drafts_file,
    user_registry_file,
)
from specgen.models.hub_reference import HubReference, is_reference, parse_reference
from specgen.models.progress import (
    DownloadProgress,
    LineProgress,
    RichProgress,
    SilentProgress,
    stderr_progress,
)
from specgen.models.registry import (
    NGRAM,
    CatalogueModel,
    HubSource,
    Pair,
    PypiSource,
    Registry,
    load_registry,
)

__all__ = [
    "NGRAM",
    "CatalogueModel",
    "DownloadProgress",
    "FileIdentity",
    "HubReference",
    "HubSource",
    "LineProgress",
    "Pair",
    "PypiSource",
    "Registry",
    "RichProgress",
    "SavedDraft",
    "SilentProgress",
    "cache_folder",
    "config_folder",
    "data_folder",
    "fetch",
    "human_bytes",
    "identify",
    "is_reference",
    "load_registry",
    "locate",
    "memory_file",
    "models_folder",
    "packed_folder",
    "parse_reference",
    "save_draft",
    "saved_draft",
    "saved_drafts_file",
    "shard_number",
    "stderr_progress",
    "user_registry_file",
]
