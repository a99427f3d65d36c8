"""Errors of a request in the form of OpenAI's API, or of Anthropic's for its paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from specgen.errors import (
    BackendError,
    PromptError,
    PromptLengthError,
    SpecgenError,
    UsageError,
)
from specgen.serve.formats.fields import BodyError, sendable
from specgen.serve.formats.messages_answer import error_body

#: The types of errors by their status, where OpenAI has one.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class RequestError(Exception):
    """A refused or failed request: the `status` of the response, and the content of its body.

    `param` is the wrong field, if there is one; `code` names the kind of error for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = sendable(message)
        self.code = code
        self.param = param
        self.headers = headers

    @staticmethod
    def of(error: SpecgenError) -> RequestError:
        """Return the error for a client: 400 if the request is wrong, 500 if the model failed. Hints are left
        out, since they name options of the command line."""
        message = error.message
        if isinstance(error, BodyError):
            return RequestError(400, message, code="invalid_value", param=error.field)
        if isinstance(error, PromptLengthError):
            return RequestError(400, message, code="context_length_exceeded")
        if isinstance(error, PromptError | UsageError):
            return RequestError(400, message, code="invalid_request")
        if isinstance(error, BackendError):
            return RequestError(500, message, code="backend_error")
        return RequestError(500, message)

    @staticmethod
    def ending() -> RequestError:
        """Return the error for requests that come while the server ends."""
        return RequestError(503, "the server ends", code="ending")

    @staticmethod
    def queue_full(retry_s: int) -> RequestError:
        """Return the error for a request without room; in about `retry_s` seconds there may be some."""
        message = f"too many answers are waiting; try again in {retry_s} s"
        headers = {"Retry-After": str(retry_s)}
        return RequestError(429, message, code="queue_full", headers=headers)

    def body(self) -> dict[str, Any]:
        """Return the body of the response."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, path: str) -> JSONResponse:
        """Return the response to a request for a path."""
        body = error_body(self.body()) if path.startswith("/v1/messages") else self.body()
        return JSONResponse(body, self.status, headers=self.headers)
