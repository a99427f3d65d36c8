"""The two kinds of help, and what the shell completes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from specgen import cli
from specgen.cli import command_line, flags
from specgen.cli.output import Output
from specgen.cli.short_help import EXAMPLES, USUAL
from tests.helpers.cli import in_process


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    root: Any = group or command_line()
    for name, each in root.commands.items():
        if hasattr(each, "commands"):
            yield from commands(each, (*path, name))
        else:
            yield " ".join((*path, name)), each


COMMANDS = dict(commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_short_help_fits_a_screen_and_has_three_examples(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = in_process(capsys)
    short, full = run(*name.split(), "-h"), run(*name.split(), "--help")
    assert short.code == full.code == 0
    lines = short.out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    for example in EXAMPLES[name]:
        assert f"  {example}" in lines
        words = shlex.split(example) if example.startswith(f"specgen {name} ") else []
        for word in words:
            assert not word.startswith("-") or re.search(
                rf"^  (.*, )?{word}\b", short.out, re.MULTILINE
            )
    assert len(full.out.splitlines()) > len(lines)
    assert "<bool>" not in full.out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_short_help_says_whole_clauses_on_a_narrow_terminal(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = in_process(capsys)(*name.split(), "-h").out
    assert max(map(len, text.splitlines())) <= 80
    assert " ...\n" not in text


def test_the_short_help_shows_all_words_that_can_be_chosen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "--show accepted|all|none  " in in_process(capsys)("run", "-h").out


@pytest.mark.parametrize("name", ["models", "draft"])
def test_the_help_of_groups_shows_no_type_of_flags(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "<bool>" not in in_process(capsys)(name, "-h").out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("hi", "-c", "nv"), "'nv' is not a whole number"),
        (("hi", "--temp", "hot"), "'hot' is not a number"),
        (("hi", "-hf"), "see `specgen run --help`"),
        (("Tell", "a", "story"), "put a prompt of several words into quotes"),
    ],
)
def test_an_error_of_usage_shows_the_value_or_what_to_do(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = in_process(capsys)("run", *words)
    assert result.code == 2
    assert said in result.err


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_commands(name: str) -> None:
    for example in EXAMPLES[name]:
        words = shlex.split(example.split("specgen ", 1)[1].partition(" >")[0].rstrip(")"))
        path = next(path for path in COMMANDS if words[: len(path.split())] == path.split())
        command = COMMANDS[path]
        context = command.context_class(command, info_name=path)
        command.make_parser(context).parse_args(args=words[len(path.split()) :])


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_list_of_commands_says_what_each_command_says(name: str) -> None:
    text = command_line().commands[name].help or ""
    assert cli.COMMANDS[name] == text.partition("\n")[0]


def test_the_usual_options_exist() -> None:
    known = {name for each in COMMANDS.values() for option in each.params for name in option.opts}
    assert {*USUAL} - known == {"--help"}


def test_names_of_models_and_pairs_are_completed() -> None:
    assert "qwen2.5-coder-1.5b" in flags.model_names("qwen2.5-coder-1")
    assert all(name.startswith("qwen") for name in flags.pair_names("qwen"))
    assert flags.draft_names("ngr") == ["ngram"]
    for name in ("run", "chat", "bench"):
        options = {option.opts[0]: option for option in COMMANDS[name].params}
        for key in ("--target", "--draft", "--pair"):
            assert options[key]._custom_shell_complete is not None  # noqa: SLF001 - click's


def test_a_note_at_a_terminal_breaks_between_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    text = "the draft is not smaller than its target"
    Output().note(text)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    Output().note(text)
    lines = ["note: the draft is not smaller", "than its target"]
    assert capsys.readouterr().err.splitlines() == [f"note: {text}", *lines]
