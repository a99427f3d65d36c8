"""Renderers that write to a stream: the answer as plain text or with colours, or events as JSON Lines."""

from __future__ import annotations

import json
import math
import re
from abc import abstractmethod
from typing import Any, BinaryIO

from specgen.events import (
    CommittedEvent,
    DraftedEvent,
    Event,
    FinishedEvent,
    NoticeEvent,
    VerifiedEvent,
    to_json_object,
)
from specgen.options import Show
from specgen.render.base import Notes, Renderer, output_errors
from specgen.render.marks import Pens, RoundReader, coded
from specgen.render.text import Cleaner, clean_line

_SPACES = re.compile(r"(\s+)")


class _StreamRenderer(Renderer):
    """Writes text to a binary stream with each round."""

    def __init__(
        self,
        stream: BinaryIO,
        notes: Notes | None = None,
        encoding: str = "utf-8",
        *,
        ends_line: bool = False,
    ) -> None:
        self._stream = stream
        self._notes = notes
        #: Whether the last line is ended.
        self._ends_line = ends_line
        #: Whether the cursor is inside a line.
        self._in_line = False
        self._encoding = encoding
        self._cleaner = Cleaner(encoding)

    def handle(self, event: Event) -> None:
        if isinstance(event, NoticeEvent):
            if self._notes is not None:
                self._make_room()
                self._notes.show(event)
        elif isinstance(event, FinishedEvent):
            self.close()
        else:
            self._put(self._text(event))

    @abstractmethod
    def _text(self, event: Event) -> str:
        """Return the text to write for an event."""

    def _make_room(self) -> None:
        """Make room for other output; called before something else is printed on the same terminal."""

    def _put(self, text: str) -> None:
        if text:
            self._in_line = not text.endswith("\n")
            with output_errors():
                self._stream.write(text.encode(self._encoding, "replace"))
                self._stream.flush()

    def _finish(self) -> None:
        self._put(self._cleaner.finish())
        if self._ends_line and self._in_line:
            self._put("\n")
        with output_errors():
            self._stream.flush()


class PlainRenderer(_StreamRenderer):
    """Writes the answer and nothing else: its characters in UTF-8, whatever the locale, with no line feed changed,
    and one added only at the end with `ends_line`. For pipes and files."""

    def _text(self, event: Event) -> str:
        return event.text if isinstance(event, CommittedEvent) else ""


class DumbTerminalRenderer(_StreamRenderer):
    """Writes the answer to a terminal that has no escape codes, or whose codes are unknown.

    Control characters are replaced by their signs, and the last line is ended.
    """

    def __init__(
        self, stream: BinaryIO, notes: Notes | None = None, encoding: str = "utf-8"
    ) -> None:
        super().__init__(stream, notes, encoding, ends_line=True)

    def _text(self, event: Event) -> str:
        return self._cleaner.feed(event.text) if isinstance(event, CommittedEvent) else ""

    def _make_room(self) -> None:
        if self._in_line:
            self._put("\n")


class ColourStreamRenderer(_StreamRenderer):
    """Writes the answer with colours but without moving the cursor: for FORCE_COLOR, when something else than a
    terminal reads (a pager, the log of a build).

    Rejected text, and the reasons of rounds, are shown only if `show` is ``all``: they could not be taken away
    again.
    """

    def __init__(
        self,
        stream: BinaryIO,
        pens: Pens,
        show: Show = "accepted",
        notes: Notes | None = None,
        *,
        ends_line: bool = False,
    ) -> None:
        super().__init__(stream, notes, ends_line=ends_line)
        self._pens = pens
        self._show = show
        self._rounds = RoundReader()

    def _text(self, event: Event) -> str:
        completed = self._rounds.read(event)
        if completed is None:
            return ""
        parts: list[str] = []
        for text, mark in completed.runs(shows_all=self._show == "all"):
            pen = self._pens[mark]
            if mark in ("rejected", "faint"):
                parts.append(coded(clean_line(text), pen))
                continue
            # Codes do not reach over spaces and line ends, where they would underline them.
            parts += (
                part if part.isspace() else coded(part, pen)
                for part in _SPACES.split(self._cleaner.feed(text))
            )
        return "".join(parts)


#: Valid in JSON, but a terminal may obey these characters, and readers may take them for line breaks.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029]")


class JsonlRenderer(Renderer):
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
