"""The draft/verify loop. It reads no files or options and prints nothing; it changes `AnswerState`s and returns
events."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specgen.errors import BackendError, SpecgenError
from specgen.events import Event, NoticeEvent
from specgen.method.backend import Backend, Batch
from specgen.method.draft import ROOT, Distribution, Draft, NoTokenAllowedError
from specgen.method.drafter import Proposal, propose_together, refuse_nonsense
from specgen.method.policy import RoundPlan, RoundResult
from specgen.method.tree_in_cache import keep_path, pack
from specgen.method.verify import Verdict
from specgen.system.arrays import Hidden, Logits

if TYPE_CHECKING:
    from specgen.text.answer_state import AnswerState

#: The most committed tokens that are decoded in a round's batch; if there are more, they are decoded before.
_MAX_PENDING = 16


class Loop:
    """Generates with one target. Once `interrupted`, called between decodes, returns True, sequences finish with the
    text that they have."""

    def __init__(
        self,
        target: Backend,
        clock: Callable[[], float],
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.target = target
        self.clock = clock
        self._interrupted = interrupted
        self._started_s = clock()

    @property
    def now_s(self) -> float:
        """Seconds since the loop was made: the `time_s` of events."""
        return self.clock() - self._started_s

    def round(self, sequences: Sequence[AnswerState]) -> list[Event]:
        """Run one round for all sequences that are started and not finished: their drafts are packed into one batch
        of the target, and verified one by one. Return the events.

        With p the target's distributions and q those of a draft, for each text x (Leviathan et al.,
        arXiv:2211.17192, Algorithm 1):

            plan      how many tokens to draft, from costs and from how often they were accepted
            propose   y_1 ~ q(. | x), y_2 ~ q(. | x y_1), ..., or a tree of such tokens
            decode    p(. | x), p(. | x y_1), ..., p(. | x y_1 ... y_n), in one batch of the target
            verify    keep the longest accepted y_1 ... y_k, and draw t from norm(max(0, p - q)), or from p
                      after the whole draft
            commit    x becomes x y_1 ... y_k t; the cache forgets the other rows
            learn     how much was accepted, and what it took

        If a sequence's grammar allows no token, or its logits are not numbers, it ends with a `failure`, and the
        others go on. Raise `BackendError` if the target cannot decode the round's batch. The statistics do not count
        time outside this call.
        """
        active = [sequence for sequence in sequences if not sequence.is_finished]
        if not active:
            return []
        if self._interrupted():
            return [event for sequence in active for event in sequence.interrupt(self.now_s)]
        started, target, batch, events = self.clock(), self.target, Batch(), list[Event]()
        turns = [(each, self._plan(each, len(active), events)) for each in active]
        self._propose(turns, events)
        for sequence, result in turns:
            self._pack(batch, sequence, result, target.n_batch // len(turns))

        n_own, before_s, n_before_rows = len(batch.tokens), target.decode_s, target.n_decoded_rows
        logits, hidden, other_s = self.decode(batch, active, events)
        target_s = target.decode_s - before_s - other_s
        # More rows than the batch has, if tokens were decoded again to restore a recurrent state.
        n_rows = target.n_decoded_rows - n_before_rows - (len(batch.tokens) - n_own)

        first = 0
        for sequence, result in turns:
            result.target_s, result.n_rows, result.n_sequences = target_s, n_rows, len(turns)
            end = first + 1 + len(result.draft)
            self._finish(sequence, result, logits[first:end], hidden, first, events)
            first = end
        wall_s = self.clock() - started - other_s
        for sequence in active:  # they share the batch's time equally
            sequence.tally.wall_s += wall_s / len(active)
        return events

    # --- the steps of a round ---------------------------------------------------------------

    def _plan(self, sequence: AnswerState, n_sequences: int, events: list[Event]) -> RoundResult:
        """Plan the sequence's draft, and note what its free drafter finds."""
        if sequence.cascade is None:
            return RoundResult(RoundPlan(sequence.why_undrafted))
        started = self.clock()
        try:
            # The root wants logits, too.
            offer = sequence.offer(self.target.n_outputs // n_sequences - 1)
            plan = sequence.policy.plan(offer)
        except Exception as error:  # noqa: BLE001 - a bug in a drafter costs no answer
            self._end_drafting(sequence, error, events)
            return RoundResult(RoundPlan("failed"))
        return RoundResult(plan, proposed=(offer.found,), draft_s=self.clock() - started)

    def _propose(
        self, turns: Sequence[tuple[AnswerState, RoundResult]], events: list[Event]
    ) -> None:
        """Let the drafters draft side by side, and cut what they propose to what is verified."""
        drafting = [turn for turn in turns if len(turn[1].plan.found) + turn[1].plan.n_max]
        draftings = [
            sequence.cascade.propose(sequence.tokens, result.plan)
            for sequence, result in drafting
            if sequence.cascade is not None
        ]
        proposals = propose_together(draftings, self.clock, self._interrupted)
        for (sequence, result), proposal in zip(drafting, proposals, strict=True):
            self._take(sequence, result, proposal, events)

    def _take(
        self, sequence: AnswerState, result: RoundResult, proposal: Proposal, events: list[Event]
    ) -> None:
        started, plan = self.clock(), result.plan
        if proposal.error is None:
            refuse_nonsense(proposal, len(plan.found) + plan.n_max, self.target.n_vocab)
        if proposal.error is None:
            allowed = draft = proposal.draft
            if not draft.is_drawn:  # sampled drafts obey the grammar already, and stay whole
                allowed = sequence.state.within_grammar(draft)
            result.proposed += (draft,)
            result.draft = plan.stop.cut(allowed)
            if not len(result.draft):
                why = "unsure" if len(draft) or draft.looks else "not ready"
                is_forbidden = len(draft) and not len(allowed)
                result.plan = replace(plan, reason="grammar" if is_forbidden else why)
        else:
            result.plan = replace(plan, reason="failed")
            self._end_drafting(sequence, proposal.error, events)
        seconds = proposal.seconds + self.clock() - started
        # Decoder heads, which read the last hidden state alone, ask for no decode: all their drafting counts as one.
        asks = sequence.trail is None or sequence.trail.all_rows
        result.model_s = proposal.model_s if asks else seconds
        result.draft_s += seconds

    def _pack(self, batch: Batch, sequence: AnswerState, result: RoundResult, n_room: int) -> None:
        """Add the committed tokens that the cache lacks to the batch, then the draft: at most `n_room` rows. Usually
        only the last token is missing; a grammar may have forced more. If these do not fit, all but the last are
        decoded first."""
        target, tokens, first = self.target, sequence.tokens, sequence.slot.first
        n_held, last = target.length(first), len(tokens) - 1
        if last - n_held >= max(1, min(n_room - len(result.draft), _MAX_PENDING)):
            while n_held < last:
                silent, end = Batch(), min(last, n_held + target.n_batch)
                for position in range(n_held, end):
                    silent.add(tokens[position], position, (first,), False)
                self.decode_text(sequence, silent)
                n_held = end
        result.rows = pack(batch, target, sequence.slot, tokens[n_held:], result.draft)

    def decode_text(self, sequence: AnswerState, batch: Batch) -> Logits:
        """Decode rows of a text, and keep their hidden states for drafters that read those of all rows."""
        trail = sequence.trail
        if trail is None or not trail.all_rows:
            return self.target.decode(batch)
        logits, hidden = self.target.decode_hidden(batch, all_rows=True)
        trail.keep_states(hidden, sequence.tokens, batch.positions[-1] + 1)
        return logits

    def decode(
        self, batch: Batch, active: Sequence[AnswerState], events: list[Event]
    ) -> tuple[Logits, Hidden | None, float]:
        """Return the logits of a round's batch, its hidden states if a drafter needs them, and the seconds of another
        answer's rows. Here these are 0; `AnswerLoop` overrides this to append a piece of another answer's prompt."""
        # The same draft serves all sequences.
        trail = next((each.trail for each in active if each.trail is not None), None)
        if trail is None or not (trail.all_rows or len(batch.tokens) <= self.target.n_outputs):
            return self.target.decode(batch), None, 0.0
        return *self.target.decode_hidden(batch, all_rows=trail.all_rows), 0.0

    def _finish(
        self,
        sequence: AnswerState,
        result: RoundResult,
        logits: Logits,
        hidden: Hidden | None,
        first: int,
        events: list[Event],
    ) -> None:
        """Verify, commit and learn. `first` is the root's row among those that want logits."""
        draft, n_before = result.draft, len(sequence.tokens)
        try:
            verdict = self.verify(sequence, draft, logits)
        except BackendError as error:  # the grammar allows no token, or a logit is not a number
            sequence.failure = error
            return
        events += sequence.commit_verdict(draft, verdict, logits, self.now_s, result.plan)
        result.path, result.committed = verdict.path, tuple(sequence.tokens[n_before:])
        kept = verdict.path[: len(result.committed)]  # the text may end on the path
        keep_path(self.target, sequence.slot, draft, kept)
        if hidden is not None and (trail := sequence.trail) is not None:
            pending = result.rows if trail.all_rows else range(first, first + 1)
            rows = [*pending, *(pending[-1] + 1 + node for node in kept)]
            trail.keep_states(hidden[rows], sequence.tokens, n_before + len(kept))
        sequence.tally.add_round(result)
        sequence.policy.observe(result)
        if sequence.cascade is not None:
            try:
                sequence.cascade.observe(result)
            except Exception as error:  # noqa: BLE001 - a bug in a drafter costs no answer
                self._end_drafting(sequence, error, events)

    def verify(self, sequence: AnswerState, draft: Draft, logits: Logits) -> Verdict:
        """Return which nodes are accepted, and the target's own token, from the logits at the root and at each node,
        float32[1 + len(draft), n_vocab]. Raise `BackendError` if there is no such token."""
        dead_ends: set[int] = set()

        def target(node: int) -> Distribution:
            if node != ROOT and sequence.vocabulary.is_end(draft.tokens[node]):
                # Nothing follows the end of a text: a token that is chosen here is never committed.
                return Distribution.certain(draft.tokens[node])
            try:
                return sequence.shaper.distribution(logits[node + 1], draft.text(node))
            except NoTokenAllowedError:
                if node == ROOT:
                    raise
                # A verifier may ask for nodes that it then rejects: only an accepted dead end fails.
                dead_ends.add(node)
                return Distribution.certain(draft.tokens[node])

        verdict = sequence.verifier.verify(draft, target, sequence.rng)
        if verdict.path and verdict.path[-1] in dead_ends:
            raise NoTokenAllowedError
        return verdict

    def _end_drafting(self, sequence: AnswerState, error: Exception, events: list[Event]) -> None:
        sequence.cascade, sequence.why_undrafted = None, "failed"
        what = error.message if isinstance(error, SpecgenError) else repr(error)
        message = f"drafting failed, going on without a draft: {what}"
        detail = "".join(traceback.format_exception(error))
        events.append(NoticeEvent(sequence.index, self.now_s, message, detail))
