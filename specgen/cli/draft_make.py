"""``specgen draft make`` and ``specgen draft data``: make drafts for a target from its own text."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specgen.catalogue import cache_folder
from specgen.cli import flags
from specgen.cli.draft_find import save_best, search_drafts, show_search, tell_search, trial_options
from specgen.cli.interrupt import Interrupt
from specgen.cli.opening import log_shown, open_session, use_kernels
from specgen.errors import UsageError
from specgen.options import Contexts, DraftOptions, GenerationOptions
from specgen.render.progress_bar import progress_bar
from specgen.selection.session_opening import find_target
from specgen.workshop.making import (
    N_ANSWER_TOKENS,
    N_PARALLEL,
    N_TOKENS,
    Kind,
    TextWanted,
    Workshop,
    own_prompts,
)

if TYPE_CHECKING:
    from specgen.engine.models import Models
    from specgen.progress import Progress
    from specgen.selection.draft_search import Search

#: The number of prompts that compare drafts, and of tokens of their answers.
_N_JUDGED = 8
_JUDGED_TOKENS = 96

_Target = Annotated[
    str,
    typer.Option(
        "--target",
        "--model",
        "-m",
        metavar="FILE|NAME",
        help="The target: a GGUF file, or a name from `specgen models list`.",
    ),
]
_Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        help='Prompts that the target answers: JSON Lines with "prompt" or "turns"; every tenth is '
        "kept for judging.",
        show_default="241 of our own",
    ),
]
_AnswerTokens = Annotated[
    int,
    typer.Option("--max-tokens", "--predict", "-n", min=8, help="The most tokens of an answer."),
]
_Parallel = Annotated[
    int,
    typer.Option("--parallel", "-np", min=1, help="How many answers are made at once."),
]


@flags.takes_options(machine=flags.machine)
def data(
    *,
    target: _Target,
    prompts: _Prompts = None,
    n_tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Tokens of answers that are wanted in all.")
    ] = N_TOKENS,
    max_tokens: _AnswerTokens = N_ANSWER_TOKENS,
    parallel: _Parallel = N_PARALLEL,
    machine: Contexts,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> int:
    """Let a target write the text that drafts are made from.

    It answers prompts at temperature 0, many at once, and for each token its hidden state and
    its likeliest tokens are kept, in the cache folder. What is there already is not made again:
    the command may be interrupted and called again.

    The folder is printed.
    """
    flags.check_loudness(quiet=quiet, verbose=verbose)
    path = find_target(target, quiet=quiet)
    use_kernels(machine.kernels, quiet=quiet)
    own = trial_options(path, DraftOptions(), GenerationOptions(max_tokens=max_tokens), machine)
    wanted = TextWanted(_prompts(prompts), n_tokens, max_tokens, parallel)
    with (
        log_shown(verbose),
        open_session(own, quiet=quiet, verbose=verbose) as loaded,
        progress_bar(quiet=quiet or verbose) as progress,
        Interrupt() as stop,
    ):
        workshop = _workshop(loaded, wanted, progress, stop, quiet=quiet)
        n_have = workshop.write_text()
    if n_have < n_tokens and not stop():
        note(f"{n_have} tokens: there are no more prompts", quiet=quiet)
    print(workshop.folder)
    return stop.exit_code


@flags.takes_options(machine=flags.machine)
def make(
    *,
    target: _Target,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            "--model-draft",
            "-md",
            metavar="FILE|NAME",
            help="The small model that is fitted to the target.",
            show_default="the general draft, if it is on this disk",
        ),
    ] = None,
    kind: Annotated[
        Kind | None,
        typer.Option(
            "--kind",
            help="What is made: decoder heads, a small model fitted to the target, or the target without "
            "some of its layers.",
            show_default="heads; a fitted model too, where JAX is installed and there is a small one",
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option("--minutes", min=0.1, help="About how long it may take.")
    ] = 30.0,
    prompts: _Prompts = None,
    n_tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Tokens of the target's text to learn from.")
    ] = N_TOKENS,
    max_tokens: _AnswerTokens = N_ANSWER_TOKENS,
    parallel: _Parallel = N_PARALLEL,
    save: Annotated[
        bool,
        typer.Option(
            "--save/--no-save",
            help="Keep what drafts best as the draft that `specgen run` takes for this target, and "
            "delete what was made and does not, unless its --kind was named.",
        ),
    ] = True,
    machine: Contexts,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> int:
    """Make drafts for a target, and compare them with others.

    First the target writes text (`specgen draft data`), then drafts are trained to say what it
    said, then they are tried beside n-grams and the models on this disk, on prompts
    that they did not learn from, as `specgen draft find` does. It may be interrupted; the text stays.

    Decoder heads read the target's hidden state and guess the tokens behind the next one: they
    need no model of their own, and about a millisecond a draft. A small model that is fitted to the
    target (it needs `pip install 'specgen[train]'`) costs what it did before, and is right more often. The
    target without some of its layers is for large targets only, of which half the layers say the
    same: small ones need them all.

    The ranking is printed as `specgen draft find` prints it.
    """
    from specgen.proof import evenly_chosen
    from specgen.workshop.texts import is_held_back

    flags.check_loudness(quiet=quiet, verbose=verbose)
    path = find_target(target, quiet=quiet)
    small = _small_model(draft, kind, path, quiet=quiet)
    kinds: list[Kind] = ["heads"] if small is None else ["heads", "distilled"]
    kinds = kinds if kind is None else [kind]
    use_kernels(machine.kernels, quiet=quiet)
    own = trial_options(path, DraftOptions(), GenerationOptions(max_tokens=max_tokens), machine)
    wanted = TextWanted(_prompts(prompts), n_tokens, max_tokens, parallel)
    with (
        log_shown(verbose),
        progress_bar(quiet=quiet or verbose) as progress,
        Interrupt() as stop,
    ):
        with open_session(own, quiet=quiet, verbose=verbose) as loaded:
            workshop = _workshop(loaded, wanted, progress, stop, quiet=quiet)
            made = workshop.make(kinds, small, minutes)
        if made is None:
            note("interrupted; the same command goes on with the text there is", quiet=quiet)
            return stop.exit_code
        held_back = [text for index, text in enumerate(wanted.prompts) if is_held_back(index)]
        judged = replace(own, generation=GenerationOptions(max_tokens=_JUDGED_TOKENS))
        with open_session(judged, quiet=quiet, verbose=verbose) as loaded:
            texts = evenly_chosen(held_back, _N_JUDGED)
            search = search_drafts(loaded, made, texts, None, progress, stop)
    if search is not None:
        try:
            if save and not search.is_interrupted:
                search = save_best(search)
                _delete_others(made, search, kind, quiet=quiet)
        finally:  # show the measurements even if they cannot be saved
            show_search(search, as_json=as_json)
    if not quiet:
        tell_search(search, save=save)
    return stop.exit_code


def _small_model(draft: str | None, kind: Kind | None, target: Path, *, quiet: bool) -> Path | None:
    """Return the model to fit; None without one. Raises `UsageError` if a fitted draft was asked for but is
    not possible."""
    from specgen.catalogue import load_registry, locate
    from specgen.workshop.distil.distillation import check_library

    is_asked = draft is not None or kind == "distilled"
    if kind in ("heads", "pruned"):
        if draft is not None:
            raise UsageError("--draft is the model to fit: it goes with --kind distilled")
        return None
    try:
        check_library()
    except UsageError:
        if is_asked:
            raise
        return None
    if draft is not None:
        return find_target(draft, quiet=quiet)
    registry = load_registry()
    general = registry.general_draft
    found = None if general is None else locate(registry.model(general))
    if found is None and is_asked:
        raise UsageError(
            "--kind distilled: no model to fit is on this disk", hint="name one with --draft"
        )
    if found is not None and target.samefile(found):
        return None
    return found


def _delete_others(
    made: Sequence[Path], search: Search, named: Kind | None, *, quiet: bool
) -> None:
    """Delete the drafts that are not the best, unless their kind was asked for."""
    for path in made:
        if path != search.saved and named is None:
            path.unlink(missing_ok=True)
            note(f"{path.name} is not the best, and was deleted", quiet=quiet)


def _prompts(file: Path | None) -> list[str]:
    """The prompts of a file, each once, or those of the package."""
    from specgen.proof import read_prompts

    return own_prompts() if file is None else list(dict.fromkeys(read_prompts(file)))


def _workshop(
    loaded: Models, wanted: TextWanted, progress: Progress, stop: Interrupt, *, quiet: bool
) -> Workshop:
    from specgen.selection.outlook import expected_speedup

    return Workshop(
        loaded,
        wanted,
        cache_folder(),
        clock=time.monotonic,
        progress=progress,
        tell=lambda text: note(text, quiet=quiet),
        interrupted=stop,
        expected=expected_speedup,
    )


def note(text: str, *, quiet: bool) -> None:
    """Print a note on standard error."""
    if not quiet:
        print(f"note: {text}", file=sys.stderr)
