"""Removing the end of a sequence, for every kind of cache that llama.cpp has.

Whatever was decoded and removed before, the next logits must be those of the kept text alone. The
tiny models compute in f32 throughout, so they are equal except for rounding, and a state that is
one token too old or too new is far off: see `test_a_rollback_left_out_would_be_seen`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import psutil
import pytest

from specgen.errors import BackendError, DecodeEndedError, RollbackError
from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.library import llama_cpp
from specgen.method.backend import Batch, Rollback
from specgen.options import ContextOptions
from specgen.system.arrays import Logits
from tests.helpers.rows import decoded_last, decoded_one_by_one
from tests.tiny import TinyConfig, write_tiny_model

pytestmark = pytest.mark.slow

CONFIGS = {
    "llama": TinyConfig(),
    "gemma3": TinyConfig(architecture="gemma3", sliding_window=8),
    "mamba": TinyConfig(architecture="mamba"),
    "mamba2": TinyConfig(architecture="mamba2"),
    "jamba": TinyConfig(architecture="jamba"),
    "lfm2": TinyConfig(architecture="lfm2"),
    "lfm2-window": TinyConfig(architecture="lfm2", sliding_window=8),
    "qwen35": TinyConfig(architecture="qwen35"),
}


class Way(NamedTuple):
    """A way to roll back: the model, what it is opened with, and what it then does."""

    name: str
    n_rollback: int | None
    rollback: Rollback


WAYS: list[Way] = [
    *(Way(name, None, "cells") for name in ("llama", "gemma3")),
    *(Way(name, None, "states") for name in ("mamba", "mamba2", "jamba")),
    *(Way(name, None, "snapshots") for name in ("lfm2", "lfm2-window", "qwen35")),
    *(Way(name, 2, "snapshots") for name in ("lfm2-window", "qwen35")),
    *(Way(name, 0, "states") for name in ("lfm2", "lfm2-window", "qwen35")),
]
N_OUTPUTS = 8
OPTIONS = ContextOptions(
    n_threads=1, n_gpu_layers=0, cache_type_k="f32", cache_type_v="f32", flash_attention="off"
)
#: Longer than the sliding windows by far.
TEXT = [int(token) for token in np.random.default_rng(3).integers(0, 280, 40)]
DRAFT = [7, 77, 177, 8, 88, 188]

Opener: TypeAlias = Callable[..., LlamaBackend]


def loaded_models(folder: Path) -> Iterator[dict[str, LlamaModel]]:
    """Yield a model of each of `CONFIGS`, written to a folder, and close them all."""
    loaded = {
        name: LlamaModel(write_tiny_model(folder / f"{name}.gguf", config), n_gpu_layers=0)
        for name, config in CONFIGS.items()
    }
    yield loaded
    for model in loaded.values():
        model.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LlamaModel]]:
    yield from loaded_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(name="opened")
def _opened(models: dict[str, LlamaModel]) -> Iterator[Opener]:
    backends = []

    def opened(
        name: str, n_rollback: int | None = None, n_batch: int = 256, **sizes: Any
    ) -> LlamaBackend:
        backend = LlamaBackend(
            models[name],
            replace(OPTIONS, n_batch=n_batch),
            clock=time.perf_counter,
            n_rollback=n_rollback,
            **({"n_ctx": 256, "n_outputs": N_OUTPUTS} | sizes),
        )
        backends.append(backend)
        return backend

    yield opened
    for backend in backends:
        backend.close()


@pytest.fixture(name="expected", scope="module")
def _expected(models: dict[str, LlamaModel]) -> Iterator[Callable[[str, Sequence[int]], Logits]]:
    """The logits after a text that a model decodes for the first time, token by token."""
    backends: dict[str, LlamaBackend] = {}

    @functools.cache
    def known(name: str, text: tuple[int, ...]) -> Logits:
        if name not in backends:
            own = {"n_ctx": 256, "clock": time.perf_counter}
            backends[name] = LlamaBackend(models[name], OPTIONS, **own)  # type: ignore[arg-type]
        backends[name].remove(0)
        return decoded_one_by_one(backends[name], text)

    yield lambda name, text: known(name, tuple(text))
    for backend in backends.values():
        backend.close()


def assert_same(name: str, found: Logits, expected: Logits) -> None:
    # gemma3's activation function is read from a table, which magnifies rounding.
    np.testing.assert_allclose(found, expected, atol=0.02 if name == "gemma3" else 1e-4)
    assert int(found.argmax()) == int(expected.argmax())


Expected: TypeAlias = Callable[[str, Sequence[int]], Logits]
every_way = pytest.mark.parametrize("way", WAYS, ids=str)


@every_way
@pytest.mark.parametrize("n_kept", range(len(DRAFT) + 1))
def test_any_number_of_drafted_rows_can_be_dropped(
    opened: Opener, expected: Expected, way: Way, n_kept: int
) -> None:
    name, n_rollback, rollback = way
    backend = opened(name, n_rollback)
    assert backend.rollback == rollback
    assert backend.model.has_recurrent_state == (rollback != "cells")
    decoded_last(backend, TEXT)
    backend.checkpoint(0)
    decoded_last(backend, DRAFT)
    backend.remove(0, len(TEXT) + n_kept)
    assert backend.length(0) == len(TEXT) + n_kept
    text = [*TEXT, *DRAFT[:n_kept], 50]
    assert_same(name, decoded_one_by_one(backend, [50]), expected(name, text))
    assert_same(name, decoded_last(backend, [60, 61]), expected(name, [*text, 60, 61]))
    assert backend.length(0) == len(text) + 2
    n_repeated = backend.n_decoded_rows - len(TEXT) - len(DRAFT) - 3
    if rollback == "cells" or n_kept == len(DRAFT):
        assert n_repeated == 0
    elif rollback == "states":
        assert n_repeated == n_kept
    elif n_kept > 0 and n_rollback is None:  # each snapshot serves
        assert n_repeated == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_a_rollback_left_out_would_be_seen(expected: Expected, name: str) -> None:
    """A state that still holds the dropped tokens is the state of another text."""
    kept = expected(name, [*TEXT, 50])
    for n_stale in range(1, 4):
        stale = expected(name, [*TEXT, *DRAFT[:n_stale], 50])
        assert np.abs(stale - kept).max() > 0.05
    one_behind = expected(name, [*TEXT[:-1], 50])
    assert np.abs(one_behind - kept).max() > 0.05


def test_a_long_run_of_rounds_repeats_few_rows(opened: Opener) -> None:
    """States are not copied in every round, but only a few rows are decoded again."""
    backend = opened("mamba")
    decoded_last(backend, TEXT)
    n_new, n_rounds, n_before = len(TEXT), 40, 0
    for _ in range(n_rounds):
        backend.checkpoint(0)
        start, n_before = backend.length(0), backend.n_decoded_rows
        decoded_last(backend, DRAFT[:5])
        assert backend.n_decoded_rows - n_before <= 5 + 3 + 3
        backend.remove(0, start + 3)
        n_new += 5
    assert backend.n_decoded_rows - n_new < 5 * n_rounds


def free_cells_before(backend: LlamaBackend, sequence: int) -> None:
    """Decode `TEXT` in a sequence, with free cells before it, and then a text in sequence 2, which
    uses them. llama.cpp would also use those of the first sequence that have left the window of its
    end.
    """
    decoded_last(backend, DRAFT, sequence=3)
    decoded_last(backend, TEXT, sequence=sequence)
    backend.remove(3)
    decoded_last(backend, TEXT[:20], sequence=2)


@pytest.mark.parametrize("name", ["gemma3", "lfm2-window"])
def test_other_texts_do_not_use_the_cells_of_a_sliding_window(
    opened: Opener, expected: Expected, name: str
) -> None:
    backend = opened(name, n_sequences=4)
    free_cells_before(backend, sequence=0)
    n_decoded = backend.n_decoded_rows
    backend.remove(0, 10)
    assert_same(name, decoded_one_by_one(backend, [50]), expected(name, [*TEXT[:10], 50]))
    n_repeated = backend.n_decoded_rows - n_decoded - 1
    assert n_repeated == (0 if backend.rollback == "cells" else 10)


def test_a_branch_that_lost_its_window_is_refused(opened: Opener, expected: Expected) -> None:
    """Cells of branches are kept for as long as no branch is longer than the window."""
    backend = opened("gemma3", n_sequences=4, n_branches=2)
    free_cells_before(backend, sequence=1)
    with pytest.raises(RollbackError, match=r"sequence 1 cannot go back to position 10: of its sl"):
        backend.remove(1, 10)
    with pytest.raises(RollbackError, match=r"sequence 1 cannot go back to position 10: of its sl"):
        backend.copy(1, 0, 0, 10)
    assert backend.length(1) == len(TEXT)
    backend.remove(1, len(TEXT) - 1)
    assert_same(
        "gemma3", decoded_one_by_one(backend, [50], 1), expected("gemma3", [*TEXT[:-1], 50])
    )


@every_way
@pytest.mark.parametrize("n_asked", [0, 5, 20])
def test_a_decode_that_is_ended_leaves_the_text_as_it_was(
    opened: Opener, expected: Expected, way: Way, n_asked: int
) -> None:
    """A batch of a prefill ends in the middle of its graph. Another text stays intact, and decoding
    the prompt again gives the right result.
    """
    backend = opened(way.name, way.n_rollback, n_sequences=2, n_branches=1)
    decoded_last(backend, DRAFT, 1)
    for text in (TEXT[:20], TEXT[20:]):
        decoded_last(backend, text)
        backend.checkpoint(0)
        answers = iter([False] * n_asked)
        backend.is_unwanted = lambda answers=answers: next(answers, True)
        with pytest.raises(DecodeEndedError):
            decoded_last(backend, [7] * 100)
        backend.is_unwanted = None
    n_rows = backend.n_decoded_rows
    assert backend.length(0) == len(TEXT)
    assert_same(way.name, decoded_one_by_one(backend, [50]), expected(way.name, [*TEXT, 50]))
    assert backend.n_decoded_rows - n_rows == 1, "the text is not read again"
    assert_same(way.name, decoded_one_by_one(backend, [50], 1), expected(way.name, [*DRAFT, 50]))


def test_an_exception_in_the_interruption_check_ends_a_decode(opened: Opener) -> None:
    backend = opened("llama")

    def asked() -> bool:
        raise KeyboardInterrupt

    backend.is_unwanted = asked
    with pytest.raises(KeyboardInterrupt):
        decoded_last(backend, TEXT)


@pytest.mark.parametrize("name", ["mamba", "jamba", "qwen35"])
def test_a_decode_that_fails_leaves_the_text_as_it_was(
    monkeypatch: pytest.MonkeyPatch, opened: Opener, expected: Expected, name: str
) -> None:
    backend = opened(name)
    decoded_last(backend, TEXT)
    backend.checkpoint(0)
    decoded_last(backend, DRAFT)
    backend.remove(0, len(TEXT) + 2)
    decode_native = llama_cpp.llama_decode

    def failing(*arguments: Any) -> int:
        """After the cache was changed."""
        decode_native(*arguments)
        return -3

    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "llama_decode", failing)
        with pytest.raises(BackendError, match="status -3"):
            decoded_last(backend, [9, 10])
    assert backend.length(0) == len(TEXT) + 2
    assert_same(name, decoded_one_by_one(backend, [50]), expected(name, [*TEXT, *DRAFT[:2], 50]))


def test_a_refused_rollback_names_sequence_and_position(
    monkeypatch: pytest.MonkeyPatch, opened: Opener
) -> None:
    backend = opened("qwen35", n_sequences=2)
    decoded_last(backend, TEXT, sequence=1)
    decoded_last(backend, DRAFT, sequence=1)
    backend.remove(1, len(TEXT) + 2)
    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "llama_memory_seq_rm", lambda *_: False)
        with pytest.raises(RollbackError, match=r"sequence 1 from position 42 on"):
            decoded_one_by_one(backend, [50], sequence=1)
    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "llama_memory_seq_rm", lambda *_: True)
        with pytest.raises(RollbackError, match=r"position 42, but its cache ends at 46"):
            decoded_one_by_one(backend, [50], sequence=1)


def test_a_state_that_cannot_be_saved_or_restored_is_an_error(
    monkeypatch: pytest.MonkeyPatch, opened: Opener
) -> None:
    backend = opened("qwen35")
    decoded_last(backend, TEXT)
    backend.checkpoint(0)
    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "llama_state_seq_get_data_ext", lambda *_: 0)
        with pytest.raises(BackendError, match=r"sequence 0 could not be saved"):
            decoded_one_by_one(backend, [50])
    decoded_last(backend, [50])
    backend.checkpoint(0)
    decoded_one_by_one(backend, [51, 52])
    backend.remove(0, 42)
    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "llama_state_seq_set_data_ext", lambda *_: 7)
        with pytest.raises(RollbackError, match=r"position 41 could not be restored"):
            decoded_one_by_one(backend, [53])


def test_a_recurrent_state_is_not_shared_and_has_no_gaps(opened: Opener) -> None:
    backend = opened("mamba", n_sequences=2)
    decoded_last(backend, TEXT)
    with pytest.raises(BackendError, match="cannot be shared"):
        backend.copy(0, 1)
    shared = Batch()
    shared.add(1, len(TEXT), (0, 1), wants=True)
    with pytest.raises(BackendError, match=r"\(0, 1\)"):
        backend.decode(shared)
    gap = Batch()
    gap.add(1, len(TEXT) + 1, (0,), wants=True)
    with pytest.raises(BackendError, match="position 41; sequence 0 goes on at 40"):
        backend.decode(gap)
    assert backend.length(1) == 0


def test_snapshots_that_do_not_fit_into_memory_are_left_out(
    monkeypatch: pytest.MonkeyPatch, opened: Opener
) -> None:
    class Machine:
        available = 600 * 2**20

    monkeypatch.setattr(psutil, "virtual_memory", Machine)
    assert opened("qwen35").rollback == "snapshots"
    monkeypatch.setattr(LlamaModel, "state_bytes", lambda _: 100 * 2**20)
    assert opened("qwen35").rollback == "states"


@pytest.mark.parametrize("name", ["mamba", "mamba2", "jamba", "lfm2", "qwen35"])
def test_the_estimate_of_a_state_is_no_less_than_the_state(opened: Opener, name: str) -> None:
    backend = opened(name, 0)
    decoded_last(backend, TEXT)
    size = llama_cpp.llama_state_seq_get_size_ext(
        backend.handle,
        0,
        llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY,
    )
    assert 0.8 * size <= backend.model.state_bytes() <= 3 * size


def test_a_deep_model_keeps_as_many_snapshots_as_its_graph_has_room_for(tmp_path: Path) -> None:
    """llama.cpp ends the process if there are more."""
    from tests.llama.test_kernels import in_process

    model = write_tiny_model(tmp_path / "model.gguf", TinyConfig(architecture="lfm2", n_layer=16))
    program = """
import json, sys
from pathlib import Path
from specgen.llama import LlamaBackend, LlamaModel
from specgen.options import ContextOptions
from tests.helpers.rows import decoded, decoded_last

model = LlamaModel(Path(sys.argv[1]))
options = ContextOptions(n_threads=1)
wide, narrow = (
    LlamaBackend(model, options, n_ctx=256, clock=lambda: 0.0, n_outputs=n) for n in (40, 4)
)
text = list(range(10, 20))
for start in range(0, len(text), 2):
    decoded(narrow, text[start:start + 2])
expected = decoded_last(narrow, [99])
for n_rows in (1, 5, 30):
    decoded(wide, text)
    decoded(wide, range(30, 30 + n_rows))
    wide.remove(0, len(text))
    after = decoded_last(wide, [99])
    wide.remove(0)
    assert abs(after - expected).max() < 1e-3 * abs(expected).max()
print(json.dumps(wide.rollback))
"""
    assert in_process(program, str(model)) == "snapshots"
