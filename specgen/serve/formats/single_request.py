"""A request of OpenAI's form for exactly one answer, such as a line of a batch."""

from __future__ import annotations

from specgen.serve.formats.chat_completions import read_chat
from specgen.serve.formats.completions import (
    CompletionRequest,
    PromptRequest,
    parsed_completions,
)
from specgen.serve.formats.fields import Json, parse
from specgen.serve.formats.parsed_request import NO_DEFAULTS, Defaults, ParsedRequest, RequestKind
from specgen.serve.formats.request_errors import BodyError


def read_request(
    kind: RequestKind,
    body: Json,
    defaults: Defaults = NO_DEFAULTS,
) -> ParsedRequest:
    """Read a request for exactly one answer.

    Args:
        kind: Whether the body is that of a chat, or of a text completion or prompt.
        body: The body of the request.
        defaults: The values of fields that are left out.

    Raises:
        BodyError: If a field cannot be honoured, or the request has several answers.
    """
    if kind == "chat":
        requests = read_chat(body, defaults)
    else:
        form = PromptRequest if kind == "prompt" else CompletionRequest
        requests = parsed_completions(parse(form, body), defaults)
    if len(requests) > 1:
        raise BodyError("prompt", "several prompts in one request are not supported here")
    request = requests[0]
    if request.gap is not None:
        raise BodyError("suffix", "texts with a gap are not supported here")
    if request.n > 1:
        raise BodyError("n", "several answers to one request are not supported here")
    return request
