"""Run the checks on all architectures.

    python -m tests.architectures.run FOLDER [--only NAME ...] [--results FILE]

FOLDER has the models that scripts/build_architectures.py wrote. Each architecture is checked in a
separate process, so that a crash of llama.cpp ends only one check. Fails if a check fails that is
not a known exception (tests/architectures/exceptions.py), or if a known exception passes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.architectures.exceptions import EXCEPTIONS, KINDS, WHO, exception_for

#: In the order in which they are run (`tests.architectures.checks.CHECKS`).
CHECKS = (
    *("load", "n-gram", "model", "wrong draft", "tree", "full context", "four sequences"),
    *("rows", "fuzz"),
)
#: The seconds after which a child process counts as hanging.
TIMEOUT_S = 300.0
#: A few that have what others lack: sinks, experts, latent attention, windows, states.
PART = (
    *("llama", "gpt-oss-moe", "qwen3moe-moe", "qwen35moe-moe", "gemma3n", "gemma4", "lfm2"),
    *("deepseek2-moe", "mamba2", "falcon-h1", "bitnet"),
)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a check. `kind` is the weight type, and `by` the kind of kernels."""

    name: str
    kind: str
    by: str
    check: str
    ok: bool
    detail: str
    #: Whether sequences can share cells: known by `load`.
    can_branch: bool | None = None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Check all architectures that llama.cpp runs.")
    parser.add_argument("folder", type=Path, help="where the models are")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these")
    parser.add_argument("--part", action="store_true", help="a few representative architectures")
    parser.add_argument("--results", type=Path, help="the JSON file to write the results to")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args(argv)
    manifest = json.loads((arguments.folder / "models.json").read_text(encoding="utf-8"))
    wanted = arguments.only or (list(PART) if arguments.part else list(manifest["models"]))
    unknown = sorted(set(wanted) - set(manifest["models"]))
    if unknown:
        parser.error(f"there is no {', '.join(unknown)} in {arguments.folder}")
    results: list[Result] = []
    for name, (kind, who) in itertools.product(wanted, itertools.product(KINDS, WHO)):
        if reason := manifest["models"][name]:
            results.append(Result(name, kind, who, "make", False, reason))
    made = [name for name in wanted if not manifest["models"][name]]
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(arguments.jobs) as pool:
        found = pool.map(lambda name: list(results_of(name, arguments.folder, Path(cache))), made)
        for name, each in zip(made, found, strict=True):
            results += each
            failed = ", ".join(sorted({result.check for result in each if not result.ok}))
            said = f"{name}: {len(each)} checks" + (f", failed: {failed}" if failed else "")
            print(said, file=sys.stderr, flush=True)
    failures = [*unexpected(results), *unnecessary(results)]
    for failure in failures:
        print(failure)
    if arguments.results is not None:
        keep(arguments.results, manifest["version"], results)
    n_ok = sum(result.ok for result in results)
    print(f"{len(wanted)} architectures, {n_ok} checks passed, {len(failures)} failures")
    sys.exit(1 if failures else 0)


def results_of(name: str, folder: Path, cache: Path) -> Iterator[Result]:
    """Run all checks of an architecture; after a crash, continue with those that are left."""
    todo = list(itertools.product(KINDS, WHO, CHECKS))
    while todo:
        lines, error = said_by_child(name, folder, cache, todo)
        begun = None
        for line in lines:
            begun = (line["type"], line["by"], line["check"])
            if "ok" in line:
                # The child skips the checks of a model that cannot be loaded.
                del todo[: todo.index(begun) + 1]
                yield Result(name, *begun, line["ok"], line["detail"], line.get("can_branch"))
                begun = None
        if not error:
            return
        if begun is None:
            raise RuntimeError(f"{name}: the checks did not begin: {error}")
        del todo[: todo.index(begun) + 1]
        if begun[2] == "load":
            todo = [each for each in todo if each[:2] != begun[:2]]
        yield Result(name, *begun, False, error)


def said_by_child(
    name: str, folder: Path, cache: Path, todo: Sequence[tuple[str, str, str]]
) -> tuple[list[dict[str, Any]], str]:
    """The lines that a child process prints, and the reason if it died."""
    wrong = str(folder / "other-seed" / "llama-f32.gguf")
    job = {"name": name, "folder": str(folder), "wrong": wrong, "cache": str(cache), "todo": todo}
    command = [sys.executable, "-m", "tests.architectures.child", json.dumps(job)]
    own = {"GGML_NO_BACKTRACE": "1", "OMP_WAIT_POLICY": "passive", "SPECGEN_CACHE": str(cache)}
    try:
        ended = subprocess.run(
            command, capture_output=True, timeout=TIMEOUT_S, env=os.environ | own, check=False
        )
        said, code, error = ended.stdout, ended.returncode, ended.stderr.decode(errors="replace")
    except subprocess.TimeoutExpired as hung:
        said, code, error = hung.stdout or b"", -1, f"it hung for {TIMEOUT_S:.0f} seconds"
    lines = said.decode(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")], _cause(code, error)


def _cause(code: int, said: str) -> str:
    """Why a process ended, in one line; empty if it succeeded."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    asserted = next((line for line in lines if "GGML_ASSERT" in line or "binary_op" in line), "")
    last = asserted or (lines[-1] if lines else "")
    return f"ended with {code}: {last.rpartition('/')[2][:160]}" if code else ""


def unexpected(results: Iterable[Result]) -> Iterator[str]:
    """The failed checks that are not known exceptions."""
    for result in results:
        if not result.ok and not exception_for(result.name, result.by, result.check):
            where = f"{result.name}, {result.kind}, computed by {result.by}"
            yield f"{where}: {result.check} fails: {result.detail}"


def unnecessary(results: Sequence[Result]) -> Iterator[str]:
    """The known exceptions that work now, as far as they were checked."""
    checked = {(result.name, result.kind, result.by) for result in results}
    failed = {(r.name, r.kind, r.by, r.check) for r in results if not r.ok}
    for each in EXCEPTIONS:
        for name in each.names:
            where = {(name, *each_of) for each_of in itertools.product(KINDS, each.by)}
            for check in each.checks if where & checked else ():
                if not any((*place, check) in failed for place in where):
                    yield f"{name}: {check} works: remove it from the known exceptions"


def keep(path: Path, version: str, results: Sequence[Result]) -> None:
    """Write the results for scripts/models_page.py: a line for each file and kind of kernels."""
    lines = [json.dumps({"llama-cpp-python": version})]
    for (name, kind, by), each in itertools.groupby(results, lambda r: (r.name, r.kind, r.by)):
        found = list(each)
        line = {
            "name": name,
            "type": kind,
            "by": by,
            "can_branch": any(result.can_branch for result in found),
            "passed": [result.check for result in found if result.ok],
            "failed": {result.check: result.detail for result in found if not result.ok},
        }
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
