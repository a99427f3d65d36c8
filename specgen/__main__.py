"""The entry point of the ``specgen`` command and of ``python -m specgen``."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn

from specgen.errors import EXIT_INTERRUPTED


def main() -> NoReturn:
    """Run the command line.

    While modules are imported, and at the end, Ctrl-C ends the process at once: a KeyboardInterrupt
    would print a traceback there, or be lost.
    """
    # A background process may have been started with Ctrl-C ignored.
    heeds_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeds_interrupts:
        signal.signal(signal.SIGINT, _end_at_once)
    from specgen.cli.app import main as run_command_line
    from specgen.cli.streams import open_missing_streams

    open_missing_streams()
    if heeds_interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run_command_line()
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    finally:
        if heeds_interrupts:
            signal.signal(signal.SIGINT, _end_at_once)


def _end_at_once(_number: int, _frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
