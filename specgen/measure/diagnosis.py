"""The checks of `specgen doctor`: this machine, this build of llama.cpp, and whether it decodes.

A build for another CPU, or a miscompiled one, ends the process at the first batch. So a child
(`python -m specgen.measure.diagnosis TASK ...`) decodes and answers with a line of JSON; if it
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
    from specgen.system.arrays import Logits

#: The command that starts a child; the name of a task and its arguments follow.
CHILD_COMMAND: Sequence[str] = (sys.executable, "-m", "specgen.measure.diagnosis")
#: The longest waits, in seconds: for a child with a tiny model, one with the user's model, and a
#: worker.
_TINY_TIMEOUT_S, _MODEL_TIMEOUT_S, _WORKER_TIMEOUT_S = 120.0, 1800.0, 5.0
#: The largest relative difference of logits computed in two ways: rounding causes 0.02 to 0.05,
#: errors 1.
_TOLERANCE = 0.1
_TEXT = "The quick brown fox jumps over the lazy dog; 0123456789 (and so on). What comes next?"
_N_TOKENS = 24


# --- the report -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Check:
    """The result of a check or the problem, what to do about it, and the error's class in
    `specgen.errors`.
    """

    name: str
    passed: bool
    message: str
    hint: str | None = None
    error: str | None = None


@dataclass(slots=True)
class DoctorReport:
    """Everything that `specgen doctor` finds; `build` is None if llama.cpp could not be loaded."""

    machine: Machine = field(default_factory=look_at_machine)
    version: str = __version__
    build: Build | None = None
    kernels: KernelStatus = field(
        default_factory=lambda: KernelStatus("llama.cpp", reason="llama.cpp could not be loaded")
    )
    checks: list[Check] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return all(check.passed for check in self.checks)

    def raise_first_error(self) -> None:
        for check in self.checks:
            if not check.passed:
                raise _error_named(check.error, f"{check.name}: {check.message}", check.hint)

    def to_json_object(self) -> dict[str, Any]:
        return {**as_json(self), "healthy": self.healthy}


def diagnose(
    model: Path | None = None,
    endpoints: Sequence[str] = (),
    on_check: Callable[[str], None] = lambda _name: None,
) -> DoctorReport:
    """Run all checks; `on_check` gets each check's name before."""
    report = DoctorReport()

    def run(name: str, do: Callable[[], str]) -> None:
        on_check(name)
        try:
            found = Check(name, True, do())
        except SpecgenError as error:
            found = Check(name, False, error.message, error.hint, type(error).__name__)
        report.checks.append(found)

    def decode(place: str, *file: str) -> str:
        timeout_s = _MODEL_TIMEOUT_S if file else _TINY_TIMEOUT_S
        return str(run_child(["decode", place, *file], timeout_s)["message"])

    run("loading llama.cpp", partial(_load, report))
    if report.build is not None:
        places = places_of(report.build)
        for place in places:
            run(f"decoding on the {place}", partial(decode, place))
        run("specgen's kernels", partial(_test_kernels, report))
        if model is not None:
            run(model.name, partial(decode, [*places, "CPU"][0], os.fspath(model)))
    for endpoint in endpoints if report.build is not None else ():
        run(f"worker {endpoint}", partial(_ask_worker, endpoint))
    return report


def places_of(build: Build) -> list[str]:
    return ["GPU", "CPU"] if build.gpu_offload else ["CPU"]


def _load(report: DoctorReport) -> str:
    answer = run_child(["build"], _TINY_TIMEOUT_S)
    devices = tuple(Device(**device) for device in answer["devices"])
    report.build = Build(**{**answer, "devices": devices})
    version = f"llama-cpp-python {report.build.version}"
    # Built by anyone: 0.3.36+cu124.
    if report.build.version.partition("+")[0] == REQUIRED_VERSION:
        return version
    return f"{version}: specgen is made for {REQUIRED_VERSION}; {REBUILD}"


def _test_kernels(report: DoctorReport) -> str:
    from specgen.llama.kernels import admission
    from specgen.system.folders import cache_folder

    if admission.wanted_in(os.environ) == "llama.cpp":
        reason, path = f"{admission.VARIABLE} asks for llama.cpp's", admission.library_path()
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


# --- the child, seen from the parent ----------------------------------------------------------


def run_child(task: Sequence[str], timeout_s: float) -> dict[str, Any]:
    try:
        answer = ask_child([*CHILD_COMMAND, *task], timeout_s)
    except ChildError as error:
        raise explained(error) from error
    if "error" in answer:
        raise _error_named(answer["error"], answer["message"], answer["hint"])
    return answer


def explained(error: ChildError) -> BackendError:
    message, signal = str(error), ""
    if isinstance(error, ChildDiedError):
        signal = error.signal_name
        if signal:
            message = f"llama.cpp died of {signal} ({error.description.lower()})"
        message += f": {error.last_words}" if error.last_words else ""
    hints = {
        "SIGILL": "it was built for another CPU, or by GCC 12, which gets the code for AMX wrong; "
        f"build it again, here: {REBUILD}",
        "SIGKILL": "most likely the memory ran out: free some, or take a smaller model",
    }
    return BackendError(message, hints.get(signal, f"build llama.cpp again: {REINSTALL}"))


def _error_named(name: str | None, message: str, hint: str | None) -> SpecgenError:
    error: SpecgenError = getattr(errors, name or "", BackendError)(message, hint)
    return error


# --- the checks, in the child ---------------------------------------------------------------


def child_main(arguments: Sequence[str]) -> None:
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
    """Compare the logits of a batch with those of single tokens: of the user's model, or of a tiny
    one.
    """
    import numpy as np

    from specgen.llama.kernels.admission import choose_kernels, wanted_in
    from specgen.llama.kernels.verdicts import KernelTests
    from specgen.system.folders import cache_folder

    options = ContextOptions(n_gpu_layers=-1 if place == "GPU" else 0)
    if file is None:
        with tempfile.TemporaryDirectory(prefix="specgen-doctor-") as folder:
            tiny = Path(folder) / "tiny.gguf"
            write_tiny_model(tiny)
            # One thread: on a busy machine several threads wait for each other, which takes far
            # longer.
            together, one_by_one, _ = _decode(tiny, replace(options, n_threads=1))
        return compared(together, one_by_one)
    kernels, path, problem = choose_kernels(wanted_in(os.environ), cache_folder()), Path(file), ""
    if kernels.computes == "specgen" and kernels.path is not None and path.is_file():
        problem = KernelTests(kernels.path, cache_folder()).problem_of(path, rerun=True)
    together, one_by_one, exception = _decode(path, options)
    if problem:
        hint = "llama.cpp's own code computes this model; report this as a defect of specgen"
        raise BackendError(f"specgen's kernels: {problem}", hint)
    message = compared(together, one_by_one)
    if np.array_equal(together, one_by_one) and not exception:
        return f"{message}: rows are the same in any batch"
    return f"{message}: rows depend on their batch{exception and f', because {exception}'}"


def _decode(path: Path, options: ContextOptions) -> tuple[Logits, Logits, str]:
    """Return float32[n_tokens, n_vocab] decoded in one batch and token by token, and why rows must
    differ.
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
    one_by_one = np.concatenate([rows(at, at + 1) for at in range(len(tokens))])
    exception = model.row_exception
    backend.close()
    model.close()
    return together, one_by_one, exception


def compared(together: Logits, one_by_one: Logits) -> str:
    """Say how far apart two tables of logits are. Raise `BackendError` if that is more than
    `_TOLERANCE`.
    """
    import numpy as np

    spread = max(float(np.std(one_by_one)), 1e-12)
    apart = float(np.sqrt(np.mean((together - one_by_one) ** 2)) / spread)
    tokens = f"{len(together)} tokens in a batch"
    if not apart <= _TOLERANCE:
        raise BackendError(
            f"the logits of {tokens} differ from those of single tokens by {apart:.0%} of their spread",
            hint=f"this build computes wrong results; build llama.cpp again: {REBUILD}",
        )
    return f"logits of {tokens} differ by {apart:.1%} from those of single tokens"


# --- a tiny model ----------------------------------------------------------------------------

_N_EMBD, _N_HEAD, _N_FF = 256, 4, 512
_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]


def write_tiny_model(path: Path) -> None:
    """Write a random Llama of bytes, large enough for every kernel, in the types that differ most
    on CPUs.
    """
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    writer = GGUFWriter(path, "llama")
    writer.add_quantization_version(2)
    sizes = {"vocab_size": len(_TOKENS), "context_length": 4096, "embedding_length": _N_EMBD}
    sizes |= {"block_count": 2, "feed_forward_length": _N_FF, "attention.head_count": _N_HEAD}
    for name, size in (sizes | {"rope.dimension_count": _N_EMBD // _N_HEAD}).items():
        writer.add_uint32(f"llama.{name}", size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(_TOKENS)
    writer.add_token_types([2, 3, 3, *[6] * 256, 1])  # unknown, control, bytes, normal
    writer.add_token_scores([0.0] * len(_TOKENS))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    rng = np.random.default_rng(1)

    def add(name: str, n_out: int, n_in: int, scale: float = 1.0, kind: str = "Q8_0") -> None:
        weights = rng.standard_normal((n_out, n_in), np.float32) * np.float32(scale)
        stored = GGMLQuantizationType[kind]
        writer.add_tensor(f"{name}.weight", quants.quantize(weights, stored), raw_dtype=stored)

    unit = 1.0 / math.sqrt(_N_EMBD)
    add("token_embd", len(_TOKENS), _N_EMBD)
    add("output", len(_TOKENS), _N_EMBD, 3.0 * unit)
    for layer, kind in enumerate(("Q8_0", "Q4_0")):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}", _N_EMBD, _N_EMBD, 1.4 * unit, kind)
        add(f"blk.{layer}.ffn_gate", _N_FF, _N_EMBD, unit, kind)
        add(f"blk.{layer}.ffn_up", _N_FF, _N_EMBD, unit, kind)
        add(f"blk.{layer}.ffn_down", _N_EMBD, _N_FF, 1.5 / math.sqrt(_N_FF), kind)
    norms = [f"blk.{layer}.{name}" for layer in (0, 1) for name in ("attn_norm", "ffn_norm")]
    for name in ("output_norm", *norms):
        writer.add_tensor(f"{name}.weight", np.ones(_N_EMBD, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    child_main(sys.argv[1:])
