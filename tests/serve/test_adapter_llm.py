"""The plugin for `llm` in docs/examples, with the real `llm`: command line and Python interface."""

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
from unittest.mock import Mock

import pytest
from click.testing import CliRunner, Result

# Not the plugins that happen to be installed; `llm` reads this when it is imported.
os.environ.setdefault("LLM_LOAD_PLUGINS", "")

import llm
import llm.plugins
from llm.cli import cli as llm_cli

import specgen
from specgen.models.registry import load_registry
from specgen.options import DraftOptions, SamplerOptions
from specgen.session.prompts.template import Message
from specgen.system.folders import measurements_file
from tests.helpers.cli import ended
from tests.helpers.common import ROOT
from tests.helpers.fetch import small_model, store, write_registry

EXAMPLE = ROOT / "docs" / "examples" / "llm-specgen"
PROMPT = "the cat is in the"
N = 16
YES = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}

Ask = Callable[..., Result]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The plugin's module, registered with `llm`; nothing is loaded. Drafts are of a fixed length:
    what costs decide depends on the machine.
    """
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm"))
    drafting = DraftOptions(policy="fixed", max_tokens=4, p_min=0.0)
    monkeypatch.setattr(specgen, "load", functools.partial(specgen.load, drafting=drafting))
    monkeypatch.syspath_prepend(EXAMPLE)
    module: Any = importlib.import_module("llm_specgen")
    module.tell_once.cache_clear()
    if not llm.plugins.pm.is_registered(module):
        llm.plugins.pm.register(module)
    yield module
    while module.loaded_models:
        module.loaded_models.popitem()[1].close()


@pytest.fixture
def ask(plugin: Any) -> Ask:
    """`llm` on the command line."""
    return lambda *arguments, **options: CliRunner().invoke(llm_cli, arguments, **options)


def of_files(files: Path, draft: str = "draft.gguf", n: int = N) -> list[str]:
    """Arguments that ask the tiny models."""
    draft = str(files / draft) if draft.endswith(".gguf") else draft
    return [
        *("-m", "specgen", "-o", "target", str(files / "target.gguf")),
        *("-o", "draft", draft, "-o", "max_tokens", str(n)),
    ]


def told(result: Result) -> str:
    """The text of an answer."""
    assert (result.exit_code, result.stderr, result.stdout[-1:]) == (0, "", "\n")
    return result.stdout[:-1]


@pytest.fixture
def expected(chat_models: Path) -> Iterator[specgen.Model]:
    """The target alone, from Python."""
    with specgen.load(chat_models / "target.gguf", "none", n_ctx=512) as model:
        yield model


def test_there_is_a_model_for_each_name_that_can_answer(
    ask: Ask, chat_models: Path, expected: specgen.Model, tmp_path: Path, monkeypatch: Any
) -> None:
    content = (chat_models / "target.gguf").read_bytes()
    monkeypatch.setenv("SPECGEN_CONFIG", str(tmp_path / "config"))
    write_registry(tmp_path, small_model(content))
    pairs = {f"specgen/{pair}" for pair in load_registry().pairs}
    assert {"specgen/tiny-pair", "specgen/qwen2.5-coder"} < pairs

    def names() -> set[str]:
        return {each.model_id for each in llm.get_models() if each.model_id.startswith("specgen")}

    assert names() == {"specgen", *pairs}
    store(load_registry().model("tiny"), content)
    assert names() == {"specgen", "specgen/tiny", *pairs}
    text = expected.generate(PROMPT, max_tokens=N).text
    for name in ("specgen/tiny", "specgen/tiny-pair"):
        assert told(ask(PROMPT, "-m", name, "-o", "max_tokens", str(N))) == text


def test_every_option_counts(ask: Ask, chat_models: Path, expected: specgen.Model) -> None:
    sampling = {"temperature": 2.5, "seed": 3, "top_k": 4, "repeat_penalty": 1.9}
    grammar = 'root ::= "yes" | "no"'
    plain = expected.generate("a", max_tokens=40).text
    for draft in ("draft.gguf", "ngram", "none"):
        assert told(ask("a", *of_files(chat_models, draft, n=40))) == plain
    assert told(ask("a", *of_files(chat_models, n=40), "--no-stream")) == plain
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (sampling, {"sampling": SamplerOptions(**sampling)}),  # type: ignore[arg-type]
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"stop": plain[4:7]}, {"stop": [plain[4:7]]}),
        ({"grammar": grammar}, {"grammar": grammar}),
    ]
    for options, asked in cases:
        text = expected.generate("a", **{"max_tokens": 40, **asked}).text
        assert text != plain
        arguments = [each for name, value in options.items() for each in ("-o", name, str(value))]
        # With n-grams a seed gives the text of plain decoding.
        assert told(ask("a", *of_files(chat_models, "ngram", n=40), *arguments)) == text
    found = ask("Well?", *of_files(chat_models), "--schema", json.dumps(YES))
    assert set(json.loads(told(found))) == {"yes"}


def test_the_log_has_the_seed_that_was_picked_and_what_was_drafted(
    ask: Ask, chat_models: Path
) -> None:
    asked = [PROMPT, *of_files(chat_models), "-o", "temperature", "1.5"]
    first = told(ask(*asked))
    (logged,) = json.loads(ask("logs", "--json", "-n", "1").stdout)
    details = json.loads(logged["token_details"])
    assert set(details) == {"n_cached", "draft", "n_drafted", "n_accepted"}
    assert (details["draft"], details["n_drafted"] > 0) == ("draft.gguf", True)
    assert (logged["resolved_model"], logged["output_tokens"]) == ("target.gguf", N)
    assert logged["response_json"]["finish_reason"] == "length"
    assert told(ask(*asked, "-o", "seed", str(logged["response_json"]["seed"]))) == first


def test_a_conversation_is_continued(
    plugin: Any, chat_models: Path, expected: specgen.Model, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = llm.get_model("specgen").conversation()
    options: dict[str, Any] = {"target": str(chat_models / "target.gguf"), "max_tokens": N}
    first = conversation.prompt("hello", system="Be brief.", **options)
    messages = [Message("system", "Be brief."), Message("user", "hello")]
    pieces = list(first)
    assert len(pieces) > 3
    assert "".join(pieces) == expected.generate(messages, max_tokens=N).text
    messages += [Message("assistant", first.text()), Message("user", "and then?")]
    second = conversation.prompt("and then?", **options)
    assert second.text() == expected.generate(messages, max_tokens=N).text
    assert (second.usage().details or {})["n_cached"] > 20
    # A model without a template continues a single prompt.
    options["target"] = str(chat_models / "plain.gguf")
    conversation = llm.get_model("specgen").conversation()
    assert conversation.prompt(PROMPT, **options).text()
    assert "chatml" not in capsys.readouterr().err
    assert conversation.prompt("and then?", **options).text()
    assert "plain.gguf has no default one: chatml is used" in capsys.readouterr().err


def test_a_model_is_loaded_once(
    plugin: Any, chat_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if several threads need it at once, and not before the first request."""
    loads = Mock(side_effect=specgen.load)
    monkeypatch.setattr(specgen, "load", loads)
    options: dict[str, Any] = {"target": str(chat_models / "target.gguf"), "max_tokens": N}

    def answer(prompt: str) -> None:
        llm.get_model("specgen").prompt(prompt, **options).text()

    threads = [threading.Thread(target=answer, args=(prompt,)) for prompt in ("a", "the cat")]
    loads.assert_not_called()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loads.assert_called_once()
    # An answer that nobody reads is cancelled.
    pieces = iter(llm.get_model("specgen").prompt(PROMPT, **options | {"max_tokens": 1000}))
    next(pieces)
    (loaded,) = plugin.loaded_models.values()
    assert not loaded.engine.is_idle
    pieces.close()  # type: ignore[attr-defined]
    loaded.engine.step()
    assert loaded.engine.is_idle


def test_installed_it_ends_cleanly_and_keeps_what_was_learnt(
    chat_models: Path, tmp_path: Path
) -> None:
    packages = tmp_path / "packages"
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run([sys.executable, *install, "--target", packages, EXAMPLE], check=True)
    code = (
        "import sys, llm.plugins\n"
        "llm.plugins.load_plugins()\n"
        "assert 'llm_specgen' in sys.modules\n"
        "heavy = {'llama_cpp', 'huggingface_hub', 'jinja2', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from llm.cli import cli\n"
        "cli()\n"
    )
    environment = {
        "LLM_USER_PATH": str(tmp_path),
        "LLM_LOAD_PLUGINS": "llm-specgen",
        "PYTHONPATH": os.pathsep.join([str(packages), str(ROOT)]),
    }
    done = ended(PROMPT, *of_files(chat_models), code=code, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) > 4
    assert measurements_file().exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-o", "target", "no.gguf"], "no.gguf: no such file"),
        (["-o", "grammar", "x"], "the grammar, line 1"),
        (["-o", "n_ctx", "8"], "but the context has 8 (use a context of "),
        (["-o", "temperature", "nan"], "temperature"),
        (["-o", "nothing", "1"], "nothing"),
    ],
)
def test_an_error_message_is_clear(
    ask: Ask, chat_models: Path, arguments: list[str], said: str
) -> None:
    result = ask(PROMPT, *of_files(chat_models), *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) <= 2
    if "x" in arguments:  # `llm chat` ends with one line too
        result = ask("chat", *of_files(chat_models), *arguments, input="hello\n")
        assert isinstance(result.exception, SystemExit)
        assert said in result.stderr
