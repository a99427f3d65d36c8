"""The process in which a draft learns beside a command that goes on answering.

It reads what to do as a line of JSON from standard input and prints what came of it. It has the lowest
priority, and ends as soon as its standard input does: whatever ends the command, nothing learns on.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

from specgen.errors import SpecgenError

_LOWEST_PRIORITY = 19


def main() -> int:
    """Learn; returns the exit code."""
    asked = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(_LOWEST_PRIORITY)
    from specgen.workshop.online.learning import learn_from_files

    try:
        found = learn_from_files(
            *(Path(asked[name]) for name in ("folder", "target", "draft", "base")),
            minutes=asked["minutes"],
            clock=time.monotonic,
        )
    except SpecgenError as error:
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code
    assert found is not None, "nothing interrupts it"
    sys.stdout.write(json.dumps(asdict(found)))
    return 0


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
