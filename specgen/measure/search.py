"""Try what may draft for a target, on answers of the target, and rank it by the gain that was
measured; and find the best numbers of threads. `specgen tune`, `specgen draft find` and `specgen
draft make` show the result.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.drafters.kinds import kinds
from specgen.llama import default_threads
from specgen.measure.draft_trial import Baseline, DraftFigures, measure_target, try_draft
from specgen.models import hub_names
from specgen.models.files import FileIdentity, identify, identity_of
from specgen.models.registry import load_registry
from specgen.session.calibration import PairCosts, begin_text, break_even, short_context, time_batch
from specgen.session.choose_models import name_of
from specgen.session.measurement_store import Threads
from specgen.session.open import DRAFT_ERRORS
from specgen.session.saved_drafts import saved_draft
from specgen.system.files import as_json
from specgen.system.machine import LoadOfOthers, is_busy, logical_cores, usable_cores
from specgen.system.quantities import counted

if TYPE_CHECKING:
    from specgen.llama import LlamaBackend
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
    """Drafts for a target, the best first, what cannot draft, the numbers of threads chosen, and
    the saved draft.
    """

    target: Path
    baseline: Baseline
    tried: tuple[Tried, ...]
    refused: tuple[Refused, ...]
    threads: dict[str, Threads] = field(default_factory=dict)
    saved: DraftSource | None = None
    is_interrupted: bool = False
    others_share: float | None = None

    def to_json_object(self) -> dict[str, object]:
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
    interrupted: Callable[[], bool] = lambda: False,
    progress: Progress = lambda _what, _done, _total: None,
) -> Search | None:
    """Try plain decoding, n-grams, MTP layers and the `candidates` as `specgen run` would use them
    at temperature 0. With `tunes_threads`, threads of the target and the first candidate are
    measured first. The caller saves the costs. None if interrupted before a result. Raise an error
    of the target; drafts that fail are refused, like `refused`.
    """
    target, load = session.options.target, LoadOfOthers()
    session.change_draft("none")
    threads: dict[str, Threads] = {}
    if tunes_threads:
        threads = _tuned_threads(session, target, interrupted, progress, is_draft=False)
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
    n_answers = len(baseline.answers)
    plain = DraftFigures(1.0, 1.0, 1.0, n_answers, 1.0 / baseline.token_s, None, 1.0, None, 0.0)
    tried, failed = [Tried("none", plain)], list(refused)
    words: list[DraftSource] = [kind.name for kind in kinds() if kind.suits(session.target)]
    for draft in (*words, *candidates):
        try:
            session.change_draft(draft)
            if tunes_threads and isinstance(draft, Path) and draft == candidates[0]:
                threads |= _tuned_threads(session, draft, interrupted, progress, is_draft=True)
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


def by_speedup(tried: Iterable[Tried]) -> tuple[Tried, ...]:
    """Return drafts by their speed-ups; of those that are shown as equal, what needs no second
    model first.
    """

    def order(one: Tried) -> tuple[float, bool, bool]:
        return (-round(one.figures.speedup, 2), isinstance(one.draft, Path), one.draft == "none")

    return tuple(sorted(tried, key=order))


def advice(search: Search) -> tuple[str, ...]:
    """Return what was measured, what it means and what to do; only the first if interrupted or
    busy.
    """
    baseline, best, figures = search.baseline, search.tried[0], search.tried[0].figures
    measured = (
        f"measured on {counted(len(baseline.answers), 'answer')} of {search.target.name}: "
        f"{1.0 / baseline.token_s:.1f} tokens/s without a draft"
    )
    if best.draft != "none":
        speed = f"{figures.tokens_per_s:.1f} with {name_of(best.draft)}"
        measured += f", {speed}: {figures.gain}"
    if search.is_interrupted or is_busy(search.others_share):
        return (measured,)
    n_rows = min(4, max(baseline.batch_s))
    batch = (
        f"a batch of {n_rows} costs {baseline.costs.rows_s(n_rows) / baseline.token_s:.1f} tokens"
    )
    if figures.is_gain:
        use = f"use it: --draft {shlex.quote(str(best.draft))}"
        # From which acceptance on drafts pay by these costs, and what it was.
        least = break_even(PairCosts(baseline.batch_s, figures.draft_token_s or 0.0))
        needed = "drafts cannot pay" if least is None else f"drafts pay if {least:.0%} are accepted"
        return measured, f"{batch}; {needed}, and {figures.acceptance_rate or 0.0:.0%} were", use
    none = f"{batch}, and no draft that was tried is clearly faster"
    others = "draft with another model (`specgen models list` shows some)"
    return measured, none, f"{others}, or not at all: --draft none"


# --- the files that may be tried, by their names and sizes only


def find_candidates(
    named: Sequence[Path], target: Path, *, tries_known: bool = True
) -> tuple[list[Path], list[Refused]]:
    """Return the files to try for `target`, with `tries_known` also the registry's on this disk and
    the saved draft, without larger and equal ones; and the `named` that are refused.
    """
    of_target, known = identity_of(target), list[Path]()
    if tries_known:
        known += filter(None, map(hub_names.locate, load_registry().models.values()))
        saved = saved_draft(of_target)  # it is replaced by a faster one only
        known += [saved.draft] if saved is not None and isinstance(saved.draft, Path) else []
    candidates: list[Path] = []
    refused: list[Refused] = []
    seen: set[FileIdentity] = set()
    # Named files come first, since the first of equal files is used.
    for path in (*named, *known):
        identity, reason = identify(path), ""
        if identity is None:
            reason = "there is no such file, or it cannot be read"
        elif identity in seen or (path not in named and identity.size_bytes > of_target.size_bytes):
            continue
        else:
            seen.add(identity)
            if identity == of_target or path.samefile(target):
                reason = "it is the target itself"
        if not reason:
            candidates.append(path)
        elif path in named:
            refused.append(Refused(path, reason))
    return candidates, refused


# --- threads: a single row waits for the memory, a batch computes, so each may want its own number --

#: Seconds of decoding for the comparison of threads of a model; the least rounds may take longer.
THREADS_BUDGET_S, _PATIENCE = 20.0, 3.0
#: Rows of the batch that is timed: as many as the batch of a round usually has.
BATCH_ROWS = 6
#: A number is chosen if it is faster than the default by this share, and so in this share of the
#: rounds.
_MARGIN, _MAJORITY = 0.03, 0.75
#: The most rounds, and the least with which anything is changed.
_N_ROUNDS, _N_LEAST = 9, 4


def _tuned_threads(
    session: Session,
    model: Path,
    interrupted: Callable[[], bool],
    progress: Progress,
    *,
    is_draft: bool,
) -> dict[str, Threads]:
    options = session.options.draft_context if is_draft else session.options.target_context
    if (options.n_threads, options.n_threads_batch) != (None, None) or interrupted():
        return {}
    progress(f"threads for {model.name}", 0, 1)
    default = default_threads()
    n_logical = logical_cores()
    n_usable = usable_cores() or n_logical
    counts = thread_counts(default, n_logical, n_usable)
    with session.contexts(short_context(session), drafts=is_draft) as (target, drafts):
        if is_draft and not drafts:
            return {}
        backend = drafts[0] if is_draft else target
        chosen = measure_threads(backend, counts, default, THREADS_BUDGET_S, interrupted)
    if interrupted():
        return {}
    session.measurements.keep_threads(model, options, chosen)
    return {model.name: chosen}


def thread_counts(n_cores: int, n_logical: int, n_usable: int) -> list[int]:
    """Return the numbers of threads to try, ascending: shares of the cores, all logical and all
    usable ones.
    """
    shares = {n_cores * eighths // 8 for eighths in range(2, 9)} - {0}
    return sorted({*shares, n_logical, max(1, min(n_usable, n_logical))})


def measure_threads(
    backend: LlamaBackend,
    counts: Collection[int],
    default: int,
    budget_s: float,
    interrupted: Callable[[], bool] = lambda: False,
) -> Threads:
    """Return the best of these numbers of threads, which the backend then uses; its context is
    empty before and after. All are timed in turns, since a machine's speed changes. If
    `interrupted`, the default stays.
    """
    backend.set_threads(default, default)
    text, before_s = begin_text(backend), backend.decode_s
    #: By the rows of the batch: the seconds by the number of threads, of each round.
    rounds: dict[int, list[dict[int, float]]] = {1: [], BATCH_ROWS: []}
    tried = sorted({default, *counts}, reverse=True)
    for number in range(_N_ROUNDS if len(tried) > 1 else 0):
        patience = _PATIENCE if number < _N_LEAST else 1.0
        if interrupted() or backend.decode_s - before_s > patience * budget_s:
            break
        for times in rounds.values():
            times.append({})
        for count in tried:
            if interrupted():
                break
            backend.set_threads(count, count)
            # The first decode after a change may have to start threads: it is not timed.
            time_batch(backend, text, 1)
            for n_rows, times in rounds.items():
                if seconds := time_batch(backend, text, n_rows):
                    times[-1][count] = seconds
    backend.remove(0)
    chosen = Threads(default, default)
    if not interrupted():
        chosen = Threads(*(choose_threads(times, default) for times in rounds.values()))
    backend.set_threads(chosen.n_single, chosen.n_batch)
    return chosen


def choose_threads(rounds: Sequence[Mapping[int, float]], default: int) -> int:
    """Return the quickest number of threads; `default` unless another one is clearly faster."""
    best, least = default, 1.0 - _MARGIN
    for count in sorted({count for seconds in rounds for count in seconds} - {default}):
        ratios = [s[count] / s[default] for s in rounds if count in s and default in s]
        if len(ratios) < _N_LEAST:
            continue
        share = sum(ratio < 1.0 for ratio in ratios) / len(ratios)
        if statistics.median(ratios) < least and share >= _MAJORITY:
            best, least = count, statistics.median(ratios)
    return best
