"""The options of a server, and the address that it listens on."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field

from specgen.errors import UsageError


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a request. 0 is no limit, except for `n_waiting`."""

    #: Bytes of a request's body.
    body_bytes: int = 8 * 1024 * 1024
    #: Tokens of a prompt, and of an answer; both are also limited by the context.
    prompt_tokens: int = 0
    answer_tokens: int = 0
    #: Answers of one request: the number of its prompts times its `n`.
    n_answers: int = 16
    #: Answers that may wait for a free slot; a request that exceeds it is refused with 429.
    n_waiting: int = 64
    #: Seconds from a request to the end of its answers, which are cut then.
    request_s: float = 0.0
    #: Seconds in which a client has to send the head of a request, and its body, and to accept data.
    client_s: float = 60.0
    #: Open connections, as far as the system's limit of descriptors has room for them.
    n_connections: int = 1000


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of a server."""

    host: str = "127.0.0.1"
    #: 0 takes a free port.
    port: int = 8080
    #: The name of the model in answers; None takes its file's.
    alias: str | None = None
    #: Every request needs one of these keys; without keys, everybody who can reach the server may use it.
    api_keys: tuple[str, ...] = ()
    #: Web pages of these origins (``https://example.org``) may use the server in a browser; ``*`` means all.
    cors_origins: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    #: Seconds that unfinished answers have when the server is told to end.
    drain_s: float = 30.0


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bound_socket(host: str, port: int, client_s: float = 0.0) -> socket.socket:
    """Return a socket bound to an address, which does not listen yet.

    If the system can, it drops a connection whose client accepts no data for `client_s` seconds (0: never).
    Raise `UsageError` if there is no such address, or it is taken."""
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(address[0], address[1])
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--host {host}: {getattr(error, 'strerror', None) or error}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if client_s > 0 and hasattr(socket, "TCP_USER_TIMEOUT"):
            milliseconds = min(int(1000 * client_s), 2**31 - 1)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        listening.bind(address[4])
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or error
        hint = "take another --port; 0 takes one that is free"
        raise UsageError(f"{host}, port {port}: cannot listen there: {reason}", hint) from error
    return listening


def url_of(bound: socket.socket) -> str:
    """Return the URL of a socket's address."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
