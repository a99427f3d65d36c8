"""Targets that are larger than memory, at the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from specgen.errors import MemoryLimitError
from tests.helpers.cli import Cli, Specgen, complaint
from tests.helpers.common import linux
from tests.helpers.tiny import write_large_model

PROMPT = "def add(a, b): return a + b # and the sum is the sum is"
#: More than any machine has. Only the file's head takes space on the disk.
TERABYTE = 10**12


@pytest.mark.parametrize("draft", ["draft", "ngram", "none"])
def test_the_answer_is_the_same_with_less_memory(cli: Cli, draft: str) -> None:
    plain = cli.run(PROMPT, draft="none")
    few = cli.run(PROMPT, "--weights-memory", "1000B", draft=draft)
    assert (few.code, few.out) == (0, plain.out)
    assert "of weights, 1.00 kB of memory: " in few.err
    assert "of weights" not in plain.err


def test_a_batch_has_the_same_results_with_less_memory(
    specgen: Specgen, cli: Cli, tmp_path: Path
) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("the cat is in\nthe house of the house of\none two three\n")
    answers: list[object] = []
    for name, memory in (("few", "1000B"), ("plain", "auto")):
        results = tmp_path / f"{name}.jsonl"
        models = ["-m", cli.model("target"), "-md", cli.model("draft")]
        result = specgen(
            *("batch", *models, "-n", "20", "--raw", "--weights-memory", memory, lines, results)
        )
        assert result.code == 0, result.err
        records = [json.loads(line) for line in results.read_text().splitlines()]
        by_line = {record["custom_id"]: record["response"]["body"] for record in records}
        answers.append([by_line[number]["choices"][0] for number in sorted(by_line)])
    assert answers[0] == answers[1]


def test_an_invalid_memory_size_is_rejected(cli: Cli) -> None:
    message = complaint(cli.run(PROMPT, "--weights-memory", "much"), 2)
    assert "--weights-memory: 'much' is not a size, all or auto" in message


@linux
def test_a_target_that_must_fit_but_does_not_is_rejected(specgen: Specgen, tmp_path: Path) -> None:
    large = write_large_model(tmp_path / "large.gguf", TERABYTE)
    for command in (("run", "a"), ("serve", "--port", "0")):
        result = specgen(*command, "-m", large, "-md", "none", "--weights-memory", "all")
        message = complaint(result, MemoryLimitError.exit_code)
        assert "large.gguf: its weights need 1.00 TB, but only" in message


@linux
def test_the_list_shows_what_would_be_read_from_disk(specgen: Specgen) -> None:
    folder = Path(os.environ["HOME"], ".lmstudio", "models", "me", "Large-GGUF")
    folder.mkdir(parents=True)
    write_large_model(folder / "large.gguf", TERABYTE)
    document = json.loads(specgen("models", "list", "--json").out)
    (large,) = (model for model in document["other_programs"] if "Large" in model["model"])
    assert large["fits_memory"] is False
    assert 0 < large["streamed_bytes"] < 1.01 * TERABYTE
    (row,) = (line for line in specgen("models", "list").out.splitlines() if "Large" in line)
    assert " from disk " in row
