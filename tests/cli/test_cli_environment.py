"""Commands in restricted environments: if something cannot be written, only that is lost."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import specgen as api
from specgen.errors import OutputError
from specgen.system.files import NOWHERE, scratch_folder
from specgen.system.folders import cache_folder, config_folder, data_folder
from tests.helpers.cli import Specgen, complaint, ended, models_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="about homes of Unix")

NO_HOME = "there is no home directory that can be used"
#: Runs the command line for a user who is not in the list of users.
WITHOUT_ENTRY = """
import pwd

def unknown(who):
    raise KeyError(who)

pwd.getpwuid = unknown
pwd.getpwnam = unknown
from specgen.__main__ import main
main()
"""
#: Variables that name folders.
FOLDER_VARIABLES = (
    *("HOME", "SPECGEN_CACHE", "SPECGEN_CONFIG", "SPECGEN_DATA", "HF_HOME", "HF_HUB_CACHE"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
)


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user without an entry in the list of users, as with `docker run -u` and in services."""
    import pwd

    def unknown(who: object) -> None:
        raise KeyError(who)

    for function in ("getpwuid", "getpwnam"):
        monkeypatch.setattr(pwd, function, unknown)
    for name in FOLDER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@contextlib.contextmanager
def inaccessible(folder: Path) -> Iterator[Path]:
    """A home that belongs to another user."""
    folder.mkdir()
    folder.chmod(0)
    yield folder
    folder.chmod(0o700)


@pytest.mark.usefixtures("no_home")
class TestWithoutHome:
    def test_the_folders_are_nowhere(self) -> None:
        assert {cache_folder(), config_folder(), data_folder()} == {NOWHERE}

    @pytest.mark.parametrize("variable", ["SPECGEN_CACHE", "XDG_CACHE_HOME"])
    def test_a_variable_names_the_cache_folder(
        self, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(variable, str(tmp_path / "cache"))
        assert cache_folder().is_relative_to(tmp_path / "cache")
        monkeypatch.setenv("SPECGEN_CACHE", "~nobody-has-this-name/cache")
        assert cache_folder() == NOWHERE

    def test_an_answer_comes_with_one_note(self, specgen: Specgen, chat_models: Path) -> None:
        options = [*models_of(chat_models), "-n", "8", "-t", "1", "a cat"]
        result = specgen("run", *options)
        assert result.code == 0, result.err
        assert result.out
        notes = [line for line in result.err.splitlines() if NO_HOME in line]
        assert len(notes) == 1
        assert re.findall(r"[A-Z_]{4,}", notes[0]) == [
            *("HOME", "SPECGEN_CACHE", "SPECGEN_DATA", "HF_HOME")
        ]
        assert NO_HOME not in specgen("run", "-q", *options).err
        assert specgen("run", "-m", chat_models / "target.gguf", *options[4:]).code == 0

    @pytest.mark.parametrize(
        "command",
        ["config", "models list", "models clear", "draft forget", "--help", "run --help"],
    )
    def test_commands_without_models_succeed(self, specgen: Specgen, command: str) -> None:
        result = specgen(*command.split())
        assert result.code == 0, result.err

    def test_a_session_that_cannot_be_kept_is_refused(
        self, specgen: Specgen, chat_models: Path
    ) -> None:
        options = [*models_of(chat_models), "-t", "1"]
        refusal = complaint(specgen("chat", *options, "--session", "x"), 10)
        assert NO_HOME in refusal
        assert "SPECGEN_DATA" in refusal

    def test_the_python_interface_notes_it_once(self, chat_models: Path) -> None:
        notes: list[str] = []
        with api.load(chat_models / "target.gguf", "none", note=notes.append) as model:
            assert model.generate("a cat", max_tokens=4).text
        assert [NO_HOME in note for note in notes].count(True) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "code"),
    [("doctor", 0), ("models list", 0), ("models pull hf:a/b", 7), ("models pull smollm2-135m", 7)],
)
def test_a_process_without_home_works_or_says_what_it_needs(
    command: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FOLDER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    result = ended(*command.split(), code=WITHOUT_ENTRY, cwd=tmp_path)
    assert result.returncode == code, result.stderr
    assert os.devnull not in result.stdout
    if code:
        last_lines = result.stderr.splitlines()[-2:]
        assert NO_HOME in last_lines[0]
        assert "to a folder that can be written" in last_lines[1]
    assert not any(tmp_path.iterdir())  # no folder with the name "~"


@pytest.mark.slow
def test_a_variable_that_huggingface_hub_refuses_is_reported() -> None:
    result = ended("models", "list", env={"HF_HUB_ETAG_TIMEOUT": "soon"})
    assert result.returncode == 2
    assert result.stderr.startswith("error: a variable of huggingface_hub is wrong: ")
    assert "HF_" in result.stderr.splitlines()[1]


def test_a_relative_folder_in_a_deleted_one_is_not_used(
    specgen: Specgen, chat_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECGEN_CACHE", "relative")
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    assert cache_folder() == tmp_path / "deleted" / "relative"
    (tmp_path / "deleted").rmdir()
    assert cache_folder() == NOWHERE
    assert specgen("run", *models_of(chat_models), "-n", "4", "a cat").code == 0


def test_nothing_is_found_or_written_in_a_deleted_folder(
    specgen: Specgen, chat_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text("a cat\n", encoding="utf-8")
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    result = specgen("batch", *models_of(chat_models), lines, "out.jsonl")
    assert (result.code, result.out) == (10, "")
    assert "error: out.jsonl: cannot be written: No such file or directory" in result.err
    result = specgen("serve", "--models", ".")
    assert (result.code, result.out) == (2, "")
    assert "error: ." in result.err


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may enter any folder")
def test_an_inaccessible_home_costs_only_a_note(
    specgen: Specgen, chat_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FOLDER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with inaccessible(tmp_path / "home") as home:
        monkeypatch.setenv("HOME", str(home))
        assert cache_folder() == NOWHERE
        for command in (["models", "list"], ["config"], ["draft", "forget"]):
            assert specgen(*command).code == 0
        result = specgen("run", *models_of(chat_models), "-n", "4", "a cat")
        assert result.code == 0, result.err
        assert NO_HOME in result.err


def test_a_cache_that_cannot_be_written_costs_only_a_note(
    specgen: Specgen, chat_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("SPECGEN_CACHE", str(file / "cache"))
    result = specgen("run", *models_of(chat_models), "-n", "4", "a cat")
    assert result.code == 0, result.err
    assert f"{file / 'cache'} cannot be written" in result.err
    assert "set SPECGEN_CACHE to another folder" in result.err


class TestTemporaryFolders:
    @pytest.fixture(autouse=True)
    def _read_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No folder that Python tries can be written."""
        monkeypatch.setattr(tempfile, "tempdir", os.devnull)

    @pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="a folder of Linux")
    def test_a_folder_in_memory_replaces_the_systems(self) -> None:
        with scratch_folder("specgen-test-") as folder:
            assert (Path(folder).parent, Path(folder).exists()) == (Path("/dev/shm"), True)
        assert not Path(folder).exists()

    def test_without_a_writable_folder_the_hint_names_tmpdir(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from specgen.system import files

        monkeypatch.setattr(files, "MEMORY_FOLDER", os.devnull)
        with pytest.raises(OutputError) as error:
            scratch_folder("specgen-test-")
        assert error.value.hint is not None
        assert "TMPDIR" in error.value.hint
