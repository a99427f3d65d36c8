"""What is wrong with a model's file is said once it is named; what was right is not read again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specgen.errors import ModelFileError
from specgen.llama import LlamaModel, gguf_file
from specgen.llama.gguf_file import FILE_NAME
from tests.helpers.tiny import with_a_token_twice
from tests.tiny import TinyConfig, write_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where checks of this test are remembered."""
    gguf_file.remember_checks(tmp_path / "cache")
    yield tmp_path / "cache"
    gguf_file.remember_checks(None)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose metadata is read."""
    found: list[Path] = []
    check = gguf_file.check_metadata

    def counted(path: Path) -> None:
        found.append(path)
        check(path)

    monkeypatch.setattr(gguf_file, "check_metadata", counted)
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model.gguf", TinyConfig())


def test_a_token_that_is_there_twice_is_refused(tmp_path: Path, folder: Path) -> None:
    """llama.cpp asserts that none is."""
    path = with_a_token_twice(tmp_path / "twice.gguf")
    for _ in range(2):  # nothing wrong is remembered as right
        with pytest.raises(ModelFileError, match=r"tokens \d+ and \d+ are both 'Ġthe'"):
            gguf_file.check_file(path)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("metadata", "wrong"),
    [
        ({"llama.block_count": 0}, "llama.block_count is 0"),
        ({"llama.block_count": 513}, "llama.block_count is 513"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "epsilon is -1"),
        ({"llama.rope.freq_base": float("inf")}, "freq_base is inf"),
    ],
)
def test_metadata_that_llama_cpp_does_not_survive_are_refused(
    tmp_path: Path, metadata: dict[str, int | float | str], wrong: str
) -> None:
    path = write_tiny_model(tmp_path / "wrong.gguf", TinyConfig(), metadata=metadata)
    with pytest.raises(ModelFileError, match=wrong):
        LlamaModel(path)


def test_a_model_that_rotates_no_dimension_would_never_finish_its_first_batch(
    tmp_path: Path,
) -> None:
    metadata: dict[str, int | float | str] = {"lfm2.rope.dimension_count": 0}
    path = write_tiny_model(tmp_path / "lfm2.gguf", TinyConfig("lfm2"), metadata=metadata)
    with pytest.raises(ModelFileError, match=r"lfm2\.rope\.dimension_count is 0"):
        LlamaModel(path)


def test_a_model_may_rotate_nothing(tmp_path: Path) -> None:
    metadata: dict[str, int | float | str] = {"jamba.rope.dimension_count": 0}
    path = write_tiny_model(tmp_path / "jamba.gguf", TinyConfig("jamba"), metadata=metadata)
    LlamaModel(path).close()


@pytest.mark.parametrize(
    "metadata",
    [
        # Keys for parts and architectures that this model is not.
        {"llama.posnet.block_count": 0, "llama.convnext.block_count": 0},
        {"bert.block_count": 0, "bert.attention.layer_norm_epsilon": -1.0},
        # llama.cpp's LLAMA_POOLING_TYPE_UNSPECIFIED, and none.
        {"llama.pooling_type": 0xFFFFFFFF},
        {"llama.pooling_type": 0},
    ],
)
def test_metadata_that_look_wrong_and_are_right_are_taken(
    tmp_path: Path, metadata: dict[str, int | float | str]
) -> None:
    path = write_tiny_model(tmp_path / "right.gguf", TinyConfig(), metadata=metadata)
    LlamaModel(path).close()


@pytest.mark.parametrize(
    ("kind", "said", "hint"),
    [("adapter", "a LoRA adapter", "merge"), ("mmproj", "images or sound", "belongs to")],
)
def test_a_file_that_is_a_part_of_a_model_is_called_that(
    tmp_path: Path, kind: str, said: str, hint: str
) -> None:
    path = write_tiny_model(tmp_path / "part.gguf", TinyConfig(), metadata={"general.type": kind})
    with pytest.raises(ModelFileError, match=said) as caught:
        LlamaModel(path)
    assert hint in (caught.value.hint or "")


def test_a_file_is_read_once_until_it_changes(model: Path, folder: Path, read: list[Path]) -> None:
    for _ in range(2):
        gguf_file.check_file(model)
        gguf_file.check_file(model)
        assert read == [model]
        gguf_file.remember_checks(folder)  # as the next process does
    with_a_token_twice(model)
    with pytest.raises(ModelFileError, match="are both"):
        gguf_file.check_file(model)
    assert read == [model, model]


@pytest.mark.parametrize(
    "damaged",
    [b"", b"\xff\x00", b"[" * 100_000, b"[]", b'{"results": 1}', b'{"results": [null, {}, "a"]}'],
)
def test_a_damaged_list_is_made_anew(
    model: Path, folder: Path, read: list[Path], damaged: bytes
) -> None:
    folder.mkdir()
    (folder / FILE_NAME).write_bytes(damaged)
    gguf_file.check_file(model)
    gguf_file.check_file(model)
    assert read == [model]
