"""The draft/verify loop. It reads no options and prints nothing; it changes `AnswerState`s and
returns events.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from specgen.errors import BackendError, NoTokenAllowedError, SpecgenError
from specgen.events import Event, NoticeEvent
from specgen.method.backend import Backend, Batch
from specgen.method.draft import ROOT, Draft, keep_path, pack
from specgen.method.drafter import Clock, nonsense, propose_together
from specgen.method.policy import RoundPlan, RoundResult
from specgen.method.verifiers import Verdict
from specgen.system.arrays import Hidden, Logits
from specgen.text.sampling.distribution import Distribution

if TYPE_CHECKING:
    from specgen.method.answer_state import AnswerState

#: Decodes a round's batch for its answers, and adds to its events. Returns the logits, the hidden
#: states if a drafter needs them, and the seconds of other work in the same batch.
Decode: TypeAlias = Callable[
    [Batch, Sequence["AnswerState"], list[Event]], tuple[Logits, Hidden | None, float]
]
_MAX_PENDING = 16  # the most committed tokens in a round's batch; more are decoded before


class Loop:
    """Rounds with one target, repeated by whoever holds the answers (`method/answer_loop.py`). Once
    `interrupted` returns True between decodes, answers finish with what they have.
    """

    def __init__(
        self, target: Backend, clock: Clock, interrupted: Callable[[], bool] = lambda: False
    ) -> None:
        self.target, self.clock, self._interrupted = target, clock, interrupted
        self._started_s = clock()

    @property
    def now_s(self) -> float:
        return self.clock() - self._started_s

    def round(self, answers: Sequence[AnswerState], decode: Decode | None = None) -> list[Event]:
        """Run one round for all answers that are started and not finished: their drafts are packed
        into one batch of the target, and verified one by one. Return the events.

        With the target's distributions p and a draft's q, for each text x (Leviathan et al.,
        arXiv:2211.17192):

            plan      how many tokens to draft, from costs and from how often they were accepted
            propose   y_1 ~ q(. | x), y_2 ~ q(. | x y_1), ..., or a tree of such tokens
            decode    p(. | x), p(. | x y_1), ..., p(. | x y_1 ... y_n), in one batch of the target
            verify    keep an accepted y_1 ... y_k, and draw t as the verifier says (`verifiers.py`): for Algorithm 1,
                      `ResidualVerifier`, from norm(max(0, p - q)), or from p after the whole draft
            commit    x becomes x y_1 ... y_k t; the cache forgets the other rows
            learn     how much was accepted, and what it took

        `decode` decodes the batch, by default the target alone. If an answer's grammar allows no
        token, or its logits are not numbers, it ends with a `failure`, and the others go on. Raise
        `BackendError` if the decode fails.
        """
        active = [answer for answer in answers if not answer.is_finished]
        if not active:
            return []
        if self._interrupted():
            return [event for answer in active for event in answer.interrupt(self.now_s)]
        started, target, batch, events = self.clock(), self.target, Batch(), list[Event]()
        turns = [(each, self._plan(each, len(active))) for each in active]
        self._propose(turns)
        for answer, result in turns:
            self._pack(batch, answer, result, target.n_batch // len(turns))

        n_own, before_s, n_before_rows = len(batch.tokens), target.decode_s, target.n_decoded_rows
        logits, hidden, other_s = (decode or self.decode)(batch, active, events)
        target_s = target.decode_s - before_s - other_s
        # `decode` may have added other texts' rows. Restoring a recurrent state decodes some rows
        # again.
        n_rows = target.n_decoded_rows - n_before_rows - (len(batch.tokens) - n_own)

        first = 0
        for answer, result in turns:
            result.target_s, result.n_rows, result.n_sequences = target_s, n_rows, len(turns)
            end = first + 1 + len(result.draft)
            events += self._finish(answer, result, logits[first:end], hidden)
            first = end
        wall_s = self.clock() - started - other_s
        for answer in active:  # they share the batch's time equally
            answer.tally.wall_s += wall_s / len(active)
        return events

    def _plan(self, answer: AnswerState, n_sequences: int) -> RoundResult:
        """Plan the answer's draft, and note what its free drafter finds."""
        if answer.cascade is None:
            return RoundResult(RoundPlan(answer.why_undrafted))
        started = self.clock()
        try:
            # The root wants logits, too.
            offer = answer.offer(self.target.n_outputs // n_sequences - 1)
            plan = answer.policy.plan(offer)
        except Exception as error:  # noqa: BLE001 - a bug in a drafter costs no answer
            return RoundResult(RoundPlan("failed"), error=error)
        return RoundResult(plan, proposed=(offer.found,), draft_s=self.clock() - started)

    def _propose(self, turns: Sequence[tuple[AnswerState, RoundResult]]) -> None:
        """Let the drafters draft side by side, and cut what they propose to what is verified."""
        drafting = [turn for turn in turns if len(turn[1].plan.found) + turn[1].plan.n_max]
        draftings = [
            answer.cascade.propose(answer.tokens, result.plan)
            for answer, result in drafting
            if answer.cascade is not None
        ]
        proposals = propose_together(draftings, self.clock, self._interrupted)
        for (answer, result), proposal in zip(drafting, proposals, strict=True):
            started, plan, draft = self.clock(), result.plan, proposal.draft
            n_most = len(plan.found) + plan.n_max
            result.error = proposal.error or nonsense(draft, n_most, self.target.n_vocab)
            if result.error is not None:
                result.plan = replace(plan, reason="failed")
            else:
                # Sampled drafts obey the grammar already, and stay whole.
                allowed, state = draft, answer.state
                if state.has_grammar and not draft.is_sampled:
                    allowed = state.within_grammar(draft)
                result.draft, result.proposed = plan.stop.cut(allowed), (*result.proposed, draft)
                if not len(result.draft):
                    why = "unsure" if len(draft) or draft.looks else "not ready"
                    is_forbidden = len(draft) and not len(allowed)
                    result.plan = replace(plan, reason="grammar" if is_forbidden else why)
            seconds = proposal.seconds + self.clock() - started
            # Decoder heads, which read the last hidden state alone, ask for no decode: all of it
            # counts as one.
            asks = answer.hidden_states is None or answer.hidden_states.all_rows
            result.model_s = proposal.model_s if asks else seconds
            result.draft_s += seconds

    def _pack(self, batch: Batch, answer: AnswerState, result: RoundResult, n_room: int) -> None:
        """Add the committed tokens that the cache lacks to the batch, then the draft: at most
        `n_room` rows. Usually only the last token is missing; if a grammar forced more than fit,
        all but the last are decoded first.
        """
        target, tokens, first = self.target, answer.tokens, answer.slot.first
        n_held, last = target.length(first), len(tokens) - 1
        if last - n_held >= max(1, min(n_room - len(result.draft), _MAX_PENDING)):
            while n_held < last:
                silent, end = Batch(), min(last, n_held + target.n_batch)
                for position in range(n_held, end):
                    silent.add(tokens[position], position, (first,), False)
                self.decode_text(answer, silent)
                n_held = end
        n_before = len(batch.tokens)
        result.rows = pack(batch, target, answer.slot, tokens[n_held:], result.draft)
        if answer.hidden_states is not None and not answer.hidden_states.all_rows:
            n_wanted = sum(batch.wants_logits[:n_before])
            result.rows = range(n_wanted, n_wanted + 1)

    def decode_text(self, answer: AnswerState, batch: Batch) -> Logits:
        """Decode rows of a text, and keep their hidden states for drafters that read those of all
        rows.
        """
        hidden_states = answer.hidden_states
        if hidden_states is None or not hidden_states.all_rows:
            return self.target.decode(batch)
        logits, hidden = self.target.decode_hidden(batch, all_rows=True)
        hidden_states.keep_states(hidden, answer.tokens, batch.positions[-1] + 1)
        return logits

    def decode(
        self, batch: Batch, active: Sequence[AnswerState], events: list[Event]
    ) -> tuple[Logits, Hidden | None, float]:
        # The same draft serves all answers.
        hidden_states = next(
            (each.hidden_states for each in active if each.hidden_states is not None), None
        )
        if hidden_states is None or not (
            hidden_states.all_rows or len(batch.tokens) <= self.target.n_outputs
        ):
            return self.target.decode(batch), None, 0.0
        return *self.target.decode_hidden(batch, all_rows=hidden_states.all_rows), 0.0

    def _finish(
        self, answer: AnswerState, result: RoundResult, logits: Logits, hidden: Hidden | None
    ) -> list[Event]:
        """Verify, commit and learn. The cache and a draft's trail keep what belongs to the text."""
        draft, n_before = result.draft, len(answer.tokens)
        try:
            verdict = self.verify(answer, draft, logits)
        except BackendError as error:  # the grammar allows no token, or a logit is not a number
            answer.failure = error
            return []
        events = answer.commit_verdict(draft, verdict, logits, self.now_s, result)
        result.path, result.committed = verdict.path, tuple(answer.tokens[n_before:])
        kept = verdict.path[: len(result.committed)]  # the text may end on the path
        keep_path(self.target, answer.slot, draft, kept)
        if hidden is not None and answer.hidden_states is not None:
            rows = [*result.rows, *(result.rows[-1] + 1 + node for node in kept)]
            answer.hidden_states.keep_states(hidden[rows], answer.tokens, n_before + len(kept))
        answer.tally.add_round(result)
        answer.policy.observe(result)
        try:
            if result.error is not None:
                raise result.error
            if answer.cascade is not None:
                answer.cascade.observe(result)
        except Exception as error:  # noqa: BLE001 - a bug in a drafter costs no answer
            answer.cascade, answer.why_undrafted = None, "failed"
            what = error.message if isinstance(error, SpecgenError) else repr(error)
            message = f"drafting failed, going on without a draft: {what}"
            detail = "".join(traceback.format_exception(error))
            events.append(NoticeEvent(answer.index, self.now_s, message, detail))
        return events

    def verify(self, answer: AnswerState, draft: Draft, logits: Logits) -> Verdict:
        """Judge a draft by the logits at the root and each node, float32[1 + n, n_vocab]. Raise
        `BackendError`.
        """
        dead_ends: set[int] = set()

        def target(node: int) -> Distribution:
            if node == ROOT or not answer.vocabulary.is_end(draft.tokens[node]):
                try:
                    return answer.shaper.distribution(logits[node + 1], draft.text(node))
                except NoTokenAllowedError:
                    if node == ROOT:
                        raise
                    dead_ends.add(node)  # it fails if it is accepted
            # Nothing follows the end of a text: a token that is chosen here is never committed.
            return Distribution.certain(draft.tokens[node])

        verdict = answer.verifier.verify(draft, target, answer.rng)
        if verdict.path and verdict.path[-1] in dead_ends:
            raise NoTokenAllowedError
        return verdict
