"""Find out whether the kernels can compute a model, before this process loads it.

Kernels that are wrong for a model may end the process: when the model is loaded, when a context is made, or when a
batch is decoded. So they are tried first in a child process (`specgen.llama.kernel_checks.model_trial`), on a skeleton of the
model, which loads in a moment (`specgen.llama.kernel_trial`). The result is remembered for the file, and for all
models that differ from it in weights and vocabulary only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from specgen.errors import BackendError, UsageError
from specgen.llama.kernel_checks.test_results import circumstances, key_of
from specgen.system.atomic_files import KeptResults
from specgen.system.child_process import ChildDiedError, ChildError, ask_child_again

if TYPE_CHECKING:
    from specgen.llama.kernel_trial import Skeleton
    from specgen.llama.kernels import KernelSupport

#: How a trial ends: it is done, llama.cpp cannot load the file, its process died or hung, or the process was stopped
#: by something else.
_End: TypeAlias = Literal["done", "refused", "died", "stopped"]
#: The command that starts a child; its arguments are those of `specgen.llama.kernel_checks.model_trial`.
TRIAL_COMMAND = (sys.executable, "-m", "specgen.llama.kernel_checks.model_trial")
#: The file of results in the cache folder.
FILE_NAME = "kernel_trials.json"
#: The longest that a trial may take: so many seconds, and one more for so many bytes.
_TIMEOUT_S, _BYTES_PER_S = 120.0, 20e6
#: The most results in the file; the latest ones are kept.
_N_KEPT = 512
#: A trial that gets beyond so many steps has loaded the model and decoded.
_N_STEPS_ENOUGH = 4
#: Signals that do not come from the kernels: the system ran out of memory, or a file became shorter.
_NO_VERDICT = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGBUS")

#: What to do if the kernels cannot compute a model.
HINT = "report this as a defect of specgen; --kernels llama.cpp does without its kernels"


class ModelTrials:
    """Tries the kernels of `library` on models, and keeps the results in the folder `cache`.

    With `required`, a model that they cannot compute is an error. If the cache cannot be written, each process
    tries the kernels again. `child` is the command that tries them.
    """

    def __init__(
        self,
        library: Path,
        cache: Path,
        *,
        required: bool = False,
        child: Sequence[str] = TRIAL_COMMAND,
    ) -> None:
        self._library = library
        self._cache = cache
        self._kept = KeptResults(cache / FILE_NAME, _N_KEPT)
        self._required = required
        self._child = child
        self._about: dict[str, str] = {}
        #: The results in this process, by key.
        self._known: dict[str, KernelSupport] = {}

    def support_for(self, file: Path) -> KernelSupport:
        """Return which of the kernels can compute a model. They are tried if no result is remembered. Raise
        `UsageError` if they are required and cannot, `BackendError` if llama.cpp's code can compute the
        model only in a process without them."""
        support = self._find(file)
        if support.problem and self._required:
            raise UsageError(
                f"{file}: specgen's kernels cannot compute this model: {support.problem}", HINT
            )
        if not support.usable:
            raise BackendError(
                f"{file}: specgen's kernels stop llama.cpp from computing this model: "
                f"{support.problem}",
                HINT,
            )
        return support

    def try_anew(self, file: Path) -> str:
        """Try the kernels on a model, and remember the result. Return why they cannot compute it; empty if
        they can."""
        return self._find(file, anew=True).problem

    def _find(self, file: Path, *, anew: bool = False) -> KernelSupport:
        """Return the remembered result for a file, unless `anew`, else that of a trial."""
        from specgen.llama.kernel_trial import skeleton_of
        from specgen.llama.kernels import KernelSupport

        about = file.stat()
        version = f"\0{about.st_ino} {about.st_size} {about.st_mtime_ns}"
        own_key = self._key(os.fsencode(file.resolve()) + version.encode())
        known = None if anew else self._remembered(own_key)
        if known is not None:
            return known
        skeleton = skeleton_of(file)
        keys = [own_key] if skeleton is None else [own_key, self._key(skeleton.metadata)]
        known = None if anew else self._remembered(keys[-1])
        if known is None:
            known = self._first_result(file, skeleton)
            if known is None:  # what stopped the trials was not the kernels
                return KernelSupport()
        self._remember(keys, known)
        return known

    def _first_result(self, file: Path, skeleton: Skeleton | None) -> KernelSupport | None:
        """Try the kernels on the skeleton, and on the file itself if llama.cpp cannot load the skeleton. Return
        None if neither gives a result."""
        with contextlib.ExitStack() as resources:
            folder = self._folder(resources)
            if skeleton is not None:
                with contextlib.suppress(OSError):  # the disk is full
                    written = folder / "skeleton.gguf"
                    skeleton.write(written)
                    tried = self._try(written, folder, is_skeleton=True)
                    if tried is not None:
                        return tried
            return self._try(file, folder, is_skeleton=False)

    def _folder(self, resources: contextlib.ExitStack) -> Path:
        """Make a folder for the files of a trial: in the cache, or in memory if the cache cannot be written."""
        with contextlib.suppress(OSError):
            self._cache.mkdir(parents=True, exist_ok=True)
            inside = tempfile.TemporaryDirectory(prefix="trial-", dir=self._cache)
            return Path(resources.enter_context(inside))
        return Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="specgen-trial-")))

    def _try(self, file: Path, folder: Path, *, is_skeleton: bool) -> KernelSupport | None:
        """Return which of the kernels can compute a file; None if that does not show."""
        from specgen.llama.kernels import KernelSupport

        whole = self._run(file, folder)
        if whole.end == "done":
            return KernelSupport()
        if whole.end != "died":
            return None
        plain = self._run(file, folder, attach=False)
        if plain.end == "stopped":
            return None
        if plain.end == "died" and plain.n_steps <= whole.n_steps:
            # llama.cpp dies, too: the kernels can compute what it can.
            is_enough = plain.n_steps > _N_STEPS_ENOUGH or not is_skeleton
            return KernelSupport() if is_enough else None
        for attention in (True, False):
            part = self._run(file, folder, products=False, attention=attention)
            if part.end == "done" or part.n_steps >= plain.n_steps:
                return KernelSupport(products=False, attention=attention, problem=whole.problem)
        return KernelSupport(products=False, attention=False, problem=whole.problem, usable=False)

    def _run(
        self,
        file: Path,
        folder: Path,
        *,
        attach: bool = True,
        products: bool = True,
        attention: bool = True,
    ) -> _Run:
        """Run a trial in a child process."""
        steps = folder / "steps"
        library = os.fspath(self._library) if attach else ""
        switches = [str(int(switch)) for switch in (products, attention)]
        command = [*self._child, library, os.fspath(file), os.fspath(steps), *switches]
        timeout_s = _TIMEOUT_S + file.stat().st_size / _BYTES_PER_S
        end: _End = "died"
        try:
            answer = ask_child_again(command, timeout_s, lambda: steps.write_text(""))
            problem = str(answer.get("problem", ""))
            end = "refused" if problem else "done"
        except ChildDiedError as error:
            problem = f"they died of {error.signal_name}" if error.signal_name else str(error)
            if error.signal_name in _NO_VERDICT:
                end = "stopped"
        except ChildError as error:
            problem = str(error)
        begun = steps.read_text(encoding="utf-8").splitlines()
        if begun and end == "died":
            problem += f" on {begun[-1]}"
        return _Run(end, len(begun), problem)

    # --- what is remembered -----------------------------------------------------------------

    def _key(self, make: bytes) -> str:
        """Return the key of the result for something of this make."""
        if not self._about:
            self._about = circumstances(self._library)
        return key_of({**self._about, "make": hashlib.sha256(make).hexdigest()})

    def _remembered(self, key: str) -> KernelSupport | None:
        if key not in self._known:
            found = _parse(self._kept.read().get(key))
            if found is None:
                return None
            self._known[key] = found
        return self._known[key]

    def _remember(self, keys: Sequence[str], support: KernelSupport) -> None:
        self._known.update(dict.fromkeys(keys, support))
        self._kept.add(dict.fromkeys(keys, asdict(support)))


@dataclass(frozen=True, slots=True)
class _Run:
    """How a trial ended, in which step, and why."""

    end: _End
    n_steps: int
    problem: str


def _parse(value: Any) -> KernelSupport | None:
    """Return the result in a JSON value; None if it is not valid."""
    from specgen.llama.kernels import KernelSupport

    if not isinstance(value, dict) or set(value) != {"products", "attention", "problem", "usable"}:
        return None
    *switches, problem = (value[name] for name in ("products", "attention", "usable", "problem"))
    if not isinstance(problem, str) or not all(isinstance(switch, bool) for switch in switches):
        return None
    return KernelSupport(**value)
