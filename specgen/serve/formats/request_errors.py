"""Errors of requests: a field that cannot be honoured, and the error that a client receives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specgen.errors import BackendError, PromptError, PromptLengthError, SpecgenError, UsageError

#: OpenAI's types of errors by their HTTP status. Other statuses are ``invalid_request_error``.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


def shown(value: Any) -> str:
    """Return a value as JSON for a message, cut to 60 characters."""
    text = json.dumps(value, default=str)
    if len(text) > 60:
        return f"{text[:57]}..."
    return text


class BodyError(UsageError):
    """A field of a request's body that cannot be honoured.

    Args:
        field: The name of the field, with its place in the body.
        reason: Why it cannot be honoured.
    """

    def __init__(self, field: str, reason: str) -> None:
        self.field = field[:100]
        super().__init__(f"{self.field}: {reason}")


@dataclass(eq=False)
class RequestError(Exception):
    """A request that was refused or has failed, with everything that the response says about it."""

    #: The HTTP status.
    status: int
    message: str
    #: The kind of error, for programs.
    code: str | None = None
    #: The name of the wrong field.
    param: str | None = None
    #: Headers of the response.
    headers: Mapping[str, str] | None = None
    #: Numbers in llama.cpp's fields, which clients that shorten a prompt read.
    figures: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(error: SpecgenError) -> RequestError:
        """Return the error for a client: status 400 or 500.

        It lacks the hint, which names options of the command line.
        """
        status, code = _status_and_code(error)
        request_error = RequestError(status, error.message, code)
        if isinstance(error, BodyError):
            request_error.param = error.field
        if isinstance(error, PromptLengthError):
            # LangChain and LiteLLM recognise the error by these words. The code is not enough:
            # since version 3, the errors of OpenAI's client show only the message.
            request_error.message = f"prompt is too long: {error.message}"
            request_error.figures = {"n_prompt_tokens": error.n_tokens, "n_ctx": error.n_most}
        return request_error

    @staticmethod
    def shutting_down() -> RequestError:
        """Return the error of a request that is cut off because the server shuts down."""
        return RequestError(503, "the server is shutting down", "ending")

    @staticmethod
    def queue_full() -> RequestError:
        """Return the error of a request that is refused because too many are waiting."""
        message = "too many requests are waiting; try again later"
        return RequestError(429, message, "queue_full", headers={"Retry-After": "5"})

    def body(self) -> dict[str, Any]:
        """Return the body of the response, in OpenAI's form."""
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        return {"error": {**error, **self.figures}}


def _status_and_code(error: SpecgenError) -> tuple[int, str | None]:
    """Return the HTTP status of an error, and its kind for programs."""
    match error:
        case BodyError():
            return 400, "invalid_value"
        case PromptLengthError():
            return 400, "context_length_exceeded"
        case PromptError() | UsageError():
            return 400, "invalid_request"
        case BackendError():
            return 500, "backend_error"
    return 500, None
