"""Notices, on stderr."""

from __future__ import annotations

import contextlib

from rich.console import Console, RenderableType
from rich.text import Text

from specgen.events import NoticeEvent
from specgen.render.text import clean, clean_line


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


def say(console: Console, what: RenderableType) -> None:
    """Print something that is not the answer.

    It is wrapped only on a terminal. Errors of printing are ignored, so that they do not end an answer.
    """
    with contextlib.suppress(OSError):
        console.print(what, soft_wrap=not console.is_terminal, highlight=False)


__all__ = ["Notes", "say"]
