"""Consoles, and renderers that write to a stream as text or as JSON Lines."""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from specgen.events import (
    CommittedEvent,
    DraftedEvent,
    Event,
    FinishedEvent,
    NoticeEvent,
    PrefillEvent,
    PromptEvent,
    VerifiedEvent,
    to_json_object,
)
from specgen.render.rows import Cleaner, clean, clean_line
from specgen.session.prompts.thoughts import ThoughtMarker
from specgen.system.files import to_line, write_errors, write_output

if TYPE_CHECKING:
    from typing_extensions import Self

#: The minimum seconds between two progress lines about one prefill.
_PROGRESS_INTERVAL_S = 5.0


class TerminalConsole(Console):
    """A Rich console that raises `BrokenPipeError` if the pipe is closed, instead of exiting."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console(stream: TextIO, environ: Mapping[str, str]) -> Console:
    """Return a console that writes to a standard stream, without markup of its own.

    Args:
        stream: The stream.
        environ: The environment variables; NO_COLOR, FORCE_COLOR and others are used.
    """
    # For Rich an empty FORCE_COLOR would mean that the stream is not a terminal.
    ignored = set() if environ.get("FORCE_COLOR") else {"FORCE_COLOR"}
    for name in ("COLUMNS", "LINES"):
        # Ask a terminal for its size, which can change. Elsewhere Rich takes any number, even 0.
        value = environ.get(name, "")
        if stream.isatty() or not value.isdecimal() or int(value) == 0:
            ignored.add(name)
    return TerminalConsole(
        file=stream,
        markup=False,
        emoji=False,
        highlight=False,
        no_color=bool(environ.get("NO_COLOR")),
        _environ={name: value for name, value in environ.items() if name not in ignored},
    )


class Renderer(ABC):
    """Shows the events of one generation. As a context manager, it closes itself at the end."""

    _closed = False

    @abstractmethod
    def handle(self, event: Event) -> None:
        """Show an event immediately.

        Raises:
            OSError: If it cannot be written.
        """

    @abstractmethod
    def _finish(self) -> None:
        """Finish the output, and restore the terminal. `close` calls this only once."""

    def close(self) -> None:
        """Finish the output. Further calls do nothing."""
        if not self._closed:
            self._closed = True
            self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        *_: object,
    ) -> None:
        if kind is None:
            self.close()
            return
        # A second exception from a broken output would hide the one that is being raised.
        with contextlib.suppress(OSError):
            self.close()


class TextRenderer(Renderer):
    """Writes only the answer's text to a binary stream, and flushes it after each round.

    Args:
        stream: The stream to write to.
        notice: Shows notices and the progress of a long prefill; None to not show them.
        encoding: The stream's encoding.
        ends_line: Whether to end the last line with a line feed, unless the answer is empty.
        ends_empty: Whether to write a line feed even if the answer is empty.
        is_terminal: Whether the stream is a terminal without escape codes. If so, control
            characters are replaced with signs, notices start on a new line, and `ends_line` is
            implied.
        thinks: Whether to write the thoughts of any model family between ``<think>`` and
            ``</think>``.
    """

    def __init__(
        self,
        stream: BinaryIO,
        notice: Callable[[NoticeEvent | PrefillEvent], None] | None = None,
        *,
        encoding: str = "utf-8",
        ends_line: bool = False,
        ends_empty: bool = False,
        is_terminal: bool = False,
        thinks: bool = False,
    ) -> None:
        self._stream = stream
        self._notice = notice or (lambda _event: None)
        self._encoding = encoding
        self._ends_line = ends_line or is_terminal
        self._ends_empty = ends_empty
        self._is_terminal = is_terminal
        self._thinks = thinks
        self._cleaner = Cleaner()
        self._marker: ThoughtMarker | None = None
        #: Whether the last line still needs a line feed.
        self._in_line = False
        #: When the progress of the prefill was last shown.
        self._last_progress_s = 0.0

    def handle(self, event: Event) -> None:
        if isinstance(event, PromptEvent) and self._thinks:
            self._marker = ThoughtMarker(event.text, event.grammar)
        elif isinstance(event, FinishedEvent):
            if self._ends_empty and not event.text:
                self._in_line = True  # so that `_finish` writes a line feed
            self.close()
        elif isinstance(event, NoticeEvent):
            if self._is_terminal and self._in_line:
                self._put("\n")
            self._notice(event)
        elif isinstance(event, PrefillEvent):
            if event.time_s - self._last_progress_s >= _PROGRESS_INTERVAL_S:
                self._last_progress_s = event.time_s
                self._notice(event)
        elif isinstance(event, CommittedEvent):
            text = event.text
            if self._marker is not None:
                text = self._marker.feed(text)
            self._show(text)

    def _show(self, text: str) -> None:
        if self._is_terminal:
            text = self._cleaner.feed(text)
        self._put(text)

    def _put(self, text: str) -> None:
        if text:
            self._in_line = not text.endswith("\n")
            self._stream.write(text.encode(self._encoding, "replace"))
            self._stream.flush()

    def _finish(self) -> None:
        if self._marker is not None:
            self._show(self._marker.finish())
        self._put(self._cleaner.finish())
        if self._ends_line and self._in_line:
            self._put("\n")


class JsonlRenderer(Renderer):
    """Writes every event to a binary stream as a line of JSON, and flushes it after each round."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def handle(self, event: Event) -> None:
        self._stream.write(to_line(to_json_object(event)))
        # After these two events the round's last event follows immediately.
        if not isinstance(event, (DraftedEvent, VerifiedEvent)):
            self._finish()

    def _finish(self) -> None:
        self._stream.flush()


def prefill_progress(event: PrefillEvent) -> str:
    """Return the progress of a prefill in words."""
    share = event.n_prefilled / event.n_prompt_tokens
    progress = f"{share:.0%} of {event.n_prompt_tokens} tokens"
    return f"prefilling the prompt: {progress}, {event.left_s:.0f} s left"


def print_notice(
    console: Console,
    event: NoticeEvent | PrefillEvent,
    *,
    verbose: bool = False,
) -> None:
    """Print a notice as `note: ...`, or the progress of a prefill.

    Args:
        console: The console to print on.
        event: The notice or the progress.
        verbose: Whether to also print the notice's detail, indented.
    """
    if isinstance(event, PrefillEvent):
        say(console, Text(prefill_progress(event)))
        return
    say(console, Text(f"note: {clean_line(event.message)}"))
    if verbose:
        for line in clean(event.detail).splitlines():
            say(console, Text(f"  {line}"))


def say(console: Console, what: RenderableType) -> None:
    """Print something that is not the answer; it is wrapped only on a terminal."""
    console.print(what, soft_wrap=not console.is_terminal, highlight=False)


# --- HTML pages in one file

#: The template of a page that replays an answer, which grows round by round: its package, and the
#: file there. It belongs to the server, whose page also saves replays.
REPLAY = ("specgen.serve.server", "page/replay.html")
#: The template of a page with the results of a benchmark.
BENCH = ("specgen.render", "bench.html")


def write_page(
    path: Path,
    template: tuple[str, str],
    data: object,
) -> None:
    """Write an HTML page that contains its data.

    Args:
        path: The file to write.
        template: `REPLAY` or `BENCH`.
        data: The data as JSON values: the events of a generation, or the report of a benchmark.

    Raises:
        OutputError: If the file cannot be written.
    """
    package, file = template
    page = files(package).joinpath(file).read_text(encoding="utf-8")
    # The data is inside a script, where nothing may look like the beginning of a tag.
    json_text = json.dumps(data).replace("<", "\\u003c")
    with write_errors(path):
        write_output(path, page.replace("DATA_HERE", json_text, 1).encode())
