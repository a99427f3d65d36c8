"""Replays: they read what `specgen bench` writes, and generate the recorded answers again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.replays import main
from tests.helpers.cli import Specgen


def test_replays_generate_the_answers_of_a_benchmark_again(
    specgen: Specgen,
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one two one two\nthree four\n", encoding="utf-8")
    answers = tmp_path / "answers.json"
    options = ("-m", target, "-md", "ngram", "-n", "24", "--prompts", prompts, "--json", answers)
    outcome = specgen("bench", *map(str, options))
    assert outcome.code == 0, outcome.err

    arguments = ["--target", target, "--prompts", prompts, "--answers", answers, "--row", "0.1"]
    arguments += ["--max-tokens", "24"]
    monkeypatch.setattr(sys, "argv", ["replays", *map(str, arguments), "ngram"])
    main()
    (figures,) = json.loads(capsys.readouterr().out)
    plain = [
        result["outcome"]
        for result in json.loads(answers.read_text(encoding="utf-8"))["results"]
        if result["contender"] == "plain"
    ]
    replayed = figures["answers"]
    assert [each["prompt"] for each in replayed] == [1, 2]
    assert [each["n_tokens"] for each in replayed] == [len(each["token_ids"]) for each in plain]
