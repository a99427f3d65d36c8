"""Whether specgen's kernels work: a self-test for a machine, a trial for each model.

Both run in a child process (`kernel_trial.py`), since a defect may end the process. Their verdicts
are kept until the library, llama.cpp, the processor or the model's file changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from specgen import __version__
from specgen.errors import OutputError
from specgen.llama.kernels.attached import ggml_version
from specgen.llama.library import build
from specgen.models.files import parts_of, size_of
from specgen.system.files import KeptResults, digest_of, scratch_folder, version_of
from specgen.system.machine import cpuinfo
from specgen.system.processes import (
    ChildDiedError,
    ChildError,
    ChildStartError,
    ask_child_again,
)

#: The environment variable that chooses an instruction set for the kernels.
INSTRUCTIONS_VARIABLE = "SPECGEN_KERNELS_INSTRUCTIONS"
#: The file of verdicts in the cache folder.
VERDICTS = "kernels.json"

#: The command of a child process; `kernel_trial.py` describes its arguments.
CHILD: Sequence[str] = (sys.executable, "-m", "specgen.llama.kernels.kernel_trial")
SELF_TEST_TIMEOUT_S = 60.0
#: The time limit of a trial, to which the time to read the files at `_BYTES_PER_S` is added.
_TRIAL_TIMEOUT_S = 120.0
_BYTES_PER_S = 20e6
#: Signals that say nothing about the kernels: the system ran out of memory, the user ended the
#: process, or a file became shorter.
_UNRELATED_SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGBUS")


@dataclass(frozen=True, slots=True)
class KernelVerdict:
    """The result of a self-test or a trial."""

    #: ``passed``, ``failed``, or ``refused`` (the library does not support this machine or
    #: llama.cpp).
    outcome: str
    #: What was tested, or what went wrong. For a model, it is a clause about the kernels: "they
    #: died of SIGSEGV on decoding a row".
    message: str = ""
    #: The instruction set of the kernels, if they passed their self-test.
    instructions: str = ""
    #: What to do about a refusal, if the library is for another llama.cpp.
    hint: str = ""


class KernelTests:
    """Tests a library of kernels, and remembers the verdicts.

    Args:
        library: The library.
        cache: The folder that keeps the verdicts; it need not exist, or be writable.
        command: The command of the child process.
    """

    def __init__(
        self,
        library: Path,
        cache: Path,
        command: Sequence[str] = CHILD,
    ) -> None:
        self.library = library
        self._cache = cache
        self._command = command
        self._kept = KeptResults(cache / VERDICTS)
        #: The verdicts that this object has seen, also if they cannot be kept.
        self._known: dict[str, KernelVerdict] = {}

    # --- the machine

    def self_test(self, *, rerun: bool = False) -> KernelVerdict:
        """Return the verdict of the library's self-test on this machine.

        Args:
            rerun: Whether to run it even if the verdict is known.
        """
        key = digest_of(self._circumstances)
        verdict = None if rerun else self._remembered(key)
        if verdict is None:
            try:
                verdict = self._run_self_test()
            except ChildError as error:
                verdict = KernelVerdict("failed", _reason_with_last_line(error))
                if not _concerns_kernels(error):
                    return verdict  # for now: the next process tests them again
            self._remember(key, verdict)
        return verdict

    def _run_self_test(self) -> KernelVerdict:
        """Run the self-test in a child process.

        Raises:
            ChildError: If the child gave no answer.
        """
        answer = ask_child_again([*self._command, os.fspath(self.library)], SELF_TEST_TIMEOUT_S)
        return _parse_verdict(answer) or KernelVerdict("failed", "it gave no answer")

    # --- a model

    def problem_of(self, model: Path, *, rerun: bool = False) -> str:
        """Return why the kernels cannot compute a model; empty if they can.

        Args:
            model: The model's first file.
            rerun: Whether to try it even if the verdict is known.
        """
        # A part that is missing is reported when the model is loaded.
        parts = [part for part in parts_of(model) if part.is_file()]
        versions = [(str(part.resolve()), *version_of(part)) for part in parts]
        key = digest_of({**self._circumstances, "files": versions})
        verdict = None if rerun else self._remembered(key)
        if verdict is None:
            verdict = self._try_model(model)
            if verdict is None:  # something else stopped the trial
                return ""
            self._remember(key, verdict)
        return verdict.message

    def _try_model(self, model: Path) -> KernelVerdict | None:
        """Try a skeleton of the model, which is fast, and the model itself unless that passes.

        Returns:
            The verdict; None if the trial shows nothing about the kernels.
        """
        try:
            scratch = self._scratch_folder()
        except OutputError:
            return None
        with scratch as name:
            folder = Path(name)
            verdict = self._run_trial(model, "skeleton", folder)
            if verdict is None or verdict.outcome != "passed":
                # It may be llama.cpp that cannot load or compute the skeleton.
                verdict = self._run_trial(model, "whole", folder)
            return verdict

    def _scratch_folder(self) -> tempfile.TemporaryDirectory[str]:
        """Make a folder for the files of a trial, in the cache if it can be written.

        Raises:
            OutputError: If no folder can be written.
        """
        with contextlib.suppress(OSError):
            self._cache.mkdir(parents=True, exist_ok=True)
            return tempfile.TemporaryDirectory(prefix="trial-", dir=self._cache)
        return scratch_folder("specgen-trial-")

    def _run_trial(
        self,
        model: Path,
        size: Literal["skeleton", "whole"],
        folder: Path,
    ) -> KernelVerdict | None:
        """Decode with the kernels in a child process.

        Args:
            model: The model's file.
            size: ``whole``, or ``skeleton`` to try a skeleton of the model (see `skeleton.py`).
            folder: Where the child may write files.

        Returns:
            ``passed`` if the child ends normally, ``failed`` if it crashes or takes too long. None
            if the trial shows nothing about the kernels: llama.cpp cannot load the file, or the
            child was killed or could not be started.
        """
        # The child adds a line to this file before each step. If it crashes, the last line tells
        # where.
        steps_file = folder / "steps"
        command = [*self._command, str(self.library), size, str(model), str(steps_file)]
        timeout_s = _TRIAL_TIMEOUT_S + sum(map(size_of, parts_of(model))) / _BYTES_PER_S
        try:
            answer = ask_child_again(command, timeout_s, prepare=lambda: steps_file.write_text(""))
        except ChildError as error:
            if not _concerns_kernels(error):
                return None
            reason = _reason(error)
            steps = steps_file.read_text(encoding="utf-8").splitlines()
            if steps:
                reason += f" on {steps[-1]}"
            return KernelVerdict("failed", reason)
        if answer.get("problem"):  # llama.cpp could not load the file
            return None
        return KernelVerdict("passed")

    # --- what is remembered

    @cached_property
    def _circumstances(self) -> dict[str, str]:
        """What a verdict depends on, apart from the model."""
        llama_build = build()
        return {
            "specgen": __version__,
            "library": hashlib.sha256(self.library.read_bytes()).hexdigest(),
            "llama-cpp-python": llama_build.version,
            "features": llama_build.system_info,
            "ggml": ggml_version(),
            "cpu": processor(),
            "instructions": os.environ.get(INSTRUCTIONS_VARIABLE, ""),
        }

    def _remembered(self, key: str) -> KernelVerdict | None:
        """Return the verdict with a key, from this object or the cache; None if it is unknown."""
        return self._known.get(key) or _parse_verdict(self._kept.read().get(key))

    def _remember(self, key: str, verdict: KernelVerdict) -> None:
        self._known[key] = verdict
        self._kept.add({key: asdict(verdict)})


def processor() -> str:
    """Return the CPU's name (on ARM, numbers), microcode and features, as Linux reports them."""
    x86 = ("model name", "microcode", "flags")
    arm = ("CPU implementer", "CPU part", "CPU variant", "CPU revision", "Features")
    values = cpuinfo()
    return "\n".join(values.get(name, "") for name in (*x86, *arm))


def _parse_verdict(value: Any) -> KernelVerdict | None:
    """Return a verdict that was kept or printed; None if the value is damaged."""
    try:
        verdict = KernelVerdict(**value)
    except TypeError:
        return None
    is_text = all(isinstance(field, str) for field in astuple(verdict))
    return verdict if is_text else None


def _concerns_kernels(error: ChildError) -> bool:
    """Return whether the kernels may be why a child gave no answer."""
    if isinstance(error, ChildDiedError):
        return error.signal_name not in _UNRELATED_SIGNALS
    return not isinstance(error, ChildStartError)


def _reason_with_last_line(error: ChildError) -> str:
    """Return why a child gave no answer, with the last line that it wrote to stderr."""
    reason = _reason(error)
    if isinstance(error, ChildDiedError) and error.last_stderr_line:
        reason += f": {error.last_stderr_line}"
    return reason


def _reason(error: ChildError) -> str:
    """Return why a child gave no answer, as a clause about the kernels if a signal ended it."""
    if isinstance(error, ChildDiedError) and error.signal_name:
        return f"they died of {error.signal_name}"
    return str(error)
