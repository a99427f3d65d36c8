"""The checks of `specgen doctor`: this machine, the build of llama.cpp, and whether it works.

A build that is miscompiled or made for another CPU kills the process at the first batch. So a
child process (`python -m specgen.measure.diagnosis TASK ...`) does the decoding, and prints one
line of JSON. If it dies, its signal or exit code tells why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen import __version__, errors
from specgen.errors import BackendError, SpecgenError
from specgen.llama.kernels.admission import KernelStatus
from specgen.options import ContextOptions, SessionOptions
from specgen.system.files import as_json, named_file, scratch_folder
from specgen.system.llama_build import REBUILD, REINSTALL, REQUIRED_VERSION, Build, Device
from specgen.system.machine import Machine, describe_machine
from specgen.system.processes import ChildDiedError, ChildError, ask_child
from specgen.system.quantities import human_bytes

if TYPE_CHECKING:
    from gguf import GGUFWriter

    from specgen.system.arrays import Logits

#: The command that starts a child; the name of a task and its arguments follow.
CHILD_COMMAND: Sequence[str] = (sys.executable, "-m", "specgen.measure.diagnosis")
#: How long to wait for a child that needs no model of the user.
_TINY_TIMEOUT_S = 120.0
#: How long to wait for a child that loads the user's model.
_MODEL_TIMEOUT_S = 1800.0
#: How long to wait for a worker.
_WORKER_TIMEOUT_S = 5.0
#: The maximum difference of logits that were computed in two ways, relative to their standard
#: deviation. Rounding causes 0.02 to 0.05, and wrong results about 1.
_TOLERANCE = 0.1
#: The text to decode, and how many of its tokens.
_TEXT = "The quick brown fox jumps over the lazy dog; 0123456789 (and so on). What comes next?"
_N_TOKENS = 24
#: How many if each token reads weights from disk.
_N_STREAMED_TOKENS = 4
#: The size of the context to decode in, in tokens.
_N_CTX = 256


# --- the report


@dataclass(frozen=True, slots=True)
class Check:
    """The result of a check."""

    #: What was checked.
    name: str
    #: Whether it is as it should be.
    passed: bool
    #: What was found; if the check failed, the problem.
    message: str
    #: If the check failed, what to do about it.
    hint: str | None = None
    #: If the check failed, the name of the error's class in `specgen.errors`.
    error: str | None = None


@dataclass(slots=True)
class DoctorReport:
    """All results of `specgen doctor`."""

    #: The machine and its Python.
    machine: Machine = field(default_factory=describe_machine)
    #: The version of specgen.
    version: str = __version__
    #: None if llama.cpp could not be loaded.
    build: Build | None = None
    #: The kernels that compute on the CPU.
    kernels: KernelStatus = field(
        default_factory=lambda: KernelStatus("llama.cpp", reason="llama.cpp could not be loaded")
    )
    #: The results of the checks, in the order in which they were made.
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
    """Run all checks; if llama.cpp cannot be loaded, only the first.

    Args:
        model: The user's model to decode with, if any.
        endpoints: The endpoints of the workers to ask.
        on_check: Receives the name of each check before it is run.
    """
    report = DoctorReport()

    def run(name: str, check: Callable[[], str]) -> None:
        on_check(name)
        try:
            result = Check(name, passed=True, message=check())
        except SpecgenError as error:
            result = Check(
                name,
                passed=False,
                message=error.message,
                hint=error.hint,
                error=type(error).__name__,
            )
        report.checks.append(result)

    run("loading llama.cpp", partial(_load, report))
    if report.build is None:
        return report
    places = places_of(report.build)
    for place in places:
        run(f"decoding on the {place}", partial(_decode_in_child, place))
    run("specgen's kernels", partial(_test_kernels, report))
    if model is not None:
        fastest_place = places[0] if places else "CPU"
        run(model.name, partial(_decode_in_child, fastest_place, model))
    for endpoint in endpoints:
        run(f"worker {endpoint}", partial(_ask_worker, endpoint))
    return report


def places_of(build: Build) -> list[str]:
    """Return the places where a build can decode, "GPU" and "CPU", the fastest first."""
    return ["GPU", "CPU"] if build.gpu_offload else ["CPU"]


# --- the checks. Each returns what it found in words, or raises a `SpecgenError`


def _load(report: DoctorReport) -> str:
    """Load llama.cpp in a child, and store its build in the report."""
    answer = run_child(["build"], _TINY_TIMEOUT_S)
    devices = tuple(Device(**device) for device in answer["devices"])
    report.build = Build(**{**answer, "devices": devices})
    version = f"llama-cpp-python {report.build.version}"
    # Other people's wheels may have a suffix: 0.3.36+cu124.
    if report.build.version.partition("+")[0] == REQUIRED_VERSION:
        return version
    return f"{version}: specgen is made for {REQUIRED_VERSION}; {REBUILD}"


def _decode_in_child(place: str, model: Path | None = None) -> str:
    """Decode in a child with the user's model, or with a tiny one if there is none."""
    task = ["decode", place]
    timeout_s = _TINY_TIMEOUT_S
    if model is not None:
        task.append(os.fspath(model))
        timeout_s = _MODEL_TIMEOUT_S
    return str(run_child(task, timeout_s)["message"])


def _test_kernels(report: DoctorReport) -> str:
    """Test specgen's kernels, unless the user turned them off, and store the result in the report.

    It passes if they are not used for a good reason, such as an unsupported CPU.
    """
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
    """Ask a worker for its protocol and devices; it fails if the protocol does not match."""
    from specgen.llama.rpc import load_rpc
    from specgen.system.worker_probe import check_protocol, probe

    load_rpc()
    worker = probe(endpoint, _WORKER_TIMEOUT_S)
    check_protocol(worker)
    devices = ", ".join(
        f"{human_bytes(free_bytes)} of {human_bytes(total_bytes)} free"
        for free_bytes, total_bytes in worker.devices
    )
    latency = f"a round trip takes {worker.round_trip_s * 1000:.1f} ms"
    return f"protocol {worker.protocol}; {devices or 'no device'}; {latency}"


# --- the parent's side of a child process


def run_child(task: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Run a task in a child process, and return its answer.

    Args:
        task: The name of the task and its arguments.
        timeout_s: How long to wait for the answer.

    Raises:
        BackendError: If the child dies or does not answer in time.
        SpecgenError: If the task fails; the class is the same as in the child.
    """
    try:
        answer = ask_child([*CHILD_COMMAND, *task], timeout_s)
    except ChildError as error:
        raise explained(error) from error
    if "error" in answer:
        raise _error_named(answer["error"], answer["message"], answer["hint"])
    return answer


def explained(error: ChildError) -> BackendError:
    """Turn a child's failure into an error that says why it died and what to do about it."""
    message = str(error)
    hint = f"build llama.cpp again: {REINSTALL}"
    if isinstance(error, ChildDiedError):
        signal = error.signal_name
        if signal:
            message = f"llama.cpp died of {signal} ({error.description.lower()})"
        if error.last_stderr_line:
            message += f": {error.last_stderr_line}"
        hint = _SIGNAL_HINTS.get(signal, hint)
    return BackendError(message, hint)


_SIGNAL_HINTS = {
    "SIGILL": (
        "it was built for another CPU, or by GCC 12, which miscompiles the code for AMX; build it "
        f"again on this machine: {REBUILD}"
    ),
    "SIGKILL": "it probably ran out of memory: free some, or use a smaller model",
}


def _error_named(
    name: str | None,
    message: str,
    hint: str | None,
) -> SpecgenError:
    """Return an error of that class in `specgen.errors`; a `BackendError` for unknown names."""
    error: SpecgenError = getattr(errors, name or "", BackendError)(message, hint)
    return error


# --- the child's side


def child_main(arguments: Sequence[str]) -> None:
    """Run a task, and print its answer or its error as a line of JSON.

    Args:
        arguments: The task `build`; or `decode`, a place and optionally a model file.
    """
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
    """Decode a text in one batch and token by token, and compare the logits.

    Args:
        place: Where to decode, "CPU" or "GPU".
        file: The user's model; None for a tiny model that is made for the test.

    Returns:
        The result in words.

    Raises:
        SpecgenError: If the logits are wrong, or the model cannot be used.
    """
    import numpy as np

    options = ContextOptions(n_gpu_layers=-1 if place == "GPU" else 0)
    if file is None:
        with scratch_folder("specgen-doctor-") as folder:
            tiny = Path(folder) / "tiny.gguf"
            write_tiny_model(tiny)
            # One thread: on a busy machine, waiting for others takes far longer than the work.
            decoded = _decode(tiny, replace(options, n_threads=1))
        return compared(decoded.batched, decoded.one_by_one)

    path = Path(file)
    problem = _kernel_problem(path)
    # Decode even if specgen's kernels have a problem: an error of the model itself comes first.
    decoded = _decode(path, options)
    if problem:
        hint = "llama.cpp's own code computes this model; report this as a defect of specgen"
        raise BackendError(f"specgen's kernels: {problem}", hint)
    message = compared(decoded.batched, decoded.one_by_one)
    why_rows_differ = decoded.why_rows_differ
    if not why_rows_differ and np.array_equal(decoded.batched, decoded.one_by_one):
        message += ": rows are the same in any batch"
    else:
        because = f", because {why_rows_differ}" if why_rows_differ else ""
        message += f": rows depend on their batch{because}"
    if decoded.streamed_bytes:
        message += f"; larger than memory, so {_from_disk(decoded.streamed_bytes)}"
    return message


def _kernel_problem(path: Path) -> str:
    """Test specgen's kernels with a model, and return what is wrong.

    The result is empty if nothing is wrong, or if the kernels are not used.
    """
    from specgen.llama.kernels.admission import choose_kernels, wanted_in
    from specgen.llama.kernels.verdicts import KernelTests
    from specgen.system.folders import cache_folder

    kernels = choose_kernels(wanted_in(os.environ), cache_folder())
    if kernels.computes != "specgen" or kernels.path is None or named_file(path) is None:
        return ""
    return KernelTests(kernels.path, cache_folder()).problem_of(path, rerun=True)


def _from_disk(streamed_bytes: int) -> str:
    return f"{human_bytes(streamed_bytes)} of its weights are read from disk in each pass"


@dataclass(frozen=True, slots=True)
class _Decoded:
    """A text that was decoded in two ways."""

    #: The logits of all tokens in one batch, float32[n_tokens, n_vocab].
    batched: Logits
    #: Those of single tokens, in the same shape.
    one_by_one: Logits
    #: Why the two are expected to differ; empty if they are not.
    why_rows_differ: str
    #: The bytes of weights that each pass reads from disk; 0 if they fit into memory.
    streamed_bytes: int


def _decode(path: Path, options: ContextOptions) -> _Decoded:
    """Decode a text in one batch, and again token by token.

    Raises:
        SpecgenError: If the model cannot be used.
    """
    import numpy as np

    from specgen.drafters.kinds import refuse_draft
    from specgen.llama import LlamaBackend, LlamaModel
    from specgen.method.backend import Batch
    from specgen.session.weights_memory import weights_budget

    refuse_draft(path)
    context = replace(options, n_ctx=_N_CTX)
    budget = weights_budget(SessionOptions(path, "none", target_context=context), ())
    n_tokens = _N_TOKENS
    if budget.max_bytes is not None:
        n_tokens = _N_STREAMED_TOKENS
        _use_stored_packed_weights(path)
    with contextlib.ExitStack() as resources:
        model = LlamaModel(
            path,
            n_gpu_layers=options.n_gpu_layers,
            weights_bytes=budget.max_bytes,
        )
        resources.callback(model.close)
        backend = LlamaBackend(
            model,
            options,
            n_ctx=_N_CTX,
            clock=time.perf_counter,
            n_outputs=_N_TOKENS,
        )
        resources.callback(backend.close)
        tokens = model.vocabulary.tokenize(_TEXT, add_special=True, parse_special=False)[:n_tokens]

        def rows(start: int, end: int) -> Logits:
            """Decode some of the tokens in one batch, and return their logits."""
            return backend.decode(Batch.of(tokens[start:end], start, end - start)).copy()

        batched = rows(0, len(tokens))
        backend.remove(0)
        one_by_one = np.concatenate([rows(start, start + 1) for start in range(len(tokens))])
        return _Decoded(batched, one_by_one, model.row_exception, model.streamed_bytes)


def _use_stored_packed_weights(path: Path) -> None:
    """Use the file of a model's packed weights if there is one, but make none: it takes minutes."""
    from specgen.llama.kernels.packed_weights import Streaming, keep_packed_weights, streaming_of
    from specgen.system.folders import packed_folder

    keep_packed_weights(packed_folder())
    if streaming_of(path) is not Streaming.STORED:
        keep_packed_weights(None)


def compared(batched: Logits, one_by_one: Logits) -> str:
    """Return in words how far apart the logits of a batch and of single tokens are.

    Raises:
        BackendError: If they are further apart than rounding explains.
    """
    import numpy as np

    spread = max(float(np.std(one_by_one)), 1e-12)
    difference = float(np.sqrt(np.mean((batched - one_by_one) ** 2)) / spread)
    logits = f"logits of {len(batched)} tokens in a batch"
    if not difference <= _TOLERANCE:  # `not ... <=` also refuses NaN
        raise BackendError(
            f"the {logits} differ from those of single tokens by {difference:.0%} of their spread",
            hint=f"this build computes wrong results; build llama.cpp again: {REBUILD}",
        )
    return f"{logits} differ by {difference:.1%} from those of single tokens"


# --- a tiny model

# Sizes in llama.cpp's names.
_N_EMBD = 256
_N_HEAD = 4
_N_FF = 512
_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
#: llama.cpp's numbers of the tokens' types: 2 is unknown, 3 control, 6 a byte, and 1 normal.
_TOKEN_TYPES = [2, 3, 3, *[6] * 256, 1]


def write_tiny_model(path: Path) -> None:
    """Write a Llama model with random weights, whose tokens are bytes.

    Its sizes are large enough for every kernel.
    """
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
    """Add random weights: one layer in each of two types whose kernels differ between CPUs."""
    import numpy as np
    from gguf import GGMLQuantizationType, quants

    rng = np.random.default_rng(1)

    def add(
        name: str,
        n_out: int,
        n_in: int,
        scale: float = 1.0,
        dtype: str = "Q8_0",
    ) -> None:
        weights = rng.standard_normal((n_out, n_in), np.float32) * np.float32(scale)
        quantization = GGMLQuantizationType[dtype]
        quantized = quants.quantize(weights, quantization)
        writer.add_tensor(f"{name}.weight", quantized, raw_dtype=quantization)

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(_N_EMBD, np.float32))

    # With this scale a product with a vector of size `_N_EMBD` keeps the vector's variance.
    unit = 1.0 / math.sqrt(_N_EMBD)
    add("token_embd", len(_TOKENS), _N_EMBD)
    add("output", len(_TOKENS), _N_EMBD, 3.0 * unit)
    add_norm("output_norm")
    #: The matrices of a layer: name, number of rows and of columns, and scale.
    matrices = [
        ("attn_q", _N_EMBD, _N_EMBD, 1.4 * unit),
        ("attn_k", _N_EMBD, _N_EMBD, 1.4 * unit),
        ("attn_v", _N_EMBD, _N_EMBD, 1.4 * unit),
        ("attn_output", _N_EMBD, _N_EMBD, 1.4 * unit),
        ("ffn_gate", _N_FF, _N_EMBD, unit),
        ("ffn_up", _N_FF, _N_EMBD, unit),
        ("ffn_down", _N_EMBD, _N_FF, 1.5 / math.sqrt(_N_FF)),
    ]
    for layer, dtype in enumerate(("Q8_0", "Q4_0")):
        block = f"blk.{layer}"
        for name, n_out, n_in, scale in matrices:
            add(f"{block}.{name}", n_out, n_in, scale, dtype)
        add_norm(f"{block}.attn_norm")
        add_norm(f"{block}.ffn_norm")


if __name__ == "__main__":
    child_main(sys.argv[1:])
