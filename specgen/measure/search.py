"""Try what may draft for a target, on answers of the target, and rank it by the gain that was measured.

`specgen tune`, `specgen draft find` and `specgen draft make` show the result.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.drafters.kinds import words_for
from specgen.events import undrafted_text
from specgen.llama import default_threads
from specgen.measure.threads import ThreadTimes, measure_threads, thread_counts
from specgen.measure.trial import (
    Baseline,
    DraftFigures,
    is_tie,
    measure_target,
    plain_figures,
    try_draft,
)
from specgen.models.files import FileIdentity, identify, shard_number
from specgen.session.calibration import short_context
from specgen.session.files import name_of
from specgen.session.open import DRAFT_ERRORS
from specgen.system.machine import LoadOfOthers, is_busy
from specgen.system.progress import human_bytes

if TYPE_CHECKING:
    from specgen.options import DraftSource
    from specgen.session.session import Session
    from specgen.system.progress import Progress

#: About how many seconds of decoding the comparison of numbers of threads takes.
THREADS_BUDGET_S = 20.0
#: A speed-up below this does not count as a gain: it is within the noise of the measurement.
LEAST_GAIN = 1.03
#: Two files of one size are the same if so many bytes of each end are equal.
_PROBE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Refused:
    """A file that cannot draft, and the reason in a few words."""

    file: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Tried:
    """A draft, and its figures."""

    draft: DraftSource
    figures: DraftFigures


@dataclass(frozen=True, slots=True)
class Search:
    """Drafts for a target, the best first, and files that cannot draft. `threads` are the numbers that were
    chosen by measuring, by model. `saved` is the draft that was saved for the target, if any."""

    target: Path
    baseline: Baseline
    tried: tuple[Tried, ...]
    refused: tuple[Refused, ...]
    threads: dict[str, ThreadTimes] = field(default_factory=dict)
    saved: DraftSource | None = None
    is_interrupted: bool = False
    #: The share of all cores' time that other programs took meanwhile; None if it is unknown.
    others_share: float | None = None

    @property
    def ties(self) -> tuple[Tried, ...]:
        """The drafts that are as fast as the best one within the noise; empty if it is clearly the best."""
        best = self.tried[0].figures
        found = tuple(one for one in self.tried if is_tie(best, one.figures))
        return found if len(found) > 1 else ()

    def to_json_object(self) -> dict[str, object]:
        """Return the result as JSON values, with times in seconds."""
        baseline = self.baseline
        return {
            "target": str(self.target),
            "plain_tokens_per_s": 1.0 / baseline.token_s,
            "batch_s": {str(size): seconds for size, seconds in sorted(baseline.batch_s.items())},
            "n_prompts": len(baseline.answers),
            "n_tokens": baseline.n_tokens,
            "skipped_prompts": list(baseline.skipped),
            "threads": {name: dataclasses.asdict(times) for name, times in self.threads.items()},
            "drafts": [
                {"draft": str(one.draft), **dataclasses.asdict(one.figures)} for one in self.tried
            ],
            "refused": [{"file": str(each.file), "reason": each.reason} for each in self.refused],
            "ties": [str(one.draft) for one in self.ties],
            "advice": list(advice(self)),
            "others_share": self.others_share,
            "saved": None if self.saved is None else str(self.saved),
            "is_interrupted": self.is_interrupted,
        }


def search_drafts(
    session: Session,
    candidates: Sequence[Path],
    refused: Sequence[Refused],
    prompts: Sequence[str],
    *,
    chat: bool | None = None,
    tunes_threads: bool = False,
    interrupted: Callable[[], bool] = lambda: False,
    progress: Progress = lambda _what, _done, _total: None,
) -> Search | None:
    """Try plain decoding, n-grams, the target's MTP layers and the `candidates`, each as `specgen run` would use
    it. `refused` are files that are known not to draft. With `tunes_threads`, the best numbers of threads of the
    target and of the first candidate are measured first, since all else depends on them.

    What was known of the costs is measured anew, in the session's memory, which the caller saves. The temperature
    must be 0. Return None if interrupted before there was a result. Raise `PromptError`, `MemoryLimitError` or
    `BackendError` if the target fails; drafts that fail are listed as refused.
    """
    target, load = session.options.target, LoadOfOthers()
    drafts = [*words_for(session.target), *candidates]
    session.change_draft("none")
    threads: dict[str, ThreadTimes] = {}
    if tunes_threads and (times := _tuned_threads(session, None, interrupted, progress)):
        threads[target.name] = times
    session.costs.forget()
    baseline = measure_target(
        session,
        prompts,
        chat=chat,
        interrupted=interrupted,
        progress=partial(progress, target.name),
    )
    if baseline is None:
        return None
    tried, failed = [Tried("none", plain_figures(baseline))], list(refused)
    for draft in drafts:
        try:
            session.change_draft(draft)
            path = draft if isinstance(draft, Path) else None
            if tunes_threads and path is not None and path == candidates[0]:
                times = _tuned_threads(session, path, interrupted, progress)
                threads |= {} if times is None else {path.name: times}
            if session.draft is not None and session.draft.timed is not None:
                session.costs.forget(session.draft.timed)
            figures = try_draft(
                session,
                baseline,
                interrupted=interrupted,
                progress=partial(progress, name_of(draft)),
            )
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
    """Return drafts by their speed-ups, the best first; of those that are shown as equal, what needs no
    second model: one is chosen only if it gains something."""

    def order(one: Tried) -> tuple[float, bool, bool]:
        return (-round(one.figures.speedup, 2), isinstance(one.draft, Path), one.draft == "none")

    return tuple(sorted(tried, key=order))


def _tuned_threads(
    session: Session, draft: Path | None, interrupted: Callable[[], bool], progress: Progress
) -> ThreadTimes | None:
    """Measure and keep the best numbers of threads for the target, or for the loaded draft model.
    None if the user named a number, if interrupted, or if the draft has no context of its own."""
    options = session.options.target_context if draft is None else session.options.draft_context
    is_named = options.n_threads is not None or options.n_threads_batch is not None
    if is_named or interrupted():
        return None
    model = draft or session.options.target
    progress(f"threads for {model.name}", 0, 1)
    default, n_logical = default_threads(), os.cpu_count() or 1
    affinity = getattr(os, "sched_getaffinity", None)
    counts = thread_counts(default, n_logical, len(affinity(0)) if affinity else n_logical)
    with session.contexts(short_context(session), drafts=draft is not None) as (target, drafts):
        if draft is not None and not drafts:
            return None
        backend = target if draft is None else drafts[0]
        found = measure_threads(backend, counts, default, THREADS_BUDGET_S, interrupted)
    if interrupted():
        return None
    session.memory.keep_threads(model, options, found.chosen)
    return found


def advice(search: Search) -> tuple[str, ...]:
    """Return three sentences: what was measured, what it means, and what to do. An interrupted search, or that of
    a busy machine, gets only the first: conclusions would rest on half of the measurements."""
    baseline, best = search.baseline, search.tried[0]
    figures, name = best.figures, name_of(best.draft)
    plain = f"{1.0 / baseline.token_s:.1f} tokens/s"
    n_prompts = len(baseline.answers)
    measured = f"measured on {n_prompts} answers of {search.target.name}: {plain} without a draft"
    if best.draft != "none":
        measured += (
            f", {figures.tokens_per_s:.1f} with {name} (x{figures.speedup:.2f}; "
            f"x{figures.worst_speedup:.2f} for the worst prompt)"
        )
    if search.is_interrupted or is_busy(search.others_share):
        return (measured,)
    n_rows = min(4, max(baseline.batch_s))
    batch = f"a batch of {n_rows} rows costs {baseline.costs.rows_s(n_rows) / baseline.token_s:.1f} tokens"
    if figures.speedup >= LEAST_GAIN:
        share = f"{100 * (figures.acceptance_rate or 0.0):.0f} % of its tokens"
        per_pass = f"{figures.mean_accepted_length:.1f} tokens come of a pass of the target"
        return (
            measured,
            f"{batch} and the target accepts {share}, so {per_pass}",
            f"use it: --draft {shlex.quote(str(best.draft))}",
        )
    others = [one for one in search.tried if one.figures.undrafted]
    why = f"; {name_of(others[0].draft)}: {_undrafted(others[0])}" if others else ""
    return (
        measured,
        f"{batch}, and no draft that was tried is clearly faster{why}",
        "draft with another model (`specgen models list` shows some), or not at all: --draft none",
    )


def _undrafted(one: Tried) -> str:
    return undrafted_text(one.figures.undrafted, one.figures.n_rounds)


# --- the files that may be tried, by their names and sizes only ------------------------------------


def find_candidates(
    named: Sequence[Path], known: Iterable[Path], target: Path
) -> tuple[list[Path], list[Refused]]:
    """Return the files to try as drafts for `target`, and the files that are refused.

    `named` are files, and folders that stand for the GGUF files in them. `known` are the models that
    specgen has on this disk; they are never reported as refused. A model that occurs twice is tried once.
    A file that is larger than the target is tried only if the user named the file itself.
    """
    of_folders = [path for folder in named for path in sorted(folder.glob("*.gguf"))]
    in_folders = [path for path in of_folders if path.is_file() and _is_model(path)]
    files = [path for path in named if not path.is_dir()]
    candidates: list[Path] = []
    refused: list[Refused] = []
    of_target = identify(target)
    seen: list[tuple[Path, FileIdentity]] = []
    # Named files come first, since the first of equal files is used.
    for path in (*files, *in_folders, *known):
        identity, reason = identify(path), ""
        if identity is None:
            reason = "there is no such file, or it cannot be read"
        elif any(_is_same(path, identity, *other) for other in seen):
            continue
        else:
            seen.append((path, identity))
            if of_target is not None and _is_same(path, identity, target, of_target):
                reason = "it is the target itself"
            elif of_target is not None and identity.size_bytes > of_target.size_bytes:
                size = human_bytes(identity.size_bytes)
                reason = (
                    f"it is larger than the target ({size}): named itself, it is tried all the same"
                ) * (path not in files)
        if not reason:
            candidates.append(path)
        elif path in files or path in in_folders:
            refused.append(Refused(path, reason))
    return candidates, refused


def _is_model(path: Path) -> bool:
    """Return whether a file's name is that of a language model: of its first part, and no projector of images."""
    return shard_number(path) in (None, 1) and "mmproj" not in path.name.lower()


def _is_same(path: Path, identity: FileIdentity, other: Path, of_other: FileIdentity) -> bool:
    """Return whether two paths name the same model: the same file, perhaps through a link, or a copy of it."""
    if identity == of_other:
        return True
    if identity.size_bytes != of_other.size_bytes:
        return False
    try:
        return path.samefile(other) or _ends(path) == _ends(other)
    except OSError:
        return False


def _ends(path: Path) -> tuple[bytes, bytes]:
    """Return the first and the last bytes of a file. The first ones of a model have its name and vocabulary."""
    with path.open("rb") as file:
        first = file.read(_PROBE_BYTES)
        file.seek(-min(_PROBE_BYTES, len(first)), os.SEEK_END)
        return first, file.read()
