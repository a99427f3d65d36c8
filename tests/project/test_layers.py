"""Imports point downwards between layers and modules, and only one layer imports llama.cpp."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "specgen"

#: The layers, packages and single modules, from the bottom up. A module imports only from its own
#: layer and from those below it.
LAYERS = (
    *("errors", "option_fields", "option_values", "sampler_options", "options"),
    *("events", "system", "text"),
    *("method", "models"),
    *(
        "llama",
        "drafters",
        "session",
        "train",
        "measure",
        "serve",
        "render",
        "api",
        "drop_in",
        "cli",
    ),
    "examples",
)


def modules() -> dict[str, Path]:
    """The files of the package, by the modules' full names."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, *, for_types: bool = True) -> set[str]:
    """The full names of what a module imports anywhere in it, with or without imports for type
    checkers.
    """
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
    """The modules of the package that each module imports. A re-exported name counts as its
    package.
    """
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


def layer_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_every_module_is_in_a_layer() -> None:
    assert {layer_of(module) for module in modules()} == {*LAYERS, "", "__main__"}


def test_imports_point_downwards() -> None:
    for module, names in needed().items():
        if layer_of(module) in ("", "__main__"):
            continue
        for name in names - {"specgen"}:
            assert LAYERS.index(layer_of(name)) <= LAYERS.index(layer_of(module)), (
                f"{module} imports {name}"
            )


def test_no_modules_import_one_another() -> None:
    # The package itself holds the version, which modules below the interface print.
    graph = {module: names - {"specgen"} for module, names in needed().items()}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_one_layer_imports_llama_cpp() -> None:
    users = {
        module
        for module, path in modules().items()
        if any(name.split(".")[0] == "llama_cpp" for name in imported(path))
    }
    assert users
    # A part of llama-cpp-python's own `Llama` is the exception.
    users -= {"specgen.serve.adapters.llama_cpp"}
    assert {layer_of(module) for module in users} == {"llama"}, users


def test_nothing_below_the_renderers_prints_or_reads_the_clock() -> None:
    for module, path in modules().items():
        if layer_of(module) not in (
            "errors",
            "options",
            "events",
            "text",
            "method",
            "llama",
            "drafters",
            "session",
        ):
            continue
        # These are programs: each test of the kernels runs in a process of its own.
        if module.startswith("specgen.llama.kernels."):
            continue
        assert not imported(path) & {"time", "rich", "sys"}, module
        assert "print(" not in path.read_text(encoding="utf-8"), module
