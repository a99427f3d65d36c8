"""Requests in OpenAI's form: what is taken, what is refused, and by which name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from specgen.events import CommittedEvent, Piece, ReasonCount, TokenLogprob
from specgen.options import GenerationOptions, SamplerOptions
from specgen.serve.formats.answers import figures
from specgen.serve.formats.local_servers import read_infill
from specgen.serve.formats.openai import read_request
from specgen.serve.formats.request import BodyError, Defaults, Kind, Request, with_call_form
from specgen.session.prompts.template import Message, ToolCall
from tests.helpers.formats import FINISHED, written
from tests.helpers.templates import FAMILIES

DEFAULTS = Defaults(SamplerOptions(top_k=7), GenerationOptions(max_tokens=5, stop=("END",)))


def read(kind: Kind, **body: Any) -> Request:
    return read_request(kind, body, DEFAULTS)


def chat(**body: Any) -> Request:
    return read("chat", **{"messages": [{"role": "user", "content": "hi"}], **body})


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def test_what_a_body_leaves_out_is_as_the_defaults_say() -> None:
    messages = (Message("user", "hi"),)
    assert chat() == Request("chat", *DEFAULTS, messages=messages, splits_reasoning=True)
    assert read("completion", prompt="a b") == Request("completion", *DEFAULTS, text="a b")
    expected = Request("prompt", *DEFAULTS, text="a b", splits_reasoning=True)
    assert read("prompt", prompt="a b") == expected
    assert chat(temperature=None, max_tokens=None, stop=None, model="gpt-9") == chat()
    assert chat(stream_options={"include_usage": None}) == chat()


def test_every_field_of_a_sampler_is_read() -> None:
    values = {
        each.name: 3 if isinstance(each.default, int) else 0.5
        for each in dataclasses.fields(SamplerOptions)
        if not isinstance(each.default, tuple)
    }
    expected = {"dry_breakers": (".", "!"), **values}
    assert chat(**values, dry_breakers=[".", "!"]).sampling == SamplerOptions(**expected)  # type: ignore[arg-type]
    others = {"dry_sequence_breakers": ["."], "dry_penalty_last_n": 9, "typ_p": 3}
    assert chat(**others).sampling == chat(dry_breakers=["."], dry_last_n=9).sampling
    assert chat(seed=2**40).sampling.seed == 2**40


def test_lengths_and_ends() -> None:
    for name, n in (("max_tokens", 0), ("max_completion_tokens", 9), ("n_predict", -1)):
        assert chat(**{name: n}).generation.max_tokens == n
    assert chat(stop="x").generation.stop == ("x",)
    assert chat(stop=["x", "yz"]).generation.stop == ("x", "yz")
    assert chat(stop=[]).generation.stop == ()
    assert chat(ignore_eos=True).generation.ignore_eos


def test_other_spellings_of_values() -> None:
    """What llama.cpp's, vLLM's and ollama's clients send."""
    assert chat(top_k=-1).sampling.top_k == 0
    assert chat(grammar="", stop=["x", ""]) == chat(stop="x")
    assert chat(repetition_penalty=1.5).sampling.repeat_penalty == 1.5
    for biases, pairs in (
        ([[5, -1], [6, False], ["6", 1]], ((5, -1.0), (6, -1e30), ("6", 1.0))),
        ({"5": -1, "the": False}, ((5, -1.0), ("the", -1e30))),
    ):
        assert chat(logit_bias=biases).biases == pairs
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
        Message("tool", "x", name="f"),
    )


def test_later_system_messages_are_text_of_the_users_turn() -> None:
    roles = ["system", "developer", "user", "system", "assistant", "system", "user", "user"]
    turns = [{"role": role, "content": text} for role, text in zip(roles, "abcdefgh", strict=True)]
    assert read("chat", messages=turns).messages == (
        Message("system", "a\n\nb"),
        Message("user", "c\n\nd"),
        Message("assistant", "e"),
        Message("user", "f\n\ng"),
        Message("user", "h"),
    )


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


def test_prompts() -> None:
    assert read("completion", prompt=[1, 2, 3]).tokens == (1, 2, 3)
    assert read("completion", prompt=[[1, 2]]).tokens == (1, 2)
    assert read("completion", prompt=["only"]).text == "only"
    turned = read("prompt", prompt="hi", system="be brief")
    assert turned.kind == "chat"
    assert turned.messages == (Message("system", "be brief"), Message("user", "hi"))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 10**400}, "top_k"),
        ({"seed": 2**64}, "seed"),
        ({"logit_bias": {"5": "x"}}, "logit_bias[0][1]"),
        ({"logit_bias": [[5]]}, "logit_bias[0][1]"),
        ({"json_schema": {"pattern": "^((((a{100}){100}){100}){100})$"}}, "json_schema"),
        ({"max_completion_tokens": -2}, "max_completion_tokens"),
        ({"stop": [1]}, "stop[0]"),
        ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"tools": [tool("a b")]}, "tools[0].name"),
        ({"tools": [tool("a"), tool("a")]}, "tools[1].name"),
        ({"tools": [tool("a", parameters={"properties": [1]})]}, "tools[0].parameters.properties"),
        ({"tools": [tool("a", parameters={"required": True})]}, "tools[0].parameters.required"),
        ({"tools": [tool("a")], "tool_choice": "some"}, "tool_choice"),
        ({"tools": [tool("a")], "tool_choice": tool("b")}, "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "json_schema"),
        ({"grammar": 'root ::= "a"', "ignore_eos": True}, "ignore_eos"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_honoured_is_refused(body: dict[str, Any], field: str) -> None:
    with pytest.raises(BodyError) as error:
        chat(**body)
    assert error.value.field == field
    assert error.value.message.startswith(f"{field}: ")
    assert "\n" not in error.value.message
    error.value.message.encode()


def test_what_the_server_lacks_is_ignored_with_a_warning() -> None:
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
    names = [warning.partition(":")[0] for warning in request.warnings]
    assert sorted(names) == sorted([*lacking, *nested])
    asks_nothing = {"store": False, "user": "eva", "metadata": {"a": 1}, "functions": []}
    assert chat(**asks_nothing) == chat()


def test_strict_decides_about_what_no_grammar_can_enforce() -> None:
    schema: Any = {"properties": {"a": {"type": "array", "uniqueItems": True}}}

    def asked(**more: Any) -> Request:
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
    assert "the length beside the pattern" in warning


PIECES = [
    Piece(1, "é", "accepted", "model"),
    Piece(9, "!", "accepted", "grammar"),
    Piece(2, " b", "bonus", "target"),
]


def test_an_answer_with_a_line_ends_when_its_time_is_over() -> None:
    (request,) = read_infill({"t_max_predict_ms": 1500})
    assert request.writer is not None
    writer = request.writer([request], [""], identity="a", created=1, model="m")

    def is_over(text: str, time_s: float) -> bool:
        piece = Piece(1, text, "plain", "target")
        writer.feed(0, CommittedEvent(0, 0.0, 1, (piece,), text, 1))
        return bool(writer.is_over(0, time_s))

    assert [is_over("a", 9.0), is_over("\n", 1.0), is_over("b", 2.0)] == [False, False, True]


def body(kind: Kind, **more: Any) -> dict[str, Any]:
    request = chat(**more) if kind == "chat" else read(kind, prompt="x", **more)
    return written(request, *PIECES)[1]


def test_the_body_of_a_chat() -> None:
    made = body("chat")
    assert (made["object"], made["id"]) == ("chat.completion", "chatcmpl-abc")
    assert (made["created"], made["model"]) == (17, "m.gguf")
    message = {"role": "assistant", "content": "é! b"}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    assert made["choices"] == [choice]
    assert made["usage"] == {
        "prompt_tokens": 12,
        "completion_tokens": 2,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert made["speculative"]["acceptance_rate"] == 0.25
    timings = made["timings"]
    assert (timings["prompt_n"], timings["prompt_per_second"]) == (4, 8.0)
    assert (timings["predicted_ms"], timings["predicted_per_second"]) == (1000.0, 2.5)
    assert {type(value) for value in timings.values()} <= {int, float}
    assert made["speculative"]["undrafted"] == [
        {"reason": "nothing found", "text": "nothing found to draft", "n_rounds": 3},
        {"reason": "no room", "text": "no room for a draft", "n_rounds": 1},
    ]
    text = body("completion")
    assert (text["object"], text["choices"][0]["text"]) == ("text_completion", "é! b")


def test_the_figures_of_several_answers_add_up() -> None:
    reasons = (
        ReasonCount("no room", "no room for a draft", 4),
        ReasonCount("failed", "the drafter has failed", 1),
    )
    other = dataclasses.replace(FINISHED, undrafted=reasons, accepted_by_depth=(1, 2))
    both = figures([FINISHED, other], n_for_each_prompt=2)
    counts = [(each["reason"], each["n_rounds"]) for each in both["speculative"]["undrafted"]]
    assert counts == [("no room", 5), ("nothing found", 3), ("failed", 1)]
    drafts = both["speculative"]
    assert drafts["accepted_by_position"] == [2, 2]
    assert (drafts["acceptance_rate"], drafts["mean_accepted_length"]) == (0.25, 1.5)
    assert (drafts["n_drafted"], both["usage"]["completion_tokens"]) == (8, 4)
    assert both["usage"]["prompt_tokens"] == 12
    assert figures([FINISHED, other])["usage"]["prompt_tokens"] == 24
    assert both["timings"]["predicted_per_second"] == 2.0


@pytest.mark.parametrize(("others_share", "is_known"), [(None, True), (0.1, True), (0.4, False)])
def test_a_busy_machine_knows_no_gain(others_share: float | None, is_known: bool) -> None:
    gain: Any = {"estimated_speedup": 1.5, "estimated_speedup_range": (1.4, 1.6)}
    answer = dataclasses.replace(FINISHED, **gain, others_share=others_share)
    drafts = figures([answer])["speculative"]
    expected = (1.5, [1.4, 1.6]) if is_known else (None, None)
    assert (drafts["estimated_speedup"], drafts["estimated_speedup_range"]) == expected


def test_the_bytes_of_a_token_are_not_those_of_its_character() -> None:
    own = TokenLogprob(1, "\\xa9", -0.5, (0xA9,))
    piece = Piece(1, "é", "accepted", "model", -0.5, (own,))
    _, made = written(chat(logprobs=True), piece)
    (entry,) = made["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("\\xa9", [0xA9])


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


def test_a_call_and_what_the_tool_answered() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "a", "arguments": '{"x": 1}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "a", "arguments": "{"}}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call, broken]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]
    _, assistant, answer = chat(messages=turns).messages
    calls = (ToolCall("c1", "a", {"x": 1}), ToolCall("c2", "a", "{"))
    assert assistant == Message("assistant", "", calls)
    assert answer == Message("tool", "7", tool_call_id="c1", name="a")
    # After compaction there may be results without tools.
    assert with_call_form(chat(messages=turns), "{{ messages }}").warnings == ()


def test_what_no_model_reads_is_named_and_the_text_goes_on() -> None:
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
        Message("user", "see \n[image left out: this model reads text]"),
        Message("assistant", "", (ToolCall("a", "a", {"x": 1}),)),
        Message("tool", "[file left out: this model reads text]", tool_call_id="a", name="a"),
        Message("user", ""),
    )


@pytest.mark.parametrize(
    ("written", "read"),
    [
        *((nothing, {}) for nothing in ("", None, "{}")),
        ({"x": 1}, {"x": 1}),
        *((broken, broken) for broken in ("[1]", "{", '{"x": "\\ud800"}', '{"x":' * 5000)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_arguments_are_an_object_or_told_as_they_are(written: Any, read: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "a", "arguments": written}}
    (message,) = chat(messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    assert message.tool_calls[0].arguments == read


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"grammar": 'root ::= "no"'}, "excludes tools"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_a_call_excludes_is_refused(body: dict[str, Any], why: str) -> None:
    with pytest.raises(BodyError, match=why):
        with_call_form(chat(tools=[tool("a")], **body), FAMILIES["Hermes"])


@pytest.mark.parametrize(
    ("tokens", "n_own", "n_thought"),
    [([""], 0, 0), (["<thi", ""], 1, 0), (["<think>", "a", ""], 2, 2), (["x", ""], 1, 0)],
    ids=["empty", "begun mark", "cut thought", "none"],
)
def test_an_answer_without_thoughts_has_no_reasoning_tokens(
    tokens: list[str], n_own: int, n_thought: int
) -> None:
    """The token that ends an answer is among its pieces."""
    _, whole = written(chat(), *tokens, n_tokens=n_own)
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": n_thought}
