"""What llama.cpp does beside decoding works with specgen's kernels: adapters, control vectors, states,
hidden states."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.kernels.attached import Kernels
from specgen.method.backend import Batch
from specgen.options import ContextOptions
from specgen.system.arrays import Logits
from tests.tiny import TinyConfig, write_tiny_model

TEXT = tuple(int(token) for token in np.random.default_rng(0).integers(3, 250, 40))
RANK = 4
CONFIG = TinyConfig(n_embd=64, n_layer=2, tensor_type="f16")

Change = Callable[[LlamaBackend], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("adapters") / "tiny.gguf", CONFIG)


@pytest.fixture(scope="module")
def lora(model: Path) -> Path:
    """A LoRA adapter for all matrices of the layers."""
    path = model.with_name("lora.gguf")
    rng = np.random.default_rng(1)
    writer = GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    for tensor in GGUFReader(model).tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) == 2:
            n_in, n_out = map(int, tensor.shape)
            for name, shape in (("a", (RANK, n_in)), ("b", (n_out, RANK))):
                values = rng.normal(0.0, 0.2, shape).astype(np.float32)
                writer.add_tensor(f"{tensor.name}.lora_{name}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def opened(path: Path) -> LlamaBackend:
    return LlamaBackend(
        LlamaModel(path),
        ContextOptions(n_threads=2),
        n_ctx=128,
        clock=time.perf_counter,
        n_outputs=64,
    )


def closed(backend: LlamaBackend) -> None:
    backend.close()
    backend.model.close()


def decode(backend: LlamaBackend, start: int = 0, end: int | None = None) -> Logits:
    batch = Batch()
    for position, token in list(enumerate(TEXT))[start:end]:
        batch.add(token, position, (0,), True)
    return backend.decode(batch).copy()


def logits(path: Path, change: Change) -> Logits:
    """Of all rows of the text, in a new context to which something was done."""
    backend = opened(path)
    change(backend)
    found = decode(backend)
    closed(backend)
    return found


def distance(one: Logits, other: Logits) -> float:
    return float(np.std(one - other) / np.std(other))


def with_lora(path: Path) -> Change:
    def change(backend: LlamaBackend) -> None:
        adapter = llama_cpp.llama_adapter_lora_init(backend.model.handle, str(path).encode())
        assert adapter
        adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
        scales = (ctypes.c_float * 1)(1.0)
        assert llama_cpp.llama_set_adapters_lora(backend.handle, adapters, 1, scales) == 0

    return change


def with_control_vector(backend: LlamaBackend) -> None:
    n_embd, n_layer = CONFIG.n_embd, CONFIG.n_layer
    values = np.random.default_rng(2).normal(0.0, 0.5, n_layer * n_embd).astype(np.float32)
    data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    done = llama_cpp.llama_set_adapter_cvec(backend.handle, data, values.size, n_embd, 1, n_layer)
    assert done == 0


@pytest.fixture(params=["lora", "control vector"])
def change(request: pytest.FixtureRequest, lora: Path) -> Change:
    return with_lora(lora) if request.param == "lora" else with_control_vector


def test_an_adapter_does_what_it_does_without_kernels(
    kernels: Kernels, model: Path, change: Change
) -> None:
    before = kernels.counts().n_products
    ours, ours_alone = logits(model, change), logits(model, lambda _backend: None)
    assert kernels.counts().n_products > before
    kernels.enable(products=False, attention=False)
    theirs = logits(model, change)
    assert distance(ours, theirs) < 0.01
    assert distance(ours, ours_alone) > 0.1


@pytest.mark.usefixtures("kernels")
def test_a_state_goes_on_in_another_context(model: Path) -> None:
    first, second = opened(model), opened(model)
    decode(first, 0, 30)
    size = llama_cpp.llama_state_get_size(first.handle)
    data = (ctypes.c_uint8 * size)()
    assert llama_cpp.llama_state_get_data(first.handle, data, size) == size
    expected = decode(first, 30)
    assert llama_cpp.llama_state_set_data(second.handle, data, size) == size
    batch = llama_cpp.llama_batch_init(len(TEXT) - 30, 0, 1)
    for row, position in enumerate(range(30, len(TEXT))):
        batch.token[row], batch.pos[row] = TEXT[position], position
        batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, 0, 1
    batch.n_tokens = len(TEXT) - 30
    assert llama_cpp.llama_decode(second.handle, batch) == 0
    pointer = llama_cpp.llama_get_logits(second.handle)
    found = np.ctypeslib.as_array(pointer, expected.shape).copy()
    llama_cpp.llama_batch_free(batch)
    assert np.array_equal(found, expected)
    closed(first)
    closed(second)


def test_hidden_states_are_those_without_kernels(kernels: Kernels, model: Path) -> None:
    def hidden() -> Logits:
        backend = opened(model)
        batch = Batch()
        for position, token in enumerate(TEXT):
            batch.add(token, position, (0,), True)
        found = backend.decode_hidden(batch)[1].copy()
        closed(backend)
        return found

    ours = hidden()
    kernels.enable(products=False, attention=False)
    assert distance(ours, hidden()) < 0.01
