"""``specgen tune``: measures and keeps what drafting gains here, and explains it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.cli import flags
from specgen.cli.draft_find import known_candidates
from specgen.cli.model_loading import opened
from specgen.cli.output import Output
from specgen.errors import BackendError, MemoryLimitError, ModelFileError, PairError, UsageError
from specgen.options import Contexts, DraftOptions, GenerationOptions, ModelChoice, SamplerOptions
from specgen.session.files import find_models
from specgen.system.machine import LoadOfOthers, busy_text, is_busy

if TYPE_CHECKING:
    from specgen.measure.selection.tuning import Tuning
    from specgen.session.files import Sources
    from specgen.session.loaded_models import Models


@flags.takes_options(
    models=flags.models,
    trials=flags.trials,
    chat=flags.CHAT,
    drafting=flags.drafting.without("policy", "ngrams"),
    machine=flags.machine,
    as_json=flags.JSON_REPORT,
    output=flags.loudness,
)
def tune(
    *,
    models: ModelChoice,
    trials: flags.Trials,
    chat: bool | None = None,
    drafting: DraftOptions,
    machine: Contexts,
    as_json: bool = False,
    output: Output,
) -> int:
    """Measure what drafting is worth for your models on this machine, and say why.

    It measures the best number of threads, what decodes cost, how often the
    draft agrees with the target, and the expected speed-up: of the draft
    alone and with n-grams, of n-grams alone, and, if you name no draft, of
    other drafts on this disk. It takes a few minutes. The results are kept, and `specgen run`
    with the same models and options uses them. If the machine was busy,
    nothing is kept: tune again when it is idle. Ctrl-C shows the results so far and keeps nothing (exit code
    130).
    """
    if drafting.n_max == 0:
        raise UsageError("--draft-max 0 drafts nothing, so there is nothing to tune")
    if models.helpers:
        raise UsageError("give one --draft only: a draft for the draft cannot be tuned")
    from specgen.session.open import session_options

    texts = trials.texts()
    sources = find_models(models, quiet=output.quiet)
    answer = GenerationOptions(max_tokens=trials.max_tokens)
    options = session_options(sources, SamplerOptions(), drafting, answer, machine)
    with (
        opened(replace(options, draft="none"), machine.kernels, output) as loaded,
        output.measuring() as (progress, stop),
    ):
        from specgen.measure.selection.tuning import Tuner

        draft, notes = _draft(loaded, sources)
        load = LoadOfOthers()
        tuner = Tuner(loaded, interrupted=stop, progress=progress)
        is_named = models.draft is not None or models.pair is not None
        others = [] if is_named else _others(draft, loaded.options.target)
        tuning = tuner.run(draft, others, texts, chat=chat)
        if tuning is not None:
            tuning = replace(tuning, others_share=load.share)
        kept = _keep(loaded, tuning)
    if tuning is not None:
        _show(tuning, as_json=as_json)
    for note in (*notes, *_notes(tuning), kept):
        output.note(note)
    return stop.exit_code


def _draft(loaded: Models, sources: Sources) -> tuple[Path | None, list[str]]:
    """Return the draft model to tune, if there is one, and remarks about others. A draft that the user named
    is always taken."""
    notes: list[str] = []
    for choice in sources.drafts:
        if not isinstance(choice.draft, Path):
            continue
        try:
            if choice.why:
                loaded.change_draft(choice.draft)
        except (BackendError, MemoryLimitError, ModelFileError, PairError) as error:
            notes.append(error.message)
            continue
        return choice.draft, notes
    return None, notes


def _others(draft: Path | None, target: Path) -> list[Path]:
    """Return models on this disk, other than this draft, that may draft for a target."""
    named = [] if draft is None else [draft]
    return [path for path in known_candidates(named, target)[0] if path != draft]


def _keep(loaded: Models, tuning: Tuning | None) -> str:
    """Save what was learnt if the tuning is complete and the machine was not busy; return a sentence that
    says so."""
    from specgen.models import memory_file

    if tuning is None or tuning.is_interrupted:
        return "interrupted: not everything was measured, nothing was kept"
    if (share := tuning.others_share) is not None and is_busy(share):
        return f"{busy_text(share)}: nothing was kept; tune again when the machine is idle"
    try:
        loaded.memory.write()
    except OSError as error:
        return f"nothing was kept: {memory_file()} cannot be written: {error.strerror or error}"
    threads = "threads, " if tuning.threads is not None else ""
    return (
        f"kept: `specgen run` with these models and options goes by these {threads}costs and "
        "acceptance rates"
    )


def _show(tuning: Tuning, *, as_json: bool) -> None:
    from specgen.measure.selection.advice import to_json_object
    from specgen.render.select import make_console
    from specgen.render.tables import print_advice

    if as_json:
        print(json.dumps(to_json_object(tuning), indent=2, ensure_ascii=False))
    else:
        print_advice(tuning, make_console(sys.stdout, os.environ))


def _notes(tuning: Tuning | None) -> list[str]:
    """Return remarks for standard error."""
    if tuning is None:
        return []
    return [
        *(f"{file}: {reason}" for file, reason in tuning.refused),
        *(
            f"prompt {number} was left out: the context has no room for it"
            for number in tuning.baseline.skipped
        ),
    ]
