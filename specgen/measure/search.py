"""Try what may draft for a target on the target's answers, and rank it by the measured speed-up.

`specgen tune`, `specgen draft find` and `specgen draft make` show the result.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.drafters.kinds import kinds
from specgen.measure.draft_trial import Baseline, DraftFigures, measure_target, try_draft
from specgen.measure.threads import tune_threads
from specgen.method.drafter import never
from specgen.models import hub_names
from specgen.models.files import FileIdentity, identify, identity_of
from specgen.models.registry import load_registry
from specgen.session.calibration import PairCosts, break_even
from specgen.session.choose_models import name_of
from specgen.session.measurement_store import Threads
from specgen.session.open import DRAFT_ERRORS
from specgen.session.saved_drafts import saved_draft
from specgen.system.files import as_json
from specgen.system.machine import LoadOfOthers, is_busy
from specgen.system.quantities import counted

if TYPE_CHECKING:
    from specgen.measure.prompts import BenchPrompt
    from specgen.options import DraftSource
    from specgen.session.session import Session
    from specgen.system.progress import Progress


@dataclass(frozen=True, slots=True)
class Refused:
    """A file that cannot draft, and why."""

    file: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Tried:
    """A draft, and its figures."""

    draft: DraftSource
    figures: DraftFigures


@dataclass(frozen=True, slots=True)
class Search:
    """The drafts that were tried for a target."""

    target: Path
    baseline: Baseline
    #: The best first; plain decoding is among them as "none".
    tried: tuple[Tried, ...]
    refused: tuple[Refused, ...]
    #: The numbers of threads that were chosen, by the names of the models.
    threads: dict[str, Threads] = field(default_factory=dict)
    #: The draft that was saved for the target.
    saved: DraftSource | None = None
    is_interrupted: bool = False
    #: The share of the cores that other programs took.
    others_share: float | None = None

    def to_json_object(self) -> dict[str, object]:
        """Return the result as `--json` prints it."""
        baseline = self.baseline
        return {
            "target": str(self.target),
            "plain_tokens_per_s": 1.0 / baseline.token_s,
            "batch_s": baseline.batch_s,
            "n_prompts": len(baseline.answers),
            "n_tokens": sum(len(answer.tokens) for answer in baseline.answers),
            "skipped_prompts": list(baseline.skipped),
            "threads": as_json(self.threads),
            "drafts": [{"draft": str(one.draft), **as_json(one.figures)} for one in self.tried],
            "refused": as_json(self.refused),
            "advice": list(advice(self)),
            "others_share": self.others_share,
            "saved": as_json(self.saved),
            "is_interrupted": self.is_interrupted,
        }


def search_drafts(
    session: Session,
    candidates: Sequence[Path],
    refused: Sequence[Refused],
    prompts: Sequence[BenchPrompt],
    *,
    chat: bool | None = None,
    tunes_threads: bool = False,
    interrupted: Callable[[], bool] = never,
    progress: Progress = lambda _what, _done, _total: None,
) -> Search | None:
    """Try plain decoding, drafts without a file, and candidates as `specgen run` would use them.

    The temperature is 0. The caller saves the costs that were measured.

    Args:
        session: its draft is changed.
        candidates: the files to try.
        refused: files that cannot draft; candidates that fail are added in the result.
        prompts: the prompts that the target answers.
        chat: whether to use the target's template (None: if it has one).
        tunes_threads: whether to first measure the best numbers of threads, for the target and the
            first candidate.
        interrupted: whether to stop.
        progress: receives what is being done, how much of it is done, and how much there is.

    Returns:
        The result so far; None if interrupted before there is any.

    Raises:
        SpecgenError: an error of the target.
    """
    target = session.options.target
    load = LoadOfOthers()
    threads: dict[str, Threads] = {}
    session.change_draft("none")
    if tunes_threads:
        threads |= tune_threads(session, target, interrupted, progress, is_draft=False)
    session.costs.forget()
    baseline = measure_target(
        session,
        prompts,
        chat=chat,
        interrupted=interrupted,
        progress=partial(progress, f"{target.name} alone"),
    )
    if baseline is None:
        return None
    tried = [Tried("none", _plain_figures(baseline))]
    failed = list(refused)
    words: list[DraftSource] = [kind.name for kind in kinds() if kind.suits(session.target)]
    for draft in (*words, *candidates):
        try:
            session.change_draft(draft)
            if tunes_threads and isinstance(draft, Path) and draft == candidates[0]:
                threads |= tune_threads(session, draft, interrupted, progress, is_draft=True)
            if session.draft is not None and session.draft.timed is not None:
                session.costs.forget(session.draft.timed)
            shown = partial(progress, f"with {name_of(draft)}")
            figures = try_draft(session, baseline, interrupted=interrupted, progress=shown)
        except DRAFT_ERRORS as error:
            failed.append(Refused(Path(draft), error.message.removeprefix(f"{draft}: ")))
            continue
        if figures is None:
            break
        tried.append(Tried(draft, figures))
    return Search(
        target,
        baseline,
        by_speedup(tried),
        tuple(failed),
        threads,
        is_interrupted=interrupted(),
        others_share=load.share,
    )


def _plain_figures(baseline: Baseline) -> DraftFigures:
    """Return the figures of plain decoding."""
    return DraftFigures(
        speedup=1.0,
        worst_speedup=1.0,
        best_speedup=1.0,
        n_answers=len(baseline.answers),
        tokens_per_s=1.0 / baseline.token_s,
        acceptance_rate=None,
        mean_accepted_length=1.0,
        draft_token_s=None,
        start_s=0.0,
    )


def by_speedup(tried: Iterable[Tried]) -> tuple[Tried, ...]:
    """Return drafts by their speed-ups, as rounded in tables.

    Among equal ones, drafts without a second model come first, then plain decoding, then files.
    """

    def order(one: Tried) -> tuple[float, bool, bool]:
        return (-round(one.figures.speedup, 2), isinstance(one.draft, Path), one.draft == "none")

    return tuple(sorted(tried, key=order))


def advice(search: Search) -> tuple[str, ...]:
    """Return what was measured, what it means, and what to do.

    If the search was interrupted, or the machine was busy, it is only what was measured.
    """
    baseline = search.baseline
    best = search.tried[0]
    figures = best.figures
    answers = f"{counted(len(baseline.answers), 'answer')} of {search.target.name}"
    measured = f"measured on {answers}: {1.0 / baseline.token_s:.1f} tokens/s without a draft"
    if best.draft != "none":
        speed = f"{figures.tokens_per_s:.1f} with {name_of(best.draft)}"
        measured += f", {speed}: {figures.gain}"
    if search.is_interrupted or is_busy(search.others_share):
        return (measured,)

    n_rows = min(4, max(baseline.batch_s))
    n_tokens = baseline.costs.rows_s(n_rows) / baseline.token_s
    batch = f"a batch of {n_rows} costs {n_tokens:.1f} tokens"
    if not figures.is_gain:
        meaning = f"{batch}, and no draft that was tried is clearly faster"
        others = "draft with another model (`specgen models list` shows some)"
        return measured, meaning, f"{others}, or not at all: --draft none"
    least = break_even(PairCosts(baseline.batch_s, figures.draft_token_s or 0.0))
    needed = "drafts cannot pay"
    if least is not None:
        needed = f"drafts pay if {least:.0%} are accepted"
    meaning = f"{batch}; {needed}, and {figures.acceptance_rate or 0.0:.0%} were"
    return measured, meaning, f"use it: --draft {shlex.quote(str(best.draft))}"


# --- the files to try, by their names and sizes


def find_candidates(
    named: Sequence[Path],
    target: Path,
    *,
    tries_known: bool = True,
) -> tuple[list[Path], list[Refused]]:
    """Find the files that may draft for a target.

    Args:
        named: the user's files; those that cannot be tried are refused.
        target: the target.
        tries_known: whether to add files of the registry on this disk, and the saved draft, if they
            are not larger than the target.

    Returns:
        The files to try, each once though it may have several names; and the refused ones.
    """
    known = _known_files(target) if tries_known else []
    of_target = identity_of(target)
    candidates: list[Path] = []
    refused: list[Refused] = []
    seen: set[FileIdentity] = set()
    # Named files come first, since the first of equal files is used.
    for path in (*named, *known):
        is_named = path in named
        identity = identify(path)
        if identity is None:
            if is_named:
                refused.append(Refused(path, "there is no such file, or it cannot be read"))
            continue
        if identity in seen or (not is_named and identity.size_bytes > of_target.size_bytes):
            continue
        seen.add(identity)
        if identity != of_target and not path.samefile(target):
            candidates.append(path)
        elif is_named:
            refused.append(Refused(path, "it is the target itself"))
    return candidates, refused


def _known_files(target: Path) -> list[Path]:
    """Return the registry's files on this disk, and the draft saved for the target."""
    located = map(hub_names.locate, load_registry().models.values())
    files = [path for path in located if path is not None]
    saved = saved_draft(identity_of(target))  # only a faster draft replaces it
    if saved is not None and isinstance(saved.draft, Path):
        files.append(saved.draft)
    return files
