"""Results of the kernels' self-test: made by a child process, and remembered for a machine.

A child, since kernels that are wrong for a CPU may end the process that tries them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from specgen import __version__
from specgen.atomic import replace_text
from specgen.child import ChildDiedError, ChildError, ask_child

TestOutcome: TypeAlias = Literal["passed", "refused", "failed"]

#: Starts a child; the path of the library follows.
CHILD_COMMAND = (sys.executable, "-m", "specgen.kernels.self_test")
TIMEOUT_S = 60.0
#: Restricts the kernels to an instruction set, when they are attached.
INSTRUCTIONS_VARIABLE = "SPECGEN_KERNELS_INSTRUCTIONS"
#: In the cache folder.
FILE_NAME = "kernels.json"
#: Results that are kept, the latest ones.
_N_KEPT = 8
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class TestResult:
    """What came of a self-test."""

    __test__ = False  # pytest takes the name for that of tests

    #: ``refused``: the library says itself that it is not for this machine or this llama.cpp.
    outcome: TestOutcome
    #: What was tested, or what went wrong, in a line.
    message: str
    #: What the kernels are written for, if they passed.
    instructions: str = ""


def result_of(
    library: Path, cache: Path, *, child: Sequence[str] = CHILD_COMMAND, anew: bool = False
) -> TestResult:
    """What comes of testing a library here: as it is remembered, or (`anew`) by a new test. A cache
    that cannot be written to remembers nothing."""
    file, key = cache / FILE_NAME, _key(_circumstances(library))
    known = None if anew else _parse(_read(file).get(key))
    if known is not None:
        return known
    result = run_test(library, child=child)
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        results = {name: value for name, value in _read(file).items() if name != key}
        results[key] = asdict(result)
        latest = dict(list(results.items())[-_N_KEPT:])
        replace_text(file, json.dumps({"results": latest}, indent=1) + "\n")
    return result


def run_test(
    library: Path, *, child: Sequence[str] = CHILD_COMMAND, timeout_s: float = TIMEOUT_S
) -> TestResult:
    """Test a library in a child process, however that ends."""
    try:
        answer = _parse(ask_child([*child, os.fspath(library)], timeout_s))
    except ChildDiedError as error:
        name = error.signal_name
        message = f"they died of {name}" if name else str(error)
        last_words = f": {error.last_words}" if error.last_words else ""
        return TestResult("failed", message + last_words)
    except ChildError as error:
        return TestResult("failed", str(error))
    return answer or TestResult("failed", "it gave no answer")


def _circumstances(library: Path) -> dict[str, str]:
    """Everything that decides what comes of a test. Loads llama.cpp."""
    from specgen.backend.llama import build
    from specgen.backend.llama.kernels import ggml_version

    return {
        "specgen": __version__,
        "library": hashlib.sha256(library.read_bytes()).hexdigest(),
        "llama-cpp-python": build().version,
        "ggml": ggml_version(),
        "cpu": _cpu(),
        "instructions": os.environ.get(INSTRUCTIONS_VARIABLE, ""),
    }


def _cpu() -> str:
    """The name and the features of the CPU, as Linux tells them."""
    lines: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            lines.setdefault(name.strip(), value.strip())
    return "\n".join(lines.get(name, "") for name in ("model name", "microcode", "flags"))


def _key(circumstances: Mapping[str, str]) -> str:
    text = json.dumps(circumstances, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read(file: Path) -> dict[str, Any]:
    """The results of a file, by key; none if it is not there or broken."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    results = document.get("results") if isinstance(document, dict) else None
    return results if isinstance(results, dict) else {}


def _parse(value: Any) -> TestResult | None:
    """A result as JSON has it; None if it is none."""
    if not isinstance(value, dict) or value.get("outcome") not in get_args(TestOutcome):
        return None
    message, instructions = value.get("message"), value.get("instructions", "")
    if not isinstance(message, str) or not isinstance(instructions, str):
        return None
    return TestResult(value["outcome"], message, instructions)


__all__ = ["CHILD_COMMAND", "TestResult", "result_of", "run_test"]
