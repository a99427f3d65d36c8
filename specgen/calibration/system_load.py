"""The load of other programs during a measurement."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

#: Of what psutil counts: time without work, also for want of a disk.
_IDLE = ("idle", "iowait")
#: What is part of another count: of `user` and `nice` on Linux, of `system` on Windows.
_COUNTED_TWICE = ("guest", "guest_nice", "interrupt", "dpc")
#: Other programs that take more than this share of the cores slow down what is measured.
BUSY_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class CoreTime:
    """Seconds of all cores together since the machine was started, those of them in which there
    was something to do, and those that this process took since it was started."""

    total_s: float
    busy_s: float
    own_s: float


def core_time() -> CoreTime | None:
    """What is counted at present; None where the system does not tell."""
    import psutil

    with contextlib.suppress(OSError):
        own = os.times()
        return of_counts(psutil.cpu_times()._asdict(), own.user + own.system)
    return None


def of_counts(counts_s: Mapping[str, float], own_s: float) -> CoreTime:
    """From seconds by the names that psutil gives them, which differ between systems."""
    total_s = sum(seconds for name, seconds in counts_s.items() if name not in _COUNTED_TWICE)
    return CoreTime(total_s, total_s - sum(counts_s.get(name, 0.0) for name in _IDLE), own_s)


def share_of_others(before: CoreTime | None, after: CoreTime | None) -> float | None:
    """The share of all cores' time, in [0, 1], that other programs took meanwhile; None if
    nobody knows."""
    if before is None or after is None or after.total_s <= before.total_s:
        return None
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, others_s / (after.total_s - before.total_s)))


__all__ = ["BUSY_SHARE", "CoreTime", "core_time", "of_counts", "share_of_others"]
