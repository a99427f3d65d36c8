"""The weights of model files: each file is loaded once and shared by its users.

Users are models and contexts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
from specgen.llama.kernels.packed_weights import (
    PackedWeights,
    must_stream,
    packed_weights_of,
    weight_sizes,
)
from specgen.llama.library import forget_log, has_gpu, last_error, llama_cpp
from specgen.llama.vocabulary import LlamaVocabulary
from specgen.options import Workers
from specgen.system.files import version_of

if TYPE_CHECKING:
    from specgen.llama.rpc import RemoteCalls


class WeightsKey(NamedTuple):
    """The file and the load options of weights; users with the same key share them."""

    #: The result of `version_of` for the file.
    version: tuple[int, int, int]
    #: The number of layers on the GPU; -1: all.
    n_gpu_layers: int
    #: What computes on the CPU, as `computing` names it.
    kernels: str
    #: Whether only the vocabulary is loaded.
    vocabulary_only: bool = False
    #: Whether the MTP layers are loaded, too.
    mtp: bool = False
    #: The workers that have the layers; None: this machine.
    workers: Workers | None = None


_log = logging.getLogger("specgen.llama.weights")
#: The weights that are in use.
_loaded: dict[WeightsKey, LoadedWeights] = {}
#: The threads of `load_ahead`, by the weights that they load.
_load_ahead_threads: dict[WeightsKey, threading.Thread] = {}


@dataclass(eq=False)
class LoadedWeights:
    """The native model of a file. It counts its users, and is freed after the last one."""

    #: The file, and how it was loaded.
    key: WeightsKey
    #: llama.cpp's pointer; None after the last user has released it.
    handle: Any
    #: Why specgen's kernels cannot compute this model, although they are in use; else empty.
    kernel_problem: str
    #: Makes the native calls if workers have the layers; else None.
    remote: RemoteCalls | None = None
    #: The file of the packed weights; None if they are not kept.
    packed: PackedWeights | None = None
    #: The bytes of weights that each pass over the model reads from the disk; 0 if all of them stay
    #: in memory.
    streamed_bytes: int = 0
    #: Whether the system reads the weights from the model's own file as they are needed, because
    #: they exceed the memory that they may use and cannot be streamed.
    is_unpacked: bool = False
    #: The number of models and contexts that use it.
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


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """How weights are loaded. None of it changes what they are."""

    #: The bytes of weights that may stay in memory; None: all.
    weights_bytes: int | None = None
    #: Called between tensors; loading stops if it returns False.
    goes_on: Callable[[], bool] = _always
    #: Called between tensors while streamed weights are packed, with the bytes that are packed and
    #: the bytes in all.
    on_packing: Callable[[int, int], None] | None = None


def lease_weights(
    file: Path,
    n_gpu_layers: int,
    *,
    vocabulary_only: bool = False,
    workers: Workers | None = None,
    mtp: bool = False,
    weights_bytes: int | None = None,
    goes_on: Callable[[], bool] = _always,
    on_packing: Callable[[int, int], None] | None = None,
) -> LoadedWeights:
    """Return the weights of a file, which are loaded unless they are in use already.

    The caller becomes a user, and calls `release` later. Weights that exceed `weights_bytes` are
    streamed: an equal share of each layer stays in memory, and each pass over the model reads the
    rest from a file of packed weights. Without such a file and without room for one, or if the
    kernels do not compute the model, the system reads the model's own file: see
    `LoadedWeights.is_unpacked`.

    Args:
        file: The file.
        n_gpu_layers: The number of layers on the GPU; -1: all.
        vocabulary_only: Whether to load only the vocabulary.
        workers: The workers that get the layers; None: this machine.
        mtp: Whether to load the MTP layers, too.
        weights_bytes: The bytes of weights that may stay in memory; None: all. It has no effect on
            weights that are in use already, or that workers get.
        goes_on: Called between tensors; loading stops if it returns False.
        on_packing: Called between tensors while streamed weights are packed, with the bytes that
            are packed and the bytes in all. Weights that were packed before do not call it.

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
        weights = _load_here(
            file,
            key,
            params,
            problem,
            LoadSettings(weights_bytes, goes_on, on_packing),
        )
    else:
        weights = _load_onto_workers(file, key, params, problem, workers)
    _loaded[key] = weights
    return weights


def _load_here(
    file: Path,
    key: WeightsKey,
    params: Any,
    problem: str,
    settings: LoadSettings,
) -> LoadedWeights:
    """Load a file into the memory of this machine.

    Args:
        file: The file.
        key: The key of the weights.
        params: llama.cpp's parameters for loading a model.
        problem: Why the kernels in use cannot compute the model; empty if they can.
        settings: How it is loaded.

    Raises:
        ModelFileError: If llama.cpp cannot load the file.
        MemoryLimitError: If it does not fit into memory.
        KeyboardInterrupt: If Ctrl-C stopped the loading.
    """
    weights = LoadedWeights(key, handle=None, kernel_problem=problem)
    with loading_with(problem):
        if key.vocabulary_only:
            weights.handle = _load_native(file, params, settings)
        else:
            _load_packed(weights, file, params, settings)
            if not weights.handle and weights.packed is None:
                _load_unpacked(weights, file, params, settings)
    if not weights.handle:
        if weights.packed is not None:
            weights.packed.discard()
        raise _load_error(file, last_error())
    return weights


def _load_packed(
    weights: LoadedWeights,
    file: Path,
    params: Any,
    settings: LoadSettings,
) -> None:
    """Load weights with their file of packed weights, if they have one or get one."""
    # Without a GPU, the number has no effect, and all choices of it share a file.
    n_gpu_layers = weights.key.n_gpu_layers if has_gpu() else -1
    packed = packed_weights_of(
        file,
        settings.weights_bytes,
        n_gpu_layers=n_gpu_layers,
        mtp=weights.key.mtp,
    )
    if packed is None:
        return
    try:
        weights.handle = packed.load(lambda: _load_native(file, params, settings, packed))
    except OSError as error:
        _log.info("weights are not packed: %s", error)
        packed.discard()
        return
    except BaseException:
        packed.discard()
        raise
    weights.packed = packed
    weights.streamed_bytes = packed.streamed_bytes


def _load_unpacked(
    weights: LoadedWeights,
    file: Path,
    params: Any,
    settings: LoadSettings,
) -> None:
    """Load weights without a file of packed weights.

    Those that fit into memory are packed there, if the kernels compute. The others stay in the
    mapped file.
    """
    if must_stream(file, settings.weights_bytes):
        weights.is_unpacked = True
        # Least recently used pages leave the memory first, so that a pass finds none of those that
        # the last one read.
        weights.streamed_bytes = weight_sizes(file).file_bytes
        # llama.cpp's layouts of weights are not files either.
        params.use_extra_bufts = False
        settings = replace(settings, on_packing=None)
    weights.handle = _load_native(file, params, settings)


def _load_native(
    file: Path,
    params: Any,
    settings: LoadSettings,
    packed: PackedWeights | None = None,
) -> Any:
    """Load a file with llama.cpp.

    Args:
        file: The file.
        params: llama.cpp's parameters for loading a model.
        settings: How it is loaded.
        packed: The file of packed weights that is used or made; None: there is none.

    Returns:
        llama.cpp's pointer to the model; None if it cannot be loaded, or loading was stopped.

    Raises:
        KeyboardInterrupt: If Ctrl-C stopped the loading.
    """

    def load() -> Any:
        return llama_cpp.llama_model_load_from_file(os.fsencode(file), params)

    progress = _LoadProgress(file, settings, packed)
    with _interrupt_between_tensors(params, progress.goes_on):
        threads_ahead = list(_load_ahead_threads.values())
        handle = load()
        is_main_thread = threading.current_thread() is threading.main_thread()
        if not handle and threads_ahead and is_main_thread and progress.goes_on(0.0):
            # The log mixes lines of all threads. Try again alone, to log the reason of the failure.
            # (That of a thread of `load_ahead` is of no interest: its file is leased again later.)
            for thread in threads_ahead:
                thread.join()
            forget_log()
            handle = load()
    # The problem may be with the last tensor.
    if handle and packed is not None and packed.has_problem:
        llama_cpp.llama_model_free(handle)
        return None
    return handle


class _LoadProgress:
    """Reports how much of a model is packed, and decides whether its loading goes on."""

    def __init__(
        self,
        file: Path,
        settings: LoadSettings,
        packed: PackedWeights | None,
    ) -> None:
        """Begin to load.

        Args:
            file: The file.
            settings: How it is loaded.
            packed: The file of packed weights; None: there is none.
        """
        self._settings = settings
        self._packed = packed
        #: The bytes that are packed in all; 0 if they need not be reported.
        self._n_bytes = 0
        is_stored = packed is not None and packed.is_stored
        is_limited = settings.weights_bytes is not None
        if settings.on_packing is not None and is_limited and not is_stored:
            self._n_bytes = weight_sizes(file).packed_bytes

    def goes_on(self, share: float) -> bool:
        """Return whether loading goes on after a share of the model."""
        if self._n_bytes and self._settings.on_packing is not None:
            self._settings.on_packing(int(share * self._n_bytes), self._n_bytes)
        has_problem = self._packed is not None and self._packed.has_problem
        return not has_problem and self._settings.goes_on()


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

    thread = threading.Thread(target=load, name="load ahead", daemon=True)
    _load_ahead_threads[key] = thread
    thread.start()
    return end


def _wait_for_load_ahead(key: WeightsKey) -> None:
    """Wait for another thread that is loading these weights, if there is one."""
    thread = _load_ahead_threads.get(key)
    if thread is not None and thread is not threading.current_thread():
        thread.join()


@contextlib.contextmanager
def _interrupt_between_tensors(params: Any, goes_on: Callable[[float], bool]) -> Iterator[None]:
    """Let Ctrl-C or `goes_on`, which gets the share that is loaded, stop the loading in the block.

    The handler of Ctrl-C only makes the progress callback return False, and KeyboardInterrupt is
    raised after the block: ctypes would print and lose an exception in a callback.
    """
    is_interrupted = False

    def on_interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_interrupted
        is_interrupted = True

    def on_progress(share: float, _data: object) -> bool:
        return not is_interrupted and goes_on(share)

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
