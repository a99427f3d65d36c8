"""Record whether the process must end at once, because native code still runs in another thread."""

from __future__ import annotations

_running: list[str] = []


def leave_running(what: str) -> None:
    """Record that native code (`what`, for debugging) was left running in a thread. The process must then
    end by `os._exit`, because the destructors of native libraries must not run while it runs."""
    _running.append(what)


def has_left_running() -> bool:
    """Return whether native code was left running."""
    return bool(_running)


__all__ = ["has_left_running", "leave_running"]
