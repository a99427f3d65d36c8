"""Prompts for texts with a gap: the parts in the order and with the marks that each model knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.drafters.ngram import SuffixDrafter
from specgen.llama import LlamaModel
from specgen.method.drafter import draft_alone
from specgen.method.policy import draft_up_to
from specgen.session.prompts.infill import (
    ContextFile,
    Gap,
    InfillTokens,
    around_gap,
    infill_prompt,
)
from tests.tiny import TinyConfig, write_tiny_model
from tests.tiny.config import INFILL_TOKENS, TokenizerKind

GAP = Gap("the cat is ", " on the mat", name="a.txt")
MORE = (ContextFile("b.txt", "a dog"), ContextFile("c.txt", "a house"))
#: The marks of prefix, suffix and middle, and others that end a middle.
FAMILIES = {
    "qwen": INFILL_TOKENS,
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "codellama": ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
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
    return infill_prompt(model, None, gap, n_room)[0].text


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_have_the_marks_of_each_family(folder: Path, family: str) -> None:
    pre, suf, mid = FAMILIES[family][:3]
    kind: TokenizerKind = "spm" if family == "codellama" else "bpe"
    config = TinyConfig(
        tokenizer=kind, control_tokens=FAMILIES[family], add_bos=family == "codellama"
    )
    model = model_of(folder, family, config)
    try:
        # SentencePiece puts a space before the prefix, and CodeLlama wants none before the suffix.
        begin, space = ("<s>", " ") if kind == "spm" else ("", "")
        found = infill_prompt(model, None, GAP, 1000)
        assert found[0].text == f"{begin}{pre}{space}the cat is {suf} on the mat{mid}"
        assert not found[1]
        for mark in (pre, suf, mid):
            token = model.vocabulary.control_token(mark)
            assert found[0].tokens.count(token) == 1
        # Every mark ends a middle.
        ends = set(map(model.vocabulary.control_token, FAMILIES[family]))
        assert found[0].ends == ends
    finally:
        model.close()


@pytest.mark.parametrize("is_named", [False, True])
def test_codestral_has_the_suffix_first_and_no_mark_for_the_middle(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, is_named: bool
) -> None:
    """Also where the file names its tokens, and one for the middle, which llama.cpp then knows."""
    marks = ("[PREFIX]", "[SUFFIX]", "[MIDDLE]")
    model = model_of(folder, "codestral", TinyConfig(tokenizer="spm", control_tokens=marks))
    vocabulary = model.vocabulary
    if is_named:
        roles = dict(zip(("prefix", "suffix", "middle"), marks, strict=True))
        named = {role: vocabulary.control_token(mark) for role, mark in roles.items()}
        known = {**vocabulary.infill_tokens(), **named}
        monkeypatch.setattr(type(vocabulary), "infill_tokens", lambda _self: known)
    try:
        assert written(model, GAP) == "<s>[SUFFIX] on the mat[PREFIX] the cat is "
        gap = Gap(GAP.prefix, GAP.suffix, "a.txt", MORE)
        assert written(model, gap) == (
            "<s>[SUFFIX] on the mat[PREFIX]a dog\n\na house\n\nthe cat is "
        )
    finally:
        model.close()


def test_starcoder2_has_the_names_of_files_in_their_place(folder: Path) -> None:
    marks = (*FAMILIES["starcoder"], "<repo_name>", "<file_sep>")
    model = model_of(folder, "starcoder2", TinyConfig(control_tokens=marks, add_bos=False))
    try:
        own = "the cat is <fim_suffix> on the mat<fim_middle>"
        assert written(model, GAP) == f"<fim_prefix>{own}"
        gap = Gap(GAP.prefix, GAP.suffix, "a.txt", MORE, "zoo")
        assert written(model, gap) == (
            "<repo_name>zoo<file_sep>b.txt\na dog<file_sep>c.txt\na house"
            f"<file_sep><fim_prefix>a.txt\n{own}"
        )
        # llama.cpp does not know that a file ends there.
        end = model.vocabulary.control_token("<file_sep>")
        assert not model.vocabulary.is_end(end)
        assert end in infill_prompt(model, None, GAP, 1000)[0].ends
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
def test_there_are_no_more_tokens_than_there_is_room_for(qwen: LlamaModel, n_room: int) -> None:
    whole = Gap("the cat is in the house " * 9, " on the mat" * 9, "a.txt", MORE, "zoo")
    found = infill_prompt(qwen, None, whole, n_room)
    assert len(found[0].tokens) <= n_room
    short = infill_prompt(qwen, None, Gap(whole.prefix, whole.suffix), n_room)
    assert len(short[0].tokens) <= n_room
    assert bool(short[1]) == (n_room < 200)
    before, _, behind = short[0].text.partition("<|fim_suffix|>")
    assert whole.prefix.endswith(before.removeprefix("<|fim_prefix|>"))
    assert whole.suffix.startswith(behind.removesuffix("<|fim_middle|>"))


def test_the_first_files_are_left_out_first(qwen: LlamaModel) -> None:
    gap = Gap(GAP.prefix, GAP.suffix, "a.txt", MORE, "zoo")
    n_all = len(infill_prompt(qwen, None, gap, 1000)[0].tokens)
    found = infill_prompt(qwen, None, gap, n_all - 1)
    assert found[1] == ["b.txt"]
    assert "a house" in found[0].text
    assert "a dog" not in found[0].text


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_the_room_is_used(n_prefix: int, n_suffix: int, n_room: int) -> None:
    prefix, suffix, left_out = around_gap([1] * n_prefix, [2] * n_suffix, n_room)
    one, other = len(prefix), len(suffix)
    assert bool(left_out) == (n_prefix + n_suffix > n_room)
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


@pytest.mark.parametrize("where", ["prefix", "suffix", "context"])
def test_what_stands_around_a_gap_drafts(qwen: LlamaModel, where: str) -> None:
    text = "return the cat in the house"
    gap = Gap(
        f"a\n{text}\nb" if where == "prefix" else "a",
        f"c\n{text}\n" if where == "suffix" else "c",
        context=(ContextFile("b.txt", text if where == "context" else "d"),),
    )
    tokenize = qwen.vocabulary.tokenize_inside
    begun, rest = tokenize("return the cat"), tokenize(" in the house")
    tokens = [*infill_prompt(qwen, None, gap, 1000)[0].tokens, *begun]
    draft = draft_alone(SuffixDrafter(2, 32).propose(tokens, draft_up_to(len(rest))))
    assert list(draft.tokens) == rest
