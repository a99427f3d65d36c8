"""`specgen bench` on tiny models. What is quick is not tested here: only what is told."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specgen.measure.bench.plan import entries_of
from specgen.options import ContextOptions, SessionOptions
from specgen.render.tables import bench_lines, print_bench_tables
from specgen.session.memory import Memory, Threads
from tests.helpers.bench import report_of, result
from tests.helpers.cli import Result, Specgen, tiny_names
from tests.tiny import TinyConfig, write_tiny_model

#: Quick, and enough for a test of the command line.
SHORT = ("-t", "1", "-fa", "off", "-n", "20", "-c", "256")
N_COLUMNS = 15


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    records = [
        {"prompt": "def add(a, b): return a + b # and the sum is the sum is", "category": "code"},
        {"prompt": "Once upon a time", "category": "prose"},
        {"turns": ["def sub(a, b): return a - b", "more"], "category": "code"},
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return file


@pytest.fixture
def bench(specgen: Specgen, tiny_models: Path, prompts: Path) -> Specgen:
    """Runs `specgen bench` for the tiny target; files may be given by their tiny names."""

    def run(*arguments: str | Path, prompts: Path | None = prompts) -> Result:
        named = tiny_names(tiny_models, arguments)
        own = [] if "-m" in named else ["-m", tiny_models / "target.gguf"]
        files = [] if prompts is None else ["--prompts", prompts]
        return specgen("bench", *own, *files, *SHORT, *named)

    return run


def notes(outcome: Result) -> list[str]:
    """The lines on standard error, but for those about a busy machine."""
    lines = outcome.err.splitlines()
    return [
        line for line in lines if "machine's speed" not in line and "other programs" not in line
    ]


def rows(outcome: Result) -> list[list[str]]:
    assert outcome.code == 0, outcome.err
    headings, *found = (line.split("\t") for line in outcome.out.splitlines())
    assert headings[:6] == ["target", "temperature", "contender", "category", "answers", "speedup"]
    assert {len(row) for row in found} == {len(headings)}
    return found


# --- what is measured


def test_in_a_pipe_each_contender_is_a_line_for_all_and_one_for_each_category(
    bench: Specgen,
) -> None:
    outcome = bench("--draft", "draft", "--draft", "ngram", "--policy", "fixed")
    # What is measured is said before, with what makes it shorter.
    (note,) = notes(outcome)
    assert re.match(r"note: target\.gguf \(.+\): 3 prompts, each answered with up to ", note)
    assert " tokens by: plain, draft.gguf, ngram. This takes about " in note
    assert "-N 1" in note
    found = rows(outcome)
    assert {len(row) for row in found} == {N_COLUMNS}
    assert [row[:5] for row in found] == [
        ["target.gguf", "0", name, category, number]
        for name in ("plain", "draft.gguf", "ngram")
        for category, number in (("overall", "3"), ("code", "2"), ("prose", "1"))
    ]
    by_name = {row[2]: row for row in found if row[3] == "overall"}
    assert by_name["plain"][5] == "1.00"
    assert by_name["plain"][10] == ""  # nothing was drafted
    assert float(by_name["draft.gguf"][10]) > 0.5
    assert {row[13] for row in by_name.values()} == {"0"}  # no text is another


def test_all_policies_temperatures_and_drafts_are_gone_through(bench: Specgen) -> None:
    outcome = bench(
        "--draft", "draft", "--draft", "ngram", "--policy", "fixed,threshold", "--policy", "cost",
        "--temp", "0", "--temp", "0.8", "-N", "1", "--json", "-",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    document: dict[str, Any] = json.loads(outcome.out)
    names = ["plain"] + [
        f"{draft}, {policy}"
        for draft in ("draft.gguf", "ngram")
        for policy in ("fixed", "threshold", "cost")
    ]
    told = [(each["temperature"], each["contender"]) for each in document["figures"]]
    assert told == [(temperature, name) for temperature in (0.0, 0.8) for name in names]
    assert [(each["temperature"], each["name"]) for each in document["contenders"]] == told
    assert len(document["results"]) == 2 * len(told)
    for each in document["figures"]:
        assert each["n_different"] == (0 if each["temperature"] == 0.0 else None)


def test_json_has_everything_raw(bench: Specgen, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    outcome = bench("--draft", "draft", "--repeat", "2", "--logit-bias", "5-inf", "--json", file)
    assert len(rows(outcome)) == 6
    document: dict[str, Any] = json.loads(
        file.read_text(encoding="utf-8"), parse_constant=pytest.fail
    )
    keys = (
        "specgen date command machine llama_cpp files settings kernels n_rounds is_interrupted others_share "
        "contenders prompts figures failures skipped_prompts results"
    )
    assert " ".join(document) == keys
    assert (document["n_rounds"], document["is_interrupted"]) == (2, False)
    assert list(document["kernels"]) == ["target.gguf"]
    assert f"target.gguf ({document['kernels']['target.gguf']}): " in outcome.err
    assert [each["category"] for each in document["prompts"]] == ["code", "prose", "code"]
    assert len(document["results"]) == 2 * 2 * 3
    first = document["results"][0]
    assert (first["contender"], first["is_plain"], first["round"]) == ("plain", True, 1)
    assert first["outcome"]["n_tokens"] == len(first["outcome"]["token_ids"]) == 20
    texts: dict[int, set[str]] = {}
    for each in document["results"]:
        texts.setdefault(each["prompt"], set()).add(each["outcome"]["text"])
    assert {len(found) for found in texts.values()} == {1}


def test_a_draft_may_have_a_draft_of_its_own(bench: Specgen, tiny_models: Path) -> None:
    draft, bad = tiny_models / "draft.gguf", tiny_models / "bad.gguf"
    arguments = ("--draft", f"{draft}+{bad}", "--draft", f"{draft}+ngram", "--draft", draft)
    document = json.loads(bench(*arguments, "-N", "1", "--json", "-").out)
    names = ["plain", "draft.gguf+bad.gguf", "draft.gguf+ngram", "draft.gguf"]
    assert [each["contender"] for each in document["figures"]] == names
    assert {each["n_different"] for each in document["figures"]} == {0}
    assert set(document["files"]) == {str(tiny_models / "target.gguf"), str(draft), str(bad)}
    for wrong in (f"{draft}+", "ngram+ngram", f"{draft}+none"):
        assert bench("--draft", wrong).code == 2


def test_a_plus_sign_may_be_part_of_a_files_name(
    bench: Specgen, tiny_models: Path, tmp_path: Path
) -> None:
    file = tmp_path / "a+b.gguf"
    file.write_bytes((tiny_models / "draft.gguf").read_bytes())
    document = json.loads(bench("--draft", file, "-N", "1", "--json", "-").out)
    assert [each["contender"] for each in document["figures"]] == ["plain", "a+b.gguf"]


def test_several_targets_have_the_same_drafts(
    bench: Specgen, tiny_models: Path, tmp_path: Path
) -> None:
    other = write_tiny_model(tmp_path / "target.gguf", TinyConfig(logit_scale=5.0))
    outcome = bench(
        "-m", "target", "-m", other, "--draft", "draft", "--draft", "none", "-N", "1",
        "--policy", "fixed",
    )  # fmt: skip
    told = [row[:3] for row in rows(outcome) if row[3] == "overall"]
    assert told == [
        [str(target), "0", name]
        for target in (tiny_models / "target.gguf", other)
        for name in ("plain", "draft.gguf")
    ]


def test_without_a_draft_n_grams_are_measured(bench: Specgen) -> None:
    told = [row[2] for row in rows(bench("-N", "1")) if row[3] == "overall"]
    assert told == ["plain", "ngram"]


def test_without_prompts_our_own_are_taken(bench: Specgen) -> None:
    outcome = bench("--draft", "none", "-N", "1", "-c", "512", "-n", "2", prompts=None)
    assert [row[3] for row in rows(outcome)] == ["overall", "code", "edit", "prose", "chat"]


def test_the_page_is_written(bench: Specgen, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    rows(bench("--draft", "draft", "--html", page))
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    data = text.partition('id="report">')[2].partition("</script>")[0]
    assert [each["contender"] for each in json.loads(data)["figures"]] == ["plain", "draft.gguf"]
    assert "http" not in text.replace(data, ""), "it loads nothing"


# --- what goes wrong


def test_what_cannot_be_is_told_before_anything_is_loaded(bench: Specgen, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    for arguments, message in (
        (("--policy", "fast"), "--policy fast: one of cost, threshold, fixed"),
        (("--policy", ","), "--policy is empty"),
        (("--draft-max", "0"), "--draft-max 0"),
        (("--html", missing / "x.html"), "there is no folder"),
        (("--json", tmp_path), "is a folder"),
        (("--quiet", "--verbose"), "exclude each other"),
    ):
        outcome = bench(*arguments)
        assert (outcome.code, outcome.out) == (2, "")
        assert message in outcome.err
    outcome = bench("--temp", "-1")
    assert outcome.code == 2


def test_prompts_may_be_given_as_texts(bench: Specgen) -> None:
    outcome = bench("--draft", "none", "one prompt", "another", prompts=None)
    assert rows(outcome)[0][4] == "2"
    assert "given twice" in bench("one prompt").err
    assert "a prompt is empty" in bench("a", " ", prompts=None).err


def test_a_prompt_that_is_too_long_is_skipped(bench: Specgen, prompts: Path) -> None:
    with prompts.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"prompt": "too long " * 400}) + "\n")
    outcome = bench("--draft", "draft", "--policy", "fixed")
    assert [row[4] for row in rows(outcome) if row[3] == "overall"] == ["3", "3"]
    _, left_out = notes(outcome)
    assert left_out.startswith("note: prompt 4 was left out: the prompt has ")
    assert bench("--draft", "none", "--quiet").err == ""


def test_an_error_after_results_costs_no_results(
    bench: Specgen, tiny_models: Path, tmp_path: Path
) -> None:
    missing, file = tmp_path / "missing.gguf", tmp_path / "out.json"
    outcome = bench("-m", "target", "-m", missing, "--draft", "none", "--json", file)
    assert outcome.code == 4
    assert [line.split("\t")[0] for line in outcome.out.splitlines()] == [
        "target",
        *["target.gguf"] * 3,
    ]
    assert len(json.loads(file.read_text(encoding="utf-8"))["results"]) == 3
    assert "missing.gguf" in outcome.err


def test_an_interruption_tells_what_there_is(
    bench: Specgen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from specgen.measure.bench.runs import SessionContender

    answer = SessionContender.answer
    n_answers = 0

    def answer_and_stop(self: SessionContender, prompt: str) -> Any:
        nonlocal n_answers
        n_answers += 1
        if n_answers == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return answer(self, prompt)

    monkeypatch.setattr(SessionContender, "answer", answer_and_stop)
    file = tmp_path / "out.json"
    outcome = bench("--draft", "draft", "--policy", "fixed", "--json", file)
    assert outcome.code == 130
    assert notes(outcome)[1:] == ["note: interrupted: not everything was measured"]
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["is_interrupted"] is True
    assert len(document["results"]) == 3
    assert [line.split("\t")[2:5] for line in outcome.out.splitlines()][1:3] == [
        ["plain", "overall", "2"],
        ["plain", "code", "1"],
    ]


# --- parts


@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_tell_each_lineup_at_every_width(width: int) -> None:
    results = [
        each
        for prompt, category in ((1, "[b]code[/b]"), (2, "prose"))
        for temperature in (0.0, 0.8)
        for each in (
            result("plain", prompt, 10.0, category=category, temperature=temperature),
            result("[red]a", prompt, 25.0, category=category, temperature=temperature),
        )
    ]
    report = report_of(results)
    out = io.StringIO()
    print_bench_tables(report, Console(file=out, width=width))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "   2.50!  2.50  2.50   2.50     25.00" in text
    assert text.count("target.gguf, temperature") == 2
    assert text.count("[red]a") == 4
    assert text.count("[b]code[/b]") == 2
    assert "2.50" in text
    assert {line.count("\t") for line in bench_lines(report)} == {N_COLUMNS - 1}


def test_models_have_as_many_threads_as_were_found_to_be_best(tmp_path: Path) -> None:
    """As `specgen run` has it: but for who names a number."""
    target, draft = tmp_path / "t.gguf", tmp_path / "d.gguf"
    target.touch()
    draft.touch()
    memory, context = Memory(), ContextOptions()
    memory.keep_threads(target, context, Threads(3, 5))

    def options(context: ContextOptions) -> tuple[ContextOptions, ContextOptions]:
        base = SessionOptions(target, "none", target_context=context, draft_context=context)
        _, entry = entries_of(base, {target: [(draft,)]}, [base.drafting], known=memory)
        found = entry.options
        return found.target_context, found.draft_context

    ours, drafts = options(context)
    assert (ours.n_threads, ours.n_threads_batch) == (3, 5)
    assert (drafts.n_threads, drafts.n_threads_batch) == (None, None)
    named = ContextOptions(n_threads=1)
    assert options(named)[0] == named
