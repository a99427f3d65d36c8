"""Load the native library, and keep its log for error messages.

The rest of the package imports llama_cpp from here. A library that cannot be loaded therefore raises
the same `BackendError` wherever it is first needed.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specgen.backend.build import REBUILD
from specgen.errors import BackendError

# An assertion that fails in llama.cpp would call a debugger, which writes into the answer.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")
try:
    import llama_cpp
except (ImportError, OSError, RuntimeError) as error:
    raise BackendError(
        f"llama-cpp-python cannot be loaded: {error}",
        hint=REBUILD,
    ) from error

LogSink = Callable[[str], None]

_log_lines: collections.deque[str] = collections.deque(maxlen=200)
_log_sinks: list[LogSink] = []


def _on_log(_level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
    """Keep llama.cpp's last log lines for error messages, and pass each to the current sink."""
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
    """Pass llama.cpp's log to `sink`, piece by piece, inside this context. Outside, it is not shown."""
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


def ggml_function(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of the GGML libraries, which llama-cpp-python loads but does not declare. Raise
    `AttributeError` if there is none of that name.

    Wheels have copies of these libraries under several names (libggml.so, libggml.so.0). The function
    must come from the copy that llama.cpp is linked to: any other copy has its own list of devices.
    """
    for library in _ggml_libraries():
        with contextlib.suppress(AttributeError):
            function = library[name]
            function.restype, function.argtypes = result, arguments
            return function
    raise AttributeError(name)


def _ggml_libraries() -> Iterator[Any]:
    """Yield llama.cpp's library, which also finds the symbols of the libraries that it is linked to.
    Then yield the GGML libraries by name, for systems where it does not."""
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
