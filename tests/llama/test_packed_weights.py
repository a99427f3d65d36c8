"""Packed weights are stored on disk, and used again only if they are what would be packed now."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from specgen.errors import MemoryLimitError
from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.kernels import packed_weights
from specgen.llama.kernels.packed_weights import keep_packed_weights, kept_bytes
from specgen.llama.library import has_gpu
from specgen.options import ContextOptions, SessionOptions
from specgen.session.open import Reporter, WantedSession, open_session
from specgen.system.arrays import Logits
from specgen.system.files import make_room
from tests.helpers import rows
from tests.helpers.cli import Cli
from tests.helpers.packed_folder import Disk, cut, files, folder
from tests.tiny import TinyConfig, write_tiny_model

CONFIG = TinyConfig(n_embd=64, n_layer=2, tensor_type="q8_0")

__all__ = ["folder"]

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny.gguf", CONFIG)


def decoded(path: Path) -> Logits:
    with contextlib.closing(LlamaModel(path)) as model:
        backend = LlamaBackend(
            model, ContextOptions(n_threads=1), n_ctx=64, clock=time.perf_counter, n_outputs=4
        )
        with contextlib.closing(backend):
            return rows.decoded(backend, (5, 6, 7, 200))


def marked(path: Path) -> os.stat_result:
    """Give a file a time of use long ago."""
    os.utime(path, (1, 1))
    return path.stat()


def test_the_next_process_uses_what_one_packed(folder: Path, model_file: Path) -> None:
    first = decoded(model_file)
    (kept,) = files(folder)
    assert kept.name.startswith("tiny-")
    before = marked(kept)
    np.testing.assert_array_equal(decoded(model_file), first)
    assert files(folder) == [kept]
    assert kept.stat().st_ino == before.st_ino
    assert kept.stat().st_mtime > before.st_mtime  # it was used


@pytest.mark.skipif(has_gpu(), reason="on a GPU, the number of layers decides what is packed")
def test_layers_for_a_gpu_that_does_not_exist_need_no_other_file(
    folder: Path, model_file: Path
) -> None:
    for n_gpu_layers in (-1, 0, 1, 99):
        LlamaModel(model_file, n_gpu_layers=n_gpu_layers).close()
    assert len(files(folder)) == 1


def scrawl(offset: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 0xFF
        path.write_bytes(data)

    return change


# The packed weights begin at 64 KB, and their description follows them.
@pytest.mark.parametrize("damage", [cut, scrawl(0), scrawl(64 << 10), scrawl(-96), scrawl(-1)])
def test_a_damaged_file_is_packed_again(
    folder: Path, model_file: Path, damage: Callable[[Path], None]
) -> None:
    whole = decoded(model_file)
    (kept,) = files(folder)
    data = kept.read_bytes()
    damage(kept)
    np.testing.assert_array_equal(decoded(model_file), whole)
    decoded(model_file)  # weights that were mapped in part are written by the next process
    (again,) = files(folder)
    assert again.read_bytes() == data


def test_another_model_at_the_same_path_is_packed_again(folder: Path, model_file: Path) -> None:
    """Even where name, size and time are the same."""
    decoded(model_file)
    about = model_file.stat()
    other = write_tiny_model(model_file.with_name("other.gguf"), CONFIG.draft(0.3))
    with contextlib.closing(LlamaModel(other)):
        pass
    keep_packed_weights(None)
    expected = decoded(other)
    assert other.stat().st_size == about.st_size
    other.replace(model_file)
    os.utime(model_file, ns=(about.st_atime_ns, about.st_mtime_ns))
    keep_packed_weights(folder)
    np.testing.assert_array_equal(decoded(model_file), expected)


def test_a_lack_of_memory_does_not_delete_the_file(folder: Path, tmp_path: Path) -> None:
    config = TinyConfig(n_embd=512, n_layer=8, tensor_type="q8_0")
    model_file = write_tiny_model(tmp_path / "larger.gguf", config)
    decoded(model_file)
    (kept,) = files(folder)
    n_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = n_pages * resource.getpagesize() + kept.stat().st_size // 2
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        with pytest.raises(MemoryLimitError):
            LlamaModel(model_file)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert files(folder) == [kept]


def test_the_least_recently_used_makes_room(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [write_tiny_model(tmp_path / f"{name}.gguf", CONFIG) for name in "abc"]
    for model in models[:2]:
        decoded(model)
    a, b = files(folder)
    size = a.stat().st_size
    os.utime(a, (2, 2))
    os.utime(b, (1, 1))
    most = int(2.5 * size / packed_weights.MAX_SHARE)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(total=most, free=most))
    decoded(models[2])
    assert [path.name[0] for path in files(folder)] == ["a", "c"]


def test_files_that_vanish_are_left_out(folder: Path, model_file: Path) -> None:
    """As when another process deletes or renames one after the folder was listed."""
    folder.mkdir()
    gone = folder / "gone.packed"
    gone.symlink_to(folder / "nowhere")
    assert kept_bytes(folder) == 0
    decoded(model_file)
    (kept,) = [path for path in files(folder) if path != gone]
    assert kept_bytes(folder) == kept.stat().st_size
    assert make_room([gone, kept], n_bytes=1, max_bytes=1)
    assert files(folder) == [gone]


@pytest.mark.parametrize(
    "disk", [Disk(total=1000), Disk(free=1000)], ids=["small disk", "full disk"]
)
def test_without_room_nothing_is_kept(
    folder: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    decoded(model_file)
    assert files(folder) == []


@pytest.mark.parametrize("choice", ["auto", "off"])
def test_the_command_line_chooses(
    folder: Path, tmp_path: Path, model_file: Path, cli: Cli, choice: str
) -> None:
    place = Path(os.environ["SPECGEN_CACHE"]) / "packed"
    options = ("--packed-cache", choice, "--draft", "none", "-n", "4", "--raw")
    result = cli("run", "-m", str(model_file), *options)
    assert result.code == 0
    assert bool(files(place)) == (choice == "auto")
    assert (f"are stored in {place}" in result.err) == (choice == "auto")
    assert "are stored in" not in cli("run", "-m", str(model_file), *options).err


@pytest.mark.usefixtures("folder")
def test_a_folder_that_cannot_be_written_is_not_called_full(
    cli: Cli, tmp_path: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(free=1000))
    options = ("--draft", "none", "-n", "4", "--raw")
    assert "too little disk space" in cli("run", "-m", str(model_file), *options).err
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("SPECGEN_CACHE", str(blocked / "cache"))
    notes = cli("run", "-m", str(model_file), *options).err
    assert "cannot be written, so nothing is kept" in notes
    assert "too little disk space" not in notes


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_note_appears_only_after_weights_were_written(
    folder: Path, tmp_path: Path, model_file: Path, is_writable: bool
) -> None:
    if not is_writable:
        folder.write_text("a file in the place of the folder", encoding="utf-8")
    notes: list[str] = []
    wanted = WantedSession(SessionOptions(model_file, target_context=ContextOptions(n_threads=1)))
    with open_session(wanted, Reporter(note=notes.append), clock=time.perf_counter):
        assert not any("are stored in" in note for note in notes)
    assert any("are stored in" in note for note in notes) == is_writable
