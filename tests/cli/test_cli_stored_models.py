"""Models of other programs: how they are found, listed, named and used."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.cells import cell_len

import specgen as package
from specgen.cli.flags import model_names
from specgen.errors import UnknownModelError
from specgen.models.stored_models import find_stored, stored_models
from tests.helpers.cli import Specgen, spawn
from tests.helpers.fetch import sha256
from tests.helpers.server import PATIENCE_S
from tests.helpers.stores import Stores, write
from tests.helpers.wrong_files import WRONG_FILES
from tests.tiny import CHATML_TEMPLATE, TinyConfig, write_tiny_model

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the stores are where these programs keep them on Linux"
)

LIBRARY = "registry.ollama.ai/library"


def content_of(folder: Path, seed: int = 1, **config: Any) -> bytes:
    """The bytes of a tiny model; models of different seeds have different weights."""
    path = folder / f"source-{seed}.gguf"
    write_tiny_model(path, TinyConfig(seed=seed, chat_template=CHATML_TEMPLATE, **config))
    return path.read_bytes()


@pytest.fixture
def stores() -> Stores:
    return Stores(Path(os.environ["HOME"]))


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    return content_of(tmp_path)


def listed(specgen: Specgen) -> dict[str, dict[str, Any]]:
    """The models of other programs as `models list --json` has them, by name."""
    result = specgen("models", "list", "--json")
    assert result.code == 0, result.err
    return {model["model"]: model for model in json.loads(result.out)["other_programs"]}


# --- the stores


def test_ollamas_manifests_name_the_models(stores: Stores, content: bytes) -> None:
    blob = stores.add_to_ollama(f"{LIBRARY}/qwen2.5-coder:1.5b", content)
    stores.add_to_ollama("registry.ollama.ai/somebody/tuned:latest", content)
    stores.add_to_ollama("hf.co/someone/Tiny-GGUF:Q4_K_M", content)
    assert {model.own_name: model.path for model in stored_models("ollama")} == {
        "qwen2.5-coder:1.5b": blob,
        "somebody/tuned:latest": blob,
        "hf.co/someone/Tiny-GGUF:Q4_K_M": blob,
    }


def test_the_variable_of_ollama_names_another_store(
    stores: Stores, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores.add_to_ollama(f"{LIBRARY}/here:latest", content)
    stores.add_to_ollama(f"{LIBRARY}/there:latest", content, folder=tmp_path / "models")
    monkeypatch.setenv("OLLAMA_MODELS", f'"{tmp_path / "models"}"')
    assert [model.own_name for model in stored_models("ollama")] == ["there:latest", "here:latest"]


@pytest.mark.parametrize(
    "manifest",
    [b"", b"[]", b'{"layers": 3}', b'{"layers": [1, {"mediaType": []}]}', b"\xff\xfe"],
)
def test_a_damaged_manifest_hides_only_its_model(
    stores: Stores, content: bytes, manifest: bytes
) -> None:
    stores.add_to_ollama(f"{LIBRARY}/good:latest", content)
    write(stores.home / ".ollama/models/manifests" / LIBRARY / "bad" / "latest", manifest)
    assert [model.own_name for model in stored_models("ollama")] == ["good:latest"]


def test_lm_studios_files_are_found_in_each_possible_folder(
    stores: Stores, content: bytes, tmp_path: Path
) -> None:
    stores.add_to_lm_studio("me/Tiny-GGUF/tiny-Q4_0.gguf", content)
    stores.add_to_lm_studio("me/Old-GGUF/old.gguf", content, home=".cache/lm-studio")
    write(tmp_path / "chosen" / "me" / "Far-GGUF" / "far.gguf", content)
    settings = {"downloadsFolder": str(tmp_path / "chosen")}
    write(stores.home / ".lmstudio" / "settings.json", json.dumps(settings).encode())
    assert {model.own_name for model in stored_models("lmstudio")} == {
        "me/Tiny-GGUF/tiny-Q4_0",
        "me/Old-GGUF/old",
        "me/Far-GGUF/far",
    }


def test_lm_studios_pointer_names_its_folder(
    stores: Stores, content: bytes, tmp_path: Path
) -> None:
    write(tmp_path / "studio" / "models" / "me" / "Tiny-GGUF" / "tiny.gguf", content)
    write(stores.home / ".lmstudio-home-pointer", f"{tmp_path / 'studio'}\n".encode())
    assert [model.own_name for model in stored_models("lmstudio")] == ["me/Tiny-GGUF/tiny"]


def test_llama_cpps_cache_has_descriptions_plain_files_and_the_layout_of_the_hub(
    stores: Stores, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stores.add_to_llama_cpp("me/Tiny-GGUF", "Q4_0", "sub/tiny-q4_0.gguf", content)
    write(path.with_name("plain.gguf"), content)
    found = {model.own_name: model.path for model in stored_models("llama.cpp")}
    assert found == {"me/Tiny-GGUF:Q4_0": path, "plain": path.with_name("plain.gguf")}
    snapshot = tmp_path / "models--me--New-GGUF" / "snapshots" / "1"
    new = write(snapshot / "new-Q8_0.gguf", content)
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path))
    found = {model.own_name: model.path for model in stored_models("llama.cpp")}
    assert found["me/New-GGUF:Q8_0"] == new


@pytest.mark.parametrize(
    "variable", ["LLAMA_CACHE", "OLLAMA_MODELS", "XDG_CACHE_HOME", "XDG_DATA_HOME"]
)
def test_a_folder_that_cannot_be_used_hides_only_its_own_models(
    specgen: Specgen,
    stores: Stores,
    content: bytes,
    variable: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stores.add_to_lm_studio("me/Tiny-GGUF/tiny-Q4_0.gguf", content)
    monkeypatch.setenv(variable, "a" * 300)
    listed = specgen("models", "list")
    assert listed.code == 0, listed.err
    assert "lmstudio:me/Tiny-GGUF/tiny-Q4_0" in listed.out


def test_jans_descriptions_name_the_files(stores: Stores, content: bytes, tmp_path: Path) -> None:
    path = stores.add_to_jan("janhq/Tiny-GGUF", content)
    imported = write(tmp_path / "imported.gguf", content)
    folder = stores.home / ".local/share/Jan/data/llamacpp/models/imported"
    write(folder / "model.yml", f"model_path: '{imported}'\n".encode())
    found = {model.own_name: model.path for model in stored_models("jan")}
    assert found == {"janhq/Tiny-GGUF": path, "imported": imported}


def test_gpt4alls_unfinished_downloads_are_left_out(stores: Stores, content: bytes) -> None:
    path = stores.add_to_gpt4all("tiny.Q4_0.gguf", content)
    stores.add_to_gpt4all("incomplete-other.gguf", content[:100])
    chosen = write(stores.home / "chosen" / "mine.gguf", content)
    settings = Path(os.environ["XDG_CONFIG_HOME"]) / "nomic.ai" / "GPT4All.ini"
    write(settings, f"[General]\nmodelPath={chosen.parent}/\nthreadCount=4\n".encode())
    found = {model.own_name: model.path for model in stored_models("gpt4all")}
    assert found == {"tiny.Q4_0": path, "mine": chosen}


def test_folders_of_the_configuration_are_searched(
    specgen: Specgen, content: bytes, tmp_path: Path
) -> None:
    file = Path(os.environ["XDG_CONFIG_HOME"]) / "specgen" / "config.toml"
    write(file, f"model-folders = ['{tmp_path}/own']\n".encode())
    path = write(tmp_path / "own" / "deep" / "mine.gguf", content)
    assert specgen("models", "path", "folder:deep/mine").out == f"{path}\n"
    missing = specgen("models", "path", "folder:deep/other")
    assert 'error: there is no model "folder:deep/other" in your model-folders\n' in missing.err
    kept = specgen("models", "rm", "folder:deep/mine", "--yes")
    assert "error: folder:deep/mine is in one of your own folders" in kept.err
    assert f"hint: delete {path}\n" in kept.err
    assert path.exists()
    assert specgen("run", "-m", "mine", "-n", "1", "the cat").code == 0
    shown = specgen("config").out
    write(file, shown.encode())
    assert specgen("config").out == shown
    # Links to folders are followed, except those that lead in circles or to everything.
    linked = write(tmp_path / "elsewhere" / "linked.gguf", content)
    (tmp_path / "own" / "link").symlink_to(linked.parent)
    (linked.parent / "back").symlink_to(tmp_path / "own")
    (linked.parent / "self").symlink_to(linked.parent)
    (linked.parent / "loop").symlink_to("loop")
    (tmp_path / "own" / "all").symlink_to(tmp_path)
    names = [model.own_name for model in stored_models("folder")]
    assert names == ["deep/mine", "link/linked"]
    write(file, b"model-folders = 3\n")
    for command in (("models", "list"), ("run", "the cat")):
        refused = specgen(*command)
        assert refused.code == 2
        assert "model-folders: give a list of folders" in refused.err


# --- the list


def test_the_list_shows_where_a_model_is_and_how_to_use_it(
    specgen: Specgen, stores: Stores, content: bytes
) -> None:
    blob = stores.add_to_ollama(f"{LIBRARY}/tiny:1b", content)
    stores.add_to_lm_studio("me/Tiny-GGUF/tiny.gguf", content)
    before = stores.state()
    models = listed(specgen)
    assert models["ollama:tiny:1b"] == {
        "model": "ollama:tiny:1b",
        "path": str(blob),
        "size_bytes": len(content),
        "source": "Ollama",
        "fits_memory": True,
        "streamed_bytes": None,
        "draft": "ngram",
        "problem": None,
    }
    assert models["lmstudio:me/Tiny-GGUF/tiny"]["source"] == "LM Studio"
    rows = [line.split() for line in specgen("models", "list").out.splitlines()]
    size = f"{len(content) / 1000:.0f}"
    assert ["ollama:tiny:1b", "Ollama", size, "kB", "yes", "n-grams"] in rows
    own = {name: value for name, value in stores.state().items() if name in before}
    assert own == before, "nothing in the stores changes"


def test_the_list_has_straight_columns_and_no_control_characters(
    specgen: Specgen, stores: Stores, content: bytes
) -> None:
    for name in ("千问模型", "esc\x1b[31mred", "two\nlines", "plain"):
        stores.add_to_lm_studio(f"{name}.gguf", content)
    result = specgen("models", "list")
    assert result.code == 0, result.err
    assert "\x1b" not in result.out
    lines = [line for line in result.out.splitlines() if line.startswith("lmstudio:")]
    assert len(lines) == 4
    starts = {cell_len(line[: line.index("LM Studio")]) for line in lines}
    assert len(starts) == 1


def test_a_known_model_in_another_programs_store_is_used_and_not_downloaded(
    specgen: Specgen, stores: Stores, content: bytes, tmp_path: Path
) -> None:
    """The registry's target is in LM Studio's folder, and its draft among Ollama's."""
    small = content_of(tmp_path, seed=2)
    known = {"tiny": content, "small": small}
    lines = ['default_pair = "tiny-small"']
    for name, data in known.items():
        about = {"name": name, "file": f"{name}.gguf", "sha256": sha256(data), "licence": "MIT"}
        about |= {"parameters": "0", "quantisation": "F32", "description": "random weights"}
        lines.append("[[models]]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in about.items()]
        lines.append(f"size_bytes = {len(data)}")
    pair = {"name": "tiny-small", "target": "tiny", "draft": "small", "description": "a pair"}
    lines += ["[[pairs]]", *(f"{key} = {json.dumps(value)}" for key, value in pair.items())]
    folder = Path(os.environ["XDG_CONFIG_HOME"]) / "specgen"
    write(folder / "models.toml", "\n".join(lines).encode())
    path = stores.add_to_lm_studio("me/Tiny-GGUF/tiny.gguf", content)
    blob = stores.add_to_ollama(f"{LIBRARY}/small:1b", small)

    models = listed(specgen)
    assert models["lmstudio:me/Tiny-GGUF/tiny"]["draft"] == str(blob)
    for name, file in (("tiny", path), ("small", blob)):
        result = specgen("models", "pull", name)
        assert (result.code, result.out.strip()) == (0, str(file)), result.err
    run = specgen("run", "-m", "lmstudio:me/Tiny-GGUF/tiny", "-n", "4", "hi")
    assert run.code == 0, run.err
    # The pair's draft is considered. Whether so large a draft is used depends on measured costs, so
    # the note may also say "not drafting with".
    assert "drafting with ollama:small:1b" in run.err


@pytest.mark.parametrize("kind", WRONG_FILES)
def test_files_that_are_not_models_are_listed_with_the_reason(
    specgen: Specgen, stores: Stores, tmp_path: Path, kind: str
) -> None:
    WRONG_FILES[kind].write(tmp_path / "wrong.gguf")
    data = (tmp_path / "wrong.gguf").read_bytes()
    stores.add_to_ollama(f"{LIBRARY}/wrong:latest", data)
    problem = listed(specgen)["ollama:wrong:latest"]["problem"]
    assert WRONG_FILES[kind].said in problem
    assert f"ollama:wrong:latest  {problem}\n" in specgen("models", "list").out


def test_parts_projectors_and_what_needs_more_than_a_file(
    specgen: Specgen, stores: Stores, content: bytes, tmp_path: Path
) -> None:
    for name in ("split-00001-of-00002", "split-00002-of-00002", "mmproj-tiny"):
        stores.add_to_lm_studio(f"me/Tiny-GGUF/{name}.gguf", content)
    stores.add_to_lm_studio("me/Tiny-GGUF/half-00002-of-00002.gguf", content)
    stores.add_to_ollama(f"{LIBRARY}/adapted:latest", content, adapter=b"GGUF")
    stores.add_to_ollama(f"{LIBRARY}/gone:latest", content_of(tmp_path, seed=5)).unlink()
    stores.add_to_ollama(f"{LIBRARY}/cut:latest", content[:1000])
    encoder = content_of(tmp_path, 6, architecture="bert", tokenizer="bert")
    stores.add_to_ollama(f"{LIBRARY}/encoder:latest", encoder)
    models = listed(specgen)
    assert set(models) == {
        "lmstudio:me/Tiny-GGUF/split",
        "ollama:adapted:latest",
        "ollama:cut:latest",
        "ollama:encoder:latest",
        "ollama:gone:latest",
    }
    assert "an embedding model" in models["ollama:encoder:latest"]["problem"]
    assert models["ollama:cut:latest"]["problem"] == "damaged: its metadata cannot be read"
    assert "LoRA adapter" in models["ollama:adapted:latest"]["problem"]
    assert models["ollama:gone:latest"]["problem"] == "no such file"
    assert models["lmstudio:me/Tiny-GGUF/split"]["size_bytes"] == 2 * len(content)


# --- names


@pytest.mark.parametrize(
    "name",
    [
        "ollama:tiny:1b",
        "ollama:Tiny",
        "tiny:1b",
        "lmstudio:me/Other-GGUF/other-Q4_0",
        "lmstudio:me/Other-GGUF/other-Q4_0.gguf",
        "Other-GGUF/other-q4_0",
        "other-Q4_0.gguf",
    ],
)
def test_a_model_is_found_by_any_unambiguous_part_of_its_name(
    stores: Stores, content: bytes, tmp_path: Path, name: str
) -> None:
    blob = stores.add_to_ollama(f"{LIBRARY}/tiny:1b", content)
    other = stores.add_to_lm_studio("me/Other-GGUF/other-Q4_0.gguf", content_of(tmp_path, 2))
    found = find_stored(name)
    assert found is not None
    assert found.path == (blob if "iny" in name else other)


def test_a_name_of_several_models_is_refused_with_all_of_them(
    specgen: Specgen, stores: Stores, content: bytes, tmp_path: Path
) -> None:
    stores.add_to_ollama(f"{LIBRARY}/tiny:1b", content)
    stores.add_to_ollama(f"{LIBRARY}/tiny:3b", content_of(tmp_path, 2, n_layer=3))
    refused = specgen("run", "-m", "tiny", "the cat")
    assert refused.code == UnknownModelError.exit_code
    assert refused.err.splitlines() == [
        'error: "tiny" may be ollama:tiny:1b or ollama:tiny:3b',
        "hint: give one of these names",
    ]
    # As in Ollama, a name without a tag is the latest one, if there is one.
    latest = stores.add_to_ollama(f"{LIBRARY}/tiny:latest", content_of(tmp_path, 3))
    found = find_stored("tiny")
    assert found is not None
    assert found.path == latest


def test_copies_of_a_file_are_one_model(stores: Stores, content: bytes) -> None:
    stores.add_to_lm_studio("me/Tiny-GGUF/tiny.gguf", content)
    stores.add_to_gpt4all("tiny.gguf", content)
    assert find_stored("tiny") is not None


def test_unknown_names_are_a_one_line_error_with_suggestions(
    specgen: Specgen, stores: Stores, content: bytes
) -> None:
    stores.add_to_ollama(f"{LIBRARY}/tiny:1b", content)
    refused = specgen("run", "-m", "ollama:tini", "the cat")
    assert refused.code == UnknownModelError.exit_code
    assert refused.err.startswith('error: there is no model "ollama:tini" of Ollama on this disk')
    assert "did you mean ollama:tiny:1b?" in specgen("run", "-m", "olama:tiny:1b", "x").err


def test_the_shell_completes_names(stores: Stores, content: bytes) -> None:
    stores.add_to_ollama(f"{LIBRARY}/tiny:1b", content)
    assert model_names("olla") == ["ollama:tiny:1b"]


# --- wherever a model is named


def test_commands_and_python_take_the_names(
    specgen: Specgen, stores: Stores, content: bytes, tmp_path: Path
) -> None:
    blob = stores.add_to_ollama(f"{LIBRARY}/tiny:1b", content)
    by_path = specgen("run", "-m", blob, "-md", "none", "-n", "6", "the cat").out
    before = stores.state()
    for arguments in (
        ("-m", "ollama:tiny:1b", "-md", "none", "the cat"),
        ("-m", "tiny:1b", "-md", "ollama:tiny:1b", "the cat"),
        ("ollama:tiny:1b", "the cat"),
    ):
        answer = specgen("run", "-n", "6", *arguments)
        assert (answer.code, answer.out) == (0, by_path), answer.err
    with package.load("ollama:tiny:1b", "none") as model:
        assert model.generate("the cat", max_tokens=6).text == by_path.removesuffix("\n")
    table = write(tmp_path / "served.toml", b"[a]\ntarget = 'ollama:tiny:1b'\n")
    refused = specgen("serve", "--models", table, "--memory", "1MiB")
    assert "[a]: a needs about" in refused.err, "its file is found and measured"
    for command in (("models", "path"), ("models", "pull"), ("models", "show")):
        assert str(blob) in specgen(*command, "ollama:tiny:1b").out
    refused = specgen("models", "rm", "--yes", "ollama:tiny:1b")
    assert refused.code == 2
    assert "remove it with Ollama" in refused.err
    after = {name: value for name, value in stores.state().items() if name in before}
    assert after == before


def test_draft_find_takes_its_candidates_from_the_stores(
    specgen: Specgen, stores: Stores, content: bytes, tmp_path: Path
) -> None:
    stores.add_to_ollama(f"{LIBRARY}/small:latest", content)
    stores.add_to_lm_studio("me/Wrong-GGUF/wrong.gguf", content[:1000])
    target = content_of(tmp_path, 2, n_layer=16, n_embd=128)
    stores.add_to_ollama(f"{LIBRARY}/large:latest", target)
    found = specgen("draft", "find", "-m", "ollama:large", "--count", "1", "-n", "4", "--json")
    assert found.code == 0, found.err
    drafts = [Path(each["draft"]).name for each in json.loads(found.out)["drafts"]]
    assert any(name.startswith("sha256-") for name in drafts)


# --- a server of all models


def test_a_server_without_a_model_serves_all_by_name(
    specgen: Specgen, stores: Stores, content: bytes, tmp_path: Path
) -> None:
    blob = stores.add_to_ollama(f"{LIBRARY}/tiny:1b", content)
    other = stores.add_to_lm_studio("me/Other-GGUF/other.gguf", content_of(tmp_path, 2))
    stores.add_to_gpt4all("cut.gguf", content[:1000])
    answered = {
        name: specgen("run", "--raw", "-m", path, "-n", "5", "--temp", "0", "the cat").out
        for name, path in {"tiny:1b": blob, "me/Other-GGUF/other": other}.items()
    }
    expected = {name: text.removesuffix("\n") for name, text in answered.items()}
    process = spawn("serve", "--port", "0", "--temp", "0", "--memory", "2GB", text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        listed = httpx.get(f"{url}/v1/models").json()["data"]
        assert [model["id"] for model in listed] == list(expected)
        for name, text in expected.items():
            body = {"model": name, "prompt": "the cat", "max_tokens": 5}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).json()
            assert answer["choices"][0]["text"] == text, answer
        tags = httpx.get(f"{url}/api/tags").json()["models"]
        assert "tiny:1b" in [model["name"] for model in tags]
        body = {"model": "tiny:1b", "prompt": "the cat", "stream": False}
        asked = body | {"raw": True, "options": {"num_predict": 5}}
        answer = httpx.post(f"{url}/api/generate", json=asked, timeout=PATIENCE_S).json()
        assert answer["response"] == expected["tiny:1b"]
    finally:
        process.terminate()
        _, said = process.communicate(timeout=PATIENCE_S)
    assert "serving the models on this disk, each loaded when a request names it: tiny:1b, " in said
    assert "not served: cut: " in said


def test_a_server_of_one_named_model_still_loads_it_at_once(stores: Stores, content: bytes) -> None:
    stores.add_to_ollama(f"{LIBRARY}/tiny:1b", content)
    process = spawn("serve", "--port", "0", "-m", "ollama:tiny:1b", text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        (listed,) = httpx.get(f"{url}/v1/models").json()["data"]
        assert listed["id"] == "tiny:1b"
    finally:
        process.terminate()
        _, said = process.communicate(timeout=PATIENCE_S)
    assert "serving the models on this disk" not in said
