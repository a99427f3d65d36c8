"""``specgen draft find``: finds the best draft for a target by measuring."""

from __future__ import annotations

import datetime
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Argument, Option

from specgen.cli import flags
from specgen.cli.flags.trials import TRIALS, Trials
from specgen.cli.model_loading import opened
from specgen.cli.output import Output
from specgen.errors import ModelFileError, UsageError
from specgen.options import Contexts, DraftOptions, GenerationOptions, SamplerOptions
from specgen.session.files import DraftChoice, Sources, find_target, name_of
from specgen.system.machine import notes_on_figures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specgen.measure.search import Refused, Search
    from specgen.options import DraftSource, SessionOptions


@flags.takes_options(
    target=flags.target_option(),
    files=Argument(
        metavar="FILES_OR_FOLDERS",
        help="GGUF files to try, and folders with such files.",
        show_default=False,
    ),
    save=Option(
        "--save",
        help="Save the fastest draft for this target: `specgen run` without --draft uses it.",
    ),
    trials=TRIALS.but(n_prompts=6),
    chat=flags.CHAT,
    drafting=flags.drafting,
    machine=flags.machine,
    as_json=flags.JSON_REPORT,
    output=flags.loudness,
)
def find(
    *,
    target: str,
    files: list[Path] | None = None,
    save: bool = False,
    trials: Trials,
    chat: bool | None = None,
    drafting: DraftOptions,
    machine: Contexts,
    as_json: bool = False,
    output: Output,
) -> int:
    """Find the draft that makes a target fastest on this machine.

    It tries the files that you name; without any, the models of `specgen models list` that are on this
    disk; and in any case n-grams and the target's own MTP layers. The target answers a few prompts
    once; each draft is then replayed on these answers, and ranked by its
    speed-up over plain decoding.

    In a pipe, it prints the columns' names, then one line for each draft, the best first. The
    columns, separated by tabs: the file, "mtp", "ngram" or "none"; the
    speed-up over plain decoding, and that of the worst prompt; tokens per
    second; acceptance rate; tokens per pass of the target; milliseconds to draft a token,
    and to begin.
    """
    from specgen.measure.search import find_candidates, search_drafts
    from specgen.models.files import identify
    from specgen.models.saved_drafts import saved_draft

    if drafting.n_max == 0:
        raise UsageError("--draft-max 0 drafts nothing, so there is nothing to find")
    texts = trials.texts()
    answer = GenerationOptions(max_tokens=trials.max_tokens)
    for file in files or ():
        _check_named(file)
    path = find_target(target, quiet=output.quiet)
    if save and (identity := identify(path)) is not None:
        saved_draft(identity)  # a damaged file is reported now, not after minutes
    options = trial_options(path, drafting, answer, machine)
    with (
        opened(options, machine.kernels, output) as loaded,
        output.measuring() as (progress, stop),
    ):
        found = find_candidates(files, [], path) if files else known_candidates([], path)
        search = search_drafts(
            loaded, *found, texts, chat=chat, interrupted=stop, progress=progress
        )
    show_search(search, output, save=save, as_json=as_json)
    return stop.exit_code


def _check_named(path: Path) -> None:
    """Raise `ModelFileError` if there is nothing to try: this is said before anything is measured."""
    if not path.exists():
        raise ModelFileError(f"{path}: there is no such file or folder")
    if path.is_dir() and not any(path.glob("*.gguf")):
        raise ModelFileError(
            f"{path}: the folder has no GGUF files",
            hint="folders in it are not searched: name them",
        )


def trial_options(
    target: Path, drafting: DraftOptions, answer: GenerationOptions, machine: Contexts
) -> SessionOptions:
    """Return the options with which drafts are tried."""
    from specgen.session.open import session_options

    sources = Sources(target, (DraftChoice("none"),))
    return session_options(sources, SamplerOptions(), drafting, answer, machine)


def known_candidates(named: Sequence[Path], target: Path) -> tuple[list[Path], list[Refused]]:
    """Return the files to try as drafts for a target, those that specgen has on this disk among them, and
    the named files that are refused."""
    from specgen.measure.search import find_candidates
    from specgen.models.hub import locate
    from specgen.models.registry import load_registry

    known = [path for path in map(locate, load_registry().models.values()) if path is not None]
    return find_candidates(named, known, target)


def show_search(
    search: Search | None, output: Output, *, save: bool, as_json: bool
) -> DraftSource | None:
    """Save the best draft for the target if `save` is set, and print the ranking. Return what was saved."""
    if search is not None:
        try:
            if save and not search.is_interrupted:
                search = _save_best(search)
        finally:  # show the measurements even if they cannot be saved
            print_search(search, as_json=as_json)
    notes = notes_on(search)
    saved = None if search is None else search.saved
    if search is not None and saved is not None:
        target = search.target.name
        notes.append(f"for {target}, `specgen run` without --draft now takes: {name_of(saved)}")
    if search is None or search.is_interrupted:
        unsaved = ", nothing was saved" if save else ""
        notes.append(f"interrupted: not everything was tried{unsaved}")
    for note in notes:
        output.note(note)
    return saved


def _save_best(search: Search) -> Search:
    from specgen.models.files import identify
    from specgen.models.saved_drafts import SavedDraft, save_draft

    identity = identify(search.target)
    assert identity is not None, "a target that was opened"
    best = search.tried[0]
    names = ("speedup", "worst_speedup", "tokens_per_s", "acceptance_rate", "draft_token_s")
    figures = {name: getattr(best.figures, name) for name in names}
    today = datetime.datetime.now().astimezone().date()
    save_draft(identity, SavedDraft(best.draft, today, **figures))
    return replace(search, saved=best.draft)


def print_search(search: Search, *, as_json: bool) -> None:
    """Print the ranking: on a terminal as a table and three sentences."""
    from specgen.measure.search import advice
    from specgen.render.tables import draft_lines, print_draft_table

    if as_json:
        print(json.dumps(search.to_json_object(), indent=2, ensure_ascii=False))
    elif sys.stdout.isatty():
        from specgen.render.streams import make_console

        print_draft_table(search, advice(search), make_console(sys.stdout, os.environ))
    else:
        for line in draft_lines(search.tried):
            print(line)


def notes_on(search: Search | None) -> list[str]:
    """Return remarks about the ranking."""
    if search is None:
        return []
    notes: list[str] = []
    if search.ties:
        names = ", ".join(
            f"{name_of(one.draft)} (x{one.figures.speedup:.2f})" for one in search.ties
        )
        notes.append(f"a tie, since they differ by no more than the noise: {names}")
    notes += notes_on_figures(search.others_share)
    notes += [f"{refused.file}: {refused.reason}" for refused in search.refused]
    notes += [
        f"prompt {number} was left out: the context has no room for it"
        for number in search.baseline.skipped
    ]
    return notes
