"""The weights of model files: each file is loaded once and shared by all its users."""

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
    """What loaded weights are known by."""

    #: That of the file.
    version: tuple[int, int, int]
    n_gpu_layers: int
    #: What computes on the CPU, as `computing` names it.
    kernels: str
    vocabulary_only: bool = False
    mtp: bool = False
    workers: Workers | None = None


#: The weights that are in use.
_loaded: dict[WeightsKey, LoadedWeights] = {}
#: The threads of `load_ahead`.
_ahead: dict[WeightsKey, threading.Thread] = {}


@dataclass(eq=False)
class LoadedWeights:
    """The native model of a file. It counts its users, and is freed with the last one."""

    key: WeightsKey
    #: llama.cpp's pointer.
    handle: Any
    #: Why specgen's kernels do not compute this model although they compute others; empty if they
    #: do.
    kernel_problem: str
    #: Makes the calls that may wait for workers; None if this machine has all layers.
    remote: RemoteCalls | None = None
    #: The file of the packed weights; None if none is kept.
    packed: PackedWeights | None = None
    #: Models and contexts that need it.
    n_users: int = 1

    @cached_property
    def vocabulary(self) -> LlamaVocabulary:
        """The tokens of the model."""
        return LlamaVocabulary(self.handle)

    @property
    def call(self) -> Callable[..., Any]:
        """Makes a native call, which may have to wait for workers."""
        return self.remote or _call_directly

    def share(self) -> LoadedWeights:
        """Count another user."""
        self.n_users += 1
        return self

    def release(self) -> None:
        """Count a user less, and free the model with the last one."""
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
    """Return the weights of a file, loaded if nothing uses them already. The caller is a user.

    Args:
        file: The file.
        n_gpu_layers: The layers on the GPU; -1: all.
        vocabulary_only: Load only the vocabulary.
        workers: The workers that get the layers; None: this machine.
        mtp: Load the MTP layers, too.
        goes_on: Asked between tensors whether to go on.

    Raises:
        ModelFileError: If llama.cpp cannot load the file.
        MemoryLimitError: If it does not fit into memory.
        WorkerLostError: If a worker is lost.
        OSError: If the file cannot be read.
    """
    problem = "" if vocabulary_only else kernel_problem(file)
    kernels = LLAMA_CPP if problem else computing()
    key = WeightsKey(version_of(file), n_gpu_layers, kernels, vocabulary_only, mtp, workers)
    _wait_for_load_ahead(key)
    if key in _loaded:
        return _loaded[key].share()
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = n_gpu_layers
    params.vocab_only = vocabulary_only
    params.load_mtp = mtp
    forget_log()
    if workers is None or vocabulary_only:
        weights = _load_here(file, key, params, problem, goes_on)
    else:
        weights = _load_onto_workers(file, key, params, problem, workers)
    _loaded[key] = weights
    return weights


def _load_here(
    file: Path,
    key: WeightsKey,
    params: Any,
    problem: str,
    goes_on: Callable[[], bool],
) -> LoadedWeights:
    """Load a file into the memory of this machine."""
    packed: PackedWeights | None = None
    with ExitStack() as loading:
        loading.enter_context(loading_with(problem))
        if not key.vocabulary_only:
            packed = packed_weights_of(file, n_gpu_layers=key.n_gpu_layers, mtp=key.mtp)
        if packed is not None:
            loading.enter_context(packed.loading())
        loading.enter_context(_interrupt_between_tensors(params, goes_on))
        others = _other_load_ahead_threads()
        handle = llama_cpp.llama_model_load_from_file(os.fsencode(file), params)
        if not handle and others and threading.current_thread() is threading.main_thread():
            # The log has lines of the others, too. A second attempt, alone, finds the reason.
            for thread in others:
                thread.join()
            forget_log()
            handle = llama_cpp.llama_model_load_from_file(os.fsencode(file), params)
    if not handle:
        raise _load_error(file, last_error())
    return LoadedWeights(key, handle, problem, packed=packed)


def _load_onto_workers(
    file: Path,
    key: WeightsKey,
    params: Any,
    problem: str,
    workers: Workers,
) -> LoadedWeights:
    """Load a file into the memory of workers."""
    from specgen.llama.rpc import check_workers, load_onto

    # A worker that serves this process already would not answer a second connection.
    in_use = {name for each in _loaded if each.workers for name in each.workers.endpoints}
    if in_use.isdisjoint(workers.endpoints):
        check_workers(workers, file)
    with loading_with(problem):
        handle, remote = load_onto(workers, file, params)
    if not handle:
        remote.close()
        raise _load_error(file, last_error())
    return LoadedWeights(key, handle, problem, remote)


def _load_error(file: Path, reason: str) -> SpecgenError:
    if "allocate" in reason:
        return MemoryLimitError(
            f"{file}: not enough memory for this model: {reason}",
            "close other programs, or use a smaller model or a smaller quantisation",
        )
    hint = "if the download was cut short, fetch the file again; else upgrade specgen"
    if "unknown model architecture" in reason:
        hint = "this llama.cpp is older than the model: upgrade specgen"
    return ModelFileError(f"{file}: llama.cpp cannot load this model: {reason}", hint)


# --- loading ahead


def load_ahead(file: Path, n_gpu_layers: int) -> Callable[[], None]:
    """Load a checked file's weights in a thread, while something else is loaded.

    That pays since llama.cpp uses one core to read a vocabulary. `lease_weights` waits for the
    thread, and raises its errors again.

    Returns:
        What ends this use of the weights; it may be called twice.
    """
    if kernel_problem(file):  # kernels are switched off for the whole process while it is loaded
        return lambda: None
    key = WeightsKey(version_of(file), n_gpu_layers, computing())
    if key in _ahead or key in _loaded:
        return lambda: None
    held = ExitStack()
    is_wanted = True

    def load() -> None:
        with contextlib.suppress(SpecgenError, OSError):
            weights = lease_weights(file, n_gpu_layers, goes_on=lambda: is_wanted)
            held.callback(weights.release)

    def end() -> None:
        nonlocal is_wanted
        is_wanted = False
        thread.join()
        if _ahead.get(key) is thread:
            del _ahead[key]
        held.close()

    thread = threading.Thread(target=load, name="load ahead", daemon=True)
    _ahead[key] = thread
    thread.start()
    return end


def _wait_for_load_ahead(key: WeightsKey) -> None:
    """Wait until another thread has loaded these weights, if one does."""
    thread = _ahead.get(key)
    if thread is not None and thread is not threading.current_thread():
        thread.join()


def _other_load_ahead_threads() -> list[threading.Thread]:
    current = threading.current_thread()
    return [thread for thread in _ahead.values() if thread is not current]


@contextlib.contextmanager
def _interrupt_between_tensors(params: Any, goes_on: Callable[[], bool]) -> Iterator[None]:
    """Let Ctrl-C or `goes_on` stop the loading.

    The progress callback only asks for a stop, and KeyboardInterrupt is raised afterwards: in the
    callback, ctypes would print and lose it.
    """
    is_stopped = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_stopped
        is_stopped = True

    def go_on(_share: float, _data: object) -> bool:
        return not is_stopped and goes_on()

    # Keep the callback until llama.cpp is done, which would call freed memory otherwise.
    callback = llama_cpp.llama_progress_callback(go_on)
    params.progress_callback = callback
    # Only the main thread may set a handler, and that of a program stays.
    handler = signal.getsignal(signal.SIGINT)
    is_main_thread = threading.current_thread() is threading.main_thread()
    handles_interrupt = is_main_thread and handler is signal.default_int_handler
    if handles_interrupt:
        signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        if handles_interrupt:
            signal.signal(signal.SIGINT, handler)
        if is_stopped:
            raise KeyboardInterrupt
