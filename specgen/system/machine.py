"""The machine and the Python that specgen runs on, and the load of other programs."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from collections.abc import Mapping
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


def cpuinfo(file: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Return what Linux says about the first processor (and on some ARM boards about the board); nothing on
    other systems."""
    lines: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            lines.setdefault(key.strip(), value.strip())
    return lines


def cpu_name(about: Mapping[str, str] | None = None) -> str:
    """Return the CPU's own name if the system reports it (`about`: as `cpuinfo` does), else a name of its
    kind."""
    about = cpuinfo() if about is None else about
    if name := about.get("model name") or about.get("Model"):
        return name
    if "CPU part" in about:  # ARM: numbers that stand for a company and its product
        return f"{platform.machine()}, {about.get('CPU implementer')} {about['CPU part']}"
    if platform.system() == "Darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            pass
        else:
            return answer.stdout.strip()
    return platform.processor() or platform.machine()


# --- the load of other programs -------------------------------------------------------------------

#: psutil's counts of time without work, or in which the work waits for a disk.
_IDLE = ("idle", "iowait")
#: Counts that are a part of another one: of `user` and `nice` on Linux, of `system` on Windows.
_COUNTED_TWICE = ("guest", "guest_nice", "interrupt", "dpc")
#: If other programs take more than this share of the cores, the machine is busy: measurements are too slow.
_BUSY_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class CoreTime:
    """Seconds of all cores together since the machine was started, the busy ones among these, and
    those that this process has used."""

    total_s: float
    busy_s: float
    own_s: float


def core_time() -> CoreTime | None:
    """Return the present counts; None if the system does not provide them."""
    import psutil

    with contextlib.suppress(OSError):
        own, counts_s = os.times(), psutil.cpu_times()._asdict()
        total_s = sum(seconds for name, seconds in counts_s.items() if name not in _COUNTED_TWICE)
        idle_s = sum(counts_s.get(name, 0.0) for name in _IDLE)
        return CoreTime(total_s, total_s - idle_s, own.user + own.system)
    return None


def share_of_others(before: CoreTime | None, after: CoreTime | None) -> float | None:
    """Return the share of all cores' time, in [0, 1], that other programs took between two counts; None if
    it is unknown."""
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
        """The share so far, in [0, 1]; None if it is unknown."""
        return share_of_others(self._before, core_time())


def is_busy(others_share: float | None) -> bool:
    """Return whether a machine is too busy to measure speeds, by the share of its cores that others take."""
    return others_share is not None and others_share > _BUSY_SHARE


def busy_text(others_share: float) -> str:
    """Return a clause that says how busy the machine was."""
    return f"other programs took {100 * others_share:.0f} % of the machine's cores meanwhile"


def notes_on_figures(others_share: float | None) -> list[str]:
    """Return a note on figures that were measured while the machine was busy; none if it was not."""
    if others_share is None or not is_busy(others_share):
        return []
    return [
        f"{busy_text(others_share)}: these figures are those of a busy machine; run it again when it is idle"
    ]
