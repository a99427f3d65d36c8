"""Chooses the renderer by the options and by the kind of output."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import BinaryIO, TextIO

from rich.console import Console

from specgen.options import Show
from specgen.render.base import Notes, ReadingNotes, Renderer, Tee
from specgen.render.live import LiveRenderer
from specgen.render.marks import pens
from specgen.render.streams import (
    ColourStreamRenderer,
    DumbTerminalRenderer,
    JsonlRenderer,
    PlainRenderer,
)
from specgen.render.summary import SummaryRenderer


class TerminalConsole(Console):
    """A Rich console that reports a closed pipe instead of ending the program."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console(stream: TextIO, environ: Mapping[str, str]) -> Console:
    """Return a console for a standard stream. It prints text unchanged: no markup, no emoji codes, no
    highlighting."""
    ignored = set() if environ.get("FORCE_COLOR") else {"FORCE_COLOR"}
    if stream.isatty():  # the terminal itself knows its size, also after a change
        ignored |= {"COLUMNS", "LINES"}
    return TerminalConsole(
        file=stream,
        markup=False,
        emoji=False,
        highlight=False,
        no_color=bool(environ.get("NO_COLOR")),
        _environ={name: value for name, value in environ.items() if name not in ignored},
    )


def make_renderer(
    *,
    stdout: TextIO,
    stderr: TextIO,
    environ: Mapping[str, str],
    json: bool = False,
    show: Show = "accepted",
    stats: bool = True,
    quiet: bool = False,
    verbose: bool = False,
    folds: bool = False,
    newline: bool = False,
) -> Renderer:
    """Return the renderer of one generation.

    The answer goes to `stdout`, notices and the summary to `stderr`. Text streams are taken
    for what they know about themselves; what is not for a capable terminal is written to
    the binary stream below (`buffer`).

    Args:
        stdout: where the answer goes.
        stderr: where everything else goes.
        environ: the environment; TERM, NO_COLOR and FORCE_COLOR count.
        json: write the events as JSON Lines instead, the notices among them.
        show: which marks the text carries.
        stats: write the summary at the end.
        quiet: nothing on stderr.
        verbose: notices with their details.
        folds: on a terminal, put a line in the place of a thinking block.
        newline: end the last line in a pipe, and in a file that standard error shares; on a terminal it always ends,
            and where the summary follows in the same pipe or file.
    """
    error_console = make_console(stderr, environ)
    if json:
        answer: Renderer = JsonlRenderer(_binary(stdout))
        coloured = False
    else:
        notes = None if quiet else Notes(error_console, verbose=verbose)
        console = make_console(stdout, environ)
        answer, coloured = _answer_renderer(
            stdout,
            console,
            environ,
            show,
            notes,
            folds=folds,
            ends_line=(newline and _is_pipe(stdout))
            or ((newline or stats) and _is_same_file(stdout, stderr)),
        )
        if not quiet and not isinstance(answer, LiveRenderer):  # which has a status line for it
            answer = Tee((ReadingNotes(error_console), answer))
    if not stats:
        return answer
    show_legend = coloured and error_console.is_terminal
    return Tee((answer, SummaryRenderer(error_console, show_legend=show_legend)))


def _answer_renderer(
    stdout: TextIO,
    console: Console,
    environ: Mapping[str, str],
    show: Show,
    notes: Notes | None,
    *,
    folds: bool,
    ends_line: bool,
) -> tuple[Renderer, bool]:
    """Return the renderer of the answer, and whether it marks tokens."""
    marked = show != "none"
    terminal = stdout.isatty()
    dumb = environ.get("TERM", "").lower() in ("dumb", "unknown") or console.legacy_windows
    if terminal and not dumb:
        return LiveRenderer(console, show, notes, folds=folds), marked
    if marked and environ.get("FORCE_COLOR") and not environ.get("NO_COLOR"):
        colours = pens(console, forced=True)
        stream = _binary(stdout)
        return ColourStreamRenderer(stream, colours, show, notes, ends_line=ends_line), True
    if terminal:
        return DumbTerminalRenderer(_binary(stdout), notes, console.encoding), False
    return PlainRenderer(_binary(stdout), notes, ends_line=ends_line), False


def _is_pipe(stream: TextIO) -> bool:
    """Return whether a stream is a pipe or a socket."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _is_same_file(stdout: TextIO, stderr: TextIO) -> bool:
    """Return whether both streams go to the same place, as with `2>&1`."""
    try:
        return os.path.samestat(os.fstat(stdout.fileno()), os.fstat(stderr.fileno()))
    except (OSError, ValueError):
        return False


def _binary(stream: TextIO) -> BinaryIO:
    stream.flush()  # so that earlier output comes first
    return stream.buffer
