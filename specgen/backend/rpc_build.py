"""The library of llama.cpp's RPC backend that scripts/build_rpc.py builds: its name and version."""

from __future__ import annotations

import json
from pathlib import Path

#: In `specgen/backend/llama/`, and beside it what it was built for.
LIBRARY = "libspecgen-rpc.so"
STAMP = "libspecgen-rpc.json"


def version_of(library: Path) -> str | None:
    """The version of llama-cpp-python that the library was built for; None if nobody knows."""
    try:
        stamp = json.loads(library.with_name(STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    version = stamp.get("version") if isinstance(stamp, dict) else None
    return version if isinstance(version, str) else None


__all__ = ["LIBRARY", "STAMP", "version_of"]
