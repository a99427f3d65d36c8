"""Make native calls that may wait for workers in a separate thread, so that the wait can be abandoned.

llama.cpp's RPC client has no time limit, and ends the process when a connection ends (`GGML_ABORT`).
Every call that may use a connection is therefore made in a separate thread, and the caller waits only
for a limited time. If a worker is lost, the thread is abandoned together with its native memory, and the
caller gets an ordinary `WorkerLostError`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from specgen.errors import WorkerLostError
from specgen.llama.library import ggml
from specgen.system.process_end import leave_running
from specgen.system.worker_probe import lost_among

_HINT = "start the worker again (`specgen worker`), then repeat the command"
_SLOW = "if the workers are only slow, --rpc-timeout gives them longer; if not, start them again"


class RemoteCalls:
    """Makes the native calls of one target in a thread, one at a time.

    `endpoints` are the addresses of the workers. A call is given up, with all later calls, if it takes
    longer than `timeout_s` seconds without a call of `alive`. (As `alive` only sets a flag that is checked
    every `timeout_s` seconds, the wait after it is up to twice as long.)
    """

    def __init__(self, endpoints: Sequence[str], timeout_s: float) -> None:
        self._endpoints = tuple(endpoints)
        self._timeout_s = timeout_s
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._task: _Task | None = None
        self._is_alive = False
        #: Why the workers cannot be called any more, and what to do about it.
        self._lost: tuple[str, str] | None = None
        #: The workers that are lost, once somebody has asked.
        self._names: Sequence[str] = ()
        _watch_aborts()
        _open.append(self)
        self._thread = threading.Thread(target=self._work, name="remote calls", daemon=True)
        self._thread.start()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Make a native call and return its result. Raise `WorkerLostError` if a worker is lost during the
        call, or was lost before."""
        self.check()
        if threading.current_thread() is self._thread:
            return function(*arguments)
        self._is_alive = False
        task = self._task = _Task(function, arguments)
        self._tasks.put(task)
        try:
            while not task.is_over.wait(self._timeout_s):
                if not self._is_alive:
                    self.give_up(f"no answer within {self._timeout_s:g} s", _SLOW)
                self._is_alive = False
        except BaseException:  # Ctrl-C, for example: the call continues, so no other may be made
            self.give_up("a call to them was interrupted")
            raise
        finally:
            self._task = None
        self.check()
        if task.error is not None:
            raise task.error
        return task.result

    def check(self) -> None:
        """Raise `WorkerLostError` if a worker was lost."""
        if self._lost is not None:
            reason, hint = self._lost
            self._names = self._names or lost_among(self._endpoints)
            raise WorkerLostError(f"lost {', '.join(self._names)}: {reason}", hint)

    def alive(self) -> None:
        """Report that the current call makes progress, which extends its time."""
        self._is_alive = True

    def give_up(self, reason: str, hint: str = _HINT) -> None:
        """Make the waiting call, and all later ones, raise `WorkerLostError`. Any thread may call this."""
        if self._lost is None:
            self._lost = reason, hint
            leave_running(f"a call to {', '.join(self._endpoints)}")
        task = self._task
        if task is not None:
            task.is_over.set()

    def close(self) -> None:
        """End the thread after its current call. (It never ends if it waits for a lost worker.)"""
        self._tasks.put(None)
        with contextlib.suppress(ValueError):
            _open.remove(self)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()


class _Task:
    """A call, and its result or error."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function = function
        self._arguments = arguments
        self.result: Any = None
        self.error: Exception | None = None
        self.is_over = threading.Event()

    def run(self) -> None:
        try:
            self.result = self._function(*self._arguments)
        except Exception as error:  # noqa: BLE001 - the caller's thread raises it again
            self.error = error
        self.is_over.set()


# --- the end of a connection ---------------------------------------------------------------------

_open: list[RemoteCalls] = []
_ABORT_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
#: The callback, and the one that was there before, kept for as long as GGML may call them.
_callbacks: list[Any] = []


def _watch_aborts() -> None:
    """Register a callback that GGML calls before it ends the process. Only the first call does anything."""
    if _callbacks:
        return
    callback = _ABORT_CALLBACK(_on_abort)
    set_callback = ggml("ggml_set_abort_callback", ctypes.c_void_p, _ABORT_CALLBACK)
    before = set_callback(callback)
    _callbacks.extend((callback, _ABORT_CALLBACK(before) if before else None))


def _on_abort(message: bytes) -> None:
    """Handle a failed assertion. GGML calls this in the thread of the error, and aborts the process when
    it returns."""
    if b"ggml-rpc" not in message:
        if _callbacks[1] is not None:
            _callbacks[1](message)
        else:
            os.write(2, message + b"\n")
        return
    # The message does not say which connection it was, so all calls to all workers are given up.
    if b"connect to" in message or b"handshake" in message:
        reason = "the connection was refused"
    else:
        reason = "the connection ended"
    for calls in _open.copy():
        calls.give_up(reason)
    # Never return: that would abort the process. The `WorkerLostError` ends it properly.
    threading.Event().wait()
