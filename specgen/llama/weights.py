"""The weights of model files: each file is loaded once and shared by its users.

Users are models and contexts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from specgen.errors import (
    MemoryLimitError,
    ModelFileError,
    SpecgenError,
    WorkerLostError,
)
from specgen.llama.kernels.attached import LLAMA_CPP, computing, kernel_problem, loading_with
from specgen.llama.kernels.packed_weights import PackedWeights, packed_weights_of
from specgen.llama.library import forget_log, last_error, llama_cpp
from specgen.llama.vocabulary import LlamaVocabulary
from specgen.options import Workers
from specgen.system.files import version_of

if TYPE_CHECKING:
    from specgen.llama.rpc import RemoteCalls


class WeightsKey(NamedTuple):
    """The file and the load options of weights; users with the same key share them."""

    #: The result of `version_of` for the file.
    version: tuple[int, int, int]
    n_gpu_layers: int
    #: What computes on the CPU, as `computing` names it.
    kernels: str
    vocabulary_only: bool = False
    mtp: bool = False
    workers: Workers | None = None


#: The weights that are in use.
_loaded: dict[WeightsKey, LoadedWeights] = {}
#: The threads of `load_ahead`, by the weights that they load.
_load_ahead_threads: dict[WeightsKey, threading.Thread] = {}


@dataclass(eq=False)
class LoadedWeights:
    """The native model of a file. It counts its users, and is freed after the last one."""

    key: WeightsKey
    #: llama.cpp's pointer; None after the last user has released it.
    handle: Any
    #: Why specgen's kernels cannot compute this model, although they are in use; else empty.
    kernel_problem: str
    #: Makes the native calls if workers have the layers; else None.
    remote: RemoteCalls | None = None
    #: The file of the packed weights; None if they are not kept.
    packed: PackedWeights | None = None
    n_users: int = 1

    @cached_property
    def vocabulary(self) -> LlamaVocabulary:
        """The tokens of the model."""
        return LlamaVocabulary(self.handle)

    @property
    def call(self) -> Callable[..., Any]:
        """A function that makes a native call, which may have to wait for workers."""
        return self.remote or _call_directly

    def share(self) -> LoadedWeights:
        """Count another user."""
        self.n_users += 1
        return self

    def release(self) -> None:
        """Count one user less, and free the model after the last one."""
        self.n_users -= 1
        if self.n_users != 0:
            return
        _loaded.pop(self.key, None)
        if self.packed is not None:
            self.packed.close()
        with contextlib.suppress(WorkerLostError):  # a lost worker's memory stays
            self.call(llama_cpp.llama_model_free, self.handle)
        self.handle = None
        if self.remote is not None:
            self.remote.close()


def _call_directly(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _always() -> bool:
    return True


def lease_weights(
    file: Path,
    n_gpu_layers: int,
    *,
    vocabulary_only: bool = False,
    workers: Workers | None = None,
    mtp: bool = False,
    goes_on: Callable[[], bool] = _always,
) -> LoadedWeights:
    """Return the weights of a file, which are loaded unless they are in use already.

    The caller becomes a user, and calls `release` later.

    Args:
        file: The file.
        n_gpu_layers: The number of layers on the GPU; -1: all.
        vocabulary_only: Whether to load only the vocabulary.
        workers: The workers that get the layers; None: this machine.
        mtp: Whether to load the MTP layers, too.
        goes_on: Called between tensors; loading stops if it returns False.

    Raises:
        ModelFileError: If llama.cpp cannot load the file.
        MemoryLimitError: If it does not fit into memory.
        WorkerLostError: If a worker is lost.
        OSError: If the file cannot be read.
    """
    problem = "" if vocabulary_only else kernel_problem(file)
    kernels = LLAMA_CPP if problem else computing()
    key = WeightsKey(
        version_of(file),
        n_gpu_layers,
        kernels,
        vocabulary_only,
        mtp,
        workers,
    )
    _wait_for_load_ahead(key)
    if key in _loaded:
        return _loaded[key].share()
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = n_gpu_layers
    params.vocab_only = vocabulary_only
    params.load_mtp = mtp
    forget_log()
    if workers is None or vocabulary_only:
        weights = _load_here(
            file,
            key,
            params,
            problem,
            goes_on,
        )
    else:
        weights = _load_onto_workers(
            file,
            key,
            params,
            problem,
            workers,
        )
    _loaded[key] = weights
    return weights


def _load_here(
    file: Path,
    key: WeightsKey,
    params: Any,
    problem: str,
    goes_on: Callable[[], bool],
) -> LoadedWeights:
    """Load a file into the memory of this machine.

    Args:
        file: The file.
        key: The key of the weights.
        params: llama.cpp's parameters for loading a model.
        problem: Why the kernels in use cannot compute the model; empty if they can.
        goes_on: Called between tensors; loading stops if it returns False.

    Raises:
        ModelFileError: If llama.cpp cannot load the file.
        MemoryLimitError: If it does not fit into memory.
        KeyboardInterrupt: If Ctrl-C stopped the loading.
    """
    packed: PackedWeights | None = None
    with ExitStack() as loading:
        loading.enter_context(loading_with(problem))
        if not key.vocabulary_only:
            packed = packed_weights_of(file, n_gpu_layers=key.n_gpu_layers, mtp=key.mtp)
        if packed is not None:
            loading.enter_context(packed.loading())
        loading.enter_context(_interrupt_between_tensors(params, goes_on))
        other_threads = _other_load_ahead_threads()
        handle = llama_cpp.llama_model_load_from_file(os.fsencode(file), params)
        if not handle and other_threads and threading.current_thread() is threading.main_thread():
            # The log mixes lines of all threads. Try again alone, to log the reason of the failure.
            for thread in other_threads:
                thread.join()
            forget_log()
            handle = llama_cpp.llama_model_load_from_file(os.fsencode(file), params)
    if not handle:
        raise _load_error(file, last_error())
    return LoadedWeights(
        key,
        handle,
        problem,
        packed=packed,
    )


def _load_onto_workers(
    file: Path,
    key: WeightsKey,
    params: Any,
    problem: str,
    workers: Workers,
) -> LoadedWeights:
    """Load a file into the memory of workers; for the arguments and errors see `_load_here`.

    Raises:
        WorkerLostError: If a worker is lost.
    """
    from specgen.llama.rpc import check_workers, load_onto

    # Workers in use cannot be checked: they would not answer a second connection.
    used_endpoints: set[str] = set()
    for other_key in _loaded:
        if other_key.workers:
            used_endpoints.update(other_key.workers.endpoints)
    if used_endpoints.isdisjoint(workers.endpoints):
        check_workers(workers, file)
    with loading_with(problem):
        handle, remote = load_onto(workers, file, params)
    if not handle:
        remote.close()
        raise _load_error(file, last_error())
    return LoadedWeights(key, handle, problem, remote)


def _load_error(file: Path, reason: str) -> SpecgenError:
    """Return the error for a file that llama.cpp cannot load, for a reason that it logged."""
    if "allocate" in reason:
        return MemoryLimitError(
            f"{file}: not enough memory for this model: {reason}",
            "close other programs, or use a smaller model or a smaller quantisation",
        )
    hint = "if the download was cut short, fetch the file again; else upgrade specgen"
    if "unknown model architecture" in reason:
        hint = (
            "upgrade specgen, if its llama.cpp is older than the model; else the file is for "
            "another program"
        )
    return ModelFileError(f"{file}: llama.cpp cannot load this model: {reason}", hint)


# --- loading ahead


def load_ahead(file: Path, n_gpu_layers: int) -> Callable[[], None]:
    """Load a file's weights in a thread, while the caller loads something else.

    That saves time, since llama.cpp uses only one core to read a vocabulary. A later call of
    `lease_weights` waits for the thread, and tries again if it failed.

    Args:
        file: A file that `check_file` has checked.
        n_gpu_layers: The number of layers on the GPU; -1: all.

    Returns:
        A function that stops the loading, or releases the loaded weights. Call it once they are
        leased, or not wanted any more; it may be called twice.
    """
    if kernel_problem(file):
        # The kernels would be switched off for all threads while this file is loaded.
        return lambda: None
    key = WeightsKey(version_of(file), n_gpu_layers, computing())
    if key in _load_ahead_threads or key in _loaded:
        return lambda: None
    lease = ExitStack()
    is_wanted = True

    def load() -> None:
        with contextlib.suppress(SpecgenError, OSError):
            weights = lease_weights(file, n_gpu_layers, goes_on=lambda: is_wanted)
            lease.callback(weights.release)

    def end() -> None:
        nonlocal is_wanted
        is_wanted = False
        thread.join()
        if _load_ahead_threads.get(key) is thread:
            del _load_ahead_threads[key]
        lease.close()

    thread = threading.Thread(
        target=load,
        name="load ahead",
        daemon=True,
    )
    _load_ahead_threads[key] = thread
    thread.start()
    return end


def _wait_for_load_ahead(key: WeightsKey) -> None:
    """Wait for another thread that is loading these weights, if there is one."""
    thread = _load_ahead_threads.get(key)
    if thread is not None and thread is not threading.current_thread():
        thread.join()


def _other_load_ahead_threads() -> list[threading.Thread]:
    current = threading.current_thread()
    return [thread for thread in _load_ahead_threads.values() if thread is not current]


@contextlib.contextmanager
def _interrupt_between_tensors(params: Any, goes_on: Callable[[], bool]) -> Iterator[None]:
    """Let Ctrl-C or `goes_on` stop the loading in the block.

    The handler of Ctrl-C only makes the progress callback return False, and KeyboardInterrupt is
    raised after the block: ctypes would print and lose an exception in a callback.
    """
    is_interrupted = False

    def on_interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_interrupted
        is_interrupted = True

    def on_progress(_share: float, _data: object) -> bool:
        return not is_interrupted and goes_on()

    # This reference keeps the callback alive until llama.cpp is done.
    callback = llama_cpp.llama_progress_callback(on_progress)
    params.progress_callback = callback
    # Only the main thread can set a handler. A handler that the program has set is kept.
    handler = signal.getsignal(signal.SIGINT)
    is_main_thread = threading.current_thread() is threading.main_thread()
    handles_interrupt = is_main_thread and handler is signal.default_int_handler
    if handles_interrupt:
        signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        if handles_interrupt:
            signal.signal(signal.SIGINT, handler)
        if is_interrupted:
            raise KeyboardInterrupt
