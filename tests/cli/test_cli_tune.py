"""`specgen tune` on tiny models: its output and what it stores, but no speeds."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from specgen.measure import draft_search
from specgen.measure.draft_trial import try_draft
from specgen.system import machine
from specgen.system.folders import measurements_file
from tests.helpers.cli import Result, Specgen, complaint, tiny_names

#: Quick, and enough for a test of the command line.
SHORT = ("-fa", "off", "-N", "2", "-n", "14", "--draft-max", "4", "-t", "1")
PROMPT = "def add(a, b): return a + b # and the sum is the sum is"

pytestmark = [pytest.mark.usefixtures("quick_threads"), pytest.mark.slow]


@pytest.fixture
def tune(specgen: Specgen, tiny_models: Path) -> Specgen:
    """Runs `specgen tune` for the tiny target; files may be given by their tiny names."""

    def run(*arguments: str | Path) -> Result:
        named = tiny_names(tiny_models, arguments)
        return specgen("tune", "-m", tiny_models / "target.gguf", *SHORT, *named)

    return run


def document(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.out, parse_constant=pytest.fail)
    return found


def tried(found: dict[str, Any]) -> set[str]:
    return {Path(each["draft"]).stem for each in found["drafts"]}


def notes(result: Result) -> list[str]:
    lines = result.err.splitlines()
    assert all(line.startswith("note: ") for line in lines)
    return [line.removeprefix("note: ") for line in lines]


def test_in_a_pipe_the_table_is_the_output_and_the_sentences_are_notes(tune: Specgen) -> None:
    result = tune("--draft", "draft")
    assert result.code == 0
    headings, *rows = (line.split("\t") for line in result.out.splitlines())
    assert headings[:2] == ["draft", "speedup"]
    assert {Path(row[0]).stem for row in rows} == {"draft", "ngram", "none"}
    measured, *_, kept = notes(result)
    assert measured.startswith("measured on 2 answers of target.gguf: ")
    assert kept.startswith("kept for `specgen run`")
    assert "threads" not in kept
    found = document(tune("--draft", "draft", "--json"))
    assert tried(found) == {"none", "draft", "ngram"}
    assert (found["is_interrupted"], found["threads"], len(found["advice"])) == (False, {}, 3)


# --- what goes wrong


def test_a_named_model_that_cannot_be_used_is_one_error(tune: Specgen, tmp_path: Path) -> None:
    bad, text = tmp_path / "bad.jsonl", tmp_path / "text.gguf"
    bad.write_text('{"prompt": "x"}\n{"text": "y"}\n', encoding="utf-8")
    text.write_text("no model", encoding="utf-8")
    for arguments, code, message in (
        (("--draft", tmp_path / "missing.gguf"), 4, "missing.gguf"),
        (("--draft", text), 4, "text.gguf"),
        (("--draft", "bert"), 4, "bert.gguf"),
        (("--draft", "other", "--translate", "off"), 5, "other.gguf"),
        (("--draft", "no-such-model"), 6, "no-such-model"),
        (("--prompts", tmp_path / "missing.jsonl"), 3, "missing.jsonl: cannot be read"),
        (("--prompts", bad), 3, "line 2: no prompt in it"),
        (("--draft-max", "0"), 2, "--draft-max 0 drafts nothing"),
        (("--draft", "draft", "--draft", "ngram"), 2, "give one --draft"),
        (("--policy", "fixed"), 2, "--policy"),
        (("-n", "1"), 2, "--max-tokens"),
    ):
        assert message in complaint(tune(*arguments), code)
    assert not measurements_file().exists()


def test_results_are_shown_even_if_they_cannot_be_kept(
    tune: Specgen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path / "file" / "cache"))
    result = tune("--draft", "draft")
    assert result.code == 0
    assert result.out.startswith("draft\tspeedup\t")
    assert notes(result)[-1].startswith(
        f"nothing was kept: {measurements_file()}: cannot be written: "
    )


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_ctrl_c_shows_the_results_so_far_and_keeps_nothing(
    tune: Specgen, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_tries = 0

    def try_and_stop(*arguments: Any, **named: Any) -> Any:
        nonlocal n_tries
        n_tries += 1
        if n_tries == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return try_draft(*arguments, **named)

    monkeypatch.setattr(draft_search, "try_draft", try_and_stop)
    result = tune("--draft", "draft", "--json")
    assert result.code == 130
    assert result.err.endswith("interrupted: not everything was measured, nothing was kept\n")
    found = document(result)
    assert found["is_interrupted"] is True
    assert tried(found) == {"none", "ngram"}
    assert len(found["advice"]) == 1
    assert not measurements_file().exists()


# --- what is stored


def measures(specgen: Specgen, models: Path, *more: str) -> bool:
    """Return whether a run measures the costs of drafting."""
    own = ("-m", models / "target.gguf", "--draft", models / "draft.gguf", "-t", "1", "-fa", "off")
    options = ("-n", "8", "--draft-max", "4", "--policy", "cost", "--json", *more)
    result = specgen("run", *own, *options, PROMPT)
    return '"measuring_s": 0.0,' not in result.out


def test_nothing_is_kept_from_a_busy_machine(
    tune: Specgen, specgen: Specgen, tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(machine, "share_of_others", lambda *_: 0.5)
        result = tune("--draft", "draft")
    assert result.code == 0
    *_, busy, kept = notes(result)
    assert busy.startswith("other programs were using 50% of the machine's cores")
    assert kept == "nothing was kept, because the machine was busy"
    assert measures(specgen, tiny_models)
