"""The server with OpenAI's own client."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import specgen
from specgen.session.engine import generate
from tests.helpers.server import Running, serves, session_of, tiny_server
from tests.tiny.config import CHATML_TEMPLATE, INFILL_TOKENS

MESSAGES: Any = [{"role": "user", "content": "the cat is in the"}]
PROMPT = "the cat is in the house of"


server = serves(
    draft=0.05, chat_template=CHATML_TEMPLATE, control_tokens=INFILL_TOKENS, n_ctx_train=512
)


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client as client:
        yield client


def said(server: Running, prompt: Any) -> str:
    """What the target alone answers."""
    with session_of(server.session.options.target, "none") as plain:
        *_, last = generate(plain, prompt)
        text: str = last.text  # type: ignore[union-attr]
        return text


def test_a_chat_is_answered_as_the_target_alone_would(
    server: Running, client: openai.OpenAI
) -> None:
    answer = client.chat.completions.create(model="any", messages=MESSAGES)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == said(
        server, server.session.prompts.of_text(MESSAGES[0]["content"])
    )
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_has_the_same_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="any", messages=MESSAGES)
    usage: Any = {"include_usage": True}
    *chunks, last, alone = client.chat.completions.create(
        model="any", messages=MESSAGES, stream=True, stream_options=usage
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert (alone.choices, last.usage) == ([], None)
    assert alone.usage is not None
    assert whole.usage is not None
    assert alone.usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {last.id}
    for options in (
        None,
        {"include_usage": False},
    ):  # clients that did not ask would count it twice
        asked: Any = {
            "messages": MESSAGES,
            "stream": True,
            "extra_body": {"stream_options": options},
        }
        *_, last = client.chat.completions.create(model="any", **asked)
        assert last.usage is None
        assert last.timings["predicted_n"] > 0


def test_several_prompts_and_several_answers(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "a dog"]
    answer = client.completions.create(model="any", prompt=prompts, n=2, temperature=1.0, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for number, choice in enumerate(answer.choices):
        alone = client.completions.create(
            model="any", prompt=prompts[number // 2], temperature=1.0, seed=3 + number % 2
        )
        assert choice.text == alone.choices[0].text
    assert answer.choices[0].text != answer.choices[1].text
    streamed = ["", "", "", ""]
    for chunk in client.completions.create(
        model="any", prompt=prompts, n=2, temperature=1.0, seed=3, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in answer.choices]
    assert answer.usage is not None
    assert len({choice.text for choice in answer.choices}) > 2


def test_a_text_with_a_suffix_is_a_gap(server: Running, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="any", prompt="the cat ", suffix=" the house")
    filled = server.post("/infill", input_prefix="the cat ", input_suffix=" the house").json()
    assert answer.choices[0].text == filled["content"]
    body: dict[str, Any] = {"input_prefix": "the cat ", "input_suffix": " the house"}
    assert server.post("/infill", n=2, **body).json()["error"]["param"] == "n"
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    streamed = server.post("/infill", **body).text
    assert (
        json.loads(streamed.split("data: ")[-2])["tokens_evaluated"] == filled["tokens_evaluated"]
    )
    without = client.completions.create(model="any", prompt="the cat ")
    assert answer.usage is not None
    assert without.usage is not None
    assert answer.usage.prompt_tokens > without.usage.prompt_tokens


def test_logprobs_are_the_same_with_drafts_and_without(client: openai.OpenAI) -> None:
    found = [
        client.chat.completions.create(
            model="any",
            messages=MESSAGES,
            logprobs=True,
            top_logprobs=3,
            extra_body={"speculative": {"draft": draft}},
        )
        for draft in (True, False)
    ]
    drafted, plain = (each.choices[0].logprobs.content for each in found)  # type: ignore[union-attr]
    assert drafted is not None
    assert plain is not None
    data = b"".join(bytes(each.bytes or ()) for each in drafted)
    assert data.decode() == found[0].choices[0].message.content
    assert [each.token for each in drafted] == [each.token for each in plain]
    for one, other in zip(drafted, plain, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert len(one.top_logprobs) == 3
        assert one.top_logprobs[0].logprob >= one.logprob - 1e-4
    chunks = client.chat.completions.create(
        model="any", messages=MESSAGES, logprobs=True, top_logprobs=3, stream=True
    )
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or ()
    ]
    assert [each.token for each in streamed] == [each.token for each in drafted]


# --- errors


MANY = {"type": "object", "properties": {f"v{n}": {"type": "string"} for n in range(501)}}
AMBIGUOUS = "".join(f'"{letter}"? ' for letter in string.ascii_lowercase * 1000)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("n", 17, "n"),
        ("speculative", {"verifier": "none"}, "speculative.verifier"),
        ("logit_bias", {"1000000": 1}, "logit_bias"),
        ("json_schema", MANY, "json_schema"),
        ("grammar", f'root ::= {AMBIGUOUS} "."', "more than 50000"),
        ("grammar", "root ::= (", "grammar, line 1"),
    ],
    ids=["n", "verifier", "token", "too large", "would hold the server", "none at all"],
)
def test_unsupported_options_are_rejected_by_name(
    client: openai.OpenAI, name: str, value: object, told: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=told) as caught:
        client.chat.completions.create(model="any", messages=MESSAGES, extra_body={name: value})
    assert caught.value.param in (told, name, None if name == "grammar" else name)
    assert caught.value.type == "invalid_request_error"


def test_unknown_paths_and_methods_are_errors(server: Running) -> None:
    assert server.http.get("/v2/models").status_code == 404
    assert server.http.get("/v1/chat/completions").status_code == 405
    error = server.http.get("/v2/models").json()["error"]
    assert (error["type"], error["message"]) == ("not_found_error", "GET /v2/models: not found")
    wrong = server.http.get("/v1/chat/completions")
    assert wrong.headers["Allow"] == "POST"


def test_paths_without_a_version_and_with_a_slash(server: Running) -> None:
    def said(path: str, **body: Any) -> Any:
        found = server.post(path, **body, max_tokens=4)
        assert found.status_code == 200, path
        return found.json()

    text: Any = {"prompt": PROMPT}
    named: list[tuple[str, dict[str, Any]]] = [
        ("/chat/completions", {"messages": MESSAGES}),
        ("/responses", {"input": PROMPT}),
        ("/infill", {"input_prefix": PROMPT}),
        ("/completions", text),
    ]
    for path, body in named:
        usages = [said(each, **body)["usage"] for each in (path, f"/v1{path}", f"/v1{path}/")]
        assert len({str(each) for each in usages[1:]}) == 1
    whole, own = said("/v1/completions", **text), said("/completion", **text)
    assert own["content"] == own["choices"][0]["text"] == whole["choices"][0]["text"]
    assert own["tokens_evaluated"] == whole["usage"]["prompt_tokens"]
    assert list(said("/completion", **text, response_fields=["content"])) == ["content"]
    assert len(said("/completions", **text, n=2)["choices"]) == 2
    get = server.http.get
    assert get("/models/").json() == get("/v1/models").json()
    assert get("/models/target").json()["id"] == "target"
    assert get("/v1/models/another").json()["id"] == "target"  # that which would answer
    assert get("/version").json()["version"] == specgen.__version__
    assert get("/page/").status_code == get("/page").status_code == 404
    assert "no embeddings" in server.post("/embeddings", input="x").json()["error"]["message"]


def test_variables_and_earlier_reasoning_reach_the_template(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }}|{% endfor %}{{ mood }}"
    )
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "why"},
        {"role": "user", "content": "c"},
    ]
    with tiny_server(tmp_path, max_tokens=2, chat_template=template) as server:
        body = {
            "messages": turns,
            "chat_template_kwargs": {"mood": "glad", "enable_thinking": True},
        }
        prompt = server.post("/apply-template", **body).json()["prompt"]
        assert prompt == "|a|why|b||c|glad"
        answer = server.post("/v1/chat/completions", **body, prompt_cache_retention="24h").json()
        (warning,) = answer["warnings"]
        assert warning.startswith("enable_thinking: ")
        tokens = server.post("/tokenize", content=prompt, add_special=True).json()["tokens"]
        assert answer["usage"]["prompt_tokens"] == len(tokens)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"a": NaN}', b"[" * 100_000])
def test_invalid_bodies_are_refused(server: Running, body: bytes) -> None:
    found = server.http.post("/v1/completions", content=body)
    assert found.status_code == 400
    assert found.json()["error"]["message"]


# --- what else comes with an answer


def test_the_wish_for_drafts_is_honoured_and_echoed(server: Running) -> None:
    wishes: list[dict[str, Any]] = [
        {"draft": False},
        {"draft": True, "max": 1},
        {"draft": True, "max": 0},
        {"draft": True, "verifier": "block"},
    ]
    for wish in wishes:
        body = server.post("/v1/completions", prompt=PROMPT, speculative=wish).json()
        found = body["speculative"]
        assert {name: found[name] for name in wish} == wish
        if not wish["draft"] or wish.get("max") == 0:
            assert found["n_drafted"] == 0
        if wish.get("max") == 1:
            assert len(found["drafted_by_position"]) <= 1


def test_drafts_are_also_reported_as_vllm_reports_them(server: Running) -> None:
    """Whole, and in a stream's last chunk; one that has several choices has no such figures."""
    body = server.post("/v1/chat/completions", messages=MESSAGES).json()
    found = body["metrics"]["speculative_decoding"]
    histogram = found["acceptance_histogram"]
    assert sum(histogram) == found["num_spec_steps"] > 0
    accepted = sum(n_accepted * n for n_accepted, n in enumerate(histogram))
    assert accepted == found["num_accepted_draft_tokens"] == body["timings"]["draft_n_accepted"]
    assert found["num_draft_tokens"] == body["timings"]["draft_n"]

    streamed = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
    lines = server.post("/v1/chat/completions", **streamed).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert chunks[-1]["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    assert [chunk for chunk in chunks if "metrics" in chunk] == [chunks[-1]]

    assert "metrics" not in server.post("/v1/chat/completions", messages=MESSAGES, n=2).json()
    plain = {"messages": MESSAGES, "speculative": {"draft": False}}
    assert "metrics" not in server.post("/v1/chat/completions", **plain).json()


def test_events_contain_the_origin_of_tokens(server: Running) -> None:
    kinds, text, names = set(), "", []
    with server.http.stream(
        "POST",
        "/v1/chat/completions",
        json={"messages": MESSAGES, "stream": True, "speculative": {"events": True}},
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for event in json.loads(line[6:]).get("events", []):
                    names.append(event["event"])
                    for piece in event.get("pieces", ()):
                        kinds.add(piece["kind"])
                        text += piece["text"]
    whole = server.post("/v1/chat/completions", messages=MESSAGES).json()
    assert text == whole["choices"][0]["message"]["content"]
    assert kinds <= {"accepted", "corrected", "bonus", "plain", "forced"}
    assert (names[0], names[-1]) == ("prompt", "finished")
    assert 0 < names.count("drafted") == names.count("verified") < names.count("committed")
