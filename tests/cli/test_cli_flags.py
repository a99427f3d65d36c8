"""Tables of options: groups, and what a command gets from them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import typer
from typer import Option
from typer.testing import CliRunner

from specgen.cli import COMMANDS, flags, make_app
from specgen.cli.flags import sampling, takes_options
from specgen.cli.model_loading import Setup
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


# --- the commands ---------------------------------------------------------------------------


def test_what_the_help_says_of_a_command_is_what_the_command_says() -> None:
    own = typer.main.get_command(make_app()).commands  # type: ignore[attr-defined]
    listed = typer.main.get_command(make_app(())).commands  # type: ignore[attr-defined]
    assert list(own) == list(listed) == list(COMMANDS)
    for name, command in own.items():
        first, _, _ = command.help.partition("\n\n")
        assert listed[name].help == " ".join(first.split())


@pytest.mark.parametrize(("arguments", "imported"), [("run --help", True), ("--help", False)])
def test_only_the_command_that_is_called_is_imported(arguments: str, imported: bool) -> None:
    program = (
        "import sys\nfrom specgen.cli import main\n"
        f"try: main({arguments.split()!r})\n"
        "except SystemExit: pass\n"
        "print([name in sys.modules for name in ('specgen.cli.run', 'specgen.cli.bench')])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines()[-1] == str([imported, False])
