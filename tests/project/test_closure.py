"""What `specgen run` and the loop need of the package: modules and lines, imports in functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "specgen"


def file_of(module: str) -> Path | None:
    path = PACKAGE.parent.joinpath(*module.split("."))
    found = (each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file())
    return next(found, None)


def imported(tree: ast.AST) -> Iterator[str]:
    """The names that a module imports, wherever in it, but for what only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            yield from imported(node)


def closure(module: str) -> dict[str, int]:
    """The modules that a module needs, and their lines."""
    found: dict[str, int] = {}
    left = [module]
    while left:
        name = left.pop()
        file = file_of(name) if name.split(".")[0] == PACKAGE.name else None
        if file is None or name in found:
            continue
        text = file.read_text(encoding="utf-8")
        found[name] = len(text.splitlines())
        left += [*imported(ast.parse(text)), name.rpartition(".")[0]]
    return found


@pytest.mark.parametrize(
    ("module", "most_modules", "most_lines"),
    [("specgen.cli.run", 113, 21_900), ("specgen.method.loop", 14, 2_850)],
)
def test_little_of_the_package_is_needed(module: str, most_modules: int, most_lines: int) -> None:
    found = closure(module)
    largest = sorted(found, key=lambda name: -found[name])[:20]
    assert len(found) <= most_modules, sorted(found)
    assert sum(found.values()) <= most_lines, {name: found[name] for name in largest}
