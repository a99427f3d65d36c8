"""The process in which a draft learns beside a command that goes on answering.

It reads what to do as a line of JSON from standard input and prints what came of it. Behind that line
`PAUSE` lets it wait before its next step, while an answer is in the making, and `GO` go on. It has the
lowest priority, and ends as soon as its standard input does: whatever ends the command, nothing learns
on.
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
    """Whether to wait, as standard input says, and a clock that stands still meanwhile."""

    def __init__(self) -> None:
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._paused_s = 0.0

    def listen(self) -> None:
        """Start to do as standard input says."""
        threading.Thread(target=self._read, daemon=True).start()

    def wait(self) -> bool:
        """Return False when there is no pause any more."""
        started = time.monotonic()
        self._goes_on.wait()
        self._paused_s += time.monotonic() - started
        return False

    def clock(self) -> float:
        """Seconds, without the pauses."""
        return time.monotonic() - self._paused_s

    def _read(self) -> None:
        while said := sys.stdin.buffer.read(1):
            if said == PAUSE:
                self._goes_on.clear()
            elif said == GO:
                self._goes_on.set()
        os._exit(1)


def main() -> int:
    """Learn; returns the exit code."""
    asked = json.loads(sys.stdin.buffer.readline())
    pauses = Pauses()
    pauses.listen()
    if hasattr(os, "nice"):
        os.nice(_LOWEST_PRIORITY)
    from specgen.workshop.online.learning import learn_from_files

    try:
        found = learn_from_files(
            *(Path(asked[name]) for name in ("folder", "target", "draft", "base")),
            minutes=asked["minutes"],
            clock=pauses.clock,
            interrupted=pauses.wait,
        )
    except SpecgenError as error:
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code
    assert found is not None, "nothing interrupts it"
    sys.stdout.write(json.dumps(asdict(found)))
    return 0


def _end() -> NoReturn:
    """Run, and end at once: at its usual end the interpreter aborts where a thread waits for standard
    input, which would be taken for a failed lesson."""
    code = 1
    try:
        code = main()
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - its last line is what the parent tells
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _end()
