"""`specgen draft find`, and `specgen run` with the draft that it saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specgen.measure.draft_trial import DraftFigures
from specgen.models import hub_names
from specgen.models.files import identity_of
from specgen.session.saved_drafts import SavedDraft, save_draft, saved_draft
from specgen.system import machine
from tests.helpers.cli import Result, Specgen, complaint, tiny_names

PROMPT = "def add(a, b): return a + b # and the sum is the sum is"
#: Quick, and enough for a test of the command line.
SHORT = ("-t", "1", "-fa", "off", "-N", "2", "-n", "24", "--draft-p-min", "0")
pytestmark = [pytest.mark.usefixtures("idle_machine"), pytest.mark.slow]


@pytest.fixture
def find(specgen: Specgen, tiny_models: Path) -> Specgen:
    """Runs `specgen draft find` for the tiny target; files may be given by their tiny names."""

    def run(*arguments: str | Path, target: str = "target") -> Result:
        named = tiny_names(tiny_models, arguments)
        return specgen("draft", "find", "-m", tiny_models / f"{target}.gguf", *SHORT, *named)

    return run


def columns(result: Result) -> dict[str, list[str]]:
    """The columns after the first one, by draft."""
    assert result.code == 0, result.err
    headings, *rows = (line.split("\t") for line in result.out.splitlines())
    assert headings[:2] == ["draft", "speedup"]
    assert {len(row) for row in rows} == {len(headings)}
    return {Path(name).stem: rest for name, *rest in rows}


# --- the search


def test_in_a_pipe_each_draft_is_a_line_of_figures(find: Specgen) -> None:
    result = find("draft", "bad")
    assert result.err.startswith("note: measured on 2 answers of target.gguf: ")
    found = columns(result)
    assert set(found) == {"draft", "bad", "ngram", "none"}
    assert {len(figures) for figures in found.values()} == {7}
    assert found["none"][:2] == ["1.00", "1.00"]
    assert (found["none"][3], found["none"][5]) == ("", "")
    # What is accepted does not depend on the machine: one draft is close to the target, the
    # other is not.
    accepted = {name: float(found[name][3]) for name in ("draft", "bad")}
    assert accepted["draft"] > 0.5 > accepted["bad"]
    speedups = [float(figures[0]) for figures in found.values()]
    assert speedups == sorted(speedups, reverse=True)


def test_json_contains_all_figures_rejected_files_and_the_target(
    find: Specgen, tiny_models: Path
) -> None:
    result = find("draft", "bert", "--json")
    assert result.code == 0
    document: dict[str, Any] = json.loads(result.out)
    keys = (
        "target plain_tokens_per_s batch_s n_prompts n_tokens skipped_prompts threads drafts "
        "refused advice others_share saved is_interrupted"
    )
    assert " ".join(document) == keys
    assert document["target"] == str(tiny_models / "target.gguf")
    assert list(document["batch_s"]) == ["1", "2", "3", "4"]
    assert (document["n_prompts"], document["n_tokens"]) == (2, 48)
    names = {Path(entry["draft"]).stem for entry in document["drafts"]}
    assert names == {"draft", "ngram", "none"}
    for entry in document["drafts"]:
        assert set(entry) == {"draft", *DraftFigures.__dataclass_fields__}
    (refused,) = document["refused"]
    assert refused["file"] == str(tiny_models / "bert.gguf")
    assert (document["saved"], document["is_interrupted"]) == (None, False)
    by_name = {Path(entry["draft"]).stem: entry for entry in document["drafts"]}
    plain, draft = by_name["none"], by_name["draft"]
    assert plain["tokens_per_s"] == pytest.approx(document["plain_tokens_per_s"])
    assert draft["worst_speedup"] <= draft["speedup"] <= draft["best_speedup"]
    assert draft["n_answers"] == 2


def test_named_models_on_this_disk_are_tried(
    find: Specgen, tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(columns(find())) == {"ngram", "none"}
    monkeypatch.setattr(hub_names, "locate", lambda _model: tiny_models / "draft.gguf")
    assert set(columns(find())) == {"draft", "ngram", "none"}
    # So is a saved one, which only a faster one replaces.
    target = identity_of(tiny_models / "target.gguf")
    save_draft(target, SavedDraft(tiny_models / "bad.gguf", speedup=1.25))
    assert set(columns(find())) == {"draft", "bad", "ngram", "none"}
    # Named files are compared with each other only.
    assert set(columns(find("bad"))) == {"bad", "ngram", "none"}


# --- what cannot draft


def test_each_file_that_cannot_draft_is_one_line_and_not_a_failure(
    find: Specgen, tmp_path: Path, tiny_models: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes((tiny_models / "draft.gguf").read_bytes()[:5000])
    text = tmp_path / "text.gguf"
    text.write_text("no model", encoding="utf-8")
    result = find(broken, text, "bert", "target", "draft")
    assert set(columns(result)) == {"draft", "ngram", "none"}
    notes = [note for note in result.err.splitlines() if ".gguf: " in note]
    assert len(notes) == 4 + 1  # another note tells what was measured
    for path in (broken, text, tiny_models / "bert.gguf", tiny_models / "target.gguf"):
        (note,) = (note for note in notes if note.startswith(f"note: {path}: "))
        assert note.count(str(path)) == 1
    assert "the target itself" in result.err
    assert "embedding" in result.err or "encoder" in result.err
    quiet = find(broken, "--quiet")
    assert quiet.err == ""
    assert set(columns(quiet)) == {"ngram", "none"}


def test_a_named_file_that_is_missing_is_an_error_before_anything_is_measured(
    find: Specgen, tmp_path: Path
) -> None:
    missing = tmp_path / "missing"
    assert f"{missing}: no such file" in complaint(find("draft", missing), 4)
    assert f"{tmp_path}: a directory, not a model file" in complaint(find("draft", tmp_path), 4)


# --- what is stored


def test_save_keeps_the_best_draft_for_run(
    find: Specgen, specgen: Specgen, tiny_models: Path
) -> None:
    target = identity_of(tiny_models / "target.gguf")
    find("draft")
    assert saved_draft(target) is None
    result = find("draft", "--save")
    best, *figures = result.out.splitlines()[1].split("\t")
    saved = saved_draft(target)
    assert saved is not None
    assert str(saved.draft) == best
    assert saved.speedup == pytest.approx(float(figures[0]), abs=0.006)
    assert saved.date is not None
    name = {"ngram": "n-grams"}.get(best, Path(best).name)
    last = f"note: for target.gguf, `specgen run` without --draft now uses: {name}"
    assert result.err.splitlines()[-1] == last


def test_a_busy_machine_saves_nothing(
    find: Specgen, tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "share_of_others", lambda *_: 0.5)
    result = find("draft", "--save")
    assert result.code == 0
    assert result.err.splitlines()[-1] == "note: nothing was saved, because the machine was busy"
    assert saved_draft(identity_of(tiny_models / "target.gguf")) is None


def run_without_a_draft(specgen: Specgen, target: Path, *more: str) -> Result:
    return specgen("run", "-m", target, "-t", "1", "-fa", "off", "-n", "20", *more, PROMPT)


def drafted_by(result: Result) -> str:
    draft: str = json.loads(result.out.splitlines()[0])["draft"]
    return draft


def test_run_uses_the_saved_draft_with_a_note_unless_quiet(
    specgen: Specgen, tiny_models: Path
) -> None:
    target = tiny_models / "target.gguf"
    expected = run_without_a_draft(specgen, target, "--draft", "none", "--no-stats")
    assert expected.err == ""
    for draft, name in (
        (tiny_models / "draft.gguf", "draft.gguf"),
        ("ngram", "n-grams"),
        ("none", "not drafting"),
    ):
        save_draft(identity_of(target), SavedDraft(draft, speedup=1.25))
        result = run_without_a_draft(specgen, target, "--json")
        assert drafted_by(result) == (draft.name if isinstance(draft, Path) else draft)
        (note,) = result.err.splitlines()
        assert note.startswith("note: ")
        assert name in note
        assert "draft find" in note
        assert run_without_a_draft(specgen, target, "--no-stats").out == expected.out
        assert run_without_a_draft(specgen, target, "--quiet").err == ""
        named = run_without_a_draft(specgen, target, "--json", "--draft", "ngram")
        assert drafted_by(named) == "ngram"
        assert named.err == ""


def test_a_saved_draft_that_cannot_draft_costs_a_note_and_not_the_answer(
    specgen: Specgen, tiny_models: Path, tmp_path: Path
) -> None:
    target, draft = tiny_models / "target.gguf", tmp_path / "broken.gguf"
    draft.write_bytes((tiny_models / "draft.gguf").read_bytes()[:5000])
    save_draft(identity_of(target), SavedDraft(draft))
    result = run_without_a_draft(specgen, target, "--json")
    assert result.code == 0
    assert drafted_by(result) == "ngram"
    (note,) = result.err.splitlines()
    assert str(draft) in note
    assert "n-grams" in note
    # A draft that the user names is an error.
    assert run_without_a_draft(specgen, target, "--draft", str(draft)).code == 4


# --- how it ends


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (("--draft-max", "0"), 2, "nothing to find"),
        (("--prompts", "/nowhere.jsonl"), 3, "cannot be read"),
        (("-c", "8"), 3, "the context"),
        (("-c", "256", "--draft-max", "128", "-n", "200"), 3, "--draft-max"),
    ],
)
def test_wrong_options_are_one_error(
    find: Specgen, more: tuple[str, ...], code: int, message: str
) -> None:
    assert message in complaint(find(*more), code)
