"""llama.cpp's RPC backend: use the devices of other machines, or offer this machine's to others.

llama.cpp's RPC client has no time limit, and ends the process when a connection ends. So every call
that may use a connection is made in a separate thread (`RemoteCalls`). If a worker is lost, that
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
    device_of,
    forget_log,
    last_error,
    llama_cpp,
    native,
    native_devices,
    procedure,
)
from specgen.llama.native_end import abort_listeners, watch_aborts
from specgen.options import Workers
from specgen.system.llama_build import LIBRARY, REINSTALL, Device, stamp_of
from specgen.system.processes import left_running
from specgen.system.quantities import human_bytes
from specgen.system.worker_probe import check_protocol, lost_among, probe

_POINTER: Any = ctypes.c_void_p
_SIZE: Any = ctypes.c_size_t
_TEXT: Any = ctypes.c_char_p
_SIZE_POINTER: Any = ctypes.POINTER(ctypes.c_size_t)
_CMAKE = 'CMAKE_ARGS="-DGGML_RPC=on -DCMAKE_CXX_FLAGS=-fno-dse"'
_BUILD_HINT = f"in a checkout of specgen: make rpc; with pip: {_CMAKE} {REINSTALL}"
#: The names of output matrices, as a regular expression. Models without one use the embeddings.
_OUTPUT_MATRIX = rb"^(output|token_embd)\.weight$"
#: The longest that a worker may take to answer a probe.
_PROBE_TIMEOUT_S = 10.0
_RESTART = "start the worker again (`specgen worker`), then repeat the command"
_SLOW = "if the workers are only slow, --rpc-timeout gives them longer; if not, start them again"


# --- the backend


def load_rpc() -> Any:
    """Return GGML's RPC backend: the one in this build of llama.cpp, or else specgen's library.

    Raises:
        BackendError: If there is none, or the library does not fit this build.
    """
    return built_in_backend() or _load_library(library_path())


def built_in_backend() -> Any:
    """Return the RPC backend in this build of llama.cpp, or one that was loaded; null for none."""
    return native.ggml_backend_reg_by_name(b"RPC")


def library_path() -> Path | None:
    """Return the path of specgen's library with the RPC backend; None if it was not built."""
    path = Path(__file__).with_name(LIBRARY)
    return path if path.is_file() else None


def _load_library(path: Path | None) -> Any:
    if path is None:
        raise BackendError(
            "this build of llama.cpp has no RPC backend, which workers need", _BUILD_HINT
        )
    version = stamp_of(path).get("version")
    if version != llama_cpp.__version__.partition("+")[0]:
        raise BackendError(
            f"{path.name} was built for llama-cpp-python {version or 'of an unknown version'}, "
            f"and {llama_cpp.__version__} is installed",
            _BUILD_HINT,
        )
    forget_log()
    loaded = native.ggml_backend_load(os.fsencode(path))
    if not loaded:
        raise BackendError(f"GGML did not take {path.name}: {last_error()}", _BUILD_HINT)
    return loaded


def _rpc_procedure(name: bytes, result: Any, *arguments: Any) -> Any:
    """Return a function of the RPC backend."""
    function = procedure(load_rpc(), name, result, *arguments)
    if function is None:
        raise BackendError(f"llama.cpp's RPC backend has no {name.decode()}", _BUILD_HINT)
    return function


# --- a model on workers


def check_workers(workers: Workers, file: Path) -> None:
    """Probe workers before a model is loaded onto them: the errors are clearer than GGML's.

    Raises:
        WorkerLostError: If one does not answer.
        BackendError: If one has another version of the protocol.
        MemoryLimitError: If they offer too little memory.
    """
    found = [probe(name, min(workers.timeout_s, _PROBE_TIMEOUT_S)) for name in workers.endpoints]
    for worker in found:
        check_protocol(worker)
    model_bytes = file.stat().st_size
    free_bytes = sum(free for worker in found for free, _total in worker.devices)
    if free_bytes < model_bytes and not workers.tensor_split:
        raise MemoryLimitError(
            f"{file}: the model has {human_bytes(model_bytes)}, "
            f"but the workers offer only {human_bytes(free_bytes)}",
            "name more workers, or let them offer more (`specgen worker --memory`)",
        )


def load_onto(workers: Workers, file: Path, params: Any) -> tuple[Any, RemoteCalls]:
    """Load a model onto workers.

    Returns:
        llama.cpp's pointer to the model, null if it could not be loaded, and what makes its calls.
    """
    remote = RemoteCalls(workers.endpoints, workers.timeout_s)

    def go_on(_share: float, _data: object) -> bool:
        remote.alive()
        return True

    progress = llama_cpp.llama_progress_callback(go_on)
    params.progress_callback = progress
    try:
        devices = _remote_devices(workers.endpoints, remote)
        kept = _place_layers(params, devices, workers)
        handle = remote(llama_cpp.llama_model_load_from_file, os.fsencode(file), params)
    except BaseException:
        remote.close()
        raise
    del kept, progress  # llama.cpp read them while it loaded
    return handle, remote


def _remote_devices(endpoints: Sequence[str], remote: RemoteCalls) -> list[int]:
    """Return the workers' devices in order.

    They stay off GGML's list of devices, so that no other model gets them.
    """
    add_server = _rpc_procedure(b"ggml_backend_rpc_add_server", _POINTER, _TEXT)
    devices: list[int] = []
    for endpoint in endpoints:
        server = remote(add_server, endpoint.encode())
        if not server:
            raise BackendError(f"the worker {endpoint} offers no device")
        n_devices = native.ggml_backend_reg_dev_count(server)
        devices += [native.ggml_backend_reg_dev_get(server, index) for index in range(n_devices)]
    return devices


class _TensorPlacement(ctypes.Structure):
    """llama.cpp's `llama_model_tensor_buft_override`."""

    _fields_ = (("pattern", _TEXT), ("buffer_type", _POINTER))


def _place_layers(params: Any, devices: Sequence[int], workers: Workers) -> list[Any]:
    """Set which device gets which layers.

    Returns:
        What must be kept alive until the model is loaded.

    Raises:
        UsageError: If --tensor-split names more devices than there are.
    """
    device_list = (_POINTER * (len(devices) + 1))(*devices, None)
    params.devices = ctypes.cast(device_list, _POINTER).value
    kept: list[Any] = [device_list]
    split = workers.tensor_split
    if split:
        if len(split) > len(devices):
            raise UsageError(
                f"--tensor-split has {len(split)} shares, "
                f"but the workers have {len(devices)} devices"
            )
        shares = (ctypes.c_float * int(llama_cpp.llama_max_devices()))(*split)
        params.tensor_split = shares
        kept.append(shares)
    if workers.output_here:
        here = native.ggml_backend_cpu_buffer_type()
        placements = (_TensorPlacement * 2)(
            _TensorPlacement(_OUTPUT_MATRIX, here), _TensorPlacement(None, None)
        )
        params.tensor_buft_overrides = ctypes.cast(placements, _POINTER).value
        kept.append(placements)
    return kept


# --- calls that may wait for workers

#: All that are not closed.
_open: list[RemoteCalls] = []


class RemoteCalls:
    """Makes the native calls of one target in a thread, one at a time.

    A call is given up, with all later ones, after `timeout_s` seconds without a call of `alive`.
    (It is at most twice as long, since that is checked so often.)
    """

    def __init__(self, endpoints: Sequence[str], timeout_s: float) -> None:
        self._endpoints = tuple(endpoints)
        self._timeout_s = timeout_s
        #: The calls that the thread is to make, and where their results go; None ends it.
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._calls = queue.SimpleQueue()
        #: The result that a caller waits for.
        self._waiting: Future[Any] | None = None
        self._is_alive = False
        #: Why the workers cannot be called any more, and what to do about it.
        self._lost: tuple[str, str] | None = None
        #: Which of them are lost, once that was asked.
        self._lost_names: Sequence[str] = ()
        if _on_abort not in abort_listeners:
            abort_listeners.append(_on_abort)
        watch_aborts()
        _open.append(self)
        self._thread = threading.Thread(target=self._work, name="remote calls", daemon=True)
        self._thread.start()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the thread; raise `WorkerLostError` if a worker is lost."""
        self.check()
        if threading.current_thread() is self._thread:
            return function(*arguments)
        self._is_alive = False
        result = Future[Any]()
        self._waiting = result
        self._calls.put((result, partial(function, *arguments)))
        try:
            while not wait([result], self._timeout_s).done:
                if not self._is_alive:
                    self.give_up(f"no answer within {self._timeout_s:g} s", _SLOW)
                self._is_alive = False
        except BaseException:  # Ctrl-C, for example: the call continues, so no other may be made
            self.give_up("a call to them was interrupted")
            raise
        finally:
            self._waiting = None
        self.check()
        return result.result()

    def check(self) -> None:
        """Raise `WorkerLostError` if a worker was lost."""
        if self._lost is not None:
            reason, hint = self._lost
            self._lost_names = self._lost_names or lost_among(self._endpoints)
            raise WorkerLostError(f"lost {', '.join(self._lost_names)}: {reason}", hint)

    def alive(self) -> None:
        """Note that the present call makes progress."""
        self._is_alive = True

    def give_up(self, reason: str, hint: str = _RESTART) -> None:
        """Make the present call, and all later ones, raise `WorkerLostError`.

        Any thread may call this.
        """
        if self._lost is None:
            self._lost = (reason, hint)
            left_running.set()
        waiting = self._waiting
        if waiting is not None:
            with contextlib.suppress(InvalidStateError):  # it is over
                waiting.set_result(None)

    def close(self) -> None:
        """End the thread after its current call. (It never ends if it waits for a lost worker.)"""
        self._calls.put(None)
        with contextlib.suppress(ValueError):
            _open.remove(self)

    def _work(self) -> None:
        """Make the calls, in the thread."""
        while True:
            task = self._calls.get()
            if task is None:
                return
            result, call = task
            with contextlib.suppress(InvalidStateError):  # it was given up
                try:
                    result.set_result(call())
                except Exception as error:  # noqa: BLE001 - the caller's thread raises it again
                    result.set_exception(error)


def _on_abort(message: str) -> None:
    """Give up all calls when a connection ended.

    GGML calls this in the thread of the error, and ends the process afterwards.
    """
    if "ggml-rpc" not in message:
        return
    reason = "the connection ended"
    if "connect to" in message or "handshake" in message:
        reason = "the connection was refused"
    # The message does not say which connection it was, so all calls to all workers are given up.
    for calls in _open.copy():
        calls.give_up(reason)
    threading.Event().wait()  # forever: the `WorkerLostError` ends the process properly


# --- this machine's devices for others

_GET_MEMORY = ctypes.CFUNCTYPE(None, _POINTER, _SIZE_POINTER, _SIZE_POINTER)
#: The callbacks of limits, kept for as long as GGML may call them.
_limits: list[Any] = []


class _DeviceFunctions(ctypes.Structure):
    """The beginning of GGML's `ggml_backend_device`: pointers to functions."""

    _fields_ = (("name", _POINTER), ("description", _POINTER), ("memory", _POINTER))


def offered_devices(memory_bytes: int | None) -> dict[int, Device]:
    """Return the GPUs, or else the CPU, by GGML's pointers.

    Args:
        memory_bytes: What clients see of each device's memory at most; None: all.
    """
    load_rpc()
    kinds = {handle: device_of(handle).kind for handle in native_devices()}
    chosen = [handle for handle, kind in kinds.items() if kind not in ("cpu", "accelerator")]
    if not chosen:
        chosen = [handle for handle, kind in kinds.items() if kind == "cpu"]
    if memory_bytes is not None:
        for handle in chosen:
            _limit_memory(handle, memory_bytes)
    return {handle: device_of(handle) for handle in chosen}


def _limit_memory(device: int, limit: int) -> None:
    """Replace the function with which GGML asks a device for its memory."""
    functions = _DeviceFunctions.from_address(device)
    get_memory = ctypes.cast(functions.memory, _GET_MEMORY)

    def get_limited_memory(asked: int, free: Any, total: Any) -> None:
        get_memory(asked, free, total)
        free[0] = min(limit, free[0])
        total[0] = min(limit, total[0])

    callback = _GET_MEMORY(get_limited_memory)
    _limits.append(callback)
    functions.memory = ctypes.cast(callback, _POINTER).value


def serve_devices(
    endpoint: str,
    devices: Collection[int],
    n_threads: int,
    cache: Path | None,
) -> None:
    """Compute for clients, one after the other; return only if llama.cpp gives up.

    Args:
        endpoint: The address to listen on.
        devices: GGML's pointers to the devices.
        n_threads: The threads of the CPU.
        cache: The folder that keeps tensors; None: they are not kept.
    """
    start_server = _rpc_procedure(
        b"ggml_backend_rpc_start_server",
        None,
        _TEXT,
        _TEXT,
        _SIZE,
        _SIZE,
        _POINTER,
    )
    folder = None if cache is None else os.fsencode(cache)
    device_list = (_POINTER * len(devices))(*devices)
    start_server(endpoint.encode(), folder, n_threads, len(devices), device_list)
