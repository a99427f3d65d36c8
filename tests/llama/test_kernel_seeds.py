"""With specgen's kernels, a seed's text is plain decoding's to the letter, whatever drafts: with the caches
and the attention that users have by default."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from specgen.events import FinishedEvent
from specgen.options import (
    DraftOptions,
    DraftSource,
    GenerationOptions,
    SamplerOptions,
    SessionOptions,
    parse_tree,
)
from specgen.session.engine import generate
from specgen.session.memory import Memory
from specgen.session.session import Session
from tests.tiny import TinyConfig, write_tiny_model

pytestmark = pytest.mark.usefixtures("kernels")
N_SEEDS = 12
PROMPT = "the cat is in the house of"
#: The whole vocabulary with its many near-ties, samplers that cut it, and one that draws by itself.
SAMPLERS = {
    "whole vocabulary": SamplerOptions(temperature=0.8, top_k=0, top_p=1.0, min_p=0.0),
    "defaults": SamplerOptions(temperature=0.8),
    "xtc": SamplerOptions(temperature=0.8, xtc_probability=0.5, xtc_threshold=0.05),
    "penalties": SamplerOptions(temperature=1.0, repeat_penalty=1.2, dry_multiplier=0.8),
}
FIXED = DraftOptions(policy="fixed", max_tokens=4, p_min=0.0, ngram_min=1, verifier="match")
DRAFTING = {
    "by cost": DraftOptions(ngram_min=1),
    "chains": replace(FIXED, tree=parse_tree("off")),
    "trees": replace(FIXED, tree=parse_tree("3,2,1")),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeds")
    config = TinyConfig(logit_scale=3.0, n_embd=256, n_head=4, tensor_type="q8_0")
    write_tiny_model(folder / "target.gguf", config)
    write_tiny_model(folder / "draft.gguf", config.draft(0.1))
    return folder


def texts(models: Path, draft: DraftSource, samplers: str, drafting: DraftOptions) -> list[str]:
    """An answer for each seed."""
    found: list[str] = []
    n_accepted, memory = 0, Memory()
    for seed in range(N_SEEDS):
        options = SessionOptions(
            target=models / "target.gguf",
            draft=draft,
            sampler=replace(SAMPLERS[samplers], seed=seed),
            drafting=drafting,
            generation=GenerationOptions(max_tokens=24),
        )
        with Session(options, time.perf_counter, memory) as loaded:
            prompt = loaded.prompts.of_text(PROMPT, chat=False)
            *_, last = generate(loaded, prompt)
        assert isinstance(last, FinishedEvent)
        n_accepted += last.n_accepted
        found.append(last.text)
    is_certain = isinstance(draft, Path) and not drafting.is_by_cost
    assert n_accepted or not is_certain
    return found


@pytest.mark.parametrize("samplers", SAMPLERS)
def test_seeds(models: Path, samplers: str) -> None:
    plain = texts(models, "none", samplers, DraftOptions())
    assert len(set(plain)) > N_SEEDS // 2
    for name, drafting in DRAFTING.items():
        for draft in ("ngram", models / "draft.gguf"):
            if name == "trees" and draft == "ngram":
                continue  # n-grams have no shape
            assert texts(models, draft, samplers, drafting) == plain, (name, draft)
