"""What commands show: answers, and on standard error notes and progress."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specgen.cli.process import Interrupt
from specgen.errors import UsageError
from specgen.options import GenerationOptions, Show

if TYPE_CHECKING:
    from specgen.events import FinishedEvent
    from specgen.render.streams import Renderer
    from specgen.session.loaded_models import Models
    from specgen.session.prompts import Prompt
    from specgen.system.progress import Progress


@dataclass(frozen=True, slots=True)
class Output:
    """How a command shows answers, and what it prints on standard error."""

    #: Which marks an answer's tokens carry on a terminal.
    show: Show = "accepted"
    #: Whether a summary follows an answer; None prints one unless `json` or `quiet` is set.
    stats: bool | None = None
    #: Whether events are printed instead of the answer.
    json: bool = False
    quiet: bool = False
    #: 1 prints what matters of llama.cpp's log, 2 all of it.
    verbose: int = 0
    #: Whether an answer in a pipe ends with a line break.
    newline: bool = True

    @property
    def has_summary(self) -> bool:
        return self.stats if self.stats is not None else not (self.json or self.quiet)

    def note(self, text: str) -> None:
        """Print a note on standard error, unless the command is to be quiet."""
        if self.quiet:
            return
        line = f"note: {text}"
        if sys.stderr.isatty():
            columns = shutil.get_terminal_size().columns
            line = textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)
        print(line, file=sys.stderr)

    def check(self, answer: GenerationOptions) -> None:
        """Raise `UsageError` if an answer's options ask for something that this output cannot show."""
        if answer.logprobs is not None and not self.json:
            raise UsageError("--logprobs needs --json: only events have log-probabilities")

    def renderer(self, *, folds: bool = False) -> Renderer:
        """Return a new renderer for one answer; with `folds` a thinking block becomes a line."""
        from specgen.render.select import make_renderer

        return make_renderer(
            stdout=sys.stdout,
            stderr=sys.stderr,
            environ=os.environ,
            json=self.json,
            show=self.show,
            stats=self.has_summary,
            quiet=self.quiet,
            verbose=self.verbose > 0,
            folds=folds,
            newline=self.newline,
        )

    @contextlib.contextmanager
    def measuring(self) -> Iterator[tuple[Progress, Interrupt]]:
        """Yield what shows the progress of a measurement, and what ends it at a signal."""
        from specgen.render.progress_bars import progress_bar

        with progress_bar(quiet=self.quiet or self.verbose > 0) as progress, Interrupt() as stop:
            yield progress, stop


def show_answer(
    loaded: Models,
    prompt: Prompt,
    output: Output,
    on_finished: Callable[[FinishedEvent], None] = lambda _finished: None,
) -> int:
    """Generate an answer and show it; return the exit code. `on_finished` gets its last event."""
    from specgen.events import FinishedEvent
    from specgen.session.engine import generate

    interrupt = Interrupt()
    finish_reason = ""
    with interrupt, output.renderer() as renderer:
        for event in generate(
            loaded,
            prompt,
            interrupted=interrupt,
            estimate_gain=output.has_summary or output.json,
        ):
            renderer.handle(event)
            if isinstance(event, FinishedEvent):
                finish_reason = event.finish_reason
                on_finished(event)
    loaded.memory.save()
    return interrupt.exit_code if finish_reason == "interrupted" else 0
