"""Ctrl-C during an answer: the first ends it properly, the second at once."""

from __future__ import annotations

import signal
from types import FrameType


class Interrupt:
    """A context manager in which the first SIGINT only sets a flag.

    llama.cpp's decode cannot be stopped in the middle, so the answer ends with the round that
    is going on. A second SIGINT raises KeyboardInterrupt as usual.
    """

    def __init__(self) -> None:
        self._requested = False
        self._previous: object = None

    def __call__(self) -> bool:
        """Whether the user wants the answer to end."""
        return self._requested

    def __enter__(self) -> Interrupt:
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)  # type: ignore[arg-type]

    def _on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True
