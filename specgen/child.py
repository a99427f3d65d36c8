"""Ask a child process for a JSON object: what may end the process is tried in one of its own."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from typing import Any


class ChildError(Exception):
    """A child gave no answer. The message says why, as the rest of a sentence about it:
    "died of SIGILL (illegal instruction)"."""

    def __init__(self, message: str, *, signal_name: str = "", last_words: str = "") -> None:
        super().__init__(f"{message}: {last_words}" if last_words else message)
        #: The signal that ended it; empty if none did.
        self.signal_name = signal_name


def ask_child(command: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Run a command and return the JSON object that it prints. Raises `ChildError` if it cannot be
    started, dies, takes longer than `timeout_s` seconds, or prints something else."""
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
        raise ChildError(f"gave no answer within {timeout_s:.0f} s") from None
    except OSError as error:
        raise ChildError(f"cannot be started: {command[0]}: {error.strerror}") from error
    if ended.returncode != 0:
        name, description = _cause_of_death(ended.returncode)
        message = f"died of {name}" if name else f"ended with code {ended.returncode}"
        if description:
            message += f" ({description.lower()})"
        raise ChildError(message, signal_name=name, last_words=_last_line(ended.stderr))
    try:
        answer = json.loads(ended.stdout)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ChildError("gave no answer", last_words=_last_line(ended.stdout))
    return answer


#: How Windows reports what is a signal elsewhere.
_WINDOWS_STATUS = {
    0xC000001D: signal.SIGILL,
    0xC0000005: signal.SIGSEGV,
    0xC0000409: signal.SIGABRT,
}


def _cause_of_death(returncode: int) -> tuple[str, str]:
    """Name and description of the signal that ended a process; empty if it was none."""
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
