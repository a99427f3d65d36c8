"""`specgen verify` as a user meets it: the report alone on stdout, and how it ends."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specgen.measure.proof import (
    Choice,
    Difference,
    GreedyResult,
    ProofReport,
    SampledResult,
    UncheckedPrompt,
)
from specgen.measure.proof.sampled import DepthResult, RowsResult
from specgen.measure.proof.statistics import Distance, GTest
from specgen.options import SamplerOptions
from specgen.render.verify_report import print_report
from tests.helpers.cli import Result, Specgen, complaint, on_terminal, rest_of
from tests.tiny import TinyConfig, write_tiny_model

#: Quick, and enough for a test of the command line.
SHORT = ("-N", "2", "-n", "12", "--places", "1", "--draws", "200", "--depth", "2")


Verify = Callable[..., Result]
Sampled = Callable[..., list[dict[str, Any]]]


def arguments(models: Path, *more: str, target: str = "target", draft: str = "draft") -> list[str]:
    source = draft if draft in ("ngram", "none") else str(models / f"{draft}.gguf")
    own = ["-m", str(models / f"{target}.gguf"), "-md", source]
    return ["verify", *own, "-t", "1", "-fa", "off", *SHORT, *more]


@pytest.fixture
def verify(specgen: Specgen, tiny_models: Path) -> Verify:
    """Runs the command in this process."""

    def run(*more: str, **models: str) -> Result:
        return specgen(*arguments(tiny_models, *more, **models))

    return run


@pytest.fixture
def sampled(specgen: Specgen, tiny_models: Path) -> Sampled:
    """Runs the sampled check of one way to draft, one token deep; returns its places."""
    target, draft = tiny_models / "target.gguf", tiny_models / "draft.gguf"
    quick = ("--depth", "1", "--policy", "fixed", "--check", "sampled", "-t", "1", "--json")

    def run(*more: str) -> list[dict[str, Any]]:
        report = json.loads(specgen("verify", "-m", target, "-md", draft, *quick, *more).out)
        return list(report["sampled"])

    return run


# --- what is printed


def test_the_report_is_alone_on_stdout(verify: Verify) -> None:
    for more in ((), ("--quiet",)):
        result = verify(*more)
        assert result.code == 0
        # What takes most of the time is said before, and how to make it less.
        assert bool(more) == (result.err == "")
        assert bool(more) != ("samples at 1 place follow" in result.err)
        assert "\x1b" not in result.out
        assert result.out.startswith("target.gguf with drafts from draft.gguf")
        assert "2 prompts, 24 tokens" in result.out
        assert "200 draws" in result.out
        assert result.out.splitlines()[-1] == "Lossless: no defect found."


def test_few_prompts_mean_few_places(sampled: Sampled) -> None:
    def n_places(*more: str) -> int:
        return len(sampled("-n", "4", "--draws", "100", *more))

    assert (n_places(), n_places("-N", "1"), n_places("-N", "9")) == (3, 1, 3)
    assert n_places("-N", "1", "--places", "2") == 2


def test_few_prompts_mean_few_draws(sampled: Sampled) -> None:
    def n_draws(*more: str) -> int:
        (place,) = sampled("--places", "1", *more)
        return int(place["n_draws"])

    assert n_draws("-N", "1") < n_draws("-N", "3") == n_draws("-N", "1", "--deviation", "0.08")


def test_why_rows_depend_on_their_batch(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "depend on their batch" not in verify("--check", "greedy").out
    monkeypatch.setattr("specgen.llama.LlamaModel.has_kernels", True)
    monkeypatch.setattr("specgen.llama.LlamaModel.row_exception", "of a SET")
    result = verify("--check", "greedy")
    assert "Rows of this model depend on their batch: of a SET" in result.out
    assert json.loads(verify("--json", "--check", "sampled").out)["unequal_rows"] == "of a SET"


def test_rows_that_depend_on_their_batch_for_no_known_reason_are_said(
    verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specgen.llama.LlamaModel.has_kernels", True)
    result = verify("--check", "greedy", "--kernels", "llama.cpp")
    assert "Rows of this model depend on their batch: the reason is not known" in result.out


def test_verbose_shows_llama_cpps_log(verify: Verify) -> None:
    result = verify("-vv", "--check", "greedy", "-N", "1")
    assert result.code == 0
    assert "llama_model_loader" in result.err
    assert "llama_model_loader" not in result.out


def test_each_check_may_run_alone(verify: Verify) -> None:
    only_greedy = verify("--check", "greedy").out
    assert "Greedy" in only_greedy
    assert "Sampled" not in only_greedy
    only_sampled = verify("--check", "sampled").out
    assert "Greedy" not in only_sampled
    assert "Sampled" in only_sampled


JSON_KEYS = {
    "": "verdict target draft verifier draft_max sampler seeded_bug check greedy sampled skipped "
    "is_interrupted unequal_rows kernels",
    "greedy": "prompt way n_at_once n_tokens n_drafted drafted_by n_accepted n_rows moved_by batches_move "
    "difference exact_rows is_defect",
    "sampled": "prompt way n_prompt n_answer n_draws n_impossible n_rounds n_drafted drafted_by "
    "n_accepted n_decodes level depths rows is_tested fits is_defect",
    "rows": "n_rows moved_by batches_move exact_rows is_defect",
    "depths": "n_tokens test distance detectable",
    "test": "statistic degrees_of_freedom p_value n_pooled n_cells",
    "distance": "measured if_exact lower upper confidence",
}


def test_json_has_the_documented_fields(verify: Verify) -> None:
    result = verify("--json", "--places", "2", "--quiet")
    assert result.code == 0
    assert result.err == ""
    report: dict[str, Any] = json.loads(result.out)
    place = report["sampled"][0]
    records = {
        "": report,
        "greedy": report["greedy"][0],
        "sampled": place,
        "rows": place["rows"],
        "depths": place["depths"][0],
        "test": place["depths"][0]["test"],
        "distance": place["depths"][0]["distance"],
    }
    for name, record in records.items():
        assert set(record) == set(JSON_KEYS[name].split()), name
    assert report["verdict"] == "lossless"
    assert (report["target"], report["draft"]) == ("target.gguf", "draft.gguf")
    assert report["sampler"]["temperature"] == 0.8
    # The two prompts, and three answers at once.
    assert [result["n_at_once"] for result in report["greedy"]] == [1, 1, 3, 3, 3]
    assert [result["n_tokens"] for result in report["greedy"]] == [12, 12, 4, 8, 12]
    assert [depth["n_tokens"] for depth in place["depths"]] == [1, 2]
    assert len({place["prompt"] for place in report["sampled"]}) == 2
    assert place["level"] == pytest.approx(1e-4 / 4)
    assert verify("--json", "--places", "2").out == result.out, "the seed repeats it"


def test_the_default_policy_is_checked_beside_forced_drafts(verify: Verify) -> None:
    result = verify("--json", "--policy", "cost", "--places", "2")
    assert result.code == 0, result.out
    report = json.loads(result.out)
    greedy, sampled = report["greedy"], report["sampled"]
    assert [each["way"] for each in greedy] == ["cost"] * 2 + ["forced"] * (2 + 3)
    assert [each["n_at_once"] for each in greedy] == [1] * (2 + 2) + [3] * 3
    assert [each["prompt"] for each in greedy[:2]] == [each["prompt"] for each in greedy[2:4]]
    forced = [place for place in sampled if place["way"] == "forced"]
    assert len(forced) == 2
    # What costs allow depends on the machine; what is forced does not.
    assert all(place["n_drafted"] > 0 for place in (*greedy[2:], *forced))
    assert all(place["level"] == pytest.approx(1e-4 / (2 * 2 * 2)) for place in sampled)
    out = verify("--policy", "cost").out
    assert "As `specgen run` drafts: costs decide (--policy cost)" in out
    assert "With a draft in every round, whatever it costs" in out
    assert "in turn; 3 answers at once" in " ".join(out.split())
    # Where the user's own options say how much is drafted, there is one way to draft.
    for own in (("--policy", "threshold"), ("--policy", "cost", "--tree", "2,1")):
        report = json.loads(verify("--json", *own).out)
        assert {each["way"] for each in report["greedy"]} == {own[1] if len(own) == 2 else "fixed"}


def test_a_bug_that_is_planted_in_the_default_way_is_found(verify: Verify) -> None:
    more = ("--policy", "cost", "--check", "greedy", "-n", "30", "--draft-p-min", "0")
    result = verify("--seeded-bug", "wrong-row", *more, draft="bad")
    assert result.code == 11, result.out


def test_numbers_of_prompts_places_and_draws(verify: Verify, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"the {word} is"}) for word in ("cat", "dog", "sun", "sea")]
    file.write_text("\n".join(lines), encoding="utf-8")
    out = verify("--json", "--prompts", str(file), "--places", "3", "--draws", "100").out
    report = json.loads(out)
    # Evenly from the whole file, and counted from 1.
    assert [result["prompt"] for result in report["greedy"]] == [1, 3, 1, 3, 1]
    assert len(report["sampled"]) == 3
    assert {place["n_draws"] for place in report["sampled"]} == {100}


# --- how it ends


@pytest.mark.parametrize(
    ("bug", "more"),
    [
        ("wrong-row", ("--check", "greedy", "-n", "30", "--draft-p-min", "0")),
        ("no-residual", ("--check", "sampled", "--draws", "3000", "--draft-p-min", "0")),
    ],
)
def test_a_defect_is_one_error_line_and_exit_code_11(
    verify: Verify, bug: str, more: tuple[str, ...]
) -> None:
    # The bad draft: with one that is all but the target there is little to refuse.
    draft = "bad" if bug == "wrong-row" else "draft"
    result = verify("--seeded-bug", bug, *more, draft=draft)
    assert result.code == 11, result.out
    *_, error = result.err.splitlines()
    assert error.startswith("error: ")
    assert f"with a planted bug: {bug}" in result.out
    assert result.out.splitlines()[-1] == "Not lossless: at least one defect."
    report = json.loads(verify("--json", "--seeded-bug", bug, *more, draft=draft).out)
    assert report["verdict"] == "defect"
    assert report["seeded_bug"] == bug


def test_where_nothing_is_drafted_nothing_is_shown(verify: Verify) -> None:
    result = verify("--ngram-min", "40", "--ngram-max", "40", draft="ngram")
    assert "so there was nothing to sample" in result.out
    last = "Nothing was drafted, so nothing was checked: greedy, several answers at once, sampled."
    assert result.out.splitlines()[-1] == last
    assert result.code == 11
    assert "error: nothing was drafted, so nothing was checked: greedy," in result.err


def test_a_draft_is_forced_however_unsure_it_is(verify: Verify, tiny_models: Path) -> None:
    """Of this draft no token is as likely as a fixed draft's must be."""
    write_tiny_model(tiny_models / "unsure.gguf", TinyConfig(logit_scale=0.01))
    more = ("--check", "greedy", "--json")
    forced = json.loads(verify(*more, "--policy", "cost", draft="unsure").out)["greedy"]
    assert all(each["n_drafted"] > 0 for each in forced if each["way"] == "forced")
    fixed = verify(*more, "--policy", "fixed", draft="unsure")
    assert fixed.code == 11
    assert json.loads(fixed.out)["verdict"] == "nothing drafted"


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_ctrl_c_shows_what_was_found_so_far(tiny_models: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "the cat is in the else for with"}\n' * 500, encoding="utf-8")
    command = arguments(tiny_models, "--check", "both", "--prompts", str(file), "-N", "3")
    command += ["--places", "400", "--draws", "2000", "--json"]
    with on_terminal(command) as (process, terminal):
        shown = b""
        while b"place 3 of" not in shown:  # two are done; its progress says so
            shown += os.read(terminal, 4096)
        process.send_signal(signal.SIGINT)
        rest_of(terminal)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    report = json.loads(out)
    assert report["is_interrupted"]
    assert report["verdict"] == "interrupted"
    assert len(report["greedy"]) == 3 + 3
    assert 0 < len(report["sampled"]) < 400


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX terminals")
@pytest.mark.parametrize("quiet", [False, True])
def test_progress_shows_on_a_terminals_standard_error_only(tiny_models: Path, quiet: bool) -> None:
    command = [*arguments(tiny_models), *(["--quiet"] if quiet else [])]
    with on_terminal(command) as (process, terminal):
        shown = rest_of(terminal)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert (shown == b"") == quiet
    assert (b"place 1 of 1" in shown) != quiet
    assert b"\x1b" not in out
    assert out.startswith(b"target.gguf with drafts from")


# --- what it refuses


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--draft", "none"), "--draft"),
        (("--draft-max", "0"), "nothing to verify"),
        (("--seeded-bug", "nosuchbug"), "wrong-row"),
        (("--check", "some"), "--check"),
        (("--places", "0"), "--places"),
        (("--draws", "1"), "--draws"),
        (("--draws", "18446744073709551616"), "--draws"),
        (("--depth", "9"), "--depth"),
        (("--deviation", "0"), "--deviation"),
        (("--false-alarm", "1"), "--false-alarm"),
        (("-N", "0"), "-N"),
        (("--quiet", "--verbose"), "--quiet"),
    ],
)
def test_wrong_options_exit_with_2(verify: Verify, more: tuple[str, ...], message: str) -> None:
    assert message in complaint(verify(*more), 2)


def test_no_draft_is_refused(verify: Verify) -> None:
    assert "nothing to verify" in complaint(verify(draft="none"), 2)


def test_a_seeded_bug_is_not_in_the_help(specgen: Specgen) -> None:
    result = specgen("verify", "--help")
    assert result.code == 0
    assert "--check" in result.out
    assert "--seeded-bug" not in result.out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"hello", "line 1: not JSON"),
        (b'{"prompt": "a"}\n{"text": "b"}', "line 2: no prompt"),
        (b'{"prompt": ""}', "no prompt"),
        (b"\n\n", "no prompts"),
        (b"\xff\xfe", "UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_bad_prompt_files_exit_with_3(
    verify: Verify, tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_bytes(content)
    assert message in complaint(verify("--prompts", str(file)), 3)


def test_prompts_longer_than_the_context_are_skipped(verify: Verify, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    short, long = '{"prompt": "the cat is in"}', json.dumps({"prompt": "the cat is " * 300})
    file.write_text(f"{long}\n{short}\n", encoding="utf-8")
    result = verify("--prompts", str(file), "-c", "256", "--quiet")
    assert result.code == 0, result.err
    assert result.err == ""
    assert "prompt 1 was skipped: the context has no room for its" in result.out
    assert "1 prompt, 12 tokens" in result.out
    file.write_text(long, encoding="utf-8")
    error = complaint(verify("--prompts", str(file), "-c", "256"), 3)
    assert "no prompt fits the context" in error
    assert "--ctx-size" in error


def test_pairs_and_models_that_cannot_be(verify: Verify) -> None:
    assert "cannot draft for" in complaint(verify("--translate", "off", draft="other"), 5)
    assert "no such file" in complaint(verify(target="missing"), 4)


# --- the report


def _report() -> ProofReport:
    choices = (Choice(67, "C", 9.551, 9.539), Choice(71, "\n", 9.538, 9.543))
    difference = Difference(18, *choices, True, 0.0126, 0.0039, 0.0141, 4)
    equal = GreedyResult(1, 64, 40, 30, 64, 0.0039, 0.0041, None)
    depths = tuple(
        DepthResult(
            n,
            GTest(12.5 * n, n - 1, 1.0 if n == 1 else 0.3, 0),
            Distance(0.012, 0.013, 0.0, 0.031, 0.95),
            0.0353,
        )
        for n in (1, 2, 3)
    )
    place = SampledResult(
        2, 60, 17, 12423, 0, 30000, 19165, 15300, 400, 1.1e-5, depths, RowsResult(93, 4e-4, 4e-4)
    )
    return ProofReport(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "auto",
        3,
        SamplerOptions(temperature=0.8),
        None,
        "both",
        (equal, replace(equal, prompt=2, difference=difference)),
        (place,),
        (UncheckedPrompt(4, "the context has no room for its 5000 tokens and an answer"),),
    )


def shown(report: ProofReport, width: int, *, terminal: bool = True) -> str:
    stream = io.StringIO()
    print_report(
        report,
        Console(file=stream, width=width, force_terminal=terminal, color_system=None),
    )
    return stream.getvalue()


@pytest.mark.parametrize("width", [80, 110])
def test_tables_are_whole_at_every_width(width: int) -> None:
    lines = shown(_report(), width).splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "tokens cells p distance 95 % if exact detects" in text
    assert "2 2 0.3 0.012 0.000-0.031 0.013 0.035 fits" in text
    assert "1 1 1 0.012 0.000-0.031 0.013 nothing no test" in text
    assert "1 equal, 1 near-tie, 0 defects" in text
    assert "prompt 2, token 19: near-tie: plain takes 'C', speculative" in text
    assert "plain decoding in batches of 4" in text
    assert "prompt 4 was skipped" in text
    assert "…" not in text


def test_a_report_in_a_file_has_the_same_width_everywhere() -> None:
    assert shown(_report(), 40, terminal=False) == shown(_report(), 200, terminal=False)


def test_it_says_what_computes_and_no_movement_that_was_not_measured() -> None:
    report = replace(_report(), kernels="llama.cpp on the GPU")
    slight = replace(report.greedy[0], moved_by=0.004, batches_move=0.0)
    text = shown(replace(report, greedy=(slight,), sampled=()), 110)
    assert "computed by llama.cpp on the GPU" in text
    assert "moved by up to 0.40%\n" in text


def test_defects_are_called_by_their_name() -> None:
    report = _report()
    moved = replace(report.greedy[0], moved_by=0.8)
    assert "batches alone move them by up to 0.41%: defect" in shown(
        replace(report, greedy=(moved,)), 110
    )
    difference = report.greedy[1].difference
    assert difference is not None
    unchosen = replace(report.greedy[1], difference=replace(difference, was_chosen=False))
    text = shown(replace(report, greedy=(unchosen,)), 200)
    assert "token 19: defect" in text
    assert "the target did not choose that token" in text
    place = report.sampled[0]
    impossible = replace(place, n_impossible=3)
    assert "3 draws to which the target gives probability 0" in shown(
        replace(report, sampled=(impossible,)), 110
    )
    failing = replace(place.depths[1], test=replace(place.depths[1].test, p_value=1e-9))
    text = shown(replace(report, sampled=(replace(place, depths=(failing,)),)), 110)
    assert "1e-09" in text
    assert "defect" in text


def test_an_interrupted_report_says_so() -> None:
    text = shown(replace(_report(), is_interrupted=True), 80)
    assert text.splitlines()[-1] == "Interrupted: no defect in what was checked."
