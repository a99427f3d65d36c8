"""The build of llama.cpp: the version that specgen needs, and the one in use."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgen.system.files import read_object

#: The version of llama-cpp-python that specgen needs, as in pyproject.toml.
REQUIRED_VERSION = "0.3.36"
#: The command that replaces another version or a broken build with it.
REINSTALL = f"pip install --force-reinstall --no-cache-dir llama-cpp-python=={REQUIRED_VERSION}"
#: The same, safe for GCC 12, which otherwise miscompiles it for CPUs with AMX.
REBUILD = f'CMAKE_ARGS="-DCMAKE_CXX_FLAGS=-fno-dse" {REINSTALL}'


@dataclass(frozen=True, slots=True)
class Device:
    """A device that llama.cpp can compute on."""

    #: GGML's name for it, such as ``CUDA0``.
    name: str
    #: ``cpu``, ``gpu``, ``integrated gpu``, ``accelerator`` (next to the CPU) or ``meta`` (several
    #: as one).
    kind: str
    #: Its model, such as ``NVIDIA H100``.
    description: str
    #: Its memory; 0 if the device does not report it.
    memory_bytes: int
    #: The part of its memory that is free.
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
    #: The devices that it can compute on.
    devices: tuple[Device, ...]


# --- the llama.cpp in specgen's own wheel ---------------------------------------------------------

_LLAMA_FOLDER = Path(__file__).parents[1] / "llama"
#: The module with the llama.cpp that is part of specgen's wheel (scripts/build_wheel.py). A
#: checkout has no such module.
BUNDLE = "specgen.llama.bundled"


def uses_bundle() -> bool:
    """Return whether specgen uses the llama.cpp of its own wheel, and not llama-cpp-python.

    An installed llama-cpp-python of the required version is preferred, since the user may have
    built it for a GPU.
    """
    if not (_LLAMA_FOLDER / "bundled").is_dir():
        return False
    try:
        installed_version = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        return True
    # A local build may append a label, as in "0.3.36+cu124".
    return installed_version.partition("+")[0] != REQUIRED_VERSION


# --- the library for workers ----------------------------------------------------------------------

#: The library with llama.cpp's RPC backend, in `specgen/llama/`.
LIBRARY = "libspecgen-rpc.so"
#: The file next to it that records what it was built for.
STAMP = "libspecgen-rpc.json"


def protocol_in(header: Path) -> str | None:
    """Return the version of the RPC protocol that a header `ggml-rpc.h` defines: "4.0.1".

    Returns:
        None if there is no such file, or it does not define the three parts of a version.
    """
    if not header.is_file():
        return None
    text = header.read_text(encoding="utf-8", errors="replace")
    numbers = re.findall(r"#define RPC_PROTO_(?:MAJOR|MINOR|PATCH)_VERSION\s+(\d+)", text)
    return ".".join(numbers) if len(numbers) == 3 else None


def stamp_of(library: Path) -> dict[str, Any]:
    """Return what the library was built for.

    Returns:
        The "version" of llama-cpp-python and the RPC "protocol"; empty if there is no stamp.
    """
    return read_object(library.with_name(STAMP))
