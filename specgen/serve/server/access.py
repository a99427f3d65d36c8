"""Access control: API keys, and web pages of other origins."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specgen.serve.server.http import RequestError
from specgen.serve.server.options import is_loopback

#: Paths that need no key: the health check, and the page, which asks for the key.
_OPEN = ("/health", "/")
_OPEN_FOLDERS = ("/page/",)
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


class AccessCheck:
    """Refuses requests without one of the keys, if there are keys: 401.

    A browser sends requests for any page that is open in it. Requests from pages of other origins are refused
    unless the origin is allowed: 403. Without keys, requests for a host name other than the loopback's are
    refused as well, since a page can let its own name point to this machine (DNS rebinding).
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], host: str, origins: Sequence[str]
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._names = {host.lower(), *_LOOPBACK_NAMES} if is_loopback(host) else None
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = self._check(scope["method"], scope["path"], Headers(scope=scope))
        app: ASGIApp = self._app if error is None else error.response(scope["path"])
        await app(scope, receive, send)

    def _check(self, method: str, path: str, headers: Headers) -> RequestError | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        is_allowed = "*" in self._origins or origin in self._origins
        if origin is not None and not is_allowed and _site(origin) != host:
            return RequestError(
                403, f"pages of {origin} may not use this server", code="origin_not_allowed"
            )
        if self._keys:
            is_open = path in _OPEN or path.startswith(_OPEN_FOLDERS) or method == "OPTIONS"
            if not is_open and not self._knows(_keys_in(headers)):
                return RequestError(
                    401,
                    "no key, or a wrong one: send it as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        elif self._names is not None and _host_name(host) not in self._names:
            return RequestError(
                403, f"this server does not answer for {host!r}", code="host_not_allowed"
            )
        return None

    def _knows(self, given: Sequence[bytes]) -> bool:
        """Return whether one of the given keys is known. Every key is compared, in constant time, so that
        the time reveals nothing about them."""
        found = [hmac.compare_digest(data, key) for data in given for key in self._keys]
        return any(found)


def _keys_in(headers: Headers) -> list[bytes]:
    """Return the keys that a request has: a client of OpenAI's API sends one header, one of Anthropic's the
    other."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    keys = [given if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
    return [key.strip().encode("utf-8", "surrogateescape") for key in keys]


def _site(origin: str) -> str | None:
    """Return the name and the port in a header `Origin`; None if there is none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _host_name(host: str) -> str | None:
    """Return the name in a header `Host`, without the port; None if it is none."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
