"""The choice of the kernels that compute models on the CPU: specgen's, or those of llama.cpp.

specgen's are used if their library was built, passes its self-test on this machine, and passes a
trial with the model to be loaded (`verdicts.py`).
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

#: The environment variable for the choice of kernels, which an option overrides.
VARIABLE = "SPECGEN_KERNELS"
LIBRARY_NAME = "libspecgen-kernels.so"
#: The platforms that the kernels support, as `sysconfig.get_platform` names them.
PLATFORMS = ("linux-x86_64", "linux-aarch64")

_BUILD = (
    "install specgen again with a C++ compiler; SPECGEN_KERNELS_BUILD=required shows what fails"
)
_TURN_OFF = "--kernels llama.cpp, or SPECGEN_KERNELS=llama.cpp, turns them off"
_DEFECT = "report this as a bug in specgen; --kernels llama.cpp turns its kernels off"


@dataclass(frozen=True, slots=True)
class KernelStatus:
    """Which kernels compute models on the CPU, and why."""

    #: Whose kernels compute.
    computes: Literal["specgen", "llama.cpp"]
    #: The instruction set of specgen's kernels (see `Kernels`), if they compute; else empty.
    instructions: str = ""
    #: Why specgen's kernels are not used, as a clause: "they were not built".
    reason: str | None = None
    #: What to do about that.
    hint: str | None = None
    #: The library; None if it was not built.
    path: Path | None = None
    #: What the self-test covered; empty if it was not needed or not passed.
    tested: str = ""
    #: Whether the library supports this machine and this llama.cpp, but failed its self-test.
    is_broken: bool = False

    @property
    def label(self) -> str:
        """The name of the kernels in reports: ``specgen avx2``, say, or ``llama.cpp``."""
        return f"{self.computes} {self.instructions}".strip()


# --- what is wanted, and what there is ------------------------------------------------------------


def wanted_in(environment: Mapping[str, str]) -> KernelChoice:
    """Return the choice of the environment variable.

    Raises:
        UsageError: If it is not valid.
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


def examine_kernels(cache: Path, *, rerun: bool = False) -> KernelStatus:
    """Find out whether specgen's kernels can be used here, without attaching them.

    Args:
        cache: The folder that keeps the verdict of their self-test.
        rerun: Whether to test them even if the verdict is known.
    """
    path = library_path()
    if path is None:
        platform = sysconfig.get_platform()
        if platform not in PLATFORMS:
            return KernelStatus("llama.cpp", reason=f"there are none for {platform}")
        return KernelStatus("llama.cpp", reason="they were not built", hint=_BUILD)
    verdict = KernelTests(path, cache).self_test(rerun=rerun)
    if verdict.outcome == "passed":
        return KernelStatus("specgen", verdict.instructions, path=path, tested=verdict.message)
    if verdict.outcome == "failed":
        return KernelStatus(
            "llama.cpp",
            reason=f"their test failed: {verdict.message}",
            hint=f"`specgen doctor` tests them again; {_TURN_OFF}",
            path=path,
            is_broken=True,
        )
    hint = f"{verdict.hint}; {_TURN_OFF}" if verdict.hint else _TURN_OFF
    return KernelStatus("llama.cpp", reason=verdict.message, hint=hint, path=path)


# --- the choice -----------------------------------------------------------------------------------


def choose_kernels(wanted: KernelChoice, cache: Path) -> KernelStatus:
    """Choose the kernels for the models that this process loads from now on, and switch to them.

    Args:
        wanted: ``auto`` uses specgen's kernels if they pass their self-test, ``specgen`` fails if
            they do not. In both cases each model is tried before it is loaded.
        cache: The folder that keeps the verdicts.

    Raises:
        UsageError: If `wanted` is ``specgen`` and its kernels cannot be used.
    """
    kernels = attached()
    path = library_path()

    # 1. Decide.
    if wanted == "llama.cpp":
        status = KernelStatus("llama.cpp", reason="llama.cpp's were asked for", path=path)
    elif kernels is not None and kernels.path == path:  # they were tested when they were attached
        status = KernelStatus("specgen", kernels.instructions, path=path)
    else:
        status = examine_kernels(cache)

    # 2. Switch. Attaching may fail, although the self-test passed.
    if status.computes == "specgen" and status.path is not None:
        status = _attach_with_trials(status.path, cache, required=wanted == "specgen")
    elif kernels is not None:
        kernels.enable(products=False, attention=False)
    if wanted == "specgen" and status.computes != "specgen":
        raise UsageError(f"specgen's kernels cannot be used: {status.reason}", status.hint)
    return status


def _attach_with_trials(
    path: Path,
    cache: Path,
    *,
    required: bool,
) -> KernelStatus:
    """Attach a library, and let it try every model before that is loaded.

    Args:
        path: The library.
        cache: The folder that keeps the verdicts.
        required: Whether loading a model that fails its trial raises a `UsageError`. Otherwise
            llama.cpp's kernels compute it.
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
        return KernelStatus("llama.cpp", reason=error.message, hint=_TURN_OFF, path=path)


# --- what the user is told ------------------------------------------------------------------------


def note_about(
    status: KernelStatus,
    wanted: KernelChoice,
    cache: Path,
) -> str | None:
    """Return a note for the user if specgen's kernels were expected but are not used.

    Returns:
        None if there is nothing to say. If the kernels were not built, the note is given only once;
        a file in the cache remembers that.
    """
    if wanted != "auto" or status.reason is None:
        return None
    note = f"not using specgen's kernels: {status.reason}"
    if status.path is not None:
        return note
    # Without a hint, there are no kernels for this platform: nothing can be done about it.
    if status.hint is not None and is_first_time(cache / f"kernels-missing-{__version__}"):
        return f"{note} (this note is shown once)"
    return None


def is_first_time(marker: Path) -> bool:
    """Create a marker file, and return whether it is new (or cannot be created)."""
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True
