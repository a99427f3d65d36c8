"""The native library: loading it, its log, and its last words.

The rest of the package takes llama_cpp from here, so that a library that cannot be loaded is
one `BackendError`, wherever it is first needed.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specgen.errors import BackendError

# An assertion that fails in llama.cpp would call a debugger, which writes into the answer.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")
try:
    import llama_cpp
except (ImportError, OSError, RuntimeError) as error:
    raise BackendError(
        f"llama-cpp-python cannot be loaded: {error}",
        hint='CMAKE_ARGS="-DCMAKE_CXX_FLAGS=-fno-dse" pip install --force-reinstall '
        "--no-cache-dir llama-cpp-python",
    ) from error

LogSink = Callable[[str], None]

_log_lines: collections.deque[str] = collections.deque(maxlen=200)
_log_sinks: list[LogSink] = []


def _on_log(_level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
    """Keep llama.cpp's last words for error messages; pass all on where asked to."""
    line = text.decode("utf-8", "replace")
    _log_lines.append(line)
    for sink in _log_sinks[-1:]:
        sink(line)


# The module keeps the callback alive: llama.cpp would call freed memory otherwise.
_log_callback = llama_cpp.llama_log_callback(_on_log)
llama_cpp.llama_log_set(_log_callback, ctypes.c_void_p(0))
llama_cpp.llama_backend_init()


@contextlib.contextmanager
def logging_to(sink: LogSink) -> Iterator[None]:
    """While in this context, llama.cpp's log goes to `sink`, piece by piece; it is quiet
    otherwise."""
    _log_sinks.append(sink)
    try:
        yield
    finally:
        _log_sinks.pop()


def forget_log() -> None:
    """Before a call whose failure `last_error` is to explain."""
    _log_lines.clear()


def last_error() -> str:
    """llama.cpp's last complaint, as one line."""
    lines = "".join(_log_lines).splitlines()
    complaints = [line for line in lines if "error" in line.lower() or "failed" in line.lower()]
    if complaints:  # the first one names the cause, those after it only pass it on
        return complaints[0].strip()
    return lines[-1].strip() if lines else "it does not say why"


def ggml_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the GGML libraries, which llama-cpp-python loads but does not declare. Raises
    `AttributeError` if there is none of that name.

    Wheels have copies of these libraries under several names (libggml.so, libggml.so.0). The one
    that llama.cpp is linked to must be asked: another copy has a list of devices of its own.
    """
    for library in _ggml_libraries():
        with contextlib.suppress(AttributeError):
            function = library[name]
            function.restype, function.argtypes = result, arguments
            return function
    raise AttributeError(name)


def _ggml_libraries() -> Iterator[Any]:
    """llama.cpp's own library, through which symbols of those that it is linked to are found as
    well; for systems that do not look there, those libraries by their names."""
    from llama_cpp import _ctypes_extensions

    yield llama_cpp.llama_cpp._lib  # noqa: SLF001
    folder = Path(llama_cpp.__file__).parent / "lib"
    for name in ("ggml", "ggml-base", "ggml-cpu"):
        with contextlib.suppress(OSError, RuntimeError):
            yield _ctypes_extensions.load_shared_library(name, folder)


__all__ = [
    "LogSink",
    "forget_log",
    "ggml_function",
    "last_error",
    "llama_cpp",
    "logging_to",
]
