"""The cores and memory that this process may use, within its affinity and control groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from specgen.system.machine import (
    available_memory_bytes,
    describe_machine,
    physical_cores_of,
    usable_cores,
    usable_memory,
    usable_threads,
)
from tests.helpers.common import ROOT
from tests.system.test_control_groups import V2_MOUNT, tree

N_CORES = usable_cores().amount
N_THREADS = usable_threads().amount


def container(root: Path, quota: float | None = None, memory_bytes: int | None = None) -> Path:
    """Return the folder of the files of a container with these limits."""
    files = {}
    if quota is not None:
        files["cpu.max"] = f"{round(100_000 * quota)} 100000"
    if memory_bytes is not None:
        files["memory.max"] = str(memory_bytes)
        files["memory.current"] = str(memory_bytes // 4)
    return tree(root, "0::/\n", V2_MOUNT, files)


@pytest.mark.parametrize(
    ("quota", "n_cores", "n_threads"),
    [(0.5, 1, 1), (0.01, 1, 1), (1.5, 1, 2), (1000.0, None, None)],
)
def test_a_quota_is_rounded_down_to_whole_cores_and_at_least_one(
    quota: float, n_cores: int | None, n_threads: int | None, tmp_path: Path
) -> None:
    root = container(tmp_path, quota)
    assert usable_cores(root).amount == min(N_CORES, n_cores or N_CORES)
    assert usable_threads(root).amount == min(N_THREADS, n_threads or N_THREADS)
    if quota < 1.0:
        assert usable_cores(root).limit == f"the container's CPU quota is {quota}"
    if n_cores is None:
        assert usable_cores(root) == usable_cores(tmp_path / "none")


def test_threads_of_one_core_count_once(tmp_path: Path) -> None:
    siblings = ["0,4", "1,5", "2,6", "3,7"] * 2  # logical cores 0 and 4 share a core, and so on
    for processor, names in enumerate(siblings):
        name = "core_cpus_list" if processor % 4 else "thread_siblings_list"
        file = tmp_path / f"sys/devices/system/cpu/cpu{processor}/topology" / name
        file.parent.mkdir(parents=True)
        file.write_text(f"{names}\n")
    assert physical_cores_of(frozenset({0, 4}), tmp_path) == 1
    assert physical_cores_of(frozenset({0, 1, 4}), tmp_path) == 2
    assert physical_cores_of(frozenset(range(8)), tmp_path) == 4
    # Where nothing is known of cores, each logical one counts.
    assert physical_cores_of(frozenset({8, 9}), tmp_path) == 2


def test_a_memory_limit_counts_where_it_is_smaller(tmp_path: Path) -> None:
    root = container(tmp_path, memory_bytes=400_000_000)
    usable = usable_memory(root)
    assert usable.amount == 400_000_000
    assert usable.limit == "the container's memory limit is 400 MB"
    assert available_memory_bytes(root) == 300_000_000
    described = describe_machine(root)
    assert described.memory_bytes == psutil.virtual_memory().total
    assert described.usable_memory_bytes == 400_000_000
    assert described.available_bytes == 300_000_000
    assert described.memory_limit == usable.limit


def test_a_limit_larger_than_the_machine_is_none(tmp_path: Path) -> None:
    total_bytes = psutil.virtual_memory().total
    root = container(tmp_path, memory_bytes=10 * total_bytes)
    assert usable_memory(root).amount == total_bytes
    assert not usable_memory(root).limit
    assert available_memory_bytes(root) <= total_bytes


# --- real limits

PROGRAM = """
import json
from specgen.llama import default_threads
from specgen.system.files import as_json
from specgen.system.machine import describe_machine
print(json.dumps([default_threads(), as_json(describe_machine())]))
"""


def seen_by(*prefix: str, program: str = PROGRAM) -> str:
    """Run a program in a separate process, and return its output."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [*prefix, sys.executable, "-c", program]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
@pytest.mark.skipif(N_THREADS < 2, reason="a single core cannot be restricted")
def test_an_affinity_is_respected() -> None:
    processor = min(os.sched_getaffinity(0))
    program = f"import os; os.sched_setaffinity(0, {{{processor}}})" + PROGRAM
    n_threads, described = json.loads(seen_by(program=program))
    assert (n_threads, described["n_usable_cores"]) == (1, 1)
    limit = f"this process may run on 1 of {os.cpu_count()} logical cores"
    assert described["core_limit"] == limit


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
@pytest.mark.skipif(N_THREADS < 2, reason="a single core cannot be restricted")
def test_other_programs_count_on_the_cores_of_this_process_only() -> None:
    program = f"""
import os
from specgen.system.machine import core_time
total_s = core_time().total_s
os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})
print([total_s, core_time().total_s])
"""
    total_s, part_s = json.loads(seen_by(program=program))
    assert part_s < 0.75 * total_s


@pytest.fixture
def group() -> Iterator[list[Path]]:
    """Real control groups with half a core and 2 GB; skipped where a test may not make them."""
    folders: list[Path] = []
    try:
        yield from _groups(folders)
    finally:
        for folder in folders:
            folder.rmdir()


def _groups(folders: list[Path]) -> Iterator[list[Path]]:
    top = Path("/sys/fs/cgroup")
    limits = {
        "cpu/specgen-test": {"cpu.cfs_quota_us": "50000"},
        "memory/specgen-test": {"memory.limit_in_bytes": "2147483648"},
    }
    if (top / "cgroup.controllers").exists():
        limits = {"specgen-test": {"cpu.max": "50000 100000", "memory.max": "2147483648"}}
    try:
        for name, values in limits.items():
            folder = top / f"{name}-{os.getpid()}"
            folder.mkdir()
            folders.append(folder)
            for file, value in values.items():
                (folder / file).write_text(value)
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield folders


@pytest.mark.slow
def test_a_real_container_is_respected_and_its_limits_are_named(
    group: list[Path], tiny_models: Path
) -> None:
    enter = "".join(f"echo $$ > {folder}/cgroup.procs && " for folder in group)
    shell = ("sh", "-c", f'{enter}exec "$@"', "sh")
    n_threads, described = json.loads(seen_by(*shell))
    assert n_threads == described["n_usable_cores"] == 1
    assert described["usable_memory_bytes"] == 2**31
    assert 2**31 - 2**28 < described["available_bytes"] < 2**31
    doctor = "from specgen.cli.app import main\nmain(['doctor'])"
    lines = [" ".join(line.split()) for line in seen_by(*shell, program=doctor).splitlines()]
    assert "limit on cores 1 core: the container's CPU quota is 0.5" in lines
    assert "limit on memory the container's memory limit is 2.15 GB" in lines
    options = ["-m", str(tiny_models / "target.gguf"), "-md", "none", "-t", "2", "-tb", "3"]
    run = f"""
import sys
from specgen.cli.app import main
sys.stderr = sys.stdout
main(["run", *{options}, "-n", "4", "Once"])
"""
    out = seen_by(*shell, program=run)
    for option in ("-t 2 is slower than -t 1", "-tb 3 is slower than -tb 1"):
        assert f"note: {option}: the container's CPU quota is 0.5" in out


def test_the_age_of_a_process_grows_with_the_clock() -> None:
    program = """
import time
from specgen.system.machine import process_age_s
ages_s = [process_age_s()]
time.sleep(0.2)
ages_s.append(process_age_s())
print(ages_s)
"""
    first_s, last_s = json.loads(seen_by(program=program))
    assert first_s > 0.0
    assert last_s - first_s > 0.15
