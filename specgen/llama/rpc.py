"""llama.cpp's RPC backend: use devices of other machines, or offer this machine's devices to them.

llama.cpp's RPC client has no time limit, and ends the process when a connection ends. So every call
that may use a connection is made in a separate thread (`RemoteCalls`). If a worker is lost, that
thread and its native memory are abandoned, and the caller gets a `WorkerLostError`.
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
from specgen.llama.native_failures import abort_listeners, watch_aborts
from specgen.models.files import parts_of, size_of
from specgen.options import Workers
from specgen.system.llama_build import LIBRARY, REINSTALL, Device, stamp_of
from specgen.system.machine import available_memory_bytes, usable_memory
from specgen.system.processes import left_running
from specgen.system.quantities import human_bytes
from specgen.system.worker_probe import check_protocol, lost_among, probe

_POINTER: Any = ctypes.c_void_p
_SIZE: Any = ctypes.c_size_t
_TEXT: Any = ctypes.c_char_p
_SIZE_POINTER: Any = ctypes.POINTER(ctypes.c_size_t)
_CMAKE = 'CMAKE_ARGS="-DGGML_RPC=on -DCMAKE_CXX_FLAGS=-fno-dse"'
_BUILD_HINT = f"in a checkout of specgen: make rpc; with pip: {_CMAKE} {REINSTALL}"
#: A regular expression for the name of the output matrix. Models without one use the embeddings.
_OUTPUT_MATRIX = rb"^(output|token_embd)\.weight$"
#: The maximum time that a worker may take to answer a probe.
_PROBE_TIMEOUT_S = 10.0
_RESTART = "start the worker again (`specgen worker`), then repeat the command"
_SLOW = "if the workers are only slow, --rpc-timeout gives them longer; if not, start them again"


# --- the backend


def load_rpc() -> Any:
    """Return GGML's pointer to the RPC backend, after loading specgen's library if need be.

    Raises:
        BackendError: If this build of llama.cpp has no RPC backend, and specgen's library does not
            exist or was built for another version.
    """
    return built_in_backend() or _load_library(library_path())


def built_in_backend() -> Any:
    """Return the RPC backend that is built in or already loaded; null if there is none."""
    return native.ggml_backend_reg_by_name(b"RPC")


def library_path() -> Path | None:
    """Return the path of specgen's library with the RPC backend; None if it was not built."""
    path = Path(__file__).with_name(LIBRARY)
    return path if path.is_file() else None


def _load_library(path: Path | None) -> Any:
    """Load specgen's library, and return GGML's pointer to its backend.

    Raises:
        BackendError: If there is no library (`path` is None), or it cannot be used.
    """
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
    backend = native.ggml_backend_load(os.fsencode(path))
    if not backend:
        raise BackendError(f"GGML did not accept {path.name}: {last_error()}", _BUILD_HINT)
    return backend


def _rpc_procedure(name: bytes, result: Any, *arguments: Any) -> Any:
    """Return a function of the RPC backend; raise `BackendError` if it has none of this name."""
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
    timeout_s = min(workers.timeout_s, _PROBE_TIMEOUT_S)
    answers = [probe(endpoint, timeout_s) for endpoint in workers.endpoints]
    for worker in answers:
        check_protocol(worker)
    model_bytes = sum(map(size_of, parts_of(file)))
    free_bytes = sum(free for worker in answers for free, _total in worker.devices)
    # With --tensor-split, the user is trusted to know better.
    if free_bytes < model_bytes and not workers.tensor_split:
        raise MemoryLimitError(
            f"{file}: the model has {human_bytes(model_bytes)}, "
            f"but the workers offer only {human_bytes(free_bytes)}",
            "name more workers, or let them offer more (`specgen worker --memory`)",
        )


def load_onto(
    workers: Workers,
    file: Path,
    params: Any,
) -> tuple[Any, RemoteCalls]:
    """Load a model onto workers.

    Args:
        workers: The workers.
        file: The model's first file.
        params: llama.cpp's parameters for loading a model. Devices, placement and a progress
            callback are added.

    Returns:
        llama.cpp's pointer to the model, null if it could not be loaded, and the `RemoteCalls` with
        which all further calls are made.

    Raises:
        WorkerLostError: If a worker is lost.
        BackendError: If a worker offers no device, or there is no RPC backend.
        UsageError: If --tensor-split names more devices than there are.
    """
    remote = RemoteCalls(workers.endpoints, workers.timeout_s)

    def on_progress(_share: float, _data: object) -> bool:
        remote.alive()
        return True  # go on

    progress_callback = llama_cpp.llama_progress_callback(on_progress)
    params.progress_callback = progress_callback
    try:
        devices = _remote_devices(workers.endpoints, remote)
        arrays = _place_layers(params, devices, workers)
        handle = remote(llama_cpp.llama_model_load_from_file, os.fsencode(file), params)
    except BaseException:
        remote.close()
        raise
    # Only now may Python free what llama.cpp read while it loaded the model.
    del arrays, progress_callback
    return handle, remote


def _remote_devices(endpoints: Sequence[str], remote: RemoteCalls) -> list[int]:
    """Connect to workers, and return GGML's pointers to their devices in order.

    They are not added to GGML's list of devices, so that no other model uses them.

    Raises:
        BackendError: If a worker offers no device.
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


def _place_layers(
    params: Any,
    devices: Sequence[int],
    workers: Workers,
) -> list[Any]:
    """Set in `params` which device gets which layers.

    Returns:
        Arrays that the caller must keep alive until the model is loaded.

    Raises:
        UsageError: If --tensor-split names more devices than there are.
    """
    # 1. The devices; a null pointer ends the list.
    device_list = (_POINTER * (len(devices) + 1))(*devices, None)
    params.devices = ctypes.cast(device_list, _POINTER).value
    arrays: list[Any] = [device_list]

    # 2. Their shares of the layers. Without --tensor-split, llama.cpp goes by free memory.
    split = workers.tensor_split
    if split:
        if len(split) > len(devices):
            raise UsageError(
                f"--tensor-split has {len(split)} shares, "
                f"but the workers have {len(devices)} devices"
            )
        shares = (ctypes.c_float * int(llama_cpp.llama_max_devices()))(*split)
        params.tensor_split = shares
        arrays.append(shares)

    # 3. The output matrix on this machine, if that is wanted; an empty entry ends the list.
    if workers.output_here:
        here = native.ggml_backend_cpu_buffer_type()
        placements = (_TensorPlacement * 2)(
            _TensorPlacement(_OUTPUT_MATRIX, here), _TensorPlacement(None, None)
        )
        params.tensor_buft_overrides = ctypes.cast(placements, _POINTER).value
        arrays.append(placements)
    return arrays


# --- calls that may wait for workers

#: All instances that are not closed.
_open: list[RemoteCalls] = []


class RemoteCalls:
    """Makes the native calls of one target in a thread, one at a time.

    If `alive` is not called for `timeout_s` seconds during a call, the call and all later ones are
    given up. (As it is checked once per `timeout_s`, it may take up to twice as long.)
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        timeout_s: float,
    ) -> None:
        self._endpoints = tuple(endpoints)
        self._timeout_s = timeout_s
        #: The thread's tasks: the future that gets the result, and the call. None ends the thread.
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._tasks = queue.SimpleQueue()
        #: The result of the present call; None between calls.
        self._pending: Future[Any] | None = None
        #: Whether `alive` was called since the last check.
        self._is_alive = False
        #: The reason why the workers cannot be called any more, and a hint; None: they can.
        self._lost: tuple[str, str] | None = None
        #: The lost workers; empty until `check` has found out.
        self._lost_names: Sequence[str] = ()
        if _on_abort not in abort_listeners:
            abort_listeners.append(_on_abort)
        watch_aborts()
        _open.append(self)
        self._thread = threading.Thread(target=self._work, name="remote calls", daemon=True)
        self._thread.start()

    def __call__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
    ) -> Any:
        """Call a native function in the thread, and return its result.

        Raises:
            WorkerLostError: If a worker is lost, now or before.
        """
        self.check()
        if threading.current_thread() is self._thread:  # a call within a call
            return function(*arguments)
        self._is_alive = False
        result = Future[Any]()
        self._pending = result
        self._tasks.put((result, partial(function, *arguments)))
        try:
            while not wait([result], self._timeout_s).done:
                if not self._is_alive:
                    self.give_up(f"no answer within {self._timeout_s:g} s", _SLOW)
                self._is_alive = False
        except BaseException:
            # Ctrl-C, for example. The native call continues, so no other call may be made.
            self.give_up("a call to them was interrupted")
            raise
        finally:
            self._pending = None
        self.check()  # `give_up` also sets a result, which must not be returned
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
        """Make the present call and all later ones raise `WorkerLostError`.

        Any thread may call this.
        """
        if self._lost is None:
            self._lost = (reason, hint)
            left_running.set()
        pending = self._pending
        if pending is not None:
            with contextlib.suppress(InvalidStateError):  # the call has ended meanwhile
                pending.set_result(None)  # wakes the caller

    def close(self) -> None:
        """End the thread after its present call. (It never ends if it waits for a lost worker.)"""
        self._tasks.put(None)
        with contextlib.suppress(ValueError):
            _open.remove(self)

    def _work(self) -> None:
        """Make the calls; the thread runs this."""
        while True:
            task = self._tasks.get()
            if task is None:
                return
            result, call = task
            with contextlib.suppress(InvalidStateError):  # the call was given up
                try:
                    result.set_result(call())
                except Exception as error:  # noqa: BLE001 - the caller's thread raises it again
                    result.set_exception(error)


def _on_abort(message: str) -> None:
    """Give up all calls if GGML aborts because a connection ended.

    GGML calls this in the thread of the error, and would end the process afterwards. So after such
    an error this function never returns.
    """
    if "ggml-rpc" not in message:
        return
    reason = "the connection ended"
    if "connect to" in message or "handshake" in message:
        reason = "the connection was refused"
    # The message does not say which connection it was, so all calls to all workers are given up.
    for calls in _open.copy():
        calls.give_up(reason)
    threading.Event().wait()  # forever; meanwhile the caller's thread gets a `WorkerLostError`


# --- this machine's devices for others

_GET_MEMORY = ctypes.CFUNCTYPE(None, _POINTER, _SIZE_POINTER, _SIZE_POINTER)
#: The callbacks of `_limit_memory`, kept for as long as GGML may call them.
_limits: list[Any] = []


class _DeviceFunctions(ctypes.Structure):
    """The beginning of GGML's `ggml_backend_device`: pointers to functions."""

    _fields_ = (("name", _POINTER), ("description", _POINTER), ("memory", _POINTER))


def offered_devices(memory_bytes: int | None) -> dict[int, Device]:
    """Return the devices that this machine offers as a worker, by GGML's pointers.

    These are all GPUs or, without one, the CPU.

    Args:
        memory_bytes: The maximum memory of each device that clients see; None: all of it, on the
            CPU all that this process may use.
    """
    load_rpc()
    kinds = {handle: device_of(handle).kind for handle in native_devices()}
    offered = [handle for handle, kind in kinds.items() if kind not in ("cpu", "accelerator")]
    if not offered:
        offered = [handle for handle, kind in kinds.items() if kind == "cpu"]
        if usable_memory().limit:  # GGML reports the memory of the whole machine
            available_bytes = available_memory_bytes()
            memory_bytes = min(memory_bytes or available_bytes, available_bytes)
    if memory_bytes is not None:
        for handle in offered:
            _limit_memory(handle, memory_bytes)
    return {handle: device_of(handle) for handle in offered}


def _limit_memory(device: int, limit: int) -> None:
    """Let a device report at most `limit` bytes of memory.

    The pointer in GGML's device to the function that reports it is replaced.
    """
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
    """Serve clients, one after the other. It returns only if llama.cpp cannot go on.

    Args:
        endpoint: The address to listen on.
        devices: GGML's pointers to the devices.
        n_threads: The number of threads on the CPU.
        cache: The folder in which received tensors are kept; None: they are not kept.

    Raises:
        BackendError: If there is no RPC backend.
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
