"""specgen's drafters inside llama-cpp-python: ``Llama(draft_model=SpecgenDraft(...))``.

`Llama` calls the draft with the text so far, and does not say how many draft tokens it accepted.
That is found by comparing the text with the one before.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from llama_cpp.llama_speculative import LlamaDraftModel

from specgen.errors import BackendError, OutputError, SpecgenError, UsageError
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
from specgen.session.choose_models import Sources, find_models
from specgen.session.drafter_factory import DrafterFactory
from specgen.session.open import (
    WantedSession,
    open_measurements,
    open_session,
    start_kernels,
)
from specgen.session.prompts import Prompt
from specgen.session.session import Session
from specgen.system.folders import cache_folder
from specgen.system.llama_build import REBUILD, REQUIRED_VERSION, uses_bundle

if TYPE_CHECKING:
    from llama_cpp import Llama

#: The context size for `AnswerState`. `Llama` itself ends a text that fills its own context.
_UNLIMITED = 2**31


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


@dataclass(frozen=True, slots=True)
class _PendingRound:
    """A round whose draft `Llama` is verifying."""

    #: The round, without its accepted and committed tokens.
    result: RoundResult
    #: The time at which `Llama` got the draft.
    returned_s: float


class SpecgenDraft(LlamaDraftModel):
    """Drafts for one `Llama` (docs/adapters.md).

    Open it before the `Llama`, so that specgen's kernels compute the target there, too.

    Args:
        target: The file or the name of the target.
        draft: A file, a name or ``ngram``. If there are several, each drafts for the one before it.
        n_ctx: The number of last tokens that a draft model sees.
        drafting: When and how much to draft.
        context: Options of the contexts.
        kernels: The kernels that compute on the CPU.
        note: Gets a sentence if drafting fails, in which case `Llama` goes on without drafts.

    Raises:
        SpecgenError: As from `specgen.load`, or if `Llama` cannot use such a draft.
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
        note: Callable[[str], None] = _warn,
    ) -> None:
        if uses_bundle():  # one copy of GGML's code would read the other's structures
            needed = f"specgen.serve.adapters.llama_cpp needs llama-cpp-python {REQUIRED_VERSION}"
            raise UsageError(needed, hint=REBUILD)
        drafting = drafting or DraftOptions()
        if drafting.tree.is_fixed:
            message = f"tree={drafting.tree}: Llama verifies chains only"
            raise UsageError(message, hint="leave the tree out")
        sources = _find(target, draft)
        _choose_kernels(sources.target, kernels, note)
        self._note = note
        #: The counts of drafted and accepted tokens. The last round of each text is left out, since
        #: no later text shows whether its draft was accepted.
        self.tally = AnswerStats()
        #: The state of the current text; None before the first one.
        self._answer: AnswerState | None = None
        #: The last round of that text; None before the first one.
        self._pending: _PendingRound | None = None
        self._is_closed = False
        context = context or ContextOptions()
        wanted = WantedSession.of(
            sources,
            sampling=SamplerOptions(),
            drafting=replace(drafting, tree=TreeShape("off")),
            generation=GenerationOptions(),
            contexts=Contexts(context, replace(context, weights_memory="auto")),
        )
        with contextlib.ExitStack() as opened:
            self.session = opened.enter_context(_open_session(wanted))
            self.contexts = opened.enter_context(self.session.draft_contexts(n_ctx))
            self._resources = opened.pop_all()
        self._factory = DrafterFactory(self.session)

    def __enter__(self) -> SpecgenDraft:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the drafter. May be called twice. A `Llama` with it can no longer generate."""
        self._is_closed = True
        self._end_text()
        self._resources.close()

    def __call__(
        self,
        input_ids: npt.NDArray[np.intc],
        /,
        **_kwargs: Any,
    ) -> npt.NDArray[np.intc]:
        """Return the draft tokens that may follow a text.

        If the text continues the previous one as a round with the previous draft would, that round
        is recorded, so that the drafting policy learns from it. Otherwise a new text begins.
        """
        if self._is_closed:
            raise BackendError("the draft is closed")
        text: list[int] = input_ids.tolist()
        try:
            answer = self._answer
            pending = self._pending
            if (
                answer is not None
                and pending is not None
                and _extends(text, answer.tokens, pending.result.draft)
            ):
                self._observe(answer, pending, text[len(answer.tokens) :])
            else:
                answer = self._begin_text(text)
            self._pending = self._propose(answer)
        except BaseException:  # Ctrl-C: the drafter's state is unknown
            self._end_text()
            raise
        return np.array(self._pending.result.draft.tokens, dtype=np.intc)

    def _begin_text(self, text: Sequence[int]) -> AnswerState:
        """Begin a new text; the contexts keep the prefix that it shares with the last one."""
        self._end_text()
        self._answer = self._factory.new_answer(
            Prompt("", tuple(text)),
            _UNLIMITED,
            self.contexts,
            seed=0,
        )
        return self._answer

    def _end_text(self) -> None:
        """End the current text, which n-gram drafts may use from now on."""
        answer = self._answer
        if answer is not None:
            self._factory.find_phrases(answer)
            with contextlib.suppress(OutputError):  # the text itself is complete
                self.session.keep_text(answer.tokens)
        self._answer = None
        self._pending = None

    def _observe(
        self,
        answer: AnswerState,
        pending: _PendingRound,
        committed: Sequence[int],
    ) -> None:
        """Record the result of a round.

        Args:
            answer: The state of the text before the round.
            pending: The round.
            committed: The tokens that it added: accepted ones, and a last one from the target.
        """
        for token in committed:
            answer.text_state.commit(token)
        answer.n_answer += len(committed)
        n_accepted = len(committed) - 1
        result = replace(
            pending.result,
            path=tuple(range(n_accepted)),
            target_s=time.perf_counter() - pending.returned_s,
            committed=tuple(committed),
        )
        answer.policy.observe(result)
        if answer.cascade is not None:
            answer.cascade.observe(result)
        self.tally.add_round(result)

    def _propose(self, answer: AnswerState) -> _PendingRound:
        """Begin a round: plan it, and draft unless drafting has failed in this text."""
        started_s = time.perf_counter()
        plan = RoundPlan("failed")
        draft = NO_DRAFT
        proposed: tuple[Draft, ...] = ()
        if answer.cascade is not None:
            offer = answer.offer(answer.policy.n_max)
            plan = answer.policy.plan(offer)
            drafting = answer.cascade.propose(answer.tokens, plan)
            (proposal,) = propose_together([drafting], time.perf_counter)
            draft = plan.stop.cut(proposal.draft)
            proposed = (offer.found, proposal.draft)
            if proposal.error is not None:
                answer.cascade = None
                self._note_failure(proposal.error)
        returned_s = time.perf_counter()
        draft_s = returned_s - started_s
        result = RoundResult(
            plan,
            draft,
            draft_s=draft_s,
            n_rows=1 + len(draft),
            proposed=proposed,
            model_s=draft_s,
        )
        return _PendingRound(result, returned_s)

    def _note_failure(self, error: Exception) -> None:
        reason = error.message if isinstance(error, SpecgenError) else repr(error)
        self._note(f"drafting failed, going on without a draft: {reason}")

    def check(self, llama: Llama) -> None:
        """Raise `UsageError` if `llama` would fail with this draft, or does not use it."""
        n_ctx = llama.n_ctx()
        n_vocab = self.session.target.vocabulary.n_tokens
        n_logit_rows = min(len(llama.input_ids), len(llama.scores))
        if llama.draft_model is not self:
            raise UsageError(
                "Llama has another draft", "give Llama draft_model=<this SpecgenDraft>"
            )
        n_llama_vocab = llama.n_vocab()
        if n_llama_vocab != n_vocab:
            raise UsageError(
                f"Llama has a model of {n_llama_vocab} tokens, and the draft a target of {n_vocab}",
                "open the SpecgenDraft with the same target file as Llama",
            )
        if n_logit_rows < n_ctx:
            raise UsageError(
                f"Llama has room for the logits of {n_logit_rows} tokens in a context of {n_ctx}",
                f"open Llama with logits_all=True and n_ctx={n_ctx}, or with a smaller n_ctx",
            )


def _find(target: str | Path, draft: str | Path | Sequence[str | Path]) -> Sources:
    """Return the files of a target and its drafts, downloaded if necessary."""
    drafts = [draft] if isinstance(draft, (str, Path)) else list(draft)
    if not drafts:
        raise UsageError("no draft is given", hint='give a model, or "ngram", which needs none')
    names = [str(draft_name) for draft_name in drafts]
    return find_models(staged(str(target), names, None), quiet=True)


def _choose_kernels(
    target: Path,
    kernels: KernelChoice,
    note: Callable[[str], None],
) -> None:
    """Attach specgen's kernels if they can compute the target, or else use llama.cpp's.

    This has to be decided now: `Llama` loads the target itself, and could not go on without the
    kernels if they failed then.
    """
    start_kernels(KernelOptions(kernels))
    problem = kernel_problem(target)
    if problem:
        choose_kernels("llama.cpp", cache_folder())
        note(f"not using specgen's kernels: in a trial of {target.name} {problem}")


@contextlib.contextmanager
def _open_session(wanted: WantedSession) -> Iterator[Session]:
    """Yield a session with the draft and the target's vocabulary.

    The target is loaded only to measure both models, if drafting depends on costs that are not
    measured yet.
    """
    measurements = open_measurements()
    clock = time.perf_counter
    with open_session(
        wanted,
        clock=clock,
        measurements=measurements,
        vocabulary_only=True,
    ) as session:
        name = session.target.name
        if session.target.has_recurrent_state:
            raise UsageError(
                f"{name} has a recurrent state, and Llama cannot roll back rejected drafts there",
                hint="use `specgen run`, or `specgen.load` from Python, which can",
            )
        cost_key = session.draft.cost_key if session.draft is not None else None
        if wanted.options.drafting.is_by_cost and not is_pair_measured(session, cost_key):
            with open_session(wanted, clock=clock, measurements=measurements) as full_session:
                calibrate(full_session)
                measurements.save()
        yield session


def _extends(
    text: Sequence[int],
    before: Sequence[int],
    draft: Draft,
) -> bool:
    """Return whether `text` is `before` plus accepted draft tokens plus one token."""
    committed = list(text[len(before) :])
    if not committed or list(text[: len(before)]) != list(before):
        return False
    accepted = committed[:-1]
    return accepted == list(draft.tokens[: len(accepted)])
