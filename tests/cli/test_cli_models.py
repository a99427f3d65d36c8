"""`specgen models`: standard output, standard error and exit codes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import filelock
import pytest
from typer.testing import CliRunner, Result

from specgen.cli import models as cli
from specgen.errors import (
    FetchError,
    ModelFileError,
    OutputError,
    UnknownModelError,
    UsageError,
)
from specgen.models.download import fetch, lock_file_of, lock_file_of_blob
from specgen.models.registry import CatalogueModel, HubSource, load_registry
from specgen.system.folders import packed_folder
from tests.helpers.fetch import (
    COMMIT,
    MAIN,
    WebServer,
    finished,
    publish,
    publish_on_hub,
    publish_repository,
    python,
    random_bytes,
    sha256,
    small_model,
    write_registry,
)

CONTENT = random_bytes(100_000)


@pytest.fixture(autouse=True)
def server(hub_server: WebServer) -> WebServer:
    return hub_server


@pytest.fixture
def tiny(tmp_path: Path, server: WebServer) -> CatalogueModel:
    """A model of the user's own, on the index, with the pair "tiny-pair"."""
    model = small_model(CONTENT, n_parts=4)
    write_registry(tmp_path, model)
    publish(server, model, CONTENT)
    return model


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def lines_of(result: Result) -> dict[str, list[str]]:
    """The rows that `list` printed, by their first column."""
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    rows = [re.split("  +", line) for line in result.stdout.splitlines() if line]
    return {name: rest for name, *rest in rows}


def test_list_is_a_line_for_each_model_and_each_pair(tiny: CatalogueModel) -> None:
    lines = lines_of(run("list"))
    assert {*load_registry().models, *load_registry().pairs} < set(lines)
    assert lines["gemma-3-270m"] == ["-", "253 MB", "-", "-", "Gemma"]
    assert lines["tiny"] == ["-", "100 kB", "-", "-", "MIT"]
    assert lines["tiny-pair"] == ["tiny", "ngram", "no"]
    assert lines["qwen2.5-coder-smollm2"][-1] == "yes"
    fetch(tiny)
    assert lines_of(run("list"))["tiny"][0].startswith("not a GGUF file"), "these are random bytes"


def test_list_as_json_holds_models_pairs_and_the_default(tiny: CatalogueModel) -> None:
    path = fetch(tiny)
    document = json.loads(run("list", "--json").stdout)
    assert document["default_pair"] == "qwen2.5-coder-smollm2"
    models = {model["model"]: model for model in document["models"]}
    assert models["tiny"]["path"] == str(path)
    assert models["smollm2-135m"]["path"] is None
    pairs = {pair.pop("pair"): pair for pair in document["pairs"]}
    assert pairs["qwen2.5-coder-smollm2"]["default"] is True
    named = {"description": "no draft model", "target": "tiny", "draft": "ngram"}
    assert pairs["tiny-pair"] == named | {"default": False}


@pytest.mark.parametrize("name", ["tiny", "tiny-pair"])
def test_pull_prints_the_path_alone_on_stdout(tiny: CatalogueModel, name: str) -> None:
    result = run("pull", name)
    assert result.exit_code == 0
    path = Path(result.stdout.removesuffix("\n"))
    assert path.read_bytes() == CONTENT
    assert "downloading tiny (100 kB, MIT)\n" in result.stderr
    assert result.stderr.count("\n") == 1, "no more is said of what is there at once"
    assert run("path", name).stdout == f"{path}\n"
    again = run("pull", name)
    assert (again.stdout, again.stderr) == (result.stdout, "")


def test_whole_command_ends_with_the_code_and_the_lines_of_its_error(
    tiny: CatalogueModel, tmp_path: Path, server: WebServer
) -> None:
    server.resources.clear()
    command = python(tmp_path, server, MAIN, "models", "pull", "tiny")
    stdout, stderr = finished(command, FetchError.exit_code)
    assert stdout == ""
    note, error, hint = stderr.splitlines()
    assert note == "downloading tiny (100 kB, MIT)"
    assert error == f"error: {server.url}/simple/tiny-model-part1/ answered with status 404"
    assert hint.startswith("hint: ")


# The Hugging Face cache

REPO = "me/Tiny-GGUF"
OTHER = random_bytes(50_000, seed=1)


@pytest.fixture
def cached(server: WebServer) -> dict[str, Path]:
    """Models in the Hugging Face cache, by name."""
    files = {"tiny-Q4_K_M.gguf": CONTENT, "tiny-Q8_0.gguf": OTHER, "tiny-Q5_0.gguf": OTHER}
    publish_repository(server, REPO, files)
    publish_repository(server, "you/Tiny-GGUF", {"tiny-it.gguf": CONTENT})
    names = [f"{REPO}:Q4_K_M", f"hf:{REPO}:q8_0", f"{REPO}:Q5_0", "you/Tiny-GGUF"]
    return {name: Path(run("pull", "--quiet", name).stdout.strip()) for name in names}


def test_list_and_path_know_the_cache_of_the_hub(cached: dict[str, Path]) -> None:
    lines = lines_of(run("list"))
    for name in (f"hf:{REPO}:Q4_K_M", "hf:you/Tiny-GGUF/tiny-it.gguf"):
        assert lines[name][0].startswith("not a GGUF file"), "these are random bytes"
    document = json.loads(run("list", "--json").stdout)
    assert {model["source"] for model in document["hub_cache"]} == {"Hugging Face"}
    quantisations = [model["quantisation"] for model in document["hub_cache"]]
    assert quantisations == ["Q4_K_M", "Q5_0", "Q8_0", None]
    assert {model["path"] for model in document["hub_cache"]} == set(map(str, cached.values()))
    for name, path in cached.items():
        assert run("path", name).stdout == f"{path}\n"
        assert path.is_file()
    assert isinstance(run("path", f"{REPO}:Q2_K").exception, ModelFileError)


def test_rm_removes_one_model_and_keeps_what_others_share(cached: dict[str, Path]) -> None:
    blobs = cached[f"{REPO}:Q5_0"].resolve().parent
    result = run("rm", "--yes", f"{REPO}:q8_0")
    assert result.stdout == f"removed hf:{REPO}:Q8_0: 0 B freed\n"  # of Q5_0 it is the same content
    assert run("rm", "--yes", f"{REPO}:Q5_0").stdout == f"removed hf:{REPO}:Q5_0: 50.0 kB freed\n"
    assert sorted(path.name for path in blobs.iterdir()) == [sha256(CONTENT)]
    assert cached[f"{REPO}:Q4_K_M"].read_bytes() == CONTENT
    assert isinstance(run("rm", "--yes", f"{REPO}:Q5_0").exception, ModelFileError)


def test_rm_of_a_repository_removes_its_models_and_partial_downloads(
    cached: dict[str, Path],
) -> None:
    path = cached[f"{REPO}:Q4_K_M"]
    path.resolve().with_name("0.incomplete").write_bytes(bytes(1000))
    result = run("rm", "--yes", REPO)
    assert result.stdout.endswith(": 151 kB freed\n")
    assert not path.parents[2].exists()
    assert cached["you/Tiny-GGUF"].is_file()


def test_rm_asks_for_confirmation_and_requires_yes_without_a_terminal(
    cached: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run("rm", REPO)
    assert isinstance(result.exception, UsageError)
    assert "--yes" in (result.exception.hint or "")
    monkeypatch.setattr(cli, "is_terminal", lambda: True)
    result = CliRunner().invoke(cli.app, ["rm", REPO], input="n\n")
    assert result.exit_code == 0
    assert "removed" not in result.stdout
    assert "(150 kB)?" in result.stderr
    assert all(path.exists() for path in cached.values())
    assert CliRunner().invoke(cli.app, ["rm", REPO], input="y\n").exit_code == 0
    assert not cached[f"{REPO}:Q5_0"].exists()


def test_rm_refuses_what_is_being_downloaded(tiny: CatalogueModel, cached: dict[str, Path]) -> None:
    folder = fetch(tiny).parent
    unfinished = cached[f"{REPO}:Q4_K_M"].resolve().with_name("0.incomplete")
    unfinished.write_bytes(bytes(1000))
    locks = {
        "tiny": lock_file_of(tiny),
        REPO: lock_file_of_blob(unfinished.with_name("0")),
    }
    for name, lock in locks.items():
        files = [*folder.iterdir(), *cached.values()]
        lock.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(lock):  # as another process that downloads it
            result = run("rm", "--yes", name)
            assert isinstance(result.exception, FetchError)
            assert "another process is downloading" in result.exception.message
            assert lock.exists()
            assert all(path.exists() for path in files)
        assert run("rm", "--yes", name).exit_code == 0


def test_rm_of_a_model_keeps_a_partial_download_of_another_one(cached: dict[str, Path]) -> None:
    unfinished = cached["you/Tiny-GGUF"].resolve().with_name("0.incomplete")
    unfinished.write_bytes(bytes(1000))
    assert run("rm", "--yes", "you/Tiny-GGUF/tiny-it.gguf").exit_code == 0
    assert not cached["you/Tiny-GGUF"].exists()
    assert unfinished.exists()
    assert run("rm", "--yes", "you/Tiny-GGUF").exit_code == 0
    assert not unfinished.exists()


def test_rm_removes_a_model_of_the_registry(
    tiny: CatalogueModel, server: WebServer, tmp_path: Path
) -> None:
    path = fetch(tiny)
    assert run("rm", "--yes", "tiny").stdout == "removed tiny: 100 kB freed\n"
    assert not path.exists()
    # One from the hub is in the Hugging Face cache.
    model = replace(tiny, hub=HubSource(REPO, "tiny.gguf"))
    write_registry(tmp_path, model)
    publish_on_hub(server, HubSource(REPO, "tiny.gguf"), CONTENT)
    path = fetch(model)
    assert path.is_relative_to(tmp_path / "hub")
    assert f"hf:{REPO}/tiny.gguf" not in lines_of(run("list")), "it is listed once, by its name"
    assert run("rm", "--yes", "tiny").stdout == "removed tiny: 100 kB freed\n"
    assert not path.exists()
    assert isinstance(run("rm", "--yes", "tiny").exception, ModelFileError)
    assert isinstance(run("rm", "--yes", "tiny-pair").exception, UnknownModelError)


def test_rm_removes_a_model_of_the_registry_from_all_snapshots(
    tiny: CatalogueModel, server: WebServer, tmp_path: Path
) -> None:
    """The registry may have an older version than the newest one, which other programs use."""
    source = HubSource(REPO, "tiny.gguf", COMMIT)
    model = replace(tiny, hub=source)
    write_registry(tmp_path, model)
    publish_on_hub(server, source, CONTENT)
    path = fetch(model)
    storage, newer = path.parents[2], path.parents[1] / ("f" * 40)
    newer.mkdir()
    (newer / path.name).symlink_to(path.resolve())
    (storage / "refs").mkdir(exist_ok=True)
    (storage / "refs" / "main").write_text(newer.name, encoding="utf-8")
    assert run("path", "tiny").stdout == f"{newer / path.name}\n"
    assert run("rm", "--yes", "tiny").stdout == "removed tiny: 100 kB freed\n"
    assert isinstance(run("path", "tiny").exception, ModelFileError)
    assert not (newer / path.name).exists()


def test_clear_deletes_what_it_can_and_reports_what_it_cannot() -> None:
    folder = packed_folder()
    (folder / "a").mkdir(parents=True)  # no file, so it cannot be deleted as one
    (folder / "b").write_bytes(bytes(2000))
    result = run("clear")
    assert isinstance(result.exception, OutputError)
    assert result.exception.message.startswith(f"{folder / 'a'}: cannot be deleted: ")
    assert result.stdout == "2.00 kB freed\n"
    assert [path.name for path in folder.iterdir()] == ["a"]
