"""Control groups of Linux that limit the memory of processes, and the system's cache of files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specgen.errors import SpecgenError

#: Where the hierarchies are usually mounted: version 1 for memory, and version 2.
_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


class GroupError(SpecgenError):
    """No control group can be made."""


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group with a limit on memory, in which the cache of files counts."""

    folder: Path

    @property
    def members(self) -> Path:
        """The file that a process writes its id to, to become a member."""
        return self.folder / "cgroup.procs"

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that was used; None if the system does not count it."""
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            with contextlib.suppress(OSError, ValueError):
                return int((self.folder / name).read_text())
        return None

    @property
    def n_killed(self) -> int | None:
        """How many members were killed for want of memory; None if the system does not count."""
        for name in ("memory.oom_control", "memory.events"):
            with contextlib.suppress(OSError):
                for line in (self.folder / name).read_text().splitlines():
                    key, _, value = line.partition(" ")
                    if key == "oom_kill":
                        return int(value)
        return None


@contextlib.contextmanager
def memory_group(name: str, max_bytes: int) -> Iterator[MemoryGroup]:
    """Make a control group with a limit on memory, and remove it after the block.

    Raises:
        GroupError: If this process may not make one.
    """
    v1 = _V1.is_dir()
    folder = (_V1 if v1 else _V2) / f"specgen-{name}-{os.getpid()}"
    try:
        folder.mkdir()
        limit = folder / ("memory.limit_in_bytes" if v1 else "memory.max")
        limit.write_text(str(max_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise GroupError(
            f"{folder}: no control group with a limit on memory can be made: {error.strerror}",
            hint="run this as root, or in a container with --memory and give --limit 0",
        ) from error
    try:
        yield MemoryGroup(folder)
    finally:
        with contextlib.suppress(OSError):  # a member still ends
            folder.rmdir()


def drop_cache(files: Iterable[Path]) -> bool:
    """Let the system forget the content of files, so that they are read from the disk again.

    Args:
        files: The files to forget, if not all may be forgotten.

    Returns:
        Whether all files were forgotten. Otherwise parts that are in use may remain.
    """
    os.sync()
    try:
        _DROP_CACHES.write_text("1")
    except OSError:
        for file in files:
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return False
    return True
