"""The machine and the Python that specgen runs on."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """A description of the machine and the Python."""

    system: str
    python: str
    cpu: str
    n_physical_cores: int | None
    n_logical_cores: int | None
    memory_bytes: int
    available_bytes: int


def look_at_machine() -> Machine:
    """Return a description of this machine and of the Python that runs."""
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


def cpu_name() -> str:
    """Return the CPU's own name if the system reports it, else a name of its kind."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in {"model name", "Model"} and value.strip():
                return value.strip()
    if platform.system() == "Darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            pass
        else:
            return answer.stdout.strip()
    return platform.processor() or platform.machine()
