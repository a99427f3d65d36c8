"""Linux control groups that limit the memory of processes, and the page cache."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specgen.errors import SpecgenError

#: Where the control groups are usually mounted: version 1 for memory, and version 2.
_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


class GroupError(SpecgenError):
    """A control group could not be created."""


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group with a limit on memory. The page cache counts towards the limit."""

    folder: Path

    @property
    def members(self) -> Path:
        """The file to which a process writes its id to become a member."""
        return self.folder / "cgroup.procs"

    @property
    def peak_bytes(self) -> int | None:
        """The peak memory use; None if the system does not record it."""
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            with contextlib.suppress(OSError, ValueError):
                return int((self.folder / name).read_text())
        return None

    @property
    def n_killed(self) -> int | None:
        """How many members were killed when memory ran out; None if the system does not count."""
        for name in ("memory.oom_control", "memory.events"):
            with contextlib.suppress(OSError):
                for line in (self.folder / name).read_text().splitlines():
                    key, _, value = line.partition(" ")
                    if key == "oom_kill":
                        return int(value)
        return None


@contextlib.contextmanager
def memory_group(name: str, max_bytes: int) -> Iterator[MemoryGroup]:
    """Create a control group with a limit on memory, and remove it after the block.

    Raises:
        GroupError: If this process may not create one.
    """
    is_v1 = _V1.is_dir()
    folder = (_V1 if is_v1 else _V2) / f"specgen-{name}-{os.getpid()}"
    try:
        folder.mkdir()
        limit = folder / ("memory.limit_in_bytes" if is_v1 else "memory.max")
        limit.write_text(str(max_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise GroupError(
            f"{folder}: cannot create a control group that limits memory: {error.strerror}",
            hint="run this as root, or in a container with --memory and pass --limit 0",
        ) from error
    try:
        yield MemoryGroup(folder)
    finally:
        with contextlib.suppress(OSError):  # a member may still be ending
            folder.rmdir()


def drop_cache(files: Iterable[Path]) -> bool:
    """Drop the page cache, so that files are read from disk again.

    Args:
        files: The files to drop if this process may not drop the whole cache.

    Returns:
        Whether the whole cache was dropped. If not, parts of files that are in use may remain.
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
