"""The draft/verify loop: `Loop.round` is the algorithm.

The loop reads no options and prints nothing. It changes `AnswerState`s and returns events.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from specgen.errors import BackendError, SpecgenError
from specgen.events import Event, NoticeEvent, ReasonName
from specgen.method.backend import Backend, Batch
from specgen.method.draft import NO_DRAFT, ROOT, Draft, keep_path, pack
from specgen.method.drafter import (
    Clock,
    Drafting,
    Proposal,
    invalid_draft_error,
    never,
    propose_together,
)
from specgen.method.policy import RoundPlan, RoundResult
from specgen.method.verifiers import Verdict
from specgen.system.arrays import Hidden, Logits
from specgen.text.sampling.distribution import Distribution

if TYPE_CHECKING:
    from specgen.method.answer_state import AnswerState

#: The maximum number of one answer's pending tokens in a round's batch. If there are more, they are
#: decoded before.
_MAX_PENDING = 16


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """The result of decoding a round's batch."""

    #: The logits of the rows that want them, float32[n_wanted, n_vocab].
    logits: Logits
    #: The hidden states, float32[n, n_embd], if a drafter reads them.
    hidden: Hidden | None = None
    #: The seconds of the decode that belong to other work, such as the prefill of another answer.
    other_s: float = 0.0


#: Decodes a round's batch for its answers, and may add events to those of the round.
Decode: TypeAlias = Callable[[Batch, Sequence["AnswerState"], list[Event]], DecodedBatch]
#: An answer, and its part of a round.
_Turn: TypeAlias = tuple["AnswerState", RoundResult]


class Loop:
    """The rounds of one target; `method/answer_loop.py` repeats them until answers end."""

    def __init__(
        self,
        target: Backend,
        clock: Clock,
        interrupted: Callable[[], bool] = never,
    ) -> None:
        """Start the clock.

        Args:
            target: The target model with its cache.
            clock: Returns the seconds of a monotonic clock.
            interrupted: Called between decodes. Once it returns True, answers end with the text
                that they have.
        """
        self.target = target
        self.clock = clock
        self._interrupted = interrupted
        self._started_s = clock()

    @property
    def now_s(self) -> float:
        """The seconds since the loop was created, which is the time of events."""
        return self.clock() - self._started_s

    def round(
        self,
        answers: Sequence[AnswerState],
        decode: Decode | None = None,
    ) -> list[Event]:
        """Run one round: draft, decode and verify for all answers that are not finished.

        With the target's distributions p and a draft's q, for each text x (Leviathan et al.,
        arXiv:2211.17192):

            plan      how many tokens to draft, from costs and from how often they were accepted
            propose   y_1 ~ q(. | x), y_2 ~ q(. | x y_1), ..., or a tree of such tokens
            decode    p(. | x), p(. | x y_1), ..., p(. | x y_1 ... y_n), in one batch of the target
            verify    keep an accepted y_1 ... y_k, and sample t as the verifier says; for
                      Algorithm 1, `ResidualVerifier`, from norm(max(0, p - q)), or from p after the
                      whole draft
            commit    x becomes x y_1 ... y_k t; the cache forgets the other rows
            learn     how much was accepted, and how long it took

        The drafts of all answers are packed into one batch, and verified one by one. If an answer's
        grammar allows no token or fails, or its logits are not numbers, it ends with a `failure`,
        and the others go on.

        Args:
            answers: The answers. Their prompts have to be decoded.
            decode: Decodes the batch, perhaps together with other work; None: `Loop.decode`.

        Returns:
            The events of the round.

        Raises:
            BackendError: If the decode fails.
        """
        active = [answer for answer in answers if not answer.is_finished]
        if not active:
            return []
        if self._interrupted():
            return [event for answer in active for event in answer.interrupt(self.now_s)]
        started_s = self.clock()
        events: list[Event] = []

        turns = [(answer, self._plan(answer, len(active))) for answer in active]
        self._propose(turns)
        batch = self._pack(turns)
        decoded = self._decode_and_time(batch, turns, decode or self.decode, events)
        first_row = 0
        for answer, result in turns:
            end_row = first_row + 1 + len(result.draft)  # the root and the draft's nodes
            logits = decoded.logits[first_row:end_row]
            events += self._verify_and_commit(answer, result, logits, decoded.hidden)
            first_row = end_row

        wall_s = self.clock() - started_s - decoded.other_s
        for answer in active:  # the time is divided equally
            answer.stats.wall_s += wall_s / len(active)
        return events

    # --- plan -----------------------------------------------------------------------------------

    def _plan(self, answer: AnswerState, n_sequences: int) -> RoundResult:
        """Ask the answer's free drafter, and plan the draft.

        Returns:
            The result of the round so far.
        """
        if answer.cascade is None:
            return RoundResult(RoundPlan(answer.why_undrafted))
        if answer.drafting_error is not None:
            return RoundResult(RoundPlan("failed"), error=answer.drafting_error)
        started_s = self.clock()
        try:
            # An equal share of the rows with logits, without the row of the root.
            offer = answer.offer(self.target.n_outputs // n_sequences - 1)
            plan = answer.policy.plan(offer)
        except Exception as error:  # noqa: BLE001 - a bug in a drafter costs no answer
            return RoundResult(RoundPlan("failed"), error=error)
        return RoundResult(plan, proposed=(offer.found,), draft_s=self.clock() - started_s)

    # --- propose --------------------------------------------------------------------------------

    def _propose(self, turns: Sequence[_Turn]) -> None:
        """Let the drafters draft side by side, as planned."""
        drafting_turns: list[_Turn] = []
        draftings: list[Drafting] = []
        for answer, result in turns:
            # (Nothing is planned without drafters.)
            if answer.cascade is not None and result.plan.n_tokens_max:
                drafting_turns.append((answer, result))
                draftings.append(answer.cascade.propose(answer.tokens, result.plan))
        proposals = propose_together(draftings, self.clock, self._interrupted)
        for (answer, result), proposal in zip(drafting_turns, proposals, strict=True):
            started_s = self.clock()
            try:
                self._take_proposal(answer, result, proposal)
            except Exception as error:  # noqa: BLE001 - a bug in a drafter costs no answer
                result.draft = NO_DRAFT
                result.plan = replace(result.plan, reason="failed")
                result.error = error
            draft_s = proposal.draft_s + self.clock() - started_s
            result.draft_s += draft_s
            result.model_s = proposal.model_s
            if _reads_last_state(answer):
                # Such a drafter (decoder heads) computes without asking for decodes: all of its
                # drafting counts as time of the model.
                result.model_s = draft_s

    def _take_proposal(
        self,
        answer: AnswerState,
        result: RoundResult,
        proposal: Proposal,
    ) -> None:
        """Cut a proposal down to the draft that is verified, or record why there is none.

        Raises:
            Exception: If the drafter failed, or made a draft that cannot be verified.
        """
        plan = result.plan
        proposed = proposal.draft
        error = proposal.error or invalid_draft_error(
            proposed,
            plan.n_tokens_max,
            self.target.n_vocab,
            answer.branches.n_branches,
        )
        if error is not None:
            raise error
        proposed = proposed.without_numpy_numbers()
        allowed = proposed
        # A sampled draft was sampled within the grammar, and must not be cut.
        if answer.text_state.has_grammar and not proposed.is_sampled:
            allowed = answer.text_state.within_grammar(proposed)
        result.draft = plan.stop.cut(allowed)
        result.proposed = (*result.proposed, proposed)
        if not len(result.draft):
            result.plan = replace(plan, reason=_why_nothing_is_left(proposed, allowed))

    # --- decode ---------------------------------------------------------------------------------

    def _pack(self, turns: Sequence[_Turn]) -> Batch:
        """Return the batch of a round: for each answer its pending tokens, then its draft.

        Pending tokens are committed but not in the cache yet. Usually that is only the last token.
        If a grammar forced more tokens than fit into the batch, all but the last are decoded first.
        """
        target = self.target
        batch = Batch()
        n_rows_each = target.n_batch // len(turns)
        for answer, result in turns:
            n_tokens = len(answer.tokens)
            n_in_cache = target.length(answer.branches.first)
            n_pending = n_tokens - n_in_cache
            n_pending_max = min(n_rows_each - len(result.draft), _MAX_PENDING)
            if n_pending > max(1, n_pending_max):
                self._decode_without_logits(answer, n_in_cache, n_tokens - 1)
                n_in_cache = n_tokens - 1
            n_rows_before = len(batch.tokens)
            result.pending_rows = pack(
                batch,
                target,
                answer.branches,
                answer.tokens[n_in_cache:],
                result.draft,
            )
            if _reads_last_state(answer):
                # Only rows with logits have hidden states. The first one of this answer is that of
                # its last pending token.
                n_wanted = sum(batch.wants_logits[:n_rows_before])
                result.pending_rows = range(n_wanted, n_wanted + 1)
        return batch

    def _decode_without_logits(
        self,
        answer: AnswerState,
        start: int,
        end: int,
    ) -> None:
        """Decode an answer's tokens from `start` to `end`, exclusive, without logits."""
        decode_s_before = self.target.decode_s
        while start < end:
            batch_end = min(end, start + self.target.n_batch)
            batch = Batch()
            for position in range(start, batch_end):
                token = answer.tokens[position]
                batch.add(token, position, (answer.branches.first,), wants=False)
            self.decode_text(answer, batch)
            start = batch_end
        # The time of a round's batch does not include this one.
        answer.stats.target_s += self.target.decode_s - decode_s_before

    def _decode_and_time(
        self,
        batch: Batch,
        turns: Sequence[_Turn],
        decode: Decode,
        events: list[Event],
    ) -> DecodedBatch:
        """Decode a round's batch with `decode`, and record its seconds and rows in the results."""
        target = self.target
        n_round_rows = len(batch.tokens)
        decode_s_before = target.decode_s
        n_decoded_before = target.n_decoded_rows

        decoded = decode(batch, [answer for answer, _ in turns], events)

        target_s = target.decode_s - decode_s_before - decoded.other_s
        # `decode` may have added rows of other answers, which are not counted. The rows that were
        # decoded again to restore a recurrent state are counted.
        n_other_rows = len(batch.tokens) - n_round_rows
        n_rows = target.n_decoded_rows - n_decoded_before - n_other_rows
        for _, result in turns:
            result.target_s = target_s
            result.n_rows = n_rows
            result.n_sequences = len(turns)
        return decoded

    def decode(
        self,
        batch: Batch,
        active: Sequence[AnswerState],
        events: list[Event],
    ) -> DecodedBatch:
        """Decode a round's batch, with hidden states if the answers' drafters read them.

        This is the default `Decode`; it adds no events.
        """
        # All answers have the same kind of drafter, so the sink of any one of them will do.
        sinks = [answer.hidden_states for answer in active if answer.hidden_states is not None]
        if not sinks:
            return DecodedBatch(self.target.decode(batch))
        sink = sinks[0]
        if not sink.reads_all_rows and len(batch.tokens) > self.target.n_outputs:
            # `decode_hidden` does not take so many rows. The drafter misses a round.
            return DecodedBatch(self.target.decode(batch))
        return DecodedBatch(*self.target.decode_hidden(batch, all_rows=sink.reads_all_rows))

    def decode_text(self, answer: AnswerState, batch: Batch) -> Logits:
        """Decode rows of one answer outside of rounds.

        A drafter that reads the hidden states of all rows gets those of these rows.

        Returns:
            The logits of the rows that want them, float32[n_wanted, n_vocab].
        """
        sink = answer.hidden_states
        if sink is None or not sink.reads_all_rows:
            return self.target.decode(batch)
        logits, hidden = self.target.decode_hidden(batch, all_rows=True)
        answer.keep_states(hidden, batch.positions[-1] + 1)
        return logits

    # --- verify, commit, learn ------------------------------------------------------------------

    def _verify_and_commit(
        self,
        answer: AnswerState,
        result: RoundResult,
        logits: Logits,
        hidden: Hidden | None,
    ) -> list[Event]:
        """Verify an answer's draft, commit the accepted tokens, and learn from the round.

        Args:
            answer: The answer.
            result: The round so far: its plan, draft and times.
            logits: The logits at the root and at each node of the draft, float32[1 + n, n_vocab].
            hidden: The hidden states of the whole batch, if a drafter reads them.

        Returns:
            The events. If the answer failed, these are only those of the tokens before that.
        """
        draft = result.draft
        n_before = len(answer.tokens)
        try:
            verdict = self.verify(answer, draft, logits)
            events = answer.commit_verdict(draft, verdict, logits, self.now_s, result)
        except BackendError as error:  # the grammar goes no further, or a logit is not a number
            answer.failure = error
            return []
        if answer.failure is not None:  # after accepted tokens
            return events
        result.path = verdict.path
        result.committed = tuple(answer.tokens[n_before:])

        # The cache and the hidden states keep only what belongs to the text.
        kept_path = verdict.path[: len(result.committed)]  # the answer may have ended on the path
        keep_path(self.target, answer.branches, draft, kept_path)
        if hidden is not None and answer.hidden_states is not None:
            kept_states = hidden[_rows_of_text(result, kept_path)]
            answer.keep_states(kept_states, n_before + len(kept_path))

        answer.stats.add_round(result)
        events += self._learn(answer, result)
        return events

    def verify(
        self,
        answer: AnswerState,
        draft: Draft,
        logits: Logits,
    ) -> Verdict:
        """Return the verdict of the answer's verifier on a draft.

        Args:
            answer: The answer, whose samplers and grammar turn logits into distributions.
            draft: The draft; `NO_DRAFT` to get only the target's next token.
            logits: The logits at the root and at each node, float32[1 + n, n_vocab].

        Raises:
            BackendError: If the grammar allows no token after the text, or a logit there is not a
                number. If that is so after an accepted node, it becomes the verdict's `failure`.
        """
        #: Why no token can follow a node, by node. Most nodes are not in it.
        failures: dict[int, BackendError] = {}

        def target(node: int) -> Distribution:
            """Return the target's distribution after a node."""
            if node != ROOT and answer.vocabulary.is_end(draft.tokens[node]):
                # Nothing follows the end of a text. Any token will do, since it is never committed.
                return Distribution.certain(draft.tokens[node])
            try:
                return answer.sampling.distribution(logits[node + 1], draft.tokens_to(node))
            except BackendError as error:
                if node == ROOT:
                    raise
                failures[node] = error  # matters only if the node is accepted
                return Distribution.certain(draft.tokens[node])

        verdict = answer.verifier.verify(draft, target, answer.rng)
        if verdict.path and verdict.path[-1] in failures:
            return replace(verdict, failure=failures[verdict.path[-1]])
        return verdict

    def _learn(
        self,
        answer: AnswerState,
        result: RoundResult,
    ) -> list[Event]:
        """Let the policy and the drafters learn from a round.

        If a drafter failed in this round, or nothing can be learnt from what it returned, the
        answer goes on without drafting.

        Returns:
            A notice of the failure; empty without one.
        """
        try:
            answer.policy.observe(result)
            if result.error is not None:
                raise result.error
            if answer.cascade is not None:
                answer.cascade.observe(result)
        except Exception as error:  # noqa: BLE001 - a bug in a drafter costs no answer
            answer.cascade = None
            answer.why_undrafted = "failed"
            cause = error.message if isinstance(error, SpecgenError) else repr(error)
            message = f"drafting failed, going on without a draft: {cause}"
            detail = "".join(traceback.format_exception(error))
            return [NoticeEvent(answer.index, self.now_s, message, detail)]
        return []


def _rows_of_text(result: RoundResult, kept_path: Sequence[int]) -> list[int]:
    """Return the rows of the hidden states that belong to the text after a round.

    The rows of an answer are those of its pending tokens, then one for each node of the draft.
    """
    first_node_row = result.pending_rows[-1] + 1
    return [*result.pending_rows, *(first_node_row + node for node in kept_path)]


def _reads_last_state(answer: AnswerState) -> bool:
    """Return whether the answer's drafter reads hidden states, but only of rows with logits."""
    return answer.hidden_states is not None and not answer.hidden_states.reads_all_rows


def _why_nothing_is_left(proposed: Draft, allowed: Draft) -> ReasonName:
    """Return the reason why nothing of a proposal is verified.

    Args:
        proposed: What the drafter proposed.
        allowed: The part of it that the grammar allows.
    """
    if len(proposed) and not len(allowed):
        return "grammar"
    made_draft_steps = len(proposed) > 0 or len(proposed.step_confidences) > 0
    if made_draft_steps:  # but none was sure enough
        return "unsure"
    return "not ready"
