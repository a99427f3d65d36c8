"""The load of other programs during a measurement."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

#: psutil's counts of time without work, or in which the work waits for a disk.
_IDLE = ("idle", "iowait")
#: Counts that are a part of another one: of `user` and `nice` on Linux, of `system` on Windows.
_COUNTED_TWICE = ("guest", "guest_nice", "interrupt", "dpc")
#: If other programs take more than this share of the cores, measurements are too slow.
BUSY_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class CoreTime:
    """Seconds of all cores together since the machine was started, the busy ones among these, and
    those that this process has used."""

    total_s: float
    busy_s: float
    own_s: float


def core_time() -> CoreTime | None:
    """The present counts; None if the system does not provide them."""
    import psutil

    with contextlib.suppress(OSError):
        own = os.times()
        return of_counts(psutil.cpu_times()._asdict(), own.user + own.system)
    return None


def of_counts(counts_s: Mapping[str, float], own_s: float) -> CoreTime:
    """A `CoreTime` from psutil's counts by name, which differ between systems."""
    total_s = sum(seconds for name, seconds in counts_s.items() if name not in _COUNTED_TWICE)
    return CoreTime(total_s, total_s - sum(counts_s.get(name, 0.0) for name in _IDLE), own_s)


def share_of_others(before: CoreTime | None, after: CoreTime | None) -> float | None:
    """The share of all cores' time, in [0, 1], that other programs took between two counts; None if
    it is unknown."""
    if before is None or after is None or after.total_s <= before.total_s:
        return None
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, others_s / (after.total_s - before.total_s)))


__all__ = ["BUSY_SHARE", "CoreTime", "core_time", "of_counts", "share_of_others"]
