"""``specgen draft make`` and ``specgen draft data``: drafts made for a target, from its own text."""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from specgen.atomic import new_beside
from specgen.catalogue import cache_folder
from specgen.cli import flags
from specgen.cli.draft_find import save_best, search_drafts, show_search, tell_search, trial_options
from specgen.cli.interrupt import Interrupt
from specgen.cli.opening import log_shown, open_session, use_kernels
from specgen.errors import ModelFileError, UsageError
from specgen.json_lines import write_errors
from specgen.options import Contexts, DraftOptions, GenerationOptions
from specgen.render.progress_bar import progress_bar
from specgen.selection.session_opening import find_target
from specgen.workshop.places import distilled_file, heads_file, pruned_file, text_folder

if TYPE_CHECKING:
    from specgen.catalogue import FileIdentity
    from specgen.engine.session import Session
    from specgen.progress import Progress
    from specgen.selection.draft_search import Search

Kind: TypeAlias = Literal["heads", "distilled", "pruned"]

#: Tokens of the target's own text that heads are made from; with twice as many they agree a little more.
_N_TOKENS = 40_000
#: The share of the time that may go into the text.
_SHARE_OF_TEXT = 0.6
#: Prompts, and tokens of their answers, that drafts are compared by.
_N_JUDGED = 8
_JUDGED_TOKENS = 96
#: Answers that are made at once.
_N_PARALLEL = 16

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
    ] = _N_TOKENS,
    max_tokens: _AnswerTokens = 256,
    parallel: _Parallel = _N_PARALLEL,
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
    asked = _prompts(prompts)
    with (
        log_shown(verbose),
        open_session(own, quiet=quiet, verbose=verbose) as session,
        progress_bar(quiet=quiet or verbose) as progress,
        Interrupt() as stop,
    ):
        n_have = _write_text(
            session, asked, n_tokens, max_tokens, parallel, progress, stop, quiet=quiet
        )
    if n_have < n_tokens and not stop():
        note(f"{n_have} tokens: there are no more prompts", quiet=quiet)
    print(text_folder(cache_folder(), _identity(path)))
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
    ] = _N_TOKENS,
    max_tokens: _AnswerTokens = 256,
    parallel: _Parallel = _N_PARALLEL,
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
    from specgen.workshop.pruned.files import check_prunable
    from specgen.workshop.texts import is_held_back

    flags.check_loudness(quiet=quiet, verbose=verbose)
    started_s = time.monotonic()
    path = find_target(target, quiet=quiet)
    small = _small_model(draft, kind, path, quiet=quiet)
    kinds: list[Kind] = ["heads"] if small is None else ["heads", "distilled"]
    kinds = kinds if kind is None else [kind]
    use_kernels(machine.kernels, quiet=quiet)
    own = trial_options(path, DraftOptions(), GenerationOptions(max_tokens=max_tokens), machine)
    asked = _prompts(prompts)
    made: list[Path] = []
    with (
        log_shown(verbose),
        progress_bar(quiet=quiet or verbose) as progress,
        Interrupt() as stop,
    ):
        with open_session(own, quiet=quiet, verbose=verbose) as session:
            if "pruned" in kinds:
                check_prunable(session.target_model)  # before it writes for minutes
            text_until_s = started_s + _SHARE_OF_TEXT * 60.0 * minutes

            def text_is_over() -> bool:
                return stop() or time.monotonic() > text_until_s

            _write_text(
                session, asked, n_tokens, max_tokens, parallel, progress, text_is_over, quiet=quiet
            )
            until_s = started_s + 60.0 * minutes
            for number, each in enumerate(kinds):
                share_s = (until_s - time.monotonic()) / (len(kinds) - number)
                file = None
                if not stop() and each == "heads":
                    file = _train_heads(session, asked, share_s, progress, stop, quiet=quiet)
                elif not stop() and each == "pruned":
                    file = _prune(session, asked, share_s, progress, stop, quiet=quiet)
                elif not stop() and small is not None:
                    file = _distil(session, asked, small, share_s, progress, stop, quiet=quiet)
                if file is None:
                    note(
                        "interrupted; the same command goes on with the text there is", quiet=quiet
                    )
                    return stop.exit_code
                made.append(file)
        held_back = [text for index, text in enumerate(asked) if is_held_back(index)]
        judged = replace(own, generation=GenerationOptions(max_tokens=_JUDGED_TOKENS))
        with open_session(judged, quiet=quiet, verbose=verbose) as session:
            texts = evenly_chosen(held_back, _N_JUDGED)
            search = search_drafts(session, made, texts, None, progress, stop)
    if search is not None:
        try:
            if save and not search.is_interrupted:
                search = save_best(search)
                _delete_others(made, search, kind, quiet=quiet)
        finally:  # what was measured is shown even if it cannot be kept
            show_search(search, as_json=as_json)
    if not quiet:
        tell_search(search, save=save)
    return stop.exit_code


def _small_model(draft: str | None, kind: Kind | None, target: Path, *, quiet: bool) -> Path | None:
    """The model that is fitted; None if none is. Raises `UsageError` if one was asked for, and cannot
    be."""
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
    """Delete what was made and is not the best, unless it was asked for by its kind."""
    for path in made:
        if path != search.saved and named is None:
            path.unlink(missing_ok=True)
            note(f"{path.name} is not the best, and was deleted", quiet=quiet)


def _identity(path: Path) -> FileIdentity:
    from specgen.catalogue import identify

    identity = identify(path)
    if identity is None:
        raise ModelFileError(f"{path}: no such file")
    return identity


def _prompts(file: Path | None) -> list[str]:
    """The prompts of a file, or those of the package, each once."""
    from specgen.proof import read_prompts

    if file is not None:
        return list(dict.fromkeys(read_prompts(file)))
    text = resources.files("specgen.workshop").joinpath("prompts.jsonl").read_text("utf-8")
    return [json.loads(line)["prompt"] for line in text.splitlines()]


def _write_text(
    session: Session,
    prompts: Sequence[str],
    n_tokens: int,
    max_tokens: int,
    parallel: int,
    progress: Progress,
    interrupted: Callable[[], bool],
    *,
    quiet: bool,
) -> int:
    from specgen.catalogue import human_bytes
    from specgen.workshop.texts import bytes_of, write_text

    target = session.options.target
    n_embd = session.target_model.n_embd
    folder = text_folder(cache_folder(), _identity(target))
    note(
        f"up to {n_tokens} tokens of text, {human_bytes(bytes_of(n_tokens, n_embd))}, in {folder}",
        quiet=quiet,
    )
    return write_text(
        session,
        prompts,
        folder,
        n_tokens=n_tokens,
        n_parallel=parallel,
        max_tokens=max_tokens,
        interrupted=interrupted,
        progress=lambda done, total: progress(f"{target.name} writes", done, total),
    )


def _train_heads(
    session: Session,
    prompts: Sequence[str],
    seconds: float,
    progress: Progress,
    stop: Interrupt,
    *,
    quiet: bool,
) -> Path | None:
    """Train heads by the answers in the cache folder; where they are, or None if interrupted."""
    from specgen.backend.llama.decoder_heads import write_heads
    from specgen.workshop.heads import train_heads
    from specgen.workshop.texts import TargetText

    model, target = session.target_model, session.options.target
    identity = _identity(target)
    heads = heads_file(cache_folder(), identity)
    trained = train_heads(
        TargetText(text_folder(cache_folder(), identity), model.n_embd, prompts),
        target,
        name=model.name,
        n_vocab=model.vocabulary.n_tokens,
        vocabulary=model.vocabulary.digest(),
        clock=time.monotonic,
        until_s=time.monotonic() + seconds,
        interrupted=stop,
        progress=lambda done, total: progress("training heads", done, total),
    )
    if trained is None:
        return None
    with write_errors(heads), new_beside(heads) as new:
        write_heads(new, trained.weights)
        new.replace(heads)
    first = ", ".join(f"{share:.2f}" for share in trained.after.top_1)
    among = ", ".join(f"{share:.2f}" for share in trained.after.top_4)
    note(
        f"on held-back answers the heads' first guess is right for {first} of the tokens one, two "
        f"and three ahead, one of their first four for {among} ({trained.n_places} places learnt "
        f"from, {trained.n_steps} steps)",
        quiet=quiet,
    )
    return heads


def _distil(
    session: Session,
    prompts: Sequence[str],
    draft: Path,
    seconds: float,
    progress: Progress,
    stop: Interrupt,
    *,
    quiet: bool,
) -> Path | None:
    """Fit a small model to the answers in the cache folder; where it is, or None if interrupted."""
    from specgen.backend.llama import LlamaModel
    from specgen.workshop.distil.distillation import distil
    from specgen.workshop.distil.training_texts import training_texts
    from specgen.workshop.texts import TargetText

    model, identity = session.target_model, _identity(session.options.target)
    text = TargetText(text_folder(cache_folder(), identity), model.n_embd, prompts)
    with contextlib.closing(LlamaModel(draft, vocabulary_only=True)) as small:
        texts = training_texts(text, model, small, datetime.datetime.now().astimezone())
    output = distilled_file(cache_folder(), identity, draft)
    fitted = distil(
        draft,
        texts,
        output,
        minutes=seconds / 60.0,
        clock=time.monotonic,
        progress=lambda done, total, _left_s: progress(f"fitting {draft.name}", done, total),
        interrupted=stop,
    )
    if fitted is None:
        return None
    note(
        f"{draft.name} says what the target says at {fitted.agreement_after:.3f} of the places of "
        f"held-back answers; before it was fitted, at {fitted.agreement_before:.3f} ({fitted.n_steps} steps)",
        quiet=quiet,
    )
    return output


def _prune(
    session: Session,
    prompts: Sequence[str],
    seconds: float,
    progress: Progress,
    stop: Interrupt,
    *,
    quiet: bool,
) -> Path | None:
    """Cut a draft out of the target; where it is, or None if interrupted."""
    from specgen.selection.outlook import expected_speedup
    from specgen.workshop.pruned.making import make_pruned
    from specgen.workshop.texts import TargetText

    model, identity = session.target_model, _identity(session.options.target)
    output = pruned_file(cache_folder(), identity)
    made = make_pruned(
        session,
        TargetText(text_folder(cache_folder(), identity), model.n_embd, prompts),
        output,
        expected=expected_speedup,
        until_s=time.monotonic() + seconds,
        clock=time.monotonic,
        interrupted=stop,
        progress=progress,
    )
    if made is None:
        return None
    blocks = ", ".join(map(str, made.left_out))
    note(
        f"{len(made.left_out)} of {made.n_layer} layers left out ({blocks}): it says what the target "
        f"says at {made.agreement:.3f} of the places of held-back answers, a token takes "
        f"{made.cost:.2f} of the target's, the expected speed-up is {made.speedup:.2f} "
        f"({made.n_judged} sets were judged)",
        quiet=quiet,
    )
    return output


def note(text: str, *, quiet: bool) -> None:
    """Say something on standard error."""
    if not quiet:
        print(f"note: {text}", file=sys.stderr)
