"""The help, its examples, and what the shell completes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from specgen import cli
from specgen.cli import command_line, flags
from specgen.cli.command import examples
from specgen.cli.llama_cpp_options import translated
from specgen.cli.output import Output
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
def test_the_help_ends_with_examples_that_are_commands(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    run = in_process(capsys)
    help_ = run(*name.split(), "-h")
    assert help_ == run(*name.split(), "--help")
    assert help_.code == 0
    assert "<bool>" not in help_.out
    lines = [line.strip() for line in help_.out.splitlines() if line.strip()]
    own = examples(name.rsplit(maxsplit=1)[-1])
    assert own
    assert lines[-len(own) :] == own
    for example in own:
        words = shlex.split(example.split("specgen ", 1)[1].rstrip(")"))
        path = next(path for path in COMMANDS if words[: len(path.split())] == path.split())
        context = COMMANDS[path].context_class(COMMANDS[path], info_name=path)
        given = translated(context, words[len(path.split()) :])
        COMMANDS[path].make_parser(context).parse_args(args=given)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("hi", "-c", "nv"), "'nv' is not a whole number"),
        (("hi", "--temp", "hot"), "'hot' is not a number"),
        (("hi", "-hf"), "give USER/REPO"),
        (("Tell", "a", "story"), "put a prompt of several words into quotes"),
    ],
)
def test_an_error_of_usage_shows_the_value_or_what_to_do(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = in_process(capsys)("run", *words)
    assert result.code == 2
    assert said in result.err


def test_the_list_of_commands_says_what_each_command_says() -> None:
    texts = {name: each.help or "" for name, each in command_line().commands.items()}
    assert {name: text.partition("\n")[0] for name, text in texts.items()} == cli.COMMANDS


def test_names_of_models_and_pairs_are_completed() -> None:
    assert "qwen2.5-coder-1.5b" in flags.model_names("qwen2.5-coder-1")
    assert all(name.startswith("qwen") for name in flags.pair_names("qwen"))
    assert flags.draft_names("ngr") == ["ngram"]
    for name in ("run", "chat"):
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
