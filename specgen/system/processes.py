"""Child processes, for work that may end its process, and how this process ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any


class ChildError(Exception):
    """A child gave no answer; the message says why."""


class ChildTimeoutError(ChildError):
    """A child took too long."""


class ChildDiedError(ChildError):
    """A child ended with an exit code other than 0, or by a signal."""

    def __init__(self, returncode: int, stderr: str) -> None:
        super().__init__(f"it ended with code {returncode}")
        self.returncode = returncode
        signal_number = _signal_number(returncode)
        #: The name and the system's description of the signal; empty if none ended the child.
        self.signal_name = ""
        self.description = ""
        if signal_number is not None:
            self.signal_name = signal_number.name
            self.description = signal.strsignal(signal_number) or ""
        #: The last line that the child wrote to stderr.
        self.last_words = _last_line(stderr)


def ask_child(command: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Run a command and return the JSON object that it prints.

    Raises:
        ChildError: If there is no such answer.
    """
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ChildTimeoutError(f"no answer within {timeout_s:.0f} s") from None
    except OSError as error:
        raise ChildError(f"{command[0]} cannot be started: {error.strerror}") from error
    if ended.returncode != 0:
        raise ChildDiedError(ended.returncode, ended.stderr)
    try:
        answer = json.loads(ended.stdout)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        message = "it gave no answer"
        last_words = _last_line(ended.stdout)
        if last_words:
            message += f": {last_words}"
        raise ChildError(message)
    return answer


def ask_child_again(
    command: Sequence[str], timeout_s: float, prepare: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Ask a child as `ask_child` does, a second time if it takes too long.

    The machine may have been suspended meanwhile. `prepare` is called before each attempt.
    """
    prepare()
    try:
        return ask_child(command, timeout_s)
    except ChildTimeoutError:
        prepare()
        return ask_child(command, timeout_s)


#: The exit codes of Windows for what is a signal on other systems.
_WINDOWS_STATUS = {
    0xC000001D: signal.SIGILL,
    0xC0000005: signal.SIGSEGV,
    0xC0000409: signal.SIGABRT,
}


def _signal_number(returncode: int) -> signal.Signals | None:
    """Return the signal that ended a process, if one did."""
    windows_signal = _WINDOWS_STATUS.get(returncode & 0xFFFFFFFF)
    if windows_signal is not None:
        return windows_signal
    # Python reports a signal as -number, a shell in between as 128 + number.
    number = -returncode if returncode < 0 else returncode - 128
    try:
        return signal.Signals(number)
    except ValueError:
        return None


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


# --- how this process ends ------------------------------------------------------------------------

#: Set if native code runs on in a thread: native destructors must not run meanwhile.
left_running = threading.Event()


def is_failing() -> bool:
    """Return whether an exception, such as Ctrl-C, is ending the process."""
    return sys.exc_info()[0] is not None
