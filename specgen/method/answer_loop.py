"""A whole answer: the prefill in chunks, then rounds until it ends, then the summary.

`method/answer_state.py` decides where an answer ends.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Sequence

from specgen.errors import BackendError, DecodeEndedError
from specgen.events import Event, FinishedEvent, Piece, PrefillEvent
from specgen.method.answer_state import AnswerState
from specgen.method.backend import Batch
from specgen.method.cost_table import CostTable
from specgen.method.draft import NO_DRAFT
from specgen.method.drafter import never
from specgen.method.loop import DecodedBatch, Loop
from specgen.method.prefill_costs import PrefillCosts
from specgen.system.arrays import Logits

#: The maximum number of prompt tokens that are decoded between two rounds of other answers, which
#: wait meanwhile. As long as the costs of batches are unknown, it also limits those that join the
#: batch of a round.
N_PREFILL_ALONGSIDE = 32
#: Shorter answers are not compared with plain decoding, because the result would be mostly noise.
_MIN_COMPARED_TOKENS = 30


class AnswerLoop(Loop):
    """The loop, with the prefill of its answers' prompts and the summaries of its answers."""

    @functools.cached_property
    def prefill_costs(self) -> PrefillCosts:
        """What the prefill of prompts costs with this target."""
        return PrefillCosts()

    def run(self, answer: AnswerState) -> Iterator[Event]:
        """Generate a whole answer, and yield its events.

        Raises:
            SpecgenError: If an error ended the answer (`AnswerState.failure`).
        """
        while not answer.is_finished:
            if answer.is_started:
                yield from self.round([answer])
            else:
                yield from self.prefill(answer)
        if answer.failure is not None:
            raise answer.failure

    def finish(
        self,
        answer: AnswerState,
        costs: CostTable,
        *,
        is_rough: bool = False,
    ) -> FinishedEvent:
        """Return the summary of a finished answer.

        If tokens were drafted, and the answer is long enough, it includes an estimate of the
        speed-up over plain decoding.

        Args:
            answer: The answer.
            costs: The costs of the target's batches, from which the speed-up is estimated.
            is_rough: Whether the machine was busy meanwhile, or while the costs were measured.
        """
        plain_token_s = None
        if answer.stats.n_drafted and answer.n_answer >= _MIN_COMPARED_TOKENS:
            plain_token_s = answer.stats.priced_token_s(costs)
        return answer.finished_event(self.now_s, plain_token_s, is_rough=is_rough)

    # --- prefill --------------------------------------------------------------------------------

    def prefill(
        self,
        answer: AnswerState,
        n_max: int | None = None,
        is_unwanted: Callable[[], bool] = never,
    ) -> list[Event]:
        """Decode the next chunk of a prompt; after the last one, commit the first token.

        Args:
            answer: The answer, whose prompt is not completely decoded yet.
            n_max: The maximum number of tokens in the chunk; None: as many as the target takes.
            is_unwanted: Called during the decode. Once it returns True, the decode stops, and the
                answer ends as interrupted.

        Returns:
            The events of the chunk.
        """
        if answer.is_finished:
            return []
        started_s = self.clock()
        decode_s_before = self.target.decode_s
        events = self.begin_prefill(answer, started_s)
        if self._interrupted() and not answer.is_finished:
            events += answer.interrupt(self.now_s)
        last_logits: Logits | None = None
        scored_pieces: tuple[Piece, ...] = ()
        if not answer.is_finished:  # forced tokens, or the interruption, may have ended it
            is_scored = answer.options.prompt_logprobs
            batch, is_last = self._prefill_chunk(answer, n_max, is_scored=is_scored)
            self.target.is_unwanted = lambda: self._interrupted() or is_unwanted()
            try:
                rows = self.decode_text(answer, batch)
            except DecodeEndedError:
                return events + answer.interrupt(self.now_s)
            finally:
                self.target.is_unwanted = None
            if is_scored:
                scored_pieces = answer.scored_prompt(batch.positions[0], rows)
            if is_last:
                last_logits = rows[-1:]
        target_s = self.target.decode_s - decode_s_before
        events += self.finish_prefill_chunk(answer, last_logits, target_s, started_s, scored_pieces)
        return events

    def _prefill_chunk(
        self,
        answer: AnswerState,
        n_max: int | None,
        *,
        is_scored: bool,
    ) -> tuple[Batch, bool]:
        """Return the next chunk of a prompt, and whether it is the last one.

        The state before the chunk is kept in the cache where a later text may go back to it.

        Args:
            answer: The answer.
            n_max: The maximum number of tokens; None: as many as the target takes.
            is_scored: Whether all tokens of the prompt need logits, for their log-probabilities.
        """
        first = answer.branches.first
        n_rows_max = self.target.n_batch
        if is_scored:
            n_rows_max = min(n_rows_max, self.target.n_outputs)
        if self.target.length(first) in answer.prefill_stops:
            self.target.anchor(first)
        batch = Batch()
        is_last = self.add_prefill_chunk(batch, answer, min(n_max or n_rows_max, n_rows_max))
        if is_scored:
            batch.wants_logits = [True] * len(batch)
        # So that a recurrent state can go back to here. A small chunk is quickly decoded again.
        if answer.n_prefilled > 0 and len(batch) > N_PREFILL_ALONGSIDE:
            self.target.checkpoint(first)
        return batch, is_last

    def decode_alongside(
        self,
        answer: AnswerState,
        costs: CostTable,
        n_free_rows: int,
        batch: Batch,
        active: Sequence[AnswerState],
        events: list[Event],
    ) -> DecodedBatch:
        """Decode a round's batch together with as much of another answer's prompt as costs allow.

        This is exact, since a row has the same logits in any batch. With the first three arguments
        bound, it is a `Decode` for `Loop.round`.

        Args:
            answer: The answer whose prompt is decoded.
            costs: The costs of the target's batches.
            n_free_rows: The number of prompt rows that cost a batch nothing, whatever `costs` say:
                with a streamed target, reading the weights from disk hides their computation.
            batch: The round's batch. Rows of the prompt are added to it.
            active: The answers of the round.
            events: The events of the round. Those of `answer` are added to it.

        Returns:
            The decoded batch, with the prefill's share of the time in `other_s`.
        """
        n_round_rows = len(batch)
        decode_s_before = self.target.decode_s
        try:
            events += self.begin_prefill(answer, self.clock())
        except BackendError as error:  # the grammar fails in the text that it forces
            answer.failure = error
        n_prompt_rows_max = self._rows_alongside(n_round_rows, costs, n_free_rows)
        is_last = False
        if n_prompt_rows_max > 0 and not answer.is_finished:
            is_last = self.add_prefill_chunk(batch, answer, n_prompt_rows_max)

        decoded = self.decode(batch, active, events)
        n_rows = len(batch)
        if n_rows == n_round_rows:  # nothing was added
            return decoded

        prefill_share = _prefill_share(n_round_rows, n_rows, costs, n_free_rows)
        prefill_s = (self.target.decode_s - decode_s_before) * prefill_share
        last_logits = decoded.logits[-1:] if is_last else None
        started_s = self.clock() - prefill_s
        try:
            events += self.finish_prefill_chunk(answer, last_logits, prefill_s, started_s)
        except BackendError as error:  # the grammar goes no further, or a logit is not a number
            answer.failure = error
        return DecodedBatch(decoded.logits, decoded.hidden, prefill_s)

    def _rows_alongside(
        self,
        n_round_rows: int,
        costs: CostTable,
        n_free_rows: int,
    ) -> int:
        """Return the maximum number of prompt rows in the batch of a round.

        The batch may take twice as long with them, so that running answers keep half their speed.
        """
        n_batch = self.target.n_batch
        n_max = N_PREFILL_ALONGSIDE
        if costs:
            limit_s = 2 * costs.seconds(n_round_rows)
            sizes = range(1, n_batch)
            # The number of sizes within the limit, which is also the largest of them.
            n_max = bisect.bisect(sizes, limit_s, key=lambda n: costs.seconds(n_round_rows + n))
        return min(max(n_max, n_free_rows), n_batch - n_round_rows)

    def begin_prefill(
        self,
        answer: AnswerState,
        started_s: float,
    ) -> list[Event]:
        """Record that a prefill begins, and commit the tokens that a grammar forces at the start.

        Later calls do nothing.

        Returns:
            A progress event, if the answer reports its prefill, and the event of forced tokens.
        """
        if answer.prefill_started_s is not None:
            return []
        answer.prefill_started_s = started_s
        answer.n_cached = self.target.length(answer.branches.first)
        answer.n_prefilled = answer.n_cached
        events: list[Event] = []
        if answer.options.reports_prefill:
            events.append(self._prefill_event(answer))
        forced = answer.take_forced(started_s - self._started_s)
        if forced:
            answer.stats.time_to_first_token_s = self.clock() - started_s
        return events + forced

    def add_prefill_chunk(
        self,
        batch: Batch,
        answer: AnswerState,
        n_max: int,
    ) -> bool:
        """Add to a batch the next tokens of a text that are not in the cache yet.

        The chunk has at most `n_max` tokens and ends at the next of the answer's `prefill_stops`.

        Returns:
            Whether the chunk reaches the end of the text. Only then its last row wants logits.
        """
        first = answer.branches.first
        start = self.target.length(first)
        lengths_to_stops = [stop - start for stop in answer.prefill_stops if stop > start]
        n_tokens = min([n_max, *lengths_to_stops])
        for offset, token in enumerate(answer.tokens[start : start + n_tokens]):
            batch.add(token, start + offset, (first,), wants=False)
        is_last = start + n_tokens >= len(answer.tokens)
        batch.wants_logits[-1] = is_last
        return is_last

    def finish_prefill_chunk(
        self,
        answer: AnswerState,
        last_logits: Logits | None,
        target_s: float,
        started_s: float,
        scored_pieces: tuple[Piece, ...] = (),
    ) -> list[Event]:
        """Record that a chunk was decoded; after the last one, commit the first token.

        Args:
            answer: The answer.
            last_logits: The logits after the end of the prompt, float32[1, n_vocab]; None if this
                chunk is not the last one.
            target_s: The seconds that the target took for the chunk.
            started_s: The clock's time when the chunk began.
            scored_pieces: The chunk's tokens with log-probabilities, if these were requested.

        Returns:
            A progress event, then the event of the first token. After the last chunk there is a
            progress event only if it was requested or has log-probabilities.
        """
        n_in_cache = self.target.length(answer.branches.first)
        n_decoded = n_in_cache - answer.n_prefilled
        self.prefill_costs.observe(answer.n_prefilled, n_decoded, target_s)
        answer.n_prefilled = min(n_in_cache, answer.n_prompt)  # forced tokens may follow the prompt
        events: list[Event] = []
        if last_logits is not None:
            events = self._commit_first_token(answer, last_logits)
        self._record_prefill_times(answer, target_s, started_s)

        is_last = answer.is_started or answer.is_finished
        if is_last and not (scored_pieces or answer.options.reports_prefill):
            return events
        return [self._prefill_event(answer, scored_pieces), *events]

    def _commit_first_token(
        self,
        answer: AnswerState,
        logits: Logits,
    ) -> list[Event]:
        """Commit the token after the prompt, unless the answer may have no tokens at all."""
        if answer.options.max_tokens == 0:
            answer.finish("length")
            return []
        verdict = self.verify(answer, NO_DRAFT, logits)
        events = answer.commit_verdict(NO_DRAFT, verdict, logits, self.now_s)
        answer.is_started = True
        return events

    def _record_prefill_times(
        self,
        answer: AnswerState,
        target_s: float,
        started_s: float,
    ) -> None:
        now_s = self.clock()
        stats = answer.stats
        stats.add_prompt(target_s, now_s - started_s, len(answer.tokens) - answer.n_prompt)
        if answer.is_started and stats.time_to_first_token_s is None:
            assert answer.prefill_started_s is not None
            stats.time_to_first_token_s = now_s - answer.prefill_started_s

    def _prefill_event(
        self,
        answer: AnswerState,
        scored_pieces: tuple[Piece, ...] = (),
    ) -> PrefillEvent:
        return PrefillEvent(
            sequence=answer.index,
            time_s=self.now_s,
            n_prefilled=answer.n_prefilled,
            n_prompt_tokens=answer.n_prompt,
            left_s=self.prefill_costs.seconds(answer.n_prefilled, answer.n_prompt),
            n_cached_tokens=answer.n_cached,
            n_loaded_tokens=answer.n_loaded,
            spent_s=answer.stats.wall_s,
            pieces=scored_pieces,
        )


def _prefill_share(
    n_round_rows: int,
    n_rows: int,
    costs: CostTable,
    n_free_rows: int,
) -> float:
    """Return the share of a decode's time that belongs to the prompt in its batch, 0 to 1.

    The round pays what its rows would have cost alone, and the prefill the rest; if its rows are
    free, nothing.

    Args:
        n_round_rows: The number of the round's rows.
        n_rows: The number of all rows in the batch.
        costs: The costs of the target's batches.
        n_free_rows: See `AnswerLoop.decode_alongside`.
    """
    if n_free_rows:
        return 0.0
    if not costs:
        return 1.0 - n_round_rows / n_rows
    return max(0.0, 1.0 - costs.seconds(n_round_rows) / costs.seconds(n_rows))
