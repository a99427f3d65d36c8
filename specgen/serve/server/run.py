"""Runs a server until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from specgen.serve.server.app import Server
from specgen.serve.server.connections import BACKLOG, LimitedProtocol, most_connections
from specgen.serve.server.model_pool import ModelPool
from specgen.serve.server.options import ServerOptions

#: Seconds for sending the ends of answers that were cut short.
_FLUSH_S = 5.0


def serve(
    pool: ModelPool,
    options: ServerOptions,
    bound: socket.socket,
    *,
    is_verbose: bool = False,
    ready: Callable[[], None] = lambda: None,
    note: Callable[[str], None] = lambda _text: None,
) -> None:
    """Answer requests on a socket until SIGTERM or Ctrl-C. Unfinished answers then have `drain_s` seconds to
    end; a second signal ends them at once.

    `ready` is called when requests are accepted. `note` gets a sentence when the server starts to end. Raise
    the exception that ended the thread of an engine, if one did: a bug or a lost worker."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("specgen.serve.server").setLevel(logging.INFO)
    with http_server(pool, options, is_verbose=is_verbose, ready=ready, note=note) as server:
        server.run(sockets=[bound])
    if server.failure is not None:
        raise server.failure


@contextlib.contextmanager
def http_server(
    pool: ModelPool,
    options: ServerOptions,
    *,
    is_verbose: bool = False,
    ready: Callable[[], None] = lambda: None,
    note: Callable[[str], None] = lambda _text: None,
) -> Iterator[DrainingServer]:
    """Open a server to `run`, which answers with the models of a pool."""
    n_connections = most_connections(options.limits.n_connections)
    with Server(pool, options) as server:
        config = uvicorn.Config(
            server.app(),
            http=LimitedProtocol.of(n_connections, options.limits.client_s),
            ws="none",
            backlog=BACKLOG,
            # One more may come, and closes another one, or gets status 503.
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
        yield DrainingServer(config, pool, options.drain_s, ready, note)


class DrainingServer(uvicorn.Server):
    """A server that waits for its answers before it ends, but not longer than `drain_s` seconds."""

    def __init__(
        self,
        config: uvicorn.Config,
        pool: ModelPool,
        drain_s: float,
        ready: Callable[[], None],
        note: Callable[[str], None],
    ) -> None:
        super().__init__(config)
        self._pool = pool
        self._drain_s = drain_s
        self._ready = ready
        self._note = note

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the thread of an engine, if one did."""
        return self._pool.failure

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.failure is not None

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
        drain_s = 0.0 if self.failure is not None else self._drain_s
        cut = loop.call_later(drain_s, self._pool.cancel_all)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()
            self._pool.cancel_all()
