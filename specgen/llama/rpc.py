"""llama.cpp's RPC backend: use the devices of other machines for a model, or offer this machine's
to others.

llama.cpp's RPC client has no time limit, and ends the process when a connection ends. So every call
that may use a connection is made in a separate thread (`RemoteCalls`). If a worker is lost, the
thread is abandoned with its native memory, and the caller gets a `WorkerLostError`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from functools import partial
from pathlib import Path
from typing import Any

from specgen.errors import BackendError, MemoryLimitError, UsageError, WorkerLostError
from specgen.llama.library import (
    abort_listeners,
    device_of,
    forget_log,
    ggml,
    last_error,
    llama_cpp,
    native_devices,
    procedure,
    watch_aborts,
)
from specgen.options import Workers
from specgen.system.llama_build import LIBRARY, REINSTALL, Device, stamp_of
from specgen.system.processes import left_running
from specgen.system.quantities import human_bytes
from specgen.system.worker_probe import check_protocol, lost_among, probe

_POINTER: Any = ctypes.c_void_p
_CMAKE = 'CMAKE_ARGS="-DGGML_RPC=on -DCMAKE_CXX_FLAGS=-fno-dse"'
_BUILD_HINT = f"in a checkout of specgen: make rpc; with pip: {_CMAKE} {REINSTALL}"
#: The tensor names of an output matrix, as a regular expression. Models without one use the
#: embeddings.
_OUTPUT_MATRIX = rb"^(output|token_embd)\.weight$"
#: The longest that a worker may take to answer a probe.
_PROBE_S = 10.0
_RESTART = "start the worker again (`specgen worker`), then repeat the command"
_SLOW = "if the workers are only slow, --rpc-timeout gives them longer; if not, start them again"


def library_path() -> Path | None:
    path = Path(__file__).with_name(LIBRARY)
    return path if path.is_file() else None


def load_rpc() -> Any:
    """Return GGML's RPC backend: the one in this build of llama.cpp, or the library's. Raise
    `BackendError`.
    """
    if found := ggml("ggml_backend_reg_by_name", _POINTER, ctypes.c_char_p)(b"RPC"):
        return found
    path = library_path()
    if path is None:
        why = "this build of llama.cpp has no RPC backend, which workers need"
        raise BackendError(why, _BUILD_HINT)
    version = stamp_of(path).get("version")
    if version != llama_cpp.__version__.partition("+")[0]:
        built = f"{path.name} was built for llama-cpp-python {version or 'of an unknown version'}"
        raise BackendError(f"{built}, and {llama_cpp.__version__} is installed", _BUILD_HINT)
    forget_log()
    if loaded := ggml("ggml_backend_load", _POINTER, ctypes.c_char_p)(os.fsencode(path)):
        return loaded
    raise BackendError(f"GGML did not take {path.name}: {last_error()}", hint=_BUILD_HINT)


def check_workers(workers: Workers, file: Path) -> None:
    """Probe workers before a model is loaded onto them: the errors are clearer than GGML's."""
    found = [probe(name, min(workers.timeout_s, _PROBE_S)) for name in workers.endpoints]
    for worker in found:
        check_protocol(worker)
    n_bytes = file.stat().st_size
    free_bytes = sum(free for worker in found for free, _whole in worker.devices)
    if free_bytes < n_bytes and not workers.tensor_split:
        sizes = f"{human_bytes(n_bytes)}, but the workers offer only {human_bytes(free_bytes)}"
        hint = "name more workers, or let them offer more (`specgen worker --memory`)"
        raise MemoryLimitError(f"{file}: the model has {sizes}", hint)


def load_onto(workers: Workers, file: Path, params: Any) -> tuple[Any, RemoteCalls]:
    """Load a model onto workers. Return its native handle, None if llama.cpp cannot, and what makes
    its calls.
    """
    remote = RemoteCalls(workers.endpoints, workers.timeout_s)

    def go_on(_share: float, _data: object) -> bool:
        remote.alive()
        return True

    progress = llama_cpp.llama_progress_callback(go_on)
    params.progress_callback = progress
    try:
        kept = _spread(params, _remote_devices(workers.endpoints, remote), workers)
        handle = remote(llama_cpp.llama_model_load_from_file, os.fsencode(file), params)
    except BaseException:
        remote.close()
        raise
    del kept, progress  # llama.cpp reads them while it loads
    return handle, remote


def _remote_devices(endpoints: Sequence[str], calls: RemoteCalls) -> list[int]:
    """Return the workers' devices in order; they stay off GGML's list, so that no other model gets
    them.
    """
    add_server = rpc_procedure(b"ggml_backend_rpc_add_server", _POINTER, ctypes.c_char_p)
    count = ggml("ggml_backend_reg_dev_count", ctypes.c_size_t, _POINTER)
    get = ggml("ggml_backend_reg_dev_get", _POINTER, _POINTER, ctypes.c_size_t)
    devices: list[int] = []
    for endpoint in endpoints:
        server = calls(add_server, endpoint.encode())
        if not server:
            raise BackendError(f"the worker {endpoint} offers no device")
        devices += [get(server, index) for index in range(count(server))]
    return devices


def _spread(params: Any, devices: Sequence[int], workers: Workers) -> list[Any]:
    """Spread a model over devices; return what must be kept alive until it is loaded. Raise
    `UsageError`.
    """
    array = (_POINTER * (len(devices) + 1))(*devices, None)
    params.devices = ctypes.cast(array, _POINTER).value
    kept: list[Any] = [array]
    if split := workers.tensor_split:
        if len(split) > len(devices):
            n_devices = f"the workers have {len(devices)} devices"
            raise UsageError(f"--tensor-split has {len(split)} shares, but {n_devices}")
        shares = (ctypes.c_float * int(llama_cpp.llama_max_devices()))(*split)
        params.tensor_split = shares
        kept.append(shares)
    if workers.output_here:
        here = ggml("ggml_backend_cpu_buffer_type", _POINTER)()
        overrides = (_Placement * 2)(_Placement(_OUTPUT_MATRIX, here), _Placement(None, None))
        params.tensor_buft_overrides = ctypes.cast(overrides, _POINTER).value
        kept.append(overrides)
    return kept


# --- GGML's structures -----------------------------------------------------------------------------


class _Placement(ctypes.Structure):
    """llama.cpp's `llama_model_tensor_buft_override`."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", _POINTER))


def rpc_procedure(name: bytes, result: Any, *arguments: Any) -> Any:
    found = procedure(load_rpc(), name, result, *arguments)
    if found is None:
        raise BackendError(f"llama.cpp's RPC backend has no {name.decode()}", hint=_BUILD_HINT)
    return found


# --- calls that may wait for workers ---------------------------------------------------------------

_open: list[RemoteCalls] = []


class RemoteCalls:
    """Makes the native calls of one target in a thread, one at a time. A call is given up, with all
    later ones, after `timeout_s` seconds without a call of `alive` (at most twice as long, since
    that is checked so often).
    """

    def __init__(self, endpoints: Sequence[str], timeout_s: float) -> None:
        self._endpoints = tuple(endpoints)
        self._timeout_s = timeout_s
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._calls = queue.SimpleQueue()
        self._waiting: Future[Any] | None = None
        self._is_alive = False
        #: Why the workers cannot be called any more, and what to do about it; and which are lost,
        #: once asked for.
        self._lost: tuple[str, str] | None = None
        self._names: Sequence[str] = ()
        if _on_abort not in abort_listeners:
            abort_listeners.append(_on_abort)
        watch_aborts()
        _open.append(self)
        self._thread = threading.Thread(target=self._work, name="remote calls", daemon=True)
        self._thread.start()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.check()
        if threading.current_thread() is self._thread:
            return function(*arguments)
        self._is_alive = False
        call = self._waiting = Future[Any]()
        self._calls.put((call, partial(function, *arguments)))
        try:
            while not wait([call], self._timeout_s).done:
                if not self._is_alive:
                    self.give_up(f"no answer within {self._timeout_s:g} s", _SLOW)
                self._is_alive = False
        except BaseException:  # Ctrl-C, for example: the call continues, so no other may be made
            self.give_up("a call to them was interrupted")
            raise
        finally:
            self._waiting = None
        self.check()
        return call.result()

    def check(self) -> None:
        if self._lost is not None:
            reason, hint = self._lost
            self._names = self._names or lost_among(self._endpoints)
            raise WorkerLostError(f"lost {', '.join(self._names)}: {reason}", hint)

    def alive(self) -> None:
        self._is_alive = True

    def give_up(self, reason: str, hint: str = _RESTART) -> None:
        """Make the waiting call, and all later ones, raise `WorkerLostError`. Any thread may call
        this.
        """
        if self._lost is None:
            self._lost = reason, hint
            left_running.set()
        if (call := self._waiting) is not None:
            with contextlib.suppress(InvalidStateError):  # it is over
                call.set_result(None)

    def close(self) -> None:
        """End the thread after its current call. (It never ends if it waits for a lost worker.)"""
        self._calls.put(None)
        with contextlib.suppress(ValueError):
            _open.remove(self)

    def _work(self) -> None:
        while (task := self._calls.get()) is not None:
            call, run = task
            with contextlib.suppress(InvalidStateError):  # it was given up
                try:
                    call.set_result(run())
                except Exception as error:  # noqa: BLE001 - the caller's thread raises it again
                    call.set_exception(error)


def _on_abort(message: str) -> None:
    """Handle the end of a connection. GGML calls this in the thread of the error, and aborts
    afterwards.
    """
    if "ggml-rpc" not in message:
        return
    # The message does not say which connection it was, so all calls to all workers are given up.
    is_refused = "connect to" in message or "handshake" in message
    for calls in _open.copy():
        calls.give_up("the connection was refused" if is_refused else "the connection ended")
    threading.Event().wait()  # the `WorkerLostError` ends the process properly


# --- this machine's devices for others --------------------------------------------------------------

_GET_MEMORY = ctypes.CFUNCTYPE(None, _POINTER, *2 * (ctypes.POINTER(ctypes.c_size_t),))
#: The callbacks of limits, kept for as long as GGML may call them.
_limits: list[Any] = []


class _DeviceStruct(ctypes.Structure):
    """The beginning of GGML's `ggml_backend_device`: pointers to functions."""

    _fields_ = (("name", _POINTER), ("description", _POINTER), ("memory", _POINTER))


def offered_devices(memory_bytes: int | None) -> dict[int, Device]:
    """Return the GPUs, or else the CPU, by native pointers; clients see `memory_bytes` of each at
    most.
    """
    load_rpc()
    found = {handle: device_of(handle) for handle in native_devices()}
    gpus = [handle for handle, each in found.items() if each.kind not in ("cpu", "accelerator")]
    chosen = gpus or [handle for handle, each in found.items() if each.kind == "cpu"]
    for handle in chosen if memory_bytes is not None else ():
        _limit_memory(handle, memory_bytes or 0)
    return {handle: device_of(handle) for handle in chosen}


def serve_devices(
    endpoint: str, devices: Collection[int], n_threads: int, cache: Path | None
) -> None:
    """Compute for clients, one after the other; return only if llama.cpp gives up. `cache` keeps
    tensors.
    """
    types = (*2 * (ctypes.c_char_p,), *2 * (ctypes.c_size_t,), _POINTER)
    start = rpc_procedure(b"ggml_backend_rpc_start_server", None, *types)
    folder = None if cache is None else os.fsencode(cache)
    start(endpoint.encode(), folder, n_threads, len(devices), (_POINTER * len(devices))(*devices))


def _limit_memory(device: int, limit: int) -> None:
    struct = _DeviceStruct.from_address(device)
    own = ctypes.cast(struct.memory, _GET_MEMORY)

    def tell(asked: int, free: Any, total: Any) -> None:
        own(asked, free, total)
        free[0], total[0] = min(limit, free[0]), min(limit, total[0])

    _limits.append(_GET_MEMORY(tell))
    struct.memory = ctypes.cast(_limits[-1], _POINTER).value
