"""The native library: llama-cpp-python, or the part of it in a wheel of specgen.

It is loaded here, and other modules import `llama_cpp` from here. This module also keeps
llama.cpp's log for error messages, finds functions that llama-cpp-python does not declare, and
describes the build and its devices.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import importlib
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from specgen.errors import BackendError
from specgen.llama.ggml_signatures import SIGNATURES
from specgen.system.llama_build import BUNDLE, REBUILD, Build, Device, uses_bundle

# An assertion that fails in llama.cpp would call a debugger, which writes into the answer.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")
# A waiting thread of GCC's OpenMP spins for 7 ms on x86 before it sleeps, and may occupy the core
# that the thread it waits for needs. On other processors it spins for a much shorter time.
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
    folder = os.environ.get("LLAMA_CPP_LIB_PATH")
    if folder:
        raise BackendError(
            f"llama-cpp-python cannot be loaded from LLAMA_CPP_LIB_PATH={folder}: {error}",
            "name a folder with its libraries, or unset it",
        ) from error
    raise BackendError(f"llama-cpp-python cannot be loaded: {error}", REBUILD) from error

__all__ = ["llama_cpp", "llama_cpp_ext"]


# --- the log

LogSink: TypeAlias = Callable[[str], None]

#: The last lines of llama.cpp's log, which explain errors.
_log_lines: collections.deque[str] = collections.deque(maxlen=200)
#: A stack of sinks: the last one receives the log. If it is empty, the log is not shown.
_log_sinks: list[LogSink] = []


def _on_log(
    _level: int,
    text: bytes,
    _user_data: ctypes.c_void_p,
) -> None:
    line = text.decode("utf-8", "replace")
    _log_lines.append(line)
    show_log(line)


# The module keeps the callback alive: llama.cpp would call freed memory otherwise.
_log_callback = llama_cpp.llama_log_callback(_on_log)
llama_cpp.llama_log_set(_log_callback, ctypes.c_void_p(0))


@contextlib.contextmanager
def logging_to(sink: LogSink) -> Iterator[None]:
    """Pass llama.cpp's log in the block to `sink`, piece by piece. Elsewhere it is not shown."""
    _log_sinks.append(sink)
    try:
        yield
    finally:
        _log_sinks.pop()


def show_log(text: str) -> None:
    """Pass a piece of the log to the sink, if there is one."""
    if _log_sinks:
        _log_sinks[-1](text)


def forget_log() -> None:
    """Clear the log. Call it before a native call whose failure `last_error` is to explain."""
    _log_lines.clear()


def last_error() -> str:
    """Return the error that llama.cpp logged since `forget_log`, as one line."""
    lines = "".join(_log_lines).splitlines()
    for line in lines:
        # The first error is the cause; those after it are its consequences.
        if "error" in line.lower() or "failed" in line.lower():
            return line.strip()
    return lines[-1].strip() if lines else "no reason was logged"


# --- native functions


@functools.cache
def ggml(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of the GGML libraries.

    Args:
        name: The name of the function.
        result: The ctypes type of its result.
        *arguments: The ctypes types of its arguments.

    Raises:
        BackendError: If no library has it.
    """
    for library in _ggml_libraries():
        with contextlib.suppress(AttributeError):
            function = library[name]
            function.restype = result
            function.argtypes = arguments
            return function
    raise BackendError(f"this build of llama.cpp has no function {name}", hint=REBUILD)


def _ggml_libraries() -> Iterator[Any]:
    """Yield llama.cpp's library, then those of GGML.

    On most systems a look-up in llama.cpp's library also searches the GGML libraries to which it is
    linked. These are the right ones if a wheel contains several copies: they have the devices.
    """
    yield llama_cpp.llama_cpp._lib  # noqa: SLF001
    extensions = importlib.import_module(f"{llama_cpp.__name__}._ctypes_extensions")
    for name in ("ggml", "ggml-base", "ggml-cpu"):
        with contextlib.suppress(OSError, RuntimeError):
            yield extensions.load_shared_library(name, native_folder())


class NativeFunctions:
    """The functions in `SIGNATURES`, as attributes, each looked up when it is first used."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in SIGNATURES:
            raise AttributeError(name)
        function: Callable[..., Any] = ggml(name, *SIGNATURES[name])
        setattr(self, name, function)
        return function


native = NativeFunctions()


def native_folder() -> Path:
    """Return the folder of the native libraries."""
    return Path(llama_cpp.llama_cpp._base_path)  # noqa: SLF001


def keep_layer_input(context: Any, layer: int) -> None:
    """Let a context keep the input of a layer, for `layer_input`.

    llama.cpp ends the process unless the architecture is in `paired_drafts.HOOKED`.
    """
    types = (ctypes.c_uint32, ctypes.c_bool)
    _layer_input_function("set", None, "P13llama_contextjb", *types)(context, layer, True)


def layer_input(context: Any, layer: int) -> Any:
    """Return a pointer to the input of a layer in the last decode: float[n_rows, n_embd]."""
    values = ctypes.POINTER(ctypes.c_float)
    get = _layer_input_function("get", values, "P13llama_contextj", ctypes.c_uint32)
    return get(context, layer)


@functools.cache
def _layer_input_function(
    verb: str,
    result: Any,
    mangled_types: str,
    *arguments: Any,
) -> Any:
    """Return a function of llama.cpp's llama-ext.h, which is exported under its C++ name.

    Args:
        verb: "set" or "get".
        result: The type of the result.
        mangled_types: The types of the arguments, as GCC and Clang mangle them.
        *arguments: The types of the arguments after the context.

    Raises:
        BackendError: If the library does not have it.
    """
    name = f"llama_{verb}_embeddings_layer_inp"
    windows_names = {
        "set": f"?{name}@@YAXPEAUllama_context@@I_N@Z",
        "get": f"?{name}@@YAPEAMPEAUllama_context@@I@Z",
    }
    with contextlib.suppress(BackendError):
        mangled_name = f"_Z{len(name)}{name}{mangled_types}"
        return ggml(mangled_name, result, ctypes.c_void_p, *arguments)
    return ggml(windows_names[verb], result, ctypes.c_void_p, *arguments)


def procedure(
    registry: Any,
    name: bytes,
    result: Any,
    *arguments: Any,
) -> Any:
    """Return a function of a backend, which may be in a separate library.

    Args:
        registry: GGML's pointer to the backend.
        name: The name of the function.
        result: The ctypes type of its result.
        *arguments: The ctypes types of its arguments.

    Returns:
        None if the backend has no function of this name.
    """
    address = native.ggml_backend_reg_get_proc_address(registry, name)
    return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None


def _load_backends() -> None:
    """Load backends that are in separate libraries, among them the one of `GGML_BACKEND_PATH`.

    Raises:
        BackendError: If all other backends are built in, and that one cannot be loaded.
    """
    path = os.environ.get("GGML_BACKEND_PATH")
    if not native.ggml_backend_reg_count():  # a build whose backends are separate libraries
        native.ggml_backend_load_all_from_path(os.fsencode(native_folder()))
    elif path and not native.ggml_backend_load(os.fsencode(path)):
        raise BackendError(f"{path} (GGML_BACKEND_PATH) cannot be loaded: {last_error()}")


_load_backends()
llama_cpp.llama_backend_init()


# --- the build and its devices

_DEVICE_KINDS = {0: "cpu", 1: "gpu", 2: "integrated gpu", 3: "accelerator", 4: "meta"}


def build() -> Build:
    """Describe the build of llama.cpp."""
    return Build(
        version=llama_cpp.__version__,
        llama_version=_text(llama_cpp.llama_version()),
        system_info=_text(llama_cpp.llama_print_system_info()).strip(" |\n"),
        gpu_offload=has_gpu(),
        devices=tuple(map(device_of, native_devices())),
    )


def has_gpu() -> bool:
    """Return whether llama.cpp can compute on a GPU of this machine."""
    offloads = bool(llama_cpp.llama_supports_gpu_offload())
    # With the RPC backend loaded, `llama_supports_gpu_offload` is true on any machine.
    if offloads and llama_cpp.llama_supports_rpc():
        return any("gpu" in device_of(device).kind for device in native_devices())
    return offloads


def native_devices() -> list[int]:
    """Return GGML's pointers to its devices."""
    return [native.ggml_backend_dev_get(index) for index in range(native.ggml_backend_dev_count())]


def device_of(handle: int) -> Device:
    """Describe a device."""
    free = ctypes.c_size_t()
    total = ctypes.c_size_t()
    native.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
    return Device(
        name=_text(native.ggml_backend_dev_name(handle)),
        kind=_DEVICE_KINDS.get(native.ggml_backend_dev_type(handle), "other"),
        description=_text(native.ggml_backend_dev_description(handle)),
        memory_bytes=total.value,
        free_bytes=free.value,
    )


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")
