"""From what the user asked for to a session: shared by the commands that load models."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.cli import flags
from specgen.cli.sources import Sources, resolve
from specgen.options import DraftOptions, GenerationOptions, SamplerOptions

if TYPE_CHECKING:
    from specgen.session import Session, SessionOptions


def find_models(choice: flags.ModelChoice, *, quiet: bool) -> Sources:
    """The files of the run, fetched if need be, with progress on standard error."""
    from specgen.models import SilentProgress, fetch, load_registry, stderr_progress

    registry = load_registry()

    def get(name: str) -> Path:
        progress = SilentProgress() if quiet else stderr_progress()
        return fetch(registry.model(name), progress=progress)

    return resolve(choice.target, choice.draft, choice.pair, registry, get)


def session_options(
    sources: Sources,
    sampling: SamplerOptions,
    drafting: DraftOptions,
    answer: GenerationOptions,
    machine: flags.Contexts,
) -> SessionOptions:
    """Everything that decides what the session does."""
    from specgen.session import SessionOptions

    return SessionOptions(
        target=sources.target,
        draft=sources.draft,
        sampler=sampling,
        drafting=drafting,
        generation=answer,
        target_context=machine.target,
        draft_context=machine.draft,
    )


@contextlib.contextmanager
def log_shown(wanted: bool) -> Iterator[None]:
    """Show llama.cpp's log on standard error, if wanted."""
    if not wanted:
        yield
        return
    from specgen.backend.llama import logging_to

    with logging_to(lambda text: print(text, end="", file=sys.stderr, flush=True)):
        yield


def open_session(options: SessionOptions, *, quiet: bool) -> Session:
    """Load the models; on a terminal, say so while it lasts."""
    from specgen.session import Session

    if quiet or not sys.stderr.isatty():
        return Session(options, time.perf_counter)
    from specgen.render import make_console

    console = make_console(sys.stderr, os.environ)
    with console.status(f"loading {options.target.name}"):
        return Session(options, time.perf_counter)
