"""Measure what drafting gains for a target on this machine, and why.

The numbers of threads come first, since all else depends on them. Then the costs of decodes are measured
while the target answers a few prompts. Then the draft is compared with these answers, and the gain of the
draft, of n-grams, of both and of other drafts is computed (`specgen.measure.selection.trial`). The results replace
those in the models' memory; the caller saves it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.errors import BackendError, MemoryLimitError, ModelFileError, PairError, SpecgenError
from specgen.llama import default_threads
from specgen.measure.selection.default_draft import name_of
from specgen.measure.selection.trial import (
    Baseline,
    DraftFigures,
    answered_prompt,
    measure_target,
    plain_figures,
    try_draft,
)
from specgen.options import DraftSource
from specgen.session.calibration.gain import Agreement, Costs, Gain, expected_gain
from specgen.session.calibration.threads import ThreadTimes, measure_threads, thread_counts
from specgen.session.measurements import (
    agreement_walk,
    known_costs,
    measure_if_new,
    read_for,
    short_context,
)

if TYPE_CHECKING:
    from specgen.session.loaded_models import Models
    from specgen.system.progress import Progress

#: About how many seconds of decoding the comparison of numbers of threads takes.
THREADS_BUDGET_S = 20.0
#: Errors that are the draft's and not the target's.
_DRAFT_ERRORS = (BackendError, MemoryLimitError, ModelFileError, PairError)


@dataclass(frozen=True, slots=True)
class TriedDraft:
    """A way to draft, with or without n-grams beside a model, and its figures."""

    draft: DraftSource
    ngrams: bool
    figures: DraftFigures


@dataclass(frozen=True, slots=True)
class DraftFindings:
    """The measurements of a draft model: its agreement with the target, the `costs` of both models (None if
    a round has no room for a draft), and the times by number of threads."""

    draft: Path
    agreement: Agreement
    costs: Costs | None
    threads: ThreadTimes | None = None

    @property
    def expected(self) -> Gain | None:
        """The gain that is expected from costs and agreement; None if these are not known."""
        rate = self.agreement.rate
        return None if self.costs is None or rate is None else expected_gain(self.costs, rate)


@dataclass(frozen=True, slots=True)
class Tuning:
    """The measurements of a target and of its draft model, if it has one. `threads` is None if the user
    named a number or the tuning was interrupted. `ways` are in no order. `refused` are drafts that cannot
    draft for the target, with reasons. `others_share` is the share of all cores' time that other programs
    took meanwhile; None if it is unknown."""

    target: Path
    baseline: Baseline
    threads: ThreadTimes | None
    draft: DraftFindings | None
    ways: tuple[TriedDraft, ...]
    refused: tuple[tuple[Path, str], ...] = ()
    is_interrupted: bool = False
    others_share: float | None = None

    @property
    def best(self) -> TriedDraft:
        """The way with the best speed-up, rounded to two digits; of equal ones, the simplest."""
        return max(self.ways, key=lambda way: (round(way.figures.speedup, 2), -_effort(way)))

    def way(self, draft: DraftSource, *, ngrams: bool = False) -> TriedDraft | None:
        """Return a way with its figures; None if it was not tried."""
        found = (way for way in self.ways if way.draft == draft and way.ngrams == ngrams)
        return next(found, None)


class Tuner:
    """Tunes loaded models, which need not have a draft. The temperature must be 0, and its policy
    must decide by costs."""

    def __init__(
        self,
        loaded: Models,
        *,
        interrupted: Callable[[], bool] = lambda: False,
        progress: Progress = lambda _what, _done, _total: None,
    ) -> None:
        self._loaded = loaded
        self._interrupted = interrupted
        self._progress = progress
        self._target = loaded.options.target

    def run(
        self,
        draft: Path | None,
        others: Iterable[Path],
        prompts: Sequence[str],
        *,
        chat: bool | None = None,
    ) -> Tuning | None:
        """Measure the target, the draft, and other files that may draft for it.

        If interrupted, returns the measurements so far, or None if the target's are not complete. Raise
        `PromptError`, and `ModelFileError`, `PairError`, `MemoryLimitError` or `BackendError` if the target
        or `draft` fails; other drafts that fail are only listed as refused.
        """
        self._loaded.change_draft(draft if draft is not None else "none")
        threads = self._threads(None)
        draft_threads = self._threads(draft) if draft is not None else None
        self._loaded.costs.forget()
        baseline = measure_target(
            self._loaded,
            prompts,
            chat=chat,
            interrupted=self._interrupted,
            progress=self._telling(self._target.name),
        )
        if baseline is None:
            return None
        found = Tuning(
            self._target,
            baseline,
            threads,
            None,
            (TriedDraft("none", False, plain_figures(baseline)),),
        )
        if draft is not None and not self._interrupted():
            found = self._with_draft(found, draft, draft_threads)
        found = self._with_others(found, [path for path in others if path != draft])
        return replace(found, is_interrupted=self._interrupted())

    def _with_draft(self, found: Tuning, draft: Path, threads: ThreadTimes | None) -> Tuning:
        """Return the tuning with the measurements of the loaded draft model added."""
        self._loaded.costs.forget(draft)
        agreement = self._walk(found.baseline, draft)
        if agreement is None:
            return found
        for ngrams in (False, True):
            found = self._with_way(found, draft, ngrams=ngrams)
        # The target's costs are those of the baseline: the trial of a draft may have changed the table.
        costs = known_costs(self._loaded, draft)
        if costs is not None:
            costs = replace(costs, batch_s=found.baseline.batch_s)
        findings = DraftFindings(draft, agreement, costs, threads)
        return replace(found, draft=findings)

    def _with_others(self, found: Tuning, others: Iterable[Path]) -> Tuning:
        """Return the tuning with the figures of n-grams and of other drafts added, each as `specgen run`
        would use it."""
        sources: list[DraftSource] = ["ngram", *others]
        if not self._loaded.target.why_no_mtp:
            sources.insert(1, "mtp")
        for source in sources:
            if self._interrupted():
                break
            try:
                self._loaded.change_draft(source)
                if source == "mtp" or isinstance(source, Path):
                    self._loaded.costs.forget(source)
                found = self._with_way(found, source, ngrams=source != "ngram")
            except _DRAFT_ERRORS as error:
                refused = (Path(source), _reason(error, source))
                found = replace(found, refused=(*found.refused, refused))
        return found

    def _with_way(self, found: Tuning, draft: DraftSource, *, ngrams: bool) -> Tuning:
        """Return the tuning with the figures of the loaded draft added; unchanged if interrupted."""
        name = name_of(draft)
        what = f"{name} and n-grams" if ngrams else name
        self._loaded.let_ngrams_draft(ngrams)
        try:
            figures = try_draft(
                self._loaded,
                found.baseline,
                interrupted=self._interrupted,
                progress=self._telling(what),
            )
        finally:
            self._loaded.let_ngrams_draft(None)
        if figures is None:
            return found
        return replace(found, ways=(*found.ways, TriedDraft(draft, ngrams, figures)))

    def _threads(self, draft: Path | None) -> ThreadTimes | None:
        """Measure and keep the best numbers of threads for the target, or for the loaded draft model.
        None if the user named a number, or if interrupted."""
        loaded = self._loaded
        options = loaded.options.target_context if draft is None else loaded.options.draft_context
        is_named = options.n_threads is not None or options.n_threads_batch is not None
        if is_named or self._interrupted():
            return None
        model = draft or self._target
        self._progress(f"threads for {model.name}", 0, 1)
        default = default_threads()
        counts = thread_counts(default, os.cpu_count() or default, _n_usable_cores())
        with loaded.contexts(short_context(loaded), drafts=draft is not None) as (target, drafts):
            backend = target if draft is None else drafts[0]
            found = measure_threads(backend, counts, default, THREADS_BUDGET_S, self._interrupted)
        if self._interrupted():
            return None
        loaded.memory.keep_threads(model, options, found.chosen)
        return found

    def _walk(self, baseline: Baseline, draft: Path) -> Agreement | None:
        """Return how often the loaded draft model agrees with the target's answers, over all their
        positions; None if interrupted. The acceptance statistics learn from this."""
        n_places = n_agreed = 0
        tell = self._telling(f"agreement of {draft.name}")
        with self._loaded.contexts(baseline.n_ctx) as (target, drafts):
            measure_if_new(self._loaded, target, drafts)
            for number, answer in enumerate(baseline.answers):
                tell(number, len(baseline.answers))
                prompt = answered_prompt(self._loaded, baseline, answer)
                for each in drafts:
                    each.remove(0)
                walk = agreement_walk(self._loaded, prompt, drafts)
                tokens = [*prompt.tokens, *answer.tokens]
                read_for(drafts[0], target, tokens)
                for place in range(len(prompt.tokens), len(tokens)):
                    if self._interrupted():
                        return None
                    walk.look(tokens, place, tokens[place])
                n_places += walk.found.n_places
                n_agreed += walk.found.n_agreed
        return Agreement(n_places, n_agreed)

    def _telling(self, what: str) -> Callable[[int, int], None]:
        return lambda done, total: self._progress(what, done, total)


def _effort(way: TriedDraft) -> int:
    """Return how complex a way is, beside its time: 0 for plain decoding, 3 for a model with n-grams."""
    if way.draft == "none":
        return 0
    return 1 if way.draft == "ngram" else 2 + way.ngrams


def _reason(error: SpecgenError, draft: DraftSource) -> str:
    """Return an error's message without the name of its file."""
    return error.message.removeprefix(f"{draft}: ")


def _n_usable_cores() -> int:
    """Return the number of cores that this process may use; all cores if the system does not say."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
