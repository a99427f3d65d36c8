"""The requests in the formats of all APIs, and the names under which fields are rejected."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from specgen.options import GenerationOptions, SamplerOptions
from specgen.serve.formats.answers import Answer
from specgen.serve.formats.chat_completions import ChatCompletionWriter, read_chat
from specgen.serve.formats.completions import CompletionWriter, read_completion
from specgen.serve.formats.llama_server import read_llama_cpp_completion
from specgen.serve.formats.messages import read_messages
from specgen.serve.formats.model_adaptation import with_call_form
from specgen.serve.formats.ollama import read_ollama_chat, read_ollama_generate
from specgen.serve.formats.parsed_request import Defaults, ParsedRequest, RequestKind
from specgen.serve.formats.request_errors import BodyError
from specgen.serve.formats.responses import read_response_request
from specgen.serve.formats.single_request import read_request
from specgen.session.prompts.template import Message, ToolCall
from tests.helpers.formats import CHAT, MESSAGES, RESPONSES, written
from tests.helpers.templates import FAMILIES
from tests.long_runs.mutated_json import mutated

DEFAULTS = Defaults(SamplerOptions(top_k=7), GenerationOptions(max_tokens=5, stop=("END",)))
TEMPLATE = FAMILIES["Hermes"] + "{{ enable_thinking }}"
USER = {"role": "user", "content": "hi"}
LEFT_OUT = "[image left out: this model reads text]"


def read(kind: RequestKind, **body: Any) -> ParsedRequest:
    return read_request(kind, body, DEFAULTS)


def chat(**body: Any) -> ParsedRequest:
    return read("chat", **{"messages": [USER], **body})


def responding(**body: Any) -> ParsedRequest:
    (request,) = read_response_request({"input": "hi", **body})
    return with_call_form(request, TEMPLATE)


def messaging(**body: Any) -> ParsedRequest:
    (request,) = read_messages({"messages": [USER], **body})
    return with_call_form(request, TEMPLATE)


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def fields(request: ParsedRequest) -> list[str]:
    """The fields that warnings name."""
    return [each.partition(":")[0] for each in request.warnings]


def said(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"role": role, "content": [{"type": kind, "text": text} for text in texts]}


# --- fields ---------------------------------------------------------------------------------------


def test_fields_missing_in_a_body_have_the_defaults() -> None:
    sampling, generation = DEFAULTS.sampling, DEFAULTS.generation
    expected = ParsedRequest(
        "chat",
        sampling,
        generation,
        ChatCompletionWriter,
        messages=(Message("user", "hi"),),
        splits_reasoning=True,
    )
    assert chat() == expected
    expected = ParsedRequest("completion", sampling, generation, CompletionWriter, text="a b")
    assert read("completion", prompt="a b") == expected
    expected = ParsedRequest(
        "prompt", sampling, generation, ChatCompletionWriter, text="a b", splits_reasoning=True
    )
    assert read("prompt", prompt="a b") == expected
    assert chat(temperature=None, max_tokens=None, stop=None, model="gpt-9") == chat()
    assert chat(stream_options={"include_usage": None}) == chat()


def test_every_field_of_a_sampler_is_read() -> None:
    values = {
        each.name: 3 if isinstance(each.default, int) else 0.5
        for each in dataclasses.fields(SamplerOptions)
        if not isinstance(each.default, tuple)
    }
    expected: Any = {"dry_breakers": (".", "!"), **values}
    found = chat(**values, dry_breakers=[".", "!"]).sampling
    assert found == SamplerOptions(**expected)
    others = {"dry_sequence_breakers": ["."], "dry_penalty_last_n": 9, "typ_p": 3}
    assert chat(dry_breakers='[".", "!"]').sampling.dry_breakers == (".", "!")
    assert chat(**others).sampling == chat(dry_breakers=["."], dry_last_n=9).sampling
    assert chat(seed=2**40).sampling.seed == 2**40


def test_limits_and_stop_strings_are_read() -> None:
    for name, n in (("max_tokens", 0), ("max_completion_tokens", 9), ("n_predict", -1)):
        assert chat(**{name: n}).generation.max_tokens == n
        assert chat(**{name: -2}).generation.max_tokens == -1  # as llama.cpp's server takes it
    assert chat(stop="x").generation.stop == ("x",)
    assert chat(stop=["x", "yz"]).generation.stop == ("x", "yz")
    assert chat(stop=[]).generation.stop == ()
    assert chat(ignore_eos=True).generation.ignore_eos


def test_other_spellings_of_values_are_read() -> None:
    """What llama.cpp's, vLLM's and ollama's clients send."""
    assert chat(top_k=-1).sampling.top_k == 0
    assert chat(grammar="", stop=["x", ""]) == chat(stop="x")
    assert chat(repetition_penalty=1.5).sampling.repeat_penalty == 1.5
    for biases, pairs in (
        ([[5, -1], [6, False], ["6", 1]], ((5, -1.0), (6, -1e30), ("6", 1.0))),
        ({"5": -1, "the": False}, ((5, -1.0), ("the", -1e30))),
        ("5:-1, 6 : 2.5,the:1", ((5, -1.0), (6, 2.5), ("the", 1.0))),  # Open WebUI's
        ("", ()),
    ):
        assert chat(logit_bias=biases).biases == pairs
    for breakers in (["\n", ":"], '["\\n", ":"]'):  # SillyTavern sends the list as a text
        assert chat(dry_sequence_breakers=breakers).sampling.dry_breakers == ("\n", ":")
    assert chat(dry_sequence_breakers="[").sampling.dry_breakers == ("[",)
    for form in ("deepseek-legacy", "parsed", "auto"):
        assert chat(reasoning_format=form).splits_reasoning
    for how in ({"enable_thinking": False}, {"thinking": {"type": "disabled"}}):
        assert chat(**how).variables == {"enable_thinking": False}
    turns = [
        {"role": "user", "content": {"type": "text", "text": "hi"}},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "x"},
    ]
    assert read("chat", messages=turns).messages == (
        Message("user", "hi"),
        Message("assistant", "", (ToolCall("", "f", {"a": 1}),)),
        Message("tool", "x", tool_call_id="", name="f"),
    )


def test_prompts_are_texts_tokens_or_turns() -> None:
    assert read("completion", prompt=[1, 2, 3]).tokens == (1, 2, 3)
    assert read("completion", prompt=[[1, 2]]).tokens == (1, 2)
    assert read("completion", prompt=["only"]).text == "only"
    turned = read("prompt", prompt="hi", system="be brief")
    assert turned.kind == "chat"
    assert turned.messages == (Message("system", "be brief"), Message("user", "hi"))


def test_strict_decides_whether_an_unenforceable_schema_is_an_error() -> None:
    schema: Any = {"properties": {"a": {"type": "array", "uniqueItems": True}}}

    def asked(**more: Any) -> ParsedRequest:
        form = {"name": "x", "schema": schema, **more}
        return chat(response_format={"type": "json_schema", "json_schema": form})

    for request in (asked(), asked(strict=False), asked(strict=None)):
        assert request.warnings == ("response_format: no grammar can enforce uniqueItems",)
        assert request.generation.grammar is not None
        assert '"array"' in request.generation.grammar.text
        is_open = request == asked(strict=False)
        assert ('"additionalProperties": false' in request.generation.grammar.text) is not is_open
    with pytest.raises(BodyError, match="uniqueItems") as error:
        asked(strict=True)
    assert error.value.field == "response_format"
    with pytest.raises(BodyError, match="uniqueItems"):
        chat(json_schema=schema)
    schema = True
    assert asked(strict=True).warnings == ()
    schema = {"type": "string", "pattern": r"^$|(^(?:\S+\s+){0,99}\S+$)", "maxLength": 5000}
    (warning,) = asked().warnings
    assert "the pattern" in warning


@pytest.mark.parametrize(
    ("thinking", "variables"),
    [
        (None, {}),
        ({"type": "of the next version"}, {}),
        ({"type": "enabled", "budget_tokens": 2000}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
    ],
)
def test_thinking_is_a_variable_of_the_template(thinking: Any, variables: dict[str, bool]) -> None:
    assert messaging(thinking=thinking).variables == variables
    assert chat(thinking=thinking).variables == variables


def test_a_format_becomes_a_grammar() -> None:
    form: Any = {"type": "json_schema", "schema": {"const": 7}}
    for asked in (
        messaging(output_config={"format": form}),
        messaging(output_format=form),
        responding(text={"format": form}),
        chat(response_format=form),
    ):
        assert asked.generation.grammar is not None
        assert json.loads(asked.generation.grammar.text)["const"] == 7


def test_a_guide_becomes_a_grammar() -> None:
    """The fields of vLLM's servers, older and newer, and the names of others."""
    schema = {"const": 7}
    for kind, value, text in (
        ("json", schema, '"const": 7'),
        ("json", json.dumps(schema), '"const": 7'),
        ("grammar", 'root ::= "a"', "root"),
        ("json_object", True, '"object"'),
        ("regex", "a/b|\\d", "/a\\/b|\\d/"),
        ("choice", ["yes", 'n"o'], '"yes" | "n\\"o"'),
    ):
        for body in ({f"guided_{kind}": value}, {"structured_outputs": {kind: value}}):
            request = chat(**body)
            assert request.generation.grammar is not None
            assert text in request.generation.grammar.text
            assert request.warnings == ()
    assert chat(structured_outputs={"json_object": False}).generation.grammar is None
    assert chat(json_schema=json.dumps(schema)) == chat(json_schema=schema)
    request = chat(guided_json={"uniqueItems": True}, guided_decoding_backend="x")
    assert fields(request) == ["guided_json"]
    excluded = chat(guided_choice=["a"], tools=[tool("a")])
    with pytest.raises(BodyError, match="cannot be combined with tools"):
        with_call_form(excluded, TEMPLATE)


# --- turns ----------------------------------------------------------------------------------------

_ROLES = ("system", "developer", "user", "system", "assistant", "system", "user", "user")
_CHAT = [{"role": role, "content": text} for role, text in zip(_ROLES, "abcdefgh", strict=True)]
_ITEMS = [
    said("developer", "b"),
    {"type": "message", **said("system", "c", "d")},
    said("user", "e"),
]
_ITEMS += [{"role": "user", "content": "f"}, said("assistant", "g"), said("developer", "late")]
_ANSWERED = [USER, {"role": "assistant", "content": "A"}, {"role": "system", "content": "T"}]
_BILLED = "I read x-anthropic-billing-header"


@pytest.mark.parametrize(
    ("request_of", "body", "expected"),
    [
        (chat, {"messages": _CHAT}, ["s a|b", "u c|d", "a e", "u f|g", "u h"]),
        (
            responding,
            {"instructions": "a", "input": [*_ITEMS, said("user", "h")]},
            ["s a|b|c\nd", "u e|f", "a g", "u late|h"],
        ),
        (messaging, {"system": []}, ["u hi"]),
        (messaging, {"messages": [USER, USER]}, ["u hi|hi"]),
        (messaging, {"system": _BILLED}, [f"s {_BILLED}", "u hi"]),
        (messaging, {"messages": [_ANSWERED[2], USER], "system": "S"}, ["s S|T", "u hi"]),
        (messaging, {"messages": _ANSWERED}, ["u hi", "a A", "u T"]),
    ],
)
def test_turns_are_as_templates_want_them(
    request_of: Any, body: dict[str, Any], expected: list[str]
) -> None:
    """A system message after the beginning becomes the user's, and turns of the same role are
    joined where the API does so.
    """
    found = [(each.role[0], each.content) for each in request_of(**body).messages]
    assert [f"{role} {text}".replace("\n\n", "|") for role, text in found] == expected


@pytest.mark.parametrize(
    ("how", "continues"),
    [
        ({}, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, True),
        ({"continue_final_message": False}, False),
        ({"add_generation_prompt": True}, False),
    ],
)
def test_a_last_message_of_the_assistant_is_continued(how: Any, continues: bool) -> None:
    user: dict[str, Any] = {"role": "user", "content": "hi"}
    turns = [user, {"role": "assistant", "content": "Ho"}]
    assert read("chat", messages=turns, **how).continues == continues
    call = {"id": "c", "function": {"name": "a"}}
    turns[1] = {"role": "assistant", "tool_calls": [call]}
    for others in (turns, [user]):
        asked = read("chat", messages=others, **how)
        assert not asked.continues
        assert bool(asked.warnings) == ("continue_final_message" in how and continues)


def test_what_an_agent_sends_as_items() -> None:
    """Thoughts, a text and calls are one turn; what runs elsewhere is left out."""
    asked = responding(**RESPONSES)
    look, patch = ToolCall("call_1", "exec_command", {"cmd": "cat a.txt"}), {"input": "+b"}
    assert asked.messages == (
        Message("system", "Be brief.\n\nYou may run commands."),
        Message("user", "Look."),
        Message("assistant", "I look.", (look,), reasoning="I have to look."),
        Message("tool", "b", tool_call_id="call_1", name="exec_command"),
        Message("assistant", "", (ToolCall("call_2", "patch", patch),)),
        Message("tool", "done", tool_call_id="call_2", name="patch"),
    )
    assert asked.tools is not None
    assert [each.name for each in asked.tools.functions] == ["exec_command", "patch"]
    assert asked.tools.functions[0].description == "Runs a command."
    assert asked.tools.functions[1].parameters["required"] == ["input"]
    assert [each.name for each in asked.tools.callable] == ["exec_command"]
    assert (asked.tools.must_call, asked.tools.is_parallel) == (False, True)
    assert (asked.generation.max_tokens, asked.variables) == (4, {"enable_thinking": False})
    assert {"input[8]", "tools[1].format", "tools[2]", "tools[3]"} <= set(fields(asked))
    assert asked.leaves_out_turns


def test_what_an_agent_sends_as_messages() -> None:
    asked = messaging(**MESSAGES)
    calls = tuple(
        ToolCall(f"toolu_{n}", "Read", {"path": f"{name}.txt"}) for n, name in ((1, "a"), (2, "b"))
    )
    assert asked.messages == (
        Message("system", "Be short.\n\nUse tools."),
        Message("user", "Read a.txt\n\nAgent types: none"),
        Message("assistant", "I read it.", calls, reasoning="A file."),
        Message("tool", "7", tool_call_id="toolu_1", name="Read"),
        Message("tool", "Error: no file", tool_call_id="toolu_2", name="Read"),
        Message("user", "Go on."),
    )
    assert asked.tools is not None
    assert [function.name for function in asked.tools.functions] == ["Read"]
    assert (asked.tools.must_call, asked.tools.is_parallel) == (True, False)
    assert (asked.sampling.temperature, asked.sampling.top_k, asked.sampling.top_p) == (0.5, 5, 0.9)
    assert asked.generation.stop == ("\n\n", "END")
    assert asked.variables == {"enable_thinking": True}
    assert asked.splits_reasoning
    assert asked.warnings == (
        'tools[1]: ignored, since specgen has no tools of type "web_search_20250305"',
        "tools: no grammar can enforce propertyNames of Read",
    )


def test_parts_that_no_model_can_read_are_named_in_the_text() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:..."}}
    call = {"name": "a", "arguments": '{"x": 1}'}
    turns = [
        {"role": "tool", "tool_call_id": "gone", "content": "7"},
        {"role": "user", "content": [{"type": "text", "text": "see "}, image]},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "a", "content": [{"type": "file"}]},
        {"role": "user", "content": None},
    ]
    assert chat(messages=turns).messages == (
        Message("user", "[result of an earlier call]\n7"),
        Message("user", f"see \n{LEFT_OUT}"),
        Message("assistant", "", (ToolCall("a", "a", {"x": 1}),)),
        Message("tool", "[file left out: this model reads text]", tool_call_id="a", name="a"),
        Message("user", ""),
    )
    image = {"type": "input_image", "image_url": "data:..."}
    items = [
        {"type": "function_call_output", "call_id": "gone", "output": [image]},
        {"role": "user", "content": [image, {"type": "input_text", "text": None}]},
    ]
    first = f"[result of an earlier call]\n{LEFT_OUT}\n\n{LEFT_OUT}"
    assert responding(input=items).messages == (Message("user", first),)
    image = {"type": "image", "source": {"type": "base64", "data": "aGk="}}
    document = {"type": "document", "source": {"type": "text", "data": "a letter"}}
    result = {"type": "tool_result", "tool_use_id": "gone", "content": [image]}
    called = {"type": "tool_use", "id": "1", "name": "a", "input": None}
    hosted = {"type": "server_tool_use", "id": "2", "name": "web_search", "input": {}}
    turns = [
        {"role": "user", "content": [result, image, document]},
        {"role": "assistant", "content": [hosted, called]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]},
        {"role": "user", "content": None},
    ]
    found = [(each.role, each.content) for each in messaging(messages=turns).messages]
    assert found == [("user", f"{first}\n\na letter"), ("assistant", ""), ("tool", "")]


@pytest.mark.parametrize(
    ("api", "part", "field"),
    [
        (chat, {"type": "image_url", "image_url": {"url": "data:..."}}, "image_url"),
        (chat, {"type": "input_audio", "input_audio": {"data": "aGk="}}, "input_audio"),
        (chat, {"type": "file", "file": {"file_data": "data:..."}}, "file"),
        (messaging, {"type": "image", "source": {"type": "base64", "data": "aGk="}}, "source"),
        (messaging, {"type": "document", "source": {"type": "url", "url": "x"}}, "source"),
    ],
)
def test_a_warning_says_why_a_file_is_left_out(api: Any, part: dict[str, Any], field: str) -> None:
    asked = api(messages=[{"role": "user", "content": [part, part]}])
    assert asked.warnings == (f"messages.content.{field}: ignored, since this model reads text",)


def test_texts_within_blocks_are_read() -> None:
    parts = [{"type": "text", "text": "Rayleigh"}, {"type": "text", "text": "scattering"}]
    search = {"type": "search_result", "title": "Sky", "source": "https://x", "content": parts}
    for content in (parts, "Rayleigh\nscattering"):
        document = {"type": "document", "source": {"type": "content", "content": content}}
        asked = messaging(messages=[{"role": "user", "content": [search, document]}])
        text = "Sky\nhttps://x\nRayleigh\nscattering\n\nRayleigh\nscattering"
        assert asked.messages == (Message("user", text),)
        assert asked.warnings == ()
    with pytest.raises(BodyError, match=r"messages\[0\].content\[0\].content: "):
        messaging(messages=[{"role": "user", "content": [{**search, "content": 3}]}])
    picture = {"type": "content", "content": [{"type": "image", "source": {}}]}
    asked = messaging(
        messages=[{"role": "user", "content": [{"type": "document", "source": picture}]}]
    )
    assert asked.messages == (Message("user", LEFT_OUT),)
    called = {"type": "tool_use", "id": "1", "name": "a", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [search]}
    turns = [{"role": "assistant", "content": [called]}, {"role": "user", "content": [result]}]
    found = messaging(messages=[USER, *turns]).messages[-1]
    assert found.content == "Sky\nhttps://x\nRayleigh\nscattering"


def test_thoughts_without_an_answer_are_left_out() -> None:
    lone = {"type": "reasoning", "summary": [], "encrypted_content": "another server's!"}
    short = {**lone, "summary": [{"type": "summary_text", "text": "short"}]}
    assert responding(input=[lone, said("user", "x"), short]).messages == (Message("user", "x"),)
    said_too = responding(input=[short, said("assistant", "x")]).messages
    assert said_too == (Message("assistant", "x", reasoning="short"),)


def test_the_tools_that_may_be_called() -> None:
    tools = [tool("a", description="A.", parameters={"required": ["x"]}), tool("b")]
    request = chat(tools=tools)
    assert request.tools is not None
    assert request.tools.functions[0].definition["function"] == {
        "name": "a",
        "description": "A.",
        "parameters": {"type": "object", "properties": {}, "required": ["x"]},
    }
    assert not request.tools.must_call
    assert chat(tools=tools, tool_choice="none").tools is None
    named = chat(tools=tools, tool_choice=tool("b"))
    assert named.tools is not None
    assert [function.name for function in named.tools.callable] == ["b"]
    assert len(named.tools.functions) == 2
    tools = [{"type": "function", "name": "a"}, {"type": "custom", "name": "patch"}]
    named = responding(tools=tools, tool_choice={"type": "custom", "name": "patch"})
    assert named.tools is not None
    assert ([each.name for each in named.tools.callable], named.tools.must_call) == (
        ["patch"],
        True,
    )
    assert responding(tools=[{"type": "web_search"}], tool_choice="auto").tools is None


def test_a_deferred_tool_may_be_called_when_a_search_has_found_it() -> None:
    """The tools in the prompt stay the same: a new one is described where it was found."""
    late = {"name": "late", "defer_loading": True, "description": "D."}
    asked: dict[str, Any] = {"tools": [{"name": "Search"}, late, {**late, "name": "never"}]}
    call = {"type": "tool_use", "id": "t1", "name": "Search", "input": {}}
    found = [{"type": "tool_reference", "tool_name": "late"}]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": found}
    turns = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    before, after = messaging(**asked), messaging(**asked, messages=turns)
    for request, names in ((before, ["Search"]), (after, ["Search", "late"])):
        assert request.tools is not None
        assert [each.name for each in request.tools.functions] == ["Search"]
        assert [each.name for each in request.tools.callable] == names
        assert request.warnings == ()
    assert json.loads(after.messages[-1].content or "")["description"] == "D."
    hosted = messaging(tools=[late, {"type": "tool_search_tool_regex_20251119", "name": "s"}])
    assert hosted.tools is not None
    assert [each.name for each in hosted.tools.functions] == ["late"]


@pytest.mark.parametrize("ids", [(None, None, None), ("1", "2", "3")])
def test_results_without_ids_and_names_belong_to_calls_in_order(ids: tuple[str | None]) -> None:
    """As clients of Ollama send them; LangChain's for JavaScript gives ids to calls only."""
    names = ("look", "go", "look")
    calls = [
        {"id": identity, "function": {"name": name}}
        for identity, name in zip(ids, names, strict=True)
    ]
    turns = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "content": name} for name in ("look", "go", "look")),
        {"role": "tool", "tool_name": "unknown", "content": "lost"},
    ]
    *_, first, second, third, lost = chat(messages=turns).messages
    for result, identity in zip((first, second, third), ids, strict=True):
        assert (result.role, result.name) == ("tool", result.content)
        assert result.tool_call_id == (identity or "")
    assert (lost.role, lost.content) == ("user", "[result of an earlier call]\nlost")


def test_a_call_and_its_result() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "a", "arguments": '{"x": 1}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "a", "arguments": "{"}}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call, broken]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]
    _, assistant, answer = chat(messages=turns).messages
    calls = (ToolCall("c1", "a", {"x": 1}), ToolCall("c2", "a", {"text": "{"}))
    assert assistant == Message("assistant", "", calls)
    assert answer == Message("tool", "7", tool_call_id="c1", name="a")
    # After compaction there may be results without tools.
    assert with_call_form(chat(messages=turns), "{{ messages }}").warnings == ()


def test_a_call_of_a_custom_tool_and_its_result() -> None:
    """As OpenAI's clients repeat it: its only argument is a free text."""
    call = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "+ x"}}
    turns = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    request = chat(messages=turns)
    _, assistant, answer = request.messages
    assert assistant.tool_calls == (ToolCall("c1", "patch", {"input": "+ x"}),)
    assert answer == Message("tool", "done", tool_call_id="c1", name="patch")
    assert request.warnings == ()
    with pytest.raises(BodyError, match=r"tool_calls\[0\]\.function\.name: it is missing"):
        chat(messages=[{"role": "assistant", "tool_calls": [{"id": "c1", "function": {}}]}])


@pytest.mark.parametrize(
    ("written", "read"),
    [
        *((nothing, {}) for nothing in ("", None, "{}")),
        ({"x": 1}, {"x": 1}),
        *(
            (broken, {"text": broken})
            for broken in ("[1]", "{", '{"x": "\\ud800"}', '{"x":' * 5000)
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_arguments_are_an_object_which_has_what_was_written_instead(
    written: Any, read: Any
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "a", "arguments": written}}
    (message,) = chat(messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    assert message.tool_calls[0].arguments == read


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"grammar": 'root ::= "no"'}, "cannot be combined with tools"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_options_that_exclude_tool_calls_are_rejected(body: dict[str, Any], why: str) -> None:
    with pytest.raises(BodyError, match=why):
        with_call_form(chat(tools=[tool("a")], **body), FAMILIES["Hermes"])


# --- rejected and ignored fields ------------------------------------------------------------------

_ARRAYS = {"tools": [{"type": "web_search"}, {"type": "function", "name": "a", "parameters": 3}]}
_USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": 1}]}
_NO_ID = {"type": "function_call", "id": "fc_c", "call_id": None, "name": "a", "arguments": "{}"}
#: By API: bodies, and the field that is named.
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (chat, {"temperature": -1}, "temperature"),
    (chat, {"temperature": math.nan}, "temperature"),
    (chat, {"temperature": 10**400}, "temperature"),
    (chat, {"top_p": 1.5}, "top_p"),
    (chat, {"top_k": 10**400}, "top_k"),
    (chat, {"seed": 2**64}, "seed"),
    (chat, {"logit_bias": {"5": "x"}}, "logit_bias[0][1]"),
    (chat, {"logit_bias": [[5]]}, "logit_bias[0][1]"),
    (chat, {"logit_bias": "5"}, "logit_bias[0][1]"),
    (chat, {"json_schema": {"pattern": "^((((a{100}){100}){100}){100})$"}}, "json_schema"),
    (chat, {"max_completion_tokens": -3}, "max_completion_tokens"),
    (chat, {"stop": [1]}, "stop[0]"),
    (chat, {"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
    (chat, {"n": 2}, "n"),
    (chat, {"tools": [tool("a b")]}, "tools[0].name"),
    (chat, {"tools": [tool("a"), tool("a")]}, "tools[1].name"),
    (
        chat,
        {"tools": [tool("a", parameters={"properties": [1]})]},
        "tools[0].parameters.properties",
    ),
    (chat, {"tools": [tool("a", parameters={"required": True})]}, "tools[0].parameters.required"),
    (chat, {"tools": [tool("a")], "tool_choice": "some"}, "tool_choice"),
    (chat, {"tools": [tool("a")], "tool_choice": tool("b")}, "tool_choice"),
    (chat, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    (chat, {"response_format": {"type": "json_schema"}}, "response_format"),
    (chat, {"grammar": 'root ::= "a"', "json_schema": {}}, "json_schema"),
    (chat, {"grammar": 'root ::= "a"', "ignore_eos": True}, "ignore_eos"),
    (chat, {"json_schema": {"$ref": "#"}}, "json_schema"),
    (chat, {"guided_json": "{"}, "guided_json"),
    (chat, {"guided_regex": "["}, "guided_regex"),
    (chat, {"guided_regex": "(?<=a)b"}, "guided_regex"),
    (chat, {"guided_regex": "(a{100}){1000}"}, "guided_regex"),
    (chat, {"guided_choice": []}, "guided_choice"),
    (chat, {"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
    (chat, {"structured_outputs": {"choice": 1}}, "structured_outputs.choice"),
    (chat, {"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
    (responding, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (responding, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    (responding, {"input": [_NO_ID]}, "input[0]"),
    (responding, _ARRAYS, "tools[1].parameters"),
    (responding, {"tool_choice": {"type": "web_search"}}, "tool_choice"),
    (responding, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    (responding, {"text": {"format": {"type": "json_schema"}}}, "text.format"),
    (responding, {"text": {"format": {"type": "x"}}}, "text.format.type"),
    (messaging, {"messages": [{"role": "user", "content": []}]}, "messages"),
    (messaging, {"messages": [_USED, USER]}, "messages[0].content[0].input"),
    (
        messaging,
        {"tools": [{"type": "bash_20250124"}, {"name": "a", "input_schema": 1}]},
        "tools[1].input_schema",
    ),
    (messaging, {"stop_sequences": [1]}, "stop_sequences[0]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("request_of", "body", "field"), REFUSED, ids=[str(each[1])[:50] for each in REFUSED]
)
def test_unsupported_fields_are_rejected_by_name(
    request_of: Any, body: dict[str, Any], field: str
) -> None:
    with pytest.raises(BodyError) as error:
        request_of(**body)
    assert error.value.field == field
    assert error.value.message.startswith(f"{field}: ")
    assert "\n" not in error.value.message
    error.value.message.encode()


def test_features_that_the_server_lacks_are_ignored_with_a_warning() -> None:
    lacking: dict[str, Any] = {
        "store": True,
        "verbosity": "low",
        "colour": "red",
        "samplers": ["top_k"],
        "best_of": 3,
    }
    user = {"role": "user", "content": [{"type": "text", "text": "hi", "hue": 1}], "mood": "glad"}
    request = chat(**lacking, messages=[user, user], speculative={"min": 1})
    assert request.sampling == chat().sampling
    nested = ["messages.mood", "messages.content.hue", "speculative.min"]
    assert sorted(fields(request)) == sorted([*lacking, *nested])
    asks_nothing = {"store": False, "user": "eva", "metadata": {"a": 1}, "functions": []}
    assert chat(**asks_nothing) == chat()


def test_ignored_fields_are_mentioned() -> None:
    asks: dict[str, Any] = {
        "client_metadata": {"a": 1},
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "store": True,
        "text": {"verbosity": "low"},
        "reasoning": {"context": "auto"},
        "invented": 1,
        "background": True,
        "n": 2,
        "top_logprobs": 2,
    }
    unknown = {*asks} - {"client_metadata", "prompt_cache_key", "service_tier"}
    assert set(fields(responding(**asks))) == unknown
    nothing = {**dict.fromkeys(asks), "store": False}
    assert fields(responding(**nothing)) == []


def test_a_known_name_is_never_called_unknown() -> None:
    twice = chat(max_tokens=3, max_completion_tokens=5)
    assert twice.generation.max_tokens == 3
    assert twice.warnings == (
        "max_completion_tokens: ignored, since the field is also given under another name",
    )
    assert responding(reasoning={"context": "auto"}).warnings == (
        "reasoning: ignored, since specgen uses none of its fields",
    )


def test_fields_of_llama_cpps_paths_are_not_ignored_silently_on_others() -> None:
    given: dict[str, Any] = {
        "n_indent": 4,
        "n_probs": 2,
        "response_fields": ["content"],
        "return_tokens": True,
        "t_max_predict_ms": 9,
    }
    assert fields(read("completion", prompt="x", **given)) == [*given]
    (own,) = read_llama_cpp_completion({"prompt": "x", **given}, Defaults())
    assert own.warnings == ()
    assert (own.generation.n_indent, own.generation.logprobs, own.time_limit_s) == (4, 2, 0.009)


def test_no_field_of_a_text_is_ignored_silently() -> None:
    (asked,) = read_completion({"prompt": "x", "system": "Be brief."})
    assert fields(asked) == ["system"]
    (line,) = (read("prompt", prompt="x", system="Be brief."),)
    assert (line.messages[0], line.warnings) == (Message("system", "Be brief."), ())
    (gap,) = read_completion({"prompt": "x", "suffix": "y", "echo": True})
    assert fields(gap) == ["echo"]
    with pytest.raises(BodyError, match="suffix: "):
        read_completion({"prompt": [1, 2], "suffix": "y"})
    with pytest.raises(BodyError, match="system: with raw"):
        read_ollama_generate({"prompt": "x", "raw": True, "system": "y"}, Defaults())
    for chat_or_text in (chat(top_logprobs=2), read("completion", prompt="x", top_logprobs=2)):
        assert fields(chat_or_text) == ["top_logprobs"]
    assert fields(chat(top_logprobs=2, logprobs=True)) == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (read_ollama_chat, {"messages": [{"role": "user", "content": "x"}]}),
        (read_ollama_generate, {"prompt": "x"}),
        (read_ollama_generate, {"prompt": "x", "raw": True}),
    ],
)
def test_ollamas_name_of_the_format_is_in_messages(path: Any, body: dict[str, Any]) -> None:
    with pytest.raises(BodyError) as error:
        path({**body, "format": {"type": "colour"}}, Defaults())
    assert error.value.field == "format"
    assert error.value.message.startswith("format: ")
    schema = {"type": "array", "uniqueItems": True}
    (request,) = path({**body, "format": schema}, Defaults())
    assert request.warnings == ("format: no grammar can enforce uniqueItems",)


def test_ollamas_limit_of_an_answer() -> None:
    """As in Ollama, only a positive number is a limit; an error has Ollama's name of the field."""

    def limit(body: dict[str, Any]) -> int:
        (request,) = read_ollama_generate({"prompt": "x", **body}, DEFAULTS)
        assert request.warnings == ()
        return request.generation.max_tokens

    assert limit({}) == limit({"options": {"num_predict": None}}) == 5
    assert limit({"options": {"num_predict": 7}}) == limit({"num_predict": 7}) == 7
    for number in (0, -1, -2, -100):
        assert limit({"options": {"num_predict": number}}) == -1
    with pytest.raises(BodyError) as error:
        limit({"options": {"num_predict": "many"}})
    wanted = 'options.num_predict: give a whole number, not "many"'
    assert error.value.message == wanted


@pytest.mark.parametrize(
    ("read_body", "agent"),
    [(read_messages, MESSAGES), (read_response_request, RESPONSES), (read_chat, CHAT)],
)
@given(seed=st.integers(0, 10**9))
def test_any_body_is_read_or_refused(read_body: Any, agent: dict[str, Any], seed: int) -> None:
    """No other exception leaves a reader: it would be a 500."""
    try:
        body = from_json(mutated(agent, random.Random(seed)), allow_inf_nan=False)
    except ValueError:
        return
    if not isinstance(body, dict):
        return
    try:
        (asked,) = read_body(body)
        Answer(with_call_form(asked, TEMPLATE))
        written(asked, "x")
    except BodyError as error:
        error.message.encode()
