"""Load models for the commands, with the progress and the notes on standard error."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.cli.output import Output, check_file_option
from specgen.options import (
    Contexts,
    DraftOptions,
    GenerationOptions,
    KernelOptions,
    ModelChoice,
    PrefixOptions,
    SamplerOptions,
)
from specgen.sampler_options import option

if TYPE_CHECKING:
    from specgen.session.open import Check, WantedSession
    from specgen.session.session import Session

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

    #: The models that the user named.
    models: ModelChoice
    #: When an answer ends, and how its tokens are chosen.
    answer: GenerationOptions
    sampling: SamplerOptions
    #: How much is drafted, and how drafts are judged.
    drafting: DraftOptions
    #: The contexts of target and draft, and what computes on the CPU.
    machine: Contexts
    learn: bool = option(
        False,
        "--learn/--no-learn",
        "Keep prompts and answers in the data folder, readable by you alone: the draft model "
        "learns from them, and repetitions of them draft. `specgen draft forget` deletes them.",
        envvar="SPECGEN_LEARN",
        panel="Learning",
    )
    prefixes: PrefixOptions = field(default_factory=PrefixOptions)
    prompt_cache: Path | None = option(
        None,
        "--prompt-cache",
        "Keep in this file what was computed of the prompt, for prompts that begin with the same "
        "text.",
        metavar="FILE",
        show_default="not kept",
        panel="Prompt",
    )

    def wanted_session(self, *, quiet: bool) -> WantedSession:
        """Find the models, fetching what is missing, and return the session that is asked for.

        To learn, answers are kept: drafts learn from them, and n-grams are looked up in them.
        """
        from specgen.models.files import identify, learning_folder
        from specgen.session.choose_models import find_models
        from specgen.session.open import WantedSession
        from specgen.system.folders import data_folder

        check_file_option("--prompt-cache", self.prompt_cache)
        sources = find_models(self.models, quiet=quiet)
        drafting = self.drafting
        learning: Path | None = None
        identity = identify(sources.target) if self.learn else None
        if identity is not None:
            learning = learning_folder(data_folder(), identity)
            drafting = replace(drafting, lookup_store=True)
        wanted = WantedSession.of(
            sources,
            sampling=self.sampling,
            drafting=drafting,
            answer=self.answer,
            contexts=self.machine,
        )
        options = replace(
            wanted.options,
            learning=learning,
            prompt_cache=self.prompt_cache,
            prefixes=self.prefixes,
        )
        return replace(wanted, options=options)


@contextlib.contextmanager
def opened(
    wanted: WantedSession, kernels: KernelOptions, output: Output, check: Check | None = None
) -> Iterator[Session]:
    """Open a session for one command: `open_session` with the command's kernels, log and notes."""
    from specgen.session.open import open_session

    use_kernels(kernels, output)
    with (
        log_shown(output),
        open_session(wanted, output.reporter, clock=time.perf_counter, check=check) as session,
    ):
        yield session


def use_kernels(wanted: KernelOptions, output: Output) -> None:
    """Choose what computes on the CPU, before the first model is loaded.

    From then on, a native crash is one line.
    """
    from specgen.llama.native_end import report_native_failures
    from specgen.session.open import start_kernels

    report_native_failures(sys.stdout.flush)
    status, note = start_kernels(wanted)
    if note and status.hint:
        note += f"\nhint: {status.hint}"
    if note:
        output.note(note)


@contextlib.contextmanager
def log_shown(output: Output) -> Iterator[None]:
    """Show the log on standard error, if the output is verbose.

    Of llama.cpp's log only what matters is shown, each line once; with -vv all.
    """
    if not output.verbose:
        yield
        return
    from specgen.llama import logging_to

    shown: set[str] = set()

    def show(text: str) -> None:
        if output.verbose == 1:
            lines = [line for line in text.splitlines() if _MATTERS.search(line)]
            text = "".join(f"{line}\n" for line in lines if line not in shown)
            shown.update(lines)
        print(text, end="", file=sys.stderr, flush=True)

    own = logging.getLogger("specgen.session")
    handler = logging.StreamHandler()
    own.addHandler(handler)
    own.setLevel(logging.INFO)
    own.propagate = False  # a server's own log has a handler, too
    try:
        with logging_to(show):
            yield
    finally:
        own.removeHandler(handler)
        own.setLevel(logging.NOTSET)
        own.propagate = True
