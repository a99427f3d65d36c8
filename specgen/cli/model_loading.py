"""Load models for the commands, and show it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from specgen.cli.output import Output
from specgen.options import KernelChoice
from specgen.selection.default_draft import DraftChoice
from specgen.selection.session_opening import SessionOpener

if TYPE_CHECKING:
    from specgen.engine.models import Models
    from specgen.options import SessionOptions


@contextlib.contextmanager
def opened(
    options: SessionOptions,
    kernels: KernelChoice,
    output: Output,
    drafts: Sequence[DraftChoice] = (),
) -> Iterator[Models]:
    """Load the models, as a `SessionOpener` does; close them at the end. Raises `ModelFileError`,
    `PairError`, and `UsageError` if kernels that were asked for cannot be used."""
    use_kernels(kernels, output)
    with log_shown(output), make_opener(drafts, output).open(options) as loaded:
        yield loaded


def use_kernels(wanted: KernelChoice, output: Output) -> None:
    """Choose what computes on the CPU, before the first model is loaded; print a note if the kernels are
    there but cannot be used. From then on, a crash in native code is reported in a line. Raises `UsageError`
    if kernels that were asked for cannot be used."""
    from specgen.backend.llama.file_check import remember_checks
    from specgen.backend.llama.library import end_with_a_line
    from specgen.catalogue import cache_folder
    from specgen.kernels import choose_kernels

    end_with_a_line(sys.stdout.flush)
    remember_checks(cache_folder())
    status = choose_kernels(wanted, cache_folder())
    if wanted == "auto" and status.reason and status.path is not None:
        hint = f"\nhint: {status.hint}" if status.hint else ""
        output.note(f"not using specgen's kernels: {status.reason}{hint}")


@contextlib.contextmanager
def log_shown(output: Output) -> Iterator[None]:
    """Show llama.cpp's log on standard error, if the output is verbose."""
    if not output.verbose:
        yield
        return
    from specgen.backend.llama import logging_to

    with logging_to(lambda text: print(text, end="", file=sys.stderr, flush=True)):
        yield


def make_opener(drafts: Sequence[DraftChoice], output: Output) -> SessionOpener:
    """Return a `SessionOpener`; on a terminal, it shows that models are loading. Notes go to standard
    error."""

    @contextlib.contextmanager
    def loading(name: str) -> Iterator[Callable[[str], None]]:
        if output.quiet or output.verbose or not sys.stderr.isatty():
            yield lambda _what: None
            return
        from specgen.render.select import make_console

        with make_console(sys.stderr, os.environ).status(f"loading {name}") as status:
            yield status.update

    return SessionOpener(
        drafts,
        clock=time.perf_counter,
        note=output.note,
        details=output.verbose,
        loading=loading,
    )
