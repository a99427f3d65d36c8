"""specgen's drafters inside llama-cpp-python, ``Llama(draft_model=SpecgenDraft(...))``, which
passes only the text so far.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from llama_cpp.llama_speculative import LlamaDraftModel

from specgen.errors import BackendError, SpecgenError, UsageError
from specgen.llama.kernels.admission import choose_kernels
from specgen.llama.kernels.attached import kernel_problem
from specgen.method.answer_state import AnswerState
from specgen.method.answer_stats import AnswerStats
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.drafter import propose_together
from specgen.method.policy import RoundPlan, RoundResult
from specgen.options import (
    ContextOptions,
    Contexts,
    DraftOptions,
    GenerationOptions,
    KernelChoice,
    KernelOptions,
    SamplerOptions,
    TreeShape,
    staged,
)
from specgen.session.calibration import calibrate, is_pair_measured
from specgen.session.choose_models import find_models
from specgen.session.drafter_factory import DrafterFactory
from specgen.session.open import (
    WantedSession,
    open_measurements,
    open_session,
    start_kernels,
)
from specgen.session.prompts import Prompt
from specgen.system.folders import cache_folder
from specgen.system.llama_build import REBUILD, REQUIRED_VERSION, uses_bundle

if TYPE_CHECKING:
    from llama_cpp import Llama

#: The context size for `AnswerState`: `Llama` cuts off what does not fit its own context.
_UNLIMITED = 2**31


class SpecgenDraft(LlamaDraftModel):
    """Drafts for one `Llama` (docs/adapters.md). Open it before the `Llama`, whose target its
    `kernels` compute, too. `draft` is a file, a name or ``ngram``; of several, each drafts for the
    one before it. A draft model sees the last `n_ctx` tokens. `note` gets a sentence if drafting
    fails; the text goes on. Raise what `specgen.load` raises.
    """

    def __init__(
        self,
        target: str | Path,
        draft: str | Path | Sequence[str | Path],
        *,
        n_ctx: int = 4096,
        drafting: DraftOptions | None = None,
        context: ContextOptions | None = None,
        kernels: KernelChoice = "auto",
        note: Callable[[str], None] = lambda text: warnings.warn(
            text, RuntimeWarning, stacklevel=2
        ),
    ) -> None:
        if uses_bundle():  # one copy of GGML's code would read the other's structures
            needed = f"specgen.serve.adapters.llama_cpp needs llama-cpp-python {REQUIRED_VERSION}"
            raise UsageError(needed, hint=REBUILD)
        drafting, context = drafting or DraftOptions(), context or ContextOptions()
        if drafting.tree.is_fixed:
            what = f"tree={drafting.tree}: Llama verifies chains only"
            raise UsageError(what, hint="leave the tree out")
        drafts = [draft] if isinstance(draft, (str, Path)) else list(draft)
        if not drafts:
            raise UsageError("no draft is given", hint='give a model, or "ngram", which needs none')
        sources = find_models(staged(str(target), list(map(str, drafts)), None), quiet=True)
        start_kernels(KernelOptions(kernels))
        if problem := kernel_problem(sources.target):  # the Llama of the target is not ours
            choose_kernels("llama.cpp", cache_folder())
            note(f"not using specgen's kernels: in a trial of {sources.target.name} {problem}")
        wanted = WantedSession.of(
            sources,
            sampling=SamplerOptions(),
            drafting=replace(drafting, tree=TreeShape("off")),
            answer=GenerationOptions(),
            contexts=Contexts(context, context),
        )
        self._note = note
        #: What was drafted and accepted so far, without the last round of each text, whose end is
        #: unknown.
        self.tally = AnswerStats()
        #: The present text, its last round as far as it is known, and when that was handed out.
        self._sequence: AnswerState | None = None
        self._round: RoundResult | None = None
        self._handed_s = 0.0
        self._is_closed = False
        measurements, clock = open_measurements(), time.perf_counter
        with contextlib.ExitStack() as opened:
            self.session = open_session(
                wanted, clock=clock, measurements=measurements, vocabulary_only=True
            )
            opened.enter_context(self.session)
            if self.session.target.has_recurrent_state:
                raise UsageError(
                    f"{self.session.target.name} has a recurrent state, and Llama cannot roll back rejected "
                    "drafts there",
                    hint="use `specgen run`, or `specgen.load` from Python, which can",
                )
            timed = self.session.draft.timed if self.session.draft is not None else None
            if drafting.is_by_cost and not is_pair_measured(self.session, timed):
                with open_session(wanted, clock=clock, measurements=measurements) as whole:
                    calibrate(whole)
                    measurements.save()
            self.contexts = opened.enter_context(self.session.draft_contexts(n_ctx))
            self._resources = opened.pop_all()

    def __enter__(self) -> SpecgenDraft:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the drafter. May be called twice; a `Llama` that still uses it cannot generate."""
        self._is_closed = True
        self._end_text()
        self._resources.close()

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **_kwargs: Any) -> npt.NDArray[np.intc]:
        """Return the draft after a text, and learn from the last one if the text extends it as a
        round does.
        """
        if self._is_closed:
            raise BackendError("the draft is closed")
        text, sequence, known = input_ids.tolist(), self._sequence, self._round
        try:
            if sequence is None or known is None or not _extends(text, sequence.tokens, known):
                self._end_text()  # the caches keep the prefix that both texts share
                self._sequence = sequence = DrafterFactory(self.session).new_answer(
                    Prompt("", tuple(text)), _UNLIMITED, self.contexts, seed=0
                )
            else:
                self._observe(sequence, known, text[len(sequence.tokens) :])
            draft = self._propose(sequence)
        except BaseException:  # Ctrl-C: the drafter's state is unknown
            self._end_text()
            raise
        return np.array(draft.tokens, dtype=np.intc)

    def _end_text(self) -> None:
        if self._sequence is not None:
            self.session.ngrams.keep_text(self._sequence.tokens)
        self._sequence = self._round = None

    def _observe(self, sequence: AnswerState, known: RoundResult, committed: list[int]) -> None:
        for token in committed:
            sequence.text_state.commit(token)
        sequence.n_answer += len(committed)
        path, target_s = tuple(range(len(committed) - 1)), time.perf_counter() - self._handed_s
        result = replace(known, path=path, target_s=target_s, committed=tuple(committed))
        sequence.policy.observe(result)
        if sequence.cascade is not None:
            sequence.cascade.observe(result)
        self.tally.add_round(result)

    def _propose(self, sequence: AnswerState) -> Draft:
        """Begin a round: plan, and draft, unless drafting has failed in this text."""
        cascade, started_s = sequence.cascade, time.perf_counter()
        plan, draft, proposed = RoundPlan("failed"), NO_DRAFT, tuple[Draft, ...]()
        if cascade is not None:
            offer = sequence.offer(sequence.policy.n_max)
            plan = sequence.policy.plan(offer)
            drafting = cascade.propose(sequence.tokens, plan)
            (proposal,) = propose_together([drafting], time.perf_counter)
            draft, proposed = plan.stop.cut(proposal.draft), (offer.found, proposal.draft)
            if (error := proposal.error) is not None:
                sequence.cascade = None
                what = error.message if isinstance(error, SpecgenError) else repr(error)
                self._note(f"drafting failed, going on without a draft: {what}")
        self._handed_s = time.perf_counter()
        seconds, n_rows = self._handed_s - started_s, 1 + len(draft)
        self._round = RoundResult(
            plan, draft, draft_s=seconds, n_rows=n_rows, proposed=proposed, model_s=seconds
        )
        return draft

    def check(self, llama: Llama) -> None:
        """Raise `UsageError` if `llama` would fail with this draft, or not use it: it needs room
        for all logits.
        """
        n_ctx, n_own = llama.n_ctx(), self.session.target.vocabulary.n_tokens
        n_room = min(len(llama.input_ids), len(llama.scores))
        problem = hint = ""
        if llama.draft_model is not self:
            problem, hint = "another draft", "give Llama draft_model=<this SpecgenDraft>"
        elif llama.n_vocab() != n_own:
            problem = f"a model of {llama.n_vocab()} tokens, and the draft a target of {n_own}"
            hint = "open the SpecgenDraft with the same target file as Llama"
        elif n_room < n_ctx:
            problem = f"room for the logits of {n_room} tokens in a context of {n_ctx}"
            hint = f"open Llama with logits_all=True and n_ctx={n_ctx}, or with a smaller n_ctx"
        if problem:
            raise UsageError(f"Llama has {problem}", hint)


def _extends(text: list[int], before: Sequence[int], known: RoundResult) -> bool:
    """Return whether a round with this draft can have made `text` of the text `before`."""
    committed = text[len(before) :]
    accepted = committed[:-1]
    is_round = accepted == list(known.draft.tokens[: len(accepted)])
    return bool(committed) and is_round and text[: len(before)] == list(before)
