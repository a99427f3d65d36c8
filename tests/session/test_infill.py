"""Prompts for fill-in-the-middle: the parts in each model's order, with its control tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specgen.llama import LlamaModel
from specgen.session.prompts.infill import ContextFile, Gap, InfillTokens, infill_prompt
from tests.tiny import TinyConfig, write_tiny_model
from tests.tiny.config import INFILL_TOKENS, TokenizerKind

GAP = Gap("the cat is ", " on the mat", name="a.txt")
MORE = (ContextFile("b.txt", "a dog"), ContextFile("c.txt", "a house"))
GAP_IN_ZOO = Gap(GAP.prefix, GAP.suffix, "a.txt", MORE, "zoo")
FIM = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")
CODELLAMA = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
CODESTRAL = ("[PREFIX]", "[SUFFIX]", "[MIDDLE]")
FILES = "a dog\n\na house\n\n"
_QWEN = "<|fim_prefix|>the cat is <|fim_suffix|> on the mat<|fim_middle|>"
_QWEN_FILES = "<|repo_name|>zoo\n<|file_sep|>b.txt\na dog<|file_sep|>c.txt\na house"
_FILES_2 = "<file_sep>b.txt\na dog<file_sep>c.txt\na house"
_STARCODER = "the cat is <fim_suffix> on the mat<fim_middle>"
#: For each family its control tokens, and the prompts for `GAP` alone and after `MORE`.
#: SentencePiece puts a space before the prefix; CodeLlama wants none before the suffix.
FAMILIES = {
    "qwen": (
        INFILL_TOKENS,
        _QWEN,
        f"{_QWEN_FILES}<|file_sep|>a.txt\n{_QWEN}",
    ),
    "starcoder": (FIM, f"<fim_prefix>{_STARCODER}", f"<fim_prefix>{FILES}{_STARCODER}"),
    "starcoder2": (
        (*FIM, "<repo_name>", "<file_sep>"),
        f"<fim_prefix>{_STARCODER}",
        f"<repo_name>zoo{_FILES_2}<file_sep><fim_prefix>a.txt\n{_STARCODER}",
    ),
    "deepseek": (
        DEEPSEEK,
        f"{DEEPSEEK[0]}the cat is {DEEPSEEK[1]} on the mat{DEEPSEEK[2]}",
        f"{DEEPSEEK[0]}{FILES}the cat is {DEEPSEEK[1]} on the mat{DEEPSEEK[2]}",
    ),
    "codellama": (
        CODELLAMA,
        "<s>▁<PRE> the cat is ▁<SUF> on the mat▁<MID>",
        f"<s>▁<PRE>{FILES}the cat is ▁<SUF> on the mat▁<MID>",
    ),
    "codestral": (
        CODESTRAL,
        "<s>[SUFFIX] on the mat[PREFIX] the cat is ",
        f"<s>[SUFFIX] on the mat[PREFIX]{FILES}the cat is ",
    ),
}
ON_SPM = ("codellama", "codestral")


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


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_have_the_marks_of_each_family(
    folder: Path, monkeypatch: pytest.MonkeyPatch, family: str, *, is_named: bool
) -> None:
    """Also where the file names the tokens of Codestral, and one for the middle, which llama.cpp
    then knows.
    """
    marks, alone, with_files = FAMILIES[family]
    is_spm = family in ON_SPM
    kind: TokenizerKind = "spm" if is_spm else "bpe"
    model = model_of(
        folder, family, TinyConfig(tokenizer=kind, control_tokens=marks, add_bos=is_spm)
    )
    vocabulary = model.vocabulary
    if is_named and family == "codestral":
        roles = zip(
            ("fim_pre", "fim_suf", "fim_mid"), map(vocabulary.control_token, marks), strict=True
        )
        known = {**vocabulary.infill_tokens(), **dict(roles)}
        monkeypatch.setattr(type(vocabulary), "infill_tokens", lambda _self: known)
    try:
        found, left_out = infill_prompt(model, None, GAP, 1000)
        assert (found.text, left_out) == (alone, [])
        assert infill_prompt(model, None, GAP_IN_ZOO, 1000)[0].text == with_files
        # Every mark ends a middle, also those that llama.cpp does not know as the end of a text.
        used = set(marks) - {"<repo_name>", "" if is_named else "[MIDDLE]"}
        assert found.ends >= set(map(vocabulary.control_token, used))
    finally:
        model.close()


def test_names_of_control_tokens_in_a_text_are_text(qwen: LlamaModel) -> None:
    gap = Gap("a <|fim_suffix|> b", "<|fim_middle|>")
    found = infill_prompt(qwen, None, gap, 1000)[0].tokens
    tokens = InfillTokens.of(qwen.vocabulary)
    assert tokens is not None
    for token in (tokens.prefix, tokens.suffix, tokens.middle):
        assert found.count(token) == 1


@pytest.mark.parametrize("n_room", [3, 4, 9, 20, 60, 200])
def test_the_prompt_fits_the_context(qwen: LlamaModel, n_room: int) -> None:
    whole = Gap("the cat is in the house " * 9, " on the mat" * 9, "a.txt", MORE, "zoo")
    found = infill_prompt(qwen, None, whole, n_room)
    assert len(found[0].tokens) <= n_room
    short = infill_prompt(qwen, None, Gap(whole.prefix, whole.suffix), n_room)
    assert len(short[0].tokens) <= n_room
    assert bool(short[1]) == (n_room < 200)
    before, _, after = short[0].text.partition("<|fim_suffix|>")
    assert whole.prefix.endswith(before.removeprefix("<|fim_prefix|>"))
    assert whole.suffix.startswith(after.removesuffix("<|fim_middle|>"))


def test_the_first_files_are_left_out_first(qwen: LlamaModel) -> None:
    n_all = len(infill_prompt(qwen, None, GAP_IN_ZOO, 1000)[0].tokens)
    found = infill_prompt(qwen, None, GAP_IN_ZOO, n_all - 1)
    assert found[1] == ["b.txt"]
    assert "a house" in found[0].text
    assert "a dog" not in found[0].text


def test_a_draft_with_another_vocabulary_gets_the_gap_in_its_own_format(
    qwen: LlamaModel, folder: Path
) -> None:
    plain = model_of(folder, "draft", TinyConfig(tokenizer="spm", add_bos=True))
    coder = model_of(folder, "coder", TinyConfig(tokenizer="spm", control_tokens=INFILL_TOKENS))
    try:
        found = infill_prompt(qwen, plain, GAP, 1000)[0].draft_tokens
        assert found is not None
        text = b"".join(map(plain.vocabulary.token_bytes, found)).decode()
        # SentencePiece puts a space before the prefix.
        assert text == " on the mat the cat is "
        assert found[0] == plain.vocabulary.special_tokens()["bos"]
        found = infill_prompt(qwen, coder, GAP, 1000)[0].draft_tokens
        assert found is not None
        shown = "".join(map(coder.vocabulary.control_text, found))
        assert shown.count("<|fim_middle|>") == 1
    finally:
        plain.close()
        coder.close()
