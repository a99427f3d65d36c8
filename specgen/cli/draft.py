"""``specgen draft``: find, make or train drafts for a target."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specgen.cli import flags
from specgen.cli.command import Command
from specgen.cli.flags import argument, option
from specgen.cli.flags.trials import COMPARISON, Comparison, alone, check_drafts, trial_options
from specgen.cli.model_loading import log_shown, opened, use_kernels
from specgen.cli.output import Output, console_on
from specgen.errors import OutputError, UsageError
from specgen.models.files import check_model_path, identity_of, learning_folder, size_of
from specgen.options import Contexts, GenerationOptions, KernelOptions, ModelChoice, SessionOptions
from specgen.session.choose_models import find_models, find_target, name_of
from specgen.system.folders import cache_folder, data_folder, phrases_folder
from specgen.system.machine import is_busy
from specgen.system.quantities import human_bytes
from specgen.train.draft_builder import (
    JUDGED_TOKENS,
    OWN_PROMPTS,
    DraftBuilder,
    MadeKind,
    TimePlan,
    least_text,
    plan_time,
)
from specgen.train.training_loop import TextOptions, check_library

if TYPE_CHECKING:
    from specgen.measure.draft_search import Search
    from specgen.measure.prompts import BenchPrompt
    from specgen.options import DraftSource
    from specgen.session.measurement_store import MeasurementStore
    from specgen.system.progress import Progress

app = typer.Typer(
    name="draft",
    help="Find, make or train the best draft for a target.",
    no_args_is_help=True,
)


# --- a search for the best draft, as `draft find`, `draft make` and `tune` show it


def show_search(
    search: Search,
    output: Output,
    *,
    as_json: bool,
) -> None:
    """Print the ranking of drafts, as a table on a terminal, and notes on what it means.

    Args:
        search: The result of the search.
        output: Where the notes are printed.
        as_json: Whether to print JSON instead of the ranking.
    """
    from specgen.measure.draft_search import advice
    from specgen.render.tables import draft_lines, notes_on_figures, print_draft_table

    notes: list[str] = []
    if as_json:
        print(json.dumps(search.to_json_object(), indent=2, ensure_ascii=False))
    elif sys.stdout.isatty():
        print_draft_table(search, advice(search), console_on(sys.stdout))
    else:
        for line in draft_lines(search.tried):
            print(line)
        notes += advice(search)
    notes += notes_on_figures(search.others_share)
    notes += [f"{refused.file}: {refused.reason}" for refused in search.refused]
    for number in search.baseline.skipped:
        notes.append(f"prompt {number} was left out: it does not fit into the context")
    for note in notes:
        output.note(note)


def _save_and_show(
    search: Search | None,
    output: Output,
    *,
    save: bool,
    as_json: bool,
) -> DraftSource | None:
    """Show the ranking, and save the best draft for the target if `save` is set.

    Args:
        search: The result of the search; None if it was interrupted before the first draft.
        output: Where notes are printed.
        save: Whether to save the best draft.
        as_json: Whether to print JSON instead of the ranking.

    Returns:
        The draft that was saved. It is None if `save` is not set, the search was interrupted, or
        the machine was busy.
    """
    interrupted_note = "interrupted: not everything was measured, nothing was kept"
    if search is None:
        output.note(interrupted_note)
        return None
    was_busy = is_busy(search.others_share)
    try:
        if save and not search.is_interrupted and not was_busy:
            search = replace(search, saved=_save_best(search))
    finally:  # show the measurements even if the draft cannot be saved
        show_search(search, output, as_json=as_json)
    if search.is_interrupted:
        output.note(interrupted_note)
    elif search.saved is not None:
        name = name_of(search.target)
        output.note(f"for {name}, `specgen run` without --draft now uses: {name_of(search.saved)}")
    elif save:
        output.note("nothing was saved, because the machine was busy")
    return search.saved


def _save_best(search: Search) -> DraftSource:
    """Save the fastest draft of a search for its target, with the speed-up; return the draft."""
    from specgen.session.saved_drafts import SavedDraft, save_draft

    best = search.tried[0]
    figures = best.figures
    today = datetime.datetime.now().astimezone().date()
    saved = SavedDraft(
        best.draft,
        today,
        figures.speedup,
        figures.worst_speedup,
        figures.best_speedup,
        figures.n_answers,
    )
    save_draft(identity_of(search.target), saved)
    return best.draft


# --- find


@app.command(cls=Command)
@flags.takes_options
def find(
    *,
    target: str = flags.target_option(),
    files: tuple[Path, ...] = argument("FILES", "GGUF files to try.", ()),
    save: bool = option(
        False,
        "--save",
        "Save the fastest draft for this target: `specgen run` without --draft uses it.",
    ),
    wanted: Comparison = COMPARISON.with_default("--count", 6),
) -> int:
    """Find the draft that makes a target fastest on this machine.

    It tries the files that you name, or else the models on this disk and the saved draft; and
    always n-grams and the target's own MTP layers. The target answers a few prompts once; each
    draft is then replayed on these answers, and ranked by its speed-up over plain decoding.

    In a pipe, it prints tab-separated lines under column names, one for each draft, the best first:
    the speed-up over plain decoding, and that of the worst prompt; tokens per second; acceptance
    rate; tokens per pass of the target; milliseconds to draft a token, and to begin.
    """
    from specgen.measure.draft_search import find_candidates, search_drafts
    from specgen.session.open import WantedSession
    from specgen.session.saved_drafts import saved_draft

    check_drafts(wanted.drafting, "find")
    prompts = wanted.trials.chosen()
    output = wanted.output
    for file in files:
        check_model_path(file)
    path = find_target(target, quiet=output.quiet)
    if save:
        # If the file of saved drafts is damaged, this raises now rather than after minutes.
        saved_draft(identity_of(path))
    candidates, refused = find_candidates(files, path, tries_known=not files)
    options = wanted.options(alone(path))
    wanted_session = WantedSession(options, later_drafts=tuple(candidates))
    with (
        opened(wanted_session, wanted.machine.kernels, output) as session,
        output.measuring() as (progress, stop),
    ):
        search = search_drafts(
            session,
            candidates,
            refused,
            prompts,
            chat=wanted.chat,
            interrupted=stop,
            progress=progress,
        )
    _save_and_show(search, output, save=save, as_json=wanted.as_json)
    return stop.exit_code


# --- make


@flags.extends(TextOptions)
def text_options(
    *,
    prompts: Path | None = option(
        None,
        "--prompts",
        'Prompts that the target answers: JSON Lines with "prompt" or "turns"; every tenth is kept '
        "for comparing drafts.",
        show_default="241 built-in prompts",
        panel="The target's text",
    ),
    **others: Any,
) -> TextOptions:
    """Return how the target writes text, and the prompts that it answers, each once."""
    from specgen.measure.prompts import read_prompts

    unique_prompts = list(dict.fromkeys(read_prompts(prompts or OWN_PROMPTS)))
    return TextOptions(unique_prompts, **others)


@app.command(cls=Command)
@flags.takes_options
def data(
    *,
    target: str = flags.target_option(),
    text: TextOptions = text_options,
    machine: Contexts = flags.machine,
    output: Output = flags.loudness,
) -> int:
    """Let a target generate the text that drafts are trained on.

    It answers prompts at temperature 0. The hidden states and the likeliest tokens are kept in the
    cache folder that is printed. Run an interrupted command again to resume.
    """
    from specgen.session.open import WantedSession

    path = find_target(target, quiet=output.quiet)
    wanted = WantedSession(trial_options(alone(path), text.max_tokens, machine))
    with (
        opened(wanted, machine.kernels, output) as session,
        output.measuring() as (progress, stop),
    ):
        builder = DraftBuilder(
            session,
            text,
            cache_folder(),
            time.monotonic,
            progress,
            output.note,
            stop,
        )
        n_tokens = builder.write_text()
    if n_tokens < text.n_tokens and not stop():
        output.note(f"{n_tokens} tokens: there are no more prompts")
    print(builder.folder)
    return stop.exit_code


@app.command(cls=Command)
@flags.takes_options
def make(
    *,
    target: str = flags.target_option(),
    text: TextOptions = text_options,
    draft: str | None = flags.draft_option(
        "The small model that is fitted to the target.",
        show_default="the general draft, if it is on this disk",
    ),
    kind: MadeKind | None = option(
        None,
        "--kind",
        "What to make: decoder heads, a small model fitted to the target, or the target without "
        "some of its layers.",
        show_default="heads and distilled; only heads if no small model is on this disk",
    ),
    minutes: float = option(
        30.0,
        "--minutes",
        "About how long it may take, comparing drafts included.",
        min=0.1,
    ),
    save: bool = option(
        True,
        "--save/--no-save",
        "Save the fastest draft for `specgen run`. Without --kind, the other drafts made here are "
        "deleted.",
    ),
    machine: Contexts = flags.machine,
    as_json: bool = flags.JSON_REPORT,
    output: Output = flags.loudness,
) -> int:
    """Make drafts for a target, and compare them with others.

    The target writes text (`specgen draft data`), and drafts are trained on it. They are then
    ranked together with n-grams and the models on this disk, on other prompts, as `specgen draft
    find` does. An interrupted command keeps the text.

    Decoder heads predict from the target's hidden state, in about a millisecond a draft. A small
    model that is fitted to the target agrees with it more often. Both need JAX (`pip install
    'specgen-gguf[train]'`). The target without some of its layers gains least.
    """
    # 1. Decide what to make.
    if kind != "pruned":
        check_library()
    path = find_target(target, quiet=output.quiet)
    small_model = _model_to_fit(draft, kind, path, output)
    kinds = _kinds_to_make(kind, small_model)
    _check_amount_of_text(text, kinds)

    # 2. Make the drafts, and compare them with others.
    use_kernels(machine.kernels, output)
    options = trial_options(alone(path), text.max_tokens, machine)
    ends_s = time.monotonic() + 60.0 * minutes
    with log_shown(output), output.measuring() as (progress, stop):
        making = _Making(
            target=path,
            options=options,
            text=text,
            kinds=kinds,
            small_model=small_model,
            minutes=minutes,
            ends_s=ends_s,
            output=output,
            progress=progress,
            interrupted=stop,
        )
        made = making.write_and_train()
        if made is None:
            output.note("interrupted: run it again to resume")
            return stop.exit_code
        search = making.compare(made)

    # 3. Save the fastest one.
    saved = _save_and_show(search, output, save=save, as_json=as_json)
    if saved is not None and kind is None:
        _delete_all_but(saved, made.files, output)
    return stop.exit_code


@dataclass(frozen=True, slots=True)
class _MadeDrafts:
    """Drafts that were just made, and what is needed to compare them."""

    #: The files of the drafts.
    files: list[Path]
    #: The number of prompts on which they are compared.
    n_judged: int
    #: What was measured while they were made.
    measurements: MeasurementStore


@dataclass(frozen=True, slots=True, kw_only=True)
class _Making:
    """The two long steps of `specgen draft make`, and what they share."""

    #: The target's file.
    target: Path
    #: The options of the session in which the target writes text.
    options: SessionOptions
    #: How the target writes text, and its prompts.
    text: TextOptions
    #: The kinds of drafts to make.
    kinds: list[MadeKind]
    #: The model to fit to the target, if one is to be fitted.
    small_model: Path | None
    #: About how long everything may take.
    minutes: float
    #: When everything should be finished, in seconds of `time.monotonic`.
    ends_s: float
    #: Where notes are printed.
    output: Output
    #: Shows the progress of each step.
    progress: Progress
    #: Returns whether the user has asked to stop.
    interrupted: Callable[[], bool]

    def write_and_train(self) -> _MadeDrafts | None:
        """Let the target write text and train drafts on it, in the time that comparing leaves.

        Returns:
            The drafts; None if interrupted.

        Raises:
            UsageError: If there is too little time.
        """
        from specgen.measure.draft_search import find_candidates
        from specgen.session.calibration import target_costs
        from specgen.session.open import WantedSession, open_session

        known_files, _ = find_candidates([], self.target)
        n_drafts = 1 + len(self.kinds) + len(known_files)  # n-grams are compared, too
        with open_session(
            WantedSession(self.options), self.output.reporter, clock=time.perf_counter
        ) as writer:
            costs = target_costs(writer, self.interrupted)
            builder = DraftBuilder(
                writer,
                self.text,
                cache_folder(),
                time.monotonic,
                self.progress,
                self.output.note,
                self.interrupted,
            )
            n_missing = builder.n_lacking(self.kinds)
            left_s = self.ends_s - time.monotonic()
            plan = plan_time(left_s, costs, n_drafts, self.text, n_missing, len(self.kinds))
            if plan.needed_s > left_s:
                raise _too_short_error(plan, self.minutes, self.kinds)
            self.output.note(_plan_note(plan, self.minutes))
            files = builder.make(self.kinds, self.small_model, plan)
        if files is None:
            return None
        return _MadeDrafts(files, plan.n_judged, writer.measurements)

    def compare(self, made: _MadeDrafts) -> Search | None:
        """Compare drafts, those just made and others, on prompts that they were not trained on.

        Returns:
            The comparison; None if it was interrupted before the first draft.
        """
        from specgen.measure.draft_search import find_candidates, search_drafts
        from specgen.session.open import WantedSession, open_session

        prompts = _held_back_prompts(self.text, made.n_judged)
        options = replace(self.options, generation=GenerationOptions(max_tokens=JUDGED_TOKENS))
        with open_session(
            WantedSession(options), clock=time.perf_counter, measurements=made.measurements
        ) as judge:
            candidates, refused = find_candidates(made.files, self.target)
            return search_drafts(
                judge,
                candidates,
                refused,
                prompts,
                interrupted=self.interrupted,
                progress=self.progress,
            )


def _delete_all_but(
    best: DraftSource,
    files: Sequence[Path],
    output: Output,
) -> None:
    """Delete the drafts that were made, except for the best draft if it is one of them."""
    for file in files:
        if file != best:
            file.unlink(missing_ok=True)
            output.note(f"{file.name} was deleted, because it is slower than the best draft")


def _model_to_fit(
    draft: str | None,
    kind: MadeKind | None,
    target: Path,
    output: Output,
) -> Path | None:
    """Return the model to fit to the target: that of --draft, or else the general draft.

    Returns:
        None if --kind is another kind; or if --kind is not given, and there is no model to fit.
        The target itself does not count as one.

    Raises:
        UsageError: If --draft is given with another kind, or there is no model for --kind
            distilled.
    """
    from specgen.models.registry import load_registry
    from specgen.models.stored_models import find_on_disk

    if kind in ("heads", "pruned"):
        if draft is not None:
            raise UsageError("--draft is the model to fit: it goes with --kind distilled")
        return None
    if draft is not None:
        return find_target(draft, quiet=output.quiet)
    registry = load_registry()
    general_draft: Path | None = None
    if registry.general_draft:
        general_draft = find_on_disk(registry.model(registry.general_draft))
    if general_draft is not None and target.samefile(general_draft):
        general_draft = None
    if general_draft is None and kind is not None:
        what = "--kind distilled: no model to fit, other than the target, is on this disk"
        raise UsageError(what, "name one with --draft")
    return general_draft


def _kinds_to_make(kind: MadeKind | None, small_model: Path | None) -> list[MadeKind]:
    """Return the kind of --kind, or else heads and, if there is a model to fit, a distilled one."""
    if kind is not None:
        return [kind]
    if small_model is None:
        return ["heads"]
    return ["heads", "distilled"]


def _check_amount_of_text(text: TextOptions, kinds: Sequence[MadeKind]) -> None:
    """Raise `UsageError` if --tokens is too little text to make drafts of these kinds."""
    n_required = least_text(kinds)
    if text.n_tokens < n_required:
        what = f"--tokens {text.n_tokens} is too little text for {' and '.join(kinds)}"
        raise UsageError(what, f"give {n_required} or more")


def _held_back_prompts(text: TextOptions, n_prompts: int) -> list[BenchPrompt]:
    """Return at most this many of the prompts that drafts are not trained on."""
    from specgen.measure.prompts import evenly_chosen, given_prompts
    from specgen.train.target_text import is_held_back

    held_back = [prompt for index, prompt in enumerate(text.prompts) if is_held_back(index)]
    return given_prompts(evenly_chosen(held_back, n_prompts))


def _too_short_error(
    plan: TimePlan,
    minutes: float,
    kinds: Sequence[MadeKind],
) -> UsageError:
    """Return the error for --minutes that are less than a plan needs."""
    needed_min = plan.needed_s / 60.0
    hint = f"give --minutes {math.ceil(needed_min) + 1} or more"
    if len(kinds) > 1:
        hint += ", or one --kind"
    what = f"the text, training and comparing drafts take about {needed_min:.1f} min here"
    return UsageError(f"--minutes {minutes:g} is too short for {' and '.join(kinds)}: {what}", hint)


def _plan_note(plan: TimePlan, minutes: float) -> str:
    """Return a sentence on how a plan divides the time."""
    text = f"{plan.text_s / 60.0:.1f} for about {plan.n_tokens} tokens of the target's text"
    training = f"{plan.training_s / 60.0:.1f} for training"
    judging = f"{plan.judging_s / 60.0:.1f} for comparing drafts on {plan.n_judged} prompts"
    return f"{minutes:g} min: {text}, {training}, and {judging}"


# --- online learning


@app.command(cls=Command)
@flags.takes_options
def learn(
    *,
    target: str = flags.target_option(
        help="The target whose answers were kept: a GGUF file, or a name."
    ),
    draft: str | None = flags.draft_option(
        "The draft model that learns.",
        show_default="the one that `specgen run` uses for this target",
    ),
    minutes: float = option(10.0, "--minutes", "Train for at most this long.", min=0.1),
    as_json: bool = flags.JSON_REPORT,
    output: Output = flags.loudness.without("--verbose"),
) -> int:
    """Let a draft model learn from the answers that --learn kept.

    The latest answers are held out. If the draft then agrees with the target more often on them,
    its new weights are kept for commands with --learn. `specgen chat` and `specgen serve` do this
    automatically.
    """
    from specgen.llama.kernels.admission import wanted_in
    from specgen.train.online_learning import learn as learn_from
    from specgen.train.training_loop import Budget

    target_path = find_target(target, quiet=output.quiet)
    draft_path = _draft_model(target, draft, output)
    folder = learning_folder(data_folder(), identity_of(target_path))
    use_kernels(KernelOptions(wanted_in(os.environ)), output)
    with output.measuring() as (progress, stop):
        show_progress = partial(progress, f"{draft_path.name} learns")
        ends_s = time.monotonic() + 60.0 * minutes
        budget = Budget(time.monotonic, ends_s, stop, show_progress)
        lesson = learn_from(folder, target_path, draft_path, budget)
    if lesson is None:
        output.note("interrupted: nothing was changed")
        return stop.exit_code
    if as_json:
        print(json.dumps(asdict(lesson)))
    else:
        print(f"{draft_path.name} {lesson.text}")
    return 0


def _draft_model(target: str, draft: str | None, output: Output) -> Path:
    """Return the first draft for a target that is a model: only those learn.

    Raises:
        UsageError: If there is none.
    """
    from specgen.drafters.kinds import ANY_FILE, find_kind

    sources = find_models(ModelChoice(target, draft, None), quiet=output.quiet)
    for choice in sources.drafts:
        path = choice.draft
        if isinstance(path, Path):
            kind = find_kind(path)
            if kind is not None and kind.name == ANY_FILE:
                return path
    raise UsageError(
        f"no model drafts for {target}", hint="name the one that should learn with --draft"
    )


@app.command(cls=Command)
@flags.takes_options
def forget(
    *,
    target: str | None = flags.target_option(
        None, "The target whose answers are forgotten.", show_default="all"
    ),
    output: Output = flags.loudness.without("--verbose"),
) -> int:
    """Delete kept answers, what was learnt from them, and phrases that answers had in common."""
    from specgen.drafters.lookup_texts import EarlierTexts, texts_in
    from specgen.drafters.shared_phrases import phrases_file
    from specgen.drafters.stored_texts import read_texts
    from specgen.llama import LlamaModel
    from specgen.session.kept_answers import read_answers

    learning = data_folder() / "learning"
    texts = cache_folder() / "texts"
    if target is None:
        folders = [path for path in learning.glob("*") if path.is_dir()]
        stores = [path for path in texts.glob("*") if path.is_dir()]
        phrase_files = [*phrases_folder(cache_folder()).glob("*.npz")]
    else:
        path = find_target(target, quiet=output.quiet)
        folders = [learning_folder(data_folder(), identity_of(path))]
        with contextlib.closing(LlamaModel(path, vocabulary_only=True)) as model:
            stores = [EarlierTexts(texts, model.vocabulary.digest()).folder]
            phrase_files = [phrases_file(cache_folder(), model.vocabulary.digest())]
    # Count everything before it is deleted.
    n_answers = sum(len(read_answers(folder)) for folder in folders)
    n_weights = sum(len(list(folder.glob("*.gguf"))) for folder in folders)
    n_texts = sum(len(texts_in(store)) for store in stores)
    n_phrases = sum(len(read_texts(file)) for file in phrase_files)
    files = [path for folder in (*folders, *stores) for path in folder.glob("*")]
    n_bytes = sum(map(size_of, (*files, *phrase_files)))
    try:
        for folder in (*folders, *stores):
            if folder.exists():
                shutil.rmtree(folder)
        for file in phrase_files:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{error.filename}: cannot be deleted: {error.strerror}") from error
    learnt = f"kept answers: {n_answers}; weights learnt from them: {n_weights}"
    kept = f"lookup texts: {n_texts}; phrases: {n_phrases}"
    print(f"deleted: {learnt}; {kept}; {human_bytes(n_bytes)} in all")
    return 0
