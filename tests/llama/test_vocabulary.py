"""Texts and tokens on which llama.cpp would abort the process, or tokenize wrongly."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from specgen.errors import PromptError, UsageError
from specgen.llama.vocabulary import MAX_RUN, LlamaVocabulary
from tests.helpers.tiny import vocabulary_of

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
    with pytest.raises(UsageError, match=rf"{MAX_RUN + 1} characters: at most {MAX_RUN} can be"):
        vocabulary.tokenize("x" * (MAX_RUN + 1), add_special=False, parse_special=False)


@pytest.mark.parametrize("token", [-1, -(2**31), 2**31, 2**32, 2**64, None])
def test_an_invalid_token_is_rejected(vocabulary: LlamaVocabulary, token: int | None) -> None:
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
            vocabulary.min_token_count(text)


def test_a_long_text_of_short_words_is_read_here(vocabulary: LlamaVocabulary) -> None:
    text = "Once upon a time, 12 of them.\n" * 50_000
    assert read_back(vocabulary, text) == text
