"""The machine's cores and memory, what this process may use, and the load of other programs.

Code that chooses threads, or checks whether something fits into memory, asks here.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

# --- cores and memory -----------------------------------------------------------------------------


def physical_cores() -> int | None:
    """Return the number of physical cores; None if the system does not report it."""
    import psutil

    return psutil.cpu_count(logical=False)


def logical_cores() -> int:
    """Return the number of logical cores, that is, of threads that can run at once."""
    return os.cpu_count() or 1


def usable_cores() -> int | None:
    """Return the number of logical cores that this process may use; None if that is unknown.

    Only some systems can restrict a process to some of the cores.
    """
    get_affinity = getattr(os, "sched_getaffinity", None)
    return len(get_affinity(0)) if get_affinity is not None else None


def available_memory_bytes() -> int:
    """Return the memory that processes can still take without swapping."""
    import psutil

    return psutil.virtual_memory().available


# --- a description --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and its Python, as described in reports and by `specgen doctor`."""

    #: The operating system, its release and its architecture.
    system: str
    #: The implementation and version of Python.
    python: str
    #: The name of the CPU.
    cpu: str
    n_physical_cores: int | None
    n_logical_cores: int | None
    memory_bytes: int
    available_bytes: int


def look_at_machine() -> Machine:
    """Describe this machine as it is now."""
    import psutil

    memory = psutil.virtual_memory()
    return Machine(
        system=f"{platform.system()} {platform.release()} ({platform.machine()})",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        cpu=cpu_name(),
        n_physical_cores=physical_cores(),
        n_logical_cores=os.cpu_count(),
        memory_bytes=memory.total,
        available_bytes=memory.available,
    )


def cpuinfo() -> dict[str, str]:
    """Return the entries of Linux's /proc/cpuinfo; empty on other systems.

    They describe the first processor and, on some ARM boards, the board.
    """
    values: dict[str, str] = {}
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            key, _, value = line.partition(":")
            values.setdefault(key.strip(), value.strip())  # keep the first processor's
    return values


def cpu_name() -> str:
    """Return the CPU's product name or, if the system does not report it, its kind."""
    values = cpuinfo()
    name = values.get("model name") or values.get("Model")
    if name:
        return name
    if "CPU part" in values:  # ARM: numbers that stand for a company and its product
        return f"{platform.machine()}, {values.get('CPU implementer')} {values['CPU part']}"
    if platform.system() == "Darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.check_output(command, text=True, timeout=10).strip()
    return platform.processor() or platform.machine()


# --- the load of other programs -------------------------------------------------------------------

#: psutil's counters of time in which a core did nothing.
_IDLE = ("idle", "iowait")
#: psutil's counters of time that other counters include.
_COUNTED_TWICE = ("guest", "guest_nice", "interrupt", "dpc")
#: If other programs take more than this share of the cores, the machine is too busy to measure
#: speeds.
_BUSY_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class CoreTime:
    """Seconds, summed over all cores, since the machine was started."""

    total_s: float
    #: The time in which cores were busy.
    busy_s: float
    #: The time in which they were busy with this process.
    own_s: float


def core_time() -> CoreTime | None:
    """Return the time of all cores up to now; None if the system does not count it."""
    import psutil

    try:
        own = os.times()
        counters_s = psutil.cpu_times()._asdict()
    except OSError:
        return None
    total_s = sum(seconds for name, seconds in counters_s.items() if name not in _COUNTED_TWICE)
    idle_s = sum(counters_s.get(name, 0.0) for name in _IDLE)
    return CoreTime(total_s, busy_s=total_s - idle_s, own_s=own.user + own.system)


def share_of_others(before: CoreTime | None, after: CoreTime | None) -> float | None:
    """Return the share of all cores' time that other programs took between two counts.

    Returns:
        A number in [0, 1]; None if a count is unknown, or no time passed between them.
    """
    if before is None or after is None or after.total_s <= before.total_s:
        return None
    busy_s = after.busy_s - before.busy_s
    own_s = after.own_s - before.own_s
    share = (busy_s - own_s) / (after.total_s - before.total_s)
    return min(1.0, max(0.0, share))


class LoadOfOthers:
    """Measures the share of all cores' time that other programs take, from its creation on."""

    def __init__(self) -> None:
        self._before = core_time()

    @property
    def share(self) -> float | None:
        """The share so far, in [0, 1]; None if it is unknown."""
        return share_of_others(self._before, core_time())


def is_busy(others_share: float | None) -> bool:
    """Return whether other programs take too much of the machine for speeds to be measured."""
    return others_share is not None and others_share > _BUSY_SHARE


def busy_text(others_share: float) -> str:
    """Return a notice about the load of other programs."""
    return f"other programs took {100 * others_share:.0f}% of the machine's cores meanwhile"
