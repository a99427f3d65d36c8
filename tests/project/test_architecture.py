"""The contributors' documents name only files, names, make targets and layers that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.helpers.common import ROOT
from tests.project.test_layers import LAYERS

ARCHITECTURE = ROOT / "docs" / "architecture.md"
DOCUMENTS = (ARCHITECTURE, ROOT / "CONTRIBUTING.md")
#: A path from the root, or from specgen/; `::` and a name of the module may follow.
PATH = re.compile(r"[\w.-]+(?:/[\w.-]*)+(?:::\w+)?|[\w-]+\.(?:py|md|toml)\b(?:::\w+)?")


def tokens_of(markdown: str) -> Iterator[Token]:
    """All parts of a document, those within paragraphs and cells of tables too."""
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        yield token
        yield from token.children or ()


def code_of(markdown: str) -> list[str]:
    """The code in backticks and in code blocks."""
    kinds = ("code_inline", "code_block", "fence")
    return [token.content for token in tokens_of(markdown) if token.type in kinds]


def paths_of(markdown: str) -> list[str]:
    return [path for code in code_of(markdown) for path in PATH.findall(code)]


def stale_paths(markdown: str) -> list[str]:
    """The paths in a document's code that lead nowhere, and the names that their modules lack."""
    return [path for path in paths_of(markdown) if not exists(path)]


def exists(path: str) -> bool:
    file, _, name = path.partition("::")
    for folder in (ROOT, ROOT / "specgen"):
        if (folder / file).exists():
            return not name or name in defined(folder / file)
    return False


@cache
def defined(module: Path) -> frozenset[str]:
    """The classes, functions and constants of a module."""
    names: set[str] = set()
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(names)


def layers_of(markdown: str) -> list[str]:
    """The first column of the table of layers, from the top down."""
    table = re.search(r"^\| layer \|.*\n\| ---.*\n((?:\|.*\n)+)", markdown, re.MULTILINE)
    assert table is not None, "there is no table of layers"
    return [row.split("|")[1].strip(" `") for row in table[1].splitlines()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_everything_that_documents_name_exists(document: Path) -> None:
    markdown = document.read_text(encoding="utf-8")
    assert len(paths_of(markdown)) > 20
    assert stale_paths(markdown) == []


def test_names_that_do_not_exist_are_found() -> None:
    right = (
        "`tests/project/test_layers.py::LAYERS` `method/loop.py` `kernels/` `models.toml` "
        "`specgen run`"
    )
    assert len(paths_of(right)) == 4
    assert stale_paths(right) == []
    wrong = [
        "tests/project/test_layers.py::NOTHING",
        "session/nothing.py",
        "nothing/",
        "nothing.toml",
    ]
    assert stale_paths(f"| `{'` `'.join(wrong[:2])}` |\n\n    {' '.join(wrong[2:])}") == wrong


def test_the_layers_are_those_that_imports_keep_to() -> None:
    assert layers_of(ARCHITECTURE.read_text(encoding="utf-8"))[::-1] == list(LAYERS)


def test_the_targets_of_make_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for document in DOCUMENTS:
        code = "\n".join(code_of(document.read_text(encoding="utf-8")))
        assert set(re.findall(r"^make ([a-z-]+)", code, re.MULTILINE)) <= targets, document
