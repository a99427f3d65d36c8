"""Runs a server until a signal ends it, and limits its connections."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from specgen.serve.server.app import Server
from specgen.serve.server.model_pool import ModelPool
from specgen.serve.server.options import ServerOptions

#: Seconds for sending the ends of answers that were cut short.
_FLUSH_S = 5.0


def serve(pool: ModelPool, options: ServerOptions, bound: socket.socket, **how: Any) -> None:
    """Answer requests on a socket until SIGTERM or Ctrl-C; `how` are more arguments of `DrainingServer`. Raise the
    exception that ended the thread of an engine, if one did: a bug or a lost worker."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("specgen.serve.server").setLevel(logging.INFO)
    server = DrainingServer(pool, options, **how)
    server.run(sockets=[bound])
    if pool.failure is not None:
        raise pool.failure


class DrainingServer(uvicorn.Server):
    """A server that answers with the models of a pool. Told to end, it waits for its answers, but not longer than
    `drain_s` seconds; a second signal ends them at once.

    `ready` is called when requests are accepted. `note` gets a sentence when the server starts to end."""

    def __init__(
        self,
        pool: ModelPool,
        options: ServerOptions,
        *,
        is_verbose: bool = False,
        ready: Callable[[], None] = lambda: None,
        note: Callable[[str], None] = lambda _text: None,
    ) -> None:
        n_connections = _most_connections(options.limits.n_connections)
        config = uvicorn.Config(
            Server(pool, options).app(),
            http=type("Protocol", (_TimedProtocol,), {"head_s": options.limits.client_s}),
            ws="none",
            backlog=_BACKLOG,
            # One more may come, and gets status 503.
            limit_concurrency=n_connections + 1,
            log_config=None,
            # specgen's own log has the errors; a client that does not read its answer is none.
            log_level="info" if is_verbose else "critical",
            access_log=is_verbose,
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=int(options.drain_s + _FLUSH_S),
        )
        super().__init__(config)
        self._pool, self._drain_s = pool, options.drain_s
        self._ready, self._note = ready, note

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._pool.failure is not None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Unlike uvicorn's own method, this does not raise the signal again at the end: being told to
        # end is no failure.
        if self.should_exit:
            self._pool.cancel_all()
            return
        self.should_exit = True
        n_open = self._pool.n_open
        if n_open:
            again = "again to end them now" if sig == signal.SIGINT else f"{self._drain_s:g} s"
            answers = "1 answer" if n_open == 1 else f"{n_open} answers"
            self._note(f"ending after {answers} ({again})")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        drain_s = 0.0 if self._pool.failure is not None else self._drain_s
        cut = loop.call_later(drain_s, self._pool.cancel_all)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()
            self._pool.cancel_all()


# --- connections ----------------------------------------------------------------------------------

#: Connections that the system may accept before the server does.
_BACKLOG = 128


def _most_connections(n_wanted: int) -> int:
    """Return how many connections may be open at once: `n_wanted`, or half of the descriptors that the system
    allows, since files and new connections need some."""
    try:
        import resource
    except ImportError:  # a system without such a limit
        return n_wanted
    n_most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return n_wanted if n_most == resource.RLIM_INFINITY else min(n_wanted, max(1, n_most // 2))


class _TimedProtocol(H11Protocol):
    """HTTP/1.1 on a connection that is closed if the head of a request does not come in time."""

    #: The seconds for a head; 0 is no limit.
    head_s: ClassVar[float] = 0.0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()

    def _watch_head(self) -> None:
        """Give the client its time for the head of the next request; sending pieces does not extend it."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._stop_watching()
        elif self._head_timer is None and self.head_s > 0:
            self._head_timer = self.loop.call_later(self.head_s, self.transport.close)

    def _stop_watching(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
