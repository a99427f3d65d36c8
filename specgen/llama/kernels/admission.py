"""Which kernels compute models on the CPU: specgen's, or those of llama.cpp.

specgen's are used if their library was built, passes its self-test on this machine, and does not
fail on the model that is loaded (`verdicts.py`).
"""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from specgen import __version__
from specgen.errors import BackendError, UsageError
from specgen.llama.kernels.attached import ask_before_loading, attach, attached
from specgen.llama.kernels.verdicts import KernelTests
from specgen.options import KernelChoice

#: The environment variable with the choice of kernels, if no option gives one.
VARIABLE = "SPECGEN_KERNELS"
LIBRARY_NAME = "libspecgen-kernels.so"
#: The platforms that the kernels support, as `sysconfig.get_platform` names them.
PLATFORMS = ("linux-x86_64", "linux-aarch64")

_BUILD = (
    "install specgen again with a C++ compiler; SPECGEN_KERNELS_BUILD=required shows what fails"
)
_LEAVE = "--kernels llama.cpp, or SPECGEN_KERNELS=llama.cpp, turns them off"
_DEFECT = "report this as a bug in specgen; --kernels llama.cpp turns its kernels off"


@dataclass(frozen=True, slots=True)
class KernelStatus:
    """Which kernels compute models on the CPU, and why."""

    computes: Literal["specgen", "llama.cpp"]
    #: The instruction set of specgen's kernels (see `Kernels`), if they compute; else empty.
    instructions: str = ""
    #: Why they are not used, as the rest of a sentence.
    reason: str | None = None
    #: What to do about it.
    hint: str | None = None
    #: The library; None if it was not built.
    path: Path | None = None
    #: What their self-test tested; empty if it was not needed or not passed.
    tested: str = ""
    #: Whether the library accepted this machine and this llama.cpp, and then failed its test.
    is_broken: bool = False

    @property
    def label(self) -> str:
        """The name of the kernels in reports: ``specgen avx2``, say, or ``llama.cpp``."""
        return f"{self.computes} {self.instructions}".strip()


# --- what is wanted, and what there is ------------------------------------------------------------


def wanted_in(environment: Mapping[str, str]) -> KernelChoice:
    """Return the choice of the environment variable.

    Raises:
        UsageError: if it is not valid.
    """
    wanted = environment.get(VARIABLE) or "auto"
    choices: tuple[KernelChoice, ...] = get_args(KernelChoice)
    for choice in choices:
        if choice == wanted:
            return choice
    raise UsageError(f"{VARIABLE} is {wanted!r}; set it to one of {', '.join(choices)}")


def library_path() -> Path | None:
    """Return the library of kernels; None if it was not built."""
    path = Path(__file__).parents[1] / LIBRARY_NAME
    return path if path.is_file() else None


def examine_kernels(cache: Path, *, anew: bool = False) -> KernelStatus:
    """Return whether specgen's kernels can be used here, without attaching them.

    Args:
        cache: the folder that keeps the verdict of their self-test.
        anew: whether to test them even if the verdict is known.
    """
    path = library_path()
    if path is None:
        platform = sysconfig.get_platform()
        if platform not in PLATFORMS:
            return KernelStatus("llama.cpp", reason=f"there are none for {platform}")
        return KernelStatus("llama.cpp", reason="they were not built", hint=_BUILD)
    verdict = KernelTests(path, cache).self_test(anew=anew)
    if verdict.outcome == "passed":
        return KernelStatus("specgen", verdict.instructions, path=path, tested=verdict.message)
    if verdict.outcome == "failed":
        return KernelStatus(
            "llama.cpp",
            reason=f"their test failed: {verdict.message}",
            hint=f"`specgen doctor` tests them again; {_LEAVE}",
            path=path,
            is_broken=True,
        )
    hint = f"{verdict.hint}; {_LEAVE}" if verdict.hint else _LEAVE
    return KernelStatus("llama.cpp", reason=verdict.message, hint=hint, path=path)


# --- the choice -----------------------------------------------------------------------------------


def choose_kernels(wanted: KernelChoice, cache: Path) -> KernelStatus:
    """Choose what computes the models that this process loads from now on.

    Args:
        wanted: ``auto`` uses specgen's kernels if they pass their self-test, ``specgen`` insists on
            them. Either way each model is tried before it is loaded.
        cache: the folder that keeps the verdicts.

    Raises:
        UsageError: if specgen's kernels are wanted and cannot be used.
    """
    kernels = attached()
    path = library_path()
    if wanted == "llama.cpp":
        status = KernelStatus("llama.cpp", reason="llama.cpp's were asked for", path=path)
    elif kernels is not None and kernels.path == path:  # they were tested when they were attached
        status = KernelStatus("specgen", kernels.instructions, path=path)
    else:
        status = examine_kernels(cache)
    if status.computes == "specgen" and status.path is not None:
        status = _attach_with_trials(status.path, cache, required=wanted == "specgen")
    elif kernels is not None:
        kernels.enable(products=False, attention=False)
    if wanted == "specgen" and status.computes != "specgen":
        raise UsageError(f"specgen's kernels cannot be used: {status.reason}", status.hint)
    return status


def _attach_with_trials(path: Path, cache: Path, *, required: bool) -> KernelStatus:
    """Attach a library, and try models from now on before they are loaded.

    Args:
        path: the library.
        cache: the folder that keeps the verdicts.
        required: whether a model that fails its trial is an error.
    """
    tests = KernelTests(path, cache)

    def problem_of(model: Path) -> str:
        problem = tests.problem_of(model)
        if problem and required:
            message = f"{model}: specgen's kernels cannot compute this model: {problem}"
            raise UsageError(message, _DEFECT)
        return problem

    ask_before_loading(problem_of)
    try:
        return KernelStatus("specgen", attach(path).instructions, path=path)
    except BackendError as error:  # although it worked in the child process
        return KernelStatus("llama.cpp", reason=error.message, hint=_LEAVE, path=path)


# --- what the user is told ------------------------------------------------------------------------


def note_about(status: KernelStatus, wanted: KernelChoice, cache: Path) -> str | None:
    """Return a note if specgen's kernels should compute and do not.

    That they were not built is mentioned only once; the cache remembers that.
    """
    if wanted != "auto" or status.reason is None:
        return None
    note = f"not using specgen's kernels: {status.reason}"
    if status.path is not None:
        return note
    if status.hint is not None and is_first_time(cache / f"kernels-missing-{__version__}"):
        return f"{note} (this note is shown once)"
    return None


def is_first_time(marker: Path) -> bool:
    """Return whether this is the first call with a marker file, which is created."""
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True
