"""Load models and show it: shared by the commands that load models."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from specgen.options import KernelChoice
from specgen.selection.default_draft import DraftChoice
from specgen.selection.session_opening import SessionOpener

if TYPE_CHECKING:
    from specgen.engine.models import Models
    from specgen.options import SessionOptions


def use_kernels(wanted: KernelChoice, *, quiet: bool) -> None:
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
    if wanted == "auto" and status.reason and status.path is not None and not quiet:
        print(f"note: not using specgen's kernels: {status.reason}", file=sys.stderr)
        if status.hint:
            print(f"hint: {status.hint}", file=sys.stderr)


@contextlib.contextmanager
def log_shown(wanted: bool) -> Iterator[None]:
    """Show llama.cpp's log on standard error, if wanted."""
    if not wanted:
        yield
        return
    from specgen.backend.llama import logging_to

    with logging_to(lambda text: print(text, end="", file=sys.stderr, flush=True)):
        yield


def open_session(
    options: SessionOptions,
    *,
    quiet: bool,
    verbose: bool = False,
    drafts: Sequence[DraftChoice] = (),
) -> Models:
    """Load the models, as a `SessionOpener` does. Raises `ModelFileError`, `PairError`."""
    return make_opener(drafts, quiet=quiet, verbose=verbose).open(options)


def make_opener(
    drafts: Sequence[DraftChoice] = (), *, quiet: bool, verbose: bool = False
) -> SessionOpener:
    """Return a `SessionOpener`; on a terminal, it shows that models are loading. Notes go to standard
    error."""

    def note(text: str) -> None:
        if not quiet:
            print(f"note: {text}", file=sys.stderr)

    return SessionOpener(
        drafts,
        clock=time.perf_counter,
        note=note,
        details=verbose,
        loading=lambda name: _loading(name, quiet=quiet or verbose),
    )


@contextlib.contextmanager
def _loading(name: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show on a terminal what is being loaded, and the texts that the yielded function gets."""
    if quiet or not sys.stderr.isatty():
        yield lambda _what: None
        return
    from specgen.render import make_console

    with make_console(sys.stderr, os.environ).status(f"loading {name}") as status:
        yield status.update
