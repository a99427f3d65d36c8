"""Check that specgen's kernels exist and work, and switch them on or off for this process."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from specgen import __version__
from specgen.errors import BackendError, UsageError
from specgen.llama.kernel_checks.model_support import TRIAL_COMMAND, ModelTrials
from specgen.llama.kernel_checks.test_results import CHILD_COMMAND, TestResult, result_of
from specgen.options import KernelChoice

#: The environment variable with the choice of kernels, if no option gives one.
VARIABLE = "SPECGEN_KERNELS"
LIBRARY_NAME = "libspecgen-kernels.so"
#: The platforms that the kernels support, as `sysconfig.get_platform` names them.
PLATFORMS = ("linux-x86_64", "linux-aarch64")

_BUILD = (
    "install specgen again where there is a C++ compiler; SPECGEN_KERNELS_BUILD=required shows "
    "what fails"
)
_LEAVE = "--kernels llama.cpp, or SPECGEN_KERNELS=llama.cpp, does without them"


@dataclass(frozen=True, slots=True)
class KernelStatus:
    """Which kernels compute models on the CPU, and why."""

    computes: Literal["specgen", "llama.cpp"]
    #: The instruction set of specgen's kernels, if they compute: ``avx2``, ``avx-vnni``,
    #: ``avx512-vnni``, ``amx-int8`` or ``neon-dotprod``; else empty.
    instructions: str = ""
    #: Why they are not used, as the rest of a sentence; None if they are used.
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
        """A short name of the kernels that compute: ``specgen avx512-vnni`` or ``llama.cpp``."""
        return f"{self.computes} {self.instructions}".strip()


def note_about(status: KernelStatus, wanted: KernelChoice, cache: Path) -> str | None:
    """Return a note if specgen's kernels should compute here and do not; None if there is nothing to say.
    That they were not built is said once, which `cache` remembers: it has no other effect than speed."""
    if wanted != "auto" or status.reason is None:
        return None
    if status.path is None:
        if status.hint is None or not is_first_time(cache / f"kernels-missing-{__version__}"):
            return None
        return f"not using specgen's kernels: {status.reason} (this note is shown once)"
    return f"not using specgen's kernels: {status.reason}"


def is_first_time(marker: Path) -> bool:
    """Return whether `marker` was not there, and make it."""
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def library_path() -> Path | None:
    """Return the library of kernels; None if it was not built."""
    path = Path(__file__).parents[1] / LIBRARY_NAME
    return path if path.is_file() else None


def wanted_in(environment: Mapping[str, str]) -> KernelChoice:
    """Return the choice that the environment variable makes. Raise `UsageError` if it is not valid."""
    wanted = environment.get(VARIABLE) or "auto"
    for choice in get_args(KernelChoice):
        if choice == wanted:
            found: KernelChoice = choice
            return found
    raise UsageError(
        f"{VARIABLE} is {wanted!r}; set it to one of {', '.join(get_args(KernelChoice))}"
    )


def choose_kernels(
    wanted: KernelChoice,
    cache: Path,
    *,
    child: Sequence[str] = CHILD_COMMAND,
    trial: Sequence[str] = TRIAL_COMMAND,
) -> KernelStatus:
    """Choose specgen's or llama.cpp's kernels for the models that this process loads from now on. Call
    this before the first model is loaded.

    ``auto`` takes specgen's kernels if they pass their self-test. The result of the test is kept in
    `cache`; `child` is the command that runs it. Raise `UsageError` if specgen's kernels are required
    and cannot be used.

    Each model is tried with them in a child process (`trial`) before it is loaded; see `ModelTrials`. What they
    cannot compute, llama.cpp's own code computes, unless they are required.
    """
    from specgen.llama import kernels

    attached = kernels.attached()
    if wanted == "llama.cpp":
        status = KernelStatus("llama.cpp", reason="llama.cpp's were asked for", path=library_path())
    elif attached is not None and attached.path == library_path():  # they were tested then
        status = KernelStatus("specgen", attached.instructions, path=attached.path)
    else:
        status = examine_kernels(cache, child=child)
    if status.computes == "specgen" and status.path is not None:
        path = status.path
        try:
            status = KernelStatus("specgen", kernels.attach(path).instructions, path=path)
        except BackendError as error:
            # The child process attached them, but this process may fail to.
            status = KernelStatus("llama.cpp", reason=error.message, hint=_LEAVE, path=path)
        try_models(ModelTrials(path, cache, required=wanted == "specgen", child=trial))
    elif attached is not None:
        attached.enable(products=False, attention=False)
    if wanted == "specgen" and status.computes != "specgen":
        raise UsageError(f"specgen's kernels cannot be used: {status.reason}", status.hint)
    return status


def examine_kernels(
    cache: Path, *, child: Sequence[str] = CHILD_COMMAND, anew: bool = False
) -> KernelStatus:
    """Return whether specgen's kernels can be used here, without attaching them. `anew` tests them even if
    the result of an earlier test is known."""
    path = library_path()
    if path is None:
        platform = sysconfig.get_platform()
        if platform not in PLATFORMS:
            return KernelStatus("llama.cpp", reason=f"there are none for {platform}")
        return KernelStatus("llama.cpp", reason="they were not built", hint=_BUILD)
    result = result_of(path, cache, child=child, anew=anew)
    if result.outcome == "passed":
        return KernelStatus("specgen", result.instructions, path=path, tested=result.message)
    return _refused(path, result)


def _refused(path: Path, result: TestResult) -> KernelStatus:
    if result.outcome == "refused":
        hint = f"{result.hint}; {_LEAVE}" if result.hint else _LEAVE
        return KernelStatus("llama.cpp", reason=result.message, hint=hint, path=path)
    return KernelStatus(
        "llama.cpp",
        reason=f"their test failed: {result.message}",
        hint=f"`specgen doctor` tests them again; {_LEAVE}",
        path=path,
        is_broken=True,
    )


def try_models(trials: ModelTrials) -> None:
    """Try the kernels on each model from now on, before it is loaded."""
    from specgen.llama import kernels

    kernels.ask_before_loading(trials.support_for)
