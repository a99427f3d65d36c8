"""The options of a server, and the address that it listens on."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from specgen.errors import UsageError
from specgen.option_fields import option, utf8
from specgen.options import ModelChoice

if TYPE_CHECKING:
    from specgen.session.open import WantedSession

#: The default number of answers at once, if the memory has room for as many.
N_PARALLEL = 4

_limit = partial(option, panel="Limits of a request", min=0)
_server = partial(option, panel="Server")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of requests. 0 means no limit, except for `n_waiting`."""

    #: The maximum size of a request's body.
    body_bytes: int = 8 * 1024 * 1024
    #: The maximum number of connections; requests on further ones get status 503, and far too many
    #: are closed. Many systems allow a process 1024 open files, which include connections.
    n_connections: int = 500
    prompt_tokens: int = _limit(
        0,
        "--limit-prompt",
        "Maximum length of a prompt; with 0, only the context limits it.",
        metavar="TOKENS",
    )
    answer_tokens: int = _limit(
        0,
        "--limit-tokens",
        "Maximum length of an answer; with 0, only the context limits it.",
        metavar="TOKENS",
    )
    n_answers: int = _limit(
        16,
        "--limit-answers",
        "Maximum number of answers to one request (its prompts times its n); 0 is no limit.",
        metavar="N",
    )
    n_waiting: int = _limit(
        64,
        "--limit-queue",
        "Maximum number of answers that may wait; further requests get status 429.",
        metavar="N",
    )
    request_s: float = _limit(
        0.0,
        "--limit-time",
        "Maximum time for a request, whose answers are then cut off; 0 is no limit.",
        metavar="SECONDS",
    )
    client_s: float = _limit(
        60.0,
        "--limit-client",
        "How long a client may take to send the head or the body of a request, or to receive a "
        "piece of the response; 0 is no limit.",
        metavar="SECONDS",
    )


@dataclass(frozen=True, slots=True)
class ServedOptions:
    """The options of one of a server's models."""

    models: ModelChoice
    #: Finds the files of `models`, and adds all other options.
    find: Callable[[ModelChoice], WantedSession]
    #: Whether drafts learn from requests.
    learns: bool = False
    #: The number of answers to generate at once; None for `N_PARALLEL`, or fewer if the memory has
    #: no room for as many.
    n_parallel: int | None = None


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of a server."""

    host: str = _server(
        "127.0.0.1",
        "--host",
        "The address to listen on. An address that other machines can reach needs --api-key-file.",
        metavar="ADDRESS",
    )
    port: int = _server(
        8080,
        "--port",
        "The port to listen on; 0 picks a free one.",
        min=0,
        max=65535,
    )
    alias: str | None = _server(
        None,
        "--alias -a",
        "The model's name in responses.",
        metavar="NAME",
        parse=utf8,
        show_default="its file's",
    )
    #: The accepted keys; every request needs one of them. If empty, anyone who can reach the server
    #: may use it.
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = _server(
        (),
        "--cors-origin",
        "Let web pages of this origin (as https://example.org; * is any) use the server, in "
        "addition to those that this machine serves; may be repeated.",
        metavar="ORIGIN",
        show_default="none",
    )
    limits: Limits = field(default_factory=Limits)
    drain_s: float = _server(
        30.0,
        "--drain-s",
        "Time for unfinished answers after SIGTERM.",
        min=0.0,
        metavar="SECONDS",
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bound_socket(
    host: str,
    port: int,
    client_s: float = 0.0,
) -> socket.socket:
    """Return a socket bound to an address.

    Args:
        host: The address, or its name.
        port: The port; 0 for any free one.
        client_s: The time without acknowledged data after which the system drops a client's
            connection, in seconds, if it supports that; 0 for no limit.

    Raises:
        UsageError: If there is no such address, or another program listens there.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        # With the protocol, because asyncio sets TCP_NODELAY only on sockets that name it. Without
        # that option, the second of two small writes waits for an acknowledgement, up to 40 ms.
        listening = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--host {host}: {_reason(error)}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if client_s > 0 and hasattr(socket, "TCP_USER_TIMEOUT"):
            milliseconds = min(int(1000 * client_s), 2**31 - 1)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        listening.bind(address)
    except (OSError, OverflowError) as error:
        listening.close()
        raise UsageError(
            f"cannot listen on {host}, port {port}: {_reason(error)}",
            hint="choose another --port, or stop the program that uses this one",
        ) from error
    return listening


def _reason(error: Exception) -> object:
    """Return the system's words for an error, without its number."""
    return getattr(error, "strerror", None) or error


def url_of(bound: socket.socket) -> str:
    """Return the URL of a server that listens on a socket."""
    host, port = bound.getsockname()[:2]
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}"
