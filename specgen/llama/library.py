"""Load the native library (llama-cpp-python, or what the wheel carries of it), keep its log for
error messages, describe its build, and report its end. The package imports llama_cpp from here.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import importlib
import os
import platform
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from specgen.errors import BackendError, MemoryLimitError, SpecgenError
from specgen.system.llama_build import BUNDLE, REBUILD, Build, Device, uses_bundle

# An assertion that fails in llama.cpp would call a debugger, which writes into the answer.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")
# A thread of GCC's OpenMP spins for 7 ms before it sleeps, on a core that the thread it waits for
# may need. The spins of other processors are much shorter.
if platform.machine() == "x86_64" and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
try:
    if TYPE_CHECKING or not uses_bundle():
        import llama_cpp
        from llama_cpp import llama_cpp_ext
    else:
        llama_cpp = importlib.import_module(BUNDLE)
        llama_cpp_ext = importlib.import_module(f"{BUNDLE}.llama_cpp_ext")
except (ImportError, OSError, RuntimeError) as error:
    own = os.environ.get("LLAMA_CPP_LIB_PATH")
    where = f" from LLAMA_CPP_LIB_PATH={own}" if own else ""
    hint = "name a folder with its libraries, or unset it" if own else REBUILD
    raise BackendError(f"llama-cpp-python cannot be loaded{where}: {error}", hint) from error

LogSink = Callable[[str], None]

_log_lines: collections.deque[str] = collections.deque(maxlen=200)
_log_sinks: list[LogSink] = []


def _on_log(_level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
    line = text.decode("utf-8", "replace")
    _log_lines.append(line)
    for sink in _log_sinks[-1:]:
        sink(line)


# The module keeps the callback alive: llama.cpp would call freed memory otherwise.
_log_callback = llama_cpp.llama_log_callback(_on_log)
llama_cpp.llama_log_set(_log_callback, ctypes.c_void_p(0))


@contextlib.contextmanager
def logging_to(sink: LogSink) -> Iterator[None]:
    """Pass llama.cpp's log to `sink`, piece by piece, inside this context. Outside, it is not
    shown.
    """
    _log_sinks.append(sink)
    try:
        yield
    finally:
        _log_sinks.pop()


def forget_log() -> None:
    """Clear the log. Call it before a native call whose failure `last_error` is to explain."""
    _log_lines.clear()


def last_error() -> str:
    """Return the error that llama.cpp logged since `forget_log`, as one line."""
    lines = "".join(_log_lines).splitlines()
    complaints = [line for line in lines if "error" in line.lower() or "failed" in line.lower()]
    if complaints:  # the first one names the cause, those after it only pass it on
        return complaints[0].strip()
    return lines[-1].strip() if lines else "it does not say why"


@functools.cache
def ggml(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of the GGML libraries, which llama-cpp-python does not declare. Raise
    `BackendError`. Of several copies in a wheel, the one to which llama.cpp is linked has the
    devices.
    """
    for library in _ggml_libraries():
        with contextlib.suppress(AttributeError):
            function = library[name]
            function.restype, function.argtypes = result, arguments
            return function
    raise BackendError(f"this build of llama.cpp has no function {name}", hint=REBUILD)


def set_layer_input(context: Any, layer: int, wanted: bool) -> None:
    """Hand out what a layer reads. llama.cpp ends the process unless the architecture is in
    `HOOKED`.
    """
    types = (ctypes.c_uint32, ctypes.c_bool)
    _extension("set", None, "P13llama_contextjb", *types)(context, layer, wanted)


def layer_input(context: Any, layer: int) -> Any:
    """Return a pointer to what a layer has read in the last decode: float[n_rows, n_embd]."""
    found = ctypes.POINTER(ctypes.c_float)
    return _extension("get", found, "P13llama_contextj", ctypes.c_uint32)(context, layer)


@functools.cache
def _extension(verb: str, result: Any, types: str, *arguments: Any) -> Any:
    """Return a function of llama.cpp's llama-ext.h, exported under its C++ name. Raise
    `BackendError`.
    """
    name = f"llama_{verb}_embeddings_layer_inp"
    of_windows = {
        "set": f"?{name}@@YAXPEAUllama_context@@I_N@Z",
        "get": f"?{name}@@YAPEAMPEAUllama_context@@I@Z",
    }
    with contextlib.suppress(BackendError):
        return ggml(f"_Z{len(name)}{name}{types}", result, ctypes.c_void_p, *arguments)
    return ggml(of_windows[verb], result, ctypes.c_void_p, *arguments)


def procedure(registry: Any, name: bytes, result: Any, *arguments: Any) -> Any:
    """Return a function of a backend, which may be in a library of its own; None if it has none of
    that name.
    """
    types = 2 * (ctypes.c_void_p,)
    find = ggml("ggml_backend_reg_get_proc_address", *types, ctypes.c_char_p)
    address = find(registry, name)
    return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None


def _ggml_libraries() -> Iterator[Any]:
    """Yield llama.cpp's library, which mostly also finds the symbols of the libraries that it is
    linked to, then these.
    """
    yield llama_cpp.llama_cpp._lib  # noqa: SLF001
    extensions = importlib.import_module(f"{llama_cpp.__name__}._ctypes_extensions")
    for name in ("ggml", "ggml-base", "ggml-cpu"):
        with contextlib.suppress(OSError, RuntimeError):
            yield extensions.load_shared_library(name, native_folder())


def native_folder() -> Path:
    return Path(llama_cpp.llama_cpp._base_path)  # noqa: SLF001


def _load_backends() -> None:
    """Load backends that are libraries of their own, and the one of `GGML_BACKEND_PATH`. Raise
    `BackendError`.
    """
    if not ggml("ggml_backend_reg_count", ctypes.c_size_t)():
        load = ggml("ggml_backend_load_all_from_path", None, ctypes.c_char_p)
        load(os.fsencode(native_folder()))
    elif path := os.environ.get("GGML_BACKEND_PATH"):
        load = ggml("ggml_backend_load", ctypes.c_void_p, ctypes.c_char_p)
        if not load(os.fsencode(path)):
            raise BackendError(f"{path} (GGML_BACKEND_PATH) cannot be loaded: {last_error()}")


_load_backends()
llama_cpp.llama_backend_init()


# --- the build and its devices --------------------------------------------------------------------

_DEVICE_KINDS = {0: "cpu", 1: "gpu", 2: "integrated gpu", 3: "accelerator", 4: "meta"}


def build() -> Build:
    return Build(
        version=llama_cpp.__version__,
        llama_version=llama_cpp.llama_version().decode("utf-8", "replace"),
        system_info=llama_cpp.llama_print_system_info().decode("utf-8", "replace").strip(" |\n"),
        gpu_offload=has_gpu(),
        devices=tuple(map(device_of, native_devices())),
    )


def has_gpu() -> bool:
    offloads = bool(llama_cpp.llama_supports_gpu_offload())
    # With the RPC backend loaded, `llama_supports_gpu_offload` is true on any machine.
    if offloads and llama_cpp.llama_supports_rpc():
        return any("gpu" in device.kind for device in map(device_of, native_devices()))
    return offloads


def native_devices() -> list[int]:
    get = ggml("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    return [get(index) for index in range(ggml("ggml_backend_dev_count", ctypes.c_size_t)())]


def device_of(handle: int) -> Device:
    name, description = (
        ggml(f"ggml_backend_dev_{what}", ctypes.c_char_p, ctypes.c_void_p)(handle) or b""
        for what in ("name", "description")
    )
    kind = ggml("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)(handle)
    size_p = ctypes.POINTER(ctypes.c_size_t)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    memory = ggml("ggml_backend_dev_memory", None, ctypes.c_void_p, *2 * (size_p,))
    memory(handle, ctypes.byref(free), ctypes.byref(total))
    return Device(
        name=name.decode("utf-8", "replace"),
        kind=_DEVICE_KINDS.get(kind, "other"),
        description=description.decode("utf-8", "replace"),
        memory_bytes=total.value,
        free_bytes=free.value,
    )


# --- if native code ends the process --------------------------------------------------------------

#: Called with the message of a failed assertion, in the thread that failed. Whoever can go on never
#: returns.
abort_listeners: list[Callable[[str], None]] = []
#: Called first if native code ends the process, and the callbacks, kept for as long as they may be
#: called.
_before_end: list[Callable[[], None]] = []
_callbacks: list[Any] = []
_ending = threading.Lock()
_IN_SOURCE = re.compile(r"(?:\S*[/\\])?(\S+?:\d+): ")
_ASSERTED = "the model file may be damaged: fetch or convert it again; -v shows what failed"
#: Part of the assertion with which GGML checks that memory was allocated.
_NO_MEMORY = "mem_buffer != NULL"
_SMALLER = "close other programs, or take a smaller model or --ctx-size"
_SHORTER = "put the whole file back, or fetch the model again"


@functools.cache
def watch_aborts() -> None:
    """Let GGML call `abort_listeners` before it ends the process."""
    _callbacks.append(ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_on_abort))
    set_callback = ggml("ggml_set_abort_callback", ctypes.c_void_p, ctypes.c_void_p)
    set_callback(ctypes.cast(_callbacks[-1], ctypes.c_void_p))


def end_with_a_line(before_end: Callable[[], None] = lambda: None) -> None:
    """Print one line and a hint on standard error if native code ends the process, and exit with
    the code of a `BackendError` or `MemoryLimitError`. `before_end` is called first, to write
    pending output. Call it once.
    """
    if _before_end:
        return
    _before_end.append(before_end)
    watch_aborts()
    if hasattr(signal, "SIGBUS"):
        # Set through the C library: Python's handler would run only after the failed instruction,
        # for ever.
        _callbacks.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(_on_bus_error))
        ctypes.CDLL(None).signal(signal.SIGBUS, _callbacks[-1])


def gave_up(message: str) -> str:
    """Return where llama.cpp gave up, by GGML's own `message` of a failed assertion, which tells
    users nothing.
    """
    found = _IN_SOURCE.match(message.strip())
    return f"llama.cpp gave up at {found[1]}" if found else "llama.cpp gave up"


def _on_abort(message: bytes | None) -> None:
    reason = (message or b"it gives no reason").decode("utf-8", "replace")
    for listener in abort_listeners:
        listener(reason)
    if not _before_end:
        os.write(2, f"{reason}\n".encode())
    elif _NO_MEMORY in reason:
        _end(f"there is not enough memory: {gave_up(reason)}", _SMALLER, MemoryLimitError)
    else:
        if _log_sinks:
            _log_sinks[-1](f"{reason.rstrip()}\n")
        _end(gave_up(reason), _ASSERTED)


def _on_bus_error(_number: int) -> None:
    _end("a file became shorter while it was read: a model, most likely", _SHORTER)


def _end(message: str, hint: str, kind: type[SpecgenError] = BackendError) -> NoReturn:
    _ending.acquire()  # never released: if several threads fail at once, only the first one reports
    with contextlib.suppress(Exception):
        _before_end[0]()
    with contextlib.suppress(OSError):
        os.write(2, f"error: {message}\nhint: {hint}\n".encode())
    os._exit(kind.exit_code)


__all__ = ["llama_cpp", "llama_cpp_ext"]
