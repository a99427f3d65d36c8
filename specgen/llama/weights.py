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


class _Key(NamedTuple):
    """What loaded weights are known by; the `version` is that of the file."""

    version: tuple[int, int, int]
    n_gpu_layers: int
    kernels: str
    vocabulary_only: bool = False
    mtp: bool = False
    workers: Workers | None = None


_loaded: dict[_Key, LoadedWeights] = {}
#: The threads of `load_ahead`.
_ahead: dict[_Key, threading.Thread] = {}


@dataclass(eq=False)
class LoadedWeights:
    """The native model of a file (`lease_weights`). It counts its users, and is freed with the last
    one.
    """

    key: _Key
    #: llama.cpp's pointer.
    handle: Any
    #: Why specgen's kernels do not compute this model although they compute others; empty if they
    #: do.
    kernel_problem: str
    #: Makes the calls that may wait for workers; None if this machine has all layers.
    remote: RemoteCalls | None = None
    packed: PackedWeights | None = None
    n_users: int = 1

    @cached_property
    def vocabulary(self) -> LlamaVocabulary:
        return LlamaVocabulary(self.handle)

    def share(self) -> LoadedWeights:
        self.n_users += 1
        return self

    def release(self) -> None:
        self.n_users -= 1
        if self.n_users == 0:
            _loaded.pop(self.key, None)
            if self.packed is not None:
                self.packed.close()
            with contextlib.suppress(WorkerLostError):  # a lost worker's memory stays
                self.call(llama_cpp.llama_model_free, self.handle)
            self.handle = None
            if self.remote is not None:
                self.remote.close()

    @property
    def call(self) -> Callable[..., Any]:
        return self.remote or (lambda function, *arguments: function(*arguments))


def lease_weights(
    file: Path,
    n_gpu_layers: int,
    *,
    vocabulary_only: bool = False,
    workers: Workers | None = None,
    mtp: bool = False,
    goes_on: Callable[[], bool] = lambda: True,
) -> LoadedWeights:
    """Return the weights of a file, or its vocabulary only, loaded if nothing uses them already;
    the caller is a user. `goes_on` is asked between tensors. Raise `ModelFileError`,
    `MemoryLimitError`, `WorkerLostError`, `OSError`.
    """
    problem = "" if vocabulary_only else kernel_problem(file)
    kernels = LLAMA_CPP if problem else computing()
    key = _Key(version_of(file), n_gpu_layers, kernels, vocabulary_only, mtp, workers)
    others = [each for each in _ahead.values() if each is not threading.current_thread()]
    if _ahead.get(key) in others:
        _ahead[key].join()
    if (known := _loaded.get(key)) is not None:
        return known.share()
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = n_gpu_layers
    params.vocab_only = vocabulary_only
    params.load_mtp = mtp
    forget_log()
    remote: RemoteCalls | None = None
    packed: PackedWeights | None = None
    if workers is None or vocabulary_only:
        with ExitStack() as loading:
            loading.enter_context(loading_with(problem))
            if not vocabulary_only:
                packed = packed_weights_of(file, n_gpu_layers=n_gpu_layers, mtp=mtp)
            if packed is not None:
                loading.enter_context(packed.loading())
            loading.enter_context(_interrupt_between_tensors(params, goes_on))
            handle = llama_cpp.llama_model_load_from_file(os.fsencode(file), params)
            if not handle and others and threading.current_thread() is threading.main_thread():
                # The log has lines of the others too. A second attempt, alone, finds the reason.
                for thread in others:
                    thread.join()
                forget_log()
                handle = llama_cpp.llama_model_load_from_file(os.fsencode(file), params)
    else:
        from specgen.llama.rpc import check_workers, load_onto

        held = {name for each in _loaded if each.workers for name in each.workers.endpoints}
        # A worker that serves this process already would not answer a second connection.
        if held.isdisjoint(workers.endpoints):
            check_workers(workers, file)
        with loading_with(problem):
            handle, remote = load_onto(workers, file, params)
    if not handle:
        if remote is not None:
            remote.close()
        raise _load_error(file, last_error())
    weights = _loaded[key] = LoadedWeights(key, handle, problem, remote, packed)
    return weights


def _load_error(file: Path, reason: str) -> SpecgenError:
    if "allocate" in reason:
        hint = "close other programs, or use a smaller model or a smaller quantisation"
        return MemoryLimitError(f"{file}: not enough memory for this model: {reason}", hint)
    hint = "if the download was cut short, fetch the file again; else upgrade specgen"
    if "unknown model architecture" in reason:
        hint = "this llama.cpp is older than the model: upgrade specgen"
    return ModelFileError(f"{file}: llama.cpp cannot load this model: {reason}", hint)


def load_ahead(file: Path, n_gpu_layers: int) -> Callable[[], None]:
    """Load a checked file's weights in a thread, for which `lease_weights` waits and whose errors
    it raises: llama.cpp uses one core for the vocabulary. Return what ends this use of the weights;
    it may be called twice.
    """
    if kernel_problem(file):  # kernels are switched off for the whole process while it is loaded
        return lambda: None
    key = _Key(version_of(file), n_gpu_layers, computing())
    if key in _ahead or key in _loaded:
        return lambda: None
    held = ExitStack()
    is_wanted = True

    def load() -> None:
        with contextlib.suppress(SpecgenError, OSError):
            held.callback(lease_weights(file, n_gpu_layers, goes_on=lambda: is_wanted).release)

    def end() -> None:
        nonlocal is_wanted
        is_wanted = False
        thread.join()
        if _ahead.get(key) is thread:
            del _ahead[key]
        held.close()

    thread = _ahead[key] = threading.Thread(target=load, name="load ahead", daemon=True)
    thread.start()
    return end


@contextlib.contextmanager
def _interrupt_between_tensors(params: Any, goes_on: Callable[[], bool]) -> Iterator[None]:
    """Let Ctrl-C, or in another thread `goes_on`, stop the loading. The progress callback only asks
    for a stop, and KeyboardInterrupt is raised afterwards: in the callback, ctypes would print and
    lose it.
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
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    is_ours = is_main and before is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, before)
        if is_stopped:
            raise KeyboardInterrupt
