"""The draft/verify loop: propose, decode, verify, commit, observe.

One round serves any number of sequences: their drafts are packed into one batch of the target and
verified one by one. The loop reads no files or options and prints nothing; it changes `Sequence`s
and returns events.
"""

from __future__ import annotations

import traceback
from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from specgen.drafters.cascade import Cascade
from specgen.errors import BackendError, SpecgenError
from specgen.events import (
    DraftedEvent,
    Event,
    FinishedEvent,
    NoticeEvent,
    Piece,
    ReadingEvent,
    ReasonName,
    TokenKind,
    VerifiedEvent,
)
from specgen.method.backend import Backend, Batch, HiddenBackend
from specgen.method.cost_table import CostTable, Others
from specgen.method.distribution import Distribution, NoTokenAllowedError
from specgen.method.draft import NO_DRAFT, ROOT, Draft, keep_path, pack
from specgen.method.drafter import propose_together, refuse_nonsense
from specgen.method.policy import Reason, RoundPlan, RoundResult
from specgen.method.round_events import (
    committed,
    draft_nodes,
    next_kind,
    rejected_branches,
    with_logprobs,
)
from specgen.method.verify import Verdict
from specgen.system.arrays import Hidden, Logits
from specgen.text.sequence import Sequence
from specgen.text.text_state import TextState

#: Single-token decodes timed by `plain_token_s`.
_N_PROBES = 3
#: Tokens of the shortest answer that is compared with plain decoding.
_SHORTEST_COMPARED = 30
#: The most committed tokens that are decoded in a round's batch; if there are more, they are decoded before.
_MAX_PENDING = 16


@dataclass(frozen=True, slots=True)
class ReadBeside:
    """A prompt of which a piece is read in the batch of a round of other sequences."""

    sequence: Sequence
    #: The most tokens to read beside so many rows of the round.
    n_rows: Callable[[int], int]
    #: The share of the batch's time that the round's own rows take, from their number and that of all.
    share: Callable[[int, int], float]


class Loop:
    """Generates with one target.

    `clock` returns the seconds of a monotonic clock. `interrupted` is called between decodes; once it
    returns True, sequences finish with the text that they have.
    """

    def __init__(
        self,
        target: Backend,
        clock: Callable[[], float],
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._target = target
        self._hidden_target = target if isinstance(target, HiddenBackend) else None
        self._clock = clock
        self._interrupted = interrupted
        self._started_s = clock()

    @property
    def now_s(self) -> float:
        """Seconds since the loop was made: the `time_s` of events."""
        return self._clock() - self._started_s

    def run(self, sequence: Sequence) -> Iterator[Event]:
        """Generate a whole answer, and yield its events. Raise the error that ends it early."""
        yield from self.start(sequence)
        while not sequence.is_finished:
            yield from self.round([sequence])
        if sequence.failure is not None:
            raise sequence.failure

    def start(self, sequence: Sequence) -> list[Event]:
        """Decode a prompt, commit the first token, and return the events. There is no draft in this step,
        so the first token comes as early as in plain decoding, and the prompt is decoded in the same
        batches."""
        events: list[Event] = []
        while not (sequence.is_started or sequence.is_finished):
            events += self.read(sequence)
        return events

    def read(self, sequence: Sequence, n_most: int | None = None) -> list[Event]:
        """Decode one piece of a prompt, at most `n_most` tokens (by default as many as the target takes at
        once). After the last piece, commit the first token. Return the events."""
        if sequence.is_finished:
            return []
        started = self._clock()
        target_s = self._target.decode_s
        events = self._begin_reading(sequence, started)
        if self._interrupted() and not sequence.is_finished:
            events += self._interrupt(sequence)
        logits = None
        if not sequence.is_finished:
            batch = Batch()
            n_batch = self._target.n_batch
            is_last = self._add_piece(batch, sequence, min(n_most or n_batch, n_batch))
            rows = self._decode_text(sequence, batch)
            logits = rows if is_last else None
        events += self._has_read(sequence, logits, self._target.decode_s - target_s, started)
        return events

    def _begin_reading(self, sequence: Sequence, started: float) -> list[Event]:
        """Prepare for the first piece of a prompt, if nothing was read yet. Return the events."""
        if sequence.read_since_s is not None:
            return []
        sequence.read_since_s = started
        sequence.n_cached = self._target.length(sequence.slot.first)
        # Tokens that the grammar forces need no decode: they are decoded with the prompt.
        forced = _commit_forced(sequence)
        if not forced:
            return []
        sequence.tally.first_token_s = self._clock() - started
        return [committed(sequence, self.now_s, forced)]

    def _has_read(
        self, sequence: Sequence, logits: Logits | None, target_s: float, started: float
    ) -> list[Event]:
        """Record a piece of a prompt, which took `target_s` of the target since `started`. After the
        last piece, whose `logits` are float32[1, n_vocab], commit the first token. Return the events."""
        tally = sequence.tally
        events: list[Event] = []
        if logits is not None:
            verdict = self._verify(sequence, NO_DRAFT, logits)
            events += self._commit(sequence, NO_DRAFT, verdict, logits)
            sequence.is_started = True
        tally.prompt_s += target_s
        tally.target_s += target_s
        now = self._clock()
        tally.wall_s += now - started
        if not (sequence.is_started or sequence.is_finished):
            events.append(self._reading(sequence))
        tally.start_s = tally.wall_s
        tally.n_start_tokens = len(sequence.tokens) - sequence.n_prompt
        if sequence.is_started and tally.first_token_s is None:
            assert sequence.read_since_s is not None
            tally.first_token_s = now - sequence.read_since_s
        return events

    def _reading(self, sequence: Sequence) -> ReadingEvent:
        """Return how far a prompt has been read."""
        n_read, n_all = self._target.length(sequence.slot.first), len(sequence.tokens)
        token_s = sequence.tally.wall_s / max(1, n_read - sequence.n_cached)
        n_read = min(n_read, sequence.n_prompt)
        return ReadingEvent(
            sequence.index, self.now_s, n_read, sequence.n_prompt, (n_all - n_read) * token_s
        )

    def round(
        self, sequences: abc.Sequence[Sequence], beside: ReadBeside | None = None
    ) -> list[Event]:
        """Run one round for all sequences that are started and not finished, and return the events. A
        piece of the prompt of another sequence may be decoded in the same batch (`beside`): such rows cost
        little. This may be done only where a row has the same logits in any batch.

        If a sequence's grammar allows no token, or its logits are not numbers, it ends with a `failure`,
        and the others go on. Raise `BackendError` if the target cannot decode the round's batch. The
        statistics do not count time outside this call, in a renderer for example.
        """
        active = [sequence for sequence in sequences if not sequence.is_finished]
        if not active:
            return []
        if self._interrupted():
            return [event for sequence in active for event in self._interrupt(sequence)]
        round_started = self._clock()
        events: list[Event] = []
        drafting = self._propose(active, events)

        target_s, n_rows = self._target.decode_s, self._target.n_decoded_rows
        batch = Batch()
        n_pending: list[int] = []
        for sequence, drafted in zip(active, drafting, strict=True):
            n_room = self._target.n_batch // len(active) - len(drafted.draft)
            pending = self._pending(sequence, n_room)
            n_pending.append(len(pending))
            pack(batch, self._target, sequence.slot, pending, drafted.draft)
        n_own_rows, is_last = len(batch), False
        if beside is not None:
            events += self._begin_reading(beside.sequence, round_started)
        if beside is not None and not beside.sequence.is_finished:
            n_most = min(beside.n_rows(n_own_rows), self._target.n_batch - n_own_rows)
            is_last = n_most > 0 and self._add_piece(batch, beside.sequence, n_most)
        logits, hidden = self._decode_round(batch, active, beside, n_own_rows)
        target_s = self._target.decode_s - target_s
        # More rows than the batch has, if tokens were decoded again to restore a recurrent state.
        n_rows = self._target.n_decoded_rows - n_rows
        if beside is not None and len(batch) > n_own_rows:
            read_s = target_s * (1.0 - beside.share(n_own_rows, len(batch)))
            target_s, n_rows = target_s - read_s, n_own_rows
            round_started += read_s
            last = logits[-1:] if is_last else None
            try:
                events += self._has_read(beside.sequence, last, read_s, self._clock() - read_s)
            except BackendError as error:  # as below
                beside.sequence.failure = error

        first_row = n_silent = 0
        for sequence, drafted, n_own in zip(active, drafting, n_pending, strict=True):
            draft = drafted.draft
            rows = logits[first_row : first_row + 1 + len(draft)]
            first_row += len(rows)
            n_silent += n_own - 1
            tally = sequence.tally
            n_tokens = len(sequence.tokens)
            n_before = n_tokens - tally.n_forced
            try:
                verdict = self._verify(sequence, draft, rows)
            except BackendError as error:  # the grammar allows no token, or a logit is not a number
                sequence.failure = error
                continue
            tally.n_rounds += 1
            events += self._commit(sequence, draft, verdict, rows, drafted.plan.reason)
            kept = verdict.path[: len(sequence.tokens) - n_tokens]
            n_read = n_tokens + len(kept)
            _keep_states(sequence, hidden, first_row - len(rows), n_silent, n_own, kept, n_read)
            result = RoundResult(
                drafted.plan,
                draft,
                verdict.path,
                drafted.seconds,
                target_s,
                n_rows,
                committed=tuple(sequence.tokens[n_tokens:]),
                proposed=drafted.proposed,
            )
            sequence.policy.observe(result)
            self._notify_drafters(sequence, result, events)
            n_committed = len(sequence.tokens) - tally.n_forced - n_before
            tally.add_decode(n_committed, n_rows, target_s, len(active))
            # The sequences in a batch share its time equally.
            tally.target_s += target_s / len(active)
            tally.draft_s += drafted.model_s
        wall_s = self._clock() - round_started
        for sequence in active:
            sequence.tally.wall_s += wall_s / len(active)
        return events

    def finish(
        self, sequence: Sequence, *, estimate_gain: bool, costs: CostTable | None = None
    ) -> list[FinishedEvent]:
        """Return the summary of a finished sequence. A sequence that had drafts is compared with plain
        decoding: with `estimate_gain` by its own decodes, which may take a few more, otherwise by the
        `costs` of the target's batches. A short answer is not: the decodes would take a part of its time,
        and their noise would decide."""
        sequence.policy.finish()
        # Decodes next to one another, and costs that were measured before, count as one time.
        token_s, how, n_times = None, "", 1
        is_compared = sequence.tally.n_drafted and sequence.n_answer >= _SHORTEST_COMPARED
        if is_compared and not estimate_gain and costs is not None:
            token_s = sequence.tally.priced_token_s(costs)
            how = "from the measured costs of the target's batches"
        elif is_compared and estimate_gain:
            token_s = sequence.tally.plain_token_s()
            n_plain = len(sequence.tally.target_s_by_rows[1])
            how = f"from the {n_plain} rounds of this answer that had no draft"
            n_times = max(1, n_plain)
            if token_s is None and sequence.finish_reason != "interrupted":
                token_s = self.plain_token_s(sequence)
                how = f"from {_N_PROBES} single-token decodes at the end of the answer"
                n_times = 1
        return [sequence.finished_event(self.now_s, token_s, how, n_times)]

    def plain_token_s(self, sequence: Sequence) -> float | None:
        """Return the target's time for one token: the median seconds of a few decodes of the text's last
        token, after which the cache is as before. None if there is no room."""
        first = sequence.slot.first
        length = self._target.length(first)
        if length == 0 or length >= sequence.n_ctx:
            return None
        samples = []
        for _ in range(_N_PROBES):
            self._target.checkpoint(first)
            batch = Batch()
            batch.add(sequence.tokens[-1], length, (first,), True)
            before = self._target.decode_s
            self._target.decode(batch)
            samples.append(self._target.decode_s - before)
            self._target.remove(first, length)
        return float(np.median(samples))

    def _interrupt(self, sequence: Sequence) -> list[Event]:
        """End the answer here, and return the event of the text that was held back, if any."""
        sequence.finish("interrupted")
        text = sequence.text.flush()
        if not text:
            return []
        piece = Piece(sequence.tokens[-1], text, "plain", "target")
        return [committed(sequence, self.now_s, [piece])]

    def _add_piece(self, batch: Batch, sequence: Sequence, n_most: int) -> bool:
        """Add to a batch the next tokens of the text that the cache does not hold yet: of the prompt, and
        tokens that the grammar forces after it. Return whether these are the last ones; their last row
        then wants logits."""
        text, first = sequence.tokens, sequence.slot.first
        start = self._target.length(first)
        for offset, token in enumerate(text[start : start + n_most]):
            batch.add(token, start + offset, (first,), False)
        is_last = start + n_most >= len(text)
        batch.wants_logits[-1] = is_last
        return is_last

    def _decode_text(self, sequence: Sequence, batch: Batch) -> Logits:
        """Decode rows of a sequence's text, and keep their hidden states for MTP layers."""
        states, target = sequence.hidden, self._hidden_target
        if states is None or not states.all_rows or target is None:
            return self._target.decode(batch)
        logits, hidden = target.decode_hidden(batch, all_rows=True)
        states.take_rows(hidden, sequence.tokens, batch.positions[-1] + 1)
        return logits

    def _decode_round(
        self,
        batch: Batch,
        active: abc.Sequence[Sequence],
        beside: ReadBeside | None,
        n_own_rows: int,
    ) -> tuple[Logits, Hidden | None]:
        """Decode a round's batch. Return the logits, float32[n_rows, n_vocab], and the hidden states,
        float32[n_rows, n_embd], if a drafter needs these. Behind the first `n_own_rows` rows are those of a
        prompt."""
        reader = beside.sequence if beside is not None and len(batch) > n_own_rows else None
        sequences = active if reader is None else [*active, reader]
        wanted = [sequence.hidden for sequence in sequences if sequence.hidden is not None]
        target = self._hidden_target
        if wanted and target is not None:
            all_rows = wanted[0].all_rows  # the same for all, as the same draft serves all
            if all_rows or len(batch) <= target.n_outputs:
                logits, hidden = target.decode_hidden(batch, all_rows=all_rows)
                if all_rows and reader is not None and reader.hidden is not None:
                    n_read = batch.positions[-1] + 1
                    reader.hidden.take_rows(hidden[n_own_rows:], reader.tokens, n_read)
                return logits, hidden
        return self._target.decode(batch), None

    def _pending(self, sequence: Sequence, n_room: int) -> list[int]:
        """Return the committed tokens that the cache does not hold yet: the last one and, if a grammar
        forced tokens, those before it. If they do not fit into the round's batch, all but the last are
        decoded here."""
        first, tokens = sequence.slot.first, sequence.tokens
        position = self._target.length(first)
        if len(tokens) - position > max(1, min(n_room, _MAX_PENDING)):
            n_batch = self._target.n_batch
            for start in range(position, len(tokens) - 1, n_batch):
                batch = Batch()
                for index in range(start, min(start + n_batch, len(tokens) - 1)):
                    batch.add(tokens[index], index, (first,), False)
                self._decode_text(sequence, batch)
            position = len(tokens) - 1
        return tokens[position:]

    def _propose(self, active: abc.Sequence[Sequence], events: list[Event]) -> list[_Drafted]:
        """Plan a draft for each sequence and make the drafts together. If a drafter fails, drafting ends
        for its sequence, but the answer goes on."""
        drafting = [self._plan(sequence, active, events) for sequence in active]
        planned = [
            (sequence, drafted, drafted.drafters.propose(sequence.tokens, drafted.plan))
            for sequence, drafted in zip(active, drafting, strict=True)
            if drafted.drafters is not None
        ]
        proposals = propose_together(
            [proposed for _, _, proposed in planned], self._clock, self._interrupted
        )
        for (sequence, drafted, _), proposal in zip(planned, proposals, strict=True):
            started = self._clock()
            plan = drafted.plan
            n_most = len(plan.found) + plan.n_max
            if proposal.error is None:
                refuse_nonsense(proposal, n_most, self._target.n_vocab)
            if proposal.error is not None:
                self._fail(sequence, drafted, proposal.error, events)
            else:
                drafted.take(proposal.draft, sequence.state)
            sequence.n_rows = 1 + len(drafted.draft)
            # Heads ask for no decode: all their drafting is the draft model's time.
            seconds = proposal.seconds + self._clock() - started
            asks = sequence.hidden is None or sequence.hidden.all_rows
            drafted.model_s = proposal.model_s if asks else seconds
            drafted.seconds += seconds
        for sequence, drafted in zip(active, drafting, strict=True):
            if not len(drafted.draft):
                reason = drafted.plan.reason
                sequence.tally.add_undrafted(reason.name, str(reason))
        return drafting

    def _plan(
        self, sequence: Sequence, active: abc.Sequence[Sequence], events: list[Event]
    ) -> _Drafted:
        """Return what the sequence's free drafter finds, and its plan of the round."""
        drafters = sequence.drafters
        if drafters is None:
            return _Drafted(RoundPlan(Reason(sequence.why_undrafted)))
        started = self._clock()
        # How much the others will draft is not known yet: about as much as in the last round.
        n_other_rows = sum(each.n_rows for each in active) - sequence.n_rows
        others = Others(len(active) - 1, n_other_rows)
        try:
            offer = sequence.offer(self._target.n_outputs // len(active) - 1, others)
            plan = sequence.policy.plan(offer)
        except Exception as error:  # noqa: BLE001 - a bug in a drafter costs no answer
            drafted = _Drafted(RoundPlan(Reason("failed")))
            self._fail(sequence, drafted, error, events)
            return drafted
        is_planned = len(plan.found) + plan.n_max > 0
        return _Drafted(
            plan,
            drafters=drafters if is_planned else None,
            proposed=(offer.found,),
            seconds=self._clock() - started,
        )

    def _notify_drafters(
        self, sequence: Sequence, result: RoundResult, events: list[Event]
    ) -> None:
        if sequence.drafters is None:
            return
        try:
            sequence.drafters.observe(result)
        except Exception as error:  # noqa: BLE001 - a bug in a drafter costs no answer
            self._end_drafting(sequence, error, events)

    def _fail(
        self, sequence: Sequence, drafted: _Drafted, error: Exception, events: list[Event]
    ) -> None:
        drafted.plan, drafted.draft = replace(drafted.plan, reason=Reason("failed")), NO_DRAFT
        self._end_drafting(sequence, error, events)

    def _end_drafting(self, sequence: Sequence, error: Exception, events: list[Event]) -> None:
        sequence.drafters, sequence.why_undrafted = None, "failed"
        events.append(self._drafting_failed(sequence, error))

    def _drafting_failed(self, sequence: Sequence, error: Exception) -> NoticeEvent:
        what = error.message if isinstance(error, SpecgenError) else repr(error)
        return NoticeEvent(
            sequence=sequence.index,
            time_s=self.now_s,
            message=f"drafting failed, going on without a draft: {what}",
            detail="".join(traceback.format_exception(error)),
        )

    def _verify(self, sequence: Sequence, draft: Draft, logits: Logits) -> Verdict:
        dead_ends: dict[int, NoTokenAllowedError] = {}

        def target(node: int) -> Distribution:
            if node != ROOT and sequence.vocabulary.is_end(draft.tokens[node]):
                # Nothing follows the end of a text: a token that is chosen here is never committed.
                return Distribution.certain(draft.tokens[node])
            try:
                return sequence.shaper.distribution(logits[node + 1], draft.text(node))
            except NoTokenAllowedError as error:
                if node == ROOT:
                    raise
                # A verifier may ask for nodes that it then rejects: only an accepted dead end fails.
                dead_ends[node] = error
                return Distribution.certain(draft.tokens[node])

        verdict = sequence.verifier.verify(draft, target, sequence.rng)
        if verdict.path and verdict.path[-1] in dead_ends:
            raise dead_ends[verdict.path[-1]]
        return verdict

    def _commit(
        self,
        sequence: Sequence,
        draft: Draft,
        verdict: Verdict,
        logits: Logits,
        reason: Reason | None = None,
    ) -> list[Event]:
        """Commit the accepted path, the target's token, and the tokens that the grammar forces after it,
        up to the end of the answer. Keep the accepted path in the cache. Return the events."""
        rejected = rejected_branches(sequence, draft, verdict)
        kinds: list[tuple[int, TokenKind, str]] = [
            (draft.tokens[node], "accepted", draft.origins[node]) for node in verdict.path
        ]
        own_kind = next_kind(draft, verdict)
        kinds.append((verdict.next_token, own_kind, "target"))

        pieces: list[Piece] = []
        for node, (token, kind, origin) in zip((ROOT, *verdict.path), kinds, strict=True):
            piece = Piece(token, sequence.commit(token), kind, origin)
            pieces.append(with_logprobs(sequence, piece, logits[node + 1]))
            if sequence.is_finished:
                break
        n_accepted = min(len(verdict.path), len(pieces))
        keep_path(self._target, sequence.slot, draft, verdict.path[:n_accepted])
        pieces += _commit_forced(sequence)

        events: list[Event] = []
        now_s, number = self.now_s, sequence.tally.n_rounds
        if len(draft):
            sequence.tally.add_draft(draft, verdict.path[:n_accepted])
            events.append(DraftedEvent(sequence.index, now_s, number, draft_nodes(sequence, draft)))
            events.append(
                VerifiedEvent(
                    sequence=sequence.index,
                    time_s=now_s,
                    round=number,
                    accepted=verdict.path,
                    rejected=rejected,
                    next_token_id=verdict.next_token,
                    next_kind=own_kind,
                )
            )
        events.append(committed(sequence, now_s, pieces, reason))
        return events


def _keep_states(
    sequence: Sequence,
    hidden: Hidden | None,
    root: int,
    n_silent: int,
    n_pending: int,
    kept: abc.Sequence[int],
    n_read: int,
) -> None:
    """Let a sequence keep the hidden states of its text: of its `n_pending` rows before the draft, the last
    of which is row `root` of the rows with logits, and of the accepted nodes `kept`. Up to it the batch has
    `n_silent` rows without logits. The target has read `n_read` tokens then."""
    if sequence.hidden is None or hidden is None:
        return
    taken = [root, *(root + 1 + node for node in kept)]
    if sequence.hidden.all_rows:  # there are states of rows without logits, too
        root += n_silent
        taken = [*range(root + 1 - n_pending, root), *(row + n_silent for row in taken)]
    sequence.hidden.take_rows(hidden[taken], sequence.tokens, n_read)


@dataclass(slots=True)
class _Drafted:
    """The drafting of one sequence in a round."""

    plan: RoundPlan
    #: What the free drafter found, and what the plan's drafters proposed.
    proposed: tuple[Draft, ...] = ()
    #: Those that carry out the plan; None if it drafts nothing.
    drafters: Cascade | None = None
    #: What is verified.
    draft: Draft = NO_DRAFT
    #: Seconds of the draft model's decodes, and of all drafting.
    model_s: float = 0.0
    seconds: float = 0.0

    def take(self, draft: Draft, state: TextState) -> None:
        """Keep the drafted nodes that the grammar allows and that are worth verifying."""
        self.proposed += (draft,)
        allowed = draft
        if not draft.is_drawn:  # sampled drafts obey the grammar already, and stay whole
            allowed = state.within_grammar(draft)
        self.draft = self.plan.stop.cut(allowed)
        if not len(self.draft):
            name: ReasonName = "grammar" if len(draft) and not len(allowed) else "unsure"
            self.plan = replace(self.plan, reason=Reason(name))


def _commit_forced(sequence: Sequence) -> list[Piece]:
    """Commit the tokens to which the grammar leaves no alternative. Logits would change nothing, so no
    decode is needed before them."""
    pieces: list[Piece] = []
    while not sequence.is_finished:
        token = sequence.state.forced()
        if token is None:
            break
        pieces.append(Piece(token, sequence.commit(token), "forced", "grammar"))
    sequence.tally.n_forced += len(pieces)
    return pieces
