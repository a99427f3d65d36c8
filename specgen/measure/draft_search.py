"""Try drafts on a target's answers, and rank them by their measured speed-ups.

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
from specgen.models.stored_models import stored_models
from specgen.session.calibration import PairCosts, break_even
from specgen.session.choose_models import name_of
from specgen.session.measurement_store import Threads
from specgen.session.model_use import problem_with
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

#: The advice gives the cost of a batch of this many rows, as an example.
_EXAMPLE_ROWS = 4
#: A model of another program is tried as a draft for targets of at least this many times its size.
_MIN_RATIO = 2


@dataclass(frozen=True, slots=True)
class Refused:
    """A file that cannot draft for the target."""

    #: The file.
    file: Path
    #: Why it cannot, as the rest of a line that begins with the file.
    reason: str


@dataclass(frozen=True, slots=True)
class Tried:
    """A draft that was tried, and its figures."""

    #: Its file or its kind; "none" for plain decoding.
    draft: DraftSource
    #: Its figures over all answers.
    figures: DraftFigures


@dataclass(frozen=True, slots=True)
class Search:
    """The result of a search for the best draft of a target."""

    #: The target's file.
    target: Path
    #: What was measured of the target without a draft.
    baseline: Baseline
    #: The drafts from best to worst, with plain decoding as "none" among them.
    tried: tuple[Tried, ...]
    #: The files that cannot draft for the target.
    refused: tuple[Refused, ...]
    #: The thread counts that were chosen, by the model's name; empty if none were measured.
    threads: dict[str, Threads] = field(default_factory=dict)
    #: The draft that was saved for the target afterwards, if any.
    saved: DraftSource | None = None
    #: Whether the user interrupted the search.
    is_interrupted: bool = False
    #: The share of the cores that other programs used; None if unknown.
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
            "drafts": [
                {"draft": str(tried.draft), **as_json(tried.figures)} for tried in self.tried
            ],
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
    """Try plain decoding, the kinds of drafts without a file, and the candidate files.

    Each draft is used as `specgen run` would use it, at temperature 0. The session's costs are
    measured again; the caller may save them.

    Args:
        session: A session with a greedy sampler. Its draft is changed.
        candidates: The files to try.
        refused: Files that are known to be unable to draft. The result also has the candidates that
            turn out to be.
        prompts: The prompts that the target answers.
        chat: Whether to use the chat template; None to use it if the target has one.
        tunes_threads: Whether to measure the best thread counts first, for the target and for the
            first candidate.
        interrupted: Whether to stop.
        progress: Receives the name of the current step, how much of it is done, and the total.

    Returns:
        The drafts tried up to an interruption; None if interrupted before the target's answers are
        complete.

    Raises:
        SpecgenError: If the target fails.
    """
    target = session.options.target
    load = LoadOfOthers()
    trials = _Trials(session, interrupted, progress)
    if tunes_threads:
        trials.tuned_models = (target, *candidates[:1])

    baseline = trials.measure_plain_decoding(prompts, chat=chat)
    if baseline is None:
        return None
    fileless: list[DraftSource] = [kind.name for kind in kinds() if kind.suits(session.target)]
    for draft in (*fileless, *candidates):
        if not trials.measure_draft(draft, baseline):
            break
    return Search(
        target=target,
        baseline=baseline,
        tried=by_speedup(trials.tried),
        refused=(*refused, *trials.refused),
        threads=trials.threads,
        is_interrupted=interrupted(),
        others_share=load.share,
    )


@dataclass(slots=True)
class _Trials:
    """Measures a target and drafts one after the other, and collects the results."""

    #: The session, whose draft is changed.
    session: Session
    #: Returns whether to stop.
    interrupted: Callable[[], bool]
    #: Receives the name of the current step, how much of it is done, and the total.
    progress: Progress
    #: The models whose best thread counts are measured before anything else of them.
    tuned_models: tuple[Path, ...] = ()
    #: The thread counts that were chosen, by the model's name.
    threads: dict[str, Threads] = field(default_factory=dict)
    #: The drafts that were tried, with plain decoding as "none".
    tried: list[Tried] = field(default_factory=list)
    #: The files that turned out to be unable to draft.
    refused: list[Refused] = field(default_factory=list)

    def measure_plain_decoding(
        self, prompts: Sequence[BenchPrompt], *, chat: bool | None
    ) -> Baseline | None:
        """Let the target answer the prompts without a draft; return None if interrupted."""
        target = self.session.options.target
        self.session.change_draft("none")
        self._tune_threads(target, is_draft=False)
        self.session.costs.of(None).forget()  # they may have been measured with other thread counts
        baseline = measure_target(
            self.session,
            prompts,
            chat=chat,
            interrupted=self.interrupted,
            progress=partial(self.progress, f"{target.name} alone"),
        )
        if baseline is not None:
            self.tried.append(Tried("none", _plain_figures(baseline)))
        return baseline

    def measure_draft(
        self,
        draft: DraftSource,
        baseline: Baseline,
    ) -> bool:
        """Replay a draft on the target's answers.

        Returns:
            Whether it was tried or refused; False if the trial was interrupted.
        """
        session = self.session
        try:
            session.change_draft(draft)
            if isinstance(draft, Path):
                self._tune_threads(draft, is_draft=True)
            # The draft's costs are measured again, too.
            if session.draft is not None and session.draft.cost_key is not None:
                session.costs.of(session.draft.cost_key).forget()
            figures = try_draft(
                session,
                baseline,
                interrupted=self.interrupted,
                progress=partial(self.progress, f"with {name_of(draft)}"),
            )
        except DRAFT_ERRORS as error:
            reason = error.message.removeprefix(f"{draft}: ")
            self.refused.append(Refused(Path(draft), reason))
            return True
        if figures is None:
            return False
        self.tried.append(Tried(draft, figures))
        return True

    def _tune_threads(self, model: Path, *, is_draft: bool) -> None:
        """Choose the thread counts of a model, if it is one of `tuned_models`."""
        if model in self.tuned_models:
            self.threads |= tune_threads(
                self.session,
                model,
                self.interrupted,
                self.progress,
                is_draft=is_draft,
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
    """Sort drafts from best to worst by their speed-ups, rounded as in tables.

    Among equally fast ones, drafts without a file come first, then plain decoding, then files.
    """

    def sort_key(one: Tried) -> tuple[float, bool, bool]:
        # False sorts before True.
        return (-round(one.figures.speedup, 2), isinstance(one.draft, Path), one.draft == "none")

    return tuple(sorted(tried, key=sort_key))


def advice(search: Search) -> tuple[str, ...]:
    """Return three sentences: what was measured, what it means, and what to do.

    If the search was interrupted, or the machine was busy, only the first is returned.
    """
    baseline = search.baseline
    best = search.tried[0]
    figures = best.figures

    answers = f"{counted(len(baseline.answers), 'answer')} of {name_of(search.target)}"
    measured = f"measured on {answers}: {1.0 / baseline.token_s:.1f} tokens/s without a draft"
    if best.draft != "none":
        speed = f"{figures.tokens_per_s:.1f} with {name_of(best.draft)}"
        measured += f", {speed}: {figures.gain}"
    if search.is_interrupted or is_busy(search.others_share):
        return (measured,)

    n_rows = min(_EXAMPLE_ROWS, max(baseline.batch_s))
    cost_in_tokens = baseline.costs.seconds(n_rows) / baseline.token_s
    batch_cost = f"a batch of {n_rows} costs {cost_in_tokens:.1f} tokens"
    if not figures.is_gain:
        meaning = f"{batch_cost}, and no draft that was tried is clearly faster"
        others = "draft with another model (`specgen models list` shows some)"
        return measured, meaning, f"{others}, or not at all: --draft none"

    # The acceptance rate at which drafting is as fast as plain decoding.
    min_acceptance = break_even(PairCosts(baseline.batch_s, figures.draft_token_s or 0.0))
    needed = "drafts cannot pay"
    if min_acceptance is not None:
        needed = f"drafts pay if {min_acceptance:.0%} are accepted"
    meaning = f"{batch_cost}; {needed}, and {figures.acceptance_rate or 0.0:.0%} were"
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
        named: The files that the user named.
        target: The target's file.
        tries_known: Whether to add the models on this disk, and the draft saved for the target,
            unless they are larger than the target.

    Returns:
        The files to try, without copies of the same file; and the named files that cannot draft.
    """
    known = _known_files(target) if tries_known else []
    target_identity = identity_of(target)
    candidates: list[Path] = []
    refused: list[Refused] = []
    seen: set[FileIdentity] = set()
    # Of several paths to the same file the first is tried, so the user's come first.
    for path in (*named, *known):
        is_named = path in named
        identity = identify(path)
        if identity is None:
            if is_named:
                refused.append(Refused(path, "there is no such file, or it cannot be read"))
            continue
        is_too_large = identity.size_bytes > target_identity.size_bytes
        if identity in seen or (is_too_large and not is_named):
            continue
        seen.add(identity)
        if identity != target_identity and not path.samefile(target):
            candidates.append(path)
        elif is_named:
            refused.append(Refused(path, "it is the target itself"))
    return candidates, refused


def _known_files(target: Path) -> list[Path]:
    """Return the models on this disk that may draft for a target, and the draft saved for it.

    These are the registry's models, and those of other programs that are much smaller than the
    target: there may be many of them, and each is tried.
    """
    located = map(hub_names.locate, load_registry().models.values())
    files = [path for path in located if path is not None]
    max_bytes = identity_of(target).size_bytes // _MIN_RATIO
    for model in stored_models():
        identity = identify(model.path)
        is_small = identity is not None and identity.size_bytes <= max_bytes
        if is_small and not problem_with(model):
            files.append(model.path)
    # The saved draft competes with the others, so that only a faster one replaces it.
    saved = saved_draft(identity_of(target))
    if saved is not None and isinstance(saved.draft, Path):
        files.append(saved.draft)
    return files
