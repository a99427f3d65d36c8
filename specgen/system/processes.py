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
    """A child ended with an exit code other than 0, or by a signal, whose name and description it
    has, if so.
    """

    def __init__(self, returncode: int, stderr: str) -> None:
        self.signal_name, self.description = _cause_of_death(returncode)
        self.last_words = _last_line(stderr)
        self.returncode = returncode
        super().__init__(f"it ended with code {returncode}")


def ask_child(command: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Run a command and return the JSON object that it prints. Raise `ChildError`."""
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
        last_words = _last_line(ended.stdout)
        raise ChildError(f"it gave no answer: {last_words}" if last_words else "it gave no answer")
    return answer


def ask_child_again(
    command: Sequence[str], timeout_s: float, prepare: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Start a child that takes too long once more: the machine may have stood still. `prepare`
    comes before each.
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


def _cause_of_death(returncode: int) -> tuple[str, str]:
    number = _WINDOWS_STATUS.get(returncode & 0xFFFFFFFF, 0)
    if not number:
        # A shell in between reports signals as 128 + number.
        number = -returncode if returncode < 0 else max(0, returncode - 128)
    try:
        return signal.Signals(number).name, signal.strsignal(number) or ""
    except ValueError:
        return "", ""


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


# --- how this process ends

#: Set where native code runs on in a thread: native destructors must not run meanwhile.
left_running = threading.Event()


def is_failing() -> bool:
    return sys.exc_info()[0] is not None
