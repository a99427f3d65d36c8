"""Weights that do not fit into memory are read from disk in each pass; results are identical."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from specgen.errors import ModelFileError
from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.kernels.attached import Kernels
from specgen.llama.kernels.packed_weights import (
    Streaming,
    keep_packed_weights,
    streaming_of,
    weight_sizes,
)
from specgen.llama.weights import LoadedWeights, lease_weights
from specgen.options import ContextOptions
from specgen.system.arrays import Logits
from tests.helpers import rows
from tests.helpers.cli import Cli
from tests.helpers.disk import full_disk
from tests.helpers.mtp import write_mtp_model
from tests.helpers.packed_folder import Disk, cut, files, folder
from tests.tiny import TinyConfig, write_tiny_model

#: Each matrix has many pages.
CONFIG = TinyConfig(n_embd=256, n_ff=512, n_layer=4, n_head=4, tensor_type="q8_0")
#: Delays the reader, so that pages are needed before it reads them.
DELAY = "SPECGEN_KERNELS_READ_DELAY_MS"

__all__ = ["folder"]

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("streamed") / "tiny.gguf", CONFIG)


@pytest.fixture
def half(model_file: Path) -> int:
    """Half of the memory that the weights need."""
    return weight_sizes(model_file).packed_bytes // 2


@contextlib.contextmanager
def loaded(path: Path, weights_bytes: int | None) -> Iterator[LoadedWeights]:
    """Weights, of which this number of bytes may be in memory. Models of the file share them."""
    weights = lease_weights(path, -1, weights_bytes=weights_bytes)
    try:
        yield weights
    finally:
        weights.release()


@contextlib.contextmanager
def opened(model: LlamaModel) -> Iterator[LlamaBackend]:
    backend = LlamaBackend(
        model, ContextOptions(n_threads=2), n_ctx=256, clock=time.perf_counter, n_outputs=64
    )
    with contextlib.closing(backend):
        yield backend


def passes(backend: LlamaBackend) -> list[Logits]:
    """The logits of a prompt, and of some passes with one or a few rows."""
    prompt = tuple(range(5, 45))
    drafts = [(7,), (8,), (9, 10, 11), (12,), (13, 14, 15, 16, 17, 18, 19, 20)]
    return [rows.decoded(backend, tokens) for tokens in (prompt, *drafts)]


def decoded(path: Path) -> Logits:
    """The result of `passes` with a new model."""
    with contextlib.closing(LlamaModel(path)) as model, opened(model) as backend:
        return np.concatenate(passes(backend))


def streamed(path: Path, weights_bytes: int) -> Logits:
    """The same, with weights that are streamed."""
    with loaded(path, weights_bytes) as weights:
        assert weights.streamed_bytes > 0
        assert not weights.is_unpacked
        return decoded(path)


@pytest.fixture(scope="module")
def in_memory(model_file: Path) -> Logits:
    """The logits with all weights in memory."""
    keep_packed_weights(None)
    return decoded(model_file)


@pytest.mark.parametrize("delay", ["0", "3"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.95])
def test_streamed_weights_give_the_same_bits(
    folder: Path,
    model_file: Path,
    in_memory: Logits,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    delay: str,
) -> None:
    """In the process that packs them, and in the next one."""
    monkeypatch.setenv(DELAY, delay)
    weights_bytes = int(share * weight_sizes(model_file).packed_bytes)
    np.testing.assert_array_equal(streamed(model_file, weights_bytes), in_memory)
    (kept,) = files(folder)
    before = kept.stat()
    np.testing.assert_array_equal(streamed(model_file, weights_bytes), in_memory)
    assert files(folder) == [kept]
    assert kept.stat().st_ino == before.st_ino


def test_streamed_and_loaded_weights_use_the_same_packed_file(
    folder: Path, model_file: Path, half: int, in_memory: Logits
) -> None:
    """The file is the same, whichever of them writes it."""
    streamed(model_file, half)
    (kept,) = files(folder)
    data = kept.read_bytes()
    np.testing.assert_array_equal(decoded(model_file), in_memory)
    kept.unlink()
    decoded(model_file)
    (again,) = files(folder)
    np.testing.assert_array_equal(streamed(model_file, half), in_memory)
    assert again.read_bytes() == data


def test_less_is_read_the_more_may_stay(folder: Path, model_file: Path) -> None:
    packed_bytes = weight_sizes(model_file).packed_bytes
    read: list[int] = []
    for share in (0.1, 0.5, 0.9, 1.0):
        with loaded(model_file, int(share * packed_bytes)) as weights:
            read.append(weights.streamed_bytes)
    assert packed_bytes > read[0] > read[1] > read[2] > read[3] == 0


def test_several_contexts_take_turns(
    folder: Path, model_file: Path, half: int, in_memory: Logits
) -> None:
    """Their graphs use the same matrices at the same time: what one needs, another one drops."""
    results: list[Logits] = []
    with loaded(model_file, half), contextlib.closing(LlamaModel(model_file)) as model:

        def decode() -> None:
            with opened(model) as backend:
                results.append(np.concatenate(passes(backend)))

        threads = [threading.Thread(target=decode) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == len(threads)
    for result in results:
        np.testing.assert_array_equal(result, in_memory)


def status_of(child: int) -> int:
    """The status of a child process that ends soon; if it does not, it is killed."""
    for _ in range(1000):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def test_a_fork_continues_without_the_reader(
    folder: Path, model_file: Path, half: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DELAY, "5")
    with loaded(model_file, half) as weights:
        decoded(model_file)
        child = os.fork()
        if child == 0:
            # It has no reader that it could wait for when it frees the weights.
            weights.release()
            os._exit(0)
        assert status_of(child) == 0


# --- packing --------------------------------------------------------------------------------------


def test_packing_reports_its_progress(folder: Path, model_file: Path, half: int) -> None:
    reports: list[tuple[int, int]] = []

    def note(n_packed: int, n_bytes: int) -> None:
        reports.append((n_packed, n_bytes))

    lease_weights(model_file, -1, weights_bytes=half, on_packing=note).release()
    assert {n_bytes for _, n_bytes in reports} == {weight_sizes(model_file).packed_bytes}
    done = [n_packed for n_packed, _ in reports]
    assert done[0] == 0
    assert done == sorted(done)
    assert done[-1] == 2 * half or done[-1] == 2 * half + 1

    reports.clear()
    lease_weights(model_file, -1, weights_bytes=half, on_packing=note).release()
    assert reports == []


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Give SIGINT its usual effect, which it lacks in the background of a shell."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_interrupted_packing_leaves_no_files(
    folder: Path, model_file: Path, half: int, in_memory: Logits
) -> None:
    def interrupt(n_packed: int, n_bytes: int) -> None:
        if n_packed > n_bytes // 2:
            assert files(folder)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        lease_weights(model_file, -1, weights_bytes=half, on_packing=interrupt)
    assert files(folder) == []

    calls = iter(range(10))
    with pytest.raises(ModelFileError):
        lease_weights(model_file, -1, weights_bytes=half, goes_on=lambda: next(calls) < 9)
    assert files(folder) == []
    np.testing.assert_array_equal(streamed(model_file, half), in_memory)


def test_leftovers_of_a_killed_process_are_deleted(
    folder: Path, model_file: Path, half: int
) -> None:
    folder.mkdir()
    left = folder / "other-0123.packed.abcdef.new"
    left.write_bytes(b"half of a file")
    streamed(model_file, half)
    assert not left.exists()
    assert len(files(folder)) == 1


def without_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\0" * 8)


def scrawl(path: Path) -> None:
    """Damage the first tensor."""
    data = bytearray(path.read_bytes())
    data[64 * 1024] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, without_header, scrawl])
def test_a_damaged_file_is_packed_again(
    folder: Path,
    model_file: Path,
    half: int,
    in_memory: Logits,
    damage: Callable[[Path], None],
) -> None:
    streamed(model_file, half)
    (kept,) = files(folder)
    data = kept.read_bytes()
    damage(kept)
    np.testing.assert_array_equal(streamed(model_file, half), in_memory)
    (again,) = files(folder)
    assert again.read_bytes() == data


# --- where weights cannot be streamed -------------------------------------------------------------


def unpacked(path: Path, weights_bytes: int) -> Logits:
    """The result of `decoded`, with weights that are mapped from the model's own file."""
    with loaded(path, weights_bytes) as weights:
        assert weights.is_unpacked
        assert weights.packed is None
        assert weights.streamed_bytes == weight_sizes(path).file_bytes
        return decoded(path)


def test_without_disk_space_the_models_own_file_is_used(
    folder: Path,
    model_file: Path,
    half: int,
    kernels: Kernels,
    in_memory: Logits,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed_bytes = 2 * half
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(packed_bytes, 0, packed_bytes))
    assert streaming_of(model_file) is Streaming.NO_ROOM
    before = kernels.counts().packed_bytes
    with loaded(model_file, half):
        assert kernels.counts().packed_bytes == before
    result = unpacked(model_file, half)
    assert np.corrcoef(result.ravel(), in_memory.ravel())[0, 1] > 0.99
    assert files(folder) == []


def test_half_of_the_free_space_is_room(
    folder: Path, model_file: Path, half: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than for a file without which a model is only packed again."""
    packed_bytes = weight_sizes(model_file).packed_bytes
    free = 2 * packed_bytes + 2
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(3 * packed_bytes, 0, free))
    decoded(model_file)
    assert files(folder) == []
    assert streaming_of(model_file) is Streaming.NEW_FILE
    streamed(model_file, half)
    assert len(files(folder)) == 1
    assert streaming_of(model_file) is Streaming.STORED


def test_a_full_disk_leaves_nothing(
    folder: Path, model_file: Path, half: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write fails although there seemed to be enough space."""
    with full_disk(half):
        unpacked(model_file, half)
    assert files(folder) == []


def test_without_the_kernels_the_models_own_file_is_used(
    folder: Path, model_file: Path, half: int, kernels: Kernels
) -> None:
    kernels.enable(products=False, attention=False)
    assert streaming_of(model_file) is Streaming.OTHER_KERNELS
    unpacked(model_file, half)
    assert files(folder) == []


def test_packed_weights_that_are_not_kept_are_not_streamed(model_file: Path, half: int) -> None:
    keep_packed_weights(None)
    assert streaming_of(model_file) is Streaming.NOT_KEPT
    unpacked(model_file, half)


def test_experts_are_not_streamed(folder: Path, tmp_path: Path) -> None:
    path = write_mtp_model(tmp_path / "experts.gguf", "glm4moe")
    assert streaming_of(path) is Streaming.EXPERTS
    unpacked(path, weight_sizes(path).packed_bytes // 2)
    assert files(folder) == []


def test_drafts_of_the_models_own_layers(folder: Path, tmp_path: Path, cli: Cli) -> None:
    """The graphs of the model and of its MTP layer use different matrices of the same file."""
    path = write_mtp_model(tmp_path / "mtp.gguf", "qwen35", n_embd=256, n_ff=512)
    arguments = ("-m", str(path), "--draft", "mtp", "-n", "40", "--raw", "--temp", "0", "Once")
    in_memory = cli(*arguments)
    weights_bytes = weight_sizes(path).packed_bytes // 2
    # The command shares these weights.
    weights = lease_weights(path, -1, mtp=True, weights_bytes=weights_bytes)
    assert weights.streamed_bytes > 0
    before = weights.n_users
    streamed_answer = cli(*arguments)
    assert weights.n_users == before
    weights.release()
    assert in_memory.code == streamed_answer.code == 0
    assert streamed_answer.out == in_memory.out
