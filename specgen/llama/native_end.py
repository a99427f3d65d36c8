"""What happens if native code ends the process."""

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
from specgen.llama.library import _log_sinks, ggml

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


def report_native_failures(before_end: Callable[[], None] = lambda: None) -> None:
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


def summarize_assertion(message: str) -> str:
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
        _end(
            f"there is not enough memory: {summarize_assertion(reason)}", _SMALLER, MemoryLimitError
        )
    else:
        if _log_sinks:
            _log_sinks[-1](f"{reason.rstrip()}\n")
        _end(summarize_assertion(reason), _ASSERTED)


def _on_bus_error(_number: int) -> None:
    _end("a file became shorter while it was read: a model, most likely", _SHORTER)


def _end(message: str, hint: str, kind: type[SpecgenError] = BackendError) -> NoReturn:
    _ending.acquire()  # never released: if several threads fail at once, only the first one reports
    with contextlib.suppress(Exception):
        _before_end[0]()
    with contextlib.suppress(OSError):
        os.write(2, f"error: {message}\nhint: {hint}\n".encode())
    os._exit(kind.exit_code)
