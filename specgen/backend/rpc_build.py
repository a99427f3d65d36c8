"""The name and version of the RPC backend library that scripts/build_rpc.py builds."""

from __future__ import annotations

import json
from pathlib import Path

#: The library in `specgen/backend/llama/`, and the file beside it that says what it was built for.
LIBRARY = "libspecgen-rpc.so"
STAMP = "libspecgen-rpc.json"


def version_of(library: Path) -> str | None:
    """Return the version of llama-cpp-python that the library was built for; None if unknown."""
    try:
        stamp = json.loads(library.with_name(STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    version = stamp.get("version") if isinstance(stamp, dict) else None
    return version if isinstance(version, str) else None


__all__ = ["LIBRARY", "STAMP", "version_of"]
