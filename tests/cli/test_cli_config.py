"""The user's defaults in config.toml: what they change, what comes first, and how mistakes are reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.cli import Result, Specgen, complaint


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of defaults, in a folder of its own."""
    monkeypatch.setenv("SPECGEN_CONFIG", str(tmp_path))
    return tmp_path / "config.toml"


def in_force(result: Result) -> dict[str, str]:
    """The values that are not specgen's own defaults."""
    assert result.code == 0, result.err
    lines = [line for line in result.out.splitlines() if not line.startswith("#")]
    return dict(line.split(" = ", 1) for line in lines)


def test_each_value_says_where_it_comes_from(
    specgen: Specgen, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECGEN_POLICY")
    assert f"# {file} (there is no such file)" in specgen("config").out
    file.write_text('temp = 0.5\ntop_k = 7\nthreads = 3\npolicy = "threshold"\nngrams = false\n')
    assert in_force(specgen("config")) == {
        "temp": "0.5  # file",
        "top-k": "7  # file",
        "threads": "3  # file",
        "policy": '"threshold"  # file',
        "ngrams": "false  # file",
    }
    monkeypatch.setenv("SPECGEN_POLICY", "fixed")
    found = in_force(specgen("config", "--temp", "1", "--ngrams"))
    assert found["temp"] == "1.0  # flag"
    assert found["ngrams"] == "true  # flag"
    assert found["policy"] == '"fixed"  # environment SPECGEN_POLICY'
    assert "# top-p = 0.95  # default" in specgen("config").out


def test_the_output_of_config_can_stand_in_the_file(specgen: Specgen, file: Path) -> None:
    file.write_text('samplers = "top_k;temperature"\nlogit-bias = ["5+1"]\nstats = false\n')
    shown = specgen("config")
    file.write_text(shown.out)
    assert in_force(specgen("config")) == in_force(shown)
    assert "samplers" in in_force(shown)


def test_doctor_reports_a_mistake_in_the_file(
    specgen: Specgen, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specgen.measure.doctor.places_of", lambda _build: [])
    file.write_text("temprature = 1\n")
    result = specgen("doctor", "--json")
    assert result.code == 2
    (wrong,) = (each for each in json.loads(result.out)["checks"] if not each["passed"])
    assert (wrong["name"], wrong["error"]) == ("defaults", "UsageError")
    assert "temprature: there is no such key" in wrong["message"]
    file.write_text("temp = 1\n")
    healthy = specgen("doctor", "--json")
    assert "defaults" not in healthy.out


def test_a_draft_is_for_the_target_beside_it(specgen: Specgen, file: Path) -> None:
    file.write_text(
        'target = "one.gguf"\ndraft = "ngram"\ntemp = 0.5\n'
        '[targets."two"]\ndraft = "none"\ntemp = 0.7\n[targets."one.gguf"]\ntop-k = 3\n'
    )
    own = in_force(specgen("config"))
    assert own["target"] == '"one.gguf"  # file'
    assert own["draft"] == '["ngram"]  # file'
    assert (own["temp"], own["top-k"]) == ("0.5  # file", "3  # file")
    other = in_force(specgen("config", "-m", "folder/two.gguf"))
    assert (other["draft"], other["temp"]) == ('["none"]  # file', "0.7  # file")
    assert "top-k" not in other
    assert "draft" not in in_force(specgen("config", "-m", "three"))
    pair = in_force(specgen("config", "--pair", "x"))
    assert "target" not in pair
    assert "draft" not in pair


def test_commands_take_the_defaults_that_concern_them(
    specgen: Specgen, file: Path, tiny_models: Path
) -> None:
    target = str(tiny_models / "target.gguf")
    file.write_text(
        f"target = {target!r}\ndraft = 'none'\nthreads = 1\nmax-tokens = 3\nstats = false\n"
    )
    answer = specgen("run", "the cat")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out
    assert len(specgen("run", "the cat", "-n", "9").out) > len(answer.out)
    # What is measured does not depend on how answers are sampled.
    file.write_text("temp = 0.8\n")
    bench = specgen("bench", "-m", target, "--draft", "none", "-t", "1", "-N", "1", "-n", "4")
    assert bench.out.splitlines()[1].split("\t")[:2] == ["0", "plain"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tmp = 1", "tmp: there is no such key"),
        ("temp = 'x'", "temp = x: it is not a number"),
        ("temp = -1", "temp = -1: give 0 or more"),
        ("top-k = 1.5", "top-k = 1.5: it is not a whole number"),
        ("temp = true", "temp = true: it is not a number"),
        ("ngrams = 2.5", "ngrams = 2.5: "),
        ("temp = [1, 2]", "temp = 1, 2: give one value"),
        ("policy = 'x'", "policy = x: 'x' is not one of"),
        ("prompt = 'x'", "prompt: there is no such key"),
        ("temp", "Expected '='"),
        ("[targets.x]\ntmp = 1", 'targets."x".tmp: there is no such key'),
        ("targets = 1", "targets: give tables"),
    ],
)
def test_a_mistake_is_one_line_with_file_and_key(
    specgen: Specgen, file: Path, text: str, words: str
) -> None:
    file.write_text(text)
    found, other = (complaint(specgen(command), 2) for command in ("config", "tune"))
    assert found == other
    assert str(file) in found
    assert words in found
    if "tmp" in text:
        assert "the nearest one is temp" in found
    assert specgen("config", "--help").code == 0
