"""The draft/verify loop: propose, decode, verify, commit, observe.

One round serves any number of generations: their drafts are packed into one batch of the target and
verified one by one. The loop reads no files or options and prints nothing; it changes `Generation`s
and returns events.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specgen.arrays import Hidden, Logits
from specgen.backend.base import Backend, Batch, HiddenBackend
from specgen.backend.tree_batch import keep_path, pack
from specgen.calibration.cost_table import Others
from specgen.core.draft import NO_DRAFT, ROOT, Draft
from specgen.core.text_state import TextState
from specgen.core.verifiers import Verdict
from specgen.drafters import Drafters
from specgen.drafters.base import propose_together, refuse_nonsense
from specgen.engine.generation import Generation
from specgen.engine.round_events import (
    committed,
    draft_nodes,
    next_kind,
    rejected_branches,
    with_logprobs,
)
from specgen.errors import BackendError, SpecgenError
from specgen.events import (
    DraftedEvent,
    Event,
    NoticeEvent,
    Piece,
    TokenKind,
    VerifiedEvent,
)
from specgen.policy import Reason, ReasonName, RoundPlan, RoundResult
from specgen.sampling import Distribution, NoTokenAllowedError

#: Single-token decodes timed by `plain_token_s`.
_N_PROBES = 3
#: The most committed tokens that are decoded in a round's batch; if there are more, they are decoded before.
_MAX_PENDING = 16


class Loop:
    """Generates with one target.

    `clock` returns the seconds of a monotonic clock. `interrupted` is called between decodes; once it
    returns True, generations finish with the text that they have.
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

    def run(self, generation: Generation) -> Iterator[Event]:
        """Generate a whole answer, and yield its events. Raises the error that ends it early."""
        yield from self.start(generation)
        while not generation.is_finished:
            yield from self.round([generation])
        if generation.failure is not None:
            raise generation.failure

    def start(self, generation: Generation) -> list[Event]:
        """Decode a prompt, commit the first token, and return the events. There is no draft in this step,
        so the first token comes as early, and the prompt is decoded in the same pieces, as in plain
        decoding."""
        events: list[Event] = []
        while not (generation.is_started or generation.is_finished):
            events += self.read(generation)
        return events

    def read(self, generation: Generation, n_most: int | None = None) -> list[Event]:
        """Decode one piece of a prompt, at most `n_most` tokens (by default as many as the target takes at
        once). After the last piece, commit the first token. Return the events."""
        if generation.is_finished:
            return []
        started, tally = self._clock(), generation.tally
        target_s = self._target.decode_s
        events: list[Event] = []
        if generation.read_since_s is None:
            generation.read_since_s = started
            generation.n_cached = self._target.length(generation.slot.first)
            # Tokens that the grammar forces need no decode: they are decoded with the prompt.
            forced = _commit_forced(generation)
            if forced:
                tally.first_token_s = self._clock() - started
                events.append(committed(generation, self.now_s, forced))
        if self._interrupted() and not generation.is_finished:
            events += self._interrupt(generation)
        if not generation.is_finished:
            logits = self._read_piece(generation, n_most or self._target.n_batch)
            if logits is not None:
                verdict = self._verify(generation, NO_DRAFT, logits)
                events += self._commit(generation, NO_DRAFT, verdict, logits)
                generation.is_started = True
        target_s = self._target.decode_s - target_s
        tally.prompt_s += target_s
        tally.target_s += target_s
        now = self._clock()
        tally.wall_s += now - started
        tally.start_s = tally.wall_s
        tally.n_start_tokens = len(generation.tokens) - generation.n_prompt
        if generation.is_started and tally.first_token_s is None:
            tally.first_token_s = now - generation.read_since_s
        return events

    def round(self, generations: Sequence[Generation]) -> list[Event]:
        """Run one round for all generations that are started and not finished, and return the events.

        If a generation's grammar allows no token, or its logits are not numbers, it ends with a
        `failure`, and the others go on. Raises `BackendError` if the target cannot decode the round's
        batch. The statistics do not count time outside this call, in a renderer for example.
        """
        active = [generation for generation in generations if not generation.is_finished]
        if not active:
            return []
        if self._interrupted():
            return [event for generation in active for event in self._interrupt(generation)]
        round_started = self._clock()
        events: list[Event] = []
        drafting = self._propose(active, events)

        target_s, n_rows = self._target.decode_s, self._target.n_decoded_rows
        batch = Batch()
        for generation, drafted in zip(active, drafting, strict=True):
            n_room = self._target.n_batch // len(active) - len(drafted.draft)
            pending = self._pending(generation, n_room)
            pack(batch, self._target, generation.slot, pending, drafted.draft)
        logits, hidden = self._decode_round(batch, active)
        target_s = self._target.decode_s - target_s
        # More rows than the batch has, if tokens were decoded again to restore a recurrent state.
        n_rows = self._target.n_decoded_rows - n_rows

        first_row = 0
        for generation, drafted in zip(active, drafting, strict=True):
            draft = drafted.draft
            rows = logits[first_row : first_row + 1 + len(draft)]
            first_row += len(rows)
            tally = generation.tally
            n_tokens = len(generation.tokens)
            n_before = n_tokens - tally.n_forced
            try:
                verdict = self._verify(generation, draft, rows)
            except BackendError as error:  # the grammar allows no token, or a logit is not a number
                generation.failure = error
                continue
            tally.n_rounds += 1
            events += self._commit(generation, draft, verdict, rows, drafted.plan.reason)
            if generation.hidden is not None and hidden is not None:
                # The row of the last accepted node, whose logits chose the next token.
                last_row = first_row - len(rows) + 1 + (verdict.path[-1] if verdict.path else ROOT)
                generation.hidden.take(hidden[last_row], n_tokens + len(verdict.path))
            result = RoundResult(
                drafted.plan,
                draft,
                verdict.path,
                drafted.seconds,
                target_s,
                n_rows,
                committed=tuple(generation.tokens[n_tokens:]),
                proposed=drafted.proposed,
            )
            generation.policy.observe(result)
            self._tell_drafters(generation, result, events)
            n_committed = len(generation.tokens) - tally.n_forced - n_before
            tally.add_decode(n_committed, n_rows, target_s)
            # The generations in a batch share its time equally.
            tally.target_s += target_s / len(active)
            tally.draft_s += drafted.model_s
        wall_s = self._clock() - round_started
        for generation in active:
            generation.tally.wall_s += wall_s / len(active)
        return events

    def finish(self, generation: Generation, *, estimate_gain: bool) -> list[Event]:
        """Return the summary of a finished generation. With `estimate_gain`, a generation that had drafts
        is compared with plain decoding, which may take a few more decodes."""
        generation.policy.finish()
        token_s, how = None, ""
        if estimate_gain and generation.tally.n_drafted:
            token_s = generation.tally.plain_token_s()
            n_plain = len(generation.tally.target_s_by_rows[1])
            how = f"from the {n_plain} rounds of this answer that had no draft"
            if token_s is None and generation.finish_reason != "interrupted":
                token_s = self.plain_token_s(generation)
                how = f"from {_N_PROBES} single-token decodes at the end of the answer"
        return [generation.finished_event(self.now_s, token_s, how)]

    def plain_token_s(self, generation: Generation) -> float | None:
        """Return the target's time for one token: the median seconds of a few decodes of the text's last
        token, after which the cache is as before. None if there is no room."""
        sequence = generation.slot.first
        length = self._target.length(sequence)
        if length == 0 or length >= generation.n_ctx:
            return None
        samples = []
        for _ in range(_N_PROBES):
            self._target.checkpoint(sequence)
            batch = Batch()
            batch.add(generation.tokens[-1], length, (sequence,), True)
            before = self._target.decode_s
            self._target.decode(batch)
            samples.append(self._target.decode_s - before)
            self._target.remove(sequence, length)
        return float(np.median(samples))

    def _interrupt(self, generation: Generation) -> list[Event]:
        """End the answer here, and return the event of the text that was held back, if any."""
        generation.finish("interrupted")
        text = generation.text.flush()
        if not text:
            return []
        piece = Piece(generation.tokens[-1], text, "plain", "target")
        return [committed(generation, self.now_s, [piece])]

    def _read_piece(self, generation: Generation, n_most: int) -> Logits | None:
        """Decode the next piece of the text that the cache does not hold yet: of the prompt, and of tokens
        that the grammar forces after it. Return the logits after the last piece, float32[1, n_vocab];
        None after the others."""
        text, sequence = generation.tokens, generation.slot.first
        start = self._target.length(sequence)
        batch = Batch()
        for offset, token in enumerate(text[start : start + n_most]):
            batch.add(token, start + offset, (sequence,), False)
        batch.wants_logits[-1] = is_last = start + n_most >= len(text)
        logits = self._target.decode(batch)
        return logits if is_last else None

    def _decode_round(
        self, batch: Batch, active: Sequence[Generation]
    ) -> tuple[Logits, Hidden | None]:
        """Decode a round's batch. Return the logits, float32[n_rows, n_vocab], and the hidden states,
        float32[n_rows, n_embd], if a drafter needs these."""
        is_wanted = any(generation.hidden is not None for generation in active)
        target = self._hidden_target
        if is_wanted and target is not None and len(batch) <= target.n_outputs:
            return target.decode_hidden(batch)
        return self._target.decode(batch), None

    def _pending(self, generation: Generation, n_room: int) -> list[int]:
        """Return the committed tokens that the cache does not hold yet: the last one and, if a grammar
        forced tokens, those before it. If they do not fit into the round's batch, all but the last are
        decoded here."""
        sequence, tokens = generation.slot.first, generation.tokens
        position = self._target.length(sequence)
        if len(tokens) - position > max(1, min(n_room, _MAX_PENDING)):
            n_batch = self._target.n_batch
            for start in range(position, len(tokens) - 1, n_batch):
                batch = Batch()
                for index in range(start, min(start + n_batch, len(tokens) - 1)):
                    batch.add(tokens[index], index, (sequence,), False)
                self._target.decode(batch)
            position = len(tokens) - 1
        return tokens[position:]

    def _propose(self, active: Sequence[Generation], events: list[Event]) -> list[_Drafted]:
        """Plan a draft for each generation and make the drafts together. If a drafter fails, drafting ends
        for its generation, but the answer goes on."""
        drafting = [self._plan(generation, active, events) for generation in active]
        planned = [
            (generation, drafted, drafted.drafters.propose(generation.tokens, drafted.plan))
            for generation, drafted in zip(active, drafting, strict=True)
            if drafted.drafters is not None
        ]
        proposals = propose_together([proposed for _, _, proposed in planned], self._clock)
        for (generation, drafted, _), proposal in zip(planned, proposals, strict=True):
            started = self._clock()
            plan = drafted.plan
            n_most = len(plan.found) + plan.n_max
            if proposal.error is None:
                refuse_nonsense(proposal, n_most, self._target.n_vocab)
            if proposal.error is not None:
                self._fail(generation, drafted, proposal.error, events)
            else:
                drafted.take(proposal.draft, generation.state)
            generation.n_rows = 1 + len(drafted.draft)
            # Heads ask for no decode: all their drafting is the draft model's time.
            seconds = proposal.seconds + self._clock() - started
            drafted.model_s = proposal.model_s if generation.hidden is None else seconds
            drafted.seconds += seconds
        for generation, drafted in zip(active, drafting, strict=True):
            if not len(drafted.draft):
                reason = drafted.plan.reason
                generation.tally.add_undrafted(reason.name, str(reason))
        return drafting

    def _plan(
        self, generation: Generation, active: Sequence[Generation], events: list[Event]
    ) -> _Drafted:
        """Return what the generation's free drafter finds, and its plan of the round."""
        drafters = generation.drafters
        if drafters is None:
            return _Drafted(RoundPlan(Reason(generation.why_undrafted)))
        started = self._clock()
        # How much the others will draft is not known yet: about as much as in the last round.
        n_other_rows = sum(each.n_rows for each in active) - generation.n_rows
        others = Others(len(active) - 1, n_other_rows)
        try:
            offer = generation.offer(self._target.n_outputs // len(active) - 1, others)
            plan = generation.policy.plan(offer)
        except Exception as error:  # noqa: BLE001 - a bug in a drafter costs no answer
            drafted = _Drafted(RoundPlan(Reason("failed")))
            self._fail(generation, drafted, error, events)
            return drafted
        is_planned = len(plan.found) + plan.n_max > 0
        return _Drafted(
            plan,
            drafters=drafters if is_planned else None,
            proposed=(offer.found,),
            seconds=self._clock() - started,
        )

    def _tell_drafters(
        self, generation: Generation, result: RoundResult, events: list[Event]
    ) -> None:
        if generation.drafters is None:
            return
        try:
            generation.drafters.observe(result)
        except Exception as error:  # noqa: BLE001 - a bug in a drafter costs no answer
            self._end_drafting(generation, error, events)

    def _fail(
        self, generation: Generation, drafted: _Drafted, error: Exception, events: list[Event]
    ) -> None:
        drafted.plan, drafted.draft = replace(drafted.plan, reason=Reason("failed")), NO_DRAFT
        self._end_drafting(generation, error, events)

    def _end_drafting(self, generation: Generation, error: Exception, events: list[Event]) -> None:
        generation.drafters, generation.why_undrafted = None, "failed"
        events.append(self._drafting_failed(generation, error))

    def _drafting_failed(self, generation: Generation, error: Exception) -> NoticeEvent:
        what = error.message if isinstance(error, SpecgenError) else repr(error)
        return NoticeEvent(
            sequence=generation.index,
            time_s=self.now_s,
            message=f"drafting failed, going on without a draft: {what}",
            detail="".join(traceback.format_exception(error)),
        )

    def _verify(self, generation: Generation, draft: Draft, logits: Logits) -> Verdict:
        dead_ends: dict[int, NoTokenAllowedError] = {}

        def target(node: int) -> Distribution:
            if node != ROOT and generation.vocabulary.is_end(draft.tokens[node]):
                # Nothing follows the end of a text: a token that is chosen here is never committed.
                return Distribution.certain(draft.tokens[node])
            try:
                return generation.shaper.distribution(logits[node + 1], draft.text(node))
            except NoTokenAllowedError as error:
                if node == ROOT:
                    raise
                # A verifier may ask for nodes that it then rejects: only an accepted dead end fails.
                dead_ends[node] = error
                return Distribution.certain(draft.tokens[node])

        verdict = generation.verifier.verify(draft, target, generation.rng)
        if verdict.path and verdict.path[-1] in dead_ends:
            raise dead_ends[verdict.path[-1]]
        return verdict

    def _commit(
        self,
        generation: Generation,
        draft: Draft,
        verdict: Verdict,
        logits: Logits,
        reason: Reason | None = None,
    ) -> list[Event]:
        """Commit the accepted path, the target's token, and the tokens that the grammar forces after it,
        up to the end of the answer. Keep the accepted path in the cache. Return the events."""
        rejected = rejected_branches(generation, draft, verdict)
        kinds: list[tuple[int, TokenKind, str]] = [
            (draft.tokens[node], "accepted", draft.origins[node]) for node in verdict.path
        ]
        own_kind = next_kind(draft, verdict)
        kinds.append((verdict.next_token, own_kind, "target"))

        pieces: list[Piece] = []
        for node, (token, kind, origin) in zip((ROOT, *verdict.path), kinds, strict=True):
            piece = Piece(token, generation.commit(token), kind, origin)
            pieces.append(with_logprobs(generation, piece, logits[node + 1]))
            if generation.is_finished:
                break
        n_accepted = min(len(verdict.path), len(pieces))
        keep_path(self._target, generation.slot, draft, verdict.path[:n_accepted])
        pieces += _commit_forced(generation)

        events: list[Event] = []
        now_s, number = self.now_s, generation.tally.n_rounds
        if len(draft):
            generation.tally.add_draft(draft, verdict.path[:n_accepted])
            events.append(
                DraftedEvent(generation.index, now_s, number, draft_nodes(generation, draft))
            )
            events.append(
                VerifiedEvent(
                    sequence=generation.index,
                    time_s=now_s,
                    round=number,
                    accepted=verdict.path,
                    rejected=rejected,
                    next_token_id=verdict.next_token,
                    next_kind=own_kind,
                )
            )
        events.append(committed(generation, now_s, pieces, reason))
        return events


@dataclass(slots=True)
class _Drafted:
    """The drafting of one generation in a round."""

    plan: RoundPlan
    #: What the free drafter found, and what the plan's drafters proposed.
    proposed: tuple[Draft, ...] = ()
    #: Those that carry out the plan; None if it drafts nothing.
    drafters: Drafters | None = None
    #: What is verified.
    draft: Draft = NO_DRAFT
    #: Seconds of the draft model's decodes, and of all drafting.
    model_s: float = 0.0
    seconds: float = 0.0

    def take(self, draft: Draft, state: TextState) -> None:
        """Take what was drafted, as far as the grammar allows it and it is worth verifying."""
        self.proposed += (draft,)
        allowed = draft
        if not draft.is_drawn:  # sampled drafts obey the grammar already, and stay whole
            allowed = state.within_grammar(draft)
        self.draft = self.plan.stop.cut(allowed)
        if not len(self.draft):
            name: ReasonName = "grammar" if len(draft) and not len(allowed) else "unsure"
            self.plan = replace(self.plan, reason=Reason(name))


def _commit_forced(generation: Generation) -> list[Piece]:
    """Commit the tokens to which the grammar leaves no alternative. Logits would change nothing, so no
    decode is needed before them."""
    pieces: list[Piece] = []
    while not generation.is_finished:
        token = generation.state.forced()
        if token is None:
            break
        pieces.append(Piece(token, generation.commit(token), "forced", "grammar"))
    generation.tally.n_forced += len(pieces)
    return pieces
