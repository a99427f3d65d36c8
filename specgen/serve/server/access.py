"""Who may use the server: API keys, origins of web pages, and host names."""

from __future__ import annotations

import hmac
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specgen.serve.formats.request_errors import RequestError
from specgen.serve.server.http import refusal
from specgen.serve.server.options import is_loopback

#: The origins of web pages that a program on this machine serves. No other page can get such an
#: origin, since these names and addresses always mean the browser's own machine.
LOCAL_ORIGINS = r"https?://(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?"
#: Paths that need no key: the health checks, and the page, which asks for the key.
_OPEN_PATHS = ("/health", "/v1/health", "/")


class _RequestCheck(ABC):
    """Middleware that refuses some requests, and passes all others on to the application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Pass a request on to the application, or refuse it."""
        app = self._app
        if scope["type"] == "http":
            error = self._error(scope)
            if error is not None:
                app = refusal(error, scope)
        await app(scope, receive, send)

    @abstractmethod
    def _error(self, scope: Scope) -> RequestError | None:
        """Return the error of a request that is refused."""


class PageCheck(_RequestCheck):
    """Refuses requests from web pages that may not use the server.

    - Pages of other origins are refused unless they are from this machine or allowed, since any
      page that a user visits can send requests to this server.
    - On a loopback address without keys, requests for any other host name are refused, since a page
      can make its own name resolve to this machine (DNS rebinding).

    Args:
        app: The application that answers other requests.
        host: The address that the server listens on.
        origins: More origins of web pages that are allowed; ``*`` for any.
        has_keys: Whether requests need a key.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        origins: Sequence[str],
        *,
        has_keys: bool,
    ) -> None:
        super().__init__(app)
        self._origins = origins
        self._host = host.lower()
        #: Whether a request may be for any host name.
        self._allows_any_host = has_keys or not is_loopback(host)

    def _error(self, scope: Scope) -> RequestError | None:
        headers = Headers(scope=scope)
        return self._origin_error(headers) or self._host_error(headers)

    def _origin_error(self, headers: Headers) -> RequestError | None:
        """Return the error if the request is from a web page that is not allowed."""
        origin = headers.get("origin")
        if origin is None or "*" in self._origins or origin in self._origins:
            return None
        if origin.partition("://")[2] == headers.get("host", ""):  # the server's own page
            return None
        if re.fullmatch(LOCAL_ORIGINS, origin):
            return None
        message = f"web pages from {origin} may not use this server; allow them with --cors-origin"
        return RequestError(403, message, "origin_not_allowed")

    def _host_error(self, headers: Headers) -> RequestError | None:
        """Return the error if the request is for a host name that is not allowed.

        A request without a name, as in HTTP/1.0, does not come from a page.
        """
        host = headers.get("host", "")
        name = re.sub(r":[0-9]*\Z", "", host).strip("[]").lower()  # without the port
        if self._allows_any_host or name in ("", self._host) or _is_loopback_name(name):
            return None
        message = (
            f"this server does not answer for {host!r}: use localhost, or start it with "
            "--api-key-file, which allows any name (--cors-origin is for pages of other origins)"
        )
        return RequestError(403, message, "host_not_allowed")


class KeyCheck(_RequestCheck):
    """Refuses requests without a valid key, if there are keys.

    Args:
        app: The application that answers other requests.
        keys: The API keys; empty if none is needed.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        super().__init__(app)
        self._keys = [key.encode() for key in keys]

    def _error(self, scope: Scope) -> RequestError | None:
        if not self._needs_key(scope["method"], scope["path"]):
            return None
        return self._key_error(Headers(scope=scope))

    def _needs_key(self, method: str, path: str) -> bool:
        if not self._keys or method == "OPTIONS":
            return False
        return path not in _OPEN_PATHS and not path.startswith("/page/")

    def _key_error(self, headers: Headers) -> RequestError | None:
        """Return the error if the request has no valid key."""
        given_keys = [headers.get("x-api-key", "")]  # from Anthropic's clients
        scheme, _, key = headers.get("authorization", "").partition(" ")  # from OpenAI's
        if scheme.lower() == "bearer":
            given_keys.append(key)
        # Compare all keys, each in constant time, so that the time reveals nothing about them.
        matches = [
            hmac.compare_digest(key.strip().encode("utf-8", "surrogateescape"), allowed_key)
            for key in given_keys
            for allowed_key in self._keys
        ]
        if any(matches):
            return None
        message = "missing or wrong API key: send 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'"
        response_headers = {"WWW-Authenticate": "Bearer"}
        return RequestError(401, message, "invalid_api_key", headers=response_headers)


def _is_loopback_name(name: str) -> bool:
    """Return whether a host name can only be this machine's: no page can make it its own."""
    name = name.removesuffix(".")
    return name.endswith(".localhost") or is_loopback(name)
