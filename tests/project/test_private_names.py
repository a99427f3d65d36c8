"""Tests bind to public names: what begins with an underscore may change without them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.common import ROOT

PRIVATE = re.compile(r"_[A-Za-z0-9]\w*\Z")
#: A private name of one of our modules or classes, by its whole path, as patches name it.
DOTTED = re.compile(r"\bspecgen(?:\.\w+)*\.(_[A-Za-z0-9]\w*)")
#: What named tuples have, which are public there.
NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make"}
#: Whose string arguments are names of attributes.
BY_NAME = {"getattr", "setattr", "delattr", "hasattr", "object"}


def is_private(name: str) -> bool:
    return PRIVATE.match(name) is not None


def defined(tree: ast.AST) -> set[str]:
    """The private names that a file defines: functions, classes, variables, attributes and fields."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                names.add(node.attr)
    return {name for name in names if is_private(name)}


@cache
def private_names() -> frozenset[str]:
    """The private names that specgen defines."""
    files = sorted((ROOT / "specgen").rglob("*.py"))
    return frozenset().union(*(defined(ast.parse(path.read_text("utf-8"))) for path in files))


def named(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The private names of specgen that a test names, with the lines; not those of its own classes."""
    own = defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "specgen":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, part) for part in parts if is_private(part))
        elif isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names if DOTTED.search(alias.name)]
            yield from ((node.lineno, name) for name in dotted)
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if node.attr in private_names() - NAMED_TUPLES - own:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ((node.lineno, name) for name in DOTTED.findall(node.value))
        elif isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            for argument in node.args if name in BY_NAME else ():
                if isinstance(argument, ast.Constant) and argument.value in private_names() - own:
                    yield node.lineno, str(argument.value)


def test_tests_bind_to_public_names() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, name in named(ast.parse(path.read_text("utf-8")))
        if path != Path(__file__)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "from specgen.decoding.loop import _Round",
        "from specgen._hidden import name",
        "import specgen.decoding._hidden",
        "loop._backend.decode(batch)",
        "monkeypatch.setattr('specgen.decoding.loop._helper', None)",
        "monkeypatch.setattr(loop, '_backend', None)",
        "CHILD = '''\nimport specgen.decoding.loop\nspecgen.decoding.loop._helper = None\n'''",
    ],
)
def test_private_names_are_found(text: str) -> None:
    assert "_backend" in private_names()
    assert list(named(ast.parse(text)))


def test_a_tests_own_private_names_are_its_own() -> None:
    text = "class Own:\n    def __init__(self):\n        self._backend = 1\n\nOwn()._backend"
    assert not list(named(ast.parse(text)))
    assert not list(named(ast.parse("os._exit(1)\nfrom specgen.errors import SpecgenError")))
