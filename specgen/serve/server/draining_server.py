"""The HTTP server: its connections, and a shutdown that waits for unfinished answers."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import ClassVar

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from specgen.serve.server.model_pool import ModelPool
from specgen.serve.server.options import ServerOptions
from specgen.system.quantities import counted

#: The maximum number of connections that wait to be accepted.
_BACKLOG = 128
#: The time for sending the last data of answers that were cut off, in seconds.
_FLUSH_S = 5.0
#: The number of connections beyond the maximum whose requests get status 503. All others are closed
#: at once, so that clients that send nothing cannot use up the files that the process may open.
_N_REFUSED = 100
#: The time between two looks at whether a half-closed connection was reset, in seconds.
_RESET_CHECK_S = 0.05


class DrainingServer(uvicorn.Server):
    """A server that lets unfinished answers finish before it shuts down.

    After a first signal, it waits for its answers for at most `ServerOptions.drain_s` seconds. A
    second signal ends them at once.

    Args:
        app: Answers requests.
        pool: The models.
        options: The options of the server.
        is_verbose: Whether requests are logged.
        ready: Called when requests are accepted.
        note: Gets sentences for the user.
    """

    def __init__(
        self,
        app: ASGIApp,
        pool: ModelPool,
        options: ServerOptions,
        *,
        is_verbose: bool = False,
        ready: Callable[[], None] = lambda: None,
        note: Callable[[str], None] = lambda _text: None,
    ) -> None:
        super().__init__(_config(app, options, is_verbose=is_verbose))
        self._pool = pool
        self._drain_s = options.drain_s
        self._ready = ready
        self._note = note

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the sockets, and call `ready`."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to shut down: after a signal, or if an engine has failed."""
        return await super().on_tick(counter) or self._pool.failure is not None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal to shut down: the first lets answers finish, the second ends them.

        Unlike uvicorn's own method, this does not raise the signal again after the shutdown, so
        that the process exits without an error.
        """
        if self.should_exit:
            self._pool.cancel_all()
            return
        self.should_exit = True
        n_open = self._pool.n_open
        if n_open:
            limit = f"for at most {self._drain_s:g} s"
            if sig == signal.SIGINT:
                limit += "; Ctrl-C again to stop now"
            self._note(f"waiting for {counted(n_open, 'answer')} to finish, {limit}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for unfinished answers for at most `drain_s` seconds, and then end them."""
        drain_s = self._drain_s
        if self._pool.failure is not None:  # no answer can finish
            drain_s = 0.0
        timer = asyncio.get_running_loop().call_later(drain_s, self._pool.cancel_all)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            self._pool.cancel_all()


def _config(
    app: ASGIApp,
    options: ServerOptions,
    *,
    is_verbose: bool,
) -> uvicorn.Config:
    """Return uvicorn's configuration."""
    limits = options.limits
    # uvicorn takes a class and makes the instances itself, so its settings are class variables.
    settings = {"head_s": limits.client_s}
    if limits.n_connections > 0:
        settings["max_connections"] = limits.n_connections + _N_REFUSED
    return uvicorn.Config(
        app,
        http=type("Protocol", (_ServerProtocol,), settings),
        ws="none",
        backlog=_BACKLOG,
        limit_concurrency=limits.n_connections or None,
        log_config=None,
        # specgen logs errors itself. uvicorn would also log clients that do not read their answers.
        log_level="info" if is_verbose else "critical",
        access_log=is_verbose,
        lifespan="off",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(options.drain_s + _FLUSH_S),
    )


class _ServerProtocol(H11Protocol):
    """HTTP/1.1 with limits on connections, which may be half-closed.

    A connection is closed if there are too many, or if the head of a request does not arrive in
    time. The time starts with the connection, and again after each response.
    """

    #: The time limit in seconds; 0 for no limit.
    head_s: ClassVar[float] = 0.0
    #: The number of open connections beyond which a new one is closed.
    max_connections: ClassVar[float] = math.inf
    #: Closes the connection at the time limit; None if there is no limit.
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection, and wait for its first head; close it if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.close()
        else:
            self._await_head(None)

    def on_response_complete(self) -> None:
        """End a response, and wait for the next head."""
        finished_cycle = self.cycle
        super().on_response_complete()
        self._await_head(finished_cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection, and its timer, which would keep it in memory up to the limit."""
        super().connection_lost(exc)
        self._stop_head_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP; after the beginning of a response, just close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _await_head(self, last_cycle: RequestResponseCycle | None) -> None:
        """Close the connection after the time limit, unless a new request has begun by then.

        Args:
            last_cycle: The last request and its response; None if there was none.
        """

        def close_if_idle() -> None:
            if self.cycle is last_cycle:
                self.transport.close()

        self._stop_head_timer()
        if self.head_s > 0:
            self._head_timer = self.loop.call_later(self.head_s, close_if_idle)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep a connection open on which the client sends no more, until its request is answered.

        A client that has disconnected looks the same at first. To find out, a "100 Continue" is
        sent, which all clients skip: if the client has gone, its system resets the connection.

        Returns:
            Whether the connection stays open. It is closed if no request is complete, or if the
            response has begun: a client that only half-closes does so right after its request.
        """
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.more_body or cycle.response_started:
            return False
        cycle.keep_alive = False
        if cycle.scope["http_version"] != "1.0":  # clients of HTTP/1.0 do not know such responses
            probe = self.conn.send(h11.InformationalResponse(status_code=100, headers=[]))
            self.transport.write(probe or b"")
        self._abort_if_reset(cycle)
        return True

    def _abort_if_reset(self, cycle: RequestResponseCycle) -> None:
        """Check from now on whether the client has reset the connection, until it is answered.

        The event loop does not tell, since it no longer reads from a half-closed connection.
        """
        if cycle.response_complete or self.transport.is_closing():
            return
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(_RESET_CHECK_S, self._abort_if_reset, cycle)
