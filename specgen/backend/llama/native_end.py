"""If llama.cpp aborts the process: print one line and exit with a code, instead of a core dump.

GGML ends the process if one of its assertions fails, for example for a damaged model or a lost device.
The system ends the process (SIGBUS) if a file that is mapped into memory became shorter. The process
cannot continue after either. Only programs should use this, not libraries: the handlers are global, and
other code in the process may use llama.cpp too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from specgen.backend.llama.library import ggml_function
from specgen.errors import BackendError, MemoryLimitError, SpecgenError

#: The callbacks, kept for as long as they may be called. The first one is `before_end`.
_kept: list[Any] = []
_ending = threading.Lock()
_IN_SOURCE = re.compile(r"(?P<path>\S+?):(?P<line>\d+): (?P<what>.*)", re.DOTALL)
_ASSERTED = "a damaged model file does this; fetch or convert it again, or report what led to it"
#: Parts of the assertions with which GGML checks that memory was allocated.
_NO_MEMORY = ("mem_buffer != NULL",)
_SMALLER = "close other programs, or take a smaller model or --ctx-size"
_SHORTER = "put the whole file back, or fetch the model again"


def end_with_a_line(before_end: Callable[[], None] = lambda: None) -> None:
    """From now on, if native code ends the process, print the reason in one line (and a hint) on standard
    error and exit with the code of a `BackendError` or `MemoryLimitError`. `before_end` is called
    first, to write pending output. Only the first call has an effect."""
    if _kept:
        return
    _kept.append(before_end)
    with contextlib.suppress(AttributeError):  # an older GGML
        callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_on_abort)
        set_callback = ggml_function("ggml_set_abort_callback", ctypes.c_void_p, ctypes.c_void_p)
        set_callback(ctypes.cast(callback, ctypes.c_void_p))
        _kept.append(callback)
    if hasattr(signal, "SIGBUS"):
        # Set through the C library. Python would run its own handler only after the failed instruction,
        # which would be repeated for ever.
        handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(_on_bus_error)
        ctypes.CDLL(None).signal(signal.SIGBUS, handler)
        _kept.append(handler)


def asserted(message: str) -> str:
    """Return the error message for a failed assertion, from GGML's own `message`."""
    found = _IN_SOURCE.fullmatch(message.strip())
    if found is None:
        return f"llama.cpp ended the process: {' '.join(message.split())}"
    place = f"{os.path.basename(found['path'])}:{found['line']}"  # noqa: PTH119 - of another machine
    return f"llama.cpp ended the process: {' '.join(found['what'].split())} ({place})"


def _on_abort(message: bytes | None) -> None:
    reason = (message or b"it gives no reason").decode("utf-8", "replace")
    if any(sign in reason for sign in _NO_MEMORY):
        _end(f"there is not enough memory; {asserted(reason)}", _SMALLER, MemoryLimitError)
    _end(asserted(reason), _ASSERTED)


def _on_bus_error(_number: int) -> None:
    _end("a file became shorter while it was read: a model, most likely", _SHORTER)


def _end(message: str, hint: str, kind: type[SpecgenError] = BackendError) -> NoReturn:
    _ending.acquire()  # never released: if several threads fail at once, only the first one reports
    with contextlib.suppress(Exception):
        _kept[0]()
    with contextlib.suppress(OSError):
        os.write(2, f"error: {message}\nhint: {hint}\n".encode())
    os._exit(kind.exit_code)
