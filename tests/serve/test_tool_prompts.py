"""Tools, tool calls and their results in the prompts of chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.llama import LlamaModel
from specgen.session.prompts.marked_text import unmarked
from specgen.session.prompts.template import Message, ToolCall, render
from specgen.session.prompts.thoughts import ThoughtReader
from tests.helpers.common import NOW
from tests.helpers.conversations import fitted
from tests.helpers.server import running, session_of
from tests.helpers.sessions import opened
from tests.tiny import CHATML_TEMPLATE, TinyConfig, write_tiny_model

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
#: Has the tools in the system message, as Qwen2.5's has, and writes answers of tools as turns of
#: the user.
TEMPLATE = """{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{% endif %}
{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>' + m.content + '</tool_response><|im_end|>\\n' }}
{%- elif m.tool_calls %}
{{- '<|im_start|>assistant' }}
{%- for call in m.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role != 'system' or not tools %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
TURNS = [
    Message("system", "Be brief."),
    Message("user", "How warm is it?"),
    Message("assistant", "", (ToolCall("call_1", "weather", {"city": "Köln"}),)),
    Message("tool", "7 °C", tool_call_id="call_1", name="weather"),
]


def rendered(template: str, messages: Sequence[Message], tools: Any = ()) -> str:
    return fitted(template, messages, tools).text


def test_a_conversation_without_tools_is_as_if_there_were_none() -> None:
    seen = "{{ tools is defined }} {{ messages[0] | tojson }}"
    assert rendered(seen, TURNS) == 'False {"role": "system", "content": "Be brief."}'


def test_ids_of_calls_have_the_form_that_the_template_accepts() -> None:
    """Mistral's templates reject ids of other lengths than nine. Other templates get the ids
    unchanged.
    """
    ids = "{{ messages[2].tool_calls[0].id }} {{ messages[3].tool_call_id }}"
    assert rendered(ids, TURNS) == "call_1 call_1"
    call, answer = rendered(ids + "[TOOL_CALLS]", TURNS).removesuffix("[TOOL_CALLS]").split()
    assert call == answer
    assert len(call) == 9
    assert call.isalnum()
    own = "{{ messages[0].tool_call_id }} [TOOL_CALLS]"
    assert rendered(own, [Message("tool", "x", tool_call_id="abcDEF123")]).startswith("abcDEF123 ")


def test_a_file_may_have_a_separate_template_for_tools(tmp_path: Path) -> None:
    config = TinyConfig(chat_template=CHATML_TEMPLATE, tool_template=TEMPLATE)
    target = write_tiny_model(tmp_path / "target.gguf", config)
    with opened(target) as loaded:
        asked = TURNS[:2]
        with_tools = loaded.prompts.of_messages(asked, now=NOW, tools=TOOLS).text
        assert with_tools == rendered(TEMPLATE, asked, TOOLS)
        assert loaded.prompts.of_messages(TURNS, now=NOW).text == rendered(TEMPLATE, TURNS)
        assert loaded.prompts.of_messages(asked, now=NOW).text == rendered(CHATML_TEMPLATE, asked)


def test_a_draft_with_another_vocabulary_reads_the_tools_too(tmp_path: Path) -> None:
    config = TinyConfig(chat_template=TEMPLATE)
    target = write_tiny_model(tmp_path / "target.gguf", config)
    other = replace(config.draft(0.02), tokenizer="spm", n_vocab=None)
    draft = write_tiny_model(tmp_path / "draft.gguf", other)
    with opened(target, draft) as loaded:
        prompt = loaded.prompts.of_messages(TURNS[1:2], now=NOW, tools=TOOLS)
        assert prompt.draft_tokens is not None
        assert loaded.draft is not None
        assert '"name": "weather"' in said(loaded.draft.models[0], prompt.draft_tokens)


def said(model: LlamaModel, tokens: Sequence[int]) -> str:
    return b"".join(map(model.vocabulary.token_bytes, tokens)).decode()


def test_templates_get_the_variables_that_llama_cpp_gives_them() -> None:
    template = "{{ enable_thinking }} {{ date_string }} {{ strftime_now('%Y') }}"
    template += " {{ messages | map(attribute='role') | tojson(separators=(',', ':')) }}"
    two = [Message("user", "a"), Message("assistant", "b")]
    date = NOW.strftime("%d %b %Y")
    assert rendered(template, two) == f'True {date} {NOW.year} ["user","assistant"]'
    added = "{% set ns = namespace(all=[]) %}{% set _ = ns.all.append(1) %}{{ ns.all }}"
    assert rendered(added, two) == "[1]"
    types = [{"type": ["string", "null"]}]
    cased = render(
        "{{ tools[0].type | upper }}",
        two,
        bos_token="",
        eos_token="",
        now=NOW,
        tools=types,
        marks_contents=True,
    )
    assert unmarked(cased) == "['STRING', 'NULL']"  # as Gemma 4's template writes them
    read = """{{ ('{"a": 1}' | from_json).a }}{{ messages[0] | fromjson if messages is string }}"""
    assert rendered(read, two) == "1"
    taken = "{% set ns = namespace(all=['a', 'b']) %}{{ ns.all.pop(0) }} {{ ns.all | join }}"
    assert rendered(taken, two) == "a b"  # Kimi K2's ids of results


#: Templates that refuse most conversations with calls, as Llama 3's and Functionary's do.
_ONE_CALL = (
    "{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('only single tool-calls at once!') }}{% endif %}"
)
_TEXTS = "{% for c in m.tool_calls %}{{ '>' + c.function.name + c.function.arguments }}{% endfor %}"
_ONE_TEXT = "{% if message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}"
_JSON = (
    "{% for c in m.tool_calls %}>{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ message.reasoning_content }}{{ message.thinking }}", "Why"),
        ("{{ message['thinking'] }}{{ message.reasoning_text }}", "Why"),
        ("{{ message.reasoning }}", "Why"),
        (
            "{% for block in message.content %}{{ block['thinking'] }}{{ block.text }}{% endfor %}",
            "WhySo",
        ),
        (_ONE_TEXT + "{{ message.thinking }}{{ message.tool_calls[1:] }}", "Why\n\nSo[]"),
    ],
)
def test_thoughts_are_where_the_template_reads_them(template: str, text: str) -> None:
    call = ToolCall("1", "f", {"a": 1})
    turn = Message("assistant", "So", (call,), reasoning="Why")
    turn = turn if "tool_calls" in template else replace(turn, tool_calls=())
    assert rendered("{% for message in messages %}" + template + "{% endfor %}", [turn]) == text


def test_calls_are_text_where_the_template_writes_none() -> None:
    plain = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    assert (
        rendered(plain, TURNS[2:], TOOLS)
        == '{"name": "weather", "arguments": {"city": "Köln"}}|7 °C|'
    )
    named = "{% for tool in xml_tools %}{{ tool.function.name }}{% endfor %}"
    assert rendered(named, TURNS, TOOLS) == "weather"


def test_a_system_message_may_begin_the_first_turn() -> None:
    first = "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}"
    assert rendered(first + "{{ messages[0].content }}", TURNS) == "Be brief.\n\nHow warm is it?"


@pytest.mark.parametrize("calls", [_ONE_CALL + _JSON, _TEXTS, _ONE_CALL + _TEXTS])
def test_conversations_with_calls_have_the_form_that_the_template_accepts(
    tmp_path: Path, calls: str
) -> None:
    """At the server, where an agent's next request has the calls of the answer before."""
    template = (
        "{% for m in messages %}{% if m.tool_calls is defined %}@calls{% endif %}"
        "{{ m.content }}|{% endfor %}{{ tools }}"
    ).replace("@calls", calls)
    target = write_tiny_model(tmp_path / "m.gguf", TinyConfig(chat_template=template))
    given = [
        {"id": f"id{n}", "type": "function", "function": {"name": f"f{n}", "arguments": '{"a": 1}'}}
        for n in (1, 2)
    ]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "So", "tool_calls": given},
        *({"role": "tool", "tool_call_id": f"id{n}", "content": f"r{n}"} for n in (1, 2)),
    ]
    with running(session_of(target, max_tokens=4)) as server:
        found = server.post("/apply-template", messages=messages).json()["prompt"]
        assert server.post("/v1/chat/completions", messages=messages).status_code == 200
    whole, split = '>f1{"a": 1}>f2{"a": 1}So|r1|r2|', '>f1{"a": 1}So|r1|>f2{"a": 1}|r2|'
    assert found == f"q|{split if _ONE_CALL in calls else whole}"


def test_a_prefilled_answer_follows_the_prompt(tmp_path: Path) -> None:
    """Where the template opens a thinking block, the beginning closes it, or goes on in it."""
    begun = Message("assistant", "So it is", reasoning="I see")
    found = {}
    for name, begins in (("plain", ""), ("thinks", "<think>"), ("gpt-oss", "<|start|>assistant")):
        target = tmp_path / f"{name}.gguf"
        write_tiny_model(target, TinyConfig(chat_template=CHATML_TEMPLATE + begins))
        with opened(target) as loaded:
            prompt = loaded.prompts.of_messages(TURNS[:2], now=NOW)
            for each in (begun, replace(begun, content="")):
                made = loaded.prompts.continued(prompt, each)
                assert made.tokens[: len(prompt.tokens)] == prompt.tokens
                rest = said(loaded.target, made.tokens[len(prompt.tokens) :])
                found[name, bool(each.content)] = rest
                is_open = ThoughtReader(made.text).is_open
                assert is_open == (name == "thinks" and not each.content)
    assert found == {
        ("plain", True): "So it is",
        ("plain", False): "",
        ("gpt-oss", True): "<|channel|>final<|message|>So it is",
        ("gpt-oss", False): "<|channel|>final<|message|>",
        ("thinks", True): "I see</think>\n\nSo it is",
        ("thinks", False): "I see",
    }
