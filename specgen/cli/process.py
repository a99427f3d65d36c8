"""Signals, which end a command in order."""

from __future__ import annotations

import signal
from types import FrameType

#: Ctrl-C; what `kill` sends; a closed terminal (not on Windows).
_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class Interrupt:
    """A context manager in which the first signal only sets a flag, as a decode cannot be stopped in the middle. A second
    one raises KeyboardInterrupt, which ends the process with the signal's exit code, if it `ends_process`."""

    def __init__(self, *, ends_process: bool = True) -> None:
        self._ends_process = ends_process
        self._received: int | None = None
        self._previous: dict[int, object] = {}

    def __call__(self) -> bool:
        return self._received is not None

    @property
    def exit_code(self) -> int:
        """The exit code by which a shell reports the signal; 0 without a signal."""
        return 0 if self._received is None else 128 + self._received

    def __enter__(self) -> Interrupt:
        self._received = None
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if kind is KeyboardInterrupt and self._received is not None and self._ends_process:
            raise SystemExit(self.exit_code)

    def _on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        if self._received is not None:
            raise KeyboardInterrupt
        self._received = signal_number
