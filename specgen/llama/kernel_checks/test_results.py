"""Results of the kernels' self-test: run it in a child process, and remember its result for a machine.

The test needs a child process, since kernels that are wrong for a CPU may end the process that runs them.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from specgen import __version__
from specgen.system.atomic_files import KeptResults
from specgen.system.child_process import ChildDiedError, ChildError, ask_child_again
from specgen.system.machine import cpuinfo

TestOutcome: TypeAlias = Literal["passed", "refused", "failed"]

#: The command that starts a child; the path of the library follows.
CHILD_COMMAND = (sys.executable, "-m", "specgen.llama.kernel_checks.self_test")
TIMEOUT_S = 60.0
#: This environment variable restricts the kernels to an instruction set when they are attached.
INSTRUCTIONS_VARIABLE = "SPECGEN_KERNELS_INSTRUCTIONS"
#: The file of results in the cache folder.
FILE_NAME = "kernels.json"
#: The most results in the file; the latest ones are kept.
_N_KEPT = 8


@dataclass(frozen=True, slots=True)
class TestResult:
    """The result of a self-test."""

    __test__ = False  # else pytest takes this class for tests, because of its name

    #: ``refused``: the library itself reports that it is not for this machine or this llama.cpp.
    outcome: TestOutcome
    #: What was tested, or what went wrong, in a line.
    message: str
    #: The instruction set of the kernels, if they passed.
    instructions: str = ""
    #: What to do about a refusal, if the library is for another llama.cpp.
    hint: str = ""


def result_of(
    library: Path, cache: Path, *, child: Sequence[str] = CHILD_COMMAND, anew: bool = False
) -> TestResult:
    """Return the result of testing a library here: the remembered one if there is one, unless `anew`, else
    that of a new test. If the cache cannot be written, nothing is remembered."""
    kept, key = KeptResults(cache / FILE_NAME, _N_KEPT), key_of(circumstances(library))
    known = None if anew else _parse(kept.read().get(key))
    if known is not None:
        return known
    result = run_test(library, child=child)
    kept.add({key: asdict(result)})
    return result


def run_test(library: Path, *, child: Sequence[str] = CHILD_COMMAND) -> TestResult:
    """Test a library in a child process. Return a result however the process ends."""
    try:
        answer = _parse(ask_child_again([*child, os.fspath(library)], TIMEOUT_S))
    except ChildDiedError as error:
        name = error.signal_name
        message = f"they died of {name}" if name else str(error)
        last_words = f": {error.last_words}" if error.last_words else ""
        return TestResult("failed", message + last_words)
    except ChildError as error:
        return TestResult("failed", str(error))
    return answer or TestResult("failed", "it gave no answer")


def circumstances(library: Path) -> dict[str, str]:
    """Return everything that the result of a test depends on. This loads llama.cpp."""
    from specgen.llama import build
    from specgen.llama.kernels import ggml_version

    built = build()
    return {
        "specgen": __version__,
        "library": hashlib.sha256(library.read_bytes()).hexdigest(),
        "llama-cpp-python": built.version,
        "features": built.system_info,
        "ggml": ggml_version(),
        "cpu": cpu_name(),
        "instructions": os.environ.get(INSTRUCTIONS_VARIABLE, ""),
    }


def cpu_name() -> str:
    """Return the name, the microcode and the features of the CPU as Linux reports them (on ARM, numbers in
    place of a name)."""
    about = cpuinfo()
    own = ("model name", "microcode", "flags")
    arm = ("CPU implementer", "CPU part", "CPU variant", "CPU revision", "Features")
    return "\n".join(about.get(name, "") for name in (*own, *arm))


def key_of(about: Mapping[str, str]) -> str:
    """Return the key of results in these circumstances."""
    text = json.dumps(about, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _parse(value: Any) -> TestResult | None:
    """Return the result in a JSON value; None if it is not valid."""
    if not isinstance(value, dict) or value.get("outcome") not in get_args(TestOutcome):
        return None
    texts = [value.get("message"), value.get("instructions", ""), value.get("hint", "")]
    if not all(isinstance(text, str) for text in texts):
        return None
    return TestResult(value["outcome"], *texts)
