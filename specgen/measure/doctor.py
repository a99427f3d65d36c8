"""The checks of `specgen doctor`: this machine, this build of llama.cpp, and whether it decodes.

An import of llama.cpp proves nothing: a build for another CPU, or one that the compiler miscompiled,
ends the process at the first batch. Every check therefore runs in a child process
(`python -m specgen.measure.doctor --child ...`), which decodes real batches and answers with a line of JSON. If
the child dies, its signal or exit code shows what is wrong.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen import __version__, errors
from specgen.errors import BackendError, ModelFileError, SpecgenError
from specgen.llama.kernels.admission import KernelStatus
from specgen.options import ContextOptions
from specgen.system.json_lines import as_json
from specgen.system.llama_build import REBUILD, REINSTALL, Build, Device
from specgen.system.machine import Machine, look_at_machine
from specgen.system.processes import ChildDiedError, ChildError, ChildTimeoutError, ask_child

if TYPE_CHECKING:
    from specgen.measure.tiny_model import TensorType
    from specgen.system.arrays import Logits

#: The command that starts a child; the name of a task and its arguments follow.
CHILD_COMMAND: Sequence[str] = (sys.executable, "-m", "specgen.measure.doctor", "--child")
#: The quantised types that are decoded: those whose kernels differ most between CPUs.
TENSOR_TYPES: tuple[TensorType, ...] = ("q8_0", "q4_0")
#: The longest wait for a child with a tiny model, and for one with the user's model.
TINY_TIMEOUT_S = 120.0
MODEL_TIMEOUT_S = 1800.0

#: The largest allowed deviation of logits that are computed in two ways: the root mean square of their
#: differences divided by the standard deviation of the logits. Rounded activations cause 0.02, on some
#: models 0.05; a kernel that computes something else causes 1.
TOLERANCE = 0.1

#: The longest that a worker may take to answer, in seconds.
_WORKER_TIMEOUT_S = 5.0

_TEXT = (
    "The quick brown fox jumps over the lazy dog; 0123456789 (and so on).\n"
    "What comes next is for the model to say, one token after the other."
)


# --- the report -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Check:
    """A check and its result."""

    name: str
    passed: bool
    #: The result or the problem, in a line.
    message: str
    #: What to do about the problem.
    hint: str | None = None
    #: The name of the error's class in `specgen.errors`; None if the check passed.
    error: str | None = None


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """Everything that `specgen doctor` finds."""

    version: str
    machine: Machine
    #: None if llama.cpp could not be loaded.
    build: Build | None
    #: Which kernels compute on the CPU, and why.
    kernels: KernelStatus
    cache_folder: Path
    config_folder: Path
    data_folder: Path
    #: The files of the known models that are on this disk, by name.
    models: Mapping[str, Path]
    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        return all(check.passed for check in self.checks)

    def raise_first_error(self) -> None:
        """Raise the error of the first failed check; do nothing if there is none."""
        for check in self.checks:
            if not check.passed:
                raise _error_named(check.error, f"{check.name}: {check.message}", check.hint)

    def to_json_object(self) -> dict[str, Any]:
        """Return the report as a JSON-ready dict."""
        values: dict[str, Any] = {**as_json(self), "healthy": self.healthy}
        if self.build is not None:
            values["build"]["features"] = as_json(self.build.features)
        return values


def diagnose(
    model: Path | None = None,
    endpoints: Sequence[str] = (),
    *,
    child: Sequence[str] | None = None,
    on_check: Callable[[str], None] = lambda _name: None,
) -> DoctorReport:
    """Run all checks: decode with tiny models and with `model`, if given, and ask the workers at `endpoints`.

    `child` is the command that starts a child process (by default `CHILD_COMMAND`). `on_check` receives
    the name of each check before it runs.
    """
    from specgen.models.files import cache_folder, config_folder, data_folder

    checks = _Checks(child or CHILD_COMMAND, on_check)
    checks.run("loading llama.cpp", checks.load)
    if checks.build is not None:
        checks.decode(checks.build, model)
    checks.run("the list of models", checks.find_models)
    if checks.build is not None and endpoints:
        checks.run("llama.cpp's RPC", _load_rpc)
        for endpoint in endpoints:
            checks.run(f"worker {endpoint}", partial(_ask_worker, endpoint))
    return DoctorReport(
        version=__version__,
        machine=look_at_machine(),
        build=checks.build,
        kernels=checks.kernels,
        cache_folder=cache_folder(),
        config_folder=config_folder(),
        data_folder=data_folder(),
        models=checks.models,
        checks=tuple(checks.done),
    )


class _Checks:
    """The checks of one report, in their order, and what they find."""

    def __init__(self, child: Sequence[str], on_check: Callable[[str], None]) -> None:
        self._child = child
        self._on_check = on_check
        self.done: list[Check] = []
        self.build: Build | None = None
        self.kernels = KernelStatus("llama.cpp", reason="llama.cpp could not be loaded")
        self.models: dict[str, Path] = {}

    def run(self, name: str, do: Callable[[], str]) -> Check:
        self._on_check(name)
        self.done.append(checked(name, do))
        return self.done[-1]

    def _ask(self, task: str, *arguments: str) -> str:
        timeout_s = MODEL_TIMEOUT_S if task in ("model", "rows") else TINY_TIMEOUT_S
        return str(run_child([*self._child, task, *arguments], timeout_s)["message"])

    def load(self) -> str:
        answer = run_child([*self._child, "build"], TINY_TIMEOUT_S)
        devices = tuple(Device(**device) for device in answer["devices"])
        self.build = Build(**{**answer, "devices": devices})
        return f"llama-cpp-python {self.build.version}"

    def decode(self, build: Build, model: Path | None) -> None:
        """Decode each tensor type on each kind of device, then the model, and both with specgen's kernels."""
        places = {"CPU": "0"}
        if build.gpu_offload and any("gpu" in device.kind for device in build.devices):
            places["GPU"] = "-1"
        with tempfile.TemporaryDirectory(prefix="specgen-doctor-") as folder:
            for kind in TENSOR_TYPES:
                for place, n_layers in places.items():
                    task = partial(self._ask, "tiny", kind, n_layers, folder)
                    self.run(f"{kind} on the {place}", task)
        if model is not None:
            n_layers = list(places.values())[-1]
            own = self.run(model.name, partial(self._ask, "model", os.fspath(model), n_layers))
            self.done[-1] = replace(own, message=own.message.removeprefix(f"{model}: "))
            if own.error == ModelFileError.__name__:
                model = None  # there is nothing more to check
        self.run("specgen's kernels", self.test_kernels)
        if model is not None and self.kernels.computes == "specgen" and self.kernels.path:
            self.run(f"rows of {model.name}", partial(self._ask, "rows", os.fspath(model)))
            task = partial(_try_kernels, self.kernels.path, model)
            self.run(f"specgen's kernels on {model.name}", task)

    def test_kernels(self) -> str:
        """Test specgen's kernels again, unless the user chose llama.cpp's in the environment."""
        from specgen.llama.kernels import admission
        from specgen.models.files import cache_folder

        if admission.wanted_in(os.environ) == "llama.cpp":
            reason, path = f"{admission.VARIABLE} asks for llama.cpp's", admission.library_path()
            self.kernels = KernelStatus("llama.cpp", reason=reason, path=path)
        else:
            self.kernels = admission.examine_kernels(cache_folder(), anew=True)
        if self.kernels.is_broken:
            raise BackendError(self.kernels.reason or "", self.kernels.hint)
        return self.kernels.tested or f"not used: {self.kernels.reason}"

    def find_models(self) -> str:
        from specgen.models.hub import locate
        from specgen.models.registry import load_registry

        places = {name: locate(model) for name, model in load_registry().models.items()}
        self.models = {name: path for name, path in places.items() if path is not None}
        return f"{len(self.models)} of {len(places)} are on this disk"


def checked(name: str, do: Callable[[], str]) -> Check:
    """Return a check with the message that `do` returns, or with the `SpecgenError` that it raises."""
    try:
        return Check(name, passed=True, message=do())
    except SpecgenError as error:
        return Check(name, False, error.message, error.hint, type(error).__name__)


def _try_kernels(library: Path, model: Path) -> str:
    """Try the kernels on a model again."""
    from specgen.llama.kernels.admission import ModelTrials
    from specgen.models.files import cache_folder

    try:
        problem = ModelTrials(library, cache_folder()).problem_of(model, anew=True)
    except OSError as error:
        problem = f"the file cannot be read: {error.strerror}"
    if problem:
        hint = "llama.cpp's own code computes this model; report this as a defect of specgen"
        raise BackendError(problem, hint)
    return "load it and decode"


def _load_rpc() -> str:
    from specgen.llama.rpc import load_rpc

    load_rpc()
    return "can be loaded"


def _ask_worker(endpoint: str) -> str:
    """Return a line about a worker: its protocol, devices and round trip."""
    from specgen.system.worker_probe import check_protocol, probe

    found = probe(endpoint, _WORKER_TIMEOUT_S, time.perf_counter)
    check_protocol(found)
    devices = ", ".join(
        f"{device.free_bytes / 2**30:.1f} of {device.memory_bytes / 2**30:.1f} GiB free"
        for device in found.devices
    )
    parts = [f"protocol {found.protocol}", devices or "no device"]
    if found.round_trip_s is not None:
        parts.append(f"a round trip takes {found.round_trip_s * 1000:.1f} ms")
    return "; ".join(parts)


# --- the child, seen from the parent ----------------------------------------------------------


def run_child(command: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Run a command and return the JSON object that it prints.

    Raise the `SpecgenError` that the child reports, and `BackendError` if it dies, does not answer in
    time, or answers something else; the hint says what to do.
    """
    try:
        answer = ask_child(command, timeout_s)
    except ChildDiedError as error:
        raise death(error) from None
    except ChildTimeoutError as error:
        raise BackendError(
            str(error),
            hint="try again if the machine is busy; otherwise build llama.cpp again: " + REINSTALL,
        ) from None
    except ChildError as error:
        raise BackendError(str(error)) from error
    if "error" in answer:
        raise _error_named(answer["error"], answer["message"], answer["hint"])
    return answer


def death(child: ChildDiedError) -> BackendError:
    """Return an error that explains the death of a child, with a hint against its cause."""
    name = child.signal_name
    message = (
        f"llama.cpp died of {name}" if name else f"the check ended with code {child.returncode}"
    )
    if child.description:
        message += f" ({child.description.lower()})"
    if child.last_words:
        message += f": {child.last_words}"
    if name == "SIGILL":
        hint = (
            "it was built for another CPU, or by GCC 12, which gets the code for AMX wrong; "
            f"build it again, here: {REBUILD}"
        )
    elif name == "SIGKILL":
        hint = "most likely the memory ran out: free some, or take a smaller model"
    else:
        hint = f"build llama.cpp again: {REINSTALL}"
    return BackendError(message, hint=hint)


def _error_named(name: str | None, message: str, hint: str | None) -> SpecgenError:
    kind = getattr(errors, name or "", BackendError)
    error: SpecgenError = kind(message, hint)
    return error


# --- the checks, in the child ---------------------------------------------------------------


def child_main(arguments: Sequence[str]) -> None:
    """Carry out a task and print its result as JSON."""
    task, *rest = arguments
    tasks: dict[str, Callable[..., dict[str, Any]]] = {
        "build": _load,
        "tiny": _decode_tiny,
        "model": _decode_model,
        "rows": _compare_rows,
    }
    try:
        answer = tasks[task](*rest)
    except SpecgenError as error:
        answer = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    sys.stdout.write(json.dumps(answer) + "\n")


def _load() -> dict[str, Any]:
    from specgen import llama

    return dataclasses.asdict(llama.build())


def _decode_tiny(tensor_type: TensorType, n_gpu_layers: str, folder: str) -> dict[str, Any]:
    """Decode with a tiny model whose matrices are large enough for every kernel, and with one that has the same
    weights in f32, which other kernels compute."""
    from specgen.measure.tiny_model import write_tiny_model

    path, exact = (Path(folder) / f"{tensor_type}{name}.gguf" for name in ("", "-exact"))
    write_tiny_model(path, tensor_type)
    write_tiny_model(exact, "f32", rounded_to=tensor_type)
    # One thread: on a busy machine several threads wait for each other, which takes far longer.
    options = ContextOptions(n_gpu_layers=int(n_gpu_layers), n_threads=1)
    return _decoded(path, options, exact)


def _decode_model(model: str, n_gpu_layers: str) -> dict[str, Any]:
    return _decoded(Path(model), ContextOptions(n_gpu_layers=int(n_gpu_layers)))


def _decoded(path: Path, options: ContextOptions, exact: Path | None = None) -> dict[str, Any]:
    """Compare the logits of a batch with those of single tokens, and with those of another file."""
    together, one_by_one = _decode_both_ways(path, options)
    deviations = {"single tokens": deviation(together, one_by_one)}
    if exact is not None:
        reference, _ = _decode_both_ways(exact, options)
        deviations["the same weights in f32"] = deviation(together, reference)
    return checked_agreement(len(together), deviations)


def _compare_rows(model: str) -> dict[str, Any]:
    """Report whether a model is batch-invariant with specgen's kernels, or why not."""
    import numpy as np

    from specgen.llama import LlamaModel
    from specgen.llama.kernels.admission import choose_kernels
    from specgen.models.files import cache_folder

    choose_kernels("specgen", cache_folder())
    opened = LlamaModel(Path(model), n_gpu_layers=0)
    why = opened.row_exception
    opened.close()
    if not why:
        together, one_by_one = _decode_both_ways(Path(model), ContextOptions(n_gpu_layers=0))
        why = "" if np.array_equal(together, one_by_one) else "the reason is not known"
    if why:
        return {"message": f"they depend on their batch: {why}"}
    return {"message": "they are the same in any batch, with specgen's kernels"}


def _decode_both_ways(path: Path, options: ContextOptions) -> tuple[Logits, Logits]:
    """Return the logits of a text, float32[n_tokens, n_vocab], decoded in one batch and token by token."""
    import numpy as np

    from specgen.drafters.kinds import refuse_draft
    from specgen.llama import LlamaBackend, LlamaModel
    from specgen.method.backend import Batch

    refuse_draft(path)
    n_tokens = 24
    model = LlamaModel(path, n_gpu_layers=options.n_gpu_layers)
    backend = LlamaBackend(model, options, n_ctx=256, clock=time.perf_counter, n_outputs=n_tokens)
    tokens = model.vocabulary.tokenize(_TEXT, add_special=True, parse_special=False)[:n_tokens]

    def decode(start: int, end: int) -> Logits:
        batch = Batch()
        for position in range(start, end):
            batch.add(tokens[position], position, (0,), True)
        return backend.decode(batch).copy()

    together = decode(0, len(tokens))
    backend.remove(0)
    one_by_one = np.concatenate([decode(at, at + 1) for at in range(len(tokens))])
    backend.close()
    model.close()
    return together, one_by_one


def deviation(logits: Logits, others: Logits) -> float:
    """Return the deviation of two tables of logits; see `TOLERANCE`. Infinite if a logit is not finite."""
    import numpy as np

    if not (np.isfinite(logits).all() and np.isfinite(others).all()):
        return float("inf")
    return float(np.sqrt(np.mean((logits - others) ** 2)) / max(float(np.std(others)), 1e-12))


def checked_agreement(n_tokens: int, deviations: Mapping[str, float]) -> dict[str, Any]:
    """Return the message of a passed check. Raise `BackendError` if a deviation exceeds `TOLERANCE`."""
    for other, found in deviations.items():
        if not found <= TOLERANCE:
            raise BackendError(
                f"the logits of {n_tokens} tokens in a batch differ from those of {other} by "
                f"{found:.0%} of their spread",
                hint=f"this build computes wrong results; build llama.cpp again: {REBUILD}",
            )
    apart = ", ".join(f"by {found:.1%} from {other}" for other, found in deviations.items())
    return {"message": f"decodes (a batch of {n_tokens} tokens differs {apart})"}


if __name__ == "__main__":
    child_main(sys.argv[sys.argv.index("--child") + 1 :])
