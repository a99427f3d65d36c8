"""How the process ends: at once, because native code still runs in another thread, or by an exception."""

from __future__ import annotations

import sys

_running: list[str] = []


def leave_running(what: str) -> None:
    """Record that native code (`what`, for debugging) was left running in a thread. The process must then
    end by `os._exit`, because the destructors of native libraries must not run while it runs."""
    _running.append(what)


def has_left_running() -> bool:
    """Return whether native code was left running."""
    return bool(_running)


def is_failing() -> bool:
    """Return whether an exception, such as Ctrl-C, is being handled, or ends what closes its resources now."""
    return sys.exc_info()[0] is not None
