"""The process in which a draft learns while a command goes on answering.

It reads its task as a line of JSON from standard input and prints the result. After that line, `PAUSE` makes
it wait before its next step, while an answer is generated, and `GO` lets it continue. It has the lowest
priority. It ends as soon as its standard input closes, so that no lesson outlives the command.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from specgen.errors import SpecgenError

PAUSE, GO = b"-", b"+"
_LOWEST_PRIORITY = 19


class Pauses:
    """Pauses the training as standard input says, with a clock that stands still during pauses."""

    def __init__(self) -> None:
        self._is_running = threading.Event()
        self._is_running.set()
        self._paused_s = 0.0

    def listen(self) -> None:
        """Start the thread that reads standard input."""
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def is_paused(self) -> bool:
        """Whether an answer is being generated."""
        return not self._is_running.is_set()

    def wait(self) -> bool:
        """Wait until there is no pause, then return False (training takes True as an interruption)."""
        started = time.monotonic()
        self._is_running.wait()
        self._paused_s += time.monotonic() - started
        return False

    def clock(self) -> float:
        """Return seconds, without the pauses."""
        return time.monotonic() - self._paused_s

    def _read(self) -> None:
        while command := sys.stdin.buffer.read(1):
            if command == PAUSE:
                self._is_running.clear()
            elif command == GO:
                self._is_running.set()
        os._exit(1)


def main() -> int:
    """Learn, and return the exit code."""
    asked = json.loads(sys.stdin.buffer.readline())
    pauses = Pauses()
    pauses.listen()
    if hasattr(os, "nice"):
        os.nice(_LOWEST_PRIORITY)
    from specgen.train.online_learning import learn_from_files
    from specgen.train.training_loop import Budget

    try:
        found = learn_from_files(
            Path(asked["folder"]),
            Path(asked["target"]),
            Path(asked["draft"]),
            Budget(pauses.clock, pauses.clock() + 60.0 * asked["minutes"], pauses.wait),
        )
    except SpecgenError as error:
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code
    assert found is not None, "nothing interrupts it"
    sys.stdout.write(json.dumps(asdict(found)))
    return 0


def _end() -> NoReturn:
    """Run `main`, then end the process at once. In a normal exit the interpreter aborts if a thread waits for
    standard input, and that would look like a failed lesson."""
    code = 1
    try:
        code = main()
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - the parent shows the last line
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _end()
