"""Writes the events as JSON, one object a line."""

from __future__ import annotations

import json
import math
import re
from typing import Any, BinaryIO

from specgen.events import DraftedEvent, Event, VerifiedEvent, to_json_object
from specgen.render.base import BaseRenderer, output_errors

#: Valid in JSON, but a terminal may obey these characters, and readers may take them for line breaks.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029]")


class JsonlRenderer(BaseRenderer):
    """Writes every event to a binary stream, as UTF-8; flushed with each round."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def handle(self, event: Event) -> None:
        with output_errors():
            self._stream.write(json_line(to_json_object(event)))
            # These two events of a round are followed at once by its last one.
            if not isinstance(event, (DraftedEvent, VerifiedEvent)):
                self._stream.flush()

    def _finish(self) -> None:
        with output_errors():
            self._stream.flush()


def json_line(value: dict[str, Any]) -> bytes:
    """Return one line of JSON in UTF-8. Numbers that JSON lacks (NaN, infinity) become null; half a surrogate
    pair, which UTF-8 lacks, is written as an escape."""
    try:
        line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        line = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)
    line = _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", line)
    return line.encode("utf-8", "backslashreplace") + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


__all__ = ["JsonlRenderer", "json_line"]
