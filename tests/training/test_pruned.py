"""Drafts that are their target without some of its blocks, with tiny models."""

from __future__ import annotations

import itertools
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specgen.decoding.backend import Batch
from specgen.engine.engine import generate
from specgen.engine.loaded_models import Models
from specgen.errors import BackendError, MemoryLimitError, ModelFileError, OutputError, UsageError
from specgen.llama import LlamaBackend, LlamaModel, requantize
from specgen.llama.skipped_blocks import SkippingBackend
from specgen.options import ContextOptions
from specgen.system.arrays import Logits
from specgen.system.json_lines import locked
from specgen.testing.tiny import Architecture, TinyConfig, weights, write_tiny_model
from specgen.testing.tiny import file as tiny_file
from specgen.training import pruning
from specgen.training.pruned_weights import check_prunable, check_space, pruned_bytes
from specgen.training.pruning import Judge, Pruned, judged_texts, prune
from specgen.training.pruning_search import Blocks, Evaluations, search
from specgen.training.target_text import TargetText
from specgen.training.training_loop import Budget
from tests.helpers.heads import N_EMBD, opened, prompts, written

N_LAYER = 6
ONE_THREAD = ContextOptions(n_threads=1)
CONFIG = TinyConfig(n_layer=N_LAYER, logit_scale=6.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "t.gguf", CONFIG)


@pytest.fixture(scope="module")
def folder(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    with opened(target) as loaded:
        written(loaded, folder, prompts(20), 10**6)
    return folder


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def batch_of(n_sequences: int = 2, n_tokens: int = 9) -> Batch:
    """Rows of some sequences, of which those behind the first few want logits."""
    batch = Batch()
    for sequence in range(n_sequences):
        for position in range(n_tokens):
            batch.add(40 + 7 * sequence + position, position, (sequence,), position > 3)
    return batch


def logits_of(resources: ExitStack, path: Path, left_out: Blocks | None = None) -> Logits:
    """What a model says, without some of its blocks; None is the ordinary backend."""
    model = resources.enter_context(closing(LlamaModel(path)))
    kind = LlamaBackend if left_out is None else SkippingBackend
    backend = kind(
        model, ONE_THREAD, n_ctx=64, clock=time.perf_counter, n_sequences=2, n_outputs=16
    )
    resources.callback(backend.close)
    if left_out is not None and isinstance(backend, SkippingBackend):
        return backend.decode_without(batch_of(), left_out).copy()
    return backend.decode(batch_of()).copy()


def write_moe(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A mixture of two experts, one for each token."""
    own_tensors, own_metadata = weights.tensors, tiny_file.add_metadata

    def tensors(*arguments: Any) -> dict[str, Any]:
        found = {}
        for name, values in own_tensors(*arguments).items():
            if ".ffn_" in name and "norm" not in name:
                found[name.replace(".weight", "_exps.weight")] = np.stack([values, -values])
            else:
                found[name] = values
        rng = np.random.default_rng(0)
        for layer in range(N_LAYER):
            router = rng.normal(size=(2, N_EMBD)).astype(np.float32)
            found[f"blk.{layer}.ffn_gate_inp.weight"] = router
        return found

    def metadata(writer: Any, *arguments: Any) -> None:
        own_metadata(writer, *arguments)
        writer.add_expert_count(2)
        writer.add_expert_used_count(1)

    monkeypatch.setattr(tiny_file, "tensors", tensors)
    monkeypatch.setattr(tiny_file, "add_metadata", metadata)
    return write_tiny_model(path, CONFIG)


@pytest.mark.parametrize("left_out", [{3}, {1, 2, 4}, {2, N_LAYER - 1}, {4, 5}])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_skipped_blocks_are_as_if_they_were_not_in_the_file(
    resources: ExitStack, tmp_path: Path, architecture: Architecture, left_out: set[int]
) -> None:
    path = write_tiny_model(tmp_path / "t.gguf", replace(CONFIG, architecture=architecture))
    requantize(path, tmp_path / "cut.gguf", 1, left_out=left_out, as_is=True)
    whole = logits_of(resources, path)
    cut = logits_of(resources, tmp_path / "cut.gguf")
    assert not np.array_equal(cut, whole)
    np.testing.assert_array_equal(logits_of(resources, path, frozenset(left_out)), cut)
    np.testing.assert_array_equal(logits_of(resources, path, frozenset()), whole)


def test_a_mixture_of_experts_is_cut_too(
    resources: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_moe(tmp_path / "moe.gguf", monkeypatch)
    with closing(LlamaModel(path)) as model:
        check_prunable(model)
    requantize(path, tmp_path / "cut.gguf", 1, left_out={2, 4}, as_is=True)
    cut = logits_of(resources, tmp_path / "cut.gguf")
    np.testing.assert_array_equal(logits_of(resources, path, frozenset({2, 4})), cut)


def test_blocks_are_kept_again_in_the_next_batch(resources: ExitStack, target: Path) -> None:
    model = resources.enter_context(closing(LlamaModel(target)))
    backend = SkippingBackend(
        model, ONE_THREAD, n_ctx=64, clock=time.perf_counter, n_sequences=2, n_outputs=16
    )
    resources.callback(backend.close)
    found = []
    for left_out in (frozenset[int](), frozenset({1, 3}), frozenset[int]()):
        found.append(backend.decode_without(batch_of(), left_out).copy())
        backend.remove(0)
        backend.remove(1)
    np.testing.assert_array_equal(found[0], found[2])
    assert not np.array_equal(found[0], found[1])


@pytest.mark.parametrize("block", [0, N_LAYER, -1])
def test_the_first_block_and_no_block_cannot_be_skipped(
    resources: ExitStack, target: Path, block: int
) -> None:
    with pytest.raises(BackendError, match=r"blocks 1 to 5 can be left out"):
        logits_of(resources, target, frozenset({block}))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (TinyConfig(architecture="gemma3", n_layer=6, sliding_window=8), "differ by their place"),
        (TinyConfig(architecture="lfm2", n_layer=6), "recurrent state"),
        (TinyConfig(architecture="mamba", n_layer=6), "recurrent state"),
        (TinyConfig(n_layer=3), "3 blocks only"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_a_line(
    tmp_path: Path, config: TinyConfig, reason: str
) -> None:
    path = write_tiny_model(tmp_path / "t.gguf", config)
    with (
        closing(LlamaModel(path)) as model,
        pytest.raises(ModelFileError, match=rf"t\.gguf: no blocks can be left out: .*{reason}"),
    ):
        check_prunable(model)


@pytest.mark.parametrize(
    ("key", "value"),
    [("leading_dense_block_count", "3"), ("attention.head_count_kv", "[2, 2, 1]")],
)
def test_blocks_that_differ_by_metadata_are_refused(
    target: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str
) -> None:
    own = LlamaModel.metadata

    def metadata(model: LlamaModel, name: str) -> str | None:
        return value if name == f"llama.{key}" else own(model, name)

    monkeypatch.setattr(LlamaModel, "metadata", metadata)
    with closing(LlamaModel(target)) as model, pytest.raises(ModelFileError, match=key):
        check_prunable(model)


def test_too_little_disk_or_memory_is_told_beforehand(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_space(target, tmp_path)
    import psutil

    with monkeypatch.context() as patched:
        patched.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**6))
        with pytest.raises(MemoryLimitError, match=r"takes up to 0\.2 GiB of memory beside it"):
            check_space(target, tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=10**6))
    with pytest.raises(OutputError, match=r"takes up to 0\.2 GiB"):
        check_space(target, tmp_path)


def test_bytes_are_those_of_the_file(target: Path, tmp_path: Path) -> None:
    requantize(target, tmp_path / "cut.gguf", 1, left_out={1, 4})
    from gguf import GGUFReader

    tensors = GGUFReader(tmp_path / "cut.gguf").tensors
    assert pruned_bytes(target, (1, 4)) == sum(int(tensor.n_bytes) for tensor in tensors)
    assert {t.name.split(".")[1] for t in tensors if t.name.startswith("blk")} == set("0123")


def test_judged_is_what_the_target_said(target: Path, folder: Path) -> None:
    answers = TargetText(folder, N_EMBD).answers
    texts = judged_texts(answers, 100, held_back=False)
    assert sum(len(text.tokens) for text in texts) == 100
    held_back = judged_texts(answers, 10**6, held_back=True)
    assert [text.prompt for text in held_back] == [
        answer.prompt_tokens for answer in answers if answer.is_held_back
    ]
    with (
        closing(LlamaModel(target)) as model,
        Judge(model, ONE_THREAD, texts, time.perf_counter) as judge,
    ):
        whole = judge.agreement(frozenset())
        assert whole > 0.97  # near-ties part, in batches of another size
        assert judge.agreement(frozenset({1, 2, 3})) < 0.9
        assert judge.agreement(frozenset()) == whole


def test_without_text_nothing_is_judged(folder: Path) -> None:
    answers = TargetText(folder, N_EMBD).answers[:5]
    with pytest.raises(UsageError, match="no text to judge by"):
        judged_texts(answers, 100, held_back=True)


# --- the search ------------------------------------------------------------------------------


def harm(left_out: Blocks) -> float:
    """Blocks of a made-up model: each does its harm, and neighbours together do more."""
    found = sum(0.01 + 0.3 * ((7 * block) % 12 / 12.0) ** 2 for block in left_out)
    found += sum(0.15 for block in left_out if block + 1 in left_out)
    return math.exp(-found)


def gain(n_left_out: int, agreement: float) -> float:
    cost = 0.5 * (1.0 - 0.08 * n_left_out)
    return max(
        sum(agreement**depth for depth in range(n + 1)) / (1.05 + n * cost) for n in range(1, 6)
    )


def evaluations(stack: ExitStack, path: Path, agreement: Callable[[Blocks], float]) -> Evaluations:
    return stack.enter_context(Evaluations.opened(path, "key", agreement))


def searched(judged: Evaluations, *, is_over: Callable[[], bool] = lambda: False) -> Blocks | None:
    return search(judged, gain, 12, is_over=is_over, progress=lambda *_: None)


def test_the_search_finds_what_is_best(resources: ExitStack, tmp_path: Path) -> None:
    """Of the 2,510 sets of up to six of eleven blocks, it looks at few."""
    judged = evaluations(resources, tmp_path / "judged", harm)
    found = searched(judged)
    assert found is not None
    every = [
        frozenset(blocks)
        for size in range(1, 7)
        for blocks in itertools.combinations(range(1, 12), size)
    ]
    best = max(gain(len(blocks), harm(blocks)) for blocks in every)
    assert gain(len(found), harm(found)) == pytest.approx(best, rel=0.005)
    assert len(judged.known) < 200


def test_an_interrupted_search_goes_on_where_it_was(resources: ExitStack, tmp_path: Path) -> None:
    asked: list[Blocks] = []

    def agreement(left_out: Blocks) -> float:
        asked.append(left_out)
        return harm(left_out)

    with ExitStack() as first:
        judged = evaluations(first, tmp_path / "judged", agreement)
        searched(judged, is_over=lambda: len(asked) >= 30)
    assert len(asked) == 30
    with (tmp_path / "judged").open("ab") as file:
        file.write(b'{"key": "key", "left')  # killed while it wrote
    again = evaluations(resources, tmp_path / "judged", agreement)
    assert len(again.known) == 30
    found = searched(again)
    assert len(asked) == len(set(asked)), "none is judged twice"
    whole = evaluations(resources, tmp_path / "other", harm)
    assert found == searched(whole)


def test_nothing_is_found_where_there_is_no_time(resources: ExitStack, tmp_path: Path) -> None:
    judged = evaluations(resources, tmp_path / "judged", harm)
    assert searched(judged, is_over=lambda: True) is None


def test_what_was_judged_by_another_text_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "judged"
    with Evaluations.opened(path, "one", harm) as judged:
        judged(frozenset({3}))
    with Evaluations.opened(path, "other", lambda _: 0.25) as judged:
        assert judged(frozenset({3})) == 0.25
    with Evaluations.opened(path, "one", harm) as judged:
        assert judged.known == {frozenset({3}): harm(frozenset({3}))}
    path.write_bytes(b"{}\n" + path.read_bytes())
    with (
        pytest.raises(ModelFileError, match="line 1 is damaged"),
        Evaluations.opened(path, "one", harm),
    ):
        pass


def test_one_process_judges_at_a_time(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "judged.lock", OutputError("held")),
        pytest.raises(OutputError, match="another process is at it"),
        Evaluations.opened(tmp_path / "judged", "key", harm),
    ):
        pass


# --- the whole -------------------------------------------------------------------------------


def made(
    loaded: Models,
    folder: Path,
    output: Path,
    *,
    seconds: float = 60.0,
    interrupted: Callable[[], bool] = lambda: False,
) -> Pruned | None:
    return prune(
        loaded,
        TargetText(folder, N_EMBD),
        output,
        Budget(time.monotonic, time.monotonic() + seconds, interrupted),
        lambda *_: None,
    )


def test_the_draft_is_the_target_without_blocks_and_drafts_exactly(
    target: Path, folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "made" / "pruned.gguf"
    calls = itertools.count()
    with opened(target) as loaded:
        assert made(loaded, folder, output, interrupted=lambda: next(calls) > 3) is None
        assert not output.exists()
        found = made(loaded, folder, output)
        assert found is not None
        assert found.n_layer == N_LAYER
        assert 0.0 < found.agreement < 1.0
        assert found.cost > 0.0
        assert found.speedup > 0.0
        assert list(output.parent.glob("*.gguf")) == [output], "what was timed is gone"
        with closing(LlamaModel(output)) as model:
            assert model.n_layer == N_LAYER - len(found.left_out)
        plain = [list(generate(loaded, loaded.prompts.of_text(text)))[-1] for text in prompts(3)]
        loaded.change_draft(output)
        drafted = [list(generate(loaded, loaded.prompts.of_text(text)))[-1] for text in prompts(3)]
    assert [e.token_ids for e in drafted] == [e.token_ids for e in plain]  # type: ignore[union-attr]


def test_too_little_time_is_told_before_it_is_lost(
    target: Path, folder: Path, tmp_path: Path
) -> None:
    with opened(target) as loaded, pytest.raises(UsageError, match="sets are judged at least"):
        made(loaded, folder, tmp_path / "pruned.gguf", seconds=1e-3)


def test_costs_are_those_of_the_bytes(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "timed_share", lambda *_: 0.2)
    with opened(target) as loaded:
        costs = pruning.PrunedCosts(loaded, tmp_path)
    assert not list(tmp_path.iterdir())
    # Two of six blocks were timed.
    assert costs.cost(4) == pytest.approx(0.2)
    assert costs.cost(2) - costs.cost(4) == pytest.approx(costs.cost(0) - costs.cost(2))
    assert costs.speedup(4, 0.9) == costs.speedup_at(0.2, 0.9) > costs.speedup_at(0.4, 0.9)
