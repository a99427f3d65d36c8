"""Whether the process must end at once, because native code is still running in another thread."""

from __future__ import annotations

_running: list[str] = []


def leave_running(what: str) -> None:
    """Native code (`what`, for whoever debugs it) runs on until the process ends, by `os._exit`: the
    destructors of its libraries must not run before."""
    _running.append(what)


def has_left_running() -> bool:
    """Whether native code was left running."""
    return bool(_running)


__all__ = ["has_left_running", "leave_running"]
