"""Chooses the renderer by the options and by the kind of output."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from functools import partial
from typing import TextIO

from rich.console import Console

from specgen.options import Show
from specgen.render.live import LiveRenderer
from specgen.render.streams import JsonlRenderer, Renderer, TextRenderer, print_notice


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
    in_chat: bool = False,
    newline: bool = False,
) -> Renderer:
    """Return the renderer of one generation.

    The answer goes to `stdout`, marked as `show` says, or with `json` the events as JSON Lines. Notices (with
    `verbose` their details) go to `stderr`, with `quiet` none; with `stats` a summary follows there. Of `environ`,
    TERM and NO_COLOR count. `in_chat` always ends an answer's last line, and puts a line in the place
    of a thinking block on a terminal.
    `newline` ends the last line in a pipe, and in a file that standard error shares; on a terminal it always
    ends, and where the summary follows in the same pipe or file.
    """
    console = make_console(stdout, environ)
    stdout.flush()  # so that earlier output comes first
    is_terminal = stdout.isatty()
    notice = (
        None if quiet else partial(print_notice, make_console(stderr, environ), verbose=verbose)
    )
    ends_line = in_chat or (newline and _is_pipe(stdout))
    ends_line = ends_line or ((newline or stats) and _is_same_file(stdout, stderr))
    dumb = environ.get("TERM", "").lower() in ("dumb", "unknown") or console.legacy_windows
    if json:
        return JsonlRenderer(stdout.buffer)
    if is_terminal and not dumb:
        return LiveRenderer(console, show, notice, folds=in_chat)
    if is_terminal:
        return TextRenderer(stdout.buffer, notice, encoding=console.encoding, is_terminal=True)
    return TextRenderer(stdout.buffer, notice, ends_line=ends_line, ends_empty=in_chat)


def _is_pipe(stream: TextIO) -> bool:
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
