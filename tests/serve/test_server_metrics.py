"""The metrics of the server: the sums over its answers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specgen.events import Event
from tests.helpers.server import Running, running, session_of, tiny_server, wait_until
from tests.tiny import TinyConfig, write_tiny_model

PROMPTS = ("the cat is in the", "one two three one two three one", "the cat is in the house")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with tiny_server(tmp_path, draft=0.05, n_parallel=2) as server:
        yield server


def test_metrics_are_the_sums_of_all_answers(server: Running) -> None:
    bodies: list[dict[str, Any]] = [
        server.post("/v1/completions", prompt=prompt).json() for prompt in PROMPTS
    ]
    wait_until(lambda: server.metric("requests_processing") == 0, "the last answer")

    def total(part: str, name: str) -> float:
        return float(sum(body[part][name] for body in bodies))

    drafts = "spec_decode_num"
    assert server.metric(f"{drafts}_draft_tokens_total") == total("timings", "draft_n") > 0
    accepted = total("timings", "draft_n_accepted")
    assert server.metric(f"{drafts}_accepted_tokens_total") == accepted > 0
    wasted = total("timings", "draft_n") - accepted
    assert server.metric(f"{drafts}_wasted_tokens_total") == wasted
    first = sum(body["speculative"]["accepted_by_position"][0] for body in bodies)
    assert server.metric(f'{drafts}_accepted_tokens_per_pos_total{{position="0"}}') == first
    assert server.metric("tokens_predicted_total") == total("usage", "completion_tokens")
    assert server.metric("prompt_tokens_total") == total("usage", "prompt_tokens")
    assert server.metric("prompt_tokens_cached_total") == total("timings", "cache_n") > 0
    assert server.metric("slots") == 2
    assert server.metric("target_seconds_total") > 0
    assert server.metric("draft_seconds_total") > 0
    assert server.metric("time_to_first_token_seconds_count") == len(PROMPTS)
    assert server.metric("answer_seconds_count") == len(PROMPTS)
    assert "_created" not in server.http.get("/metrics").text


def test_the_same_counts_are_also_under_vllms_names(server: Running) -> None:
    for prompt in PROMPTS:
        server.post("/v1/completions", prompt=prompt)
    wait_until(lambda: server.metric("requests_processing") == 0, "the last answer")
    text = server.http.get("/metrics").text
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        own = server.metric(f"spec_decode_num_{name}_total")
        line = f'vllm:spec_decode_num_{name}_total{{engine="0",model_name="target"}} {own}'
        assert line in text.splitlines()
        assert own > 0
    first = server.metric('spec_decode_num_accepted_tokens_per_pos_total{position="0"}')
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert f'{name}{{engine="0",model_name="target",position="0"}} {first}' in text.splitlines()


def test_slots_report_their_state(tmp_path: Path) -> None:
    # The answer is so long that it has not ended when the server is asked.
    with tiny_server(tmp_path, n_parallel=2, n_ctx=8192, n_ctx_train=8192) as server:
        idle = server.http.get("/slots").json()
        assert [slot["is_processing"] for slot in idle] == [False, False]
        asked = {"prompt": "x", "max_tokens": -1, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=asked) as response:
            # Kept, because the connection would be closed with the iterator.
            lines = response.iter_lines()
            while not next(lines).startswith("data: "):
                pass
            with server.standing_still():
                busy = [slot for slot in server.http.get("/slots").json() if slot["is_processing"]]
        assert len(busy) == 1
        assert busy[0]["n_prompt_tokens"] >= busy[0]["n_prompt_tokens_processed"] > 0


def test_a_long_prompt_is_seen_to_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a slot's count, by the metrics, by notes of the server, and in the stream: something comes
    at once.
    """
    notes, seen = list[str](), list[tuple[int, float]]()
    target = write_tiny_model(tmp_path / "target.gguf", TinyConfig(n_ctx_train=4096))
    with running(session_of(target), n_ctx=4096, note=notes.append) as server:
        step = server.engine.step

        def watched() -> list[Event]:
            events = step()
            (slot, *_) = server.http.get("/slots").json()
            seen.append((slot["n_prompt_tokens_processed"], server.metric("prompt_tokens_total")))
            return events

        monkeypatch.setattr(server.engine, "step", watched)
        prompt = " ".join(map(str, range(600)))
        asked = {"prompt": prompt, "max_tokens": 2, "stream": True}
        with contextlib.ExitStack() as stack:
            with server.standing_still():
                answering = server.http.stream("POST", "/v1/completions", json=asked)
                lines = stack.enter_context(answering).iter_lines()
                first = next(lines)
            *_, last = filter(None, lines)
        n_prompt = server.post("/tokenize", content=prompt).json()["tokens"]
    assert (first, last) == (": waiting", "data: [DONE]")
    n_read = [n for n, _ in seen if n]
    assert len(set(n_read)) >= 3, "it moves"
    assert {counted for _, counted in seen} >= {0, *n_read[:-2]}
    assert len(n_prompt) > max(n_read) > 1000
    begins, ends = notes
    known = r"\(0 in memory, 0 from disk\)"
    assert re.match(rf"target: prefilling \d{{4}} tokens {known}, about .* m?s", begins)
    assert re.match(r"target: the answer begins after .* m?s", ends)


def test_responses_are_counted_by_status(server: Running) -> None:
    server.post("/v1/completions", prompt=1)
    server.http.get("/nothing")
    assert server.metric('responses_total{status="400"}') == 1
    assert server.metric('responses_total{status="404"}') == 1
