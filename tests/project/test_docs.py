"""The generated documents are up to date, and the schema describes the events that there are."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from markdown_it import MarkdownIt

from scripts import make_docs
from specgen import events
from specgen.errors import SpecgenError
from tests.helpers.common import ROOT


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = json.loads((ROOT / "docs" / "events.schema.json").read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


PIECE = events.Piece(token_id=5, text=" é", kind="accepted", origin="model")
NODE = events.DraftNode(token_id=5, text=" \ufffd", parent=-1, origin="model", probability=0.5)
SAMPLES: list[events.Event] = [
    events.ReadingEvent(0, 1.5, 512, 4000, 10.25),
    events.PromptEvent(
        sequence=0,
        time_s=0.0,
        text="Once",
        n_prompt_tokens=1,
        target="target.gguf",
        draft="none",
        translated=False,
        kernels="llama.cpp",
        n_ctx=512,
        sampler={"temperature": 0.7, "logit_bias": [[3, "-inf"]]},
        verifier="auto",
        grammar=None,
    ),
    events.DraftedEvent(
        sequence=0,
        time_s=0.1,
        round=1,
        nodes=(NODE, dataclasses.replace(NODE, parent=0, probability=None)),
    ),
    events.DraftedEvent(sequence=0, time_s=0.1, round=1, nodes=()),
    events.VerifiedEvent(
        sequence=0,
        time_s=0.2,
        round=1,
        accepted=(0,),
        rejected=(events.RejectedBranch(nodes=(1,), text="no"),),
        next_token_id=7,
        next_kind="corrected",
    ),
    events.CommittedEvent(
        sequence=0,
        time_s=0.3,
        round=1,
        pieces=(
            dataclasses.replace(
                PIECE, logprob=-0.1, top_logprobs=(events.TokenLogprob(5, " é", -0.1),)
            ),
            dataclasses.replace(PIECE, kind="forced", origin="grammar"),
        ),
        text=" é é",
        n_tokens=2,
    ),
    events.CommittedEvent(sequence=0, time_s=0.3, round=1, pieces=(PIECE,), text=" é", n_tokens=1),
    events.NoticeEvent(sequence=0, time_s=0.3, message="drafting stopped"),
    events.FinishedEvent(
        sequence=0,
        time_s=1.0,
        text=" é",
        token_ids=(5,),
        finish_reason="stop",
        stopped_by=None,
        n_prompt_tokens=1,
        n_tokens=1,
        n_rounds=1,
        n_drafted=0,
        n_accepted=0,
        acceptance_rate=None,
        mean_accepted_length=1.0,
        accepted_by_depth=(),
        drafted_by_depth=(),
        tokens_per_s=None,
        time_to_first_token_s=0.1,
        prompt_s=0.1,
        draft_s=0.0,
        target_s=0.2,
        loop_s=0.0,
        wall_s=0.2,
    ),
]


def as_line(event: events.Event) -> dict[str, Any]:
    """The event as a reader of a line of JSON gets it."""
    line: dict[str, Any] = json.loads(json.dumps(events.to_json_object(event)))
    return line


def test_generated_documents_are_up_to_date() -> None:
    stale = [
        path.name for path, text in make_docs.pages().items() if make_docs.is_stale(path, text)
    ]
    assert not stale, "run `make docs`"


# --- the command line


def headings(markdown: str) -> list[str]:
    tokens = MarkdownIt("commonmark").parse(markdown)
    pairs = itertools.pairwise(tokens)
    return [inline.content for token, inline in pairs if token.type == "heading_open"]


def test_every_option_of_every_command_is_in_the_page() -> None:
    from specgen.cli import command_line

    page = make_docs.cli_page()
    items = (line.split(": ")[0] for line in page.splitlines() if line.startswith("- `"))
    told = {name for item in items for name in re.findall(r"`(--?[\w-]+)`", item)}
    every = [command for _, command in make_docs.commands(command_line(), "specgen")]
    names = {
        name
        for command in every
        for parameter in command.params
        if not parameter.hidden and parameter.param_type_name == "option"
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    assert names - told == {"--install-completion", "--show-completion"}  # typer's own


def test_links_within_the_page_go_to_its_headings() -> None:
    page = make_docs.cli_page()
    anchors = [make_docs.anchor(heading) for heading in headings(page)]
    assert len(set(anchors)) == len(anchors)
    goals = set(re.findall(r"\]\(#([^)]*)\)", page))
    assert {"sampling", "specgen-models-pull"} <= goals
    assert goals <= set(anchors)


# --- the events


def test_there_is_a_sample_of_every_event() -> None:
    assert {type(event) for event in SAMPLES} == set(events.EVENT_TYPES)


@pytest.mark.parametrize("event", SAMPLES, ids=lambda event: str(event.event))
def test_every_event_is_valid(event: events.Event, validator: Draft202012Validator) -> None:
    validator.validate(as_line(event))


@pytest.mark.parametrize("event", SAMPLES, ids=lambda event: str(event.event))
def test_no_field_may_be_missing_extra_or_of_another_type(
    event: events.Event, validator: Draft202012Validator
) -> None:
    line = as_line(event)
    assert not validator.is_valid(line | {"surprise": 1})
    for name in line:
        assert not validator.is_valid({key: line[key] for key in line if key != name}), name
        other = 0.5 if isinstance(line[name], dict) else {"an": "object"}
        assert not validator.is_valid(line | {name: other}), name


@pytest.mark.parametrize(
    ("event", "wrong"),
    [
        (SAMPLES[1], {"nodes": [{"token_id": 5}]}),
        (SAMPLES[3], {"next_kind": "guessed"}),
        (SAMPLES[3], {"accepted": ["0"]}),
        (SAMPLES[4], {"n_tokens": 1.5}),
        (SAMPLES[4], {"event": "finished"}),
        (SAMPLES[6], {"finish_reason": "tired"}),
        (SAMPLES[6], {"text": None}),
    ],
)
def test_wrong_values_are_invalid(
    event: events.Event, wrong: dict[str, Any], validator: Draft202012Validator
) -> None:
    assert not validator.is_valid(as_line(event) | wrong)


def test_every_error_has_its_exit_code_in_the_table() -> None:
    page = make_docs.exit_codes_page()
    assert "| 5 | `PairError` | The draft does not fit the target: " in page
    assert all(f"`{error.__name__}`" in page for error in make_docs.raised_errors())
    assert all(issubclass(error, SpecgenError) for error in make_docs.raised_errors())
    assert "| 130 |" in page
    assert "| 141 |" in page
