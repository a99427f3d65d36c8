"""Layers on a GPU. `make gpu-test` simulates one on the CPU (Mesa's lavapipe); without a GPU these
tests are skipped.

llama.cpp's kernels compute there, and their rows depend slightly on the batch. So the texts are
checked like in `specgen verify`: they may differ from plain decoding only at near-ties.

Flash attention is off, because Mesa 22.3 crashes in its own thread on some batches with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from specgen.llama import build
from specgen.options import ContextOptions
from tests.architectures.checks import CHECKS, Subject
from tests.helpers.bugs import plant
from tests.helpers.cli import Specgen
from tests.helpers.heads import make_heads
from tests.helpers.mtp import MtpArchitecture, write_mtp_model
from tests.helpers.sessions import write_models
from tests.helpers.tiny import write_respelled_model
from tests.registry import ARCHITECTURES, CACHES
from tests.tiny import Architecture, TinyConfig, write_tiny_model
from tests.tiny.eagle import TinyDflash, TinyEagle, write_tiny_dflash, write_tiny_eagle

DEVICES = [device for device in build().devices if "gpu" in device.kind]
pytestmark = pytest.mark.skipif(
    not DEVICES, reason="llama.cpp finds no GPU (make gpu-test makes one of the processor)"
)
#: Tiny models have two blocks and the output layer.
PLACES = {
    "GPU": ("-ngl", "99"),
    "a part on the GPU": ("-ngl", "2"),
    "the target on the GPU": ("-ngl", "99", "-ngld", "0"),
    "the draft on the GPU": ("-ngl", "0", "-ngld", "99"),
}
#: By name: the draft of a target (the ending of a file, or a word), and options.
DRAFTS: dict[str, tuple[str, ...]] = {
    "model": ("draft",),
    "wrong model": ("wrong",),
    "ngram": ("ngram", "--ngram-min", "1", "--ngram-max", "3"),
    "tree": ("draft", "--tree", "2,2"),
    "parallel": ("draft", "--draft-mask", "3"),
    "translated": ("respelled",),
    "heads": ("heads",),
}
FROM_STATES = (
    *(("glm4moe", "mtp"), ("qwen35", "mtp"), ("mimo2", "mtp"), ("llama", "eagle")),
    ("llama", "dflash"),
)
#: Each draft and each kind of cache on the GPU, and some of them in every other place. (A decode
#: takes 20 ms there.)
CASES = [
    *((cache, "model", "GPU") for cache in CACHES),
    *(("attention", draft, "GPU") for draft in DRAFTS if draft not in {"model", "ngram"}),
    ("sliding window", "tree", "GPU"),
    ("hybrid, snapshots", "wrong model", "GPU"),
    ("hybrid, copies", "ngram", "GPU"),
    *(
        (cache, draft, place)
        for place in PLACES
        if place != "GPU"
        for cache, draft in (("attention", "tree"), ("hybrid, snapshots", "model"))
    ),
    ("attention", "heads", "a part on the GPU"),
    *((*each, place) for each in FROM_STATES for place in ("GPU", "a part on the GPU")),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets for each kind of cache and of draft, and their drafts."""
    folder = tmp_path_factory.mktemp("models")
    for name, architecture in CACHES.items():
        window = 32 if name == "sliding window" else 0
        config = TinyConfig(architecture=architecture, logit_scale=3.0, sliding_window=window)
        drafts = {f"{name} draft": config.draft(0.1), f"{name} wrong": TinyConfig(seed=9)}
        write_models(folder, {name: config, **drafts})
        write_respelled_model(folder / f"{name} respelled.gguf", config.draft(0.05))
        if name == "attention":  # what they predict does not matter
            make_heads(folder / f"{name}.gguf", folder / f"{name} heads.gguf", folder / name, 1.0)
    for of_mtp in get_args(MtpArchitecture):
        write_mtp_model(folder / f"{of_mtp}.gguf", of_mtp, of_state=0.3, logit_scale=3.0)
    config = TinyConfig(n_layer=4, logit_scale=2.0)
    write_tiny_model(folder / "llama.gguf", config)
    write_tiny_eagle(folder / "llama eagle.gguf", config, TinyEagle())
    write_tiny_dflash(folder / "llama dflash.gguf", config, TinyDflash())
    return folder


def verified(
    specgen: Specgen,
    models: Path,
    target: str,
    draft: tuple[str, ...],
    place: str,
    check: str = "greedy",
) -> dict[str, Any]:
    """The report of `specgen verify`: an answer alone, and three at once, with a draft in every
    round.
    """
    name, *options = draft
    source = name if name in {"ngram", "mtp"} else str(models / f"{target} {name}.gguf")
    forced = ("--policy", "fixed", "--draft-max", "6", "--draft-p-min", "0", "--check", check)
    sizes = ("-N", "1", "-n", "20", "--n-samples", "100", "-t", "1")
    result = specgen(
        *("verify", "--json", "-m", models / f"{target}.gguf", "-md", source),
        *(*forced, *sizes, *options, *PLACES[place], "-fa", "off"),
    )
    assert result.code == 0, result.err + result.out
    report: dict[str, Any] = json.loads(result.out)
    assert report["verdict"] == "lossless"
    assert ("on the GPU" in report["kernels"]) == (place != "the draft on the GPU")
    return report


@pytest.mark.parametrize(("cache", "draft", "place"), CASES)
def test_drafts_change_nothing(
    specgen: Specgen, models: Path, cache: str, draft: str, place: str
) -> None:
    """A target by its cache, or one whose hidden states the draft reads."""
    report = verified(specgen, models, cache, DRAFTS.get(draft, (draft,)), place)
    assert {each["n_at_once"] for each in report["greedy"]} == {1, 3}
    # A random model may repeat nothing in one answer.
    drafted = [each["n_drafted"] > 0 for each in report["greedy"]]
    assert any(drafted) if draft.endswith("ngram") else all(drafted)


@pytest.mark.parametrize(
    ("target", "draft"), [("attention", "draft"), ("attention", "heads"), ("qwen35", "mtp")]
)
def test_samples_fit_the_targets_distribution(
    specgen: Specgen, models: Path, target: str, draft: str
) -> None:
    report = verified(specgen, models, target, (draft,), "GPU", "sampled")
    assert all(each["n_drafted"] for each in report["sampled"])


def test_a_planted_bug_is_found(
    specgen: Specgen, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What these tests rest on."""
    plant(monkeypatch, "wrong-row")
    result = specgen(
        *("verify", "-m", models / "attention.gguf", "-md", models / "attention wrong.gguf"),
        *("--policy", "fixed", "--draft-p-min", "0", "--check", "greedy", "-N", "2", "-n", "30"),
        *("-ngl", "99", "-fa", "off"),
    )
    assert result.code == 11, result.out


@pytest.mark.parametrize(
    ("architecture", "n_gpu_layers"),
    [
        *((name, 99) for name, case in ARCHITECTURES.items() if case.generates),
        *((name, 2) for name in CACHES.values()),
    ],
)
def test_caches_roll_back(tmp_path: Path, architecture: Architecture, n_gpu_layers: int) -> None:
    """Random drafts and removals in several sequences, and a context that fills up."""
    config = TinyConfig(architecture=architecture, tensor_type="q8_0")
    subject = Subject(
        path=write_tiny_model(tmp_path / "target.gguf", config),
        near=write_tiny_model(tmp_path / "near.gguf", config.draft(0.1)),
        wrong=write_tiny_model(tmp_path / "wrong.gguf", TinyConfig(seed=9)),
        kernels=False,
        context=ContextOptions(n_gpu_layers=n_gpu_layers, flash_attention="off"),
    )
    for check in ("fuzz", "full context"):
        CHECKS[check](subject)


def test_the_doctor_decodes_on_the_gpu(specgen: Specgen) -> None:
    report = json.loads(specgen("doctor", "--json").out)
    places = {each["name"]: each["passed"] for each in report["checks"]}
    assert places["decoding on the GPU"]
    assert report["healthy"]
