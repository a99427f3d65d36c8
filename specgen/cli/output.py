"""What commands show: answers, notes and progress; and the signals that end them.

An answer goes to standard output, everything else to standard error.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO, cast

from specgen.errors import UsageError
from specgen.option_fields import option
from specgen.options import GenerationOptions, Show
from specgen.system.machine import process_age_s
from specgen.system.progress import INTERVAL_S, Progress, ProgressKind, ProgressView
from specgen.system.quantities import human_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from specgen.events import Event, FinishedEvent, PromptEvent
    from specgen.render.streams import Renderer
    from specgen.session.open import Reporter
    from specgen.session.prompts import Prompt
    from specgen.session.session import Session


#: The number of likely tokens whose probabilities --html and --show rounds include.
_N_TOP_TOKENS = 10
_output = partial(option, panel="Output")


@dataclass(frozen=True, slots=True)
class Output:
    """How a command shows answers, and what it prints on standard error."""

    show: Show = _output(
        "accepted",
        "--show",
        "How drafts are shown on a terminal: accepted (rejected tokens vanish after their round), "
        "all (they stay), or none (plain text). rounds prints a line for each round, in a pipe "
        "too (with -v the probabilities).",
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
        "Write an HTML page that replays the answer round by round, with both models' "
        "probabilities.",
        metavar="FILE",
    )
    newline: bool = _output(
        True,
        "--newline/--no-newline",
        "In a pipe or a file, end the answer with a line break.",
        show_default="on; in fim off",
    )
    quiet: bool = _output(False, "--quiet -q", "Print only errors on standard error.")
    verbose: int = _output(
        0,
        "--verbose -v",
        "Print more on standard error: models, memory, contexts; with -vv all of llama.cpp's log.",
        count=True,
        show_default=False,
    )
    #: Whether answers may begin with a thinking block; not an option, commands set it.
    thinks: bool = False

    def __post_init__(self) -> None:
        if self.quiet and self.verbose:
            raise UsageError(
                "--quiet and --verbose cannot be used together", hint="use one of them"
            )

    @property
    def has_summary(self) -> bool:
        """Whether an answer's figures are printed after it, at least in one line."""
        if self.stats is not None:
            return self.stats
        return not (self.json or self.quiet)

    def note(self, text: str) -> None:
        """Print a note on standard error, unless the output is quiet."""
        if not self.quiet:
            say(f"note: {text}")

    def status(self, text: str) -> contextlib.AbstractContextManager[object]:
        """Return a context manager that shows on a terminal what is being done inside it."""
        if self.quiet or self.verbose or not sys.stderr.isatty():
            return contextlib.nullcontext()
        from specgen.render.rows import clean_line  # the names of files may have escape codes

        return console_on(sys.stderr).status(clean_line(text))

    @property
    def reporter(self) -> Reporter:
        """The callbacks that show notes and progress while models are loaded."""
        from specgen.session.open import Reporter

        view = LoadingView(self)
        return Reporter(self.note, view.status, view.packing, shows_log=self.verbose > 0)

    def with_logprobs(self, answer: GenerationOptions) -> GenerationOptions:
        """Return the options of an answer, with the log-probabilities that this output shows.

        Raises:
            UsageError: If the options conflict, or the file of --html cannot be written.
        """
        if answer.logprobs is not None and not self.json:
            raise UsageError("--logprobs needs --json: only events have log-probabilities")
        check_file_option("--html", self.html)
        rounds_have_probs = self.show == "rounds" and self.verbose and not self.json
        if answer.logprobs is None and (rounds_have_probs or self.html):
            return replace(answer, logprobs=_N_TOP_TOKENS)
        return answer

    def show_events(
        self, events: Generator[Event, None, None], *, in_chat: bool = False
    ) -> FinishedEvent | None:
        """Show the events of an answer as they come, then its summary.

        Args:
            events: The generator of the answer, which is closed at the end.
            in_chat: Whether the answer belongs to a conversation.

        Returns:
            The last event of the answer, with its figures; None if the answer did not get that far.
        """
        from specgen.events import FinishedEvent, PromptEvent
        from specgen.render.live import LiveRenderer

        renderer = self.renderer(sys.stdout, sys.stderr, os.environ, in_chat=in_chat)
        shown: list[Event] = []
        with contextlib.closing(events), renderer:
            for event in events:
                renderer.handle(event)
                shown.append(event)
        if self.html is not None:
            _write_replay(self.html, shown)
        prompt = next((event for event in shown if isinstance(event, PromptEvent)), None)
        finished = next((event for event in shown if isinstance(event, FinishedEvent)), None)
        if prompt is not None and finished is not None and self.has_summary:
            has_colours = isinstance(renderer, LiveRenderer) and self.show != "none"
            self._print_summary(prompt, finished, has_colours=has_colours, in_chat=in_chat)
        return finished

    def _print_summary(
        self,
        prompt: PromptEvent,
        finished: FinishedEvent,
        *,
        has_colours: bool,
        in_chat: bool,
    ) -> None:
        """Print the figures of an answer on standard error.

        Args:
            prompt: The first event of the answer.
            finished: The last one.
            has_colours: Whether the answer's tokens were coloured by their kinds.
            in_chat: Whether the answer belongs to a conversation.
        """
        from specgen.render.summary import print_summary

        shows_all = self.stats is True
        # A conversation does not repeat the legend of the colours after each answer.
        show_legend = has_colours and sys.stderr.isatty() and (shows_all or not in_chat)
        print_summary(
            console_on(sys.stderr),
            finished,
            prompt,
            whole=shows_all,
            show_legend=show_legend,
        )

    def renderer(
        self,
        stdout: TextIO,
        stderr: TextIO,
        environ: Mapping[str, str],
        *,
        in_chat: bool = False,
    ) -> Renderer:
        """Return the renderer that shows an answer on `stdout`, and notices on `stderr`.

        Args:
            stdout: The stream of the answer.
            stderr: The stream of notices.
            environ: The environment variables, some of which decide about colours.
            in_chat: Whether the answer belongs to a conversation. Thoughts are then folded on a
                terminal, and each answer ends with a line break.
        """
        from specgen.render import live, rounds, streams

        stdout.flush()  # so that earlier output comes first
        if self.json:
            return streams.JsonlRenderer(stdout.buffer)
        verbose = self.verbose > 0
        notice = None
        if not self.quiet:
            errors = streams.make_console(stderr, environ)
            notice = partial(streams.print_notice, errors, verbose=verbose)
        console = streams.make_console(stdout, environ)
        if self.show == "rounds":
            return rounds.RoundsRenderer(console, notice, verbose=verbose)
        thinks = self.thinks or in_chat
        if not stdout.isatty():
            return streams.TextRenderer(
                stdout.buffer,
                notice,
                thinks=thinks,
                ends_line=in_chat or self._ends_line(stdout, stderr),
                ends_empty=in_chat,
            )
        if console.is_dumb_terminal or console.legacy_windows:  # without escape codes
            encoding = console.encoding
            return streams.TextRenderer(
                stdout.buffer,
                notice,
                thinks=thinks,
                encoding=encoding,
                is_terminal=True,
            )
        return live.LiveRenderer(console, self.show, notice, thinks=thinks, folds=in_chat)

    def _ends_line(self, stdout: TextIO, stderr: TextIO) -> bool:
        """Return whether to add a line break after an answer, if `stdout` is not a terminal."""
        stdout_stat = _stat_of(stdout)
        stderr_stat = _stat_of(stderr)
        if stdout_stat is None:  # an unknown kind of stream
            return False
        # With 2>&1, the summary needs a line of its own.
        if stderr_stat is not None and os.path.samestat(stdout_stat, stderr_stat):
            return self.newline or self.has_summary
        return self.newline

    @contextlib.contextmanager
    def measuring(self, kind: ProgressKind = "counts") -> Iterator[tuple[Progress, Interrupt]]:
        """Yield a callback that shows the progress of a measurement, and the flag that ends it.

        The flag is set by a signal.

        Args:
            kind: What the progress counts.
        """
        stream = None if self.quiet or self.verbose > 0 else sys.stderr
        with contextlib.closing(ProgressView(stream, kind=kind)) as view, Interrupt() as stop:
            yield view.show, stop


class LoadingView:
    """Shows on standard error what is being done while models are loaded.

    On a terminal this is a spinner. Elsewhere only packing, which may take minutes, is shown, by a
    line now and then.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        #: The spinner, while it is shown.
        self._spinner: Status | None = None
        #: When the latest line about packing was written, or else when loading began.
        self._latest_s = time.monotonic()

    @contextlib.contextmanager
    def status(self, text: str) -> Iterator[None]:
        """Show what is being done in the block."""
        self._latest_s = time.monotonic()
        with self._output.status(text) as spinner:
            self._spinner = cast("Status | None", spinner)
            try:
                yield
            finally:
                self._spinner = None

    def packing(self, n_done: int, n_all: int) -> None:
        """Show how many bytes of the weights are packed."""
        percent = 100 * n_done // max(1, n_all)
        text = f"packing {percent}% of {human_bytes(n_all)}, needed once"
        if self._spinner is not None:
            self._spinner.update(text)
            return
        now_s = time.monotonic()
        if not self._output.quiet and now_s - self._latest_s >= INTERVAL_S:
            self._latest_s = now_s
            say(text)


def show_answer(
    session: Session,
    prompt: Prompt,
    output: Output,
) -> tuple[int, FinishedEvent | None]:
    """Generate an answer and show it, until a signal ends it.

    Returns:
        The exit code of the signal, or 0 if none cut the answer off; and the answer's last event,
        or None as in `Output.show_events`.
    """
    from specgen.session.engine import generate

    # What the session has not counted: imports, finding the models, and making the prompt.
    uncounted_s = process_age_s() - sum(session.setup_s.values())
    session.setup_s["starting_s"] = max(0.0, uncounted_s)
    with Interrupt() as interrupt:
        events = generate(session, prompt, interrupted=interrupt, status=output.status)
        finished = output.show_events(events)
    session.measurements.save()
    # A signal that comes after the last token changes nothing.
    if finished is not None and finished.finish_reason == "interrupted":
        return interrupt.exit_code, finished
    return 0, finished


def _write_replay(file: Path, events: Sequence[Event]) -> None:
    """Write a page that replays an answer with these events."""
    from specgen.events import to_json_object
    from specgen.render.streams import REPLAY, write_page

    write_page(file, REPLAY, [to_json_object(event) for event in events])


def check_file_option(name: str, file: Path | None) -> None:
    """Check the path of a file to write, before hours of work.

    Args:
        name: The option that names the file, for messages.
        file: The path; None is not checked.

    Raises:
        UsageError: If the path is a folder, or its folder does not exist.
    """
    if file is None:
        return
    hint = "give the path of a file"
    if file.is_dir():
        raise UsageError(f"{name} {file}: is a folder", hint)
    if not file.parent.is_dir():
        raise UsageError(f"{name} {file}: there is no folder {file.parent}", hint)


def _stat_of(stream: TextIO) -> os.stat_result | None:
    """Return the status of a stream's file; None if it has no file, or a closed one."""
    with contextlib.suppress(OSError, ValueError):
        return os.fstat(stream.fileno())
    return None


def console_on(stream: TextIO) -> Console:
    """Return a console for a standard stream."""
    from specgen.render.streams import make_console

    return make_console(stream, os.environ)


def say(text: str) -> None:
    """Print lines on standard error, wrapped between words if it is a terminal."""
    lines = text.split("\n")
    if sys.stderr.isatty():
        from specgen.render.rows import clean  # the names of files may have escape codes

        columns = shutil.get_terminal_size().columns
        lines = [_wrapped(clean(line), columns) for line in lines]
    print("\n".join(lines), file=sys.stderr, flush=True)


def _wrapped(line: str, columns: int) -> str:
    """Return a line, broken between words to fit a terminal of this width."""
    from wcwidth import wrap  # unlike textwrap, it knows that some characters take two columns

    rows = wrap(line, columns, break_long_words=False, break_on_hyphens=False)
    return "\n".join(rows)


def say_error(message: str, hint: str | None) -> None:
    """Print an error on standard error, and what to do about it."""
    text = f"error: {message}"
    if hint:
        text += f"\nhint: {hint}"
    say(text)


# --- signals

#: The signals of Ctrl-C, of `kill`, and of a closed terminal (which Windows does not have).
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


def _is_hangup_ignored(number: int) -> bool:
    """Return whether this is the signal of a closed terminal, and `nohup` lets us ignore it."""
    is_hangup = number == getattr(signal, "SIGHUP", None)
    return is_hangup and signal.getsignal(number) == signal.SIG_IGN


class Interrupt:
    """A context manager in which the first signal only sets a flag: a decode cannot be stopped.

    Calling the object returns the flag, which is reset when the context is entered. A second signal
    raises KeyboardInterrupt, for work that does not check the flag.
    """

    def __init__(self, *, ends_process: bool = True) -> None:
        """Create the flag.

        Args:
            ends_process: Whether a second signal ends the process, with the first signal's exit
                code. Otherwise KeyboardInterrupt leaves the context.
        """
        self._ends_process = ends_process
        #: The number of the first signal; None while the flag is not set.
        self._first_signal: int | None = None
        #: The former handlers of the signals, by the signals' numbers.
        self._former_handlers: dict[int, object] = {}

    def __call__(self) -> bool:
        return self._first_signal is not None

    @property
    def exit_code(self) -> int:
        """The exit code for the first signal; 0 if there was none."""
        if self._first_signal is None:
            return 0
        return 128 + self._first_signal  # as shells report it

    def __enter__(self) -> Interrupt:
        self._first_signal = None
        for number in SIGNALS:
            if not _is_hangup_ignored(number):
                self._former_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        *_: object,
    ) -> None:
        for number, handler in self._former_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if kind is KeyboardInterrupt and self() and self._ends_process:
            raise SystemExit(self.exit_code)

    def _on_signal(
        self,
        signal_number: int,
        frame: FrameType | None,
    ) -> None:
        if self._first_signal is not None:
            raise KeyboardInterrupt
        self._first_signal = signal_number
