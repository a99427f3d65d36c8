"""Our samplers against llama.cpp's own, called through the low-level API."""

from __future__ import annotations

import ctypes

import llama_cpp
import numpy as np
import pytest

from specgen.arrays import Logits
from specgen.options import SamplerOptions
from specgen.sampling import distribution


def llama_distribution(row: Logits, options: SamplerOptions) -> dict[int, float]:
    """What llama.cpp's chain of top-k, top-p, min-p, temperature and softmax leaves."""
    n = len(row)
    candidates = (llama_cpp.llama_token_data * n)()
    for token, logit in enumerate(row):
        candidates[token] = llama_cpp.llama_token_data(token, float(logit), 0.0)
    array = llama_cpp.llama_token_data_array(candidates, n, -1, False)
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    for sampler in (
        llama_cpp.llama_sampler_init_top_k(options.top_k),
        llama_cpp.llama_sampler_init_top_p(options.top_p, 0),
        llama_cpp.llama_sampler_init_min_p(options.min_p, 0),
        llama_cpp.llama_sampler_init_temp(options.temperature),
        llama_cpp.llama_sampler_init_dist(1),  # fills the probabilities in
    ):
        llama_cpp.llama_sampler_chain_add(chain, sampler)
    llama_cpp.llama_sampler_apply(chain, ctypes.byref(array))
    kept = [array.data[i] for i in range(array.size)]
    found = {int(data.id): float(data.p) for data in kept if data.p > 0}
    llama_cpp.llama_sampler_free(chain)
    return found


@pytest.mark.parametrize("temperature", [0.3, 0.8, 1.0, 1.7])
@pytest.mark.parametrize("k", [0, 1, 40])
@pytest.mark.parametrize("p", [1.0, 0.95, 0.5])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.4])
def test_the_chain_is_llama_cpps(temperature: float, k: int, p: float, min_p: float) -> None:
    options = SamplerOptions(temperature=temperature, top_k=k, top_p=p, min_p=min_p)
    rng = np.random.default_rng(int(k + 100 * p + 1000 * min_p))
    for scale in (0.5, 3.0, 12.0):
        row = rng.normal(0.0, scale, 2000).astype(np.float32)
        row[rng.integers(0, 2000, 50)] = -np.inf
        ours = distribution(row, options)
        theirs = llama_distribution(row, options)
        found = dict(zip(ours.token_ids.tolist(), ours.probs.tolist(), strict=True))
        # llama.cpp sums in float32: the last token of a nucleus may fall on either side.
        # Its probabilities are float32 too, and vanish earlier.
        found = {token: prob for token, prob in found.items() if prob > 1e-30}
        theirs = {token: prob for token, prob in theirs.items() if prob > 1e-30}
        differing = set(found) ^ set(theirs)
        assert len(differing) <= (2 if p < 1 else 0)
        assert all(max(found.get(t, 0), theirs.get(t, 0)) < 0.01 for t in differing)
        for token in set(found) & set(theirs):
            assert found[token] == pytest.approx(theirs[token], rel=2e-3, abs=1e-6)


def test_one_token_with_all_the_mass_is_kept_by_every_sampler() -> None:
    row = np.full(500, -100.0, np.float32)
    row[123] = 100.0
    for options in (
        SamplerOptions(temperature=1.0, top_k=0, top_p=0.5, min_p=0.5),
        SamplerOptions(temperature=2.0, top_k=40, top_p=1.0, min_p=0.05),
    ):
        assert set(llama_distribution(row, options)) == {123}
        assert distribution(row, options).token_ids.tolist() == [123]
