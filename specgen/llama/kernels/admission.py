"""Whether specgen's kernels compute: one self-test for a machine, one trial for a model, in child
processes (`trial.py`), which they may end. The verdicts are remembered, by the library, llama.cpp,
the processor and the model's file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from specgen import __version__
from specgen.errors import BackendError, UsageError
from specgen.llama.kernels.attached import ask_before_loading, attach, attached, ggml_version
from specgen.llama.library import build
from specgen.options import KernelChoice
from specgen.system.files import KeptResults, digest_of, version_of
from specgen.system.machine import cpuinfo
from specgen.system.processes import ChildDiedError, ChildError, ask_child_again

#: The environment variables with the choice of kernels, if no option gives one, and of an
#: instruction set.
VARIABLE, INSTRUCTIONS_VARIABLE = "SPECGEN_KERNELS", "SPECGEN_KERNELS_INSTRUCTIONS"
LIBRARY_NAME = "libspecgen-kernels.so"
#: The platforms that the kernels support, as `sysconfig.get_platform` names them.
PLATFORMS = ("linux-x86_64", "linux-aarch64")

_BUILD = (
    "install specgen again with a C++ compiler; SPECGEN_KERNELS_BUILD=required shows what fails"
)
_LEAVE = "--kernels llama.cpp, or SPECGEN_KERNELS=llama.cpp, does without them"
_DEFECT = "report this as a defect of specgen; --kernels llama.cpp does without its kernels"


# --- the choice -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KernelStatus:
    """Which kernels compute models on the CPU, and why."""

    computes: Literal["specgen", "llama.cpp"]
    #: The instruction set of specgen's kernels (see `Kernels`), if they compute; else empty.
    instructions: str = ""
    #: Why they are not used, as the rest of a sentence, and what to do about it.
    reason: str | None = None
    hint: str | None = None
    #: The library; None if it was not built.
    path: Path | None = None
    #: What their self-test tested; empty if it was not needed or not passed.
    tested: str = ""
    #: Whether the library accepted this machine and this llama.cpp, and then failed its test.
    is_broken: bool = False

    @property
    def label(self) -> str:
        return f"{self.computes} {self.instructions}".strip()


def note_about(status: KernelStatus, wanted: KernelChoice, cache: Path) -> str | None:
    """Return a note if specgen's kernels should compute and do not; that they were not built is
    said once.
    """
    if wanted != "auto" or status.reason is None:
        return None
    note = f"not using specgen's kernels: {status.reason}"
    if status.path is not None:
        return note
    is_new = status.hint is not None and is_first_time(cache / f"kernels-missing-{__version__}")
    return f"{note} (this note is shown once)" if is_new else None


def is_first_time(marker: Path) -> bool:
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def library_path() -> Path | None:
    path = Path(__file__).parents[1] / LIBRARY_NAME
    return path if path.is_file() else None


def wanted_in(environment: Mapping[str, str]) -> KernelChoice:
    """Return the choice of the environment variable. Raise `UsageError` if it is not valid."""
    wanted = environment.get(VARIABLE) or "auto"
    choices: tuple[KernelChoice, ...] = get_args(KernelChoice)
    if wanted not in choices:
        raise UsageError(f"{VARIABLE} is {wanted!r}; set it to one of {', '.join(choices)}")
    return choices[choices.index(wanted)]


def choose_kernels(wanted: KernelChoice, cache: Path) -> KernelStatus:
    """Choose what computes the models that this process loads from now on. ``auto`` takes specgen's
    kernels if they pass their self-test; each model is tried first (`ModelTrials`). `cache` keeps
    verdicts. Raise `UsageError`.
    """
    now = attached()
    if wanted == "llama.cpp":
        status = KernelStatus("llama.cpp", reason="llama.cpp's were asked for", path=library_path())
    elif now is not None and now.path == library_path():  # they were tested then
        status = KernelStatus("specgen", now.instructions, path=now.path)
    else:
        status = examine_kernels(cache)
    if status.computes == "specgen" and status.path is not None:
        path = status.path
        try:
            status = KernelStatus("specgen", attach(path).instructions, path=path)
        except BackendError as error:  # in the child process it worked
            status = KernelStatus("llama.cpp", reason=error.message, hint=_LEAVE, path=path)
        trials = ModelTrials(path, cache, required=wanted == "specgen")
        ask_before_loading(trials.problem_of)
    elif now is not None:
        now.enable(products=False, attention=False)
    if wanted == "specgen" and status.computes != "specgen":
        raise UsageError(f"specgen's kernels cannot be used: {status.reason}", status.hint)
    return status


def examine_kernels(cache: Path, *, anew: bool = False) -> KernelStatus:
    """Return whether specgen's kernels can be used here, without attaching them. `anew` tests them
    again.
    """
    path = library_path()
    if path is None:
        platform = sysconfig.get_platform()
        if platform not in PLATFORMS:
            return KernelStatus("llama.cpp", reason=f"there are none for {platform}")
        return KernelStatus("llama.cpp", reason="they were not built", hint=_BUILD)
    result = self_test_of(path, cache, anew=anew)
    if result.outcome == "passed":
        return KernelStatus("specgen", result.instructions, path=path, tested=result.message)
    reason, hint, is_broken = result.message, result.hint, result.outcome == "failed"
    if is_broken:
        reason, hint = f"their test failed: {reason}", "`specgen doctor` tests them again"
    hint = f"{hint}; {_LEAVE}" if hint else _LEAVE
    return KernelStatus("llama.cpp", reason=reason, hint=hint, path=path, is_broken=is_broken)


# --- verdicts -------------------------------------------------------------------------------------

#: The command of a child process; `specgen.llama.kernels.kernel_trial` has its arguments.
CHILD: Sequence[str] = (sys.executable, "-m", "specgen.llama.kernels.kernel_trial")
#: The file of verdicts in the cache folder.
VERDICTS = "kernels.json"
SELF_TEST_TIMEOUT_S = 60.0
#: The longest that a trial may take: so many seconds, and one more for so many bytes.
_TRIAL_TIMEOUT_S, _BYTES_PER_S = 120.0, 20e6
#: Signals that do not come from the kernels: the system ran out of memory, or a file became
#: shorter.
_NOT_THE_KERNELS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGBUS")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a self-test or a trial shows."""

    #: ``passed``, ``failed``, or ``refused``: the library itself says that it is not for this
    #: machine or llama.cpp.
    outcome: str
    #: What was tested, or what went wrong: for a model as the rest of a sentence ("they died of
    #: SIGSEGV ...").
    message: str = ""
    #: The instruction set of the kernels, if they passed their self-test.
    instructions: str = ""
    #: What to do about a refusal, if the library is for another llama.cpp.
    hint: str = ""


def _parsed(value: Any) -> Verdict | None:
    with contextlib.suppress(TypeError):
        found = Verdict(**value)
        if all(isinstance(each, str) for each in astuple(found)):
            return found
    return None


def self_test_of(library: Path, cache: Path, *, anew: bool = False) -> Verdict:
    """Return the verdict of a library's self-test here: the remembered one if there is one, unless
    `anew`.
    """
    kept = KeptResults(cache / VERDICTS)
    key = digest_of(_circumstances(library))
    known = None if anew else _parsed(kept.read().get(key))
    if known is None:
        known = run_self_test(library)
        kept.add({key: asdict(known)})
    return known


def run_self_test(library: Path) -> Verdict:
    try:
        answer = ask_child_again([*CHILD, os.fspath(library)], SELF_TEST_TIMEOUT_S)
    except ChildError as error:
        last_words = error.last_words if isinstance(error, ChildDiedError) else ""
        return Verdict("failed", _why(error) + (f": {last_words}" if last_words else ""))
    return _parsed(answer) or Verdict("failed", "it gave no answer")


def _why(error: ChildError) -> str:
    is_signal = isinstance(error, ChildDiedError) and error.signal_name
    return f"they died of {is_signal}" if is_signal else str(error)


def _circumstances(library: Path) -> dict[str, str]:
    built = build()
    return {
        "specgen": __version__,
        "library": hashlib.sha256(library.read_bytes()).hexdigest(),
        "llama-cpp-python": built.version,
        "features": built.system_info,
        "ggml": ggml_version(),
        "cpu": processor(),
        "instructions": os.environ.get(INSTRUCTIONS_VARIABLE, ""),
    }


def processor() -> str:
    """Return the name (on ARM, numbers), the microcode and the features of the CPU, as Linux
    reports them.
    """
    names = ("model name", "microcode", "flags")
    arm = ("CPU implementer", "CPU part", "CPU variant", "CPU revision", "Features")
    return "\n".join(cpuinfo().get(name, "") for name in (*names, *arm))


class ModelTrials:
    """Tries kernels on models, and remembers the verdicts. If they are `required`, a failure is an
    error.
    """

    def __init__(self, library: Path, cache: Path, *, required: bool = False) -> None:
        self._library = library
        self._cache = cache
        self._kept = KeptResults(cache / VERDICTS)
        self._required = required
        self._circumstances: dict[str, str] = {}
        self._known: dict[str, Verdict] = {}

    def problem_of(self, file: Path, *, anew: bool = False) -> str:
        """Return why the kernels cannot compute a model; empty if they can. Raise `UsageError` if
        `required`.
        """
        self._circumstances = self._circumstances or _circumstances(self._library)
        version = [str(file.resolve()), *version_of(file)]
        key = digest_of(self._circumstances | {"file": version})
        verdict = None if anew else self._known.get(key) or _parsed(self._kept.read().get(key))
        if verdict is None and (verdict := self._tried(file)) is not None:
            self._kept.add({key: asdict(verdict)})
        if verdict is None:  # what stopped the trials was not the kernels
            return ""
        self._known[key] = verdict
        if verdict.message and self._required:
            raise UsageError(
                f"{file}: specgen's kernels cannot compute this model: {verdict.message}", _DEFECT
            )
        return verdict.message

    def _tried(self, file: Path) -> Verdict | None:
        """Try a skeleton of the model and, unless that is computed, the whole: llama.cpp may not
        take a skeleton.
        """
        found: Verdict | None = None
        with contextlib.ExitStack() as resources:
            folder = self._folder(resources)
            for size in ("skeleton", "whole"):
                if found is None or found.outcome != "passed":
                    found = self._verdict(file, folder, size)
        return found

    def _folder(self, resources: contextlib.ExitStack) -> Path:
        """Make a folder for the files of a trial: in the cache, or in memory if the cache cannot be
        written.
        """
        with contextlib.suppress(OSError):
            self._cache.mkdir(parents=True, exist_ok=True)
            inside = tempfile.TemporaryDirectory(prefix="trial-", dir=self._cache)
            return Path(resources.enter_context(inside))
        return Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="specgen-trial-")))

    def _verdict(self, file: Path, folder: Path, size: str) -> Verdict | None:
        """Return what a child shows; None if llama.cpp cannot load the file, or something else
        stopped the child.
        """
        steps = folder / "steps"
        command = [*CHILD, str(self._library), size, str(file), str(steps)]
        timeout_s = _TRIAL_TIMEOUT_S + file.stat().st_size / _BYTES_PER_S
        try:
            answer = ask_child_again(command, timeout_s, lambda: steps.write_text(""))
        except ChildError as error:
            if isinstance(error, ChildDiedError) and error.signal_name in _NOT_THE_KERNELS:
                return None
            begun = steps.read_text(encoding="utf-8").splitlines()
            return Verdict("failed", f"{_why(error)} on {begun[-1]}" if begun else _why(error))
        return None if answer.get("problem") else Verdict("passed")
