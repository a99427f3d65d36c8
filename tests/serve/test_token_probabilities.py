"""The endpoint for the probabilities of an answer's tokens, on tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specgen.llama import LlamaBackend, LlamaModel
from specgen.serve.server.options import ServerOptions
from specgen.session.prompts.template import Message
from specgen.system.arrays import Logits
from tests.helpers.common import EXACT
from tests.helpers.rows import decoded
from tests.helpers.server import Running, running, serves, session_of, tiny_server
from tests.helpers.tiny import write_respelled_model
from tests.tiny import CHATML_TEMPLATE, TinyConfig, write_tiny_model

PATH = "/v1/chat/completions/token_probabilities"
MESSAGES = [{"role": "user", "content": "the cat is in the"}]

#: A server whose draft model has the target's vocabulary.
server = serves(draft=0.05, chat_template=CHATML_TEMPLATE)


@pytest.fixture(scope="module")
def answer(server: Running) -> list[int]:
    """The tokens of an answer to `MESSAGES`."""
    return answer_of(server)


def answer_of(server: Running) -> list[int]:
    body = {"messages": MESSAGES, "logprobs": True}
    choice = server.post("/v1/chat/completions", **body).json()["choices"][0]
    return [entry["id"] for entry in choice["logprobs"]["content"]]


def prompt_of(server: Running) -> list[int]:
    text = server.post("/apply-template", messages=MESSAGES).json()["prompt"]
    body = {"content": text, "add_special": True}
    tokens: list[int] = server.post("/tokenize", **body).json()["tokens"]
    return tokens


def logits_of(model: LlamaModel, tokens: list[int]) -> Logits:
    """The logits after each token of a text, in one batch of a context that nobody else uses."""
    backend = LlamaBackend(model, EXACT, n_ctx=256, clock=lambda: 0.0, n_outputs=len(tokens))
    try:
        return decoded(backend, tokens)
    finally:
        backend.close()


def log_softmax(row: Logits) -> Any:
    shifted = row.astype(np.float64) - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def check_entries(entries: list[dict[str, Any]], row: Logits, n_top: int, also: list[int]) -> None:
    """The most likely tokens of a row come first, then others. All have the probabilities of the
    row.
    """
    logprobs = log_softmax(row)
    ids = [entry["id"] for entry in entries]
    assert ids[:n_top] == np.argsort(-logprobs, kind="stable")[:n_top].tolist()
    assert set(ids) == {*ids[:n_top], *also}
    for entry in entries:
        assert entry["logprob"] == pytest.approx(logprobs[entry["id"]], abs=1e-3)


def test_probabilities_are_those_of_both_models_logits(server: Running, answer: list[int]) -> None:
    guess = {"position": 2, "token": 7}
    response = server.post(
        PATH, messages=MESSAGES, answer=answer, guesses=[guess], top_logprobs=3
    ).json()
    assert (response["target"], response["draft"]) == ("target.gguf", "draft.gguf")
    assert [token["id"] for token in response["tokens"]] == answer
    prompt = prompt_of(server)
    target, draft = server.session.models
    text = [*prompt, *answer]
    rows = {model.name: logits_of(model, text) for model in (target, draft)}
    for position, token in enumerate(response["tokens"]):
        also = [answer[position]]
        if position == guess["position"]:
            also.append(guess["token"])
        row = len(prompt) + position - 1
        check_entries(token["top_logprobs"], rows[target.name][row], 3, also)
        check_entries(token["draft_top_logprobs"], rows[draft.name][row], 3, also)
        own = next(each for each in token["top_logprobs"] if each["id"] == token["id"])
        assert own == {name: token[name] for name in ("id", "token", "logprob", "bytes")}


def test_probabilities_are_those_of_the_answers_own_logprobs(
    server: Running, answer: list[int]
) -> None:
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 4}
    choice = server.post("/v1/chat/completions", **body).json()["choices"][0]
    scored = server.post(PATH, messages=MESSAGES, answer=answer, top_logprobs=4).json()["tokens"]
    for told, later in zip(choice["logprobs"]["content"], scored, strict=True):
        assert told["token"] == later["token"]
        assert told["logprob"] == pytest.approx(later["logprob"], abs=1e-3)


@pytest.mark.parametrize("n_parallel", [1, 4])
def test_the_next_turn_still_finds_its_prefix(tmp_path: Path, n_parallel: int) -> None:
    with tiny_server(
        tmp_path, draft=0.05, chat_template=CHATML_TEMPLATE, n_parallel=n_parallel
    ) as server:
        first = server.post("/v1/chat/completions", messages=MESSAGES).json()
        other = [{"role": "user", "content": "a dog and a house, and what else there is"}]
        scored = server.post(PATH, messages=other, answer=[3, 4, 5])
        assert scored.status_code == 200
        said = first["choices"][0]["message"]
        next_turn = [*MESSAGES, said, {"role": "user", "content": "and then"}]
        second = server.post("/v1/chat/completions", messages=next_turn).json()
    # All but the last token of the first answer, which was never decoded, is in the cache.
    n_cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert n_cached >= first["usage"]["total_tokens"] - 2


@pytest.fixture(scope="module")
def translated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose draft model has another vocabulary."""
    folder = tmp_path_factory.mktemp("translated")
    config = TinyConfig(logit_scale=6.0, unprintable_scale=0.0, chat_template=CHATML_TEMPLATE)
    target = write_tiny_model(folder / "target.gguf", config)
    draft = write_respelled_model(folder / "draft.gguf", config.draft(0.05))
    with running(session_of(target, draft)) as server:
        yield server


def test_a_draft_model_with_another_vocabulary_has_its_own_tokens(translated: Running) -> None:
    answer = answer_of(translated)
    tokens = translated.post(PATH, messages=MESSAGES, answer=answer).json()["tokens"]
    target, draft = translated.session.models
    prompt = translated.session.prompts.of_messages([Message("user", MESSAGES[0]["content"])])
    assert prompt.draft_tokens is not None
    for position, token in enumerate(tokens):
        data = b"".join(map(target.vocabulary.token_bytes, answer[:position]))
        text = [*prompt.draft_tokens, *draft.vocabulary.tokenize_inside(data.decode())]
        check_entries(token["draft_top_logprobs"], logits_of(draft, text)[-1], 5, [])
        for each in token["draft_top_logprobs"]:
            assert draft.vocabulary.token_bytes(each["id"]) == bytes(each["bytes"])


def test_without_a_draft_model_only_the_target_is_asked(tmp_path: Path) -> None:
    with tiny_server(tmp_path, chat_template=CHATML_TEMPLATE) as server:
        response = server.post(PATH, messages=MESSAGES, answer=[3, 4]).json()
    assert response["draft"] == "ngram"
    assert [token["draft_top_logprobs"] for token in response["tokens"]] == [None, None]


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({}, 400, "answer: "),
        ({"answer": []}, 400, "answer: "),
        ({"answer": ["the"]}, 400, "answer[0]: "),
        ({"answer": [3], "messages": []}, 400, "messages: "),
        ({"answer": [3], "guesses": [{"position": 1, "token": 2}]}, 400, "guesses[0].position: 1"),
        ({"answer": [10**9]}, 400, "there is no token 1000000000"),
        ({"answer": [3], "guesses": [{"position": 0, "token": -1}]}, 400, "no token -1"),
        ({"answer": [3] * 300}, 400, "but the context has 256"),
        ({"answer": [3], "top_logprobs": 1000}, 400, "top_logprobs: "),
    ],
)
def test_texts_that_cannot_be_scored_are_rejected_in_one_line(
    server: Running, body: dict[str, Any], status: int, told: str
) -> None:
    response = server.post(PATH, **{"messages": MESSAGES, **body})
    assert response.status_code == status
    message = response.json()["error"]["message"]
    assert told in message
    assert "\n" not in message


def test_it_needs_the_key_of_the_server(tmp_path: Path) -> None:
    options = ServerOptions(port=0, api_keys=("right",))
    with tiny_server(tmp_path, options, chat_template=CHATML_TEMPLATE) as server:
        body = {"messages": MESSAGES, "answer": [3]}
        assert server.post(PATH, **body).status_code == 200
        refused = server.http.post(PATH, json=body, headers={"Authorization": "Bearer wrong"})
        assert refused.status_code == 401
