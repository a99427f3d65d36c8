"""The plugin of `llm`, by the real `llm`: its command line and its Python interface."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llm
import llm.plugins
import pytest
from click.testing import CliRunner, Result
from llm.cli import cli as llm_cli
from llm.parts import ToolResultPart

import specgen
from specgen.models.files import memory_file
from specgen.models.registry import load_registry, user_registry_file
from specgen.options import DraftOptions, SamplerOptions
from specgen.serve.adapters.llm import AnswerError
from specgen.session.prompts.template import Message
from tests.helpers.common import ROOT
from tests.helpers.fetch import store
from tests.tiny import CHATML_TEMPLATE, TinyConfig, write_tiny_model

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROMPT = "the cat is in the"
N = 16
YES = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}

Ask = Callable[..., Result]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and a draft that have a chat template, and a model that has none."""
    folder = tmp_path_factory.mktemp("llm")
    target = TinyConfig(logit_scale=6.0, chat_template=CHATML_TEMPLATE, n_ctx_train=2048)
    write_tiny_model(folder / "target.gguf", target)
    write_tiny_model(folder / "draft.gguf", target.draft(0.02))
    write_tiny_model(folder / "base.gguf", TinyConfig(logit_scale=6.0, n_ctx_train=2048))
    return folder


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The module that the package's entry point names, registered with `llm`; nothing is loaded.
    Drafts are of a fixed length: what costs decide depends on the machine."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm"))
    drafting = DraftOptions(policy="fixed", max_tokens=4, p_min=0.0)
    monkeypatch.setattr(specgen, "load", functools.partial(specgen.load, drafting=drafting))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module = importlib.import_module(project["entry-points"]["llm"]["specgen"])
    module.tell_once.cache_clear()
    llm.plugins.load_plugins()  # type: ignore[no-untyped-call]
    if not llm.plugins.pm.is_registered(module):  # it is if this package was installed since
        llm.plugins.pm.register(module)
    yield module
    while module.loaded_models:
        module.loaded_models.popitem()[1].close()


@pytest.fixture
def ask(plugin: Any) -> Ask:
    """`llm` on the command line."""

    def run(*arguments: str, **options: Any) -> Result:
        return CliRunner().invoke(llm_cli, arguments, **options)

    return run


def of_files(files: Path, draft: str | None = "draft.gguf", n: int = N) -> list[str]:
    """Arguments that ask the tiny models."""
    found = ["-m", "specgen", "-o", "target", str(files / "target.gguf")]
    if draft is not None:
        found += ["-o", "draft", str(files / draft) if draft.endswith(".gguf") else draft]
    return [*found, "-o", "max_tokens", str(n)]


def told(result: Result) -> str:
    """What an answer says."""
    assert result.exit_code == 0, result.stderr
    assert result.stdout.endswith("\n")
    return result.stdout[:-1]


@pytest.fixture
def expected(files: Path) -> Iterator[specgen.Model]:
    """The target alone, from Python."""
    with specgen.load(files / "target.gguf", "none", n_ctx=512) as model:
        yield model


def write_registry(files: Path, *, default_pair: str = "known-pair") -> None:
    """The user's own list: a model that is on the disk, one that cannot be had, a pair of each."""
    tables = ""
    for name, like in (("known", "target.gguf"), ("absent", "draft.gguf")):
        size = (files / like).stat().st_size
        tables += f"""
            [[models]]
            name = "{name}"
            file = "{name}.gguf"
            size_bytes = {size}
            sha256 = "{name[0] * 64}"
            licence = "MIT"
            parameters = "1"
            quantisation = "F32"
            description = "tiny"
            [[pairs]]
            name = "{name}-pair"
            target = "{name}"
            draft = "ngram"
            description = "tiny"
            """.replace("k" * 64, "b" * 64)
    file = user_registry_file()
    file.parent.mkdir(parents=True)
    file.write_text(f'default_pair = "{default_pair}"\n{tables}', encoding="utf-8")
    store(load_registry().model("known"), (files / "target.gguf").read_bytes())


# --- which models there are ---------------------------------------------------------------------


def test_there_is_a_model_for_each_name_that_can_answer(plugin: Any, files: Path) -> None:
    write_registry(files)
    names = {model.model_id for model in llm.get_models() if model.model_id.startswith("specgen")}
    pairs = {f"specgen/{pair}" for pair in load_registry().pairs}
    assert {"specgen/known-pair", "specgen/absent-pair", "specgen/qwen2.5-coder"} < pairs
    assert names == {"specgen", "specgen/known", *pairs}


@pytest.mark.parametrize("name", ["specgen", "specgen/known", "specgen/known-pair"])
def test_a_name_is_enough(ask: Ask, files: Path, expected: specgen.Model, name: str) -> None:
    """Without a target, the default pair answers."""
    write_registry(files)
    text = expected.generate(PROMPT, max_tokens=N).text
    assert told(ask(PROMPT, "-m", name, "-o", "max_tokens", str(N))) == text


def test_what_cannot_be_fetched_is_one_line(ask: Ask, files: Path) -> None:
    write_registry(files, default_pair="absent-pair")
    for name in ("specgen", "specgen/absent-pair"):
        result = ask(PROMPT, "-m", name)
        assert result.exit_code == 1
        assert "models.toml does not say where to get absent" in result.stderr


def test_a_broken_list_of_models_harms_no_other_model(ask: Ask, files: Path) -> None:
    file = user_registry_file()
    file.parent.mkdir(parents=True)
    file.write_text("this is no TOML", encoding="utf-8")
    result = ask("models", "list")
    assert result.exit_code == 0
    assert "OpenAI" in result.stdout
    assert result.stderr.count("is not TOML") == 1
    assert result.stderr.count("\n") == 1
    assert "is not TOML" in ask(PROMPT, *of_files(files)).stderr


# --- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["draft.gguf", "ngram", "none", None])
def test_the_answer_is_that_of_the_target_alone(
    ask: Ask, files: Path, expected: specgen.Model, draft: str | None
) -> None:
    text = expected.generate(PROMPT, max_tokens=N).text
    for more in ([], ["--no-stream"]):
        result = ask(PROMPT, *of_files(files, draft), *more)
        assert told(result) == text
        assert result.stderr == ""


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (
            {"temperature": 2.5, "seed": 3, "top_k": 4, "repeat_penalty": 1.9},
            {"sampling": SamplerOptions(temperature=2.5, seed=3, top_k=4, repeat_penalty=1.9)},
        ),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"stop": "an"}, {"stop": ["an"]}),
        ({"grammar": 'root ::= "yes" | "no"'}, {"grammar": 'root ::= "yes" | "no"'}),
    ],
)
def test_every_option_counts(
    ask: Ask, files: Path, expected: specgen.Model, options: dict[str, Any], asked: dict[str, Any]
) -> None:
    plain = expected.generate("a", max_tokens=40).text
    text = expected.generate("a", **{"max_tokens": 40, **asked}).text
    assert text != plain
    arguments = [each for name, value in options.items() for each in ("-o", name, str(value))]
    # With n-grams a seed gives the text of plain decoding.
    assert told(ask("a", *of_files(files, "ngram", n=40), *arguments)) == text


def test_usage_tells_of_drafts(plugin: Any, files: Path) -> None:
    target, draft = files / "target.gguf", files / "draft.gguf"
    with specgen.load(target, draft, n_ctx=512) as model:
        finished = model.generate(PROMPT, max_tokens=N).finished
    assert finished is not None
    assert finished.n_accepted > 0
    asked = llm.get_model("specgen")
    response = asked.prompt(PROMPT, target=str(target), draft=str(draft), max_tokens=N)
    usage = response.usage()
    assert (usage.input, usage.output) == (finished.n_prompt_tokens, N)
    assert usage.details == {
        "n_cached": 0,
        "draft": "draft.gguf",
        "n_drafted": finished.n_drafted,
        "n_accepted": finished.n_accepted,
    }
    assert response.resolved_model == "target.gguf"


def test_the_log_has_the_seed_that_was_picked(ask: Ask, files: Path) -> None:
    asked = [PROMPT, *of_files(files), "-o", "temperature", "1.5"]
    first = told(ask(*asked))
    (logged,) = json.loads(ask("logs", "--json", "-n", "1").stdout)
    assert logged["response_json"]["finish_reason"] == "length"
    assert told(ask(*asked, "-o", "seed", str(logged["response_json"]["seed"]))) == first
    assert '"draft": "draft.gguf"' in logged["token_details"]


# --- conversations -------------------------------------------------------------------------------


def test_a_conversation_goes_on(plugin: Any, files: Path, expected: specgen.Model) -> None:
    conversation = llm.get_model("specgen").conversation()
    options: dict[str, Any] = {"target": str(files / "target.gguf"), "max_tokens": N}
    first = conversation.prompt("hello", system="Be brief.", **options)
    messages = [Message("system", "Be brief."), Message("user", "hello")]
    pieces = list(first)
    assert len(pieces) > 3
    assert "".join(pieces) == expected.generate(messages, max_tokens=N).text
    messages += [Message("assistant", first.text()), Message("user", "and then?")]
    second = conversation.prompt("and then?", **options)
    assert second.text() == expected.generate(messages, max_tokens=N).text
    details = second.usage().details
    assert details is not None
    assert details["n_cached"] > 20


def test_a_schema_is_followed(ask: Ask, files: Path) -> None:
    found = ask("Well?", *of_files(files), "--schema", json.dumps(YES))
    assert set(json.loads(told(found))) == {"yes"}


def test_a_model_without_a_template_continues_a_prompt(plugin: Any, files: Path) -> None:
    base = files / "base.gguf"
    with specgen.load(base, "none", n_ctx=512) as model:
        expected = model.generate(PROMPT, chat=False, max_tokens=N).text
    conversation = llm.get_model("specgen").conversation()
    options: dict[str, Any] = {"target": str(base), "max_tokens": N}
    assert conversation.prompt(PROMPT, **options).text() == expected
    with pytest.raises(AnswerError, match="a conversation needs a chat template"):
        conversation.prompt("and then?", **options).text()


# --- what stays loaded ---------------------------------------------------------------------------


def test_a_model_is_loaded_once(
    plugin: Any, files: Path, expected: specgen.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if several threads ask for it at once, and not before it is asked."""
    loads: list[tuple[Any, ...]] = []
    load = specgen.load

    def counting(*arguments: Any, **options: Any) -> specgen.Model:
        loads.append(arguments)
        return load(*arguments, **options)

    monkeypatch.setattr(specgen, "load", counting)
    options: dict[str, Any] = {"target": str(files / "target.gguf"), "max_tokens": N}
    prompts = ["a", "b", "the cat", "hello"]
    texts: dict[str, str] = {}

    def answer(prompt: str) -> None:
        texts[prompt] = llm.get_model("specgen").prompt(prompt, **options).text()

    threads = [threading.Thread(target=answer, args=(prompt,)) for prompt in prompts]
    assert loads == []
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {prompt: expected.generate(prompt, max_tokens=N).text for prompt in prompts}
    assert len(loads) == 1
    llm.get_model("specgen").prompt("a", n_ctx=300, **options).text()
    assert len(loads) == 2


def test_an_answer_that_nobody_reads_is_cancelled(plugin: Any, files: Path) -> None:
    model = llm.get_model("specgen")
    options: dict[str, Any] = {"target": str(files / "target.gguf"), "max_tokens": 1000}
    pieces = iter(model.prompt(PROMPT, **options))
    next(pieces)
    (loaded,) = plugin.loaded_models.values()
    assert not loaded.engine.is_idle
    pieces.close()  # type: ignore[attr-defined]
    loaded.engine.step()
    assert loaded.engine.is_idle


def test_a_process_ends_cleanly_and_keeps_what_was_learnt(files: Path, tmp_path: Path) -> None:
    code = (
        "import sys, llm.plugins, specgen.serve.adapters.llm as plugin\n"
        "llm.plugins.load_plugins()\n"
        "if not llm.plugins.pm.is_registered(plugin):\n"
        "    llm.plugins.pm.register(plugin)\n"
        "heavy = {'llama_cpp', 'huggingface_hub', 'jinja2', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from llm.cli import cli\n"
        "cli()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, PROMPT, *of_files(files)],
        env={**os.environ, "LLM_USER_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) > 4
    assert memory_file().exists()


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-o", "target", "no.gguf"], "no.gguf: no such file"),
        (["-o", "grammar", "x"], "the grammar, line 1"),
        (
            ["-o", "n_ctx", "8"],
            "the prompt has 28 tokens, but the context has 8 (use a context of 29",
        ),
        (["-o", "grammar", 'root ::= "a"', "--schema", json.dumps(YES)], "exclude each other"),
        (["-o", "temperature", "nan"], "temperature"),
        (["-o", "top_p", "2"], "top_p"),
        (["-o", "nothing", "1"], "nothing"),
    ],
)
def test_an_error_is_said_clearly(ask: Ask, files: Path, arguments: list[str], said: str) -> None:
    result = ask(PROMPT, *of_files(files), *arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) <= 2
    if "x" in arguments:  # `llm chat` ends with one line too
        result = ask("chat", *of_files(files), *arguments, input="hello\n")
        assert isinstance(result.exception, SystemExit)
        assert said in result.stderr


def test_what_is_no_text_is_refused(plugin: Any, files: Path) -> None:
    model = llm.get_model("specgen")
    options: dict[str, Any] = {"target": str(files / "target.gguf")}
    with pytest.raises(AnswerError, match="the prompt is empty"):
        model.prompt("", **options).text()
    result = ToolResultPart(name="clock", output="noon")
    for role in ("user", "tool"):
        with pytest.raises(AnswerError, match="only text"):
            model.prompt(messages=[llm.Message(role, [result])], **options).text()
    with pytest.raises(ValueError, match="does not support tools"):
        model.prompt("hello", tools=[llm.Tool(name="clock")], **options).text()
