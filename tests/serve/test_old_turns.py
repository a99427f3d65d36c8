"""Conversations that do not fit into the context: the oldest turns are left out if a request allows
that, as Ollama's chats do by default and those of the Responses API with `truncation: auto`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.server import Running, tiny_server
from tests.tiny import CHATML_TEMPLATE

N_CTX = 1024
SYSTEM = {"role": "system", "content": "a dog is in the house"}
Message = dict[str, Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("models")
    with tiny_server(folder, n_ctx=N_CTX, chat_template=CHATML_TEMPLATE) as server:
        yield server


def conversation(n_turns: int) -> list[Message]:
    """A conversation of turns of the same length, the last of which has no answer."""
    messages = [SYSTEM]
    for number in range(n_turns):
        messages.append({"role": "user", "content": f"the cat is in the house {number:03}"})
        messages.append({"role": "assistant", "content": "it sleeps"})
    return messages[:-1]


def chat(server: Running, messages: list[Message], **body: Any) -> Any:
    body = {"messages": messages, "stream": False, "options": {"num_predict": 8}} | body
    return server.post("/api/chat", **body).json()


def respond(server: Running, messages: list[Message], **body: Any) -> Any:
    return server.post("/v1/responses", input=messages, max_output_tokens=16, **body).json()


def n_left_out(response: Any) -> int:
    for warning in response.get("warnings", []):
        found = re.match(r"messages: (\d+) old turns? left out", warning)
        if found is not None:
            return int(found[1])
    return 0


def test_the_oldest_turns_are_left_out(server: Running) -> None:
    messages = conversation(50)
    answer = chat(server, messages)
    left_out = n_left_out(answer)
    assert 0 < left_out < 49
    assert N_CTX // 2 < answer["prompt_eval_count"] <= N_CTX
    # It is the answer to what is left, with the system message.
    rest = chat(server, [SYSTEM, *messages[1 + 2 * left_out :]])
    assert n_left_out(rest) == 0
    assert rest["message"] == answer["message"]
    assert rest["prompt_eval_count"] == answer["prompt_eval_count"]


def test_the_number_seldom_changes_while_a_conversation_grows(server: Running) -> None:
    """Each change makes the server prefill the rest of the conversation again."""
    numbers = [n_left_out(chat(server, conversation(n))) for n in range(20, 60)]
    assert numbers == sorted(numbers)
    assert numbers[0] == 0
    n_changes = len(set(numbers)) - 1
    assert 0 < n_changes < numbers[-1] / 4


def test_turns_are_left_out_only_where_that_is_allowed(server: Running) -> None:
    messages = conversation(50)
    assert "tokens, but the context has 1024" in chat(server, messages, truncate=False)["error"]
    assert "tokens, but the context has 1024" in respond(server, messages)["error"]["message"]
    response = respond(server, messages, truncation="auto")
    assert (response["status"], response["truncation"]) == ("incomplete", "auto")
    assert n_left_out(response) > 0
    body = {"messages": messages, "truncation": "auto", "truncate": True}
    assert server.post("/v1/chat/completions", **body).status_code == 400


def test_the_last_turn_is_kept_whole(server: Running) -> None:
    call = {"function": {"name": "look", "arguments": {"at": "the cat"}}}
    results: list[Message] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "it sleeps in the house", "tool_name": "look"},
    ]
    question = {"role": "user", "content": "the cat"}
    last_turn = [question, *results * 10]
    answer = chat(server, [*conversation(20), *results, *last_turn])
    assert n_left_out(answer) == 20
    assert answer["message"] == chat(server, [SYSTEM, *last_turn])["message"]
    error = chat(server, [*conversation(20), *last_turn, *results * 40])["error"]
    assert "tokens, but the context has 1024" in error
