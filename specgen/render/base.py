"""The interface of renderers, and what all of them share."""

from __future__ import annotations

import contextlib
import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.text import Text

from specgen.errors import OutputError
from specgen.events import Event, NoticeEvent, ReadingEvent
from specgen.render.text import clean, clean_line

if TYPE_CHECKING:
    from typing_extensions import Self


#: Seconds between two lines of a log about the same prompt.
_READING_S = 5.0


class Renderer(ABC):
    """Shows the events of one generation. Used as a context manager; it closes only once, however its `with` block
    ends."""

    _closed = False

    @abstractmethod
    def handle(self, event: Event) -> None:
        """Show one event. Everything visible of it is written when this returns.

        Raises:
            BrokenPipeError: the reader of the output went away.
            OutputError: the output could not be written for another reason.
        """

    def close(self) -> None:
        """Finish the output and leave the terminal as it was; further calls do nothing."""
        if not self._closed:
            self._closed = True
            self._finish()

    def _finish(self) -> None:  # noqa: B027 - some have nothing to finish
        """Close the renderer: `close` calls this the first time."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # If another exception is being raised, a second one from a broken output would only hide it.
        hidden = () if kind is None else (OSError, OutputError)
        with contextlib.suppress(*hidden):
            self.close()


class Tee(Renderer):
    """Hands every event to several renderers, in order."""

    def __init__(self, renderers: Sequence[Renderer]) -> None:
        self._renderers = tuple(renderers)

    def handle(self, event: Event) -> None:
        for renderer in self._renderers:
            renderer.handle(event)

    def _finish(self) -> None:
        with contextlib.ExitStack() as stack:  # closes all of them, also after an error
            for renderer in reversed(self._renderers):
                stack.callback(renderer.close)


@contextlib.contextmanager
def output_errors() -> Iterator[None]:
    """Translate errors of writing the answer.

    Raises:
        BrokenPipeError: unchanged; also for the error that Windows reports instead (EINVAL).
        OutputError: for every other `OSError`.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if os.name == "nt" and error.errno == errno.EINVAL:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) from error
        reason = error.strerror or str(error) or type(error).__name__
        if error.errno == errno.EBADF:
            reason = "standard output is closed"
        hint = "make room on the disk" if error.errno == errno.ENOSPC else None
        raise OutputError(f"the answer could not be written: {reason}", hint) from error


class Notes:
    """Prints `note: ...` for a notice; with `verbose` also its detail, indented."""

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        self._console = console
        self._verbose = verbose

    def show(self, event: NoticeEvent) -> None:
        encoding = self._console.encoding
        message = clean_line(event.message, encoding)
        say(self._console, Text.assemble(("note:", "bold"), " ", message))
        if self._verbose:
            for line in clean(event.detail, encoding).splitlines():
                say(self._console, Text(f"  {line}"))


class ReadingNotes(Renderer):
    """Prints how far a long prompt has been read: a line every few seconds, for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said_s = 0.0

    def handle(self, event: Event) -> None:
        if isinstance(event, ReadingEvent) and event.time_s - self._said_s >= _READING_S:
            self._said_s = event.time_s
            say(self._console, Text(reading(event)))


def reading(event: ReadingEvent) -> str:
    """Return how far a prompt has been read, in words."""
    share = event.n_read / event.n_prompt_tokens
    return f"reading the prompt: {share:.0%} of {event.n_prompt_tokens} tokens, {event.left_s:.0f} s left"


def say(console: Console, what: RenderableType) -> None:
    """Print something that is not the answer.

    It is wrapped only on a terminal. Errors of printing are ignored, so that they do not end an answer.
    """
    with contextlib.suppress(OSError):
        console.print(what, soft_wrap=not console.is_terminal, highlight=False)
