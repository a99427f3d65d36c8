"""Tables of options: groups, and what a command gets from them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import typer
from typer import Option
from typer.testing import CliRunner

import specgen.cli
from specgen.cli import flags
from specgen.cli.flags import sampling, takes_options
from specgen.cli.llama_cpp_options import translated
from specgen.cli.model_loading import Setup
from specgen.errors import UsageError
from specgen.options import GenerationOptions, SamplerOptions


def given_to(command: Any, *arguments: str) -> None:
    """Run a command with the arguments."""
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None, result.output


def test_a_group_without_some_options_keeps_their_defaults() -> None:
    rest = sampling.without("temperature", "no such option")

    @takes_options(sampler=rest)
    def command(*, sampler: SamplerOptions) -> int:
        return sampler.top_k

    names = command.__annotations__.keys()
    assert names >= {"sampler_top_k", "sampler_seed", "sampler_min_p"}
    assert "sampler_temperature" not in names
    assert command(sampler_top_k=7) == 7
    assert rest(top_k=7) == SamplerOptions(top_k=7)


def test_two_options_of_one_spelling_are_an_error_when_a_command_is_defined() -> None:
    with pytest.raises(TypeError, match="command has two options named --top-k, -k"):

        @takes_options(sampler=sampling, other=Option("-k", "--top-k", "-k"))
        def command(*, sampler: SamplerOptions, other: int = 3) -> int:
            return sampler.top_k + other


def test_types_and_defaults_are_those_of_functions_and_fields() -> None:
    seen: list[tuple[GenerationOptions, int]] = []

    @takes_options(answer=flags.answer.but(max_tokens=5), n=Option("-N"))
    def command(*, answer: GenerationOptions, n: int = 4) -> int:
        seen.append((answer, n))
        return 0

    given_to(command)
    given_to(command, "--stop", "a", "--stop", "b", "-n", "7", "-N", "8")
    assert seen == [
        (GenerationOptions(max_tokens=5), 4),
        (GenerationOptions(max_tokens=7, stop=("a", "b")), 8),
    ]


def test_a_group_may_have_groups() -> None:
    seen: list[Setup] = []

    @takes_options(setup=flags.setup.without("answer_logprobs").but(answer_max_tokens=5))
    def command(*, setup: Setup) -> int:
        seen.append(setup)
        return 0

    given_to(command, "-m", "a.gguf", "--top-k", "3", "--learn")
    (setup,) = seen
    assert setup.models.target == "a.gguf"
    assert setup.answer == GenerationOptions(max_tokens=5)
    assert setup.sampling == SamplerOptions(top_k=3)
    assert setup.learn


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
        (["-hf", "a/b", "-m", "c.gguf"], "-hf a/b and -m exclude each other"),
        (["--target=c.gguf", "-hf", "a/b"], "-hf a/b and --target=c.gguf exclude each other"),
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
