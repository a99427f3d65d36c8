"""Load models for the commands, and show it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.cli.output import Output
from specgen.measure.selection.default_draft import DraftChoice
from specgen.measure.selection.model_choice import ModelChoice
from specgen.measure.selection.session_opening import (
    Check,
    SessionOpener,
    find_models,
    session_options,
    start_kernels,
)
from specgen.options import Contexts, DraftOptions, GenerationOptions, KernelOptions, SamplerOptions

if TYPE_CHECKING:
    from specgen.measure.selection.resolve import Sources
    from specgen.options import SessionOptions
    from specgen.session.calibration.memory import Memory
    from specgen.session.loaded_models import Models

#: Lines of llama.cpp's log that matter to users: models, memory, contexts, and what went wrong.
_MATTERS = re.compile(
    r"^print_info: (arch|file type|file size|model params|n_ctx_train)\b"
    r"|^load_tensors: .*(buffer size|offloaded)"
    r"|^llama_context: (n_ctx|flash_attn)  "
    r"|^llama_kv_cache: size|^llama_memory_recurrent: size|^sched_reserve: .*compute buffer size"
    r"|\b([Ee]rror|[Ff]ailed|[Ww]arning)\b"
)


@dataclass(frozen=True, slots=True)
class Setup:
    """The options of models and of their answers."""

    models: ModelChoice
    answer: GenerationOptions
    sampling: SamplerOptions
    drafting: DraftOptions
    machine: Contexts
    learn: bool = False
    prompt_cache: Path | None = None

    def find(self, output: Output) -> tuple[Sources, SessionOptions]:
        """Return the files of the models, fetched if necessary, and the options to load them with."""
        sources = find_models(self.models, quiet=output.quiet)
        options = session_options(
            sources,
            self.sampling,
            self.drafting,
            self.answer,
            self.machine,
            learn=self.learn,
            prompt_cache=self.prompt_cache,
        )
        return sources, options

    @contextlib.contextmanager
    def opened(self, output: Output, check: Check = lambda _loaded: None) -> Iterator[Models]:
        """Find and load the models; close them at the end. Raise what `opened` raises."""
        sources, options = self.find(output)
        with opened(options, self.machine.kernels, output, sources.drafts, check) as loaded:
            yield loaded


@contextlib.contextmanager
def opened(
    options: SessionOptions,
    kernels: KernelOptions,
    output: Output,
    drafts: Sequence[DraftChoice] = (),
    check: Check = lambda _loaded: None,
    *,
    drafts_later: bool = False,
) -> Iterator[Models]:
    """Load the models, as a `SessionOpener` does; close them at the end. Raise `ModelFileError`,
    `PairError`, what `check` raises, and `UsageError` if kernels that were asked for cannot be used."""
    use_kernels(kernels, output)
    opener = make_opener(drafts, output, check, drafts_later=drafts_later)
    with log_shown(output), opener.open(options) as loaded:
        yield loaded


def use_kernels(wanted: KernelOptions, output: Output) -> None:
    """Choose what computes on the CPU, before the first model is loaded; print a note if the kernels are
    missing or cannot be used. From then on, a crash in native code is reported in a line. Raise `UsageError`
    if kernels that were asked for cannot be used."""
    from specgen.llama.library import end_with_a_line

    end_with_a_line(sys.stdout.flush)
    status, note = start_kernels(wanted)
    if note:
        hint = f"\nhint: {status.hint}" if status.hint else ""
        output.note(f"{note}{hint}")


@contextlib.contextmanager
def log_shown(output: Output) -> Iterator[None]:
    """Show llama.cpp's log on standard error, if the output is verbose: what matters of it, or with -vv all."""
    if not output.verbose:
        yield
        return
    from specgen.llama import logging_to

    def show(text: str) -> None:
        print(text, end="", file=sys.stderr, flush=True)

    with logging_to(show if output.verbose > 1 else what_matters(show)):
        yield


def what_matters(show: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that takes a log in pieces, and shows the lines of it that matter to users, each once."""
    rest, shown = "", set[str]()

    def take(text: str) -> None:
        nonlocal rest
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            if _MATTERS.search(line) and line not in shown:
                shown.add(line)
                show(f"{line}\n")

    return take


def make_opener(
    drafts: Sequence[DraftChoice],
    output: Output,
    check: Check = lambda _loaded: None,
    *,
    drafts_later: bool = False,
    memory: Memory | None = None,
) -> SessionOpener:
    """Return a `SessionOpener`; on a terminal, it shows that models are loading. Notes go to standard
    error."""

    @contextlib.contextmanager
    def loading(name: str) -> Iterator[None]:
        if output.quiet or output.verbose or not sys.stderr.isatty():
            yield
            return
        from specgen.render.select import make_console

        with make_console(sys.stderr, os.environ).status(f"loading {name}"):
            yield

    return SessionOpener(
        drafts,
        clock=time.perf_counter,
        note=output.note,
        details=output.verbose > 0,
        drafts_later=drafts_later,
        check=check,
        loading=loading,
        memory=memory,
    )
