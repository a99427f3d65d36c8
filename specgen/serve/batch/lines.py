"""Read the lines of a batch: OpenAI's batch form, a simple object, or a text."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic_core import from_json

from specgen.errors import PromptError
from specgen.options import GenerationOptions, SamplerOptions
from specgen.serve.formats.openai import read_request
from specgen.serve.formats.request import BodyError, Kind, Request, shown

_URLS: dict[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
#: The fields of a line in OpenAI's form; only such lines have a `body`.
_ENVELOPE = frozenset(["custom_id", "method", "url", "body"])
_log = logging.getLogger("specgen.serve.batch")


@dataclass(frozen=True, slots=True)
class LineError:
    """The reason why a line has no answer: a word for programs, and a sentence."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input, counted from 1, with its request or its error.

    `digest` identifies the content: two lines with the same digest ask for the same answer.
    """

    number: int
    custom_id: str
    digest: str
    request: Request | LineError
    #: The fields of the request as the line has them.
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """The id of the line's result: lines that ask for the same have different ones."""
        return _hash(f"{self.custom_id}\0{self.digest}".encode())


def read_lines(
    data: bytes, name: str, sampling: SamplerOptions, generation: GenerationOptions
) -> list[Line]:
    """Return the lines of a file that are not empty; `sampling` and `generation` give the defaults. A line
    that cannot be read has an error in place of its request.

    Raise `PromptError` if there is no line, or if two have the same custom_id, so that their answers could
    not be told apart.
    """
    lines: list[Line] = []
    numbers: dict[str, int] = {}
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        line = _read(number, raw.strip(), sampling, generation)
        if line.custom_id in numbers:
            raise PromptError(
                f"{name}: custom_id {line.custom_id!r} is on lines {numbers[line.custom_id]} and "
                f"{number}",
                hint="give each line its own custom_id, or none: then it is the line's number",
            )
        if line.custom_id:
            numbers[line.custom_id] = number
        lines.append(line)
    if not lines:
        raise PromptError(f"{name} has no lines", hint="write a request or a prompt on each line")
    return [line if line.custom_id else _numbered(line, numbers) for line in lines]


def _numbered(line: Line, taken: Container[str]) -> Line:
    """Return a line with its number as its custom_id, in words if another line has that number."""
    custom_id = str(line.number)
    while custom_id in taken:
        custom_id = f"line {custom_id}"
    return replace(line, custom_id=custom_id)


def _read(number: int, raw: bytes, sampling: SamplerOptions, generation: GenerationOptions) -> Line:
    """Read a line; its custom_id is empty if it has none. Whatever goes wrong is the line's error."""
    custom_id, digest = "", _hash(raw)
    try:
        text = raw.decode("utf-8")
        body: dict[str, Any] = {"prompt": text}
        if text.startswith("{"):
            try:
                body = from_json(text)
            except ValueError as error:
                what = f"the line is not JSON: {error}"
                return Line(number, custom_id, digest, LineError("invalid_json", what))
        custom_id = _custom_id(body)
        digest = _digest(body)
        kind, fields = _asked(body)
        request = read_request(kind, fields, sampling, generation)
        return Line(number, custom_id, digest, request, fields)
    except UnicodeDecodeError as error:
        what = f"the line is not UTF-8: byte {raw[error.start]:#04x} at offset {error.start}"
        problem = LineError("invalid_utf8", what)
    except BodyError as error:
        problem = LineError("invalid_request", error.message)
    except Exception as error:  # noqa: BLE001 - it ends this line, not the batch
        problem = unexpected(error, number)
    return Line(number, custom_id, digest, problem)


def unexpected(error: Exception, number: int) -> LineError:
    """Return the error of a line that a bug of specgen ended, whose traceback goes to the log."""
    _log.error("line %d failed", number, exc_info=error)
    return LineError("bug", f"specgen failed: {type(error).__name__}: {error}")


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _custom_id(body: Mapping[str, Any]) -> str:
    value = body.get("custom_id")
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise BodyError("custom_id", "it is not a text")
    return str(value)


def _digest(body: Mapping[str, Any]) -> str:
    """Return a digest that ignores the order of fields, and white space between them."""
    asked = {name: value for name, value in body.items() if name != "custom_id"}
    return _hash(json.dumps(asked, sort_keys=True).encode())


def _asked(body: Mapping[str, Any]) -> tuple[Kind, dict[str, Any]]:
    if not {"body", "url", "method"} & body.keys():
        fields = {name: value for name, value in body.items() if name != "custom_id"}
        return ("chat" if "messages" in fields else "prompt"), fields
    for name in body:
        if name not in _ENVELOPE:
            raise BodyError(name, f"a line with a body has {', '.join(sorted(_ENVELOPE))} only")
    if body.get("method", "POST") != "POST":
        raise BodyError("method", f"{body['method']!r} is not POST")
    url = body.get("url")
    if not isinstance(url, str) or url not in _URLS:
        what = "it is missing; give one of" if url is None else f"{shown(url)} is none of"
        raise BodyError("url", f"{what} {', '.join(_URLS)}")
    if not isinstance(body.get("body"), dict):
        raise BodyError("body", "it is not an object")
    return _URLS[url], body["body"]
