"""Files, texts and tokens that llama.cpp would end the process over, or read wrongly."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from specgen.errors import ModelFileError, PromptError, UsageError
from specgen.llama import LlamaModel, file_check
from specgen.llama.vocabulary import LONGEST_RUN, LlamaVocabulary
from tests.helpers.tiny import vocabulary_of, with_a_token_twice
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


def test_a_token_that_is_there_twice_is_refused(tmp_path: Path, folder: Path) -> None:
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
        file_check.check_file(model)
        file_check.check_file(model)
        assert read == [model]
        file_check.remember_checks(folder)  # as the next process does
    with_a_token_twice(model)
    with pytest.raises(ModelFileError, match="are both"):
        file_check.check_file(model)
    assert read == [model, model]


# --- texts and tokens

#: Names of rules that llama.cpp reads as regular expressions; in qwen2's it has its own code.
_RULES = (
    "bloom",
    "exaone-moe",
    "deepseek-llm",
    "deepseek-v3",
    "falcon",
    "gpt-4o",
    "tekken",
    "qwen2",
)
_UNITS = (*"Zz7- \né一😀\u00a0", "aB", "a1", "-\n", "a-", " a", " \n")


@pytest.fixture(scope="module", params=_RULES)
def vocabulary(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaVocabulary]:
    with vocabulary_of(tmp_path_factory.mktemp("model"), pre_tokenizer=request.param) as found:
        yield found


def read_back(vocabulary: LlamaVocabulary, text: str) -> str:
    tokens = vocabulary.tokenize(text, add_special=False, parse_special=False)
    return b"".join(map(vocabulary.token_bytes, tokens)).decode()


@pytest.mark.parametrize("unit", _UNITS, ids=ascii)
def test_a_long_run_of_characters_is_read(vocabulary: LlamaVocabulary, unit: str) -> None:
    text = "Once " + unit * (50_000 // len(unit)) + " upon"
    size = threading.stack_size()
    assert read_back(vocabulary, text) == text
    assert threading.stack_size() == size


def test_a_longer_run_is_refused(vocabulary: LlamaVocabulary) -> None:
    with pytest.raises(
        UsageError, match=rf"{LONGEST_RUN + 1} characters: at most {LONGEST_RUN} can be"
    ):
        vocabulary.tokenize("x" * (LONGEST_RUN + 1), add_special=False, parse_special=False)


@pytest.mark.parametrize("token", [-1, -(2**31), 2**31, 2**32, 2**64, None])
def test_a_token_that_is_none_is_refused(vocabulary: LlamaVocabulary, token: int | None) -> None:
    token = vocabulary.n_tokens if token is None else token
    asked = (
        vocabulary.token_bytes,
        vocabulary.token_text,
        vocabulary.token_attributes,
        vocabulary.is_control,
        lambda token: vocabulary.check([0, token]),
    )
    for ask in asked:
        with pytest.raises(PromptError, match=f"there is no token {token}:"):
            ask(token)
    assert not vocabulary.is_end(-1)


def test_half_a_surrogate_pair_is_refused(vocabulary: LlamaVocabulary) -> None:
    for text in ("\ud800", "a \udfff" * 1000):
        with pytest.raises(PromptError, match="half a surrogate pair"):
            vocabulary.tokenize(text, add_special=False, parse_special=False)
        with pytest.raises(PromptError, match="half a surrogate pair"):
            vocabulary.fewest_tokens(text)


def test_a_long_text_of_short_words_is_read_here(vocabulary: LlamaVocabulary) -> None:
    text = "Once upon a time, 12 of them.\n" * 50_000
    assert read_back(vocabulary, text) == text
