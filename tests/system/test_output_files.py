"""Files that the user asks for: written as a whole or not at all, with the mode the user wants."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from specgen.errors import OutputError
from specgen.render.streams import REPLAY, write_page
from specgen.system.files import write_output
from tests.helpers.disk import full_disk

pytest.importorskip("resource", reason="needs POSIX limits and rights")


@pytest.fixture
def small_files() -> Iterator[None]:
    """Let no file grow beyond 1000 bytes."""
    with full_disk(1000):
        yield


@pytest.fixture
def umask() -> Iterator[None]:
    """Let new files be readable by the group, but by nobody else."""
    before = os.umask(0o027)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.usefixtures("small_files")
def test_a_page_that_cannot_be_written_keeps_the_earlier_one(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("the earlier page", encoding="utf-8")
    with pytest.raises(OutputError, match="cannot be written"):
        write_page(page, REPLAY, [])
    assert page.read_text(encoding="utf-8") == "the earlier page"
    assert list(tmp_path.iterdir()) == [page]


@pytest.mark.usefixtures("umask")
def test_a_new_file_follows_the_umask_and_another_one_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "new"
    write_output(file, b"1")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    file.chmod(0o604)
    write_output(file, b"2")
    assert file.read_bytes() == b"2"
    assert stat.S_IMODE(file.stat().st_mode) == 0o604


def test_a_file_that_cannot_be_replaced_is_overwritten(tmp_path: Path) -> None:
    longest_name = "x" * os.pathconf(tmp_path, "PC_NAME_MAX")
    file = tmp_path / longest_name
    for data in (b"first", b"2"):
        write_output(file, data)
        assert file.read_bytes() == data


def test_a_link_stays_one_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"1")
    link = tmp_path / "link"
    link.symlink_to(file)
    write_output(link, b"2")
    assert link.is_symlink()
    assert file.read_bytes() == b"2"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_output(pipe, b"3")
    assert os.read(reader, 9) == b"3"
    os.close(reader)


def test_a_link_that_leads_to_itself_is_replaced(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("link")
    write_output(link, b"1")
    assert link.read_bytes() == b"1"
