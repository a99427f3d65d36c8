"""Failures of native code that end the process: a report of one line, a hint, and an exit code."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import signal
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from specgen.errors import BackendError, MemoryLimitError, SpecgenError
from specgen.llama.library import native, show_log

#: Called with the message of a failed assertion, in the thread that failed. A listener that does
#: not return prevents the end of the process.
abort_listeners: list[Callable[[str], None]] = []
#: The argument of `report_native_failures`; empty until that is called.
_before_end: list[Callable[[], None]] = []
#: Native callbacks, kept alive for as long as they may be called.
_callbacks: list[Any] = []
#: Acquired by the first thread that fails, and never released.
_ending = threading.Lock()

_SOURCE_PLACE = re.compile(r"(?:\S*[/\\])?(\S+?:\d+): ")
#: Part of the assertion with which GGML checks that memory was allocated.
_NO_MEMORY = "mem_buffer != NULL"
_HINT_ASSERTION = "the model file may be damaged: fetch or convert it again; -v shows what failed"
_HINT_MEMORY = "close other programs, or use a smaller model or a smaller --ctx-size"
_HINT_SHORTER_FILE = "put the whole file back, or fetch the model again"


@functools.cache
def watch_aborts() -> None:
    """Let GGML call `abort_listeners`, and report the error, before it ends the process."""
    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_on_abort)
    _callbacks.append(callback)
    native.ggml_set_abort_callback(ctypes.cast(callback, ctypes.c_void_p))


def report_native_failures(before_end: Callable[[], None] = lambda: None) -> None:
    """Print one line and a hint on standard error if native code ends the process.

    The exit code is that of a `BackendError` or a `MemoryLimitError`. Only the first call has an
    effect.

    Args:
        before_end: Called before the line is printed, to write pending output.
    """
    if _before_end:
        return
    _before_end.append(before_end)
    watch_aborts()
    if hasattr(signal, "SIGBUS"):
        # Set through the C library: Python would call a handler only after the failed instruction,
        # which fails again and again.
        callback = ctypes.CFUNCTYPE(None, ctypes.c_int)(_on_bus_error)
        _callbacks.append(callback)
        ctypes.CDLL(None).signal(signal.SIGBUS, callback)


def summarize_assertion(message: str) -> str:
    """Return the place in llama.cpp's source where it gave up: "llama.cpp gave up at ggml.c:123".

    The failed assertion itself is left out, since it tells users nothing.
    """
    place = _SOURCE_PLACE.match(message.strip())
    return f"llama.cpp gave up at {place[1]}" if place else "llama.cpp gave up"


def _on_abort(message: bytes | None) -> None:
    """Report a failed assertion. GGML calls this in the thread that failed."""
    reason = (message or b"no reason was given").decode("utf-8", "replace")
    for listener in abort_listeners:
        listener(reason)
    if not _before_end:
        # `report_native_failures` was not called: print the message as GGML would, and go on to its
        # abort.
        os.write(2, f"{reason}\n".encode())
    elif _NO_MEMORY in reason:
        summary = summarize_assertion(reason)
        _end(f"there is not enough memory: {summary}", _HINT_MEMORY, MemoryLimitError)
    else:
        show_log(f"{reason.rstrip()}\n")
        _end(summarize_assertion(reason), _HINT_ASSERTION)


def _on_bus_error(_number: int) -> None:
    """Report that a file which is mapped into memory lost its end."""
    _end("a file became shorter while it was read: a model, most likely", _HINT_SHORTER_FILE)


def _end(
    message: str,
    hint: str,
    kind: type[SpecgenError] = BackendError,
) -> NoReturn:
    """Print an error on standard error, and end the process with the exit code of its kind."""
    _ending.acquire()  # if several threads fail at once, only the first one reports
    with contextlib.suppress(Exception):
        _before_end[0]()
    with contextlib.suppress(OSError):
        os.write(2, f"error: {message}\nhint: {hint}\n".encode())
    os._exit(kind.exit_code)
