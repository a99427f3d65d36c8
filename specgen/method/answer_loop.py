"""A whole answer: its prompt is decoded in chunks, then come the rounds, then the summary.

Where an answer ends is decided in `method/answer_state.py`.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Sequence

from specgen.errors import BackendError, DecodeEndedError
from specgen.events import Event, FinishedEvent, Piece, ReadingEvent
from specgen.method.answer_state import AnswerState
from specgen.method.backend import Batch
from specgen.method.cost_table import CostTable
from specgen.method.draft import NO_DRAFT
from specgen.method.drafter import never
from specgen.method.loop import DecodedBatch, Loop
from specgen.system.arrays import Logits

#: The most tokens of a prompt between two rounds of answers, which wait, or in the batch of a round
#: while costs are not known.
N_PREFILL_ALONGSIDE = 32
#: After this many tokens of later chunks, a chunk counts half.
_N_HALF_LIFE = 8192
#: The expected growth with depth counts as this many tokens.
_N_EXPECTED = 128
#: At this depth a token takes twice as long as at the beginning, in models of 1.5B.
_N_DOUBLING = 5000.0
#: Tokens of the shortest answer that is compared with plain decoding.
_SHORTEST_COMPARED = 30


class PrefillCosts:
    """What the prefill of prompts costs.

    A token takes longer the deeper it is, since attention sees all tokens before it. The time is a
    line, flat_s + growth_s * depth, fitted to the latest chunks by least squares. While these were
    all of one depth, the slope is a guess (`_N_DOUBLING`).
    """

    def __init__(self) -> None:
        # Sums over tokens, in which old chunks fade. Depth is in units of `_N_DOUBLING`.
        self._n = 0.0
        self._depth = 0.0
        self._depth_squared = 0.0
        self._seconds = 0.0
        self._seconds_by_depth = 0.0

    def observe(
        self,
        start: int,
        n: int,
        seconds: float,
    ) -> None:
        """Learn from a chunk of `n` tokens after the first `start` ones."""
        if n <= 0 or not seconds > 0.0:
            return
        depth = (start + n / 2) / _N_DOUBLING
        kept = 0.5 ** (n / _N_HALF_LIFE)
        self._n = kept * self._n + n
        self._depth = kept * self._depth + n * depth
        self._depth_squared = kept * self._depth_squared + n * depth**2
        self._seconds = kept * self._seconds + seconds
        self._seconds_by_depth = kept * self._seconds_by_depth + seconds * depth

    def seconds(self, start: int, end: int) -> float:
        """Return the expected seconds from one position to another; 0 while nothing is known."""
        if not self._n or end <= start:
            return 0.0
        # The least-squares slope. An observation of `_N_EXPECTED` tokens at depth -1, where a token
        # would take no time, pulls it towards the guess that a token takes twice as long at depth 1
        # as at depth 0.
        n = self._n + _N_EXPECTED
        depth = self._depth - _N_EXPECTED
        depth_squared = self._depth_squared + _N_EXPECTED
        growth_s = n * self._seconds_by_depth - depth * self._seconds
        growth_s = max(0.0, growth_s / (n * depth_squared - depth**2))
        flat_s = max(0.0, (self._seconds - growth_s * self._depth) / self._n)
        token_s = flat_s + growth_s * (start + end) / 2 / _N_DOUBLING  # at the mean depth
        return (end - start) * token_s


class AnswerLoop(Loop):
    """A loop that also decodes the prompts of its answers, and summarises the answers."""

    @functools.cached_property
    def prefill_costs(self) -> PrefillCosts:
        """What the prefill of prompts costs with this target."""
        return PrefillCosts()

    def run(self, answer: AnswerState) -> Iterator[Event]:
        """Generate a whole answer, and yield its events. Raise the error that ends it early."""
        while not answer.is_finished:
            if answer.is_started:
                yield from self.round([answer])
            else:
                yield from self.prefill(answer)
        if answer.failure is not None:
            raise answer.failure

    def finish(self, answer: AnswerState, costs: CostTable) -> FinishedEvent:
        """Return the summary of a finished answer.

        It is compared with plain decoding, by the `costs` of the target's batches, if it had drafts
        and is not so short that noise would decide.
        """
        token_s = None
        if answer.stats.n_drafted and answer.n_answer >= _SHORTEST_COMPARED:
            token_s = answer.stats.priced_token_s(costs)
        return answer.finished_event(self.now_s, token_s)

    # --- prefill --------------------------------------------------------------------------------

    def prefill(
        self,
        answer: AnswerState,
        n_most: int | None = None,
        is_unwanted: Callable[[], bool] = never,
    ) -> list[Event]:
        """Decode a chunk of a prompt; after the last one, commit the first token.

        Args:
            answer: The answer, whose prompt is not decoded yet.
            n_most: The most tokens of the chunk.
            is_unwanted: Asked during the decode, which ends with the answer if it returns True.

        Returns:
            The events.
        """
        if answer.is_finished:
            return []
        started_s = self.clock()
        decode_s_before = self.target.decode_s
        events = self.begin_prefill(answer, started_s)
        if self._interrupted() and not answer.is_finished:
            events += answer.interrupt(self.now_s)
        logits: Logits | None = None
        scored: tuple[Piece, ...] = ()
        if not answer.is_finished:
            is_scored = answer.options.prompt_logprobs
            batch, is_last = self._prefill_chunk(answer, n_most, is_scored=is_scored)
            self.target.is_unwanted = lambda: self._interrupted() or is_unwanted()
            try:
                rows = self.decode_text(answer, batch)
            except DecodeEndedError:
                return events + answer.interrupt(self.now_s)
            finally:
                self.target.is_unwanted = None
            if is_scored:
                scored = answer.scored_prompt(batch.positions[0], rows)
            if is_last:
                logits = rows[-1:]
        target_s = self.target.decode_s - decode_s_before
        return events + self.finish_prefill_chunk(answer, logits, target_s, started_s, scored)

    def _prefill_chunk(
        self,
        answer: AnswerState,
        n_most: int | None,
        *,
        is_scored: bool,
    ) -> tuple[Batch, bool]:
        """Return a chunk of a prompt, and whether it is the last one.

        States to which the text may go back are marked in the cache.
        """
        first = answer.slot.first
        n_rows_max = self.target.n_batch
        if is_scored:  # every row wants logits
            n_rows_max = min(n_rows_max, self.target.n_outputs)
        if self.target.length(first) in answer.prefill_stops:
            self.target.anchor(first)
        batch = Batch()
        is_last = self.add_prefill_chunk(batch, answer, min(n_most or n_rows_max, n_rows_max))
        if is_scored:
            batch.wants_logits = [True] * len(batch)
        if answer.n_prefilled > 0 and len(batch) > N_PREFILL_ALONGSIDE:
            self.target.checkpoint(first)
        return batch, is_last

    def decode_alongside(
        self,
        answer: AnswerState,
        costs: CostTable,
        batch: Batch,
        active: Sequence[AnswerState],
        events: list[Event],
    ) -> DecodedBatch:
        """Decode a round's batch, and in it as much of a prompt as costs allow.

        A row has the same logits in any batch. The first two arguments bound, this is a `Decode`.

        Args:
            answer: The answer whose prompt is decoded.
            costs: The costs of the target's batches.
            batch: The round's batch, to which rows of the prompt are added.
            active: The answers of the round.
            events: The events of the round, to which those of `answer` are added.
        """
        n_own = len(batch)
        decode_s_before = self.target.decode_s
        events += self.begin_prefill(answer, self.clock())
        n_most = self._rows_alongside(n_own, costs)
        is_last = False
        if n_most > 0 and not answer.is_finished:
            is_last = self.add_prefill_chunk(batch, answer, n_most)

        decoded = self.decode(batch, active, events)
        n_all = len(batch)
        if n_all == n_own:
            return decoded

        own_share = n_own / n_all
        if costs:
            own_share = costs.seconds(n_own) / costs.seconds(n_all)
        prefill_s = (self.target.decode_s - decode_s_before) * (1.0 - min(1.0, own_share))
        logits = decoded.logits[-1:] if is_last else None
        started_s = self.clock() - prefill_s
        try:
            events += self.finish_prefill_chunk(answer, logits, prefill_s, started_s)
        except BackendError as error:  # the grammar allows no token, or a logit is not a number
            answer.failure = error
        return DecodedBatch(decoded.logits, decoded.hidden, prefill_s)

    def _rows_alongside(self, n_own: int, costs: CostTable) -> int:
        """Return how many rows of a prompt fit beside `n_own` rows of a round.

        They take as long as the round's own rows: running answers keep half of their pace.
        """
        n_batch = self.target.n_batch
        n_most = N_PREFILL_ALONGSIDE
        if costs:
            limit_s = 2 * costs.seconds(n_own)
            sizes = range(1, n_batch)
            n_most = bisect.bisect(sizes, limit_s, key=lambda n: costs.seconds(n_own + n))
        return min(n_most, n_batch - n_own)

    def begin_prefill(self, answer: AnswerState, started_s: float) -> list[Event]:
        """Note when a prefill begins, and commit what a grammar forces before any logits."""
        if answer.prefill_started_s is not None:
            return []
        answer.prefill_started_s = started_s
        answer.n_cached = self.target.length(answer.slot.first)
        answer.n_prefilled = answer.n_cached
        events: list[Event] = []
        if answer.options.reports_reading:
            events.append(self._reading_event(answer))
        forced = answer.take_forced(started_s - self._started_s)
        if forced:
            answer.stats.time_to_first_token_s = self.clock() - started_s
        return events + forced

    def add_prefill_chunk(
        self,
        batch: Batch,
        answer: AnswerState,
        n_most: int,
    ) -> bool:
        """Add the next tokens of a text that the cache lacks to a batch.

        Returns:
            Whether these are the last ones, whose last row wants logits.
        """
        first = answer.slot.first
        start = self.target.length(first)
        stops = [stop - start for stop in answer.prefill_stops if stop > start]
        n_tokens = min([n_most, *stops])
        for offset, token in enumerate(answer.tokens[start : start + n_tokens]):
            batch.add(token, start + offset, (first,), False)
        is_last = start + n_tokens >= len(answer.tokens)
        batch.wants_logits[-1] = is_last
        return is_last

    def finish_prefill_chunk(
        self,
        answer: AnswerState,
        logits: Logits | None,
        target_s: float,
        started_s: float,
        scored: tuple[Piece, ...] = (),
    ) -> list[Event]:
        """Record a chunk of a prompt; after the last one, commit the first token.

        Args:
            answer: The answer.
            logits: The logits after the last chunk, float32[1, n_vocab]; None after others.
            target_s: The seconds that the chunk took of the target.
            started_s: When it began, by the clock.
            scored: Its tokens, if with log-probabilities.

        Returns:
            The events.
        """
        stats = answer.stats
        n_held = self.target.length(answer.slot.first)
        self.prefill_costs.observe(answer.n_prefilled, n_held - answer.n_prefilled, target_s)
        answer.n_prefilled = min(n_held, answer.n_prompt)
        events: list[Event] = []
        if logits is not None and answer.options.max_tokens == 0:
            answer.finish("length")
        elif logits is not None:
            verdict = self.verify(answer, NO_DRAFT, logits)
            events += answer.commit_verdict(NO_DRAFT, verdict, logits, self.now_s)
            answer.is_started = True
        now_s = self.clock()
        stats.add_prompt(target_s, now_s - started_s, len(answer.tokens) - answer.n_prompt)
        if answer.is_started and stats.time_to_first_token_s is None:
            assert answer.prefill_started_s is not None
            stats.time_to_first_token_s = now_s - answer.prefill_started_s
        is_over = answer.is_started or answer.is_finished
        if is_over and not (scored or answer.options.reports_reading):
            return events
        return [self._reading_event(answer, scored), *events]

    def _reading_event(self, answer: AnswerState, scored: tuple[Piece, ...] = ()) -> ReadingEvent:
        return ReadingEvent(
            sequence=answer.index,
            time_s=self.now_s,
            n_read=answer.n_prefilled,
            n_prompt_tokens=answer.n_prompt,
            left_s=self.prefill_costs.seconds(answer.n_prefilled, answer.n_prompt),
            n_cached_tokens=answer.n_cached,
            n_loaded_tokens=answer.n_loaded,
            spent_s=answer.stats.wall_s,
            pieces=scored,
        )
