"""Drafts that compute only the logits of frequent tokens: they are the same as in all rows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.kernels import frequent_rows
from specgen.llama.kernels.attached import Kernels
from specgen.options import ContextOptions, SamplerOptions
from specgen.system.arrays import Logits
from tests.helpers import rows
from tests.helpers.sessions import answered
from tests.helpers.sessions import opened as open_session
from tests.tiny import TinyConfig, write_tiny_model

N_FREQUENT = 64
#: Rows of a matrix are computed in groups of 8 or 16.
LARGEST_GROUP = 16


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frequent")
    return write_tiny_model(
        folder / "tiny.gguf", TinyConfig(n_embd=64, n_layer=2, tensor_type="q8_0")
    )


@pytest.fixture
def few_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frequent_rows, "N_FREQUENT", N_FREQUENT)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[LlamaBackend]:
    with contextlib.closing(LlamaModel(path)) as model:
        options = ContextOptions(n_threads=2)
        backend = LlamaBackend(model, options, n_ctx=128, clock=time.perf_counter, n_outputs=64)
        with contextlib.closing(backend):
            yield backend


def decoded(backend: LlamaBackend, tokens: list[int]) -> Logits:
    """The logits of a new text's tokens, all in one batch."""
    backend.remove(0)
    return rows.decoded(backend, tokens)


@pytest.mark.parametrize("n_tokens", [1, 3, 40])
@pytest.mark.parametrize("wanted", [[0], [5, 17, 200], list(range(0, 250, 7))])
def test_only_the_groups_of_the_rows_are_computed(
    kernels: Kernels, model_file: Path, n_tokens: int, wanted: list[int]
) -> None:
    tokens = np.random.default_rng(n_tokens).integers(3, 250, n_tokens).tolist()
    with opened(model_file) as backend:
        whole = decoded(backend, tokens)
        limit = frequent_rows.RowLimit(kernels, backend.n_vocab, np.array(wanted, np.int32))
        with limit:
            limited = decoded(backend, tokens)
        limit.close()
        after = decoded(backend, tokens)
    is_there = np.isfinite(limited)
    assert is_there[:, wanted].all()
    np.testing.assert_array_equal(limited[is_there], whole[is_there])
    assert (limited[~is_there] == -np.inf).all()
    assert is_there.sum(axis=1).max() <= LARGEST_GROUP * len(wanted)
    np.testing.assert_array_equal(after, whole)


@pytest.mark.usefixtures("kernels", "few_frequent")
def test_a_token_that_occurred_is_computed_from_then_on(model_file: Path) -> None:
    rare = 200
    with opened(model_file) as backend:
        backend.compute_frequent_tokens()
        before = decoded(backend, [5])
        with_it = decoded(backend, [5, rare])
        after = decoded(backend, [5])
        ends = [backend.vocabulary.special_tokens()[role] for role in ("eos", "eot")]
    assert np.isfinite(before[:, :N_FREQUENT]).all()
    assert np.isfinite(before[:, ends]).all()
    assert before[0, rare] == -np.inf
    assert np.isfinite(with_it[:, rare]).all()
    assert np.isfinite(after[0, rare])


@pytest.mark.usefixtures("kernels", "few_frequent")
def test_what_occurred_long_ago_is_forgotten(
    model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frequent_rows, "MAX_SEEN", 2)
    with opened(model_file) as backend:
        backend.compute_frequent_tokens()
        decoded(backend, [120, 160, 200])
        row = decoded(backend, [5])[0]
    assert np.isfinite(row[[160, 200]]).all()
    assert row[120] == -np.inf


def test_without_kernels_all_rows_are_computed(
    kernels: Kernels, few_frequent: None, model_file: Path
) -> None:
    kernels.enable(products=False, attention=False)
    with opened(model_file) as backend:
        backend.compute_frequent_tokens()
        assert np.isfinite(decoded(backend, [5])).all()


@pytest.mark.usefixtures("kernels", "few_frequent")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_never_proposes_tokens_that_it_does_not_compute(
    model_file: Path, temperature: float
) -> None:
    """The target is the same model with all rows, so it also generates rare tokens. Greedy texts
    are the same.
    """
    texts = {}
    for draft in ("none", model_file):
        with open_session(
            model_file,
            draft,
            context=ContextOptions(n_threads=2),
            sampler=SamplerOptions(temperature=temperature, seed=3),
            drafting={"ngrams": False},
            n_draft=3,
            n_tokens=60,
            ignore_eos=True,
        ) as models:
            finished = answered(models, "a prompt")
        texts[draft] = finished.token_ids
        if draft != "none":
            assert 0 < finished.n_accepted < finished.n_drafted
    assert max(texts["none"]) >= N_FREQUENT
    if temperature == 0.0:
        assert len(set(texts.values())) == 1
