"""The lines of the documents are short, and wrapping a document changes nothing of what it shows."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from scripts import make_docs
from scripts.wrap_markdown import too_long, wrapped

ROOT = Path(__file__).resolve().parents[2]
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
