"""Options, those of llama.cpp's programs, the help, and defaults in config.toml."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specgen.cli import app, flags
from specgen.cli.app import command_line
from specgen.cli.help_pages import examples
from specgen.cli.llama_cpp_options import translated
from specgen.errors import UsageError
from specgen.option_fields import LARGEST_FACTOR
from specgen.options import DraftOptions, GenerationOptions, SamplerOptions
from specgen.serve.formats.parsed_request import NO_DEFAULTS
from specgen.serve.formats.single_request import read_request
from tests.helpers.cli import Cli, Result, Specgen, complaint, events_of

#: Commands with a target and a draft.
DRAFTING = [
    "run",
    "chat",
    "fim",
    "batch",
    "serve",
    "verify",
    "tune",
    "bench",
    "race",
    "draft make",
    "draft learn",
]
#: Commands with a target alone.
ALONE = ["doctor", "draft find", "draft data", "draft forget"]


def beyond(field: dataclasses.Field[Any]) -> list[float]:
    """Values of an option that are too small or too large."""
    limits = [
        field.metadata[name] + step for name, step in LIMITS.items() if name in field.metadata
    ]
    return limits or [-10 * LARGEST_FACTOR, 10 * LARGEST_FACTOR]


LIMITS = {"min": -1, "max": 1}
#: An option, its name on the command line, and a value beyond its limits.
BEYOND = [
    (options, field.name, field.metadata["spellings"][0], value)
    for options in (SamplerOptions, GenerationOptions)
    for field in dataclasses.fields(options)
    if type(field.default) in (int, float) and field.metadata
    for value in beyond(field)
]


@pytest.mark.parametrize(("options", "name", "spelling", "value"), BEYOND)
def test_limits_and_messages_are_those_of_python_and_of_the_server(
    options: Any, name: str, spelling: str, value: float, specgen: Specgen
) -> None:
    with pytest.raises(UsageError) as in_python:
        options(**{name: value})
    assert in_python.value.message.startswith(f"{name}: give ")
    body = {"messages": [{"role": "user", "content": "x"}], name: value}
    with pytest.raises(UsageError) as in_a_request:
        read_request("chat", body, NO_DEFAULTS)
    assert in_a_request.value.message == in_python.value.message
    result = specgen("run", "hi", f"{spelling}={value}")
    assert f"error: {spelling}{in_python.value.message.removeprefix(name)}\n" in result.err


@pytest.mark.parametrize(
    ("command", "option"),
    [
        *((command, option) for command in [*DRAFTING, *ALONE] for option in ("-hf", "--hf-repo")),
        *((command, option) for command in DRAFTING for option in ("-hfd", "--hf-repo-draft")),
    ],
)
def test_every_command_takes_its_models_from_the_hub(command: str, option: str) -> None:
    arguments = [*command.split(), option, "nonsense"]
    if option in {"-hfd", "--hf-repo-draft"}:
        arguments += ["-m", "target.gguf"]
    if command == "fim":
        arguments += ["a.py:1:1"]
    if command == "batch":
        arguments += ["-", "-"]
    result = CliRunner().invoke(app.app, arguments)
    assert isinstance(result.exception, UsageError), result.output
    assert result.exception.message.startswith('"nonsense" does not name a model')


def test_models_on_the_hub_are_named_as_in_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    run = command_line().commands["run"]

    def read(*arguments: str) -> list[str]:
        return translated(run.context_class(run, info_name="run"), arguments)

    assert read("-hf", "a/b:Q8_0", "-hfd", "c/d", "-hft", "hf_secret", "x") == [
        *("-m", "hf:a/b:Q8_0", "-md", "hf:c/d", "x")
    ]
    assert os.environ["HF_TOKEN"] == "hf_secret"
    given = ("--hf-repo=a/b:Q8_0", "--hf-file", "x/y.gguf", "-md", "small.gguf", "-hfd", "c/d")
    assert read(*given) == ["-m", "hf:a/b/x/y.gguf", "-md", "small.gguf", "-md", "hf:c/d"]


# --- llama.cpp's options


@pytest.mark.parametrize(
    "words",
    [
        ("--jinja",),
        ("--color", "on", "-st"),
        ("--no-display-prompt", "--no-warmup", "--log-disable"),
    ],
)
def test_options_for_defaults_are_ignored_with_one_note(cli: Cli, words: tuple[str, ...]) -> None:
    plain = cli.run("-n", "3", "--no-stats", "hi")
    habit = cli.run("-n", "3", "--no-stats", *words, "hi")
    assert (habit.code, habit.out) == (0, plain.out)
    names = ", ".join(word for word in words if word.startswith("-"))
    assert habit.err == f"note: {names}: ignored, specgen does this by default\n"
    assert cli.run("-n", "3", "-q", *words, "hi").err == ""


@pytest.mark.parametrize(
    ("words", "equal"),
    [
        (("--spec-draft-n-max", "2"), ("--draft-max", "2")),
        (("--spec-draft-n-max=2",), ("--draft-max", "2")),
        (("-no-cnv",), ("--raw",)),
        (("--system-prompt", "Be brief."), ("--system", "Be brief.")),
        (("--system_prompt", "Be brief."), ("--system", "Be brief.")),
        (("--spec_draft_n_max=2",), ("--draft-max", "2")),
        (("--draft_max", "2"), ("--draft-max", "2")),
    ],
)
def test_an_option_with_an_equivalent_is_replaced_by_it(
    cli: Cli, words: tuple[str, ...], equal: tuple[str, ...]
) -> None:
    def answer(*options: str) -> tuple[Any, ...]:
        settings = ("-n", "20", "--policy", "fixed", "--json")
        events = events_of(cli.run(*settings, *options, "x", target="chat"))
        return events[0]["text"], events[-1]["text"], events[-1]["drafted_by_depth"]

    assert answer(*words) == answer(*equal) != answer()


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        ("run", ("-ub", "512"), "-b N"),
        ("run", ("-cnv",), "specgen chat"),
        ("run", ("-i",), "specgen chat"),
        ("run", ("-e",), r"$'one\ntwo'"),
        ("run", ("--draft", "8"), "--draft-max 8"),
        ("run", ("-gan", "2"), "specgen run --help"),
        ("run", ("--mlock",), "--weights-memory"),
        ("run", ("-ins",), "specgen chat"),
        ("run", ("-cd", "4096"), "leave it out"),
        ("chat", ("-p", "Be brief."), "--system TEXT"),
        ("run", ("--lora", "x.gguf"), "merge the adapter"),
        ("run", ("-mmu", "https://example.org"), "text only"),
        ("run", ("--rope-scaling", "yarn"), "model file"),
        ("run", ("--numa", "distribute"), "numactl"),
        ("run", ("-fit", "on"), "-ngl N"),
        ("run", ("-Crb", "0-3"), "taskset"),
        ("run", ("--mirostat", "2"), "--min-p"),
        ("run", ("--port", "8080"), "specgen serve"),
        ("chat", ("-st",), "specgen run"),
        ("fim", ("-no-cnv",), "specgen run"),
        ("serve", ("--api-key", "x"), "--api-key-file"),
    ],
)
def test_other_options_are_refused_with_what_to_use(
    specgen: Specgen, command: str, words: tuple[str, ...], said: str
) -> None:
    message = complaint(specgen(command, *words), 2)
    assert words[0] in message
    assert said in message


@pytest.mark.parametrize("option", ["-ngl", "-ngld", "--spec-draft-ngl"])
def test_all_is_accepted_as_a_number_of_layers(cli: Cli, option: str) -> None:
    settings = ("-n", "3", "--no-stats", "hi")
    assert cli.run(option, "all", *settings).out == cli.run(*settings).out
    for value, said in (("auto", "does not measure what fits"), ("some", "give a whole number")):
        message = complaint(cli.run(option, value, *settings), 2)
        assert f"'{value}'" in message
        assert said in message


def test_values_and_prompts_are_not_taken_for_options(cli: Cli, tmp_path: Path) -> None:
    for words in (("-p", "--jinja"), ("--", "--jinja"), ("--stop", "-ub", "hi")):
        result = cli.run("-n", "2", "--no-stats", *words)
        assert (result.code, result.err) == (0, "")


def test_a_commands_own_option_wins_over_llama_cpps(specgen: Specgen, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("a\n")
    missing = tmp_path / "missing.gguf"
    result = specgen("fim", f"{tmp_path / 'x.py'}:1", "-i", "-m", missing)
    assert "is an option of llama.cpp" not in result.err
    assert result.code == 4


# --- the help, its examples, and what the shell completes


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield all commands, with the words that call them."""
    root: Any = group or command_line()
    for name, each in root.commands.items():
        if hasattr(each, "commands"):
            yield from commands(each, (*path, name))
        else:
            yield " ".join((*path, name)), each


COMMANDS = dict(commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_ends_with_examples_that_are_commands(
    name: str, specgen: Specgen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    help_ = specgen(*name.split(), "-h")
    assert help_ == specgen(*name.split(), "--help")
    assert help_.code == 0
    assert "<bool>" not in help_.out
    lines = [line.strip() for line in help_.out.splitlines() if line.strip()]
    own = examples(name.rsplit(maxsplit=1)[-1])
    assert own
    assert lines[-len(own) :] == own
    for example in own:
        check_arguments(example)


def check_arguments(example: str) -> None:
    """Check that the command of an example has all its options."""
    words = shlex.split(example.split("specgen ", 1)[1].rstrip(")"))
    path = next(path for path in COMMANDS if words[: len(path.split())] == path.split())
    command = COMMANDS[path]
    context = command.context_class(command, info_name=path)
    given = translated(context, words[len(path.split()) :])
    command.make_parser(context).parse_args(args=given)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_has_two_options_of_the_same_name(name: str) -> None:
    names: list[str] = []
    for option in COMMANDS[name].params:
        names += [*option.opts, *option.secondary_opts]
    assert sorted(set(names)) == sorted(names)


def _joined(lines: list[str]) -> str:
    """Return lines of the help as one, with single spaces."""
    return " ".join(" ".join(lines).split())


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_short_help_fits_a_screen_and_the_long_one_shows_full_names(
    specgen: Specgen, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for name in ("run", "serve"):
        lines = specgen(name, "--help").out.splitlines()
        assert len(lines) <= (50 if columns >= 80 else 70)
        assert f"`specgen {name} --help-all` shows all " in "".join(lines)
        assert all(len(line) <= columns for line in lines if not line.startswith("  specgen "))
        assert "Temperature; 0 always takes the most likely token (default: 0.0)" in _joined(lines)
        assert "(default: what `specgen tune` found best)" in _joined(lines)
        whole = specgen(name, "--help-all").out
        names = [each for option in COMMANDS[name].params for each in option.opts if "-" in each]
        assert len(names) > 80
        assert all(re.search(rf"{re.escape(each)}\b", whole) for each in names)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "hi", "-c", "nv"), "--ctx-size: give a whole number, not 'nv'"),
        (("run", "hi", "--temp", "hot"), "--temp: give a number, not 'hot'"),
        (("run", "hi", "-hf"), "give USER/REPO"),
        (("run", "Tell", "a", "story"), "put quotes around a prompt of several words"),
        (("pull", "qwen2.5-coder-1.5b"), "it is `specgen models pull` here"),
        (("-m", "model.gguf", "-p", "hi"), "specgen run -m model.gguf"),
        (("run", "hi", "--mirror_stat", "2"), "No such option: --mirror_stat\n"),
        (("help",), "it is `specgen --help` here"),
        (("Why is it?",), "a command comes before the prompt: `specgen run "),
        (("What's up?",), "No such command 'What's up?'\n"),
        (("srve",), "No such command 'srve' (did you mean serve?)\n"),
        (("models", "lst"), "No such command 'lst' (did you mean list?)\n"),
        (("run", "hi", "--temperatur", "1"), "--temperatur (did you mean --temperature?)\n"),
    ],
)
def test_a_usage_error_shows_the_value_or_what_to_do(
    words: tuple[str, ...], said: str, specgen: Specgen
) -> None:
    result = specgen(*words)
    assert result.code == 2
    assert said in result.err


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("run", "-f", ""), "--file"),
        (("run", "hi", "--html="), "--html"),
        (("run", "hi", "--lookup-file", "notes.txt", "--lookup-file", ""), "--lookup-file"),
        (("run", "hi", "--grammar-file", ""), "--grammar-file"),
        (("chat", "--file", ""), "--file"),
        (("fim", "x.py:1", "--context-file", ""), "--context-file"),
        (("batch", "", "answers.jsonl"), "IN"),
        (("race", "hi", "--svg", ""), "--svg"),
        (("bench", "--prompts", ""), "--prompts"),
        (("serve", "--api-key-file", ""), "--api-key-file"),
        (("draft", "find", "-m", "x.gguf", ""), "FILES"),
        (("models", "quantize", "x.gguf", ""), "OUTPUT"),
    ],
)
def test_an_empty_path_is_refused(words: tuple[str, ...], name: str, specgen: Specgen) -> None:
    message = complaint(specgen(*words), 2)
    assert re.fullmatch(rf"error: {name}(\[\d\])?: the path is empty\n", message)


def test_an_empty_path_is_refused_in_python() -> None:
    with pytest.raises(UsageError, match=re.escape("lookup_files[0]: the path is empty")):
        DraftOptions(lookup_files="")  # type: ignore[arg-type]


def test_a_misspelt_file_names_the_near_one(
    specgen: Specgen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "coder.gguf").touch()
    monkeypatch.chdir(tmp_path)
    for words in (("-m", "coder.ggfu", "hi"), ("coder.ggfu", "hi")):
        assert "did you mean coder.gguf?" in specgen("run", *words).err


def test_the_list_of_commands_has_the_first_line_of_each_commands_help() -> None:
    texts = {name: each.help or "" for name, each in command_line().commands.items()}
    assert {name: text.partition("\n")[0] for name, text in texts.items()} == app.COMMANDS


def test_names_of_models_and_pairs_are_completed() -> None:
    assert "qwen2.5-coder-1.5b" in flags.model_names("qwen2.5-coder-1")
    assert "qwen2.5-coder-smollm2" in flags.pair_names("qwen")
    assert all(name.startswith("qwen") for name in flags.pair_names("qwen"))
    assert flags.draft_names("ngr") == ["ngram"]
    for name in ("run", "chat"):
        options = {option.opts[0]: option for option in COMMANDS[name].params}
        for key in ("--target", "--draft", "--pair"):
            assert options[key]._custom_shell_complete is not None  # noqa: SLF001 - click's


# --- the user's defaults in config.toml


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the path of the file of defaults, in a temporary folder."""
    monkeypatch.setenv("SPECGEN_CONFIG", str(tmp_path))
    return tmp_path / "config.toml"


def in_force(result: Result) -> dict[str, str]:
    """Return the values that are not specgen's own defaults."""
    assert result.code == 0, result.err
    lines = [line for line in result.out.splitlines() if not line.startswith("#")]
    return dict(line.split(" = ", 1) for line in lines)


def test_each_value_is_shown_with_its_source(
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


def test_numbers_are_shown_without_quotes(
    specgen: Specgen, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECGEN_POLICY")
    assert "# gpu-layers = -1  # default" in specgen("config").out
    file.write_text('gpu-layers = 20\ngpu-layers-draft = "all"\nsystem = "7"\n')
    shown = specgen("config")
    assert in_force(shown) == {
        "gpu-layers": "20  # file",
        "gpu-layers-draft": '"all"  # file',
        "system": '"7"  # file',
    }
    file.write_text(shown.out)
    assert in_force(specgen("config")) == in_force(shown)


def test_the_error_for_a_wrong_value_in_the_environment_names_the_variable(
    specgen: Specgen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECGEN_POLICY", "fast")
    assert "error: SPECGEN_POLICY: 'fast' is not one of" in complaint(specgen("run", "a cat"), 2)
    refusal = complaint(specgen("run", "--policy", "slow", "a cat"), 2)
    assert "error: --policy: 'slow' is not one of" in refusal


def test_the_output_of_config_is_a_valid_configuration_file(specgen: Specgen, file: Path) -> None:
    file.write_text('samplers = "top_k;temperature"\nlogit-bias = ["5+1"]\nstats = false\n')
    shown = specgen("config")
    file.write_text(shown.out)
    assert in_force(specgen("config")) == in_force(shown)
    assert "samplers" in in_force(shown)


def test_a_draft_in_the_file_is_only_for_its_own_target(specgen: Specgen, file: Path) -> None:
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
    ("setting", "message", "code"),
    [
        ('target = "missing/a.gguf"', "target: missing/a.gguf: no such file", 4),
        ('draft = "no-such-model"', 'draft: there is no model "no-such-model"', 6),
        ('pair = "no-such-pair"', 'pair: there is no pair "no-such-pair"', 6),
    ],
)
def test_the_error_for_a_missing_model_in_the_file_names_the_file(
    specgen: Specgen, file: Path, target: Path, setting: str, message: str, code: int
) -> None:
    file.write_text(setting)
    models = [] if "draft" not in setting else ["-m", str(target)]
    assert complaint(specgen("run", *models, "a"), code).startswith(f"error: {file}: {message}")
    if not models:
        given = complaint(specgen("run", "-m", "missing/b.gguf", "a"), 4)
        assert given.startswith("error: missing/b.gguf: no such file")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tmp = 1", "tmp: there is no such key"),
        ("temp = 'x'", "temp: give a number, not 'x'"),
        ("temp = -1", "temp: give 0 or more, not -1"),
        ("top-k = 1.5", "top-k: give a whole number, not '1.5'"),
        ("temp = true", "temp: give a number, not 'true'"),
        ("ngrams = 2.5", "ngrams: give true or false, not '2.5'"),
        ("temp = [1, 2]", "temp: give one value, not 1, 2"),
        ("policy = 'x'", "policy: 'x' is not one of"),
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
        assert "there is no such key (did you mean temp?)" in found
    assert specgen("config", "--help").code == 0
