"""Prompts for texts with a gap: the parts in the order and with the marks that each model knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.backend.llama import LlamaModel
from specgen.engine.infill import ContextFile, Gap, InfillTokens, _lengths, infill_prompt
from specgen.errors import UsageError
from specgen.testing.tiny import TinyConfig, write_tiny_model
from specgen.testing.tiny.config import INFILL_TOKENS, TokenizerKind

GAP = Gap("the cat is ", " on the mat", name="a.txt")
MORE = (ContextFile("b.txt", "a dog"), ContextFile("c.txt", "a house"))
#: The entries of prefix, suffix and middle.
FAMILIES = {
    "qwen": INFILL_TOKENS[:3],
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "codellama": ("▁<PRE>", "▁<SUF>", "▁<MID>"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("infill")


def model_of(folder: Path, name: str, config: TinyConfig) -> LlamaModel:
    path = folder / f"{name}.gguf"
    if not path.exists():
        write_tiny_model(path, config)
    return LlamaModel(path)


@pytest.fixture
def qwen(folder: Path) -> Iterator[LlamaModel]:
    model = model_of(folder, "all", TinyConfig(control_tokens=INFILL_TOKENS, add_bos=False))
    yield model
    model.close()


def written(model: LlamaModel, gap: Gap, n_room: int = 1000) -> str:
    return infill_prompt(model, None, gap, n_room).prompt.text


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_have_the_marks_of_each_family(folder: Path, family: str) -> None:
    pre, suf, mid = FAMILIES[family]
    kind: TokenizerKind = "spm" if family == "codellama" else "bpe"
    config = TinyConfig(tokenizer=kind, control_tokens=(pre, suf, mid), add_bos=False)
    model = model_of(folder, family, config)
    try:
        vocabulary = model.vocabulary
        tokens = InfillTokens.of(vocabulary)
        assert tokens is not None
        plain = [
            vocabulary.tokenize(text, add_special=False, parse_special=False)
            for text in (GAP.prefix, GAP.suffix)
        ]
        entries = [vocabulary.token_text(t) for t in (tokens.prefix, tokens.suffix, tokens.middle)]
        assert entries == [pre, suf, mid]
        found = infill_prompt(model, None, GAP, 1000)
        assert found.prompt.tokens == (
            tokens.prefix,
            *plain[0],
            tokens.suffix,
            *plain[1],
            tokens.middle,
        )
        assert not found.left_out
    finally:
        model.close()


def test_codestral_has_the_suffix_first_and_no_mark_for_the_middle(folder: Path) -> None:
    config = TinyConfig(tokenizer="spm", add_bos=True)
    # Its control tokens come first in a vocabulary.
    model = model_of(folder, "codestral", config)
    try:
        assert InfillTokens.of(model.vocabulary) is None
        tokens = InfillTokens(prefix=300, suffix=301)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(InfillTokens, "of", staticmethod(lambda _vocabulary: tokens))
            found = infill_prompt(model, None, GAP, 1000).prompt.tokens
        vocabulary = model.vocabulary
        prefix, suffix = (
            vocabulary.tokenize(text, add_special=False, parse_special=False)
            for text in (GAP.prefix, GAP.suffix)
        )
        bos = vocabulary.special_tokens()["bos"]
        assert found == (bos, 301, *suffix, 300, *prefix)
    finally:
        model.close()


def test_codestral_s_tokens_are_found_by_their_entries(folder: Path) -> None:
    model = model_of(folder, "entries", TinyConfig(tokenizer="spm"))
    entries = {5: "[PREFIX]", 7: "[SUFFIX]"}
    try:
        with pytest.MonkeyPatch.context() as patch:
            real = type(model.vocabulary).token_text
            patch.setattr(
                type(model.vocabulary),
                "token_text",
                lambda self, token: entries.get(token) or real(self, token),
            )
            assert InfillTokens.of(model.vocabulary) == InfillTokens(prefix=5, suffix=7)
    finally:
        model.close()


def test_a_model_that_knows_no_gaps_is_refused(folder: Path) -> None:
    model = model_of(folder, "plain", TinyConfig())
    try:
        with pytest.raises(UsageError, match=r"plain\.gguf has no tokens for fill-in-the-middle"):
            written(model, GAP)
    finally:
        model.close()


def test_files_of_a_repository_come_before(qwen: LlamaModel) -> None:
    gap = Gap(GAP.prefix, GAP.suffix, "a.txt", MORE, "zoo")
    own = "<|fim_prefix|>the cat is <|fim_suffix|> on the mat<|fim_middle|>"
    assert written(qwen, gap) == (
        "<|repo_name|>zoo\n<|file_sep|>b.txt\na dog<|file_sep|>c.txt\na house"
        f"<|file_sep|>a.txt\n{own}"
    )
    assert written(qwen, GAP) == own


def test_files_are_plain_text_where_there_are_no_marks_for_them(folder: Path) -> None:
    model = model_of(folder, "qwen3", TinyConfig(control_tokens=INFILL_TOKENS[:3], add_bos=False))
    try:
        own = "<|fim_prefix|>the cat is <|fim_suffix|> on the mat<|fim_middle|>"
        gap = Gap(GAP.prefix, GAP.suffix, "a.txt", MORE)
        assert written(model, gap) == f"\n\na dog\n\na house\n\n{own}"
    finally:
        model.close()


def test_names_of_control_tokens_in_a_text_are_text(qwen: LlamaModel) -> None:
    gap = Gap("a <|fim_suffix|> b", "<|fim_middle|>")
    found = infill_prompt(qwen, None, gap, 1000).prompt.tokens
    tokens = InfillTokens.of(qwen.vocabulary)
    assert tokens is not None
    for token in (tokens.prefix, tokens.suffix, tokens.middle):
        assert found.count(token) == 1


@pytest.mark.parametrize("n_room", [3, 4, 9, 20, 60, 200])
def test_there_are_no_more_tokens_than_there_is_room_for(qwen: LlamaModel, n_room: int) -> None:
    whole = Gap("the cat is in the house " * 9, " on the mat" * 9, "a.txt", MORE, "zoo")
    found = infill_prompt(qwen, None, whole, n_room)
    assert len(found.prompt.tokens) <= n_room
    short = infill_prompt(qwen, None, Gap(whole.prefix, whole.suffix), n_room)
    assert len(short.prompt.tokens) <= n_room
    assert bool(short.left_out) == (n_room < 200)
    before, _, behind = short.prompt.text.partition("<|fim_suffix|>")
    assert whole.prefix.endswith(before.removeprefix("<|fim_prefix|>"))
    assert whole.suffix.startswith(behind.removesuffix("<|fim_middle|>"))


def test_the_first_files_are_left_out_first(qwen: LlamaModel) -> None:
    gap = Gap(GAP.prefix, GAP.suffix, "a.txt", MORE, "zoo")
    n_all = len(infill_prompt(qwen, None, gap, 1000).prompt.tokens)
    found = infill_prompt(qwen, None, gap, n_all - 1)
    assert found.left_out == ("b.txt",)
    assert "a house" in found.prompt.text
    assert "a dog" not in found.prompt.text
    rooms = range(n_all, 30, -1)
    found_out = [infill_prompt(qwen, None, gap, n_room).left_out for n_room in rooms]
    in_turn = list(dict.fromkeys(found_out))
    assert in_turn[:3] == [(), ("b.txt",), ("b.txt", "c.txt")]


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_the_room_is_used(n_prefix: int, n_suffix: int, n_room: int) -> None:
    one, other = _lengths(n_prefix, n_suffix, n_room)
    assert 0 <= one <= n_prefix
    assert 0 <= other <= n_suffix
    assert one + other == min(n_room, n_prefix + n_suffix)
    # Neither is cut below its share while the other has more than its own.
    assert one == n_prefix or one >= int(0.75 * n_room)
    assert other == n_suffix or other >= n_room - max(int(0.75 * n_room), 0) or one <= 0.75 * n_room


def test_a_draft_with_another_vocabulary_sees_the_gap_in_its_own_way(
    qwen: LlamaModel, folder: Path
) -> None:
    plain = model_of(folder, "draft", TinyConfig(tokenizer="spm", add_bos=True))
    coder = model_of(folder, "coder", TinyConfig(tokenizer="spm", control_tokens=INFILL_TOKENS))
    try:
        found = infill_prompt(qwen, plain, GAP, 1000).prompt.draft_tokens
        assert found is not None
        text = b"".join(map(plain.vocabulary.token_bytes, found)).decode()
        # SentencePiece writes a space before each part.
        assert text == "  on the mat the cat is "
        assert found[0] == plain.vocabulary.special_tokens()["bos"]
        found = infill_prompt(qwen, coder, GAP, 1000).prompt.draft_tokens
        assert found is not None
        shown = "".join(map(coder.vocabulary.control_text, found))
        assert shown.count("<|fim_middle|>") == 1
    finally:
        plain.close()
        coder.close()
