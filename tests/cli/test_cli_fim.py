"""`specgen fim`: places in files, the middle on standard output, and editing in place."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.cli import fim as fim_module
from specgen.cli import output
from specgen.method.cost_table import CostTable
from specgen.session import calibration
from tests.helpers.cli import Result, Specgen, complaint, ended, events_of, models_of
from tests.helpers.sessions import folder_with
from tests.tiny import TinyConfig
from tests.tiny.config import INFILL_TOKENS

pytestmark = pytest.mark.slow

Fim = Callable[..., Result]

TEXT = "the cat is\n  in the house\n\na dog is on the mat\n"


TARGET = TinyConfig(
    logit_scale=6.0, control_tokens=INFILL_TOKENS, add_bos=False, unprintable_scale=0.0
)
#: Says control tokens as gladly as others.
MARKS = replace(TARGET, control_scale=1.0)
models = folder_with(
    target=TARGET,
    draft=TARGET.draft(0.02),
    marks=MARKS,
    other=TinyConfig(tokenizer="spm", logit_scale=6.0),
    **{"marks-draft": MARKS.draft(0.02), "plain": TinyConfig(logit_scale=6.0)},
)


@pytest.fixture
def fim(specgen: Specgen, monkeypatch: pytest.MonkeyPatch, models: Path, tmp_path: Path) -> Fim:
    """Runs `specgen fim` in a temporary folder."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str, **names: str) -> Result:
        return specgen("fim", *models_of(models, **names), "-n", "12", "--no-stats", *arguments)

    return command


def write(name: str, text: str = TEXT) -> None:
    Path(name).write_bytes(text.encode())


def prompt_of(result: Result) -> str:
    event = events_of(result)[0]
    text: str = event["text"]
    return text


def between(prefix: str, suffix: str) -> str:
    return f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>"


@pytest.mark.parametrize(
    ("place", "prefix"),
    [
        ("a.txt:1", "the cat is"),
        ("a.txt:1:5", "the "),
        ("a.txt:3", "the cat is\n  in the house\n"),
        ("a.txt:4:20", "the cat is\n  in the house\n\na dog is on the mat"),
        ("a.txt:5", TEXT),
        ("b:3:c.txt:1", "the cat is"),
    ],
)
def test_a_place_in_a_file_splits_it_into_prefix_and_suffix(
    fim: Fim, place: str, prefix: str
) -> None:
    for name in ("a.txt", "b:3:c.txt"):
        write(name)
    assert prompt_of(fim(place, "--json")) == between(prefix, TEXT[len(prefix) :])


@pytest.mark.parametrize("draft", ["draft", "other", "ngram"])
def test_the_middle_is_alone_on_standard_output_and_the_same_with_any_draft(
    fim: Fim, draft: str
) -> None:
    write("a.txt")
    plain = fim("a.txt:2", draft="none")
    assert plain.code == 0
    assert plain.out
    assert "<|" not in plain.out
    found = fim("a.txt:2", draft=draft)
    assert (found.code, found.out) == (0, plain.out)
    assert Path("a.txt").read_text(encoding="utf-8") == TEXT


def test_a_middle_ends_at_a_mark_that_is_not_an_end_of_text(fim: Fim) -> None:
    write("a.txt")
    places = [f"a.txt:4:{column}" for column in range(1, 20)]

    def ends(draft: str, *options: str) -> list[tuple[str, str]]:
        found = [
            events_of(fim(place, "--json", *options, target="marks", draft=draft))[-1]
            for place in places
        ]
        return [(event["text"], event["stopped_by"]) for event in found]

    plain = ends("none")
    assert {"<|fim_middle|>", "<|fim_pad|>"} <= {stopped_by for _, stopped_by in plain}
    fixed = ("--policy", "fixed", "--draft-max", "4", "--draft-p-min", "0")
    assert ends("marks-draft", *fixed) == plain
    assert ends("ngram", *fixed) == plain
    assert {stopped_by for _, stopped_by in ends("none", "--ignore-eos")} == {None}


def test_texts_from_files_and_from_standard_input(
    fim: Fim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write("before.txt", "the cat ")
    write("after.txt", " the mat")
    before, after = ("--prefix-file", "before.txt", "--json"), ("--suffix-file", "after.txt")
    assert prompt_of(fim(*before, *after)) == between("the cat ", " the mat")
    assert prompt_of(fim(*before)) == between("the cat ", "")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a dog ")))
    piped = fim("--prefix-file", "-", *after, "--json")
    assert prompt_of(piped) == between("a dog ", " the mat")
    found = prompt_of(fim(*before, "--context-file", "after.txt"))
    assert found == (
        f"<|repo_name|>{tmp_path.name}\n<|file_sep|>after.txt\n the mat<|file_sep|>before.txt\n"
        + between("the cat ", "")
    )


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("bom", "codec"), [("", "utf-8"), ("\ufeff", "utf-8"), ("\ufeff", "utf-16-le")]
)
def test_a_file_is_edited_in_place(fim: Fim, newline: str, bom: str, codec: str) -> None:
    text = bom + TEXT.replace("\n", newline)
    Path("a.txt").write_bytes(text.encode(codec))
    Path("a.txt").chmod(0o640)
    if os.name != "nt":
        Path("link.txt").symlink_to("a.txt")
    seen = prompt_of(fim("a.txt:2:5", "--json"))  # the model sees one kind of line end
    assert seen == between(TEXT[:15], TEXT[15:])
    found = fim("a.txt:2:5" if os.name == "nt" else "link.txt:2:5", "--in-place")
    assert found.code == 0
    head = text.index("in the house") + 2
    middle = found.out.replace("\n", newline)
    assert Path("a.txt").read_bytes() == (text[:head] + middle + text[head:]).encode(codec)
    if os.name != "nt":
        assert stat.S_IMODE(Path("a.txt").stat().st_mode) == 0o640
        assert Path("link.txt").is_symlink()
        Path("link.txt").unlink()
    assert sorted(path.name for path in Path().iterdir()) == ["a.txt"]


def test_a_file_that_changed_meanwhile_is_left_alone(
    fim: Fim, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(*arguments: Any) -> object:
        code = output.show_answer(*arguments)
        write("a.txt", "changed")
        return code

    monkeypatch.setattr(fim_module, "show_answer", change)
    write("a.txt")
    found = fim("a.txt:1", "--in-place")
    assert found.code == 10
    assert "changed in the meantime" in found.err
    assert found.out
    assert Path("a.txt").read_text(encoding="utf-8") == "changed"


def test_a_long_text_is_shortened_to_a_few_seconds_of_prefill(
    fim: Fim, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = CostTable({100: 1.0})
    monkeypatch.setattr(calibration, "target_costs", lambda *_: costs)
    write("a.txt", TEXT * 40)
    found = fim("a.txt:80", "--json")
    assert events_of(found)[0]["n_prompt_tokens"] == 256
    assert "prefills 256 tokens in about 5 s (-c 4096 allows more); left out: " in found.err
    whole = fim("a.txt:80", "--json", "-c", "4096")
    assert events_of(whole)[0]["n_prompt_tokens"] > 256
    assert "left out" not in whole.err


def test_text_that_does_not_fit_the_context_is_left_out(fim: Fim) -> None:
    write("a.txt", TEXT * 30)
    write("b.txt", "a house")
    found = fim("a.txt:60", "-c", "200", "--context-file", "b.txt")
    assert found.code == 0
    (note,) = found.err.splitlines()
    assert note.startswith(
        "note: the context has room for 188 tokens of text (raise -c); left out: the "
    )
    assert note.endswith("tokens after the gap, b.txt")
    assert fim("a.txt:60", "-c", "200", "-q").err == ""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("a.txt",), 2, "'a.txt' is not a place in a file"),
        (("a.txt:" + "9" * 20,), 2, "is not a place"),
        (("a.txt:6",), 3, "a.txt has no line 6: it has 5"),
        (("empty.txt:2",), 3, "empty.txt has no line 2: it has 1 line\n"),
        (("a.txt:1:12",), 3, "line 1 has no column 12: it has 10 characters"),
        (("missing.txt:1",), 3, "missing.txt: cannot be read"),
        (("latin.txt:1",), 3, "latin.txt is not UTF-8: byte 0xe9 on line 2"),
        (("a.txt:1", "--prefix-file", "a.txt"), 2, "cannot be used together"),
        ((), 2, "no gap"),
        (("--prefix-file", "a.txt", "--in-place"), 2, "--in-place needs FILE:LINE"),
        (("--prefix-file", "-", "--suffix-file", "-"), 2, "cannot both be standard input"),
        (("--prefix-file", "empty.txt"), 3, "no text before or after the gap"),
        (("a.txt:1", "-n", "90", "-c", "100"), 2, "--max-tokens 90 leaves 10 of 100 tokens"),
        (("a.txt:1", "--logprobs", "2"), 2, "--logprobs needs --json"),
    ],
    ids=str,
)
def test_bad_input_is_refused(fim: Fim, arguments: tuple[str, ...], code: int, words: str) -> None:
    write("a.txt")
    write("empty.txt", "")
    Path("latin.txt").write_bytes("gut\ncaf\xe9\n".encode("latin-1"))
    assert words in complaint(fim(*arguments), code)


def test_a_model_not_trained_for_gaps_is_refused_before_a_draft_is_chosen(
    models: Path, specgen: Specgen, tmp_path: Path
) -> None:
    (tmp_path / "x").write_text(TEXT)
    result = specgen("fim", f"{tmp_path / 'x'}:1", "-m", str(models / "plain.gguf"))
    # A note on the chosen draft would be a second line.
    assert "plain.gguf has no tokens" in complaint(result, 2)


def test_the_summary_is_never_on_the_line_of_the_answer(models: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(TEXT)
    command = ("fim", f"{tmp_path / 'x'}:1", "-n", "4", "-m", models / "target.gguf", "-md", "none")
    both, alone = (
        ended(*command, stderr=errors).stdout for errors in (subprocess.STDOUT, subprocess.PIPE)
    )
    assert not alone.endswith("\n")
    assert both.startswith(f"{alone}\n4 tokens")
