"""Imports point one way, downwards, between wings and between modules, and one wing imports llama.cpp."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "specgen"

#: The wings and the modules beside them, from the bottom up. A module imports from its own wing and
#: from those below it only.
WINGS = (
    *("errors", "sampler_options", "options", "events", "system", "method", "text", "llama"),
    *(
        "drafters",
        "models",
        "session",
        "train",
        "measure",
        "serve",
        "render",
        "api",
        "cli",
        "examples",
    ),
)
#: These import one another's protocols and values, without circles of modules.
METHOD = ("method", "text", "drafters")


def modules() -> dict[str, Path]:
    """The files of the package, by the modules' full names."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, *, for_types: bool = True) -> set[str]:
    """Full names of what a module imports, wherever in it; with or without what only type checkers read."""
    names: set[str] = set()
    left: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif (
            for_types or not isinstance(node, ast.If) or "TYPE_CHECKING" not in ast.dump(node.test)
        ):
            left += ast.iter_child_nodes(node)
    return names


def needed() -> dict[str, set[str]]:
    """The modules of the package that each module imports. A name that a package hands on stands for
    the package."""
    known = modules()
    needs: dict[str, set[str]] = {}
    for module, path in known.items():
        names = imported(path)
        found = {name for name in names if name in known}
        # `from specgen.a import b` names the module specgen.a.b where there is one, else specgen.a.
        packages = {name.rpartition(".")[0] for name in found if name.rpartition(".")[0] in found}
        taken = {name.rpartition(".")[0] for name in names - found}
        needs[module] = found - (packages - taken) - {module}
    return needs


def wing(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_every_module_is_in_a_wing() -> None:
    assert {wing(module) for module in modules()} == {*WINGS, "", "__main__"}


def test_imports_point_downwards() -> None:
    for module, names in needed().items():
        if wing(module) in ("", "__main__"):
            continue
        for name in names - {"specgen"}:
            if wing(name) in METHOD and wing(module) in METHOD:
                continue
            assert WINGS.index(wing(name)) <= WINGS.index(wing(module)), f"{module} imports {name}"


def test_no_modules_import_one_another() -> None:
    # The package itself holds the version, which modules below the interface print.
    graph = {module: names - {"specgen"} for module, names in needed().items()}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_one_wing_imports_llama_cpp() -> None:
    users = {
        module
        for module, path in modules().items()
        if any(name.split(".")[0] == "llama_cpp" for name in imported(path))
    }
    assert users
    # A part of llama-cpp-python's own `Llama` is the exception.
    users -= {"specgen.serve.adapters.llama_cpp"}
    assert {wing(module) for module in users} == {"llama"}, users


def test_nothing_below_the_renderers_prints_or_reads_the_clock() -> None:
    for module, path in modules().items():
        if wing(module) not in ("errors", "options", "events", *METHOD, "llama", "session"):
            continue
        # These are programs: each test of the kernels runs in a process of its own.
        if module.startswith("specgen.llama.kernels."):
            continue
        assert not imported(path) & {"time", "rich", "sys"}, module
        assert "print(" not in path.read_text(encoding="utf-8"), module


@pytest.mark.parametrize(
    ("module", "most_modules", "most_lines"),
    [("specgen.cli.run", 86, 17_700), ("specgen.method.loop", 13, 2_150)],
)
def test_little_of_the_package_is_needed(module: str, most_modules: int, most_lines: int) -> None:
    """What `specgen run` and the loop need, imports in functions included."""
    known, found, left = modules(), dict[str, int](), [module]
    while left:
        name = left.pop()
        if name in known and name not in found:
            found[name] = len(known[name].read_text(encoding="utf-8").splitlines())
            left += [*imported(known[name], for_types=False), name.rpartition(".")[0]]
    largest = sorted(found, key=lambda name: -found[name])[:20]
    assert len(found) <= most_modules, sorted(found)
    assert sum(found.values()) <= most_lines, {name: found[name] for name in largest}
