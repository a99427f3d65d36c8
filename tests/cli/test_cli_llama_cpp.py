"""Options of llama.cpp's programs, typed out of habit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cli import Cli, Specgen, complaint, events_of


@pytest.mark.parametrize(
    "words",
    [
        ("--jinja",),
        ("--color", "on", "-st"),
        ("--no-display-prompt", "--no-warmup", "--log-disable"),
    ],
)
def test_what_is_done_anyhow_is_left_out_with_one_note(cli: Cli, words: tuple[str, ...]) -> None:
    plain = cli.run("-n", "3", "--no-stats", "hi")
    habit = cli.run("-n", "3", "--no-stats", *words, "hi")
    assert (habit.code, habit.out) == (0, plain.out)
    names = ", ".join(word for word in words if word.startswith("-"))
    assert habit.err == f"note: {names}: not needed, specgen does so anyhow\n"
    assert cli.run("-n", "3", "-q", *words, "hi").err == ""


@pytest.mark.parametrize(
    ("words", "equal"),
    [
        (("--spec-draft-n-max", "2"), ("--draft-max", "2")),
        (("--spec-draft-n-max=2",), ("--draft-max", "2")),
        (("-no-cnv",), ("--raw",)),
        (("--system-prompt", "Be brief."), ("--system", "Be brief.")),
    ],
)
def test_what_has_an_equal_is_that(
    cli: Cli, words: tuple[str, ...], equal: tuple[str, ...]
) -> None:
    usual, habit, own = (
        events_of(cli.run("-n", "20", "--policy", "fixed", "--json", *each, "x", target="chat"))
        for each in ((), words, equal)
    )

    def settings(events: list[dict[str, Any]]) -> tuple[Any, ...]:
        return events[0]["text"], events[-1]["text"], events[-1]["drafted_by_depth"]

    assert settings(habit) == settings(own) != settings(usual)


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        ("run", ("-ub", "512"), "-b N"),
        ("run", ("-cnv",), "specgen chat"),
        ("run", ("-i",), "specgen chat"),
        ("run", ("-e",), r"$'one\ntwo'"),
        ("run", ("--draft", "8"), "--draft-max 8"),
        ("run", ("-cmoe",), "specgen run --help"),
        ("run", ("--mlock",), "leave it out"),
        ("chat", ("-st",), "specgen run"),
        ("fim", ("-no-cnv",), "specgen run"),
        ("serve", ("--api-key", "x"), "--api-key-file"),
    ],
)
def test_the_rest_is_refused_with_what_to_use(
    specgen: Specgen, command: str, words: tuple[str, ...], said: str
) -> None:
    message = complaint(specgen(command, *words), 2)
    assert words[0] in message
    assert said in message


def test_values_and_prompts_are_no_options(cli: Cli, tmp_path: Path) -> None:
    for words in (("-p", "--jinja"), ("--", "--jinja"), ("--stop", "-ub", "hi")):
        result = cli.run("-n", "2", "--no-stats", *words)
        assert (result.code, result.err) == (0, "")


def test_options_of_the_command_come_first(specgen: Specgen, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("a\n")
    missing = tmp_path / "missing.gguf"
    result = specgen("fim", f"{tmp_path / 'x.py'}:1", "-i", "-m", missing)
    assert "is an option of llama.cpp" not in result.err
    assert result.code == 4
