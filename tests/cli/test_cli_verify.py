"""`specgen verify`: the report, which is the only output on stdout, and the exit codes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.bugs import plant
from tests.helpers.cli import Result, Specgen, complaint, models_of, on_terminal, rest_of

pytestmark = pytest.mark.slow

#: Quick, and enough for a test of the command line.
SHORT = ("-N", "2", "-n", "12", "--n-samples", "100")


Verify = Callable[..., Result]


def arguments(models: Path, *more: str, **names: str) -> list[str]:
    return ["verify", *models_of(models, **names), "-t", "1", "-fa", "off", *SHORT, *more]


@pytest.fixture
def verify(specgen: Specgen, tiny_models: Path) -> Verify:
    """Runs the command in this process."""

    def run(*more: str, **models: str) -> Result:
        return specgen(*arguments(tiny_models, *more, **models))

    return run


# --- the output


def test_the_report_is_alone_on_stdout(verify: Verify) -> None:
    for more in ((), ("--quiet",)):
        result = verify(*more)
        assert result.code == 0
        # A note says beforehand what takes longest, and how to make it shorter.
        assert bool(more) == (result.err == "")
        assert bool(more) != ("samples) runs last and takes longest" in result.err)
        assert "\x1b" not in result.out
        verdict = "PASS: no difference found in 5 answers and 100 samples"
        assert result.out.splitlines()[-1] == verdict
        assert result.out.splitlines()[0].startswith("target.gguf with drafts from draft.gguf")
        assert "2 prompts, 24 tokens: 2 equal, 0 near-ties, 0 defects" in result.out
        assert "100 samples" in result.out
        assert len(result.out.splitlines()) < 24, "one screen"


JSON_KEYS = {
    "": "verdict target draft verifier draft_max sampler check greedy sampled skipped "
    "is_interrupted kernels unequal_rows instead",
    "greedy": "prompt way n_at_once n_tokens n_drafted n_accepted difference is_defect",
    "sampled": "prompt way n_prompt n_answer n_samples n_impossible n_drafted n_accepted level "
    "test is_defect",
    "test": "statistic p_value n_pooled n_cells",
}


def test_json_contains_the_documented_fields(verify: Verify) -> None:
    result = verify("--json", "--quiet", "--policy", "fixed")
    assert (result.code, result.err) == (0, "")
    report: dict[str, Any] = json.loads(result.out)
    (place,) = report["sampled"]
    records = {"": report, "greedy": report["greedy"][0], "sampled": place, "test": place["test"]}
    for name, record in records.items():
        assert set(record) == set(JSON_KEYS[name].split()), name
    assert report["verdict"] == "lossless"
    assert (report["target"], report["draft"]) == ("target.gguf", "draft.gguf")
    assert report["sampler"]["temperature"] == 0.8
    # The two prompts, and three answers at once.
    assert [result["n_at_once"] for result in report["greedy"]] == [1, 1, 3, 3, 3]
    assert [result["n_tokens"] for result in report["greedy"]] == [12, 12, 4, 8, 12]
    assert (place["n_samples"], place["level"]) == (100, pytest.approx(1e-4))
    assert verify("--json", "--policy", "fixed").out == result.out, "the seed repeats it"


def test_the_default_policy_and_forced_drafts_are_both_checked(verify: Verify) -> None:
    result = verify("--json", "--policy", "cost")
    assert result.code == 0, result.out
    report = json.loads(result.out)
    greedy, sampled = report["greedy"], report["sampled"]
    assert [each["way"] for each in greedy] == ["cost"] * 2 + ["forced"] * (2 + 3)
    assert [each["n_at_once"] for each in greedy] == [1] * (2 + 2) + [3] * 3
    assert [each["prompt"] for each in greedy[:2]] == [each["prompt"] for each in greedy[2:4]]
    assert [place["way"] for place in sampled][-1] == "forced"
    # Costs depend on the machine; forced drafts do not.
    assert all(place["n_drafted"] > 0 for place in (*greedy[2:], sampled[-1]))
    assert all(place["level"] == pytest.approx(1e-4 / 2) for place in sampled)
    out = verify("--policy", "cost").out
    assert "as `specgen run` drafts: costs decide (--policy cost)" in out
    assert "with a draft in every round, whatever it costs; 3 answers at once" in out
    # Options that say how much is drafted leave one way to draft.
    for own in (("--policy", "threshold"), ("--policy", "cost", "--tree", "2,1")):
        report = json.loads(verify("--json", "--check", "greedy", *own).out)
        assert {each["way"] for each in report["greedy"]} == {own[1] if len(own) == 2 else "fixed"}


def test_deviations_from_the_options_come_first(verify: Verify) -> None:
    own = ("--check", "greedy", "--tree", "2x3", "--verifier", "spectr")
    report = verify(*own, draft="other").out
    assert not any(line.endswith(" ") for line in report.splitlines())
    out = " ".join(report.split())
    assert (
        "verifier spectr drafts were chains, not trees of 2x3: other.gguf has another "
        "vocabulary, with which drafts cannot branch drafts were matched, not judged by spectr: "
        "none of them was sampled"
    ) in out
    assert "PASS: no difference found in 5 answers, but not everything was checked" in out
    assert verify(*own).out.splitlines()[-1] == "PASS: no difference found in 5 answers"


@pytest.mark.parametrize(
    "own", [("--dynatemp-range", "0.5"), ("--samplers", "top_k"), ("--xtc-probability", "1")]
)
def test_the_greedy_check_samples_nothing(verify: Verify, own: tuple[str, ...]) -> None:
    result = verify("--check", "greedy", "--policy", "fixed", *own)
    assert result.code == 0, result.out


# --- how it ends


@pytest.mark.parametrize(
    ("bug", "more"),
    [
        ("wrong-row", ("--check", "greedy", "-n", "30")),
        ("no-residual", ("--check", "sampled", "--n-samples", "2000")),
    ],
)
def test_a_defect_is_one_error_line_and_exit_code_11(
    verify: Verify, monkeypatch: pytest.MonkeyPatch, bug: str, more: tuple[str, ...]
) -> None:
    plant(monkeypatch, bug)
    # Almost all tokens of the good draft are accepted, so the bad one is used here.
    draft = "bad" if bug == "wrong-row" else "draft"
    result = verify(*more, "--draft-p-min", "0", draft=draft)
    assert result.code == 11, result.out
    assert result.err.splitlines()[-2].startswith("error: drafting changed the text")
    last = result.out.splitlines()[-1]
    assert last.startswith("FAIL: the output differs from the target's own in ")
    assert last.endswith(" answers" if bug == "wrong-row" else " sampling test")
    report = json.loads(verify("--json", *more, "--draft-p-min", "0", draft=draft).out)
    assert report["verdict"] == "defect"


def test_without_drafts_nothing_is_proven(verify: Verify) -> None:
    result = verify("--ngram-min", "32", "--ngram-max", "32", draft="ngram")
    assert "so there was nothing to sample" in result.out
    last = "FAIL: nothing was drafted, so nothing was checked: greedy, several answers at once, "
    assert result.out.splitlines()[-1] == f"{last}sampled"
    assert result.code == 11
    assert "error: nothing was drafted, so nothing was checked: greedy," in result.err


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_ctrl_c_shows_what_was_found_so_far(tiny_models: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "the cat is in the else for with"}\n' * 500, encoding="utf-8")
    command = arguments(tiny_models, "--prompts", str(file), "-N", "3", "--policy", "fixed")
    command += ["--n-samples", "1000000", "--json"]
    with on_terminal(command) as (process, terminal):
        shown = b""
        while b"sampled, --policy fixed" not in shown:  # texts were compared; its progress says so
            shown += os.read(terminal, 4096)
        process.send_signal(signal.SIGINT)
        rest_of(terminal)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    report = json.loads(out)
    assert report["is_interrupted"]
    assert report["verdict"] == "interrupted"
    assert len(report["greedy"]) == 3 + 3
    assert report["sampled"] == []


# --- rejected options


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--draft", "none"), "--draft"),
        (("--draft-max", "0"), "nothing to verify"),
        (("--check", "some"), "--check"),
        (("--n-samples", "1"), "--n-samples"),
    ],
)
def test_wrong_options_exit_with_2(verify: Verify, more: tuple[str, ...], message: str) -> None:
    assert message in complaint(verify(*more), 2)


def test_prompts_longer_than_the_context_are_skipped(verify: Verify, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    short, long = '{"prompt": "the cat is in"}', json.dumps({"prompt": "the cat is " * 300})
    file.write_text(f"{long}\n{short}\n", encoding="utf-8")
    result = verify("--prompts", str(file), "-c", "256", "--quiet")
    assert result.code == 0, result.err
    assert result.err == ""
    assert "prompt 1 was skipped: the context has no room for it" in result.out
    assert "1 prompt, 12 tokens" in result.out
    file.write_text(long, encoding="utf-8")
    error = complaint(verify("--prompts", str(file), "-c", "256"), 3)
    assert "but the context has 256" in error
    assert "--ctx-size" in error
