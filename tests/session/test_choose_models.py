"""The choice of a draft for a target, and what `specgen draft find --save` stores."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specgen.errors import UsageError
from specgen.models.files import FileIdentity
from specgen.models.hub_names import folder_of
from specgen.models.registry import CatalogueModel, ModelPair, Registry
from specgen.options import DraftSource, ModelChoice
from specgen.session.choose_models import DraftChoice, choose_drafts, find_models
from specgen.session.saved_drafts import SavedDraft, save_draft, saved_draft, saved_drafts_file

TARGET = FileIdentity("big.gguf", 4000)
SAVED = SavedDraft(Path("/models/small.gguf"), date=datetime.date(2025, 1, 31), speedup=1.4)


# --- what `specgen draft find --save` keeps


@pytest.mark.parametrize("draft", [Path("/models/small.gguf"), Path("small.gguf"), "ngram"])
def test_saved_choices_are_read_again(draft: DraftSource) -> None:
    assert saved_draft(TARGET) is None
    saved = dataclasses.replace(SAVED, draft=draft, date=None)
    save_draft(TARGET, saved)
    whole = draft.absolute() if isinstance(draft, Path) else draft
    assert saved_draft(TARGET) == dataclasses.replace(saved, draft=whole)


def test_files_of_a_later_version_are_left_alone() -> None:
    file = saved_drafts_file()
    save_draft(TARGET, SAVED)
    document = json.loads(file.read_text(encoding="utf-8"))
    document["version"] = 7
    (entry,) = document["drafts"].values()
    entry["colour"] = "red"
    del entry["speedup"]
    file.write_text(json.dumps(document), encoding="utf-8")
    assert saved_draft(TARGET) == dataclasses.replace(SAVED, speedup=None)
    save_draft(FileIdentity("other.gguf", 1), SAVED)
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["version"] == 7
    assert [entry.get("colour") for entry in document["drafts"].values()] == ["red", None]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not JSON: "),
        ("\xff", "is not JSON: "),
        ('{"drafts": 3}', "is not a JSON object"),
        (
            '{"drafts": {"big.gguf, 4000 bytes": 3}}',
            '"big.gguf, 4000 bytes": draft: is neither a path',
        ),
        ('{"drafts": {"big.gguf, 4000 bytes": {"draft": ""}}}', "draft: is neither a path"),
        (
            '{"drafts": {"big.gguf, 4000 bytes": {"draft": "none", "speedup": "fast"}}}',
            "speedup: Input should be a valid number",
        ),
    ],
)
def test_a_damaged_file_is_named_and_not_written_over(text: str, problem: str) -> None:
    file = saved_drafts_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError) as caught:
        saved_draft(TARGET)
    assert str(file) in caught.value.message
    assert problem in caught.value.message
    assert caught.value.hint == f"correct {file}, or move it away"
    if "big.gguf" not in text:
        with pytest.raises(UsageError):
            save_draft(TARGET, SAVED)
    assert file.read_bytes() == text.encode("latin-1")
    assert [path.name for path in file.parent.glob("drafts*")] == ["drafts.json"]


# --- which draft is taken


def model(name: str, size_bytes: int) -> CatalogueModel:
    about = ("MIT", "1B", "Q8_0", "")
    return CatalogueModel(name, f"{name}.gguf", size_bytes, "0" * 64, *about)


def registry(*pairs: tuple[str, str], general: str | None = "tiny") -> Registry:
    """Models big, large, small, middle and tiny, and pairs of a target and its draft."""
    sizes = {"big": 4000, "large": 3999, "middle": 2000, "small": 1500, "tiny": 1000}
    named = {
        f"{target}-{draft}": ModelPair(f"{target}-{draft}", target, draft, "")
        for target, draft in pairs
    }
    models = {name: model(name, size) for name, size in sizes.items()}
    return Registry(models, named, "big-small", general)


def here(*names: str) -> Callable[[CatalogueModel], Path | None]:
    """Finds these models on the disk."""
    return lambda model: Path("/store", model.file) if model.name in names else None


def drafts(choices: tuple[DraftChoice, ...]) -> list[str]:
    return [Path(choice.draft).stem for choice in choices]


def choose(
    *on_disk: str,
    pairs: tuple[tuple[str, str], ...] = (("big", "small"),),
    target: FileIdentity = TARGET,
    saved: SavedDraft | None = None,
    general: str | None = "tiny",
) -> tuple[DraftChoice, ...]:
    return choose_drafts(target, saved, registry(*pairs, general=general), locate=here(*on_disk))


def test_what_was_saved_comes_before_the_partner_the_general_draft_and_n_grams(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.gguf"
    file.touch()
    saved = SavedDraft(file, None, 1.234, 1.1, 1.4, 6)
    choices = choose("small", "tiny", saved=saved)
    assert drafts(choices) == ["mine", "small", "tiny", "ngram"]
    assert "mine.gguf" in choices[0].why
    assert saved.gain in choices[0].why
    assert "big-small" in choices[1].why
    assert "general" in choices[2].why
    assert "n-grams" in choices[3].why
    assert all("\n" not in choice.why for choice in choices)


def test_what_was_saved_and_always_works_is_the_only_choice() -> None:
    for draft, why in (("ngram", "drafting with n-grams"), ("none", "not drafting")):
        (choice,) = choose("small", "tiny", saved=SavedDraft(draft))
        assert choice.draft == draft
        assert choice.why.startswith(why)


def test_a_missing_saved_draft_is_reported_with_its_replacement() -> None:
    gone = SavedDraft(Path("/nowhere/mine.gguf"))
    for on_disk, taken in ((("small",), "small"), (("tiny",), "tiny"), ((), "ngram")):
        choices = choose(*on_disk, saved=gone)
        assert drafts(choices)[0] == taken
        assert "/nowhere/mine.gguf" in choices[0].why


def test_the_first_partner_that_is_on_the_disk_is_taken_in_the_files_order() -> None:
    pairs = (("large", "tiny"), ("big", "middle"), ("big", "large"))
    assert drafts(choose("middle", "large", pairs=pairs)) == ["middle", "ngram"]
    assert drafts(choose("large", pairs=pairs)) == ["large", "ngram"]
    assert drafts(choose(pairs=pairs)) == ["ngram"]


def test_only_a_file_with_the_models_name_and_size_gets_its_partner() -> None:
    for other in (FileIdentity("big.gguf", 4001), FileIdentity("bigger.gguf", 4000)):
        assert drafts(choose("small", target=other)) == ["ngram"]


def test_the_general_draft_is_for_targets_at_least_four_times_as_large() -> None:
    assert drafts(choose("tiny", target=FileIdentity("any.gguf", 4000))) == ["tiny", "ngram"]
    assert drafts(choose("tiny", target=FileIdentity("any.gguf", 3999))) == ["ngram"]
    assert drafts(choose("tiny", target=FileIdentity("any.gguf", 4000), general=None)) == ["ngram"]
    assert drafts(choose(target=FileIdentity("any.gguf", 4000))) == ["ngram"]


# --- from what the user named


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """The file of the target; the general draft is on this disk too."""
    tiny = registry().model("tiny")
    folder_of(tiny).mkdir(parents=True)
    (folder_of(tiny) / tiny.file).write_bytes(bytes(1000))
    path = tmp_path / "big.gguf"
    path.write_bytes(bytes(4000))
    return path


Find = Callable[..., tuple[Path, tuple[DraftChoice, ...], list[str]]]


@pytest.fixture
def find(big: Path) -> Find:
    """Finds the target and the drafts, and reports what was downloaded."""

    def found(
        target: str | None,
        draft: str | None = None,
        pair: str | None = None,
        saved: SavedDraft | None = None,
    ) -> tuple[Path, tuple[DraftChoice, ...], list[str]]:
        fetched: list[str] = []

        def fetch(name: str) -> Path:
            fetched.append(name)
            return big if name == "hf:a/b" else big.parent / f"{name}.gguf"

        saved_drafts_file().unlink(missing_ok=True)
        if saved is not None:
            save_draft(TARGET, saved)
        choice = ModelChoice(target, draft, pair)
        sources = find_models(choice, registry=registry(("big", "small")), fetch=fetch)
        assert sources.draft == sources.drafts[0].draft
        return sources.target, sources.drafts, fetched

    return found


def test_a_draft_that_is_named_is_the_only_one_and_needs_no_reason(big: Path, find: Find) -> None:
    saved = SavedDraft("none")
    for given, draft in (("ngram", "ngram"), ("none", "none"), ("x.gguf", Path("x.gguf"))):
        _, choices, fetched = find(str(big), given, saved=saved)
        assert choices == (DraftChoice(draft),)
        assert fetched == []
    _, choices, fetched = find(str(big), "small", saved=saved)
    assert choices == (DraftChoice(big.with_name("small.gguf")),)
    assert fetched == ["small"]
    _, _, fetched = find("hf:a/b", "hf:c/d:q8_0")
    assert fetched == ["hf:a/b", "hf:c/d:q8_0"]


def test_a_pair_uses_its_own_draft_even_if_another_was_saved(big: Path, find: Find) -> None:
    target, choices, fetched = find(None, pair="big-small", saved=SavedDraft("none"))
    assert target == big
    assert choices == (DraftChoice(big.with_name("small.gguf")),)
    assert fetched == ["big", "small"]
    _, choices, _ = find(None, "ngram", pair="big-small")
    assert choices == (DraftChoice("ngram"),)
    with pytest.raises(UsageError, match="cannot be used together"):
        find("big", pair="big-small")


def test_the_default_pairs_draft_is_fetched_and_chosen_like_others(big: Path, find: Find) -> None:
    """Its draft may not pay on this machine; then n-grams are used instead."""
    target, choices, fetched = find(None)
    assert target == big
    assert drafts(choices) == ["tiny", "ngram"]
    assert fetched == ["big", "small"]
    _, choices, fetched = find(None, "none")
    assert choices == (DraftChoice("none"),)
    assert fetched == ["big"]


def test_a_target_by_itself_downloads_no_draft(big: Path, find: Find) -> None:
    for target, n_fetched in ((str(big), 0), ("big", 1)):
        _, choices, fetched = find(target)
        assert drafts(choices) == ["tiny", "ngram"]
        assert all(choice.why for choice in choices)
        assert len(fetched) == n_fetched
