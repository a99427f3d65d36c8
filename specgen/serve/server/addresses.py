"""Addresses to listen on."""

from __future__ import annotations

import ipaddress
import socket

from specgen.errors import UsageError


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
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"--host {host}: {reason}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if client_s > 0 and hasattr(socket, "TCP_USER_TIMEOUT"):
            milliseconds = min(int(1000 * client_s), 2**31 - 1)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        listening.bind(address[4])
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or str(error)
        hint = "take another --port; 0 takes one that is free"
        raise UsageError(f"{host}, port {port}: cannot listen there: {reason}", hint) from error
    return listening


def url_of(bound: socket.socket) -> str:
    """Return the URL of a socket's address."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
