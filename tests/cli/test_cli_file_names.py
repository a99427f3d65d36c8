"""Texts that might be file names: long ones, home folders of other users, and URLs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.system.files import named_file, named_path, path_of
from tests.helpers.cli import Specgen, complaint

#: No file's name may be as long.
LONG = "a cat and a dog " * 30
NO_USER = "~nobody-has-this-name/x.gguf"

pytestmark = pytest.mark.usefixtures("tested_kernels")


@given(st.text())
def test_any_text_can_be_asked_about(text: str) -> None:
    for ask in (named_path, named_file):
        assert ask(text) in (None, path_of(text))


def test_files_and_folders_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a file"
    file.touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert named_file(str(file)) == named_path("~/a file") == file
    assert (named_path(str(tmp_path)), named_file(str(tmp_path))) == (tmp_path, None)
    assert path_of(NO_USER) == Path(NO_USER)


@pytest.mark.parametrize("ending", ["", ".gguf", " model.gguf"])
def test_a_prompt_may_be_long_and_end_as_a_model(
    specgen: Specgen, chat_models: Path, ending: str
) -> None:
    model = ["-m", chat_models / "target.gguf", "-md", "ngram", "-n", "3", "-t", "1"]
    for prompt in (LONG + ending, f"{NO_USER} {LONG}{ending}", f"What is in x.gguf?{ending}"):
        for arguments in ([prompt, *model], ["-p", prompt, *model]):
            result = specgen("run", *arguments)
            assert result.code == 0, result.err
    assert specgen("run", "--system", LONG + ending, *model, "a cat").code == 0


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["-m", NO_USER], 4),
        (["-m", f"{LONG}.gguf"], 4),
        (["-m", LONG], 6),
        (["-md", NO_USER], 4),
        (["-md", f"{LONG}.gguf"], 4),
        (["-md", LONG], 6),
        (["--chat-template", NO_USER], 2),
        (["--chat-template", LONG], 2),
        (["--chat-template", "x" * 5000], 2),
        (["--grammar", LONG], 2),
        (["--grammar-file", NO_USER], 2),
        (["--grammar-file", LONG], 2),
        (["--json-schema", LONG], 2),
        (["--json-schema-file", LONG], 2),
        (["--lookup-file", NO_USER], 2),
        (["--lookup-file", LONG], 2),
        (["--file", LONG], 3),
        (["--html", LONG], 2),
        (["--prompt-cache", LONG], 2),
    ],
)
def test_a_path_that_is_not_a_file_is_rejected(
    specgen: Specgen, chat_models: Path, options: list[str], code: int
) -> None:
    own = {"-m": str(chat_models / "target.gguf"), "-md": "none"}
    own |= {options[0]: options[1]}
    arguments = [word for option_and_value in own.items() for word in option_and_value]
    refusal = complaint(specgen("run", *arguments, "-n", "3", "a cat"), code)
    assert len(refusal) < 2000


@pytest.mark.parametrize("command", ["run", "chat", "serve", "doctor", "models pull"])
@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("https://huggingface.co/user/repo-GGUF/resolve/main/f.gguf?a=1", "user/repo-GGUF/f.gguf"),
        ("https://huggingface.co/user/repo", "user/repo"),
        ("hf.co/user/repo:Q4_K_M", "user/repo:Q4_K_M"),
        ("http://example.com/model.gguf", "USER/REPO:QUANT"),
    ],
)
def test_an_address_of_a_model_points_to_hf(
    specgen: Specgen, command: str, address: str, name: str
) -> None:
    arguments = [*command.split(), address]
    if command != "models pull":
        arguments.insert(-1, "-m")
    if command == "run":
        arguments.append("a cat")
    assert f"-hf {name}" in complaint(specgen(*arguments), 6)


def test_an_address_of_a_file_on_this_disk_points_to_its_path(specgen: Specgen) -> None:
    refusal = complaint(specgen("run", "-m", "file:///models/model.gguf", "a cat"), 6)
    assert "give the path of the file, without file://" in refusal
