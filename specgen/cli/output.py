"""What commands show: answers, and on standard error notes and progress; and the signals that end
them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import sys
import textwrap
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from specgen.errors import UsageError
from specgen.options import GenerationOptions, Show
from specgen.sampler_options import option
from specgen.system.progress import Progress, ProgressView

if TYPE_CHECKING:
    from rich.console import Console

    from specgen.events import Event, FinishedEvent
    from specgen.render.streams import Renderer
    from specgen.session.open import Reporter
    from specgen.session.prompts import Prompt
    from specgen.session.session import Session


_N_LIKELIEST = 10  # tokens of the target whose probabilities are known in a walk-through
_output = partial(option, panel="Output")


@dataclass(frozen=True, slots=True)
class Output:
    """How a command shows answers, and what it prints on standard error."""

    show: Show = _output(
        "accepted",
        "--show",
        "What a terminal shows of drafts: accepted (rejected tokens vanish after their round), all (they stay), none "
        "(plain text); in a pipe, too: rounds, a line for each (with -v the probabilities).",
    )
    stats: bool | None = _output(
        None,
        "--stats/--no-stats",
        "Print all figures of an answer on standard error after it, or nothing.",
        show_default="one line, but not with --json or --quiet",
    )
    json: bool = _output(
        False, "--json", "Print events instead of the answer, a JSON object on each line."
    )
    html: Path | None = _output(
        None,
        "--html",
        "Write a page on which the answer grows round by round as it did, with the probabilities by both models.",
        metavar="FILE",
    )
    newline: bool = _output(
        True,
        "--newline/--no-newline",
        "In a pipe, end the answer with a line break.",
        show_default="newline; in fim no-newline",
    )
    quiet: bool = _output(False, "--quiet -q", "Print only errors on standard error.")
    verbose: int = _output(
        0,
        "--verbose -v",
        "Print more on standard error: models, memory, contexts; with -vv all of llama.cpp's log.",
        count=True,
        show_default=False,
    )

    thinks: bool = False  # answers may begin with thoughts

    def __post_init__(self) -> None:
        if self.quiet and self.verbose:
            raise UsageError("--quiet and --verbose exclude each other", hint="use one of them")

    @property
    def has_summary(self) -> bool:
        return self.stats if self.stats is not None else not (self.json or self.quiet)

    def note(self, text: str) -> None:
        if not self.quiet:
            say(f"note: {text}")

    def status(self, text: str) -> contextlib.AbstractContextManager[object]:
        if self.quiet or self.verbose or not sys.stderr.isatty():
            return contextlib.nullcontext()
        return console_on(sys.stderr).status(text)

    @property
    def reporter(self) -> Reporter:
        """Where the notes and the progress of loading models go."""
        from specgen.session.open import Reporter

        return Reporter(self.note, self.status, shows_log=self.verbose > 0)

    def needs(self, answer: GenerationOptions) -> GenerationOptions:
        """Return the options of an answer, with the probabilities that are shown. Raise
        `UsageError`.
        """
        if answer.logprobs is not None and not self.json:
            raise UsageError("--logprobs needs --json: only events have log-probabilities")
        check_file_option("--html", self.html)
        in_rounds = self.show == "rounds" and self.verbose and not self.json
        if answer.logprobs is None and (in_rounds or self.html):
            return replace(answer, logprobs=_N_LIKELIEST)
        return answer

    def show_answer(
        self, events: Generator[Event, None, None], *, in_chat: bool = False
    ) -> FinishedEvent | None:
        from specgen.events import FinishedEvent, PromptEvent, to_json_object
        from specgen.render.live import LiveRenderer
        from specgen.render.summary import print_summary

        renderer = self.renderer(sys.stdout, sys.stderr, os.environ, in_chat=in_chat)
        seen: dict[type[Event], Any] = {}
        replayed: list[object] = []
        with contextlib.closing(events), renderer:
            for event in events:
                renderer.handle(event)
                seen[type(event)] = event
                replayed += [to_json_object(event)] if self.html is not None else []
        if self.html is not None:
            from specgen.render.streams import REPLAY, write_page

            write_page(self.html, REPLAY, replayed)
        prompt, finished = seen.get(PromptEvent), seen.get(FinishedEvent)
        if finished is not None and prompt is not None and self.has_summary:
            is_coloured = isinstance(renderer, LiveRenderer) and self.show != "none"
            whole = self.stats is True
            legend = is_coloured and sys.stderr.isatty() and (whole or not in_chat)
            how: dict[str, Any] = {"whole": whole, "show_legend": legend}
            print_summary(console_on(sys.stderr), finished, prompt, **how)
        return finished

    def renderer(
        self,
        stdout: TextIO,
        stderr: TextIO,
        environ: Mapping[str, str],
        *,
        in_chat: bool = False,
    ) -> Renderer:
        """Return what shows an answer on `stdout`, and notices on `stderr`. In a conversation,
        thoughts are folded, and each answer ends its line. On a terminal it always does, in a pipe
        (and where `stderr` is the same file, as with 2>&1) as `newline` says, or where the summary
        follows.
        """
        from specgen.render import live, rounds, streams

        console, errors = (streams.make_console(each, environ) for each in (stdout, stderr))
        stdout.flush()  # so that earlier output comes first
        if self.json:
            return streams.JsonlRenderer(stdout.buffer)
        verbose, thinks = self.verbose > 0, self.thinks or in_chat
        notice = None if self.quiet else partial(streams.print_notice, errors, verbose=verbose)
        if self.show == "rounds":
            return rounds.RoundsRenderer(console, notice, verbose=verbose)
        if stdout.isatty() and not (console.is_dumb_terminal or console.legacy_windows):
            return live.LiveRenderer(console, self.show, notice, thinks=thinks, folds=in_chat)
        write = partial(streams.TextRenderer, stdout.buffer, notice, thinks=thinks)
        if stdout.isatty():
            return write(encoding=console.encoding, is_terminal=True)
        out, err = _status_of(stdout), _status_of(stderr)
        is_pipe = out is not None and (stat.S_ISFIFO(out.st_mode) or stat.S_ISSOCK(out.st_mode))
        is_shared = out is not None and err is not None and os.path.samestat(out, err)
        ends_line = (self.newline and is_pipe) or ((self.newline or self.has_summary) and is_shared)
        return write(ends_line=in_chat or ends_line, ends_empty=in_chat)

    @contextlib.contextmanager
    def measuring(self) -> Iterator[tuple[Progress, Interrupt]]:
        stream = None if self.quiet or self.verbose > 0 else sys.stderr
        with contextlib.closing(ProgressView(stream)) as view, Interrupt() as stop:
            yield view.show, stop


def show_answer(
    session: Session, prompt: Prompt, output: Output
) -> tuple[int, FinishedEvent | None]:
    from specgen.session.engine import generate

    with Interrupt() as interrupt:
        events = generate(session, prompt, interrupted=interrupt, status=output.status)
        finished = output.show_answer(events)
    session.measurements.save()
    is_cut = finished is not None and finished.finish_reason == "interrupted"
    return interrupt.exit_code if is_cut else 0, finished


def check_file_option(name: str, file: Path | None) -> None:
    """Raise `UsageError` if a file cannot be written to: before hours of work."""
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        what = "is a folder" if file.is_dir() else f"there is no folder {file.parent}"
        raise UsageError(f"{name} {file}: {what}", hint="give the path of a file")


def _status_of(stream: TextIO) -> os.stat_result | None:
    with contextlib.suppress(OSError, ValueError):
        return os.fstat(stream.fileno())
    return None


def console_on(stream: TextIO) -> Console:
    from specgen.render.streams import make_console

    return make_console(stream, os.environ)


def say(text: str) -> None:
    """Print lines on standard error, on a terminal broken between words."""
    lines = text.split("\n")
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns
        whole = partial(textwrap.fill, break_long_words=False, break_on_hyphens=False)
        lines = [whole(line, columns) for line in lines]
    print("\n".join(lines), file=sys.stderr, flush=True)


def say_error(message: str, hint: str | None) -> None:
    say(f"error: {message}" + (f"\nhint: {hint}" if hint else ""))


# --- signals

#: Ctrl-C; what `kill` sends; a closed terminal (not on Windows).
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class Interrupt:
    """A context manager in which the first signal only sets a flag, as a decode cannot be stopped
    in the middle. A second one raises KeyboardInterrupt, which ends the process with the signal's
    exit code, if it `ends_process`.
    """

    def __init__(self, *, ends_process: bool = True) -> None:
        self._ends_process = ends_process
        self._received: int | None = None
        self._previous: dict[int, object] = {}

    def __call__(self) -> bool:
        return self._received is not None

    @property
    def exit_code(self) -> int:
        return 0 if self._received is None else 128 + self._received

    def __enter__(self) -> Interrupt:
        self._received = None
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if kind is KeyboardInterrupt and self._received is not None and self._ends_process:
            raise SystemExit(self.exit_code)

    def _on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        if self._received is not None:
            raise KeyboardInterrupt
        self._received = signal_number
