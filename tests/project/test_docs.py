"""Documents: generated ones are up to date, the schema describes the events, links are valid."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from markdown_it import MarkdownIt

from scripts import make_docs
from scripts.wrap_markdown import too_long, wrapped
from specgen import events
from specgen.errors import SpecgenError
from tests.helpers.cli import Cli, events_of
from tests.helpers.common import ROOT


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = json.loads((ROOT / "docs" / "events.schema.json").read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def test_generated_documents_are_up_to_date() -> None:
    stale = [
        path.name for path, text in make_docs.pages().items() if make_docs.is_stale(path, text)
    ]
    assert not stale, "run `make docs`"


# --- the command line


def test_every_option_of_every_command_is_in_the_page() -> None:
    from specgen.cli.app import command_line

    page = make_docs.cli_page()
    items = (line.split(": ")[0] for line in page.splitlines() if line.startswith("- `"))
    documented = {name for item in items for name in re.findall(r"`(--?[\w-]+)`", item)}
    every = [command for _, command in make_docs.commands(command_line(), "specgen")]
    names = {
        name
        for command in every
        for parameter in command.params
        if not parameter.hidden and parameter.param_type_name == "option"
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    assert names - documented == {"--install-completion", "--show-completion"}  # typer's own


# --- the events


def test_no_field_may_be_missing_extra_or_of_another_type(
    cli: Cli, validator: Draft202012Validator
) -> None:
    result = cli.run("the sum is the sum", "--json", "--logprobs", "1", "--tree", "3,1")
    lines = {line["event"]: line for line in events_of(result)}  # each of which is valid
    assert {*lines, "prefill", "notice"} == {kind.event for kind in events.EVENT_TYPES}
    for line in lines.values():
        assert not validator.is_valid(line | {"surprise": 1})
        for name in line:
            assert not validator.is_valid({key: line[key] for key in line if key != name}), name
            other = 0.5 if isinstance(line[name], dict) else {"an": "object"}
            assert not validator.is_valid(line | {name: other}), name


def test_every_error_has_its_exit_code_in_the_table() -> None:
    page = make_docs.exit_codes_page()
    assert "| 5 | `PairError` | The draft does not fit the target: " in page
    assert all(f"`{error.__name__}`" in page for error in make_docs.raised_errors())
    assert all(issubclass(error, SpecgenError) for error in make_docs.raised_errors())
    assert "| 130 |" in page
    assert "| 141 |" in page


# --- lines and links

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]


def shown(markdown: str) -> str:
    """Return the document as HTML; a run of blanks outside code is one blank."""
    html = MarkdownIt("commonmark").enable("table").render(markdown)
    pieces = re.split(r"(<pre>.*?</pre>)", html, flags=re.DOTALL)
    return "".join(
        piece if piece.startswith("<pre>") else re.sub(r"\s+", " ", piece) for piece in pieces
    )


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_no_line_is_too_long(path: Path) -> None:
    lines = dict(too_long(path.read_text(encoding="utf-8")))
    assert not lines, f"python -m scripts.wrap_markdown {path.relative_to(ROOT)}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_a_document_shows_the_same_after_wrapping(path: Path) -> None:
    # Without its line breaks, so that there is something to wrap.
    text = re.sub(r"(?<=[a-z,.])\n(?=[a-z])", " ", path.read_text(encoding="utf-8"))
    assert shown(wrapped(text)) == shown(text)
    assert wrapped(wrapped(text)) == wrapped(text)


LONG = "word " * 40 + "end"


def test_a_long_line_is_found_with_its_number() -> None:
    target = f"[page](https://example.org/{'x' * 120})"
    assert dict(too_long(f"short\n\n{LONG}\n{target}\n")) == {3: LONG}


def anchors(path: Path) -> set[str]:
    """Return what a link to a heading of the document may name."""
    tokens = MarkdownIt("commonmark").parse(path.read_text(encoding="utf-8"))
    pairs = itertools.pairwise(tokens)
    return {
        make_docs.anchor("".join(part.content for part in inline.children or ()))
        for token, inline in pairs
        if token.type == "heading_open"
    }


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_links_go_to_files_and_headings_that_exist(path: Path) -> None:
    stale = []
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        file, _, heading = link.partition("#")
        goal = path.parent / file if file else path
        if "://" in link:
            continue
        if not goal.exists() or (heading and goal.suffix == ".md" and heading not in anchors(goal)):
            stale.append(link)
    assert not stale
