"""Connections: a time limit for the head of a request, and a limit of their number."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import ClassVar, cast

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

#: Connections that the system may accept before the idlest ones are closed.
BACKLOG = 128


def most_connections(n_wanted: int) -> int:
    """Return how many connections may be open at once: `n_wanted`, or fewer if the system's limit of
    descriptors has no room for them, for new ones and for files."""
    try:
        import resource

        n_most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        n_free = n_most - sum(1 for _ in Path("/dev/fd").iterdir())
    except (
        ImportError,
        OSError,
    ):  # a system without such a limit, or without a list of what is open
        return n_wanted
    if n_most == resource.RLIM_INFINITY:
        return n_wanted
    return min(n_wanted, max(1, n_free - max(n_free // 4, min(BACKLOG, n_free // 2))))


class LimitedProtocol(H11Protocol):
    """HTTP/1.1 on a connection that is closed if the head of a request does not come in time.

    While more connections are open than allowed, the one that has been silent for longest is closed, unless
    a request of it is being answered. If all are being answered, the newest gets status 503, by uvicorn's
    `limit_concurrency`.
    """

    #: The most connections, and the seconds for a head; 0 is no limit.
    n_most: ClassVar[int] = 0
    head_s: ClassVar[float] = 0.0
    #: When the client last sent something.
    heard_s = 0.0
    _head_timer: asyncio.TimerHandle | None = None

    @staticmethod
    def of(n_connections: int, head_time_s: float) -> type[LimitedProtocol]:
        """Return the protocol with these limits."""

        class Protocol(LimitedProtocol):
            n_most, head_s = n_connections, head_time_s

        return Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.heard_s = self.loop.time()
        self._watch_head()
        if 0 < self.n_most < len(self.connections):
            self._close_idlest()

    def data_received(self, data: bytes) -> None:
        self.heard_s = self.loop.time()
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()

    @property
    def is_idle(self) -> bool:
        """Whether the client still has to send a request, or the rest of it."""
        cycle = self._current()
        return cycle is None or cycle.more_body

    def _current(self) -> RequestResponseCycle | None:
        """Return the request that is not answered yet."""
        cycle: RequestResponseCycle | None = self.cycle
        return None if cycle is None or cycle.response_complete else cycle

    def _watch_head(self) -> None:
        """Give the client its time for the head of the next request; sending pieces does not extend it."""
        if self._current() is not None:
            self._stop_watching()
        elif self._head_timer is None and self.head_s > 0:
            self._head_timer = self.loop.call_later(self.head_s, self.transport.close)

    def _stop_watching(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_idlest(self) -> None:
        others = cast(Collection[LimitedProtocol], self.connections - {self})
        idle = [each for each in others if each.is_idle and not each.transport.is_closing()]
        if idle:
            min(idle, key=lambda each: each.heard_s).transport.close()
