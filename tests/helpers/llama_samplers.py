"""llama.cpp's own samplers, called through its low-level API, for comparison with ours."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llama_cpp
import numpy as np
import pytest

from specgen.options import SamplerOptions
from specgen.system.arrays import Logits
from specgen.text.sampling.distribution import Distribution

#: llama_token_data as NumPy sees it.
TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


def native_chain(options: SamplerOptions, n_vocab: int, vocab: Any = None) -> list[Any]:
    """The samplers that llama.cpp's common_sampler_init makes from these options.

    XTC's generator is left out by giving it probability 0 or 1 only. `vocab` is for DRY.
    """
    lib = llama_cpp
    made = []
    if options.logit_bias:
        biases = (lib.llama_logit_bias * len(options.logit_bias))()
        for i, (token_id, bias) in enumerate(options.logit_bias):
            biases[i] = lib.llama_logit_bias(token_id, bias)
        made.append(lib.llama_sampler_init_logit_bias(n_vocab, len(biases), biases))
    breakers = [text.encode() for text in options.dry_breakers]
    makers = {
        "penalties": lambda: lib.llama_sampler_init_penalties(
            n_vocab,
            _window(options.repeat_last_n),
            options.repeat_penalty,
            options.frequency_penalty,
            options.presence_penalty,
        ),
        "dry": lambda: lib.llama_sampler_init_dry(
            vocab,
            options.dry_multiplier,
            options.dry_base,
            options.dry_allowed_length,
            _window(options.dry_last_n),
            (ctypes.c_char_p * max(1, len(breakers)))(*breakers),
            len(breakers),
        ),
        "top_n_sigma": lambda: lib.llama_sampler_init_top_n_sigma(options.top_n_sigma),
        "top_k": lambda: lib.llama_sampler_init_top_k(options.top_k),
        "typ_p": lambda: lib.llama_sampler_init_typical(options.typical_p, 0),
        "top_p": lambda: lib.llama_sampler_init_top_p(options.top_p, 0),
        "min_p": lambda: lib.llama_sampler_init_min_p(options.min_p, 0),
        "xtc": lambda: lib.llama_sampler_init_xtc(
            options.xtc_probability, options.xtc_threshold, 0, 1
        ),
        "temperature": lambda: lib.llama_sampler_init_temp_ext(
            options.temperature, options.dynatemp_range, options.dynatemp_exponent
        ),
    }
    return [*made, *(makers[name]() for name in options.samplers)]


def _window(last_n: int) -> int:
    return 10_000 if last_n < 0 else last_n


@contextmanager
def chained(samplers: Sequence[Any]) -> Iterator[Any]:
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    for sampler in samplers:
        llama_cpp.llama_sampler_chain_add(chain, sampler)
    try:
        yield chain
    finally:
        llama_cpp.llama_sampler_free(chain)


def native_distribution(
    row: Logits, options: SamplerOptions, history: Sequence[int] = (), vocab: Any = None
) -> dict[int, float]:
    """The probabilities with which the last sampler of llama.cpp's chain samples.

    Those that are zero in float32 are left out.
    """
    candidates = np.zeros(len(row), TOKEN_DATA)
    candidates["id"] = np.arange(len(row))
    candidates["logit"] = row
    array = llama_cpp.llama_token_data_array(
        candidates.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data)), len(row), -1, False
    )
    draw = llama_cpp.llama_sampler_init_dist(1)  # fills the probabilities in
    with chained([*native_chain(options, len(row), vocab), draw]) as chain:
        for token in history:
            llama_cpp.llama_sampler_accept(chain, token)
        llama_cpp.llama_sampler_apply(chain, ctypes.byref(array))
        kept = [array.data[i] for i in range(array.size)]
        return {int(data.id): float(data.p) for data in kept if data.p > 0}


def as_dict(distribution: Distribution) -> dict[int, float]:
    return dict(zip(distribution.token_ids.tolist(), distribution.probs.tolist(), strict=True))


def assert_same(ours: Distribution, theirs: dict[int, float]) -> None:
    """Equal but for what llama.cpp's float32 cannot tell, and for which of equals are kept.

    Its sorts are not stable, so of tokens with equal logits any may survive a cut.
    """
    found = as_dict(ours)
    for token in set(found) & set(theirs):
        assert found[token] == pytest.approx(theirs[token], rel=2e-3, abs=1e-6)
    mine = sorted((p for t, p in found.items() if t not in theirs and p > 1e-30), reverse=True)
    others = sorted((p for t, p in theirs.items() if t not in found and p > 1e-30), reverse=True)
    assert mine == pytest.approx(others, rel=2e-3, abs=1e-6)
