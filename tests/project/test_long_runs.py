"""Short parts of the searches that usually take minutes or hours (`make fuzz`, `make soak`)."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.common import ROOT
from tests.long_runs.mutated_json import mutated
from tests.tiny import CHATML_TEMPLATE, TinyConfig, write_tiny_model

pytestmark = [pytest.mark.skipif(os.name == "nt", reason="needs POSIX processes"), pytest.mark.slow]
#: Of each kind of case a few.
N_CASES = 40


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", f"tests.long_runs.{module}", *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_any_input_gets_an_answer_or_a_one_line_error(tmp_path: Path) -> None:
    done = run("fuzz", "--cases", str(N_CASES), "--seed", "0", "--keep", str(tmp_path))
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout)["codes"]
    assert sum(sum(by_code.values()) for by_code in codes.values()) == N_CASES
    # Some are answered, and some refused.
    assert any("0" in by_code for by_code in codes.values())
    assert any("4" in by_code for by_code in codes.values())


def test_a_mutated_body_depends_only_on_its_own_random_generator() -> None:
    """Else a case could not be repeated by its number."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stop": ["a"]}
    first = [mutated(body, random.Random(seed)) for seed in range(1500)]
    assert [mutated(body, random.Random(seed)) for seed in reversed(range(1500))] == first[::-1]
    assert len(set(first)) > 300


def test_a_short_soak_of_a_server_finds_nothing_wrong(tmp_path: Path) -> None:
    config = TinyConfig(logit_scale=6.0, chat_template=CHATML_TEMPLATE, unprintable_scale=0.0)
    target = write_tiny_model(tmp_path / "target.gguf", config)
    exact = ["-t", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32", "-c", "2048"]
    draft = write_tiny_model(tmp_path / "draft.gguf", config.draft(0.1))
    done = run(
        "server_soak",
        *("--minutes", "0.1", "--least", "20", "--users", "4", "--"),
        *("-m", str(target), "-md", str(draft), "--limit-client", "1", *exact),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout)["counts"]
    assert counts["texts compared"] >= 20
    assert counts["ask_wrongly: 400"] > 0


@pytest.mark.parametrize("module", ["llama_cpp_tests", "schemas", "server_soak", "templates"])
def test_input_that_is_missing_is_named_without_a_traceback(module: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    arguments = ["--", "-m", str(missing)] if module == "server_soak" else [str(missing)]
    done = run(module, *arguments)
    assert done.returncode != 0
    assert str(missing) in done.stderr
    assert "Traceback" not in done.stderr


def test_real_schemas_are_counted_by_how_they_are_taken(tmp_path: Path) -> None:
    """A value may have its properties in any order; one that conforms to no schema is never taken.
    Other properties are taken where objects are open, in the second table.
    """
    properties = {"a": {"type": "null"}, "b": {"type": "array", "uniqueItems": True}}
    values = [({"b": [], "a": None}, True), ({"b": [1, 1]}, False), ({"c": 1}, True)]
    tests = [{"data": value, "valid": is_valid} for value, is_valid in values]
    for name, schema in (("one", {"properties": properties}), ("two", {"type": "frog"})):
        case = {"schema": {"type": "object", **schema}, "tests": tests}
        (tmp_path / f"{name}.json").write_text(json.dumps(case))
    done = run("schemas", str(tmp_path))
    assert done.returncode == 0, done.stderr
    table = done.stdout.split()
    for name in ("in part", "refused", "invalid accepted (in part)", "valid rejected (in part)"):
        assert " ".join(table).count(f" 1 {name}") == (1 if name.startswith("valid") else 2)
