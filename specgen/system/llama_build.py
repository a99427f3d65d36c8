"""The version of llama.cpp, its build options and its devices, as plain values.

`specgen.llama` fills them in. They are defined here so that they can be used where llama.cpp
is not, or cannot be, loaded.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The version of llama-cpp-python that specgen needs, as pyproject.toml has it.
REQUIRED_VERSION = "0.3.36"
#: The command that installs it, in place of another version or of a broken build.
REINSTALL = f"pip install --force-reinstall --no-cache-dir llama-cpp-python=={REQUIRED_VERSION}"
#: The same, safe for GCC 12, which otherwise miscompiles it for CPUs with AMX.
REBUILD = f'CMAKE_ARGS="-DCMAKE_CXX_FLAGS=-fno-dse" {REINSTALL}'


@dataclass(frozen=True, slots=True)
class Device:
    """A device that llama.cpp can compute on."""

    name: str
    #: ``cpu``, ``gpu``, ``integrated gpu``, ``accelerator`` (works along with the CPU) or
    #: ``meta`` (several devices as one).
    kind: str
    description: str
    #: In bytes; 0 if the device does not report its memory.
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Build:
    """A build of llama.cpp."""

    #: Version of llama-cpp-python.
    version: str
    #: Version of the llama.cpp inside it.
    llama_version: str
    #: llama.cpp's own line about the features that were compiled in.
    system_info: str
    #: Whether layers can be kept on a GPU.
    gpu_offload: bool
    devices: tuple[Device, ...]

    @property
    def has_required_version(self) -> bool:
        """Whether this is the version that specgen needs, built by anyone (``0.3.36+cu124``)."""
        return self.version.partition("+")[0] == REQUIRED_VERSION

    @property
    def features(self) -> dict[str, tuple[str, ...]]:
        """The features that were compiled into each part of llama.cpp: ``{"CPU": ("AVX2", "FMA", ...)}``.

        A feature with a value, not just on or off, includes it: ``ARCHS=800,890``.
        """
        parts: dict[str, tuple[str, ...]] = {}
        part = ""
        for entry in self.system_info.split("|"):
            before, _, rest = entry.rpartition(" : ")
            part = before.strip() or part
            name, separator, value = (word.strip() for word in rest.partition("="))
            if not separator or value == "0":
                continue
            feature = name if value == "1" else f"{name}={value}"
            parts[part] = (*parts.get(part, ()), feature)
        return parts


#: The module with the llama.cpp that the wheel carries (scripts/build_wheel.py); a checkout has none.
BUNDLE = "specgen.llama.bundled"


def uses_bundle() -> bool:
    """Return whether the wheel's llama.cpp computes: it is there, and no llama-cpp-python of the same version,
    which somebody may have built for a GPU."""
    if not (Path(__file__).parents[1] / "llama" / "bundled").is_dir():
        return False
    try:
        return importlib.metadata.version("llama-cpp-python").partition("+")[0] != REQUIRED_VERSION
    except importlib.metadata.PackageNotFoundError:
        return True


# --- the RPC backend ------------------------------------------------------------------------------

#: The library in `specgen/llama/`, and the file beside it that says what it was built for.
LIBRARY = "libspecgen-rpc.so"
STAMP = "libspecgen-rpc.json"


def protocol_in(header: Path) -> str | None:
    """Return the version of the RPC protocol that `ggml-rpc.h` defines; None if there is no such file."""
    try:
        text = header.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    numbers = re.findall(r"#define RPC_PROTO_(?:MAJOR|MINOR|PATCH)_VERSION\s+(\d+)", text)
    return ".".join(numbers) if len(numbers) == 3 else None


def stamp_of(library: Path) -> dict[str, Any]:
    """Return what is noted beside the library: for which "version" of llama-cpp-python and with which "protocol" it was
    built. Empty if nothing is."""
    try:
        stamp = json.loads(library.with_name(STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}
