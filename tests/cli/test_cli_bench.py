"""`specgen bench` on tiny models: its output and its files, but no speeds."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from specgen.errors import BackendError
from tests.helpers.browser import browser
from tests.helpers.cli import Result, Specgen, tiny_names

pytestmark = pytest.mark.slow

__all__ = ["browser"]

#: Quick, and enough for a test of the command line.
SHORT = ("-t", "1", "-fa", "off", "-n", "20", "-c", "256")
N_COLUMNS = 12


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
    """The lines on standard error, without those about a busy machine."""
    lines = outcome.err.splitlines()
    return [
        line for line in lines if "machine's speed" not in line and "other programs" not in line
    ]


def rows(outcome: Result) -> list[list[str]]:
    assert outcome.code == 0, outcome.err
    headings, *found = (line.split("\t") for line in outcome.out.splitlines())
    assert headings[:5] == ["temperature", "contender", "category", "answers", "speedup"]
    assert {len(row) for row in found} == {len(headings)}
    return found


# --- measurements


def test_in_a_pipe_each_contender_is_a_line_for_all_and_one_for_each_category(
    bench: Specgen,
) -> None:
    outcome = bench("--draft", "draft", "--draft", "ngram", "--policy", "fixed")
    # A note says beforehand what is measured, and how to make it shorter.
    note, *gains = notes(outcome)
    assert [gain.split(": ")[1] for gain in gains] == ["draft.gguf", "ngram"]
    of_model, of_ngrams = gains
    assert " without drafts" in of_model
    assert of_model.endswith(" in 3 answers)")
    # Random texts may repeat nothing.
    assert of_ngrams.endswith((" in 3 answers)", "nothing was drafted, so there is no speed-up"))
    assert note.startswith(
        "note: 3 prompts, each answered with up to 20 tokens by: plain, draft.gguf, ngram; fewer "
        "prompts (-N) or tokens (-n)"
    )
    found = rows(outcome)
    assert {len(row) for row in found} == {N_COLUMNS}
    assert [row[:4] for row in found] == [
        ["0", name, category, number]
        for name in ("plain", "draft.gguf", "ngram")
        for category, number in (("overall", "3"), ("code", "2"), ("prose", "1"))
    ]
    by_name = {row[1]: row for row in found if row[2] == "overall"}
    assert by_name["plain"][4] == "1.00"
    assert by_name["plain"][9] == ""  # nothing was drafted
    assert float(by_name["draft.gguf"][9]) > 0.5


def test_all_policies_temperatures_and_drafts_are_measured(bench: Specgen) -> None:
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
    options = [each["options"] for each in document["contenders"]]
    assert [each["sampler"]["temperature"] for each in options] == [one for one, _ in told]
    assert [each["name"] for each in document["contenders"]] == [name for _, name in told]
    assert len(document["results"]) == 2 * len(told)


def test_json_has_all_raw_measurements(bench: Specgen, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    outcome = bench("--draft", "draft", "--repeat", "2", "--logit-bias", "5-inf", "--json", file)
    assert len(rows(outcome)) == 6
    document: dict[str, Any] = json.loads(
        file.read_text(encoding="utf-8"), parse_constant=pytest.fail
    )
    keys = (
        "specgen date command machine llama_cpp kernels is_interrupted others_share contenders "
        "prompts figures failures results"
    )
    assert " ".join(document) == keys
    assert document["is_interrupted"] is False
    assert document["kernels"]
    assert [each["category"] for each in document["prompts"]] == ["code", "prose", "code"]
    assert len(document["results"]) == 2 * 2 * 3
    first = document["results"][0]
    assert (first["contender"], first["round"]) == ("plain", 1)
    assert first["outcome"]["n_tokens"] == len(first["outcome"]["token_ids"]) == 20
    texts: dict[int, set[str]] = {}
    for each in document["results"]:
        texts.setdefault(each["prompt"], set()).add(each["outcome"]["text"])
    assert {len(found) for found in texts.values()} == {1}


def test_the_page_has_each_answer_and_the_charts(
    bench: Specgen, tmp_path: Path, browser: Browser
) -> None:
    file = tmp_path / "page.html"
    rows(bench("--draft", "draft", "--draft", "ngram", "--html", file))
    page = browser.new_page(viewport={"width": 375, "height": 800})
    errors: list[object] = []
    page.on("pageerror", lambda error: errors.extend([error]))
    page.goto(file.as_uri())
    assert page.locator("h1").text_content() == "target.gguf: the speed-up from drafting"
    names = page.locator("#figures .chart").first.locator(".faint").all_text_contents()
    assert names == ["draft.gguf", "ngram"]
    assert page.locator("#figures > p").all_text_contents() == ["code", "prose"]
    shares = page.locator("#figures details").first.locator(".bar span").all_text_contents()
    assert sum(int(each.removesuffix("%")) for each in shares) == pytest.approx(100, abs=3)
    prompts = page.locator("#prompts details")
    assert prompts.count() == 3
    prompts.first.locator("summary").click()
    page.get_by_text("same text as plain decoding").first.wait_for()
    assert prompts.first.locator(".text").count() == 4  # the prompt and three answers
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    assert not errors


def test_a_draft_may_have_its_own_draft_or_a_plus_sign_in_its_name(
    bench: Specgen, tiny_models: Path, tmp_path: Path
) -> None:
    draft, bad, plus = tiny_models / "draft.gguf", tiny_models / "bad.gguf", tmp_path / "a+b.gguf"
    plus.write_bytes(draft.read_bytes())
    arguments = ("--draft", f"{draft}+{bad}", "--draft", f"{draft}+ngram", "--draft", plus)
    document = json.loads(bench(*arguments, "-N", "1", "--json", "-").out)
    names = ["plain", "draft.gguf+bad.gguf", "draft.gguf+ngram", "a+b.gguf"]
    assert [each["contender"] for each in document["figures"]] == names
    assert document["contenders"][1]["options"]["further_drafts"] == [str(bad)]
    assert len({each["outcome"]["text"] for each in document["results"][:4]}) == 1
    for wrong in (f"{draft}+", "ngram+ngram", f"{draft}+none"):
        assert bench("--draft", wrong).code == 2


# --- what goes wrong


def test_wrong_options_are_reported_before_anything_is_loaded(
    bench: Specgen, tmp_path: Path
) -> None:
    missing = tmp_path / "missing"
    for arguments, message in (
        (("--policy", "fast"), "--policy: 'fast' is not one of cost, threshold, fixed"),
        (("--draft-max", "0"), "--draft-max 0"),
        (("--json", missing / "x.json"), "there is no folder"),
        (("--html", tmp_path), "is a folder"),
        (("--quiet", "--verbose"), "cannot be used together"),
    ):
        outcome = bench(*arguments)
        assert (outcome.code, outcome.out) == (2, "")
        assert message in outcome.err
    outcome = bench("--temp", "-1")
    assert outcome.code == 2


def test_prompts_may_be_given_as_texts(bench: Specgen) -> None:
    outcome = bench("--draft", "none", "one prompt", "another", prompts=None)
    assert rows(outcome)[0][3] == "2"
    assert "given twice" in bench("one prompt").err
    assert "a prompt is empty" in bench("a", " ", prompts=None).err


def test_a_prompt_that_is_too_long_is_skipped(bench: Specgen, prompts: Path) -> None:
    with prompts.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"prompt": "too long " * 400}) + "\n")
    outcome = bench("--draft", "draft", "--policy", "fixed")
    assert [row[3] for row in rows(outcome) if row[2] == "overall"] == ["3", "3"]
    *_, left_out = notes(outcome)
    assert left_out.startswith("note: prompt 4 was left out: the prompt has ")
    assert bench("--draft", "none", "--quiet").err == ""


@pytest.mark.parametrize("n_signals", [0, 1, 2])
def test_an_early_end_keeps_the_results_so_far(
    bench: Specgen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, n_signals: int
) -> None:
    from specgen.session.prompts.prompt import Prompts

    prepare, n_prompts = Prompts.of_text, 0

    def prepare_and_stop(self: Prompts, *arguments: Any, **more: Any) -> Any:
        nonlocal n_prompts
        n_prompts += 1
        if n_prompts == 2 + 4:  # after the two of the warm-up
            for _ in range(n_signals):
                os.kill(os.getpid(), signal.SIGINT)
        if n_prompts == 2 + 5:
            raise BackendError("plain decoding is broken")
        return prepare(self, *arguments, **more)

    monkeypatch.setattr(Prompts, "of_text", prepare_and_stop)
    file = tmp_path / "out.json"
    outcome = bench("--draft", "draft", "--policy", "fixed", "--json", file)
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["is_interrupted"] is (n_signals > 0)
    if n_signals:
        assert outcome.code == 130
        assert notes(outcome)[1:] == ["note: interrupted: not everything was measured"]
    else:
        assert outcome.code == BackendError.exit_code
        assert "error: plain decoding is broken" in outcome.err
    assert len(document["results"]) == (3 if n_signals else 4)
    assert [line.split("\t")[1:4] for line in outcome.out.splitlines()][1:3] == [
        ["plain", "overall", "2"],
        ["plain", "code", "1"],
    ]
