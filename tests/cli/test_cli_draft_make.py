"""`specgen draft data` and `specgen draft make`, with a tiny target."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specgen.llama.decoder_heads import is_heads_file, read_heads
from specgen.models.files import heads_file, identity_of
from specgen.session.saved_drafts import saved_draft
from specgen.train.draft_builder import distilled_file, pruned_file, text_folder
from specgen.train.target_text import TargetText
from tests.helpers.cli import Specgen, complaint
from tests.helpers.heads import prompts
from tests.tiny import TinyConfig, write_tiny_model

MACHINE = ("-t", "1", "-np", "8", "-n", "60")
pytestmark = pytest.mark.usefixtures("idle_machine")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "t.gguf", TinyConfig(logit_scale=6.0))


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts()))
    return path


def n_tokens_in(folder: Path) -> int:
    """The tokens of the text in a folder."""
    return sum(len(answer.tokens) for answer in TargetText(folder).answers)


def cache() -> Path:
    return Path(os.environ["SPECGEN_CACHE"])


def test_data_prints_the_folder_and_resumes(specgen: Specgen, target: Path, asked: Path) -> None:
    identity = identity_of(target)
    first = specgen("draft", "data", "-m", target, "--prompts", asked, "--tokens", "200", *MACHINE)
    assert first.code == 0, first.err
    folder = Path(first.out.strip())
    assert folder == text_folder(cache(), identity)
    n_first = n_tokens_in(folder)
    assert n_first >= 200
    assert f"in {folder}" in first.err
    again = specgen("draft", "data", "-m", target, "--prompts", asked, "--tokens", "900", *MACHINE)
    assert again.code == 0
    assert n_tokens_in(folder) >= 900 > n_first
    more = specgen("draft", "data", "-m", target, "--prompts", asked, "--tokens", "99999", *MACHINE)
    assert more.code == 0
    assert "there are no more prompts" in more.err


MadeAndUsed = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def made_and_used(specgen: Specgen, asked: Path) -> MadeAndUsed:
    """Makes a draft, compares it with n-grams, and uses it; returns the report and the notes."""

    def make(target: Path, file: Path, *options: str | Path) -> tuple[dict[str, Any], str]:
        own = ("draft", "make", "-m", target, "--prompts", asked, "--json", *MACHINE)
        made = specgen(*own, *options)
        assert made.code == 0, made.err
        found: dict[str, Any] = json.loads(made.out)
        tried = {Path(draft["draft"]).name for draft in found["drafts"]}
        assert tried == {file.name, "ngram", "none"}
        run = ("run", "-m", target, "-t", "1", "-n", "16", "abc", "--draft")
        used, plain = specgen(*run, file), specgen(*run, "none")
        assert (used.code, used.out) == (0, plain.out), used.err
        return found, made.err

    return make


def test_make_makes_heads_compares_and_keeps_the_best(
    made_and_used: MadeAndUsed, specgen: Specgen, target: Path
) -> None:
    identity = identity_of(target)
    path = heads_file(cache(), identity)
    found, noted = made_and_used(target, path, "--kind", "heads", "--tokens", "3600")
    assert is_heads_file(path)
    assert read_heads(path).target == "t.gguf"
    assert "the heads guess " in noted
    assert found["n_prompts"] == 8
    kept = saved_draft(identity)
    assert kept is not None
    assert str(kept.draft) == found["drafts"][0]["draft"] == found["saved"]
    run = ("run", "-m", target, "-t", "1", "-n", "16", "abc", "--draft")
    by_word, plain = specgen(*run, "heads"), specgen(*run, "none")
    assert (by_word.code, by_word.out) == (0, plain.out)


def test_make_fits_a_small_model_to_the_target(made_and_used: MadeAndUsed, target: Path) -> None:
    pytest.importorskip("jax")
    small = write_tiny_model(target.with_name("small.gguf"), TinyConfig(logit_scale=6.0).draft(0.3))
    fitted = distilled_file(cache(), identity_of(target), small)
    options = ("--tokens", "3600", "--kind", "distilled", "-md", small, "--minutes", "0.5")
    _, noted = made_and_used(target, fitted, *options)
    after, before = (float(text) for text in re.findall(r" on (\d+\.\d)%", noted))
    assert after > before - 2  # training chooses by the loss


def test_make_cuts_a_draft_out_of_the_target(made_and_used: MadeAndUsed, tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "t.gguf", TinyConfig(n_layer=5, logit_scale=6.0))
    path = pruned_file(cache(), identity_of(target))
    _, noted = made_and_used(target, path, "--tokens", "1200", "--kind", "pruned")
    assert "of 5 layers left out" in noted


def test_a_missing_training_library_is_reported_before_anything_is_loaded(
    specgen: Specgen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    for kind in ((), ("--kind", "heads"), ("--kind", "distilled")):
        result = specgen("draft", "make", "-m", tmp_path / "none.gguf", *kind)
        assert result.code == 2
        assert result.err.splitlines() == [
            "error: training a draft needs jax, which is not installed",
            "hint: pip install 'specgen-gguf[train]'",
        ]


def test_too_little_text_is_one_line(specgen: Specgen, target: Path, asked: Path) -> None:
    few = asked.with_name("few.jsonl")
    few.write_text("".join(asked.read_text().splitlines(keepends=True)[:12]))
    result = specgen("draft", "make", "-m", target, "--prompts", few, "-q", *MACHINE)
    assert result.code == 2
    assert "too few" in result.err
    assert len(result.err.splitlines()) == 2
    least = specgen("draft", "make", "-m", target, "--tokens", "300")
    assert "--tokens 300 is too little text for heads" in complaint(least, 2)
    loud = specgen("draft", "make", "-m", target, "--prompts", few, *MACHINE)
    assert "tokens to learn from; more time or more --prompts would give more" in loud.err


def test_impossible_drafts_are_refused_before_any_text_is_written(
    specgen: Specgen, target: Path, asked: Path, tmp_path: Path
) -> None:
    mamba = write_tiny_model(tmp_path / "m.gguf", TinyConfig(architecture="mamba"))
    make = ("draft", "make", "--prompts", asked, "-q", *MACHINE, "-m")
    for command, code, words in (
        ((*make, target, "--tokens", "1200", "--kind", "pruned"), 4, "it has only 2 layers"),
        ((*make, target, "-md", target, "--kind", "heads"), 2, "goes with --kind distilled"),
        ((*make, mamba), 5, "recurrent state"),
        (("run", "-m", target, "--draft", "heads", "abc"), 2, f"make -m {target}` makes them"),
    ):
        assert words in complaint(specgen(*command), code)
    assert not (cache() / "made").exists()


def test_the_general_draft_is_not_fitted_to_itself(
    specgen: Specgen, asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jax")
    digest = "ab" * 32
    folder = cache() / "models" / digest[:16]
    folder.mkdir(parents=True)
    general = write_tiny_model(folder / "general.gguf", TinyConfig(logit_scale=6.0))
    entry = {"size_bytes": general.stat().st_size, "sha256": digest}
    texts = ("file", "licence", "parameters", "quantisation", "description")
    entry |= {"name": "general"} | dict.fromkeys(texts, general.name)
    lines = [f"{key} = {json.dumps(value)}" for key, value in entry.items()]
    registry = ['general_draft = "general"', "[[models]]", *lines]
    (tmp_path / "models.toml").write_text("\n".join(registry))
    monkeypatch.setenv("SPECGEN_CONFIG", str(tmp_path))
    make = ("draft", "make", "-m", "general", "--prompts", asked, "--kind", "distilled", *MACHINE)
    words = "no model to fit, other than the target, is on this disk"
    assert words in complaint(specgen(*make), 2)
    assert not (cache() / "made").exists()
