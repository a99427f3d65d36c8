"""Whether specgen's kernels are there and work, and switching them on or off for this process."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from specgen.errors import BackendError, UsageError
from specgen.kernels.test_results import CHILD_COMMAND, TestResult, result_of
from specgen.options import KernelChoice

#: What is wanted, where no option says so.
VARIABLE = "SPECGEN_KERNELS"
LIBRARY_NAME = "libspecgen-kernels.so"
#: As `sysconfig.get_platform` names it.
PLATFORM = "linux-x86_64"

_BUILD = (
    "install specgen again where there is a C++ compiler; SPECGEN_KERNELS_BUILD=required shows "
    "what fails"
)
_LEAVE = "--kernels llama.cpp, or SPECGEN_KERNELS=llama.cpp, does without them"


@dataclass(frozen=True, slots=True)
class KernelStatus:
    """Who computes what models on the CPU need, and why."""

    computes: Literal["specgen", "llama.cpp"]
    #: What specgen's kernels are written for, where they compute: ``avx2``, ``avx-vnni``,
    #: ``avx512-vnni`` or ``amx-int8``; else empty.
    instructions: str = ""
    #: Why they are not used, as the rest of a sentence; None where they are.
    reason: str | None = None
    #: What to do about it.
    hint: str | None = None
    #: The library; None where it was never built.
    path: Path | None = None
    #: What their test tested, where it was made for this status.
    tested: str = ""
    #: Whether the library took this machine and this llama.cpp for its own, and then failed.
    is_broken: bool = False

    @property
    def label(self) -> str:
        """Who computes, in a word or two: ``specgen avx512-vnni`` or ``llama.cpp``."""
        return f"{self.computes} {self.instructions}".strip()


def library_path() -> Path | None:
    """The library of kernels; None where it was not built."""
    path = Path(__file__).parent / LIBRARY_NAME
    return path if path.is_file() else None


def wanted_in(environment: Mapping[str, str]) -> KernelChoice:
    """The choice that a variable of the environment makes. Raises `UsageError`."""
    wanted = environment.get(VARIABLE) or "auto"
    for choice in get_args(KernelChoice):
        if choice == wanted:
            found: KernelChoice = choice
            return found
    raise UsageError(
        f"{VARIABLE} is {wanted!r}; set it to one of {', '.join(get_args(KernelChoice))}"
    )


def choose_kernels(
    wanted: KernelChoice, cache: Path, *, child: Sequence[str] = CHILD_COMMAND
) -> KernelStatus:
    """Let specgen's kernels or llama.cpp's compute for the models that this process loads from now
    on. To be called before the first one.

    ``auto`` takes specgen's where they pass their test, whose result is kept in `cache`; `child`
    is the command that makes it. Raises `UsageError` if specgen's are asked for and cannot be used.
    """
    if wanted == "llama.cpp":
        _switch_off()
        return KernelStatus("llama.cpp", reason="llama.cpp's were asked for", path=library_path())
    status = _attached() or examine_kernels(cache, child=child)
    if status.computes == "specgen":
        status = _attach(status)
    else:
        _switch_off()
    if wanted == "specgen" and status.computes != "specgen":
        raise UsageError(f"specgen's kernels cannot be used: {status.reason}", status.hint)
    return status


def examine_kernels(
    cache: Path, *, child: Sequence[str] = CHILD_COMMAND, anew: bool = False
) -> KernelStatus:
    """Whether specgen's kernels can be used here; nothing is attached. `anew` tests them even if
    the result of an earlier test is known."""
    path = library_path()
    if path is None:
        platform = sysconfig.get_platform()
        if platform != PLATFORM:
            return KernelStatus("llama.cpp", reason=f"there are none for {platform}")
        return KernelStatus("llama.cpp", reason="they were not built", hint=_BUILD)
    result = result_of(path, cache, child=child, anew=anew)
    if result.outcome == "passed":
        return KernelStatus("specgen", result.instructions, path=path, tested=result.message)
    return _refused(path, result)


def _refused(path: Path, result: TestResult) -> KernelStatus:
    if result.outcome == "refused":
        return KernelStatus("llama.cpp", reason=result.message, hint=_LEAVE, path=path)
    return KernelStatus(
        "llama.cpp",
        reason=f"their test failed: {result.message}",
        hint=f"`specgen doctor` tests them again; {_LEAVE}",
        path=path,
        is_broken=True,
    )


def _attached() -> KernelStatus | None:
    """The kernels that this process attached before, which need no test any more."""
    path = library_path()
    if path is None:
        return None
    from specgen.backend.llama import kernels

    attached = kernels.attached()
    if attached is None or attached.path != path:
        return None
    return KernelStatus("specgen", attached.instructions, path=path)


def _attach(status: KernelStatus) -> KernelStatus:
    from specgen.backend.llama import kernels

    assert status.path is not None
    try:
        attached = kernels.attach(status.path)
    except BackendError as error:  # what the child could do this process may not be able to
        return KernelStatus("llama.cpp", reason=error.message, hint=_LEAVE, path=status.path)
    return KernelStatus("specgen", attached.instructions, path=status.path)


def _switch_off() -> None:
    from specgen.backend.llama import kernels

    attached = kernels.attached()
    if attached is not None:
        attached.enable(products=False, attention=False)


__all__ = [
    "VARIABLE",
    "KernelStatus",
    "choose_kernels",
    "examine_kernels",
    "library_path",
    "wanted_in",
]
