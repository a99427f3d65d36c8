"""Drafts made from their target by leaving out layers."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specgen.errors import ModelFileError
from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.library import llama_cpp
from specgen.options import ContextOptions
from specgen.session.engine import generate
from specgen.system.arrays import Logits
from specgen.train.pruning import (
    Judge,
    Layers,
    Pruned,
    check_prunable,
    prune,
    search,
    write_pruned,
)
from specgen.train.target_text import TargetText
from specgen.train.training_loop import Budget
from tests.helpers.heads import opened, prompts, written
from tests.tiny import Architecture, TinyConfig, write_tiny_model

N_LAYER = 8
#: Layers that add nothing to what they read.
IDLE = frozenset({2, 5, 6})
ONE_THREAD = ContextOptions(n_threads=1)
CONFIG = TinyConfig(n_layer=N_LAYER, logit_scale=6.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from gguf import GGUFReader

    path = write_tiny_model(tmp_path_factory.mktemp("model") / "t.gguf", CONFIG)
    for tensor in GGUFReader(path, "r+").tensors:
        _, layer, *name = (*tensor.name.split("."), "")[:3]
        if layer.isdecimal() and int(layer) in IDLE and name[0] in ("attn_output", "ffn_down"):
            tensor.data[:] = 0
    return path


@pytest.fixture(scope="module")
def folder(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    with opened(target) as loaded:
        written(loaded, folder, prompts(20), 10**6)
    return folder


def made(
    target: Path, folder: Path, output: Path, interrupted: Callable[[], bool] = lambda: False
) -> Pruned | None:
    budget = Budget(time.monotonic, time.monotonic() + 60.0, interrupted)
    with opened(target) as loaded:
        return prune(loaded, TargetText(folder), output, budget)


def test_layers_that_do_nothing_are_left_out_and_the_draft_drafts_exactly(
    target: Path, folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "made" / "pruned.gguf"
    found = made(target, folder, output)
    assert found is not None
    assert set(found.left_out) >= IDLE
    if set(found.left_out) == IDLE:
        assert found.agreement > 0.97  # near-ties differ in batches of another size
    assert found.n_judged < 2**N_LAYER
    with closing(LlamaModel(output)) as model:
        assert model.n_layer == N_LAYER - len(found.left_out)
    with opened(target) as loaded:
        plain = [list(generate(loaded, loaded.prompts.of_text(text)))[-1] for text in prompts(3)]
        loaded.change_draft(output)
        drafted = [list(generate(loaded, loaded.prompts.of_text(text)))[-1] for text in prompts(3)]
    assert [e.token_ids for e in drafted] == [e.token_ids for e in plain]  # type: ignore[union-attr]


def test_an_interrupted_search_writes_nothing(target: Path, folder: Path, tmp_path: Path) -> None:
    calls = itertools.count()
    assert made(target, folder, tmp_path / "p.gguf", lambda: next(calls) > 3) is None
    assert not (tmp_path / "p.gguf").exists()


def last_logits(backend: LlamaBackend) -> Logits:
    """The logits of the last decode's 15 rows."""
    rows = llama_cpp.llama_get_logits(backend.handle)
    return np.ctypeslib.as_array(rows, (15, backend.n_vocab))


@pytest.mark.parametrize("left_out", [{3}, {1, 2, 4}, {2, 5}, {4, 5}])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_left_out_layers_are_as_if_they_were_not_in_the_file(
    tmp_path: Path, architecture: Architecture, left_out: set[int]
) -> None:
    config = replace(CONFIG, architecture=architecture, n_layer=6)
    path = write_tiny_model(tmp_path / "t.gguf", config)
    write_pruned(path, left_out, tmp_path / "cut.gguf")
    rng = np.random.default_rng(0)
    texts = [(rng.integers(40, 90, 9).tolist(), rng.integers(40, 90, 5).tolist()) for _ in range(3)]
    logits = []
    for file, layers in ((tmp_path / "cut.gguf", frozenset[int]()), (path, frozenset(left_out))):
        with (
            closing(LlamaModel(file)) as model,
            Judge(model, ONE_THREAD, texts, time.perf_counter) as judge,
        ):
            judge.agreement(layers)
            logits.append(last_logits(judge._backend).copy())  # noqa: SLF001
            judge.agreement(frozenset())
            judge.agreement(layers)
            assert (last_logits(judge._backend) == logits[-1]).all()  # noqa: SLF001
    np.testing.assert_array_equal(logits[0], logits[1])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            TinyConfig(architecture="gemma3", n_layer=6, sliding_window=8),
            "layers of the architecture 'gemma3' may differ",
        ),
        (TinyConfig(architecture="lfm2", n_layer=6), "recurrent state"),
        (TinyConfig(n_layer=3), "only 3 layers"),
        (
            TinyConfig(n_layer=6, lists_heads=True),
            r"layers differ \(llama.attention.head_count_kv\)",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_in_a_line(
    tmp_path: Path, config: TinyConfig, reason: str
) -> None:
    path = write_tiny_model(tmp_path / "t.gguf", config)
    with (
        closing(LlamaModel(path)) as model,
        pytest.raises(ModelFileError, match=rf"t\.gguf: no layers can be left out: .*{reason}"),
    ):
        check_prunable(model)


# --- the search ------------------------------------------------------------------------------


def harm(left_out: Layers) -> float:
    """The agreement of an invented model: each layer does its own harm, and neighbouring layers do
    more.
    """
    found = sum(0.01 + 0.3 * ((7 * layer) % 12 / 12.0) ** 2 for layer in left_out)
    found += sum(0.15 for layer in left_out if layer + 1 in left_out)
    return math.exp(-found)


def gain(n_left_out: int, agreement: float) -> float:
    cost = 0.5 * (1.0 - 0.08 * n_left_out)
    return max(
        sum(agreement**depth for depth in range(n + 1)) / (1.05 + n * cost) for n in range(1, 6)
    )


def test_the_search_finds_what_is_best() -> None:
    """It judges few of the 2,510 sets of up to six of eleven layers."""
    known = search(harm, gain, 12, Budget(time.monotonic))
    every = [
        frozenset(layers)
        for size in range(1, 7)
        for layers in itertools.combinations(range(1, 12), size)
    ]
    best = max(gain(len(layers), harm(layers)) for layers in every)
    assert max(known.values()) == pytest.approx(best, rel=0.005)
    assert len(known) < 200
