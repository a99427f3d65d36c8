"""Drafts for texts that another program generates. It decodes the target, and passes only the text so far."""

from __future__ import annotations

import contextlib
from collections import abc
from collections.abc import Callable

from specgen.errors import BackendError, SpecgenError, UsageError
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.drafter import propose_together
from specgen.method.policy import Reason, RoundPlan, RoundResult
from specgen.options import SessionOptions
from specgen.session.calibration.memory import Memory
from specgen.session.drafter_factory import DrafterFactory
from specgen.session.engine import Engine
from specgen.session.loaded_models import Models
from specgen.session.measurements import is_pair_measured
from specgen.session.prompts import Prompt
from specgen.text.sequence import Sequence
from specgen.text.tally import Tally

#: The size in tokens of the contexts in which models are timed.
_N_CTX_TIMED = 512
#: The context size for `Sequence`: the other program cuts off what does not fit its own context.
_UNLIMITED = 2**31


class DraftRounds:
    """Drafts chains for texts whose target another program decodes. Use it as a context manager.

    Only the target's vocabulary is loaded. The drafters' contexts, of `n_ctx` tokens each, stay open: of a
    text that shares a prefix with the one before, a draft model decodes only the rest. If costs decide how
    much is drafted and these models have never been timed on this machine, the target is loaded once to
    time it, and closed again. Later the policy learns from the time between two calls of `next`; this goes
    to `memory` and is not saved. `note` gets a sentence if drafting fails; the text then continues without
    drafts. Raises `UsageError` if the target has a recurrent state, `ModelFileError`, `PairError` or
    `MemoryLimitError`.
    """

    def __init__(
        self,
        options: SessionOptions,
        memory: Memory,
        *,
        n_ctx: int,
        clock: Callable[[], float],
        note: Callable[[str], None],
    ) -> None:
        self._clock = clock
        self._note = note
        #: The counts of all drafts so far.
        self.tally = Tally()
        #: The present text, the last draft for it, and its costs.
        self._sequence: Sequence | None = None
        self._draft = NO_DRAFT
        self._plan = RoundPlan(Reason("off"))
        self._proposed: tuple[Draft, ...] = ()
        self._draft_s = 0.0
        #: The time at which the last draft was returned.
        self._handed_s = 0.0
        self._is_closed = False
        self._resources = contextlib.ExitStack()
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            loaded = Models(options, clock, memory, vocabulary_only=True)
            self.models = self._resources.enter_context(loaded)
            _refuse_recurrent(loaded)
            timed = loaded.draft.timed if loaded.draft is not None else None
            if options.drafting.is_by_cost and not is_pair_measured(loaded, timed):
                _measure(options, memory, clock)
            self.contexts = self._resources.enter_context(loaded.draft_contexts(n_ctx))
            on_error.pop_all()

    def __enter__(self) -> DraftRounds:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the contexts and the weights. May be called twice."""
        self._is_closed = True
        self._end_text()
        self._resources.close()

    @property
    def n_vocab(self) -> int:
        """The number of tokens in the target's vocabulary."""
        return self.models.target.vocabulary.n_tokens

    @property
    def draft_name(self) -> str:
        """The drafter: a model's file name, ``ngram`` or ``none``."""
        return self.models.draft_name

    def next(self, text: abc.Sequence[int]) -> list[int]:
        """Return a draft, which may be empty, to follow a text of at least one token.

        If the text extends the one before as a round does (a prefix of the last draft, then one token of
        the target's own), the accepted tokens are counted and learnt from. Any other text is a new one.
        Raise `BackendError` after `close`.
        """
        if self._is_closed:
            raise BackendError("the draft is closed")
        sequence, committed = self._sequence, self._committed(text)
        if sequence is None or not committed:
            sequence = self._begin_text(text)
        else:
            self._observe(sequence, committed)
        started = self._clock()
        try:
            self._draft = self._propose(sequence)
        except BaseException:  # Ctrl-C: the drafter's state is unknown
            self._end_text()
            raise
        self._handed_s = self._clock()
        self._draft_s = self._handed_s - started
        return list(self._draft.tokens)

    def _committed(self, text: abc.Sequence[int]) -> list[int]:
        """Return the tokens that a round has added to the present text; empty if `text` is another one."""
        known = [] if self._sequence is None else self._sequence.tokens
        if list(text[: len(known)]) != known:
            return []
        committed = list(text[len(known) :])
        is_round = committed[:-1] == list(self._draft.tokens[: max(0, len(committed) - 1)])
        return committed if is_round else []

    def _begin_text(self, text: abc.Sequence[int]) -> Sequence:
        """Start a new text. The caches keep the prefix that they share with it."""
        self._end_text()
        self._sequence = sequence = DrafterFactory(self.models).sequence(
            Prompt("", tuple(text)), _UNLIMITED, self.contexts, seed=0
        )
        return sequence

    def _end_text(self) -> None:
        if self._sequence is not None:
            self._sequence.policy.finish()
            self.models.keep_text(self._sequence.tokens)
        self._sequence, self._draft = None, NO_DRAFT

    def _observe(self, sequence: Sequence, committed: abc.Sequence[int]) -> None:
        """Report the result of the last draft to policy and drafter."""
        for token in committed:
            sequence.state.commit(token)
        draft, target_s = self._draft, self._clock() - self._handed_s
        path, n_rows = tuple(range(len(committed) - 1)), 1 + len(draft)
        result = RoundResult(
            self._plan,
            draft,
            path,
            self._draft_s,
            target_s,
            n_rows,
            tuple(committed),
            self._proposed,
        )
        sequence.policy.observe(result)
        if sequence.drafters is not None:
            sequence.drafters.observe(result)
        self.tally.n_rounds += 1
        self.tally.n_round_tokens += len(committed)
        self.tally.draft_s += self._draft_s
        self.tally.target_s += target_s
        if len(draft):
            self.tally.add_draft(draft, path)

    def _propose(self, sequence: Sequence) -> Draft:
        drafters = sequence.drafters
        if drafters is None:
            return NO_DRAFT
        offer = sequence.offer(sequence.policy.n_max)
        self._plan = plan = sequence.policy.plan(offer)
        drafting = drafters.propose(sequence.tokens, plan)
        (proposal,) = propose_together([drafting], self._clock)
        self._proposed = offer.found, proposal.draft
        if proposal.error is not None:
            error = proposal.error
            sequence.drafters = None
            what = error.message if isinstance(error, SpecgenError) else repr(error)
            self._note(f"drafting failed, going on without a draft: {what}")
        return plan.stop.cut(proposal.draft)


def _refuse_recurrent(loaded: Models) -> None:
    target = loaded.target
    if target.has_recurrent_state:
        raise UsageError(
            f"{target.name} has a recurrent state, and Llama cannot roll back rejected drafts there",
            hint="use `specgen run`, or `specgen.load` from Python, which can",
        )


def _measure(options: SessionOptions, memory: Memory, clock: Callable[[], float]) -> None:
    """Time the models as every engine does when it opens, and keep the result in `memory`."""
    with Models(options, clock, memory) as loaded, Engine(loaded, n_ctx=_N_CTX_TIMED):
        memory.save()
