"""The limits of control groups, in simulated files as in all kinds of containers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from specgen.system.control_groups import GroupLimits, group_limits

GIB = 2**30
#: What version 1 writes without a limit.
V1_UNLIMITED = "9223372036854771712"
V2_MOUNT = "42 32 0:38 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_CPU_MOUNT = "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
V1_MEMORY_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


def tree(root: Path, groups: str, mounts: str, files: Mapping[str, str]) -> Path:
    """Write the files of /proc and /sys, and return their folder."""
    proc = root / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(groups)
    (proc / "mountinfo").write_text(f"23 1 0:22 / /proc rw - proc proc rw\n{mounts}\n")
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


def test_a_container_with_version_2_sees_its_own_group(tmp_path: Path) -> None:
    files = {
        "cpu.max": "50000 100000",
        "memory.max": str(2 * GIB),
        "memory.high": "max",
        "memory.current": str(GIB),
        "memory.stat": f"anon {GIB // 4}\nactive_file {GIB // 4}\ninactive_file {GIB // 4}\n"
        f"slab_reclaimable {GIB // 4}",
    }
    root = tree(tmp_path, "0::/\n", V2_MOUNT, files)
    assert group_limits(root) == GroupLimits(0.5, 2 * GIB, 2 * GIB - GIB // 4)


def test_a_container_with_version_1_is_mounted_as_the_root(tmp_path: Path) -> None:
    """Docker shows the container's own group as the mount's root, but the whole path in /proc."""
    group = "/docker/2f5a"
    mounts = f"{V1_CPU_MOUNT}\n{V1_MEMORY_MOUNT}".replace(" / ", f" {group} ")
    groups = f"5:cpu,cpuacct:{group}\n4:memory:{group}\n1:name=systemd:{group}\n0::/system.slice\n"
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": "150000",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": str(GIB),
        "memory/memory.usage_in_bytes": str(GIB // 2),
        "memory/memory.stat": f"active_file 7\ntotal_active_file {GIB // 4}\n"
        f"total_inactive_file {GIB // 8}",
    }
    root = tree(tmp_path, groups, mounts, files)
    assert group_limits(root) == GroupLimits(1.5, GIB, GIB - GIB // 8)


@pytest.mark.parametrize("outer", [True, False])
def test_the_smallest_limit_of_nested_groups_counts(outer: bool, tmp_path: Path) -> None:
    small, large = ("kubepods", "kubepods/pod7/app") if outer else ("kubepods/pod7/app", "kubepods")
    files = {
        "cpu.stat": "",
        f"{small}/cpu.max": "200000 100000",
        f"{large}/cpu.max": "800000 100000",
        "kubepods/pod7/cpu.max": "max 100000",
        f"{small}/memory.max": str(2 * GIB),
        f"{small}/memory.current": str(GIB),
        f"{large}/memory.max": str(8 * GIB),
        f"{large}/memory.current": str(7 * GIB + GIB // 2),
        "kubepods/pod7/memory.max": "max",
    }
    root = tree(tmp_path, "0::/kubepods/pod7/app\n", V2_MOUNT, files)
    # The larger limit leaves less: other groups inside it have used it up.
    assert group_limits(root) == GroupLimits(2.0, 2 * GIB, GIB // 2)


def test_a_group_that_uses_more_than_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = {"memory.high": str(GIB), "memory.max": str(2 * GIB), "memory.current": str(2 * GIB)}
    root = tree(tmp_path, "0::/\n", V2_MOUNT, files)
    assert group_limits(root) == GroupLimits(None, GIB, 0)


def test_both_versions_may_be_mounted(tmp_path: Path) -> None:
    mounts = "\n".join((V2_MOUNT.replace("/cgroup ", "/cgroup/unified "), V1_CPU_MOUNT))
    files = {
        "unified/cgroup.controllers": "hugetlb",
        "cpu,cpuacct/a b/cpu.cfs_quota_us": "100000",
        "cpu,cpuacct/a b/cpu.cfs_period_us": "50000",
        "cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    root = tree(tmp_path, "2:cpu,cpuacct:/a b\n0::/\n", mounts, files)
    assert group_limits(root) == GroupLimits(cpu_quota=2.0)


def test_a_group_outside_the_view_of_a_container_is_that_of_the_mount(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/../other\n", V2_MOUNT, {"cpu.max": "100000 100000"})
    assert group_limits(root).cpu_quota == 1.0


def test_another_group_that_is_mounted_too_does_not_count(tmp_path: Path) -> None:
    other = V2_MOUNT.replace(" / /sys/fs/cgroup ", r" /other /sys/fs/cgroup/bind\040mount ")
    files = {"bind mount/cpu.max": "10000 100000", "mine/cpu.max": "300000 100000"}
    root = tree(tmp_path, "0::/mine\n", f"{other}\n{V2_MOUNT}", files)
    assert group_limits(root).cpu_quota == 3.0


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"cpu.max": "max 100000", "memory.max": "max", "memory.current": "5"},
        {"cpu.max": "0 100000"},
        {"cpu.max": "50000 0"},
        {"cpu.max": "what?", "memory.max": "-5"},
        {"memory.limit_in_bytes": V1_UNLIMITED, "cpu.cfs_quota_us": "-1"},
    ],
)
def test_without_limits_everything_may_be_used(files: Mapping[str, str], tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/\n", V2_MOUNT, files)
    assert group_limits(root) == GroupLimits()


def test_other_systems_have_no_limits(tmp_path: Path) -> None:
    assert group_limits(tmp_path) == GroupLimits()
    root = tree(tmp_path, "nonsense", "36 35 - cgroup2\n - \nx y z", {})
    assert group_limits(root) == GroupLimits()
