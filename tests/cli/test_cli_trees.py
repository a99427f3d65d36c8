"""Trees as a user asks for them, on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cli import Cli, complaint, events_of
from tests.tiny import TinyConfig, write_tiny_model

PROMPT = "def add(a, b): return a + b # and the sum is the sum is"


def drafts(cli: Cli, *arguments: str, **models: str) -> list[list[dict[str, Any]]]:
    events = events_of(cli.run("--json", *arguments, PROMPT, **models))
    assert not [event for event in events if "failed" in event.get("message", "")]
    return [event["nodes"] for event in events if event["event"] == "drafted"]


def test_a_shape_is_drafted_every_round(cli: Cli) -> None:
    found = drafts(cli, "--tree", "2,2,1")
    assert [node["parent"] for node in found[0]] == [-1, -1, 0, 0, 1, 1, 2, 3, 4, 5]
    assert len({node["token_id"] for node in found[0][:2]}) == 2
    assert {len(nodes) for nodes in found[:-3]} == {10}


def test_independent_drafts_share_what_they_have_in_common(cli: Cli) -> None:
    found = drafts(cli, "--tree", "3x2", "--temp", "1.5", "--seed", "2")
    assert any(1 < len(nodes) < 6 for nodes in found)
    for nodes in found:
        places = [(node["parent"], node["token_id"]) for node in nodes]
        assert len(set(places)) == len(places)


def test_it_is_told_which_guesses_were_right(cli: Cli) -> None:
    result = cli.run("--json", "--tree", "3,1", PROMPT, draft="bad")
    finished = events_of(result)[-1]
    assert len(finished["drafted_by_rank"]) == 3
    assert sum(finished["drafted_by_rank"]) == finished["n_drafted"]
    assert sum(finished["accepted_by_rank"]) == finished["n_accepted"]
    assert "by guess: " in cli.run("--tree", "3,1", "--stats", PROMPT).err
    assert "by guess: " not in cli.run("--tree", "off", "--stats", PROMPT).err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tree", "3;2"), "is not a shape"),
        (("--tree", "9,9,9"), "more than 64"),
        (("--tree", "3,2,1", "--draft-max", "5"), "has 15 tokens, but --draft-max allows 5"),
    ],
)
def test_what_cannot_be_drafted_is_refused(
    cli: Cli, arguments: tuple[str, ...], message: str
) -> None:
    assert message in complaint(cli.run(*arguments, PROMPT), 2)


@pytest.mark.parametrize("role", ["target", "draft", "translated", "staged"])
def test_where_nothing_can_branch_chains_are_drafted_and_that_is_said(
    cli: Cli, tmp_path: Path, tiny_models: Path, role: str
) -> None:
    recurrent = TinyConfig(logit_scale=6.0, architecture="mamba")
    write_tiny_model(tmp_path / "target.gguf", recurrent)
    write_tiny_model(tmp_path / "draft.gguf", recurrent.draft(0.02))
    target, draft = tiny_models / "target.gguf", [tiny_models / "draft.gguf"]
    if role == "target":
        target, draft = tmp_path / "target.gguf", [tmp_path / "draft.gguf"]
    elif role == "draft":
        draft = [tmp_path / "draft.gguf"]
    elif role == "translated":
        draft = [tiny_models / "other.gguf"]
    else:
        draft.append(tiny_models / "bad.gguf")
    more = [argument for path in draft for argument in ("-md", str(path))]
    result = cli("-m", str(target), *more, "-t", "1", "-n", "20", "--json", "--tree", "2,2", PROMPT)
    events = events_of(result)
    notices = [event["message"] for event in events if event["event"] == "notice"]
    assert any("--tree 2,2: " in text and "chains of 2 tokens" in text for text in notices)
    assert not any("failed" in text for text in notices)
    for event in events:
        if event["event"] == "drafted":
            parents = [node["parent"] for node in event["nodes"]]
            assert parents == list(range(-1, len(parents) - 1))
            assert len(parents) <= 2
