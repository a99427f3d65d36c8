"""Models by name: the known models, those on this disk, and downloads that resume.

Nothing here prints, and nothing that downloads (huggingface_hub, rich) is imported before it is needed.
"""

from specgen.models.fetching import fetch, fetch_reference, folder_of, locate, stderr_progress
from specgen.models.files import (
    FileIdentity,
    cache_folder,
    config_folder,
    data_folder,
    human_bytes,
    identify,
    memory_file,
    models_folder,
    packed_folder,
    shard_number,
)
from specgen.models.hub_reference import HubReference, is_reference, parse_reference
from specgen.models.registry import (
    NGRAM,
    CatalogueModel,
    HubSource,
    Pair,
    PypiSource,
    Registry,
    load_registry,
    user_registry_file,
)
from specgen.models.saved_drafts import SavedDraft, save_draft, saved_draft, saved_drafts_file

__all__ = [
    "NGRAM",
    "CatalogueModel",
    "FileIdentity",
    "HubReference",
    "HubSource",
    "Pair",
    "PypiSource",
    "Registry",
    "SavedDraft",
    "cache_folder",
    "config_folder",
    "data_folder",
    "fetch",
    "fetch_reference",
    "folder_of",
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
