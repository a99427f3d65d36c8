"""Answers of the server are those of the target alone, whoever else asks, and however they end."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.events import FinishedEvent
from specgen.options import DraftSource, SamplerOptions
from specgen.session.engine import generate
from tests.helpers.server import FIXED, Running, running, session_of
from tests.tiny import TinyConfig, write_tiny_model

PROMPTS = (
    "the cat is in the",
    "the cat is in the house of",
    "one two three one two three one two",
    "a",
    "def f(x): return",
    "the cat is on the mat and the dog is in the house and",
)
N_TOKENS = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact")
    config = TinyConfig(logit_scale=3.0, unprintable_scale=0.0)
    write_tiny_model(folder / "target.gguf", config)
    write_tiny_model(folder / "draft.gguf", config.draft(0.1))
    return folder


@pytest.fixture(scope="module", params=["draft", "ngram"])
def server(models: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    draft: DraftSource = "ngram" if request.param == "ngram" else models / "draft.gguf"
    drafting = replace(FIXED, verifier="match")  # so that a seed gives the text of the target alone
    session = session_of(models / "target.gguf", draft, drafting=drafting)
    with running(session, n_parallel=4) as server:
        yield server


@pytest.fixture(scope="module")
def expected(models: Path) -> dict[tuple[str, int | None], str]:
    """What the target says by itself: greedily, and with seeds."""
    found: dict[tuple[str, int | None], str] = {}
    for seed in (None, 1, 2):
        sampler = SamplerOptions() if seed is None else SamplerOptions(temperature=0.9, seed=seed)
        with session_of(models / "target.gguf", "none", sampler=sampler) as plain:
            for prompt in PROMPTS:
                *_, last = generate(plain, plain.prompts.of_text(prompt, chat=False))
                assert isinstance(last, FinishedEvent)
                found[prompt, seed] = last.text
    return found


@pytest.mark.parametrize("n_users", [1, 2, 4, 8])
def test_answers_at_once(
    server: Running, expected: dict[tuple[str, int | None], str], n_users: int
) -> None:
    """Users ask at random times, whole or streamed; some go away in the middle."""

    def use(number: int) -> None:
        chance = random.Random(100 * n_users + number)
        for _ in range(4):
            time.sleep(chance.random() / 50)
            prompt, seed = chance.choice(list(expected))
            body: dict[str, Any] = {"prompt": prompt, "stream": chance.random() < 0.5}
            if seed is not None:
                body |= {"temperature": 0.9, "seed": seed}
            if chance.random() < 0.3:
                body["speculative"] = {"draft": False}
            n_taken = chance.choice([None, None, 1, 3]) if body["stream"] else None
            text, is_whole = _text(server, body, n_taken)
            if is_whole:
                assert text == expected[prompt, seed]
            else:
                assert expected[prompt, seed].startswith(text)

    with ThreadPoolExecutor(n_users) as pool:
        for done in [pool.submit(use, number) for number in range(n_users)]:
            done.result()


def _text(server: Running, body: dict[str, Any], n_taken: int | None) -> tuple[str, bool]:
    """An answer, or the first `n_taken` pieces of it; and whether it is the whole."""
    if not body["stream"]:
        answer = server.post("/v1/completions", **body).json()
        return answer["choices"][0]["text"], True
    text, n = "", 0
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return text, True
            if line.startswith("data: "):
                if n == n_taken:
                    break
                text += json.loads(line[6:])["choices"][0]["text"]
                n += 1
    return text, False
