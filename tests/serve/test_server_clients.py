"""The server as editors, evaluation tools, Ollama clients and others use it: what they send, and
what they expect.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from specgen.events import FinishedEvent
from specgen.session.engine import Engine
from tests.helpers.server import Running, serves, tiny_server
from tests.serve.test_server_tools import LARGE, TEMPLATE, tool
from tests.tiny.config import INFILL_TOKENS

TURNS: list[dict[str, Any]] = [{"role": "user", "content": "the cat is in the"}]
PROMPT = "the cat é is in the house"


server = serves(draft=0.05, **LARGE | {"control_tokens": INFILL_TOKENS})


def streamed(server: Running, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, events or lines."""
    found = server.post(path, stream=True, **body)
    assert found.status_code == 200, found.text
    lines = [line.removeprefix("data: ") for line in found.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


# --- editors --------------------------------------------------------------------------------------

GAP = {"input_prefix": "the cat ", "input_suffix": " the house", "prompt": "is "}
EXTRA = [{"text": "a dog", "time": [1, 2], "filename": "a.txt"}]
FIELDS = ["content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms"]
FIELDS += ["timings/predicted_n", "timings/predicted_per_second", "truncated", "tokens_cached"]
SHARED = {"id_slot": 0, "input_extra": EXTRA, "cache_prompt": True, "t_max_prompt_ms": 500}
NOTHING = {"input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "samplers": []}
SAMPLERS = {"top_k": 40, "samplers": ["top_k", "top_p", "infill"], "stream": False}
GIVEN = {**SHARED, **GAP, **SAMPLERS, "n_predict": 8, "n_indent": 4, "t_max_predict_ms": 60_000}
#: The requests of the plugins' own sources: llama.vim (a1c8e6e), llama.vscode (3938fb3).
EDITORS: dict[str, dict[str, Any]] = {
    "llama.vim": {**GIVEN, "stop": [], "top_p": 0.9, "response_fields": FIELDS},
    "llama.vim, ahead": {
        **SHARED,
        **NOTHING,
        "temperature": 0.0,
        "stream": False,
        "t_max_prompt_ms": 1,
        "t_max_predict_ms": 1,
        "response_fields": [""],
    },
    "llama.vscode": {**GIVEN, "top_p": 0.99, "n_cmpl": 1, "model": "any"},
    "llama.vscode, ahead": {**SHARED, **NOTHING, "t_max_predict_ms": 1},
    "llama.vscode, with an adapter": {**GIVEN, "lora": [{"id": 0, "scale": 0.5}]},
}


@pytest.mark.parametrize("name", EDITORS)
def test_what_editors_send_is_answered(server: Running, name: str) -> None:
    found = server.post("/infill", **EDITORS[name])
    assert found.status_code == 200, found.text
    body = found.json()
    if name == "llama.vim":
        assert list(body) == FIELDS
        assert body["timings/predicted_n"] == 8
    elif name == "llama.vim, ahead":
        assert body == {}
    elif "ahead" in name:
        assert body["content"] == ""
    else:
        ignored = [each.partition(":")[0] for each in body["warnings"]]
        assert ignored == (["samplers", "lora"] if "lora" in EDITORS[name] else ["samplers"])


def test_an_answer_of_no_tokens_warms_the_cache_up(server: Running) -> None:
    body = {**EDITORS["llama.vscode, ahead"], "input_extra": [{"text": "quite another file " * 3}]}
    first = server.post("/infill", **body).json()
    assert first["timings"]["predicted_n"] == 0
    assert first["timings"]["prompt_n"] > 20
    again = server.post("/infill", **{**body, "n_predict": 2}).json()
    assert again["timings"]["prompt_n"] == 1
    other = server.post("/infill", **{**body, "cache_prompt": False}).json()
    assert other["timings"]["cache_n"] == 0


def test_an_answer_ends_before_a_line_with_less_indentation(server: Running) -> None:
    grammar = r'root ::= "a\n    b\n  c\n" [a-z]+'
    for n_indent, text in ((4, "a\n    b"), (2, "a\n    b\n  c")):
        body = server.post("/infill", **GAP, grammar=grammar, n_indent=n_indent).json()
        assert (body["content"], body["stop_type"]) == (text, "eos")


@pytest.mark.parametrize("prompt", ["the cat is ", ""])
def test_a_gap_is_filled_alike_in_every_form(server: Running, prompt: str) -> None:
    """Also at the beginning of a file, where there is no text before the gap."""
    asked: dict[str, Any] = {"prompt": prompt, "suffix": " the house"}
    gap = {"input_prefix": prompt, "input_suffix": " the house"}
    middle = server.post("/infill", n_predict=8, **gap).json()["content"]
    assert middle
    (choice,) = server.post("/v1/completions", max_tokens=8, **asked).json()["choices"]
    assert choice["text"] == middle
    options = {"num_predict": 8}
    said = server.post("/api/generate", stream=False, options=options, **asked).json()
    assert said["response"] == middle
    # Mistral's form, with the fields that Continue sends.
    asked |= {"model": "codestral-latest", "max_tokens": 8, "stop": ["/src/"], "temperature": 0}
    whole = server.post("/v1/fim/completions", stream=False, **asked).json()
    assert whole["object"] == "chat.completion"
    (choice,) = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": middle}
    chunks = streamed(server, "/fim/completions", **asked)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == middle
    # Mistral's streams end with the usage, which cannot be asked for.
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert not any("usage" in chunk for chunk in chunks[:-1])


def test_mistrals_name_for_the_seed_is_read(server: Running) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "temperature": 2}
    wanted = server.post("/v1/completions", seed=7, **asked).json()["choices"][0]["text"]
    answer = server.post("/v1/fim/completions", random_seed=7, **asked).json()
    assert answer["choices"][0]["message"]["content"] == wanted
    assert "warnings" not in answer
    other = server.post("/v1/fim/completions", random_seed=8, **asked).json()
    assert other["choices"][0]["message"]["content"] != wanted


def test_a_gap_without_any_text_is_refused(server: Running) -> None:
    for path in ("/v1/completions", "/v1/fim/completions"):
        error = server.post(path, prompt="", suffix="").json()["error"]
        assert (error["param"], error["message"]) == ("prompt", "prompt: it is empty")


# --- llama.cpp's own path -------------------------------------------------------------------------


def test_prompts_of_tokens_and_texts_are_answered_as_a_list(server: Running) -> None:
    tokens = server.post("/tokenize", content=PROMPT, add_special=True).json()["tokens"]
    forms = [PROMPT, tokens, {"prompt_string": PROMPT}, [*tokens[:1], PROMPT]]
    found = server.post("/completion", prompt=forms, n_predict=4, return_tokens=True).json()
    alone = server.post("/completion", prompt=PROMPT, n_predict=4, return_tokens=True).json()
    assert [each["index"] for each in found] == [0, 1, 2, 3]
    for each in found:
        assert (each["content"], each["tokens"]) == (alone["content"], alone["tokens"])
        assert each["timings"]["predicted_n"] == each["tokens_predicted"] == 4
    mixed = [1, 2, PROMPT, 3, PROMPT]
    assert server.post("/completion", prompt=mixed, n_predict=2).json()["tokens_evaluated"] > 20
    chunks = streamed(server, "/completion", prompt=forms[:2], n_predict=4)
    for number in (0, 1):
        own = [each for each in chunks if each["index"] == number]
        assert "".join(each["content"] for each in own) == alone["content"]
        assert own[-1]["timings"]["predicted_n"] == 4
    assert len(server.post("/completion", prompt="x", n_cmpl=2, n_predict=1).json()) == 2
    openai = server.post("/completions", prompt=forms[:2], n_predict=4).json()
    assert [each["text"] for each in openai["choices"]] == [alone["content"]] * 2


@pytest.mark.parametrize("drafts", [True, False])
def test_the_chunks_of_a_stream_have_all_tokens(server: Running, drafts: bool) -> None:
    """Even those whose text is held back, because it may be the beginning of a stop string."""
    asked: dict[str, Any] = {"prompt": PROMPT, "n_predict": 8, "return_tokens": True}
    if not drafts:
        asked["speculative"] = {"draft": False}
    plain = server.post("/completion", **asked).json()
    for stop in (plain["content"][:5] + "\x00", plain["content"][-1] + "\x00"):
        chunks = streamed(server, "/completion", stop=[stop], **asked)
        assert "".join(chunk["content"] for chunk in chunks) == plain["content"]
        assert [token for chunk in chunks for token in chunk["tokens"]] == plain["tokens"]
    assert len(plain["tokens"]) == 8


def test_biases_of_texts_are_those_of_their_tokens(server: Running) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "n_predict": 8, "return_tokens": True}
    said = server.post("/completion", **asked).json()["content"]
    tokens = server.post("/tokenize", content=said).json()["tokens"]
    for biases in ([[said, False]], {said: -1000}):
        other = server.post("/completion", logit_bias=biases, **asked).json()
        assert other["content"]
        assert not set(other["tokens"]) & set(tokens)


def test_pieces_are_the_text_of_their_tokens(server: Running) -> None:
    """Those of control tokens are their names, as in the servers of llama.cpp and vLLM."""
    body: dict[str, Any] = {"content": f"<|im_start|>{PROMPT}", "add_special": True}
    tokens = server.post("/tokenize", **body).json()["tokens"]
    found = server.post("/tokenize", with_pieces=True, **body).json()["tokens"]
    assert [each["id"] for each in found] == tokens
    text = server.post("/detokenize", tokens=tokens).json()["content"]
    assert "".join(each["piece"] for each in found) == text
    assert text.endswith(f"<|im_start|>{PROMPT}")


def test_a_character_cut_in_two_is_answered(server: Running) -> None:
    body = b'{"prompt": "cut \\ud83d here \\\\ud83d", "max_tokens": 1, "echo": true}'
    found = server.http.post("/v1/completions", content=body).json()
    assert found["choices"][0]["text"].startswith("cut ? here \\ud83d")
    for broken in (b'{"prompt": "\\ud83d"', b'{"a": "\\ud83d", "b": ' + b"[" * 100_000):
        assert server.http.post("/v1/completions", content=broken).status_code == 400


# --- log-probabilities ----------------------------------------------------------------------------


def exact(server: Running, tokens: list[int]) -> list[dict[int, float]]:
    """The log-probabilities after each token, from answers to all prefixes."""
    found = []
    for n in range(1, len(tokens)):
        body = {"prompt": tokens[:n], "max_tokens": 1, "logit_bias": {}, "n_probs": 100}
        (entry,) = server.post("/completion", **body).json()["completion_probabilities"]
        found.append({top["id"]: top["logprob"] for top in entry["top_logprobs"]})
    return found


@pytest.mark.parametrize("n_tokens", [0, 1])
@pytest.mark.parametrize("streams", [False, True])
def test_an_echo_has_the_prompts_log_probabilities(
    server: Running, n_tokens: int, streams: bool
) -> None:
    """As evaluations ask for them: several prompts of tokens, longer than the rows of a batch that
    have logits.
    """
    text = PROMPT * 3
    tokens = server.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"]
    assert len(tokens) > 2 * server.engine.target.n_outputs
    body: dict[str, Any] = {"prompt": [tokens, tokens[:5]], "max_tokens": n_tokens, "logprobs": 5}
    if streams:
        found: dict[str, list[Any]] = {}
        said = ""
        for chunk in streamed(server, "/v1/completions", echo=True, **body):
            (choice,) = chunk["choices"]
            if choice["index"] == 0:
                said += choice["text"]
                for name, values in (choice["logprobs"] or {}).items():
                    found.setdefault(name, []).extend(values)
    else:
        first, second = server.post("/v1/completions", echo=True, **body).json()["choices"]
        found, said = first["logprobs"], first["text"]
        assert second["logprobs"]["token_logprobs"][:5] == found["token_logprobs"][:5]
        assert len(second["logprobs"]["tokens"]) == 5 + n_tokens
    assert said.startswith(text)
    assert {len(values) for values in found.values()} == {len(tokens) + n_tokens}
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    for place, probabilities in enumerate(exact(server, tokens), 1):
        own, tops = found["token_logprobs"][place], found["top_logprobs"][place]
        assert found["tokens"][place] in tops
        assert own == pytest.approx(probabilities.get(tokens[place], own), abs=1e-4)
        best = sorted(probabilities.values(), reverse=True)[:3]
        assert sorted(tops.values(), reverse=True)[:3] == pytest.approx(best, abs=1e-4)
    for offset, token in zip(found["text_offset"], found["tokens"], strict=True):
        assert "\\x" in token or said[offset:].startswith(token)


def test_an_echo_needs_no_log_probabilities(server: Running) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 3}
    alone = server.post("/v1/completions", **body).json()["choices"][0]["text"]
    whole = server.post("/v1/completions", echo=True, **body).json()["choices"][0]
    assert (whole["text"], whole["logprobs"]) == (PROMPT + alone, None)
    chunks = streamed(server, "/v1/completions", echo=True, **body)
    assert "".join(each["choices"][0]["text"] for each in chunks) == PROMPT + alone
    gap = {"prompt": "the cat ", "suffix": " house", "max_tokens": 3, "echo": True, "logprobs": 1}
    assert server.post("/v1/completions", **gap).json()["choices"][0]["text"]


def test_parts_of_characters_are_reported_as_bytes(server: Running) -> None:
    body: dict[str, Any] = {"grammar": 'root ::= "ü😀ü"', "temperature": 1.0, "seed": 1}
    asked = {**body, "messages": TURNS, "logprobs": True, "top_logprobs": 2}
    (choice,) = server.post("/v1/chat/completions", **asked).json()["choices"]
    content = choice["logprobs"]["content"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 2
        text = bytes(entry["bytes"]).decode(errors="backslashreplace")
        assert entry["token"] == text or not entry["bytes"]
    text = server.post("/completion", prompt="x", n_probs=2, **body).json()
    assert text["choices"][0]["logprobs"]["tokens"] == [
        each["token"] for each in text["completion_probabilities"]
    ]


def test_the_progress_of_the_prefill_is_reported_on_request(server: Running) -> None:
    asked: dict[str, Any] = {"prompt": "quite another text " * 5, "max_tokens": 2}
    for path in ("/v1/completions", "/completion"):
        chunks = streamed(server, path, return_progress=True, **asked)
        found = [each["prompt_progress"] for each in chunks if "prompt_progress" in each]
        first, last = found[0], found[-1]
        assert first["processed"] == first["cache"]
        assert last["processed"] == last["total"] > 20
        assert last["time_ms"] >= 0
    assert not any("prompt_progress" in each for each in streamed(server, path, **asked))


# --- ollama ---------------------------------------------------------------------------------------


def test_ollamas_paths_give_the_same_answers(server: Running) -> None:
    options = {"num_predict": 6, "temperature": 0, "num_ctx": 64}
    asked: dict[str, Any] = {"model": "any", "messages": TURNS, "options": options}
    whole = server.post("/api/chat", stream=False, keep_alive="5m", **asked).json()
    lines = [json.loads(line) for line in server.post("/api/chat", **asked).text.splitlines()]
    text = "".join(each["message"]["content"] for each in lines)
    same = server.post("/v1/chat/completions", messages=TURNS, max_tokens=6).json()
    assert text == whole["message"]["content"] == same["choices"][0]["message"]["content"]
    assert [each["done"] for each in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["done_reason"] == whole["done_reason"] == "length"
    assert whole["eval_count"] == 6
    assert whole["prompt_eval_count"] == same["usage"]["prompt_tokens"]
    assert [each.partition(":")[0] for each in whole["warnings"]] == ["num_ctx"]
    said = server.post("/api/generate", stream=False, prompt=TURNS[0]["content"], options=options)
    assert said.json()["response"] == text
    raw = {"prompt": PROMPT, "raw": True, "stream": False, "options": options}
    plain = server.post("/v1/completions", prompt=PROMPT, max_tokens=6).json()
    assert server.post("/api/generate", **raw).json()["response"] == plain["choices"][0]["text"]
    assert server.post("/api/chat", n=2, stream=False, **asked).json()["message"]["content"] == text
    loaded = server.post("/api/generate", model="any", stream=False).json()
    assert (loaded["response"], loaded["done"]) == ("", True)
    wrong = server.post("/api/chat", **asked | {"options": {"temperature": "hot"}})
    assert (wrong.status_code, "temperature" in wrong.json()["error"]) == (400, True)
    assert server.http.get("/api/version").json()["version"] >= "0.6.4"  # what VS Code wants
    for path in ("/api/tags", "/api/ps"):
        (model,) = server.http.get(path).json()["models"]
        assert model["name"] == "target"


def test_ollamas_calls_and_formats_are_supported(server: Running) -> None:
    call = {"function": {"name": "weather", "arguments": {"place": "m"}}}
    turns = [
        {"role": "user", "content": "hot?", "images": ["aGk="]},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call, call]},
        {"role": "tool", "tool_name": "weather", "content": "hot"},
        {"role": "tool", "content": "cold"},
    ]
    tools = [tool("weather", "m", "ft")]
    body: dict[str, Any] = {"messages": turns, "tools": tools, "stream": False}
    assert server.post("/api/chat", options={"num_predict": 2}, **body).status_code == 200
    asked = {**body, "messages": TURNS, "tool_choice": "required", "options": {"num_predict": -1}}
    found = server.post("/api/chat", **asked).json()
    assert found["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert isinstance(found["message"]["tool_calls"][0]["function"]["arguments"], dict)
    *_, called, _last = streamed_lines(server, **{**asked, "stream": True})
    (call,) = called["message"]["tool_calls"]
    (same,) = found["message"]["tool_calls"]
    assert call["function"] == same["function"]
    assert call["id"] != same["id"]
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
    formed = server.post("/api/chat", messages=TURNS, format=schema, stream=False).json()
    assert json.loads(formed["message"]["content"]) == {"a": "x"}


def streamed_lines(server: Running, **body: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.post("/api/chat", **body).text.splitlines()]


# --- information about the server -----------------------------------------------------------------


def test_models_list_their_capabilities(server: Running) -> None:
    model = server.http.get("/v1/models/target").json()
    assert model["capabilities"] == ["completion", "chat", "tools", "insert"]
    assert model["meta"]["n_ctx"] == model["max_model_len"] == server.engine.n_ctx
    about = server.post("/api/show", model="any").json()
    assert about["capabilities"] == model["capabilities"]
    kind = about["model_info"]["general.architecture"]
    assert about["model_info"][f"{kind}.context_length"] == server.engine.n_ctx


def test_tokens_are_counted_for_every_api(server: Running) -> None:
    tools = [tool("weather", "m", "ft")]
    for start in ("", "/v1"):
        chat: dict[str, Any] = {"messages": TURNS, "tools": tools}
        text: dict[str, Any] = {"input": TURNS[0]["content"], "instructions": "be brief"}
        for path, body in (("chat/completions", chat), ("responses", text)):
            counted = server.post(f"{start}/{path}/input_tokens", **body).json()
            usage = server.post(f"/v1/{path}", **body, max_tokens=1).json()["usage"]
            assert counted["object"] == "response.input_tokens"
            assert counted["input_tokens"] == usage.get("prompt_tokens", usage.get("input_tokens"))
    said: dict[str, Any] = {"messages": TURNS, "system": "Be short."}
    counted = server.post("/v1/messages/count_tokens", **said).json()["input_tokens"]
    usage = server.post("/v1/messages", **said, max_tokens=1).json()["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
    long = [{"role": "user", "content": "the cat " * 20_000}]  # far more than the context
    assert server.post("/v1/messages/count_tokens", messages=long).json()["input_tokens"] > 20_000


def test_the_tokenizer_can_be_used_remotely(server: Running) -> None:
    """As evaluations use a server's tokenizer, by vLLM's names."""
    about = server.http.get("/tokenizer_info").json()
    assert about["eos_token"]
    assert about["chat_template"] == TEMPLATE
    tokens = server.post("/tokenize", prompt=PROMPT, add_special_tokens=False).json()["tokens"]
    assert server.post("/detokenize", tokens=tokens).json()["prompt"] == PROMPT


def test_a_full_context_is_named(server: Running) -> None:
    asked: dict[str, Any] = {"ignore_eos": True, "max_tokens": 64_000}
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/messages", {"messages": TURNS}),
        ("/v1/responses", {"input": "x"}),
    ):
        found = server.post(path, **asked, **body).json()
        assert "the context is full" in found["warnings"][-1]
    for more, is_full in (({}, True), ({"max_tokens": 1}, False)):
        own = server.post("/completion", prompt="x", **{**asked, **more}).json()
        assert own["truncated"] is is_full


# --- the end --------------------------------------------------------------------------------------

ENDED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": TURNS}, "the server is shutting down"),
    ("/v1/completions", {"prompt": "x"}, "the server is shutting down"),
    ("/v1/messages", {"messages": TURNS}, "overloaded_error"),
    ("/v1/responses", {"input": "x"}, "the server is shutting down"),
    ("/infill", {"input_prefix": "x"}, "the server is shutting down"),
    ("/api/chat", {"messages": TURNS}, "the server is shutting down"),
]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("path", "body", "told"), ENDED, ids=[each[0] for each in ENDED])
def test_an_answer_without_a_token_is_an_error_when_the_server_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    told: str,
    streams: bool,
) -> None:
    with tiny_server(tmp_path, chat_template=TEMPLATE, control_tokens=INFILL_TOKENS) as server:
        step = Engine.step

        def ending(engine: Engine) -> Any:
            """The signal comes when the prompt is about to be read."""
            for model in server.pool.loaded:
                model.cancel_all()
            return step(engine)

        monkeypatch.setattr(Engine, "step", ending)
        found = server.post(path, stream=streams, **body)
        assert found.status_code == (200 if streams else 503)
        assert told in found.text
        assert '"length"' not in found.text
        assert "completed" not in found.text


# --- odd values -----------------------------------------------------------------------------------

ODD: list[Any] = [None, True, False, 0, -1, 1, 2, 2**31, 2**63, -(2**63), 2**200]
ODD += [0.5, -1e308, 1e308, {"schema": True}, "", "x", "\x00", "1" * 5000]
ODD += [[], [[]], {}, [None], [""], ["x", 1], [1, 2], [-1], [2**40], {"a": {}}, [{}], {"type": "x"}]
ODD += [{"type": "function", "function": {}}, {"type": 1}, [[1, 2], [3]], {"": ""}, [[[[1]]]]]
#: What one field or another reads within its value.
FIELDS_WITHIN: dict[str, list[Any]] = {
    "response_format": [{"type": "json_schema", "json_schema": each} for each in ODD],
    "tools": [[{"type": "function", "function": each}] for each in ODD],
    "stream_options": [{"include_usage": each} for each in ODD],
    "speculative": [{"max": each, "draft": each, "verifier": each} for each in ODD],
    "messages": [
        [{"role": role, "content": each, "tool_calls": calls, "tool_call_id": each}]
        for each in ODD
        for role, calls in (("user", None), ("assistant", each), ("tool", []), ("function", None))
    ],
    "input": [
        [{"type": kind, "role": "user", "content": each, "output": each, "arguments": each}]
        for each in ODD
        for kind in ("message", "function_call", "function_call_output", "reasoning", "x")
    ],
    "options": [
        {name: each} for each in ODD for name in ("num_predict", "stop", "seed", "grammar")
    ],
    "logit_bias": [
        *({"5": each} for each in ODD),
        *({str(each): 1} for each in ODD),
        *([[each, 1]] for each in ODD),
    ],
    "prompt": [[[each, "x", 1]] for each in ODD] + [["x", each] for each in ODD],
    "structured_outputs": [
        {name: each} for each in ODD for name in ("json", "regex", "choice", "grammar")
    ],
    "functions": [[each] for each in ODD] + [[{"name": each, "parameters": each}] for each in ODD],
    "context": [[each] for each in ODD],
    "chat_template_kwargs": [{"enable_thinking": each, "x": each} for each in ODD],
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/completions": {"prompt": "x"},
    "/v1/messages": {"messages": TURNS},
    "/v1/responses": {"input": "x"},
    "/completion": {"prompt": "x"},
    "/infill": GAP,
    "/api/chat": {"messages": TURNS, "stream": False},
    "/api/generate": {"prompt": "x", "stream": False},
    "/tokenize": {"content": "x"},
    "/detokenize": {"tokens": [1]},
    "/v1/embeddings": {"input": "x"},
}
FIELD_NAMES = """
    messages prompt input input_prefix input_suffix input_extra suffix system instructions tools
    tool_choice parallel_tool_calls max_tokens max_completion_tokens n_predict stop
    stop_sequences ignore_eos grammar json_schema response_format text format output_config
    chat_template_kwargs stream stream_options speculative logprobs top_logprobs n n_probs
    n_indent n_cmpl echo seed temperature top_k top_p min_p typical_p logit_bias repeat_penalty
    repeat_last_n presence_penalty frequency_penalty dry_multiplier dry_sequence_breakers
    xtc_probability mirostat samplers thinking enable_thinking think reasoning reasoning_effort
    reasoning_format continue_final_message add_generation_prompt cache_prompt return_progress
    response_fields t_max_predict_ms options images raw content tokens with_pieces add_special
    include metadata model functions function_call guided_json guided_regex guided_choice
    guided_grammar structured_outputs context
"""


@pytest.mark.parametrize("path", BODIES)
def test_no_value_of_a_field_makes_the_server_fail(server: Running, path: str) -> None:
    """Each value is answered or rejected by the name of the field. Some of them are chosen at
    random.
    """
    draws, cases = random.Random(path), list[tuple[str, Any]]()
    for name in FIELD_NAMES.split():
        cases += [(name, value) for value in (*ODD, *FIELDS_WITHIN.get(name, ()))]
    for name, value in draws.sample(cases, 70):
        found = server.post(path, **{"max_tokens": 2, **BODIES[path], name: value})
        assert found.status_code in (200, 400), (name, value, found.text)
        assert found.status_code == 200 or found.json()["error"], (name, value)


@pytest.mark.parametrize(
    ("path", "name", "value", "told"),
    [
        ("/api/chat", "format", "xml", "format: give an object, or one of '' or 'json', not"),
        ("/api/chat", "think", 1.5, "think: give true or false, or a text, not 1.5"),
        ("/v1/chat/completions", "logprobs", "x", "logprobs: give true or false, or a whole"),
        ("/v1/chat/completions", "logprobs", 1000, "logprobs: give true or false, or 100 or"),
        # Only a field within these objects is read.
        ("/v1/chat/completions", "stream_options", "x", 'stream_options: give an object, not "x"'),
        ("/v1/responses", "reasoning", "high", 'reasoning: give an object, not "high"'),
        ("/v1/responses", "text", ["json"], 'text: give an object, not ["json"]'),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_by_the_name_of_its_field(
    server: Running, path: str, name: str, value: Any, told: str
) -> None:
    found = server.post(path, **{**BODIES[path], name: value})
    assert found.status_code == 400
    error = found.json()["error"]
    if path == "/api/chat":
        assert error.startswith(told)
    else:
        assert error["message"].startswith(told)
        assert error["param"] == name


@pytest.mark.parametrize("name", ["repeat_penalty", "presence_penalty", "frequency_penalty"])
def test_a_penalty_that_no_logit_survives_is_refused(server: Running, name: str) -> None:
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 2, name: -1e308}
    if name == "repeat_penalty":
        body[name] = 1e308
    found = server.post("/v1/completions", **body)
    assert found.status_code == 400
    assert found.json()["error"]["param"] == name


def test_an_answer_of_no_tokens_is_finished(server: Running) -> None:
    """Also with a grammar that forces tokens."""
    for more in ({}, {"grammar": 'root ::= "abc"'}, {"ignore_eos": True}):
        found = server.post("/v1/completions", prompt=PROMPT, max_tokens=0, **more).json()
        (choice,) = found["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("", "length")
        assert found["usage"]["completion_tokens"] == 0
        assert not math.isnan(found["timings"]["prompt_ms"])
    request = server.engine.insert(PROMPT, generation=None)
    assert any(isinstance(event, FinishedEvent) for event in server.engine.stream(request))
