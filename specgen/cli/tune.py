"""``specgen tune``: measures and keeps what drafting gains here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.cli import flags
from specgen.cli.draft import show_search
from specgen.cli.flags.trials import COMPARISON, Comparison, check_drafts
from specgen.cli.model_loading import opened
from specgen.errors import OutputError, UsageError
from specgen.options import ModelChoice
from specgen.system.machine import is_busy

if TYPE_CHECKING:
    from specgen.measure.draft_search import Search
    from specgen.session.session import Session


@flags.takes_options
def tune(
    *,
    models: ModelChoice = flags.models,
    wanted: Comparison = COMPARISON.without("--policy", "--ngrams"),
) -> int:
    """Measure what drafting gains with your models on this machine.

    In a few minutes, it measures the best number of threads, what decodes cost, and the speed-up of
    the draft, of n-grams, and, if you name no draft, of others on this disk. `specgen run` with the
    same models and options uses the results. On a busy machine nothing is kept. Ctrl-C shows the
    results so far and keeps nothing (exit code 130).
    """
    check_drafts(wanted.drafting, "tune")
    if models.further_drafts:
        raise UsageError("give one --draft only: a draft for the draft cannot be tuned")
    from specgen.measure.draft_search import find_candidates, search_drafts
    from specgen.session.choose_models import find_models
    from specgen.session.open import WantedSession

    prompts = wanted.trials.chosen()
    output = wanted.output
    sources = find_models(models, quiet=output.quiet)
    options = wanted.options(sources)
    drafts = [choice.draft for choice in sources.drafts if isinstance(choice.draft, Path)]
    if models.draft is None and models.pair is None:
        # All drafts on this disk are tried. The session opens without one, so that a draft that
        # does not load is reported rather than ending the command.
        options = replace(options, draft="none")
        candidates, _ = find_candidates([], sources.target)
        drafts += [path for path in candidates if path not in drafts]
    wanted_session = WantedSession(options, later_drafts=tuple(drafts))
    with (
        opened(wanted_session, wanted.machine.kernels, output) as session,
        output.measuring() as (progress, stop),
    ):
        note = _streamed_note(session, len(prompts), wanted.trials.max_tokens)
        if note:
            output.note(note)
        search = search_drafts(
            session,
            drafts,
            (),
            prompts,
            chat=wanted.chat,
            tunes_threads=True,
            interrupted=stop,
            progress=progress,
        )
        outcome = _save_measurements(session, search)
    if search is not None:
        show_search(search, output, as_json=wanted.as_json)
    output.note(outcome)
    return stop.exit_code


def _streamed_note(
    session: Session,
    n_answers: int,
    n_tokens: int,
) -> str:
    """Return a note if each pass reads weights from disk, so that tuning takes long; else ""."""
    from specgen.session.streaming_notes import pass_seconds
    from specgen.system.quantities import counted, duration

    if not session.target.is_streamed:
        return ""
    pass_s = pass_seconds(session)
    if pass_s is None:
        return ""
    return (
        f"first, {counted(n_answers, 'answer')} of up to {n_tokens} tokens are generated "
        f"without drafts, in up to {duration(n_answers * n_tokens * pass_s)}: -N and -n make "
        "it less"
    )


def _save_measurements(session: Session, search: Search | None) -> str:
    """Save the measurements, unless the search was interrupted or the machine was busy.

    Returns:
        A sentence on what was kept, or why nothing was.
    """
    from specgen.system.files import write_errors
    from specgen.system.folders import measurements_file

    if search is None or search.is_interrupted:
        return "interrupted: not everything was measured, nothing was kept"
    if is_busy(search.others_share):
        return "nothing was kept, because the machine was busy"
    try:
        with write_errors(measurements_file()):
            session.measurements.write()
    except OutputError as error:
        return f"nothing was kept: {error.message}"
    results = [
        f"{chosen.n_single} threads for a token of {name} and {chosen.n_batch} for a batch"
        for name, chosen in search.threads.items()
    ]
    results.append("costs and acceptance rates")
    return f"kept for `specgen run` with these models: {', '.join(results)}"
