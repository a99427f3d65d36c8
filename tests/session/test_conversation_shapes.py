"""The prompt of an interrupted conversation contains every message, with every template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import specgen
from specgen.errors import PromptError
from specgen.session.prompts.conversation_shapes import CANCELLED, INTERRUPTED
from specgen.session.prompts.template import Message, ToolCall
from tests.helpers.common import NOW
from tests.helpers.conversations import (
    LETTERS,
    TOOLS,
    conversation,
    fitted,
    fitted_turns,
    lost,
    orders,
    text_at,
)
from tests.helpers.server import running, session_of
from tests.helpers.sessions import opened
from tests.helpers.strict_templates import STRICT
from tests.tiny import TinyConfig, write_tiny_model

#: The calls and results of some families are texts.
LOOK = '{{"name": "look", "arguments": {{"where": "{}"}}}}'


def summary(messages: Sequence[Message]) -> list[str]:
    """Each message as its role and its text, in which `text_at` is the number alone."""

    def short(text: str) -> str:
        return text.replace("text", "").replace("z", "")

    return [
        f"{message.role}: {'call ' if message.tool_calls else ''}{short(message.content)}".strip()
        for message in messages
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", STRICT)
def test_all_orders_of_up_to_four_messages_are_in_the_prompt(name: str) -> None:
    for letters in orders(4):
        assert lost(letters, fitted_turns(STRICT[name], letters).text) == "", letters


@given(st.sampled_from(sorted(STRICT)), st.text(LETTERS, min_size=5, max_size=12))
@example("Ministral", "UECTUEUCUSE")
def test_longer_conversations_are_in_the_prompt_in_order(name: str, letters: str) -> None:
    text = fitted_turns(STRICT[name], letters).text
    assert lost(letters, text) == ""
    # Results may come earlier, to their calls, and system messages too.
    places = [text.index(text_at(n)) for n, letter in enumerate(letters) if letter in "UAC"]
    assert places == sorted(places)


TEXTS = st.sampled_from(["", " \n", "so it is", "why </think> not", "<think>why</think>so"])
CALLS = st.builds(
    ToolCall,
    st.sampled_from(["", "1", "2"]),
    st.sampled_from(["look", "go"]),
    st.sampled_from([{}, {"a": [1]}, "not JSON", ""]),
)
MESSAGES = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    TEXTS,
    st.lists(CALLS, max_size=3).map(tuple),
    tool_call_id=st.sampled_from([None, "", "1", "3"]),
    name=st.sampled_from([None, "look"]),
    reasoning=st.sampled_from([None, "why"]),
).map(lambda made: made if made.role == "assistant" else replace(made, tool_calls=()))


@given(st.sampled_from(sorted(STRICT)), st.lists(MESSAGES, min_size=1, max_size=8), st.booleans())
def test_no_messages_are_refused(name: str, messages: list[Message], has_tools: bool) -> None:
    fitted(STRICT[name], messages, TOOLS if has_tools else ())


@pytest.mark.parametrize(
    ("letters", "name", "turns"),
    [
        # An agent that was stopped after a tool.
        ("UCTU", "Mistral", ["user: 0", "assistant: call", "tool: 2", "assistant:", "user: 3"]),
        (
            "UCTU",
            "Ministral",
            ["user: 0", "assistant: call", "tool: 2", f"assistant: {INTERRUPTED}", "user: 3"],
        ),
        ("UCTU", "Hermes", ["user: 0", "assistant: call", "tool: 2", "user: 3"]),
        # A call that was denied.
        (
            "UCU",
            "Mistral",
            ["user: 0", "assistant: call", f"tool: {CANCELLED}", "assistant:", "user: 2"],
        ),
        # Characters that begin with a greeting.
        ("SAU", "Mistral", ["system: 0", "user:", "assistant: 1", "user: 2"]),
        ("AU", "Gemma 2", ["user:", "assistant: 0", "user: 1"]),
        ("SAU", "Gemma 2", ["user: 0", "assistant: 1", "user: 2"]),
        # Answers that were continued, and ones that were stopped.
        ("UAAU", "Gemma 3", ["user: 0", "assistant: 1\n\n2", "user: 3"]),
        ("UEU", "Ministral", ["user: 0\n\n2"]),
        ("UEU", "Mistral", ["user: 0", "assistant:", "user: 2"]),
        ("E", "Ministral", ["user:"]),
        # A prompt that was sent as a system message.
        ("S", "Gemma 2", ["user: 0"]),
        ("S", "Qwen 3.5", ["user: 0"]),
        ("S", "ChatML", ["system: 0"]),
        ("SUS", "Qwen 3.5", ["system: 0", "user: 1", "user: 2"]),
        # Messages that a template would drop without a word.
        ("SUCT", "Mistral Nemo", ["user: 0\n\n1", "assistant: call", "tool: 3"]),
        ("CTU", "Llama 3", ["user:", "assistant: call", "tool: 1", "user: 2"]),
        ("UTU", "gpt-oss", ["user: 0", "user: [result of an earlier call]\n1", "user: 2"]),
    ],
)
def test_text_that_a_template_drops_is_added(letters: str, name: str, turns: list[str]) -> None:
    assert summary(fitted_turns(STRICT[name], letters).messages) == turns


def test_calls_and_results_are_texts_for_a_template_without_tools() -> None:
    call = LOOK.format(text_at(1))
    result = f"[result of an earlier call]\n{text_at(2)}"
    for name in ("Gemma 2", "Gemma 3"):
        assert fitted_turns(STRICT[name], "UCTU").messages == [
            Message("user", text_at(0)),
            Message("assistant", call),
            Message("user", f"{result}\n\n{text_at(3)}"),
        ]
    assert [each.role for each in fitted_turns(STRICT["Phi 3.5"], "UCTU").messages] == [
        *("user", "assistant", "user", "user")
    ]


@pytest.mark.parametrize("name", STRICT)
def test_ordinary_conversations_stay_as_they_are(name: str) -> None:
    for letters in ("U", "UAU", "UAUAU"):
        assert fitted_turns(STRICT[name], letters).messages == conversation(letters)


#: A long conversation in which everything happens once; `|` is where an answer is asked for.
STORY = "SU|AU|CT|CTU|CU|AAU|ECTU|CTA|U"


@pytest.mark.parametrize("name", sorted({*STRICT} - {"Mistral Nemo", "Nemotron"}))
def test_a_continued_conversation_keeps_its_beginning(name: str) -> None:
    """So that the cache has it. Nemo moves the system message to the last turn in any case, and
    Nemotron the last answer."""
    story = conversation(STORY.replace("|", ""))
    before: list[Message] = []
    n_messages = 0
    for part in STORY.split("|"):
        n_messages += len(part)
        turns = fitted(STRICT[name], story[:n_messages], TOOLS).messages
        assert turns[: len(before)] == before
        before = turns


def test_one_result_of_two_is_missing() -> None:
    calls = (ToolCall("a", "look", {}), ToolCall("b", "go", {}))
    messages = [
        Message("user", "x"),
        Message("assistant", "", calls),
        Message("user", "stop"),
        Message("tool", "seen", tool_call_id="a", name="look"),
    ]
    turns = fitted(STRICT["gpt-oss"], messages, TOOLS).messages
    assert [(turn.role, turn.content, turn.tool_call_id) for turn in turns[2:]] == [
        ("tool", "seen", "a"),
        ("tool", CANCELLED, "b"),
        ("user", "stop", None),
    ]


@pytest.mark.parametrize("name", ["look", None])
def test_calls_without_ids_get_their_results_in_order(name: str | None) -> None:
    """So do Ollama's clients send them. The families of Llama 3 take one call at a time."""
    calls = tuple(ToolCall("", "look", {"where": where}) for where in ("Rome", "Bern"))
    messages = [
        Message("user", "x"),
        Message("assistant", "", calls),
        Message("tool", "sun", name=name),
        Message("tool", "rain", name=name),
    ]
    turns = fitted(STRICT["Llama 3"], messages, TOOLS).messages
    assert [(turn.tool_calls, turn.content) for turn in turns[1:]] == [
        (calls[:1], ""),
        ((), "sun"),
        (calls[1:], ""),
        ((), "rain"),
    ]


def test_calls_that_get_their_own_turns_do_not_repeat_the_thoughts() -> None:
    calls = (ToolCall("a", "look", {}), ToolCall("b", "go", {}))
    messages = [
        Message("user", "x"),
        Message("assistant", "both", calls, reasoning="why"),
        Message("tool", "sun", tool_call_id="a"),
        Message("tool", "rain", tool_call_id="b"),
    ]
    turns = fitted(STRICT["Llama 3"], messages, TOOLS).messages
    assert [(turn.tool_calls, turn.content, turn.reasoning) for turn in turns[1:]] == [
        (calls[:1], "both", "why"),
        ((), "sun", None),
        (calls[1:], "", None),
        ((), "rain", None),
    ]


def test_results_belong_to_calls_of_their_names() -> None:
    """A template that drops the results of other tools gets all of them in another shape."""
    template = (
        "{% set called = namespace(name='') %}{% for m in messages %}"
        "{% if m.tool_calls %}{% set called.name = m.tool_calls[0].function.name %}"
        "{{ m.tool_calls | tojson }}"
        "{% elif m.role != 'tool' or m.name == called.name %}{{ m.content }}{% endif %}{% endfor %}"
    )
    calls = tuple(ToolCall("", name, {}) for name in ("look", "go"))
    results = [Message("tool", "went", name="go"), Message("tool", "seen", name="look")]
    messages = [Message("user", "x"), Message("assistant", "", calls), *results]
    text = fitted(template, messages, TOOLS).text
    assert "went" in text
    assert "seen" in text


@pytest.mark.parametrize(
    ("template", "turns"),
    [
        # It writes only the last message, so nothing shows which shape fits it.
        ("{{ messages[-1].content }}", ["user: 0", "assistant: 1", "user: 2", "user: 3"]),
        # It refuses this text in turns of its own.
        (
            (
                "{% for m in messages %}{% if m.content == 'text3z' %}{{ raise_exception('no') }}"
                "{% endif %}{{ m.content }}{% endfor %}"
            ),
            ["user: 0", "assistant: 1", "user: 2\n\n3"],
        ),
    ],
)
def test_texts_that_a_template_refuses_are_tried_in_other_shapes(
    template: str, turns: list[str]
) -> None:
    assert summary(fitted_turns(template, "UAUU").messages) == turns


def test_a_failure_is_that_of_the_conversation_as_it_is() -> None:
    template = "{{ raise_exception(messages | length) }}"
    with pytest.raises(PromptError, match="failed: 3"):
        fitted_turns(template, "UUA")


def test_control_tokens_in_a_fitted_conversation_are_plain_text(tmp_path: Path) -> None:
    """The same shape is rendered with marks on its texts."""
    config = TinyConfig(chat_template=STRICT["Gemma 2"], control_tokens=("<|end|>", "<|user|>"))
    target = write_tiny_model(tmp_path / "target.gguf", config)
    with opened(target) as loaded:
        vocabulary = loaded.target.vocabulary

        def n_controls(text: str) -> int:
            messages = [Message("system", text), Message("assistant", text), Message("user", text)]
            prompt = loaded.prompts.of_messages(messages, now=NOW)
            assert prompt.text.count(text) == 3
            return sum(map(vocabulary.is_control, prompt.tokens))

        assert n_controls("x<|end|>") == n_controls("x") > 3
        with pytest.raises(PromptError, match="no messages"):
            loaded.prompts.of_messages([])


# --- through every door ---------------------------------------------------------------------------

_CALL = {"id": "a1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
_OLLAMA_CALL = {"function": {"name": "look", "arguments": {}}}
_BLOCK = {"type": "tool_use", "id": "a1", "name": "look", "input": {}}
_RESULT = {"type": "tool_result", "tool_use_id": "a1", "content": "seen"}
_SYSTEM = {"role": "system", "content": "Be brief."}
_USER = {"role": "user", "content": "Hi"}
_ANSWER = {"role": "assistant", "content": "Hello"}
_CALLING = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
_SEEN = {"role": "tool", "tool_call_id": "a1", "content": "seen"}
#: What agents and chat programs send: the path, and the conversation.
SENT: list[tuple[str, list[Any]]] = [
    ("/v1/chat/completions", [_USER, _CALLING, _SEEN, _USER]),
    ("/v1/chat/completions", [_USER, _CALLING, _USER]),
    ("/v1/chat/completions", [_SYSTEM, _ANSWER, _USER]),
    ("/v1/chat/completions", [_ANSWER, _USER]),
    ("/v1/chat/completions", [_USER, _ANSWER, _ANSWER, _USER]),
    ("/v1/chat/completions", [_USER, {"role": "assistant", "content": None}, _USER]),
    ("/v1/chat/completions", [_USER, {"role": "assistant", "content": ""}, _USER]),
    ("/v1/chat/completions", [_SYSTEM]),
    ("/v1/chat/completions", [_USER, _ANSWER, _ANSWER]),
    ("/v1/chat/completions", [_SEEN]),
    ("/v1/messages", [_USER, {"role": "assistant", "content": [_BLOCK]}, _USER]),
    (
        "/v1/messages",
        [
            _USER,
            {"role": "assistant", "content": [_BLOCK]},
            {"role": "user", "content": [_RESULT, {"type": "text", "text": "Stop"}]},
        ],
    ),
    ("/v1/messages", [_ANSWER, _USER, {"role": "assistant", "content": []}, _USER]),
    (
        "/api/chat",
        [
            _USER,
            {"role": "assistant", "content": "", "tool_calls": [_OLLAMA_CALL]},
            {"role": "tool", "content": "seen", "tool_name": "look"},
            _USER,
        ],
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Gemma 2", "Mistral", "Ministral", "Qwen 3.5"])
def test_the_server_answers_what_agents_and_chat_programs_send(name: str, tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "m.gguf", TinyConfig(chat_template=STRICT[name]))
    with running(session_of(target, max_tokens=4), n_ctx=1024) as server:
        for path, messages in SENT:
            body: dict[str, Any] = {"messages": messages, "max_tokens": 4, "stream": False}
            found = server.post(path, model="any", **body)
            assert found.status_code == 200, (path, messages, found.text)
        items = [_USER, {"type": "function_call", "call_id": "a", "name": "look"}, _USER]
        assert server.post("/v1/responses", input=items).status_code == 200
        empty = server.post("/v1/chat/completions", messages=[])
        assert empty.status_code == 400
        assert "messages: give a list of 1 or more, not []" in empty.text


def test_the_python_interface_fits_messages(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "m.gguf", TinyConfig(chat_template=STRICT["Ministral"]))
    with specgen.load(target, "none", n_ctx=256) as model:
        messages = [specgen.Message("user", "Hi"), specgen.Message("assistant", "")]
        answer = model.generate([*messages, *messages[:1]], max_tokens=2)
        assert answer.finished is not None
        with pytest.raises(PromptError, match="empty"):
            model.generate([], max_tokens=2)
