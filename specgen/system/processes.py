"""Child processes, for work that may crash its process; and how this process ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any


class ChildError(Exception):
    """A child gave no answer; the message says why, with "it" for the child."""


class ChildStartError(ChildError):
    """A child could not be started."""


class ChildTimeoutError(ChildError):
    """A child took too long."""


class ChildDiedError(ChildError):
    """A child ended with an exit code other than 0, or by a signal."""

    def __init__(self, returncode: int, stderr: str) -> None:
        super().__init__(f"it ended with code {returncode}")
        self.returncode = returncode
        signal_number = _signal_number(returncode)
        #: The name of the signal that ended the child; empty if none did.
        self.signal_name = ""
        #: The system's description of that signal; empty if there is none.
        self.description = ""
        if signal_number is not None:
            self.signal_name = signal_number.name
            self.description = signal.strsignal(signal_number) or ""
        #: The last line that the child wrote to stderr; empty if it wrote nothing.
        self.last_stderr_line = _last_line(stderr)


def ask_child(command: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Run a command and return the JSON object that it prints.

    Raises:
        ChildTimeoutError: If it takes longer than `timeout_s`.
        ChildDiedError: If it crashes or fails.
        ChildStartError: If it cannot be started.
        ChildError: If it prints something else.
    """
    try:
        result = subprocess.run(
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
        raise ChildStartError(f"{command[0]} cannot be started: {error.strerror}") from error
    if result.returncode != 0:
        raise ChildDiedError(result.returncode, result.stderr)
    try:
        answer = json.loads(result.stdout)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        message = "it gave no answer"
        last_line = _last_line(result.stdout)
        if last_line:
            message += f": {last_line}"
        raise ChildError(message)
    return answer


def ask_child_again(
    command: Sequence[str],
    timeout_s: float,
    prepare: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Call `ask_child`, and again if the child takes too long: the machine may have been suspended.

    Args:
        command: The child's command.
        timeout_s: The time limit of each attempt.
        prepare: Called before each attempt.

    Raises:
        ChildError: As `ask_child` does.
    """
    prepare()
    try:
        return ask_child(command, timeout_s)
    except ChildTimeoutError:
        prepare()
        return ask_child(command, timeout_s)


#: The exit codes of Windows that correspond to signals of other systems.
_WINDOWS_STATUS = {
    0xC000001D: signal.SIGILL,
    0xC0000005: signal.SIGSEGV,
    0xC0000409: signal.SIGABRT,
}


def _signal_number(returncode: int) -> signal.Signals | None:
    """Return the signal that ended a process; None if it ended by itself."""
    windows_signal = _WINDOWS_STATUS.get(returncode & 0xFFFFFFFF)
    if windows_signal is not None:
        return windows_signal
    # Python reports a signal as -number; a shell that started the process, as 128 + number.
    number = -returncode if returncode < 0 else returncode - 128
    try:
        return signal.Signals(number)
    except ValueError:
        return None


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


# --- how this process ends ------------------------------------------------------------------------

#: Set if native code is still running in an abandoned thread. The process must then end without
#: calling native destructors.
left_running = threading.Event()


def is_failing() -> bool:
    """Return whether an exception, such as Ctrl-C, is ending the process."""
    return sys.exc_info()[0] is not None
