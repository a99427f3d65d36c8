"""The answers in the formats of all APIs, complete and streamed."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import openai.types.responses as api
import pytest
from pydantic import TypeAdapter

from specgen.events import CommittedEvent, Piece, ReasonCount, TokenLogprob
from specgen.serve.formats.figures import answer_figures, vllm_metrics
from specgen.serve.formats.llama_server import read_infill
from specgen.serve.formats.messages import error_body
from specgen.serve.formats.parsed_request import RequestKind
from specgen.session.prompts.template import Message, ToolCall
from tests.helpers.formats import FINISHED, context_of, written
from tests.serve.test_formats import chat, messaging, read, responding

EVENT: TypeAdapter[Any] = TypeAdapter(api.ResponseStreamEvent)

PIECES = [
    Piece(1, "é", "accepted", "model"),
    Piece(9, "!", "accepted", "grammar"),
    Piece(2, " b", "bonus", "target"),
]


def test_an_answer_with_a_line_ends_when_its_time_is_over() -> None:
    (request,) = read_infill({"t_max_predict_ms": 1500})
    writer = request.writer(context_of(request))

    def is_over(text: str, time_s: float) -> bool:
        piece = Piece(1, text, "plain", "target")
        writer.feed(0, CommittedEvent(0, 0.0, 1, (piece,), text, 1))
        return bool(writer.is_over(0, time_s))

    assert [is_over("a", 9.0), is_over("\n", 1.0), is_over("b", 2.0)] == [False, False, True]


def body(kind: RequestKind, **more: Any) -> dict[str, Any]:
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
    both = answer_figures([FINISHED, other], n_answers_per_prompt=2)
    counts = [(each["reason"], each["n_rounds"]) for each in both["speculative"]["undrafted"]]
    assert counts == [("no room", 5), ("nothing found", 3), ("failed", 1)]
    drafts = both["speculative"]
    assert drafts["accepted_by_position"] == [2, 2]
    assert (drafts["acceptance_rate"], drafts["mean_accepted_length"]) == (0.25, 1.5)
    assert (drafts["n_drafted"], both["usage"]["completion_tokens"]) == (8, 4)
    assert both["usage"]["prompt_tokens"] == 12
    assert answer_figures([FINISHED, other])["usage"]["prompt_tokens"] == 24
    assert both["timings"]["predicted_per_second"] == 2.0


def test_vllm_counts_drafts_by_how_many_of_their_tokens_were_accepted() -> None:
    """Of five drafts, two were rejected, one was accepted up to its first token, two up to the
    third; in all, they had twelve tokens.
    """
    answer = dataclasses.replace(
        FINISHED,
        n_drafted=12,
        n_accepted=7,
        drafted_by_depth=(5, 4, 2),
        accepted_by_depth=(3, 2, 2),
    )
    assert vllm_metrics(answer) == {
        "mean_acceptance_length": 2.4,
        "draft_acceptance_rate": 7 / 12,
        "acceptance_histogram": [2, 1, 0, 2],
        "num_accepted_draft_tokens": 7,
        "num_draft_tokens": 12,
        "num_spec_steps": 5,
    }
    none = dataclasses.replace(FINISHED, n_drafted=0, drafted_by_depth=(), accepted_by_depth=())
    assert vllm_metrics(none) is None


@pytest.mark.parametrize("is_rough", [False, True])
def test_a_busy_machine_knows_a_rough_gain(is_rough: bool) -> None:
    gain: Any = {"estimated_speedup": 1.5, "estimated_speedup_range": (1.4, 1.6)}
    answer = dataclasses.replace(FINISHED, **gain, estimate_is_rough=is_rough)
    drafts = answer_figures([answer])["speculative"]
    assert (drafts["estimated_speedup"], drafts["estimated_speedup_range"]) == (1.5, [1.4, 1.6])
    assert drafts["estimate_is_rough"] == is_rough
    assert not answer_figures([answer, answer])["speculative"]["estimate_is_rough"]


def test_the_bytes_of_a_token_are_not_those_of_its_character() -> None:
    own = TokenLogprob(1, "\\xa9", -0.5, (0xA9,))
    piece = Piece(1, "é", "accepted", "model", -0.5, (own,))
    _, made = written(chat(logprobs=True), piece)
    (entry,) = made["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("\\xa9", [0xA9])


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


GIVEN = [{"type": "custom", "name": "patch"}, {"type": "function", "name": "a"}]
SAID = (
    "<think>I ",
    "see</think>",
    "So",
    " be it",
    '<tool_call>{"name": "a", "arguments": {"n": 1}}</tool_call>',
    '<tool_call>{"name": "patch", "arguments": {"input": "+x"}}</tool_call>',
)


def events_of(*tokens: str, finish_reason: str = "stop", **body: Any) -> list[dict[str, Any]]:
    events, whole = written(responding(tools=GIVEN, **body), *tokens, finish_reason=finish_reason)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(json.loads(json.dumps(event)))
    assert events[-1]["response"] == whole
    return events


def test_the_events_of_an_answer() -> None:
    events = events_of(
        *SAID,
        include=["reasoning.encrypted_content"],
        metadata={"a": "b"},
        best_of=2,
        temperature=0,
    )
    kinds = [event["type"].removeprefix("response.") for event in events]
    text = ["output_item.added", "content_part.added"]
    end = ["content_part.done", "output_item.done"]
    call = ["output_item.added", "{0}.delta", "{0}.done", "output_item.done"]
    assert kinds == [
        *("created", "in_progress"),
        *(*text, *["reasoning_text.delta"] * 2, "reasoning_text.done", *end),
        *(*text, *["output_text.delta"] * 2, "output_text.done", *end),
        *(each.format("function_call_arguments") for each in call),
        *(each.format("custom_tool_call_input") for each in call),
        "completed",
    ]
    response = events[-1]["response"]
    done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    assert response["output"] == done
    assert [item["type"] for item in done] == [
        *("reasoning", "message", "function_call", "custom_tool_call")
    ]
    assert done[0]["content"][0]["text"] == "I see"
    assert done[1]["content"][0]["text"] == "So be it"
    assert done[2]["arguments"] == '{"n": 1}'
    assert done[3]["input"] == "+x"
    assert len({item["id"] for item in done}) == 4
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == done[event["output_index"]]["id"]
    assert response["usage"] == {
        "input_tokens": 12,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 14,
    }
    assert [each.partition(":")[0] for each in response["warnings"]] == ["best_of"]
    assert (response["metadata"], response["status"]) == ({"a": "b"}, "completed")
    assert (response["temperature"], response["parallel_tool_calls"]) == (0, True)
    # What a client sends back is the turn as it was.
    (turn,) = responding(input=done).messages
    first, second = (item["call_id"] for item in done[2:])
    calls = (ToolCall(first, "a", {"n": 1}), ToolCall(second, "patch", {"input": "+x"}))
    assert turn == Message("assistant", "So be it", calls, reasoning="I see")
    hidden = [{**done[0], "content": None}, *done[1:]]
    assert responding(input=hidden).messages == (turn,)


def test_a_wanted_summary_is_the_thoughts() -> None:
    events = events_of("<think>\nI ", "see\n</think>", "So", reasoning={"summary": "auto"})
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[2:9] == [
        *("output_item.added", "reasoning_summary_part.added"),
        *["reasoning_summary_text.delta"] * 2,
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
    ]
    deltas = [each["delta"] for each in events if each["type"].endswith("summary_text.delta")]
    assert "".join(deltas) == "I see"
    item = events[-1]["response"]["output"][0]
    assert item["content"] == []
    assert item["summary"] == [{"type": "summary_text", "text": "I see"}]
    assert responding(input=[item, {"role": "assistant", "content": "So"}]).messages == (
        Message("assistant", "So", reasoning="I see"),
    )


@pytest.mark.parametrize("tokens", [("<think>", "\n\n", "</think>", "\n\n", "Yes"), ("Yes",)])
def test_white_space_is_not_a_thought(tokens: tuple[str, ...]) -> None:
    """Models that were told not to think write it between the marks."""
    chunks, whole = written(chat(stream=True), *tokens)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "Yes"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "Yes"}, {}]
    assert [block["type"] for block in written(messaging(), *tokens)[1]["content"]] == ["text"]


@pytest.mark.parametrize("end", ["</think>\n\nYes", ""])
def test_thoughts_have_no_white_space_around_them(end: str) -> None:
    tokens = ("<think>\n", "\nI", " ", "\n", "see", "\n", "\n", end)
    tools = [{"type": "function", "function": {"name": "a"}}]
    chunks, whole = written(chat(stream=True, tools=tools), *tokens)
    deltas = [chunk["choices"][0]["delta"].get("reasoning_content", "") for chunk in chunks]
    assert "".join(deltas) == "I \nsee"
    assert whole["choices"][0]["message"]["reasoning_content"] == "I \nsee"


def test_an_answer_that_was_cut_is_incomplete() -> None:
    last = events_of("So", finish_reason="length")[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert api.Response.model_validate(last["response"]).output_text == "So"


def test_an_empty_answer_contains_an_item() -> None:
    (item,) = events_of()[-1]["response"]["output"]
    assert item["content"][0]["text"] == ""


def test_a_failure_ends_the_events() -> None:
    request = responding()
    writer = request.writer(context_of(request))
    writer.begin(7)
    (event,) = writer.fail({"error": {"message": "lost", "type": "server_error"}})
    EVENT.validate_python(event)
    assert event["type"] == "response.failed"
    assert event["response"]["error"]["message"] == "lost"


def test_blocks_of_all_kinds_whole_and_as_events() -> None:
    asked = messaging(tools=[{"name": "a"}])
    call = '<tool_call>{"name": "a", "arguments": {"x": "é"}}</tool_call>'
    events, whole = written(asked, "<think>Th", "en</think>", "Yes", call, call)
    blocks: list[dict[str, Any]] = []
    # The AI SDK sends back only thoughts that were signed.
    signature = {"type": "signature_delta", "signature": ""}
    assert [event["index"] for event in events if event.get("delta") == signature] == [0]
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "told": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            (told,) = (value for name, value in event["delta"].items() if name != "type")
            blocks[-1]["told"] += told
    assert [(block["type"], block["told"]) for block in blocks] == [
        ("thinking", "Then"),
        ("text", "Yes"),
        ("tool_use", '{"x": "é"}'),
        ("tool_use", '{"x": "é"}'),
    ]
    assert [block["id"] for block in blocks[2:]] == [block["id"] for block in whole["content"][2:]]
    assert len({block["id"] for block in blocks[2:]}) == 2
    assert [block.get("text", block.get("thinking")) for block in whole["content"][:2]] == [
        *("Then", "Yes")
    ]
    assert [block["input"] for block in whole["content"][2:]] == [{"x": "é"}] * 2
    assert sum(event["type"] == "content_block_stop" for event in events) == len(blocks)
    last = events[-2]
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"]["input_tokens"] == 4
    assert last["usage"]["cache_read_input_tokens"] == 8
    assert last["usage"]["output_tokens"] == 2
    assert {name: whole[name] for name in last if name not in ("type", "delta")} == {
        name: value for name, value in last.items() if name not in ("type", "delta")
    }


@pytest.mark.parametrize(
    ("kind", "code", "told"),
    [
        ("server_error", "bug", "api_error"),
        ("service_unavailable_error", None, "overloaded_error"),
        ("rate_limit_error", "queue_full", "rate_limit_error"),
        ("invalid_request_error", "request_too_large", "request_too_large"),
    ],
)
def test_errors_have_the_types_of_the_api(kind: str, code: str | None, told: str) -> None:
    error = {"error": {"type": kind, "code": code, "message": "no", "param": None}}
    assert error_body(error) == {"type": "error", "error": {"type": told, "message": "no"}}
