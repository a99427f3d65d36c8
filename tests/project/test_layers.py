"""Imports point one way, downwards, and one package imports llama.cpp."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "specgen"

#: From the bottom up; a module imports from its own layer and from those below it only.
LAYERS = (
    (
        "errors",
        "options",
        "arrays",
        "events",
        "atomic",
        "child",
        "machine",
        "json_values",
        "json_lines",
        "process_end",
    ),
    ("sampling", "constrain"),
    ("core",),
    ("backend",),
    ("calibration",),
    ("policy",),
    ("drafters",),
    ("engine",),
    ("testing", "catalogue", "progress", "openai_format"),
    ("selection", "proof", "workshop"),
    ("bench", "batch", "chat", "server"),
    ("render",),
    ("kernels",),
    ("doctor", "worker_checks", "api", "adapters"),
    ("cli",),
)


def layer(name: str) -> int:
    return next(number for number, names in enumerate(LAYERS) if name in names)


def imported(path: Path) -> set[str]:
    """Full names of what a module imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def modules() -> dict[str, set[str]]:
    """What each module imports, by its path within the package."""
    return {path.relative_to(PACKAGE).as_posix(): imported(path) for path in PACKAGE.rglob("*.py")}


def test_every_module_is_in_one_layer() -> None:
    listed = [name for names in LAYERS for name in names]
    own = {path.removesuffix(".py").split("/")[0] for path in modules()}
    assert sorted(listed) == sorted(own - {"__init__", "__main__"})


def test_there_are_no_circles_within_a_layer() -> None:
    needs: dict[str, set[str]] = {name: set() for names in LAYERS for name in names}
    for path, names in modules().items():
        own = path.removesuffix(".py").split("/")[0]
        parts = [name.split(".") for name in names if name.startswith("specgen.")]
        needs.setdefault(own, set()).update(part[1] for part in parts if part[1] in needs)
    order = TopologicalSorter({name: found - {name} for name, found in needs.items()})
    order.prepare()  # raises CycleError


def test_imports_point_downwards() -> None:
    for path, names in modules().items():
        own = path.removesuffix(".py").split("/")[0]
        if own in ("__init__", "__main__"):
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "specgen" and len(parts) > 1 and parts[1] != "__version__":
                assert layer(parts[1]) <= layer(own), f"{path} imports {name}"


def test_one_package_imports_llama_cpp() -> None:
    users = [
        path
        for path, names in modules().items()
        if any(name.split(".")[0] == "llama_cpp" for name in names)
    ]
    assert users
    # A part of llama-cpp-python's own `Llama` is the exception.
    users = [path for path in users if path != "adapters/llama_cpp.py"]
    assert all(path.startswith("backend/llama/") for path in users), users


def test_nothing_below_the_renderers_prints_or_reads_the_clock() -> None:
    for path, names in modules().items():
        own = path.removesuffix(".py").split("/")[0]
        if own in ("__init__", "__main__") or layer(own) > layer("engine"):
            continue
        assert not names & {"time", "rich", "sys"}, path
        text = (PACKAGE / path).read_text(encoding="utf-8")
        assert "print(" not in text, path
