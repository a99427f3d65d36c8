"""The machine's cores and memory, what this process may use, and the load of other programs.

Code that chooses threads, or checks whether something fits into memory, asks here.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specgen.system.control_groups import group_limits
from specgen.system.quantities import human_bytes

#: The folder of `proc` and `sys`.
_ROOT = Path("/")
#: The index of the word in /proc/self/stat, counted after the program's name, that is the time of
#: the process's start in ticks since the machine's start.
_START_WORD = 19

# --- cores and memory -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Allowance:
    """How much of a resource this process may use."""

    #: The amount, in the unit of the resource.
    amount: int
    #: Why it is less than the machine has, as a clause; empty if it is all of it.
    limit: str = ""


def physical_cores() -> int | None:
    """Return the machine's number of physical cores; None if the system does not report it."""
    import psutil

    return psutil.cpu_count(logical=False)


def logical_cores() -> int:
    """Return the machine's number of logical cores, that is, of threads that can run at once."""
    return os.cpu_count() or 1


def allowed_processors() -> frozenset[int] | None:
    """Return the logical cores that this process may run on; None if that is unknown.

    Only some systems can restrict a process to some of the cores.
    """
    get_affinity = getattr(os, "sched_getaffinity", None)
    return frozenset(get_affinity(0)) if get_affinity is not None else None


def usable_cores(root: Path = _ROOT) -> Allowance:
    """Return the number of physical cores that this process can keep busy, at least 1.

    More threads than that do not help matrix products: hyper-threads share the units of their core,
    and beyond a quota all threads of the process are stopped at once.

    Args:
        root: The folder of `proc` and `sys`.
    """
    n_machine = physical_cores() or logical_cores()
    processors = allowed_processors()
    n_allowed = n_machine
    if processors is not None:
        n_allowed = min(n_machine, physical_cores_of(processors, root))
    return _within_quota(n_machine, n_allowed, processors, math.floor, root)


def usable_threads(root: Path = _ROOT) -> Allowance:
    """Return the number of threads of this process that can run at once, at least 1.

    Args:
        root: The folder of `proc` and `sys`.
    """
    n_machine = logical_cores()
    processors = allowed_processors()
    n_allowed = n_machine
    if processors is not None:
        n_allowed = min(n_machine, len(processors))
    return _within_quota(n_machine, n_allowed, processors, math.ceil, root)


def _within_quota(
    n_machine: int,
    n_allowed: int,
    processors: frozenset[int] | None,
    round_quota: Callable[[float], int],
    root: Path,
) -> Allowance:
    """Return the smaller of a number of cores and the CPU quota, and which of the two it is.

    Args:
        n_machine: The machine's number of cores.
        n_allowed: The number of them that this process may run on.
        processors: The logical cores that it may run on; None if that is unknown.
        round_quota: Makes a whole number of the quota.
        root: The folder of `proc` and `sys`.
    """
    quota = group_limits(root).cpu_quota
    if quota is not None and quota < n_allowed:
        n_quota = max(1, round_quota(quota))
        return Allowance(n_quota, f"the container's CPU quota is {quota:.4g}")
    if processors is not None and n_allowed < n_machine:
        n_logical = logical_cores()
        return Allowance(
            n_allowed, f"this process may run on {len(processors)} of {n_logical} logical cores"
        )
    return Allowance(n_allowed)


def physical_cores_of(processors: frozenset[int], root: Path = _ROOT) -> int:
    """Return the number of physical cores to which some logical cores belong.

    Args:
        processors: The numbers of the logical cores.
        root: The folder of `sys`.
    """
    siblings: set[str] = set()
    for processor in processors:
        topology = root / f"sys/devices/system/cpu/cpu{processor}/topology"
        # The list of all logical cores of the same physical core; the second is its former name.
        for name in ("core_cpus_list", "thread_siblings_list"):
            with contextlib.suppress(OSError):
                siblings.add((topology / name).read_text(encoding="ascii").strip())
                break
        else:
            siblings.add(str(processor))
    return max(1, len(siblings))


def usable_memory(root: Path = _ROOT) -> Allowance:
    """Return the memory in bytes that this process may use in all, including what it already uses.

    Args:
        root: The folder of `proc` and `sys`.
    """
    import psutil

    total_bytes = psutil.virtual_memory().total
    limit_bytes = group_limits(root).memory_bytes
    if limit_bytes is None or limit_bytes >= total_bytes:
        return Allowance(total_bytes)
    return Allowance(limit_bytes, f"the container's memory limit is {human_bytes(limit_bytes)}")


def available_memory_bytes(root: Path = _ROOT) -> int:
    """Return the memory that this process can still take without swapping or being killed.

    Args:
        root: The folder of `proc` and `sys`.
    """
    import psutil

    machine_bytes = psutil.virtual_memory().available
    group_bytes = group_limits(root).available_bytes
    return machine_bytes if group_bytes is None else min(machine_bytes, group_bytes)


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
    #: The number of the machine's physical cores; None if unknown.
    n_physical_cores: int | None
    #: The number of the machine's logical cores; None if unknown.
    n_logical_cores: int | None
    #: The machine's memory.
    memory_bytes: int
    #: The memory that this process can still take.
    available_bytes: int
    #: The number of physical cores that this process can keep busy.
    n_usable_cores: int
    #: Why these are not all cores of the machine; empty if they are.
    core_limit: str
    #: The memory that this process may use in all.
    usable_memory_bytes: int
    #: Why that is less than the machine's memory; empty if it is not.
    memory_limit: str


def describe_machine(root: Path = _ROOT) -> Machine:
    """Describe this machine as it is now, and how much of it this process may use.

    Args:
        root: The folder of `proc` and `sys`, for the limits.
    """
    import psutil

    cores = usable_cores(root)
    memory = usable_memory(root)
    return Machine(
        system=f"{platform.system()} {platform.release()} ({platform.machine()})",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        cpu=cpu_name(),
        n_physical_cores=physical_cores(),
        n_logical_cores=os.cpu_count(),
        memory_bytes=psutil.virtual_memory().total,
        available_bytes=available_memory_bytes(root),
        n_usable_cores=cores.amount,
        core_limit=cores.limit,
        usable_memory_bytes=memory.amount,
        memory_limit=memory.limit,
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


# --- time -----------------------------------------------------------------------------------------


def wall_time_s() -> float:
    """Return the seconds since 1970, by which processes agree on when something was measured."""
    return time.time()


def process_age_s() -> float:
    """Return the seconds since this process was started."""
    import psutil

    # psutil rounds the time to seconds where it depends on the time of the machine's start.
    with contextlib.suppress(OSError, AttributeError):
        words_after_name = Path("/proc/self/stat").read_text("ascii").rpartition(")")[2].split()
        start_s = int(words_after_name[_START_WORD]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - start_s
    return time.time() - psutil.Process().create_time()


# --- the load of other programs -------------------------------------------------------------------

#: psutil's counters of time in which a core did nothing.
_IDLE = ("idle", "iowait")
#: psutil's counters of time that other counters include.
_COUNTED_TWICE = ("guest", "guest_nice", "interrupt", "dpc")
#: If other programs take more than this share of the cores, the machine is too busy to measure
#: speeds.
_BUSY_SHARE = 0.25
#: What a figure is marked with if the machine was too busy.
ROUGH = "rough: the machine was busy"


@dataclass(frozen=True, slots=True)
class CoreTime:
    """Seconds, summed over the cores that this process may run on, since the machine's start."""

    #: All time, busy or idle.
    total_s: float
    #: The time in which cores were busy.
    busy_s: float
    #: The time in which they were busy with this process.
    own_s: float


def core_time() -> CoreTime | None:
    """Return the time of the cores up to now; None if the system does not count it."""
    try:
        own = os.times()
        counters_s = _core_counters_s()
    except OSError:
        return None
    total_s = sum(seconds for name, seconds in counters_s.items() if name not in _COUNTED_TWICE)
    idle_s = sum(counters_s.get(name, 0.0) for name in _IDLE)
    return CoreTime(total_s, busy_s=total_s - idle_s, own_s=own.user + own.system)


def _core_counters_s() -> dict[str, float]:
    """Return psutil's counters, summed over the cores that this process may run on."""
    import psutil

    processors = allowed_processors()
    counters = psutil.cpu_times(percpu=True)
    if processors is None or len(counters) != logical_cores():  # some cores are switched off
        return dict(psutil.cpu_times()._asdict())
    sums_s: Counter[str] = Counter()
    for processor, counter in enumerate(counters):
        if processor in processors:
            sums_s.update(counter._asdict())
    return dict(sums_s)


def share_of_others(before: CoreTime | None, after: CoreTime | None) -> float | None:
    """Return the share of the cores' time that other programs took between two counts.

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
    """Measures the share of the cores' time that other programs take, from its creation on."""

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
    return f"other programs were using {100 * others_share:.0f}% of the machine's cores"
