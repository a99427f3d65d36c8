"""Measure what drafting gains for a target on this machine, and why.

Threads first, since all else depends on them; then what decodes cost, while the target answers a
few prompts; then how often the draft says what these answers say, and what it, n-grams, both and
other drafts would gain (`specgen.selection.trial`). What is measured replaces what the session's memory
says, whoever keeps that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.backend.llama import default_threads
from specgen.calibration.threads import ThreadTimes, measure_threads, thread_counts
from specgen.calibration.weight_copies import Comparison
from specgen.engine.agreement import Agreement
from specgen.engine.measurements import agreement_walk, measure_if_new
from specgen.errors import BackendError, MemoryLimitError, ModelFileError, PairError, SpecgenError
from specgen.options import DraftSource
from specgen.selection.outlook import Costs, Outlook, known_costs, outlook
from specgen.selection.trial import (
    Baseline,
    DraftFigures,
    answered_prompt,
    measure_target,
    plain_figures,
    try_draft,
)

if TYPE_CHECKING:
    from specgen.engine.session import Session
    from specgen.progress import Progress

#: Seconds of decoding in which numbers of threads are compared, about.
_THREADS_BUDGET_S = 20.0
#: Cells of the contexts in which they are.
_N_CTX = 256
#: How precisely the acceptance rate is found from which a draft pays.
_PRECISION = 0.005
#: What may go wrong with a draft without saying anything of the target.
_DRAFT_ERRORS = (BackendError, MemoryLimitError, ModelFileError, PairError)


@dataclass(frozen=True, slots=True)
class TriedDraft:
    """A way to draft, with or without n-grams beside a model, and what it would gain."""

    draft: DraftSource
    ngrams: bool
    figures: DraftFigures


@dataclass(frozen=True, slots=True)
class DraftFindings:
    """What was found out about a draft model: its `costs` beside the target's (None if a round
    has no room for a draft), and how often it says what the target says; and how quick it is
    beside a copy of its weights, if they were compared."""

    draft: Path
    agreement: Agreement
    costs: Costs | None
    threads: ThreadTimes | None = None
    compared: Comparison | None = None

    @property
    def expected(self) -> Outlook | None:
        """What could be expected of it from costs and agreement alone, by a formula."""
        rate = self.agreement.rate
        return outlook(self.costs, rate) if self.costs is not None and rate is not None else None


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was found out about a target and its draft model, if it has one. `threads` is None
    where the user named a number. `ways` are in no order, `refused` are drafts that cannot
    draft for it, and why. `others_share` is the share of all cores' time that other programs
    took meanwhile, if anybody knows."""

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
        """The way that gains most; of equals, as far as two digits tell, the simplest."""
        return max(self.ways, key=lambda way: (round(way.figures.speedup, 2), -_effort(way)))

    def way(self, draft: DraftSource, *, ngrams: bool = False) -> TriedDraft | None:
        """What was found of a way; None if it was not tried."""
        found = (way for way in self.ways if way.draft == draft and way.ngrams == ngrams)
        return next(found, None)


class Tuner:
    """Tunes a session, which need not have a draft. The session's temperature must be 0, its
    policy that of costs."""

    def __init__(
        self,
        session: Session,
        *,
        interrupted: Callable[[], bool] = lambda: False,
        progress: Progress = lambda _what, _done, _total: None,
    ) -> None:
        self._session = session
        self._interrupted = interrupted
        self._progress = progress
        self._target = session.options.target

    def run(
        self,
        draft: Path | None,
        others: Iterable[Path],
        prompts: Sequence[str],
        *,
        chat: bool | None = None,
    ) -> Tuning | None:
        """Measure the target, the draft, and other files that may draft for it.

        Returns what there is if interrupted, and None if that is nothing. Raises `PromptError`,
        and for the target or `draft` `ModelFileError`, `PairError`, `MemoryLimitError` or
        `BackendError`; other drafts that cannot be used are refused.
        """
        if draft is not None:
            self._session.costs.forget_weights(draft)
        self._session.change_draft(draft if draft is not None else "none")
        threads = self._threads(None)
        draft_threads = self._threads(draft) if draft is not None else None
        self._session.costs.forget()
        baseline = measure_target(
            self._session,
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
        """With what is found of the draft, which is the session's."""
        self._session.costs.forget(draft)
        agreement = self._walk(found.baseline, draft)
        if agreement is None:
            return found
        for ngrams in (False, True):
            found = self._with_way(found, draft, ngrams=ngrams)
        # The target's costs are the prompts', not those that a draft's trial may have corrected.
        costs = known_costs(self._session, draft)
        if costs is not None:
            costs = Costs(found.baseline.batch_s, costs.draft_token_s)
        latest = {compared.model: compared for compared in self._session.compared}
        findings = DraftFindings(draft, agreement, costs, threads, latest.get(draft.name))
        return replace(found, draft=findings)

    def _with_others(self, found: Tuning, others: Iterable[Path]) -> Tuning:
        """With n-grams, and with other drafts as `specgen run` would take them."""
        sources: list[DraftSource] = ["ngram", *others]
        for source in sources:
            if self._interrupted():
                break
            is_model = isinstance(source, Path)
            try:
                self._session.change_draft(source)
                if isinstance(source, Path):
                    self._session.costs.forget(source)
                found = self._with_way(found, source, ngrams=is_model)
            except _DRAFT_ERRORS as error:
                refused = (Path(source), _reason(error, source))
                found = replace(found, refused=(*found.refused, refused))
        return found

    def _with_way(self, found: Tuning, draft: DraftSource, *, ngrams: bool) -> Tuning:
        """With what the session's draft would gain; as it is if interrupted."""
        name = Path(draft).name if isinstance(draft, Path) else "n-grams"
        what = f"{name} and n-grams" if ngrams else name
        self._session.let_ngrams_draft(ngrams)
        try:
            figures = try_draft(
                self._session,
                found.baseline,
                interrupted=self._interrupted,
                progress=self._telling(what),
            )
        finally:
            self._session.let_ngrams_draft(None)
        if figures is None:
            return found
        return replace(found, ways=(*found.ways, TriedDraft(draft, ngrams, figures)))

    def _threads(self, draft: Path | None) -> ThreadTimes | None:
        """Choose and keep the numbers of threads of the target, or of the draft, which is the
        session's; None where the user named one, or interrupted."""
        session = self._session
        options = session.options.target_context if draft is None else session.options.draft_context
        is_named = options.n_threads is not None or options.n_threads_batch is not None
        if is_named or self._interrupted():
            return None
        model = draft or self._target
        self._progress(f"threads for {model.name}", 0, 1)
        n_train = session.target_model.n_ctx_train
        n_ctx = min(_N_CTX, n_train) if n_train > 0 else _N_CTX
        default = default_threads()
        counts = thread_counts(default, os.cpu_count() or default, _n_usable_cores())
        with session.contexts(n_ctx, drafts=draft is not None) as (target, drafting):
            backend = target if draft is None else drafting
            assert backend is not None, "the session's draft"
            found = measure_threads(backend, counts, default, _THREADS_BUDGET_S, self._interrupted)
        if self._interrupted():
            return None
        session.memory.keep_threads(model, options, found.chosen)
        return found

    def _walk(self, baseline: Baseline, draft: Path) -> Agreement | None:
        """How often the session's draft would say, at each place of the target's answers, what
        these say; None if interrupted. Its chances learn from that."""
        n_places = n_agreed = 0
        tell = self._telling(f"agreement of {draft.name}")
        with self._session.contexts(baseline.n_ctx) as (target, drafting):
            assert drafting is not None, "the session's draft"
            measure_if_new(self._session, target, drafting)
            for number, answer in enumerate(baseline.answers):
                tell(number, len(baseline.answers))
                prompt = answered_prompt(self._session, baseline, answer)
                drafting.remove(0)
                walk = agreement_walk(self._session, prompt, drafting)
                tokens = [*prompt.tokens, *answer.tokens]
                for place in range(len(prompt.tokens), len(tokens)):
                    if self._interrupted():
                        return None
                    walk.look(tokens, place, tokens[place])
                n_places += walk.found.n_places
                n_agreed += walk.found.n_agreed
        return Agreement(n_places, n_agreed)

    def _telling(self, what: str) -> Callable[[int, int], None]:
        return lambda done, total: self._progress(what, done, total)


# --- what if ---------------------------------------------------------------------------------


def break_even(costs: Costs) -> float | None:
    """The acceptance rate from which a draft begins to save time, by the formula of `outlook`;
    None if it never does."""
    if outlook(costs, 1.0).speedup <= 1.0:
        return None
    low, high = 0.0, 1.0
    while high - low > _PRECISION:
        middle = (low + high) / 2
        low, high = (low, middle) if outlook(costs, middle).speedup > 1.0 else (middle, high)
    return high


def with_cheaper_draft(costs: Costs, share: float) -> Costs:
    """If a drafted token cost that share of what it does."""
    return Costs(costs.batch_s, share * costs.draft_token_s)


def with_flat_batches(costs: Costs) -> Costs:
    """If the target's batches cost no more than a token by itself: what waits for its weights
    comes near that."""
    return Costs(dict.fromkeys(costs.batch_s, costs.batch_s[1]), costs.draft_token_s)


def speedup_with(
    findings: DraftFindings,
    measured: float,
    *,
    costs: Costs | None = None,
    rate: float | None = None,
) -> float | None:
    """The speed-up to expect of a draft if it had these costs, or this rate of agreement, and
    otherwise those that were found, with which it was measured to be `measured`; None if nothing
    is known to expect it by.

    The formula says by how much it would change: what it leaves out, such as that drafts stop
    where they are unsure, is left out of both. Nobody need draft at a loss: below 1 is 1.
    """
    own_rate = findings.agreement.rate
    if findings.costs is None or own_rate is None:
        return None
    before = outlook(findings.costs, own_rate).speedup
    after = outlook(
        costs if costs is not None else findings.costs, rate if rate is not None else own_rate
    ).speedup
    return max(1.0, measured) * max(1.0, after) / max(1.0, before)


def halfway_right(rate: float) -> float:
    """The rate of agreement of a draft that is right at half of the places where one with
    `rate` is not."""
    return (1.0 + rate) / 2.0


def _effort(way: TriedDraft) -> int:
    """How much a way takes, beside its time."""
    if way.draft == "none":
        return 0
    return 2 + way.ngrams if isinstance(way.draft, Path) else 1


def _reason(error: SpecgenError, draft: DraftSource) -> str:
    """What an error says, without the name of the file that it is about."""
    return error.message.removeprefix(f"{draft}: ")


def _n_usable_cores() -> int:
    """How many cores this process may use, where the system tells."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


__all__ = [
    "DraftFindings",
    "TriedDraft",
    "Tuner",
    "Tuning",
    "break_even",
    "halfway_right",
    "speedup_with",
    "with_cheaper_draft",
    "with_flat_batches",
]
