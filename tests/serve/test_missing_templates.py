"""Models without a chat template, with only the one for tools, or with a syntax error in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import specgen as api
from specgen.errors import UsageError
from tests.helpers.cli import Specgen, complaint
from tests.helpers.server import Running, tiny_server
from tests.serve.test_server_tools import TEMPLATE, tool
from tests.tiny import CHATML_TEMPLATE, TinyConfig, write_tiny_model

TURNS: list[dict[str, Any]] = [{"role": "user", "content": "the cat is in the"}]
TEXT = TURNS[0]["content"]
OPTIONS = {"num_predict": 6}
NOTE = "plain.gguf has no default one: chatml is used; choose another with --chat-template"
BROKEN = "{% for m in messages %}\n{{ m.content }\n{% endfor %}"
#: The paths of conversations, and what each is asked.
CHATS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": TURNS, "max_tokens": 6}),
    ("/v1/messages", {"messages": TURNS, "max_tokens": 6}),
    ("/v1/responses", {"input": TEXT, "max_output_tokens": 6}),
    ("/api/chat", {"messages": TURNS, "stream": False, "options": OPTIONS}),
]


@pytest.fixture(scope="module", params=["none", "tool_use"])
def server(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config: dict[str, Any] = {"control_tokens": ("<tool_call>", "</tool_call>")}
    if request.param == "tool_use":
        config["tool_template"] = TEMPLATE
    with tiny_server(tmp_path_factory.mktemp(request.param), n_ctx=512, **config) as server:
        yield server


def test_generate_passes_the_prompt_through(server: Running) -> None:
    plain = server.post("/v1/completions", prompt=TEXT, max_tokens=6).json()["choices"][0]["text"]
    asked: dict[str, Any] = {"prompt": TEXT, "stream": False, "options": OPTIONS}
    answer = server.post("/api/generate", **asked).json()
    assert answer["response"] == plain
    assert "warnings" not in answer
    system = server.post("/api/generate", **asked, system="Be short.").json()
    both = server.post("/v1/completions", prompt=f"Be short.\n\n{TEXT}", max_tokens=6).json()
    assert system["response"] == both["choices"][0]["text"]


@pytest.mark.parametrize(("path", "body"), CHATS)
def test_a_chat_uses_a_named_template(server: Running, path: str, body: dict[str, Any]) -> None:
    found = server.post(path, **body)
    assert found.status_code == 200, found.text
    (warning,) = found.json()["warnings"]
    has_tool_template = server.session.target.chat_template("tool_use") is not None
    assert ("tool_use" if has_tool_template else "chatml") in warning
    assert "--chat-template" in warning


def test_the_prompt_is_that_of_the_named_template(server: Running) -> None:
    prompt = server.post("/apply-template", messages=TURNS).json()["prompt"]
    assert prompt == f"<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\n"


def test_an_answer_ends_where_the_template_ends_a_turn(server: Running) -> None:
    """The model has no such token."""
    asked: dict[str, Any] = {"grammar": 'root ::= "hi<|im_end|>" "more"', "messages": TURNS}
    choice = server.post("/v1/chat/completions", **asked).json()["choices"][0]
    if server.session.target.chat_template("tool_use") is None:
        assert (choice["message"]["content"], choice["finish_reason"]) == ("hi", "stop")
    else:
        assert choice["message"]["content"] == "hi<|im_end|>more"


def test_a_template_for_tools_is_used_for_tools(server: Running) -> None:
    asked: dict[str, Any] = {"messages": TURNS, "tools": [tool("weather", "C")], "max_tokens": 4}
    found = server.post("/v1/chat/completions", **asked).json()
    if server.session.target.chat_template("tool_use") is None:
        assert [each.partition(":")[0] for each in found["warnings"]] == ["messages", "tools"]
    else:
        assert "warnings" not in found


def test_models_that_have_a_template_are_not_changed(tmp_path: Path) -> None:
    with tiny_server(tmp_path, chat_template=CHATML_TEMPLATE) as server:
        for path, body in CHATS:
            assert "warnings" not in server.post(path, **body).json()


# --- a template with a syntax error ---------------------------------------------------------------


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TinyConfig(logit_scale=6.0, unprintable_scale=0.0, chat_template=BROKEN)
    return write_tiny_model(tmp_path_factory.mktemp("broken") / "broken.gguf", config)


def test_run_and_chat_refuse_it_at_their_start(specgen: Specgen, broken: Path) -> None:
    for command in ("run", "chat"):
        arguments = [command, "-m", str(broken), "--draft", "none", "-n", "4"]
        if command == "run":
            arguments.append(TEXT)
        message = complaint(specgen(*arguments), 4)
        assert "broken.gguf: its chat template is not valid: line 2: " in message
    raw = specgen("run", "-m", str(broken), "--draft", "none", "-n", "4", "--raw", TEXT)
    assert raw.code == 0
    other = specgen(
        *("run", "-m", str(broken), "--draft", "none", "-n", "4"),
        *("--chat-template", "chatml", TEXT),
    )
    assert other.code == 0


def test_a_server_answers_requests_that_need_no_template(broken: Path, tmp_path: Path) -> None:
    with tiny_server(tmp_path, chat_template=BROKEN) as server:
        assert server.post("/v1/completions", prompt=TEXT, max_tokens=2).status_code == 200
        for path, body in CHATS:
            found = server.post(path, **body, tools=[tool("weather", "C")])
            assert found.status_code == 400
            assert "its chat template is not valid: line 2: " in found.text
            assert "--chat-template" in found.text
        (model,) = server.http.get("/v1/models").json()["data"]
        assert "chat" not in model["capabilities"]
        assert server.post("/api/show", model="target").json()["template"] == BROKEN


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TinyConfig(logit_scale=6.0, unprintable_scale=0.0)
    return write_tiny_model(tmp_path_factory.mktemp("plain") / "plain.gguf", config)


@pytest.mark.parametrize("option", [("--system", "x"), ("--chat",)])
def test_run_uses_a_named_template_for_a_conversation(
    specgen: Specgen, plain: Path, option: Sequence[str]
) -> None:
    command = ("run", "-m", str(plain), "--draft", "none", "-n", "4", *option, TEXT)
    substituted = specgen(*command)
    assert substituted.code == 0
    assert NOTE in substituted.err
    named = specgen(*command, "--chat-template", "chatml")
    assert substituted.out == named.out
    assert NOTE not in named.err


def test_a_batch_and_a_benchmark_name_it(specgen: Specgen, plain: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    options = ("-m", str(plain), "-n", "2")
    batch = specgen("batch", source, "-", *options, "--draft", "none", "--system", "x")
    bench = specgen("bench", *options, "--draft", "ngram", "--chat", "a", "b")
    for command in (batch, bench):
        assert command.code == 0, command.err
        assert NOTE in command.err
    assert batch.err.count(NOTE) == 1


def test_conversations_in_python_use_it_with_a_note(plain: Path) -> None:
    notes: list[str] = []
    with api.load(plain, "none", n_ctx=256, note=notes.append) as model:
        model.generate(TEXT, max_tokens=2)
        assert notes == []
        asked = [api.Message("system", "x"), api.Message("user", TEXT)]
        answers = [
            model.generate(asked, max_tokens=4),
            model.generate(TEXT, system="x", max_tokens=4),
        ]
        (note,) = notes
        assert NOTE in note
    named_template = api.ContextOptions(chat_template="chatml")
    with api.load(plain, "none", n_ctx=256, context=named_template) as model:
        named = model.generate(asked, max_tokens=4)
    for answer in answers:
        assert answer.prompt.text == named.prompt.text
        assert answer.text == named.text
    wrong = api.ContextOptions(chat_template="chat.jinja")
    with pytest.raises(UsageError, match="one of chatml, .*, not 'chat.jinja'"):
        api.load(plain, "none", context=wrong)
