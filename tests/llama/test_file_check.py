"""Files that would make llama.cpp abort the process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from specgen.errors import ModelFileError
from specgen.llama import LlamaBackend, LlamaModel, file_check
from specgen.llama import model as model_module
from specgen.options import ContextOptions
from tests.helpers import rows
from tests.helpers.tiny import with_a_token_twice
from tests.helpers.wrong_files import WRONG_FILES
from tests.tiny import Architecture, TinyConfig, write_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where checks of this test are remembered."""
    file_check.remember_checks(tmp_path / "cache")
    yield tmp_path / "cache"
    file_check.remember_checks(None)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose metadata is read."""
    found: list[Path] = []
    check = file_check.check_metadata

    def counted(path: Path) -> None:
        found.append(path)
        check(path)

    monkeypatch.setattr(file_check, "check_metadata", counted)
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model.gguf", TinyConfig())


def test_a_duplicate_token_is_rejected(tmp_path: Path, folder: Path) -> None:
    """llama.cpp asserts that none is."""
    path = with_a_token_twice(tmp_path / "twice.gguf")
    for _ in range(2):  # nothing wrong is remembered as right
        with pytest.raises(ModelFileError, match=r"tokens \d+ and \d+ are both 'Ġthe'"):
            file_check.check_file(path)
    assert not folder.exists()


Metadata: TypeAlias = dict[str, int | float | str]


@pytest.mark.parametrize(
    ("architecture", "metadata", "wrong"),
    [
        ("llama", {"llama.block_count": 0}, "llama.block_count is 0"),
        ("llama", {"llama.block_count": 513}, "llama.block_count is 513"),
        ("llama", {"llama.attention.layer_norm_rms_epsilon": -1.0}, "epsilon is -1"),
        ("llama", {"llama.rope.freq_base": float("inf")}, "freq_base is inf"),
        # It would never finish its first batch.
        ("lfm2", {"lfm2.rope.dimension_count": 0}, "lfm2.rope.dimension_count is 0"),
    ],
)
def test_metadata_that_llama_cpp_does_not_survive_are_refused(
    tmp_path: Path, architecture: Architecture, metadata: Metadata, wrong: str
) -> None:
    config = TinyConfig(architecture)
    path = write_tiny_model(tmp_path / "wrong.gguf", config, metadata=metadata)
    with pytest.raises(ModelFileError, match=wrong):
        LlamaModel(path)


@pytest.mark.parametrize(
    ("architecture", "metadata"),
    [
        # Keys for parts and architectures that this model is not.
        ("llama", {"llama.posnet.block_count": 0, "llama.convnext.block_count": 0}),
        ("llama", {"bert.block_count": 0, "bert.attention.layer_norm_epsilon": -1.0}),
        # llama.cpp's LLAMA_POOLING_TYPE_UNSPECIFIED, and none.
        ("llama", {"llama.pooling_type": 0xFFFFFFFF}),
        ("llama", {"llama.pooling_type": 0}),
        ("jamba", {"jamba.rope.dimension_count": 0}),
    ],
)
def test_metadata_that_look_wrong_and_are_right_are_taken(
    tmp_path: Path, architecture: Architecture, metadata: Metadata
) -> None:
    config = TinyConfig(architecture)
    LlamaModel(write_tiny_model(tmp_path / "right.gguf", config, metadata=metadata)).close()


@pytest.mark.parametrize("name", WRONG_FILES)
def test_the_error_for_a_file_that_is_not_a_model_names_its_kind(tmp_path: Path, name: str) -> None:
    kind = WRONG_FILES[name]
    path = tmp_path / "model.gguf"
    kind.write(path)
    with pytest.raises(ModelFileError) as caught:
        LlamaModel(path)
    assert caught.value.message.startswith(f"{path}: ")
    assert kind.said in caught.value.message
    assert kind.hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    "name", ["m.gguf.part1of2", "m.gguf-split-a", "m.Q8_0.gguf.part-aa", "m.gguf.split01"]
)
def test_the_error_for_a_part_of_a_model_asks_to_join_the_parts(tmp_path: Path, name: str) -> None:
    path = write_tiny_model(tmp_path / name, TinyConfig(), keep_fraction=0.5)
    with pytest.raises(ModelFileError, match="a piece of a model") as caught:
        LlamaModel(path)
    assert "cat m" in (caught.value.hint or "")


def test_a_wrong_file_among_the_parts_of_a_model_is_named(tmp_path: Path) -> None:
    first, second = (tmp_path / f"model-0000{number}-of-00002.gguf" for number in (1, 2))
    write_tiny_model(first, TinyConfig())
    WRONG_FILES["lfs"].write(second)
    with pytest.raises(ModelFileError, match="model-00002.*: a Git LFS pointer"):
        LlamaModel(first)


def test_a_download_with_reserved_room_is_unfinished(tmp_path: Path) -> None:
    """Its size is right, and its end is zeros."""
    path = write_tiny_model(tmp_path / "large.gguf", TinyConfig(n_layer=8, n_ff=512))
    data = path.read_bytes()
    LlamaModel(path).close()
    path.write_bytes(data[: len(data) // 3].ljust(len(data), b"\0"))
    with pytest.raises(ModelFileError, match="only zeros: an unfinished download"):
        LlamaModel(path)


def test_a_file_is_read_once_until_it_changes(model: Path, folder: Path, read: list[Path]) -> None:
    for _ in range(2):
        file_check.check_file(model)
        file_check.check_file(model)
        assert read == [model]
        file_check.remember_checks(folder)  # as the next process does
    with_a_token_twice(model)
    with pytest.raises(ModelFileError, match="are both"):
        file_check.check_file(model)
    assert read == [model, model]


def test_a_part_of_a_model_is_read_again_if_it_changes(tmp_path: Path, folder: Path) -> None:
    first, second = (tmp_path / f"model-0000{number}-of-00002.gguf" for number in (1, 2))
    for part in (first, second):
        write_tiny_model(part, TinyConfig())
    file_check.check_file(first)
    second.write_bytes(second.read_bytes()[:-1000])
    with pytest.raises(ModelFileError, match="model-00002.*: an unfinished download"):
        file_check.check_file(first)


def test_a_file_that_is_deleted_after_its_check_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_tiny_model(tmp_path / "model.gguf", TinyConfig())

    def deleted_after_check(path: Path) -> None:
        file_check.check_file(path)
        path.unlink()

    monkeypatch.setattr(model_module, "check_file", deleted_after_check)
    with pytest.raises(ModelFileError, match=r"model\.gguf: no such file"):
        LlamaModel(file)


def test_a_model_whose_file_is_deleted_still_opens_contexts(tmp_path: Path) -> None:
    file = write_tiny_model(tmp_path / "model.gguf", TinyConfig())
    with contextlib.closing(LlamaModel(file)) as model:
        file.unlink()
        assert model.limited_n_ctx(64) == 64
        options = ContextOptions(n_threads=1)
        backend = LlamaBackend(model, options, n_ctx=64, clock=time.perf_counter, n_outputs=4)
        with contextlib.closing(backend):
            assert rows.decoded(backend, (5, 6, 7)).shape[0] == 3
