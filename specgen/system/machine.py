"""The machine, the Python and the build of llama.cpp that specgen runs on, and the load of other
programs.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgen.system.files import read_object

#: The version of llama-cpp-python that specgen needs, as pyproject.toml has it.
REQUIRED_VERSION = "0.3.36"
#: The command that installs it, in place of another version or of a broken build.
REINSTALL = f"pip install --force-reinstall --no-cache-dir llama-cpp-python=={REQUIRED_VERSION}"
#: The same, safe for GCC 12, which otherwise miscompiles it for CPUs with AMX.
REBUILD = f'CMAKE_ARGS="-DCMAKE_CXX_FLAGS=-fno-dse" {REINSTALL}'


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and the Python."""

    system: str
    python: str
    cpu: str
    n_physical_cores: int | None
    n_logical_cores: int | None
    memory_bytes: int
    available_bytes: int


def look_at_machine() -> Machine:
    import psutil

    memory = psutil.virtual_memory()
    return Machine(
        system=f"{platform.system()} {platform.release()} ({platform.machine()})",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        cpu=cpu_name(),
        n_physical_cores=psutil.cpu_count(logical=False),
        n_logical_cores=psutil.cpu_count(),
        memory_bytes=memory.total,
        available_bytes=memory.available,
    )


def cpuinfo() -> dict[str, str]:
    """Return what Linux says about the first processor, and on some ARM boards about the board."""
    lines: dict[str, str] = {}
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            key, _, value = line.partition(":")
            lines.setdefault(key.strip(), value.strip())
    return lines


def cpu_name() -> str:
    """Return the CPU's own name if the system reports it, else a name of its kind."""
    about = cpuinfo()
    if name := about.get("model name") or about.get("Model"):
        return name
    if "CPU part" in about:  # ARM: numbers that stand for a company and its product
        return f"{platform.machine()}, {about.get('CPU implementer')} {about['CPU part']}"
    if platform.system() == "Darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.check_output(command, text=True, timeout=10).strip()
    return platform.processor() or platform.machine()


# --- the load of other programs

#: psutil's counts of time without work, and those that are a part of another one.
_IDLE, _COUNTED_TWICE = ("idle", "iowait"), ("guest", "guest_nice", "interrupt", "dpc")
#: If other programs take more than this share of the cores, the machine is too busy to measure
#: speeds.
_BUSY_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class CoreTime:
    """Seconds of all cores since the machine was started, the busy ones among them, and this
    process's own.
    """

    total_s: float
    busy_s: float
    own_s: float


def core_time() -> CoreTime | None:
    import psutil

    with contextlib.suppress(OSError):
        own, counts_s = os.times(), psutil.cpu_times()._asdict()
        total_s = sum(seconds for name, seconds in counts_s.items() if name not in _COUNTED_TWICE)
        idle_s = sum(counts_s.get(name, 0.0) for name in _IDLE)
        return CoreTime(total_s, total_s - idle_s, own.user + own.system)
    return None


def share_of_others(before: CoreTime | None, after: CoreTime | None) -> float | None:
    """Return the share of all cores' time, in [0, 1], that other programs took between two counts,
    if it is known.
    """
    if before is None or after is None or after.total_s <= before.total_s:
        return None
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, others_s / (after.total_s - before.total_s)))


class LoadOfOthers:
    """Measures which share of all cores' time other programs take, from now on."""

    def __init__(self) -> None:
        self._before = core_time()

    @property
    def share(self) -> float | None:
        return share_of_others(self._before, core_time())


def is_busy(others_share: float | None) -> bool:
    return others_share is not None and others_share > _BUSY_SHARE


def busy_text(others_share: float) -> str:
    return f"other programs took {100 * others_share:.0f} % of the machine's cores meanwhile"


# --- the build of llama.cpp


@dataclass(frozen=True, slots=True)
class Device:
    """A device that llama.cpp can compute on."""

    name: str
    #: ``cpu``, ``gpu``, ``integrated gpu``, ``accelerator`` (beside the CPU) or ``meta`` (several
    #: as one).
    kind: str
    description: str
    #: 0 if the device does not report its memory.
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Build:
    """A build of llama-cpp-python of a version, and llama.cpp's own line about the features in it."""

    version: str
    llama_version: str
    system_info: str
    #: Whether layers can be kept on a GPU.
    gpu_offload: bool
    devices: tuple[Device, ...]


#: The module with the llama.cpp that the wheel carries (scripts/build_wheel.py); a checkout has
#: none.
BUNDLE = "specgen.llama.bundled"


def uses_bundle() -> bool:
    """Return whether the wheel's llama.cpp computes: not if there is the same one, perhaps built
    for a GPU.
    """
    own = ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        own = importlib.metadata.version("llama-cpp-python").partition("+")[0]
    is_bundled = (Path(__file__).parents[1] / "llama" / "bundled").is_dir()
    return is_bundled and own != REQUIRED_VERSION


#: The library in `specgen/llama/`, and the file beside it that says what it was built for.
LIBRARY, STAMP = "libspecgen-rpc.so", "libspecgen-rpc.json"


def protocol_in(header: Path) -> str | None:
    """Return the version of the RPC protocol that `ggml-rpc.h` defines, if there is such a file."""
    text = header.read_text(encoding="utf-8", errors="replace") if header.is_file() else ""
    numbers = re.findall(r"#define RPC_PROTO_(?:MAJOR|MINOR|PATCH)_VERSION\s+(\d+)", text)
    return ".".join(numbers) if len(numbers) == 3 else None


def stamp_of(library: Path) -> dict[str, Any]:
    """Return the "version" of llama-cpp-python and the "protocol" for which the library was built,
    if it says so.
    """
    return read_object(library.with_name(STAMP))
