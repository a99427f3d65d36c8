"""How busy other programs keep this machine while it is measured."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

#: Where Linux counts what its cores did since the machine was started.
_STAT = Path("/proc/stat")
#: Of the counts in its first line: idle, and waiting for a disk; those behind the first eight
#: are in others already.
_IDLE = (3, 4)
_N_COUNTS = 8
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
    with contextlib.suppress(OSError, ValueError, AttributeError):
        text = _STAT.read_text(encoding="ascii")
        own = os.times()
        return parse_stat(text, os.sysconf("SC_CLK_TCK"), own.user + own.system)
    return None


def parse_stat(text: str, ticks_per_s: int, own_s: float) -> CoreTime:
    """What a `/proc/stat` says. Raises `ValueError` if it says something else."""
    name, *counts = text.partition("\n")[0].split()
    ticks = [int(count) for count in counts[:_N_COUNTS]]
    if name != "cpu" or len(ticks) <= max(_IDLE):
        raise ValueError("the first line is not that of all cores")
    idle = sum(ticks[index] for index in _IDLE)
    return CoreTime(sum(ticks) / ticks_per_s, (sum(ticks) - idle) / ticks_per_s, own_s)


def share_of_others(before: CoreTime | None, after: CoreTime | None) -> float | None:
    """The share of all cores' time, in [0, 1], that other programs took meanwhile; None if
    nobody knows."""
    if before is None or after is None or after.total_s <= before.total_s:
        return None
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, others_s / (after.total_s - before.total_s)))


__all__ = ["BUSY_SHARE", "CoreTime", "core_time", "parse_stat", "share_of_others"]
