"""The limits that Linux's control groups set: those of containers, pods and services.

A process is in one group of each hierarchy, and every group limits those inside it. So the limit of
a process is the smallest on the way from its group up to the outermost one that it can see. Version
2 has a single hierarchy; version 1 has one for each controller. Some systems mount both.

Sources: Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst and
scheduler/sched-bwc.rst of the Linux kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

#: The file systems of the two versions, as mounts name them.
_V1 = "cgroup"
_V2 = "cgroup2"
#: Version 1 reports "no limit" as the largest multiple of a page. No machine has half of that.
_V1_UNLIMITED_BYTES = 2**62
#: The parts of a group's memory that the kernel can drop when it needs room: the cache of files,
#: which includes mapped weights, and the kernel's own caches. Version 1 counts the groups inside
#: with "total_".
_RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """What the control groups of this process allow."""

    #: The CPU time per second, in cores; None if it is not limited.
    cpu_quota: float | None = None
    #: The smallest limit on memory; None if it is not limited.
    memory_bytes: int | None = None
    #: The memory that the groups can still take; None if it is not limited.
    available_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class _Mount:
    """A mounted hierarchy."""

    #: The file system: version 1 or 2.
    version: str
    #: The group whose folder is the mount point.
    root: PurePosixPath
    #: The folder that it is mounted on.
    folder: PurePosixPath
    #: The controllers of version 1, among other options.
    options: frozenset[str]


def group_limits(root: Path = Path("/")) -> GroupLimits:
    """Return what the control groups of this process allow; no limits on other systems.

    Args:
        root: The folder of `proc` and `sys`.
    """
    quotas: list[float] = []
    limits_bytes: list[int] = []
    available_bytes: list[int] = []
    for folder in _folders(root, "cpu"):
        quota = _cpu_quota(folder)
        if quota is not None:
            quotas.append(quota)
    for folder in _folders(root, "memory"):
        limit_bytes = _memory_limit(folder)
        if limit_bytes is not None:
            limits_bytes.append(limit_bytes)
            available_bytes.append(max(0, limit_bytes - _needed_bytes(folder)))
    return GroupLimits(
        cpu_quota=min(quotas, default=None),
        memory_bytes=min(limits_bytes, default=None),
        available_bytes=min(available_bytes, default=None),
    )


# --- the groups of this process -------------------------------------------------------------------


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's groups, from the innermost outwards.

    Args:
        root: The folder of `proc` and `sys`.
        controller: The name of the controller whose groups are wanted.
    """
    groups = _own_groups(root)
    mounts = _mounts(root)
    for version, name in ((_V2, ""), (_V1, controller)):
        group = groups.get(name)
        candidates = [mount for mount in mounts if mount.version == version]
        if version == _V1:
            candidates = [mount for mount in candidates if controller in mount.options]
        if group is not None and candidates:
            yield from _folders_of(group, candidates, root)


def _folders_of(
    group: PurePosixPath,
    mounts: list[_Mount],
    root: Path,
) -> Iterator[Path]:
    """Yield the folders of a group and of those around it, as far as a mount shows them."""
    # Without a mount that shows the group, the first one is a container's view of its own group.
    mount = mounts[0]
    inside = PurePosixPath()
    for each in mounts:
        if group.is_relative_to(each.root) and ".." not in group.parts:
            mount = each
            inside = group.relative_to(each.root)
            break
    top = root / mount.folder.relative_to("/")
    for part in (inside, *inside.parents):
        yield top / part


def _own_groups(root: Path) -> dict[str, PurePosixPath]:
    """Return the group of this process in each hierarchy, by controller; "" is version 2."""
    groups: dict[str, PurePosixPath] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            groups[controller] = PurePosixPath(path)
    return groups


def _mounts(root: Path) -> list[_Mount]:
    """Return the mounted hierarchies, in the order of /proc/self/mountinfo."""
    mounts: list[_Mount] = []
    for line in _text(root / "proc/self/mountinfo").splitlines():
        # Before the dash: id, parent, device, root, folder, options; then type, source, options.
        place, _, kind = line.partition(" - ")
        places = place.split(" ")
        kinds = kind.split(" ")
        if len(places) < 6 or len(kinds) < 3 or kinds[0] not in (_V1, _V2):
            continue
        mount = _Mount(
            version=kinds[0],
            root=PurePosixPath(_unescaped(places[3])),
            folder=PurePosixPath(_unescaped(places[4])),
            options=frozenset(kinds[2].split(",")),
        )
        if mount.folder.is_absolute():
            mounts.append(mount)
    return mounts


def _unescaped(path: str) -> str:
    """Return a path of /proc/self/mountinfo, in which a space is an octal number."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


# --- the limits of one group ----------------------------------------------------------------------


def _cpu_quota(folder: Path) -> float | None:
    """Return a group's CPU time per second, in cores; None if it is not limited."""
    quota, _, period = _text(folder / "cpu.max").partition(" ")  # version 2: "50000 100000"
    if not quota:
        quota = _text(folder / "cpu.cfs_quota_us")
        period = _text(folder / "cpu.cfs_period_us")
    quota_us = _number(quota)
    period_us = _number(period)
    if not quota_us or not period_us:  # version 2 writes "max", version 1 writes -1
        return None
    return quota_us / period_us


def _memory_limit(folder: Path) -> int | None:
    """Return a group's limit on memory, in bytes; None if it is not limited."""
    names = (
        "memory.max",  # version 2
        "memory.high",  # above this, the kernel slows the group down until it needs less
        "memory.limit_in_bytes",  # version 1
    )
    numbers = [_number(_text(folder / name)) for name in names]
    limits = [limit for limit in numbers if limit is not None and limit < _V1_UNLIMITED_BYTES]
    return min(limits, default=None)


def _needed_bytes(folder: Path) -> int:
    """Return the memory that a group uses and the kernel cannot take back, in bytes."""
    used_bytes = _number(_text(folder / "memory.current"))
    prefix = ""
    if used_bytes is None:
        used_bytes = _number(_text(folder / "memory.usage_in_bytes")) or 0
        prefix = "total_"
    counts: dict[str, int] = {}
    for line in _text(folder / "memory.stat").splitlines():
        name, _, count = line.partition(" ")
        counts[name] = _number(count) or 0
    reclaimable_bytes = sum(counts.get(prefix + name, 0) for name in _RECLAIMABLE)
    return max(0, used_bytes - reclaimable_bytes)


def _number(text: str) -> int | None:
    """Return a number of a control file; None for other texts, among them "max" and "-1"."""
    text = text.strip()
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
