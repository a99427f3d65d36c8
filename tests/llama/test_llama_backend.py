"""The llama.cpp backend on tiny models: trees, rollback, limits, and files that are not models."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from specgen.errors import BackendError, MemoryLimitError, ModelFileError, UsageError
from specgen.llama import LlamaBackend, LlamaModel, weights
from specgen.llama import model as model_module
from specgen.llama.kernels.attached import Kernels
from specgen.llama.library import llama_cpp
from specgen.method.backend import Batch
from specgen.method.draft import ROOT, Branches, Draft, keep_path, pack
from specgen.options import ContextOptions
from tests.helpers.cli import ended
from tests.helpers.rows import batch_of, decoded_one_by_one
from tests.tiny import TinyConfig, write_tiny_model

TEXT = [10, 17, 45, 99, 3, 120, 33]
#: Six nodes, four leaves, two of them deep.
TREE = Draft(
    tokens=(40, 41, 42, 43, 44, 45),
    parents=(ROOT, ROOT, 0, 0, 2, 1),
    origins=("test",) * 6,
    probabilities=(None,) * 6,
    distributions=(None,) * 6,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    path = write_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny.gguf", TinyConfig(n_head_kv=1)
    )
    model = LlamaModel(path)
    yield model
    model.close()


def context(model: LlamaModel, *, n_sequences: int = 8, n_ctx: int = 256) -> LlamaBackend:
    return LlamaBackend(
        model,
        # f32 throughout, so that rounding does not hide a small mistake
        ContextOptions(n_threads=1, cache_type_k="f32", cache_type_v="f32", flash_attention="off"),
        n_ctx=n_ctx,
        clock=time.perf_counter,
        n_sequences=n_sequences,
        n_outputs=16,
    )


@pytest.mark.parametrize("path", [(), (0,), (1,), (0, 2), (0, 3), (0, 2, 4), (1, 5)])
@pytest.mark.parametrize("first", [0, 3])
def test_keeping_a_path_leaves_the_cache_as_if_it_alone_had_been_decoded(
    model: LlamaModel, path: tuple[int, ...], first: int
) -> None:
    backend = context(model)
    decoded_one_by_one(backend, [5, 6, 7], sequence=7)  # another generation, which must not notice
    other = decoded_one_by_one(backend, [8], sequence=7)
    decoded_one_by_one(backend, TEXT[:-1], sequence=first)
    batch = Batch()
    slot = Branches(first, 4)
    pack(batch, backend, slot, TEXT[-1:], TREE)
    backend.decode(batch)
    keep_path(backend, slot, TREE, path)

    kept = TEXT + [TREE.tokens[node] for node in path]
    assert backend.length(first) == len(kept)
    assert all(backend.length(branch) == 0 for branch in range(first + 1, first + 4))
    alone = context(model, n_sequences=1)
    expected = decoded_one_by_one(alone, [*kept, 60, 61])
    assert decoded_one_by_one(backend, [60, 61], sequence=first) == pytest.approx(
        expected, abs=2e-4
    )
    backend.remove(7, 3)
    assert decoded_one_by_one(backend, [8], sequence=7) == pytest.approx(other, abs=2e-4)
    backend.close()
    alone.close()


def test_only_wanted_logits_are_given_and_they_are_a_view(model: LlamaModel) -> None:
    backend = context(model)
    batch = Batch()
    for position, token in enumerate(TEXT):
        batch.add(token, position, (0,), position in (2, 6))
    logits = backend.decode(batch)
    assert logits.shape == (2, model.vocabulary.n_tokens)
    assert not logits.flags.owndata
    assert backend.n_decoded_rows == len(TEXT)
    assert backend.decode_s > 0
    first, last = logits.copy()
    alone = context(model)
    assert first == pytest.approx(decoded_one_by_one(alone, TEXT[:3]), abs=2e-4)
    assert last == pytest.approx(decoded_one_by_one(alone, TEXT[3:]), abs=2e-4)
    assert backend.decode(batch_of([1], 7, wanted="none")).shape == (0, model.vocabulary.n_tokens)
    backend.close()
    alone.close()


def test_hidden_states_are_what_the_logits_are_made_of(model: LlamaModel) -> None:
    """The output matrix, found from some rows, gives the logits of the others."""
    backend, plain = context(model), context(model)
    all_logits, all_hidden = [], []
    for start in range(0, 240, 16):
        batch = batch_of(((7 * at * at + 3) % 290 for at in range(start, start + 16)), start)
        logits, hidden = backend.decode_hidden(batch)
        assert hidden.shape == (16, model.n_embd)
        assert logits == pytest.approx(plain.decode(batch), abs=2e-4)
        all_logits.append(logits.copy())
        all_hidden.append(hidden.copy())
    found, seen = np.concatenate(all_logits), np.concatenate(all_hidden)
    assert len(seen) > 2 * model.n_embd
    half = len(seen) // 2 + model.n_embd // 2
    matrix, *_ = np.linalg.lstsq(seen[:half], found[:half], rcond=None)
    assert seen[half:] @ matrix == pytest.approx(found[half:], abs=1e-2)
    backend.close()
    plain.close()


def test_a_decode_that_is_not_possible_is_an_error_with_the_position(model: LlamaModel) -> None:
    backend = context(model)
    decoded_one_by_one(backend, TEXT)
    for wrong, why in (
        (batch_of([1], 50), "position 50"),
        (Batch(), "0 rows"),
        (batch_of([1] * 17, len(TEXT)), "17 rows of logits"),
    ):
        with pytest.raises(BackendError, match=why):
            backend.decode(wrong)
    backend.close()
    backend.close()


def test_the_vocabulary_is_byte_exact(model: LlamaModel) -> None:
    vocabulary = model.vocabulary
    for text in (
        "hello world",
        "  tabs\tand\n\nlines ",
        "é 😀 中文 עברית",
        "a\x00b",
        "def f(self):",
    ):
        tokens = vocabulary.tokenize(text, add_special=False, parse_special=False)
        assert b"".join(vocabulary.token_bytes(token) for token in tokens) == text.encode()
    with_bos = vocabulary.tokenize("a", add_special=True, parse_special=False)
    assert with_bos[0] == vocabulary.special_tokens()["bos"]
    assert vocabulary.token_bytes(with_bos[0]) == b""
    assert vocabulary.control_text(with_bos[0]) == "<|begin|>"
    name = vocabulary.tokenize("<|im_end|>", add_special=False, parse_special=True)
    assert len(name) == 1
    assert vocabulary.is_end(name[0])
    assert name[0] in vocabulary.end_tokens()
    assert len(vocabulary.tokenize("<|im_end|>", add_special=False, parse_special=False)) > 1
    assert vocabulary.tokenize("", add_special=False, parse_special=True) == []


# --- files that are not models


def complaint(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        LlamaModel(path)
    assert "\n" not in caught.value.message
    assert caught.value.message.startswith(str(path))
    return f"{caught.value.message} | {caught.value.hint}"


def test_bad_files_are_named_with_what_to_do(tmp_path: Path) -> None:
    assert "no such file" in complaint(tmp_path / "none.gguf")
    assert "it contains no .gguf file: give the path of one" in complaint(tmp_path)
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "model.safetensors").touch()
    assert "a directory, not a model file | llama.cpp's convert" in complaint(tmp_path / "checkout")
    (tmp_path / "inside.gguf").write_bytes(b"GGUF")
    assert str(tmp_path / "inside.gguf") in complaint(tmp_path)
    empty = tmp_path / "empty.gguf"
    empty.touch()
    assert "empty" in complaint(empty)
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"\x00" * 100)
    assert "an unfinished download" in complaint(other)
    first, second = (tmp_path / f"parts-0000{number}-of-00002.gguf" for number in (1, 2))
    write_tiny_model(first, TinyConfig())
    assert f"split into 2 files; missing: {second.name}" in complaint(first)
    first.rename(second)
    assert f"give the first: {first}" in complaint(second)
    header = tmp_path / "header.gguf"
    header.write_bytes(b"GGUF" + b"\x03\x00\x00\x00" + b"\xff" * 40)
    assert "cannot load" in complaint(header)
    beyond = tmp_path / "file" / "below.gguf"
    (tmp_path / "file").touch()
    assert "cannot be read" in complaint(beyond)
    for share in (0.05, 0.5, 0.95):
        path = write_tiny_model(tmp_path / "cut.gguf", TinyConfig(), keep_fraction=share)
        assert "fetch the file again" in complaint(path)
    if os.name != "nt":
        os.mkfifo(tmp_path / "pipe.gguf")  # nobody waits for it
        assert "a pipe or a device" in complaint(tmp_path / "pipe.gguf")


def test_a_model_larger_than_memory_is_a_memory_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_model(tmp_path / "large.gguf", TinyConfig())
    reason = "failed to allocate CPU buffer of size 996893184"
    monkeypatch.setattr(llama_cpp, "llama_model_load_from_file", lambda *_: None)
    monkeypatch.setattr(weights, "last_error", lambda: reason)
    with pytest.raises(MemoryLimitError, match=reason):
        LlamaModel(path)


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_ctrl_c_ends_the_loading_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny_model(tmp_path / "model.gguf", TinyConfig())
    told: list[bool] = []

    def load(_file: bytes, params: Any) -> None:
        told.append(params.progress_callback(0.1, None))
        signal.raise_signal(signal.SIGINT)
        told.append(params.progress_callback(0.2, None))

    monkeypatch.setattr(llama_cpp, "llama_model_load_from_file", load)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            LlamaModel(path)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert told == [True, False]
    assert capfd.readouterr() == ("", "")


# --- contexts that cannot be


def test_a_context_larger_than_the_memory_is_refused(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_ctx = 100_000_000
    with pytest.raises(MemoryLimitError, match="B are free"):
        context(model, n_ctx=n_ctx)
    needed = model.cache_bytes(4096, "f16", "f16")
    # Two layers, one head of keys and one of values, 32 numbers each, 2 bytes a number.
    assert needed == 4096 * 2 * 2 * 32 * 2
    assert model.cache_bytes(4096, "q8_0", "q8_0") == pytest.approx(needed * 34 / 64)

    class Little:
        total = 100 * 2**20
        available = 50 * 2**20

    monkeypatch.setattr(psutil, "virtual_memory", Little)
    with pytest.raises(MemoryLimitError, match="only 52.4 MB are free"):
        context(model)


def test_a_context_too_large_for_llama_cpp_is_refused(model: LlamaModel) -> None:
    for n_ctx in (2**31, 2**32 + 1, 10**17):  # llama.cpp would take the last 32 bits
        with pytest.raises(MemoryLimitError, match="larger than llama.cpp's largest"):
            context(model, n_ctx=n_ctx)


def test_memory_is_estimated_from_the_layers_with_attention(tmp_path: Path) -> None:
    # The first layer is recurrent, the second has two heads of 32 numbers.
    path = write_tiny_model(tmp_path / "hybrid.gguf", TinyConfig(architecture="lfm2"))
    hybrid = LlamaModel(path, n_gpu_layers=0)
    assert hybrid.cache_bytes(4096, "f16", "f16") == 4096 * 2 * 2 * 32 * 2
    with pytest.raises(MemoryLimitError, match="B are free"):
        context(hybrid, n_ctx=1_000_000_000)
    hybrid.close()


def test_a_quantised_value_cache_needs_flash_attention(model: LlamaModel) -> None:
    options = ContextOptions(cache_type_v="q8_0", flash_attention="off", n_threads=1)
    with pytest.raises(UsageError, match="flash attention"):
        LlamaBackend(model, options, n_ctx=256, clock=time.perf_counter)
    on = replace(options, cache_type_k="q8_0", flash_attention="on")
    backend = LlamaBackend(model, on, n_ctx=256, clock=time.perf_counter)
    decoded_one_by_one(backend, TEXT)
    backend.close()


# --- weights


def test_weights_of_a_file_are_in_memory_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_model(tmp_path / "one.gguf", TinyConfig())
    first = LlamaModel(path)
    link = tmp_path / "other name.gguf"
    link.symlink_to(path)
    second = LlamaModel(link)
    assert first.handle == second.handle
    assert (first.name, second.name) == ("one.gguf", "other name.gguf")
    # Each is closed for itself, and the last one frees the weights.
    freed: list[Any] = []
    free = llama_cpp.llama_model_free

    def noted(handle: Any) -> None:
        freed.append(handle)
        free(handle)

    monkeypatch.setattr(llama_cpp, "llama_model_free", noted)
    with contextlib.closing(context(second)) as backend:
        expected = decoded_one_by_one(backend, TEXT)
        first.close()
        first.close()
        with pytest.raises(BackendError, match="one.gguf is closed"):
            _ = first.handle
        backend.remove(0)
        assert np.array_equal(decoded_one_by_one(backend, TEXT), expected)
    assert not freed
    second.close()
    assert len(freed) == 1


def test_another_file_of_the_same_name_gets_its_own_weights(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "one.gguf", TinyConfig(seed=1))
    first = LlamaModel(path)
    new = write_tiny_model(tmp_path / "new.gguf", TinyConfig(seed=2))
    new.replace(path)
    second = LlamaModel(path)
    assert first.handle != second.handle
    rows = []
    for model in (first, second):
        with contextlib.closing(context(model)) as backend:
            rows.append(decoded_one_by_one(backend, TEXT))
        model.close()
    assert not np.allclose(rows[0], rows[1])


def test_with_layers_on_a_gpu_a_model_reports_what_computes_where(
    tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_model(tmp_path / "one.gguf", TinyConfig(n_layer=2))
    monkeypatch.setattr(model_module, "has_gpu", lambda: True)
    ours, gpu = f"specgen {kernels.instructions}", "llama.cpp on the GPU"
    both = f"{gpu} (1 of 3 layers), {ours} on the CPU"
    for n_gpu_layers, expected in ((0, ours), (-1, gpu), (1, both), (3, gpu), (99, gpu)):
        with contextlib.closing(LlamaModel(path, n_gpu_layers=n_gpu_layers)) as model:
            assert model.kernels == expected
            # No kernel of specgen's guarantees what a GPU computes.
            assert model.has_kernels == model.has_equal_rows == (n_gpu_layers == 0)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="spins are short elsewhere")
@pytest.mark.parametrize(
    ("own", "spins"),
    [({}, 1000), ({"GOMP_SPINCOUNT": "5000"}, 5000), ({"OMP_WAIT_POLICY": "passive"}, 0)],
)
def test_a_thread_that_waits_soon_leaves_its_core_to_others(
    tiny_models: Path, own: dict[str, str], spins: int
) -> None:
    code = (
        "import os, sys\n"
        f"del os.environ['OMP_WAIT_POLICY']; os.environ |= {own}\n"
        "from specgen.cli.app import main; main()"
    )
    command = ("run", "-m", tiny_models / "target.gguf", "-md", "none", "-n", "1", "abc")
    result = ended(*command, code=code, env={"OMP_DISPLAY_ENV": "verbose"})
    assert result.returncode == 0
    if "GOMP_" not in result.stderr:
        pytest.skip("this build of llama.cpp is without GCC's OpenMP")
    assert f"GOMP_SPINCOUNT = '{spins}'" in result.stderr
