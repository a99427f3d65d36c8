"""Tables of options: groups, and what a command gets from them."""

from __future__ import annotations

import os

import pytest
from typer.testing import CliRunner

import specgen.cli
from specgen.cli.llama_cpp_options import translated
from specgen.errors import UsageError

DRAFTING = [
    "run",
    "chat",
    "fim",
    "batch",
    "serve",
    "verify",
    "tune",
    "bench",
    "draft make",
    "draft learn",
]
ALONE = ["doctor", "draft find", "draft data", "draft forget"]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        *((command, option) for command in [*DRAFTING, *ALONE] for option in ("-hf", "--hf-repo")),
        *((command, option) for command in DRAFTING for option in ("-hfd", "--hf-repo-draft")),
    ],
)
def test_every_command_takes_its_models_from_the_hub(command: str, option: str) -> None:
    arguments = [*command.split(), option, "nonsense"]
    arguments += ["-m", "target.gguf"] if option in {"-hfd", "--hf-repo-draft"} else []
    arguments += {"fim": ["a.py:1:1"], "batch": ["-", "-"]}.get(command, [])
    result = CliRunner().invoke(specgen.cli.app, arguments)
    assert isinstance(result.exception, UsageError), result.output
    assert result.exception.message.startswith('"nonsense" does not name a model')


def test_models_on_the_hub_are_named_as_in_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    run = specgen.cli.command_line().commands["run"]

    def read(*arguments: str) -> list[str]:
        return translated(run.context_class(run, info_name="run"), arguments)

    assert read("-hf", "a/b:Q8_0", "-hfd", "c/d", "-hft", "hf_secret", "x") == [
        *("-m", "hf:a/b:Q8_0", "-md", "hf:c/d", "x")
    ]
    assert os.environ["HF_TOKEN"] == "hf_secret"
    given = ("--hf-repo=a/b:Q8_0", "--hf-file", "x/y.gguf", "-md", "small.gguf", "-hfd", "c/d")
    assert read(*given) == ["-m", "hf:a/b/x/y.gguf", "-md", "small.gguf", "-md", "hf:c/d"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-hff", "c.gguf"], "--hf-file needs one --hf-repo"),
        (["-hf", "a/b", "-hff", "c.bin"], '"a/b/c.bin" does not name a model'),
    ],
)
def test_what_names_no_model_on_the_hub_is_an_error_in_use(
    arguments: list[str], message: str
) -> None:
    result = CliRunner().invoke(specgen.cli.app, ["run", *arguments, "prompt"])
    assert isinstance(result.exception, UsageError)
    assert result.exception.message.startswith(message)


@pytest.mark.parametrize("command", ["find", "data", "make", "learn"])
def test_a_target_that_must_be_named_is_missed(command: str) -> None:
    result = CliRunner().invoke(specgen.cli.app, ["draft", command])
    assert result.exit_code == 2
    assert "Missing option '--target'" in result.stderr
