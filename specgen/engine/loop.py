"""The draft/verify loop: propose, decode, verify, commit, observe.

One round serves any number of generations: their drafts are packed into one batch of the target and
verified one by one. The loop reads no files or options and prints nothing; it changes `Generation`s
and returns events.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from specgen.arrays import Hidden, Logits
from specgen.backend.base import Backend, Batch, HiddenBackend
from specgen.backend.tree_batch import keep_path, pack
from specgen.calibration.cost_table import Others
from specgen.core.draft import NO_DRAFT, ROOT, Draft
from specgen.core.verifiers import Verdict
from specgen.drafters import Drafting, drafting_of
from specgen.engine.generation import Generation
from specgen.engine.proposing import propose_together, refuse_nonsense
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
from specgen.policy import RoundReport
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
        drafts, draft_s = self._propose(active, events)

        target_s, n_rows = self._target.decode_s, self._target.n_decoded_rows
        batch = Batch()
        for generation, draft in zip(active, drafts, strict=True):
            n_room = self._target.n_batch // len(active) - len(draft)
            pending = self._pending(generation, n_room)
            pack(batch, self._target, generation.slot, pending, draft)
        logits, hidden = self._decode_round(batch, active)
        target_s = self._target.decode_s - target_s
        # More rows than the batch has, if tokens were decoded again to restore a recurrent state.
        n_rows = self._target.n_decoded_rows - n_rows

        first_row = 0
        for generation, draft, (model_s, propose_s) in zip(active, drafts, draft_s, strict=True):
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
            events += self._commit(generation, draft, verdict, rows)
            if generation.hidden is not None and hidden is not None:
                # The row of the last accepted node, whose logits chose the next token.
                last_row = first_row - len(rows) + 1 + (verdict.path[-1] if verdict.path else ROOT)
                generation.hidden.take(hidden[last_row], n_tokens + len(verdict.path))
            told = tuple(generation.tokens[n_tokens:])
            report = RoundReport(
                draft, verdict.path, propose_s, target_s, n_rows, told, len(active)
            )
            generation.policy.observe(report)
            self._tell_drafter(generation, report, events)
            n_committed = len(generation.tokens) - tally.n_forced - n_before
            tally.add_decode(n_committed, n_rows, target_s)
            # The generations in a batch share its time equally.
            tally.target_s += target_s / len(active)
            tally.draft_s += model_s
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

    def _propose(
        self, active: Sequence[Generation], events: list[Event]
    ) -> tuple[list[Draft], list[tuple[float, float]]]:
        """Return a draft for each generation, and for each the seconds of the model's decodes and of all
        drafting. If a drafter fails, drafting ends, but the answer goes on."""
        n_others = len(active) - 1
        # How much the others will draft is not known yet: about as much as in the last round.
        n_all_rows = sum(generation.n_rows for generation in active)
        drafting: list[Generation] = []
        draftings: list[Drafting] = []
        asked: list[tuple[int, float]] = []
        for generation in active:
            drafter, policy = generation.drafter, generation.policy
            if drafter is None:
                continue
            others = Others(n_others, n_all_rows - generation.n_rows)
            n_max = min(
                policy.room(generation.n_expected, others),
                generation.n_draftable,
                self._target.n_outputs // len(active) - 1,
            )
            if n_max >= 1:
                drafting.append(generation)
                asked.append((n_max, drafter.model_s if generation.hidden is not None else 0.0))
                draftings.append(drafting_of(drafter, generation.tokens, n_max, policy))
        drafts = dict.fromkeys(map(id, active), NO_DRAFT)
        draft_s = dict.fromkeys(map(id, active), (0.0, 0.0))
        proposals = propose_together(draftings, self._clock)
        for generation, proposal, (n_max, before_s) in zip(drafting, proposals, asked, strict=True):
            started = self._clock()
            if proposal.error is None:
                refuse_nonsense(proposal, n_max, self._target.n_vocab)
            draft = proposal.draft
            if generation.hidden is not None and generation.drafter is not None:
                proposal.model_s += generation.drafter.model_s - before_s  # heads ask for no decode
            if proposal.error is not None:
                generation.drafter = None
                events.append(self._drafting_failed(generation, proposal.error))
            if not draft.is_drawn:  # sampled drafts obey the grammar already, and stay whole
                draft = generation.state.within_grammar(draft)
            drafts[id(generation)] = draft = generation.policy.trim(draft)
            generation.n_rows = 1 + len(draft)
            seconds = proposal.seconds + self._clock() - started
            draft_s[id(generation)] = proposal.model_s, seconds
        return list(drafts.values()), list(draft_s.values())

    def _tell_drafter(
        self, generation: Generation, report: RoundReport, events: list[Event]
    ) -> None:
        if generation.drafter is None:
            return
        try:
            generation.drafter.observe(report)
        except Exception as error:  # noqa: BLE001 - a bug in a drafter costs no answer
            generation.drafter = None
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
        self, generation: Generation, draft: Draft, verdict: Verdict, logits: Logits
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
        events.append(committed(generation, now_s, pieces))
        return events


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
