"""The build of llama.cpp: the version that specgen needs, and the one that is used."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgen.system.files import read_object

#: The version of llama-cpp-python that specgen needs, as in pyproject.toml.
REQUIRED_VERSION = "0.3.36"
#: The command that installs it in place of another version or of a broken build.
REINSTALL = f"pip install --force-reinstall --no-cache-dir llama-cpp-python=={REQUIRED_VERSION}"
#: The same, safe for GCC 12, which otherwise miscompiles it for CPUs with AMX.
REBUILD = f'CMAKE_ARGS="-DCMAKE_CXX_FLAGS=-fno-dse" {REINSTALL}'


@dataclass(frozen=True, slots=True)
class Device:
    """A device that llama.cpp can compute on."""

    name: str
    #: ``cpu``, ``gpu``, ``integrated gpu``, ``accelerator`` (next to the CPU) or ``meta`` (several
    #: as one).
    kind: str
    description: str
    #: 0 if the device does not report its memory.
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Build:
    """An installed build of llama.cpp."""

    #: The version of llama-cpp-python.
    version: str
    #: The version of llama.cpp in it.
    llama_version: str
    #: llama.cpp's own line about the features that were compiled in.
    system_info: str
    #: Whether layers can be kept on a GPU.
    gpu_offload: bool
    devices: tuple[Device, ...]


# --- the llama.cpp in specgen's own wheel ---------------------------------------------------------

_LLAMA_FOLDER = Path(__file__).parents[1] / "llama"
#: The module with the llama.cpp that the wheel carries (scripts/build_wheel.py). A checkout has
#: none.
BUNDLE = "specgen.llama.bundled"


def uses_bundle() -> bool:
    """Return whether the llama.cpp in specgen's wheel is used.

    It is not if the same version of llama-cpp-python is installed, which may be built for a GPU.
    """
    if not (_LLAMA_FOLDER / "bundled").is_dir():
        return False
    try:
        installed_version = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        return True
    return installed_version.partition("+")[0] != REQUIRED_VERSION


# --- the library for workers ----------------------------------------------------------------------

#: The library with llama.cpp's RPC backend, in `specgen/llama/`.
LIBRARY = "libspecgen-rpc.so"
#: The file beside it that tells what it was built for.
STAMP = "libspecgen-rpc.json"


def protocol_in(header: Path) -> str | None:
    """Return the version of the RPC protocol that a header `ggml-rpc.h` defines, if it exists."""
    if not header.is_file():
        return None
    text = header.read_text(encoding="utf-8", errors="replace")
    numbers = re.findall(r"#define RPC_PROTO_(?:MAJOR|MINOR|PATCH)_VERSION\s+(\d+)", text)
    return ".".join(numbers) if len(numbers) == 3 else None


def stamp_of(library: Path) -> dict[str, Any]:
    """Return what the library was built for, as far as its stamp tells.

    Returns:
        The "version" of llama-cpp-python, and the "protocol" of RPC.
    """
    return read_object(library.with_name(STAMP))
