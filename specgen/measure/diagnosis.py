"""The checks of `specgen doctor`: this machine, this build of llama.cpp, and whether it decodes.

A build for another CPU, or a miscompiled one, ends the process at the first batch. So a child
process (`python -m specgen.measure.diagnosis TASK ...`) decodes, and prints a line of JSON. If it
dies, its signal or exit code shows why.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen import __version__, errors
from specgen.errors import BackendError, SpecgenError
from specgen.llama.kernels.admission import KernelStatus
from specgen.options import ContextOptions
from specgen.system.files import as_json
from specgen.system.llama_build import REBUILD, REINSTALL, REQUIRED_VERSION, Build, Device
from specgen.system.machine import Machine, look_at_machine
from specgen.system.processes import ChildDiedError, ChildError, ask_child
from specgen.system.quantities import human_bytes

if TYPE_CHECKING:
    from gguf import GGUFWriter

    from specgen.system.arrays import Logits

#: The command that starts a child; the name of a task and its arguments follow.
CHILD_COMMAND: Sequence[str] = (sys.executable, "-m", "specgen.measure.diagnosis")
#: The longest waits, in seconds: for a child with a tiny model, one with the user's model, and a
#: worker.
_TINY_TIMEOUT_S = 120.0
_MODEL_TIMEOUT_S = 1800.0
_WORKER_TIMEOUT_S = 5.0
#: The largest relative difference of logits that were computed in two ways. Rounding causes 0.02 to
#: 0.05, errors 1.
_TOLERANCE = 0.1
_TEXT = "The quick brown fox jumps over the lazy dog; 0123456789 (and so on). What comes next?"
_N_TOKENS = 24


# --- the report


@dataclass(frozen=True, slots=True)
class Check:
    """The result of a check."""

    name: str
    passed: bool
    #: What was found, or the problem.
    message: str
    #: What to do about the problem.
    hint: str | None = None
    #: The name of the error's class in `specgen.errors`.
    error: str | None = None


@dataclass(slots=True)
class DoctorReport:
    """Everything that `specgen doctor` finds."""

    machine: Machine = field(default_factory=look_at_machine)
    version: str = __version__
    #: None if llama.cpp could not be loaded.
    build: Build | None = None
    kernels: KernelStatus = field(
        default_factory=lambda: KernelStatus("llama.cpp", reason="llama.cpp could not be loaded")
    )
    checks: list[Check] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether all checks passed."""
        return all(check.passed for check in self.checks)

    def raise_first_error(self) -> None:
        """Raise the error of the first check that failed."""
        for check in self.checks:
            if not check.passed:
                raise _error_named(check.error, f"{check.name}: {check.message}", check.hint)

    def to_json_object(self) -> dict[str, Any]:
        """Return the report as `--json` prints it."""
        return {**as_json(self), "healthy": self.healthy}


def diagnose(
    model: Path | None = None,
    endpoints: Sequence[str] = (),
    on_check: Callable[[str], None] = lambda _name: None,
) -> DoctorReport:
    """Run all checks.

    Args:
        model: a model of the user to decode with.
        endpoints: the workers to ask.
        on_check: receives the name of each check before it is run.
    """
    report = DoctorReport()

    def run(name: str, check: Callable[[], str]) -> None:
        on_check(name)
        try:
            result = Check(name, passed=True, message=check())
        except SpecgenError as error:
            kind = type(error).__name__
            result = Check(name, False, error.message, error.hint, kind)
        report.checks.append(result)

    run("loading llama.cpp", partial(_load, report))
    if report.build is None:
        return report
    places = places_of(report.build)
    for place in places:
        run(f"decoding on the {place}", partial(_decode_in_child, place))
    run("specgen's kernels", partial(_test_kernels, report))
    if model is not None:
        fastest = places[0] if places else "CPU"
        run(model.name, partial(_decode_in_child, fastest, model))
    for endpoint in endpoints:
        run(f"worker {endpoint}", partial(_ask_worker, endpoint))
    return report


def places_of(build: Build) -> list[str]:
    """Return where a build can decode, the fastest place first."""
    return ["GPU", "CPU"] if build.gpu_offload else ["CPU"]


# --- the checks. They return what was found, or raise an error


def _load(report: DoctorReport) -> str:
    answer = run_child(["build"], _TINY_TIMEOUT_S)
    devices = tuple(Device(**device) for device in answer["devices"])
    report.build = Build(**{**answer, "devices": devices})
    version = f"llama-cpp-python {report.build.version}"
    # Wheels that others build may have a suffix: 0.3.36+cu124.
    if report.build.version.partition("+")[0] == REQUIRED_VERSION:
        return version
    return f"{version}: specgen is made for {REQUIRED_VERSION}; {REBUILD}"


def _decode_in_child(place: str, model: Path | None = None) -> str:
    task = ["decode", place]
    timeout_s = _TINY_TIMEOUT_S
    if model is not None:
        task.append(os.fspath(model))
        timeout_s = _MODEL_TIMEOUT_S
    return str(run_child(task, timeout_s)["message"])


def _test_kernels(report: DoctorReport) -> str:
    from specgen.llama.kernels import admission
    from specgen.system.folders import cache_folder

    if admission.wanted_in(os.environ) == "llama.cpp":
        reason = f"{admission.VARIABLE} asks for llama.cpp's"
        path = admission.library_path()
        report.kernels = KernelStatus("llama.cpp", reason=reason, path=path)
    else:
        report.kernels = admission.examine_kernels(cache_folder(), rerun=True)
    if report.kernels.is_broken:
        raise BackendError(report.kernels.reason or "", report.kernels.hint)
    return report.kernels.tested or f"not used: {report.kernels.reason}"


def _ask_worker(endpoint: str) -> str:
    from specgen.llama.rpc import load_rpc
    from specgen.system.worker_probe import check_protocol, probe

    load_rpc()
    found = probe(endpoint, _WORKER_TIMEOUT_S)
    check_protocol(found)
    devices = ", ".join(
        f"{human_bytes(free)} of {human_bytes(whole)} free" for free, whole in found.devices
    )
    trip = f"a round trip takes {found.round_trip_s * 1000:.1f} ms"
    return f"protocol {found.protocol}; {devices or 'no device'}; {trip}"


# --- the child, seen from the parent


def run_child(task: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Return a child's answer to a task.

    Raises:
        BackendError: the child died, or did not answer in time.
        SpecgenError: an error of the child.
    """
    try:
        answer = ask_child([*CHILD_COMMAND, *task], timeout_s)
    except ChildError as error:
        raise explained(error) from error
    if "error" in answer:
        raise _error_named(answer["error"], answer["message"], answer["hint"])
    return answer


def explained(error: ChildError) -> BackendError:
    """Return the end of a child as an error, with what to do about it."""
    message = str(error)
    hint = f"build llama.cpp again: {REINSTALL}"
    if isinstance(error, ChildDiedError):
        signal = error.signal_name
        if signal:
            message = f"llama.cpp died of {signal} ({error.description.lower()})"
        if error.last_words:
            message += f": {error.last_words}"
        hint = _SIGNAL_HINTS.get(signal, hint)
    return BackendError(message, hint)


_SIGNAL_HINTS = {
    "SIGILL": (
        "it was built for another CPU, or by GCC 12, which miscompiles the code for AMX; build it "
        f"again on this machine: {REBUILD}"
    ),
    "SIGKILL": "it probably ran out of memory: free some, or use a smaller model",
}


def _error_named(name: str | None, message: str, hint: str | None) -> SpecgenError:
    error: SpecgenError = getattr(errors, name or "", BackendError)(message, hint)
    return error


# --- the checks, in the child


def child_main(arguments: Sequence[str]) -> None:
    """Do a task (`build`, or `decode` with a place and perhaps a file), and print the answer."""
    task, *place_and_file = arguments
    try:
        if task == "build":
            from specgen import llama

            answer = dataclasses.asdict(llama.build())
        else:
            answer = {"message": decode_both_ways(*place_and_file)}
    except SpecgenError as error:
        message = error.message.removeprefix(f"{arguments[-1]}: ")
        answer = {"error": type(error).__name__, "message": message, "hint": error.hint}
    sys.stdout.write(json.dumps(answer) + "\n")


def decode_both_ways(place: str, file: str | None = None) -> str:
    """Compare the logits of a batch with those of single tokens.

    Args:
        place: where to decode, "CPU" or "GPU".
        file: the user's model; without it a tiny one is used.

    Returns:
        The result in words.

    Raises:
        SpecgenError: the logits are wrong, or the model cannot be used.
    """
    import numpy as np

    options = ContextOptions(n_gpu_layers=-1 if place == "GPU" else 0)
    if file is None:
        with tempfile.TemporaryDirectory(prefix="specgen-doctor-") as folder:
            tiny = Path(folder) / "tiny.gguf"
            write_tiny_model(tiny)
            # On a busy machine several threads wait for each other, which takes far longer.
            together, one_by_one, _ = _decode(tiny, replace(options, n_threads=1))
        return compared(together, one_by_one)
    path = Path(file)
    problem = _kernel_problem(path)
    together, one_by_one, exception = _decode(path, options)
    if problem:
        hint = "llama.cpp's own code computes this model; report this as a defect of specgen"
        raise BackendError(f"specgen's kernels: {problem}", hint)
    message = compared(together, one_by_one)
    if not exception and np.array_equal(together, one_by_one):
        return f"{message}: rows are the same in any batch"
    because = f", because {exception}" if exception else ""
    return f"{message}: rows depend on their batch{because}"


def _kernel_problem(path: Path) -> str:
    """Return what is wrong with specgen's kernels for a model; empty if nothing is."""
    from specgen.llama.kernels.admission import choose_kernels, wanted_in
    from specgen.llama.kernels.verdicts import KernelTests
    from specgen.system.folders import cache_folder

    kernels = choose_kernels(wanted_in(os.environ), cache_folder())
    if kernels.computes != "specgen" or kernels.path is None or not path.is_file():
        return ""
    return KernelTests(kernels.path, cache_folder()).problem_of(path, rerun=True)


def _decode(path: Path, options: ContextOptions) -> tuple[Logits, Logits, str]:
    """Decode a text in one batch, and token by token.

    Returns:
        float32[n_tokens, n_vocab] of each way, and why rows must differ (empty if they need not).
    """
    import numpy as np

    from specgen.drafters.kinds import refuse_draft
    from specgen.llama import LlamaBackend, LlamaModel
    from specgen.method.backend import Batch

    refuse_draft(path)
    model = LlamaModel(path, n_gpu_layers=options.n_gpu_layers)
    backend = LlamaBackend(model, options, n_ctx=256, clock=time.perf_counter, n_outputs=_N_TOKENS)
    tokens = model.vocabulary.tokenize(_TEXT, add_special=True, parse_special=False)[:_N_TOKENS]

    def rows(start: int, end: int) -> Logits:
        return backend.decode(Batch.of(tokens[start:end], start, end - start)).copy()

    together = rows(0, len(tokens))
    backend.remove(0)
    one_by_one = np.concatenate([rows(start, start + 1) for start in range(len(tokens))])
    exception = model.row_exception
    backend.close()
    model.close()
    return together, one_by_one, exception


def compared(together: Logits, one_by_one: Logits) -> str:
    """Return in words how far apart two tables of logits are.

    Raises:
        BackendError: they are further apart than rounding explains.
    """
    import numpy as np

    spread = max(float(np.std(one_by_one)), 1e-12)
    difference = float(np.sqrt(np.mean((together - one_by_one) ** 2)) / spread)
    logits = f"logits of {len(together)} tokens in a batch"
    if not difference <= _TOLERANCE:  # also if it is not a number
        raise BackendError(
            f"the {logits} differ from those of single tokens by {difference:.0%} of their spread",
            hint=f"this build computes wrong results; build llama.cpp again: {REBUILD}",
        )
    return f"{logits} differ by {difference:.1%} from those of single tokens"


# --- a tiny model

_N_EMBD = 256
_N_HEAD = 4
_N_FF = 512
_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
#: Unknown, control, bytes and normal, in llama.cpp's numbers.
_TOKEN_TYPES = [2, 3, 3, *[6] * 256, 1]


def write_tiny_model(path: Path) -> None:
    """Write a random Llama of bytes that is large enough for every kernel."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_quantization_version(2)
    sizes = {
        "vocab_size": len(_TOKENS),
        "context_length": 4096,
        "embedding_length": _N_EMBD,
        "block_count": 2,
        "feed_forward_length": _N_FF,
        "attention.head_count": _N_HEAD,
        "rope.dimension_count": _N_EMBD // _N_HEAD,
    }
    for name, size in sizes.items():
        writer.add_uint32(f"llama.{name}", size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(_TOKENS)
    writer.add_token_types(_TOKEN_TYPES)
    writer.add_token_scores([0.0] * len(_TOKENS))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    _add_weights(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_weights(writer: GGUFWriter) -> None:
    """Add random weights, in the two types whose kernels differ most between CPUs."""
    import numpy as np
    from gguf import GGMLQuantizationType, quants

    rng = np.random.default_rng(1)

    def add(name: str, n_out: int, n_in: int, scale: float = 1.0, kind: str = "Q8_0") -> None:
        weights = rng.standard_normal((n_out, n_in), np.float32) * np.float32(scale)
        stored = GGMLQuantizationType[kind]
        writer.add_tensor(f"{name}.weight", quants.quantize(weights, stored), raw_dtype=stored)

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(_N_EMBD, np.float32))

    unit = 1.0 / math.sqrt(_N_EMBD)
    add("token_embd", len(_TOKENS), _N_EMBD)
    add("output", len(_TOKENS), _N_EMBD, 3.0 * unit)
    add_norm("output_norm")
    for layer, kind in enumerate(("Q8_0", "Q4_0")):
        block = f"blk.{layer}"
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"{block}.{name}", _N_EMBD, _N_EMBD, 1.4 * unit, kind)
        add(f"{block}.ffn_gate", _N_FF, _N_EMBD, unit, kind)
        add(f"{block}.ffn_up", _N_FF, _N_EMBD, unit, kind)
        add(f"{block}.ffn_down", _N_EMBD, _N_FF, 1.5 / math.sqrt(_N_FF), kind)
        add_norm(f"{block}.attn_norm")
        add_norm(f"{block}.ffn_norm")


if __name__ == "__main__":
    child_main(sys.argv[1:])
