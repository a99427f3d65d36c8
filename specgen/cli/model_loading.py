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
from specgen.option_fields import option
from specgen.options import (
    Contexts,
    DraftOptions,
    GenerationOptions,
    KernelOptions,
    ModelChoice,
    PrefixOptions,
    SamplerOptions,
)

if TYPE_CHECKING:
    from specgen.session.open import SessionCheck, WantedSession
    from specgen.session.session import Session

#: Lines of llama.cpp's log for users: about models, memory and contexts, and errors.
_RELEVANT_LINE = re.compile(
    r"^print_info: (arch|file type|file size|model params|n_ctx_train)\b"
    r"|^load_tensors: .*(buffer size|offloaded)"
    r"|^llama_context: (n_ctx|flash_attn)  "
    r"|^llama_kv_cache: size|^llama_memory_recurrent: size|^sched_reserve: .*compute buffer size"
    r"|\b([Ee]rror|[Ff]ailed|[Ww]arning)\b"
)


@dataclass(frozen=True, slots=True)
class Setup:
    """The options of commands that load models and answer with them."""

    #: The models that the user named.
    models: ModelChoice
    #: When an answer ends, and how its tokens are chosen.
    answer: GenerationOptions
    #: How the tokens of an answer are sampled.
    sampling: SamplerOptions
    #: How much is drafted, and how drafts are judged.
    drafting: DraftOptions
    #: The contexts of target and draft, and what computes on the CPU.
    machine: Contexts
    learn: bool = option(
        False,
        "--learn/--no-learn",
        "Keep prompts and answers in the data folder, readable by you alone. The draft model "
        "learns from them, and repetitions of them are drafted. `specgen draft forget` deletes "
        "them.",
        envvar="SPECGEN_LEARN",
        panel="Learning",
    )
    #: Which prefixes of prompts are stored on disk.
    prefixes: PrefixOptions = field(default_factory=PrefixOptions)
    phrase_store: bool = option(
        True,
        "--phrase-store/--no-phrase-store",
        "Keep phrases that answers have in common in the cache folder, and draft from them.",
        envvar="SPECGEN_PHRASE_STORE",
        panel="Other texts",
    )
    prompt_cache: Path | None = option(
        None,
        "--prompt-cache",
        "Keep the prefilled prompt in this file, so that later prompts that begin with the same "
        "text start faster.",
        metavar="FILE",
        show_default="not kept",
        panel="Prompt",
    )

    def wanted_session(self, *, quiet: bool) -> WantedSession:
        """Find the models, download missing ones, and return the session to open.

        With --learn, answers are kept: the draft learns from them, and n-grams are looked up in
        them. A target whose file cannot be identified learns nothing.
        """
        from specgen.models.files import identify, learning_folder
        from specgen.session.choose_models import find_models
        from specgen.session.open import WantedSession
        from specgen.system.folders import data_folder

        check_file_option("--prompt-cache", self.prompt_cache)
        sources = find_models(self.models, quiet=quiet)
        drafting = self.drafting
        learning_path: Path | None = None
        identity = identify(sources.target) if self.learn else None
        if identity is not None:
            learning_path = learning_folder(data_folder(), identity)
            drafting = replace(drafting, lookup_store=True)
        wanted = WantedSession.of(
            sources,
            sampling=self.sampling,
            drafting=drafting,
            generation=self.answer,
            contexts=self.machine,
        )
        options = replace(
            wanted.options,
            learning=learning_path,
            prompt_cache=self.prompt_cache,
            prefixes=self.prefixes,
            phrase_store=self.phrase_store,
        )
        return replace(wanted, options=options)


@contextlib.contextmanager
def opened(
    wanted: WantedSession,
    kernels: KernelOptions,
    output: Output,
    check: SessionCheck | None = None,
) -> Iterator[Session]:
    """Open a session for a command, as `open_session` does, with its kernels, log and notes.

    Args:
        wanted: The session to open.
        kernels: Which kernels compute on the CPU.
        output: Where the log, the notes and the progress are shown.
        check: Checks the session before slow steps, and raises if the command cannot use it.
    """
    from specgen.session.open import open_session

    use_kernels(kernels, output)
    with (
        log_shown(output),
        open_session(wanted, output.reporter, clock=time.perf_counter, check=check) as session,
    ):
        yield session


def use_kernels(wanted: KernelOptions, output: Output) -> None:
    """Choose the kernels that compute on the CPU, before the first model is loaded.

    From then on, a native crash is reported in one line.
    """
    from specgen.llama.native_failures import report_native_failures
    from specgen.session.open import start_kernels
    from specgen.system.folders import note_about_folders

    report_native_failures(sys.stdout.flush)
    status, note = start_kernels(wanted)
    if note and status.hint:
        note += f"\nhint: {status.hint}"
    for each in (note_about_folders(), note):
        if each is not None:
            output.note(each)


@contextlib.contextmanager
def log_shown(output: Output) -> Iterator[None]:
    """Show the logs of llama.cpp and specgen on standard error during the block, if verbose.

    With -v, only relevant lines of llama.cpp's log are shown, each once; with -vv all of it.
    """
    if not output.verbose:
        yield
        return
    from specgen.llama import logging_to

    shown: set[str] = set()

    def show(text: str) -> None:
        if output.verbose == 1:
            lines = [line for line in text.splitlines() if _RELEVANT_LINE.search(line)]
            text = "".join(f"{line}\n" for line in lines if line not in shown)
            shown.update(lines)
        print(text, end="", file=sys.stderr, flush=True)

    session_log = logging.getLogger("specgen.session")
    handler = logging.StreamHandler()
    session_log.addHandler(handler)
    session_log.setLevel(logging.INFO)
    session_log.propagate = False  # the server's log would show it a second time
    try:
        with logging_to(show):
            yield
    finally:
        session_log.removeHandler(handler)
        session_log.setLevel(logging.NOTSET)
        session_log.propagate = True
