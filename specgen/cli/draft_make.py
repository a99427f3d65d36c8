"""``specgen draft make`` and ``specgen draft data``: make drafts for a target from its own text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Option

from specgen.cli import flags
from specgen.cli.draft_find import known_candidates, show_search, trial_options
from specgen.cli.model_loading import load, log_shown, opened, use_kernels
from specgen.cli.output import Output
from specgen.errors import UsageError
from specgen.models.files import cache_folder
from specgen.options import Contexts, DraftOptions, GenerationOptions
from specgen.session.files import find_target
from specgen.train.draft_builder import (
    JUDGED_TOKENS,
    N_JUDGED,
    OWN_PROMPTS,
    DraftBuilder,
    Kind,
    TextOptions,
    TimePlan,
    plan_time,
)
from specgen.train.training_loop import check_library

if TYPE_CHECKING:
    from specgen.cli.process import Interrupt
    from specgen.options import DraftSource
    from specgen.session.session import Session
    from specgen.system.progress import Progress


@flags.group(
    TextOptions,
    flags.panel(
        "The target's text",
        prompts=Option(
            "--prompts",
            help='Prompts that the target answers: JSON Lines with "prompt" or "turns"; every tenth is kept '
            "for judging.",
            show_default="241 of our own",
        ),
        n_tokens=Option("--tokens", min=1, help="How many tokens of answers to write in all."),
        max_tokens=Option(
            "--max-tokens",
            "--predict",
            "--n-predict",
            "-n",
            min=8,
            help="The most tokens of an answer.",
        ),
        n_parallel=Option("--parallel", "-np", min=1, help="How many answers to generate at once."),
    ),
)
def text_options(*, prompts: Path | None = None, **others: Any) -> TextOptions:
    """Return the text to make drafts from, with the prompts of a file, each once, or those of the package."""
    from specgen.measure.prompts import read_prompts

    texts = list(dict.fromkeys(read_prompts(prompts or OWN_PROMPTS)))
    return TextOptions(texts, **others)


@flags.takes_options(
    target=flags.target_option(),
    text=text_options,
    machine=flags.machine,
    output=flags.loudness,
)
def data(
    *,
    target: str,
    text: TextOptions,
    machine: Contexts,
    output: Output,
) -> int:
    """Let a target write the text that drafts are made from.

    The target answers prompts at temperature 0, many at once. The cache folder keeps the hidden state
    and the likeliest tokens of each token. Text that is there is not written again: run an
    interrupted command again to resume.

    It prints the folder.
    """
    path = find_target(target, quiet=output.quiet)
    own = trial_options(
        path, DraftOptions(), GenerationOptions(max_tokens=text.max_tokens), machine
    )
    with (
        opened(own, machine.kernels, output) as loaded,
        output.measuring() as (progress, stop),
    ):
        builder = _builder(loaded, text, progress, stop, output)
        n_have = builder.write_text()
    if n_have < text.n_tokens and not stop():
        output.note(f"{n_have} tokens: there are no more prompts")
    print(builder.folder)
    return stop.exit_code


@flags.takes_options(
    target=flags.target_option(),
    text=text_options,
    draft=flags.draft_model_option(
        help="The small model that is fitted to the target.",
        show_default="the general draft, if it is on this disk",
    ),
    kind=Option(
        "--kind",
        help="What to make: decoder heads, a small model fitted to the target, or the target without some "
        "of its layers.",
        show_default="heads; a fitted model too, where there is a small one",
    ),
    minutes=Option(
        "--minutes", min=0.1, help="About how long it may take, comparing drafts included."
    ),
    save=Option(
        "--save/--no-save",
        help="Save the fastest draft for `specgen run`; delete slower ones made here, unless --kind names "
        "theirs.",
    ),
    machine=flags.machine,
    as_json=flags.JSON_REPORT,
    output=flags.loudness,
)
def make(
    *,
    target: str,
    draft: str | None = None,
    kind: Kind | None = None,
    minutes: float = 30.0,
    text: TextOptions,
    save: bool = True,
    machine: Contexts,
    as_json: bool = False,
    output: Output,
) -> int:
    """Make drafts for a target, and compare them with others.

    The target writes text (`specgen draft data`); drafts are trained on it, and compared with n-grams and
    the models on this disk, on other prompts, as `specgen draft find` does. An interrupted command keeps
    the text.

    Decoder heads read the target's hidden state and predict the tokens after the next one: they need no
    model of their own, and about a millisecond per draft. A small model that is fitted to the target is as
    fast as before, and agrees with the target more often. Both are trained with JAX (`pip install
    'specgen-gguf[train]'`). The target without some of its layers gains least.

    It prints the ranking as `specgen draft find` does.
    """
    from specgen.measure.prompts import evenly_chosen
    from specgen.measure.search import search_drafts
    from specgen.session.calibration import target_costs
    from specgen.session.open import open_session
    from specgen.train.target_text import is_held_back

    if kind != "pruned":
        check_library()
    path = find_target(target, quiet=output.quiet)
    small = _small_model(draft, kind, path, output)
    kinds: list[Kind] = ["heads"] if small is None else ["heads", "distilled"]
    kinds = kinds if kind is None else [kind]
    use_kernels(machine.kernels, output)
    own = trial_options(
        path, DraftOptions(), GenerationOptions(max_tokens=text.max_tokens), machine
    )
    ends_s = time.monotonic() + 60.0 * minutes
    n_drafts = 1 + len(kinds) + len(known_candidates([], path)[0])
    with log_shown(output), output.measuring() as (progress, stop):
        with load(own, output) as loaded:
            costs = target_costs(loaded, stop)
            plan = plan_time(ends_s - time.monotonic(), costs, n_drafts, text.n_parallel)
            output.note(_plan_text(plan, minutes, text.n_tokens))
            builder = _builder(loaded, text, progress, stop, output)
            made = builder.make(kinds, small, (plan.text_s + plan.training_s) / 60.0)
        if made is None:
            output.note("interrupted: run it again to resume")
            return stop.exit_code
        held_back = [prompt for index, prompt in enumerate(text.prompts) if is_held_back(index)]
        judged = replace(own, generation=GenerationOptions(max_tokens=JUDGED_TOKENS))
        with open_session(judged, clock=time.perf_counter, memory=loaded.memory) as loaded:
            texts = evenly_chosen(held_back, plan.n_judged)
            found = known_candidates(made, path)
            search = search_drafts(loaded, *found, texts, interrupted=stop, progress=progress)
    saved = show_search(search, output, save=save, as_json=as_json)
    if saved is not None and kind is None:
        _delete_others(made, saved, output)
    return stop.exit_code


def _plan_text(plan: TimePlan, minutes: float, n_tokens: int) -> str:
    text_s, training_s, judging_s = (
        f"{seconds / 60.0:.1f}" for seconds in (plan.text_s, plan.training_s, plan.judging_s)
    )
    few = f", about {plan.n_tokens} of {n_tokens} tokens" if plan.n_tokens < n_tokens else ""
    fewer = f" on {plan.n_judged} of {N_JUDGED} prompts" if plan.n_judged < N_JUDGED else ""
    more = ""
    if plan.judging_s > 60.0 * minutes:
        more = ": that alone takes longer than --minutes"
    return (
        f"of {minutes:g} min, {text_s} are for the target's text{few}, {training_s} for training, and "
        f"{judging_s} for comparing drafts{fewer}{more}"
    )


def _small_model(draft: str | None, kind: Kind | None, target: Path, output: Output) -> Path | None:
    """Return the model to fit; None without one. Raise `UsageError` if a fitted draft was asked for but is
    not possible."""
    from specgen.models.hub import locate
    from specgen.models.registry import load_registry

    is_asked = draft is not None or kind == "distilled"
    if kind in ("heads", "pruned"):
        if draft is not None:
            raise UsageError("--draft is the model to fit: it goes with --kind distilled")
        return None
    if draft is not None:
        return find_target(draft, quiet=output.quiet)
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


def _delete_others(made: Sequence[Path], saved: DraftSource, output: Output) -> None:
    """Delete the drafts that are not the best."""
    for path in made:
        if path != saved:
            path.unlink(missing_ok=True)
            output.note(f"{path.name} is slower than the best draft, and was deleted")


def _builder(
    session: Session, text: TextOptions, progress: Progress, stop: Interrupt, output: Output
) -> DraftBuilder:

    return DraftBuilder(
        session,
        text,
        cache_folder(),
        clock=time.monotonic,
        progress=progress,
        tell=output.note,
        interrupted=stop,
    )
