"""specgen's drafters inside llama-cpp-python: ``Llama(draft_model=SpecgenDraft(...))``.

`Llama` decodes the target, and passes only the text so far.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from llama_cpp.llama_speculative import LlamaDraftModel

from specgen.errors import BackendError, SpecgenError, UsageError
from specgen.llama.file_check import remember_checks
from specgen.llama.kernels.admission import choose_kernels
from specgen.llama.kernels.attached import kernel_problem
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.drafter import propose_together
from specgen.method.policy import Reason, RoundPlan, RoundResult
from specgen.models import cache_folder
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
from specgen.session.drafter_factory import DrafterFactory
from specgen.session.files import find_models
from specgen.session.open import open_memory, session_options
from specgen.session.prompts import Prompt
from specgen.session.session import Session
from specgen.system.llama_build import REBUILD, REQUIRED_VERSION, uses_bundle
from specgen.text.sequence import Sequence
from specgen.text.tally import Tally

if TYPE_CHECKING:
    from llama_cpp import Llama

#: The context size for `Sequence`: `Llama` cuts off what does not fit its own context.
_UNLIMITED = 2**31


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


class SpecgenDraft(LlamaDraftModel):
    """Drafts for one `Llama`. Open it before the `Llama`, and close it, or use it as a context manager.

    `target` is the model of the `Llama`; only its vocabulary is loaded. `draft` is a file or a name from
    `specgen models list`, of any vocabulary, or ``ngram``; if there are several, each drafts for the one
    before it. Drafts are chains of the most likely tokens; `Llama` accepts a token if it chooses the same one.

    `n_ctx` is the size of a draft model's context in tokens: of a longer text it sees the end. `context` says
    how models are loaded (threads, layers on the GPU). `kernels` compute all models that are loaded from now on,
    the `Llama`'s too. If costs decide how much is drafted and the models have never been timed on this machine,
    the target is loaded once for that. `note` gets a sentence if drafting fails; the text then continues
    without drafts.

    Raises `UsageError`, also for a target with a recurrent state, `ModelFileError`, `PairError`,
    `UnknownModelError`, `FetchError` or `MemoryLimitError`.
    """

    def __init__(
        self,
        target: str | Path,
        draft: str | Path | abc.Sequence[str | Path],
        *,
        n_ctx: int = 4096,
        drafting: DraftOptions | None = None,
        context: ContextOptions | None = None,
        kernels: KernelChoice = "auto",
        note: Callable[[str], None] = _warn,
    ) -> None:
        if uses_bundle():  # one copy of GGML's code would read the other's structures
            raise UsageError(
                f"specgen.serve.adapters.llama_cpp needs llama-cpp-python {REQUIRED_VERSION}",
                hint=REBUILD,
            )
        drafting = drafting or DraftOptions()
        if drafting.tree.is_fixed:
            raise UsageError(
                f"tree={drafting.tree}: Llama verifies chains only", hint="leave the tree out"
            )
        drafts = [draft] if isinstance(draft, (str, Path)) else list(draft)
        if not drafts:
            raise UsageError("no draft is given", hint='give a model, or "ngram", which needs none')
        sources = find_models(staged(str(target), [str(each) for each in drafts], None), quiet=True)
        remember_checks(cache_folder())
        choose_kernels(kernels, cache_folder())
        if problem := kernel_problem(sources.target):  # the Llama of the target is not ours
            choose_kernels("llama.cpp", cache_folder())
            note(f"not using specgen's kernels: in a trial of {sources.target.name} {problem}")
        context = context or ContextOptions()
        options = session_options(
            sources,
            SamplerOptions(),
            replace(drafting, tree=TreeShape("off")),
            GenerationOptions(),
            Contexts(context, context, KernelOptions(kernels)),
        )
        self._note = note
        #: The counts of drafted and accepted tokens so far, without the last round of each text: `Llama` does
        #: not report the end of a text.
        self.tally = Tally()
        #: The present text, the last draft for it, its costs, and when it was returned.
        self._sequence: Sequence | None = None
        self._draft, self._proposed = NO_DRAFT, tuple[Draft, ...]()
        self._plan = RoundPlan(Reason("off"))
        self._draft_s = self._handed_s = 0.0
        self._is_closed = False
        self._resources = contextlib.ExitStack()
        memory, clock = open_memory(), time.perf_counter
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            session = Session(options, clock, memory, vocabulary_only=True)
            self.session = self._resources.enter_context(session)
            if session.target.has_recurrent_state:
                raise UsageError(
                    f"{session.target.name} has a recurrent state, and Llama cannot roll back rejected "
                    "drafts there",
                    hint="use `specgen run`, or `specgen.load` from Python, which can",
                )
            timed = session.draft.timed if session.draft is not None else None
            if options.drafting.is_by_cost and not is_pair_measured(session, timed):
                with Session(options, clock, memory) as whole:
                    calibrate(whole)
                    memory.save()
            self.contexts = self._resources.enter_context(session.draft_contexts(n_ctx))
            on_error.pop_all()

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
        """Return the draft after the text `input_ids`, int32[n_tokens]: int32[n_drafted], which may be
        empty.

        If the text extends the one before as a round does (a prefix of the last draft, then one token of
        the target's own), the accepted tokens are counted and learnt from. Any other text is a new one.
        """
        if self._is_closed:
            raise BackendError("the draft is closed")
        text = input_ids.tolist()
        sequence, committed = self._sequence, self._committed(text)
        if sequence is None or not committed:
            self._end_text()  # the caches keep the prefix that both texts share
            self._sequence = sequence = DrafterFactory(self.session).sequence(
                Prompt("", tuple(text)), _UNLIMITED, self.contexts, seed=0
            )
        else:
            self._observe(sequence, committed)
        started_s = time.perf_counter()
        try:
            self._draft = self._propose(sequence)
        except BaseException:  # Ctrl-C: the drafter's state is unknown
            self._end_text()
            raise
        self._handed_s = time.perf_counter()
        self._draft_s = self._handed_s - started_s
        return np.array(self._draft.tokens, dtype=np.intc)

    def _committed(self, text: list[int]) -> list[int]:
        """Return the tokens that a round has added to the present text; empty if `text` is another one."""
        known = [] if self._sequence is None else self._sequence.tokens
        committed = text[len(known) :]
        is_round = committed[:-1] == list(self._draft.tokens[: max(0, len(committed) - 1)])
        return committed if text[: len(known)] == known and is_round else []

    def _end_text(self) -> None:
        if self._sequence is not None:
            self.session.keep_text(self._sequence.tokens)
        self._sequence, self._draft = None, NO_DRAFT

    def _observe(self, sequence: Sequence, committed: list[int]) -> None:
        """Report the result of the last draft to policy and drafter."""
        for token in committed:
            sequence.state.commit(token)
        draft, target_s = self._draft, time.perf_counter() - self._handed_s
        path, times = tuple(range(len(committed) - 1)), (self._draft_s, target_s)
        result = RoundResult(
            self._plan, draft, path, *times, 1 + len(draft), tuple(committed), self._proposed
        )
        sequence.policy.observe(result)
        if sequence.drafters is not None:
            sequence.drafters.observe(result)
        self.tally.add_round(result, model_s=self._draft_s)

    def _propose(self, sequence: Sequence) -> Draft:
        drafters = sequence.drafters
        if drafters is None:
            return NO_DRAFT
        offer = sequence.offer(sequence.policy.n_max)
        self._plan = plan = sequence.policy.plan(offer)
        drafting = drafters.propose(sequence.tokens, plan)
        (proposal,) = propose_together([drafting], time.perf_counter)
        self._proposed = offer.found, proposal.draft
        if (error := proposal.error) is not None:
            sequence.drafters = None
            what = error.message if isinstance(error, SpecgenError) else repr(error)
            self._note(f"drafting failed, going on without a draft: {what}")
        return plan.stop.cut(proposal.draft)

    def check(self, llama: Llama) -> None:
        """Raise `UsageError` if `llama` would fail with this draft, or not use it: llama-cpp-python then stores
        the logits of every token, and has room for those of a batch only without ``logits_all=True``."""
        if llama.draft_model is not self:
            raise UsageError(
                "Llama has another draft", hint="give Llama draft_model=<this SpecgenDraft>"
            )
        n_ctx, n_own = llama.n_ctx(), self.session.target.vocabulary.n_tokens
        if llama.n_vocab() != n_own:
            raise UsageError(
                f"Llama's model has {llama.n_vocab()} tokens, but the draft's target has {n_own}",
                hint="open the SpecgenDraft with the same target file as Llama",
            )
        n_room = min(len(llama.input_ids), len(llama.scores))
        if n_room < n_ctx:
            raise UsageError(
                f"Llama has room for the logits of {n_room} tokens in a context of {n_ctx}: with a draft it "
                "fails in a longer text",
                hint=f"open Llama with logits_all=True and n_ctx={n_ctx}, or with a smaller n_ctx",
            )
