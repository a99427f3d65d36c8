"""A whole answer in a loop: its prompt is read, in pieces, before the rounds, and it is summed up
after them. (Where it ends: `method/answer_state.py`.)
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
from specgen.method.loop import Loop
from specgen.system.arrays import Hidden, Logits

#: The most tokens of a prompt between two rounds of answers, which wait, or beside one while costs
#: are not known.
N_PREFILL_ALONGSIDE = 32
#: A piece counts half after so many tokens of later ones; what is expected counts as so many
#: tokens.
_N_REMEMBERED, _N_EXPECTED = 8192, 128
#: Behind how many tokens reading one takes twice as long as at the beginning, in models of 1.5B.
_N_DOUBLING = 5000.0
#: Tokens of the shortest answer that is compared with plain decoding.
_SHORTEST_COMPARED = 30


class PrefillCosts:
    """What reading prompts costs. A token takes longer the deeper it is, since attention sees all
    before it: two numbers, fitted to the latest pieces, tell how long. While these were of one
    depth, `_N_DOUBLING` is a guess.
    """

    def __init__(self) -> None:
        #: Fading sums of least squares over tokens: their number, depth and its square, seconds,
        #: seconds by depth.
        self._sums = [0.0] * 5

    def observe(self, start: int, n: int, seconds: float) -> None:
        """Learn from a piece of `n` tokens behind the first `start` ones."""
        if n > 0 and seconds > 0.0:
            depth = (start + n / 2) / _N_DOUBLING
            new = n, n * depth, n * depth**2, seconds, seconds * depth
            kept = 0.5 ** (n / _N_REMEMBERED)
            self._sums = [kept * old + each for old, each in zip(self._sums, new, strict=True)]

    def seconds(self, start: int, end: int) -> float:
        """Return how long reading from one place to another is expected to take; 0 while nothing is
        known.
        """
        n, depth, squares, seconds, moment = self._sums
        if not n or end <= start:
            return 0.0
        flats, mixed = n + _N_EXPECTED, depth - _N_EXPECTED
        growth = flats * moment - mixed * seconds
        growth = max(0.0, growth / (flats * (squares + _N_EXPECTED) - mixed**2))
        flat = max(0.0, (seconds - growth * depth) / n)
        return (end - start) * (flat + growth * (start + end) / 2 / _N_DOUBLING)


class AnswerLoop(Loop):
    """A loop that also reads the prompts of its answers, and sums their answers up."""

    @functools.cached_property
    def reading(self) -> PrefillCosts:
        return PrefillCosts()

    def run(self, answer: AnswerState) -> Iterator[Event]:
        """Generate a whole answer, and yield its events. Raise the error that ends it early."""
        while not answer.is_finished:
            yield from self.round([answer]) if answer.is_started else self.read(answer)
        if answer.failure is not None:
            raise answer.failure

    def decode_alongside(
        self,
        answer: AnswerState,
        costs: CostTable,
        batch: Batch,
        active: Sequence[AnswerState],
        events: list[Event],
    ) -> tuple[Logits, Hidden | None, float]:
        """Decode a round's batch, and in it as much of the prompt of `answer` as the `costs` of
        batches allow: a row has the same logits in any batch.
        """
        n_own, before_s = len(batch), self.target.decode_s
        events += self.begin_prefill(answer, self.clock())
        n_most, n_batch, is_last = N_PREFILL_ALONGSIDE, self.target.n_batch, False
        if costs:  # as long as the round's own rows: running answers keep half of their pace
            sizes, limit_s = range(1, n_batch), 2 * costs.seconds(n_own)
            n_most = bisect.bisect(sizes, limit_s, key=lambda n: costs.seconds(n_own + n))
        n_most = min(n_most, n_batch - n_own)
        if n_most > 0 and not answer.is_finished:
            is_last = self.add_piece(batch, answer, n_most)
        logits, hidden, other_s = self.decode(batch, active, events)
        if (n_all := len(batch)) > n_own:
            own = costs.seconds(n_own) / costs.seconds(n_all) if costs else n_own / n_all
            other_s = (self.target.decode_s - before_s) * (1.0 - min(1.0, own))
            last, started = logits[-1:] if is_last else None, self.clock() - other_s
            try:
                events += self.after_piece(answer, last, other_s, started)
            except BackendError as error:  # the grammar allows no token, or a logit is not a number
                answer.failure = error
        return logits, hidden, other_s

    def read(
        self,
        answer: AnswerState,
        n_most: int | None = None,
        is_unwanted: Callable[[], bool] = lambda: False,
    ) -> list[Event]:
        """Decode a piece of a prompt, of at most `n_most` tokens; after the last one, commit the
        first token. The answer ends in the middle of the decode if it `is_unwanted`.
        """
        if answer.is_finished:
            return []
        started, target_s = self.clock(), self.target.decode_s
        events = self.begin_prefill(answer, started)
        if self._interrupted() and not answer.is_finished:
            events += answer.interrupt(self.now_s)
        logits, scored = None, tuple[Piece, ...]()
        if not answer.is_finished:
            batch, n_batch = Batch(), self.target.n_batch
            is_scored = answer.options.prompt_logprobs
            n_batch = min(n_batch, self.target.n_outputs) if is_scored else n_batch
            if self.target.length(answer.slot.first) in answer.prefill_stops:
                self.target.anchor(answer.slot.first)
            is_last = self.add_piece(batch, answer, min(n_most or n_batch, n_batch))
            if is_scored:
                batch.wants_logits = [True] * len(batch)
            if answer.n_read > 0 and len(batch) > N_PREFILL_ALONGSIDE:  # a state to go back to
                self.target.checkpoint(answer.slot.first)
            self.target.is_unwanted = lambda: self._interrupted() or is_unwanted()
            try:
                rows = self.decode_text(answer, batch)
            except DecodeEndedError:
                return events + answer.interrupt(self.now_s)
            finally:
                self.target.is_unwanted = None
            scored = answer.scored_prompt(batch.positions[0], rows) if is_scored else ()
            logits = rows[-1:] if is_last else None
        target_s = self.target.decode_s - target_s
        return events + self.after_piece(answer, logits, target_s, started, scored)

    def begin_prefill(self, answer: AnswerState, started: float) -> list[Event]:
        """Note when the first piece of a prompt is read, and commit what a grammar forces before
        any logits.
        """
        if answer.prefill_started_s is not None:
            return []
        answer.prefill_started_s = started
        answer.n_cached = answer.n_read = self.target.length(answer.slot.first)
        reading = [self._reading(answer)] if answer.options.reports_reading else []
        events = answer.take_forced(started - self._started_s)
        if events:
            answer.tally.time_to_first_token_s = self.clock() - started
        return [*reading, *events]

    def add_piece(self, batch: Batch, answer: AnswerState, n_most: int) -> bool:
        """Add the next tokens of the text that the cache lacks to a batch. Return whether these are
        the last ones, whose last row wants logits.
        """
        text, first = answer.tokens, answer.slot.first
        start = self.target.length(first)
        n_most = min([n_most, *(stop - start for stop in answer.prefill_stops if stop > start)])
        for offset, token in enumerate(text[start : start + n_most]):
            batch.add(token, start + offset, (first,), False)
        is_last = start + n_most >= len(text)
        batch.wants_logits[-1] = is_last
        return is_last

    def after_piece(
        self,
        answer: AnswerState,
        logits: Logits | None,
        target_s: float,
        started: float,
        scored: tuple[Piece, ...] = (),
    ) -> list[Event]:
        """Record a piece of a prompt, which took `target_s` of the target since `started`; `scored`
        are its tokens, if with log-probabilities. After the last, whose `logits` are float32[1,
        n_vocab], commit the first token.
        """
        tally, n_held = answer.tally, self.target.length(answer.slot.first)
        self.reading.observe(answer.n_read, n_held - answer.n_read, target_s)
        answer.n_read = min(n_held, answer.n_prompt)
        events: list[Event] = []
        if logits is not None and answer.options.max_tokens == 0:
            answer.finish("length")
        elif logits is not None:
            verdict = self.verify(answer, NO_DRAFT, logits)
            events += answer.commit_verdict(NO_DRAFT, verdict, logits, self.now_s)
            answer.is_started = True
        now = self.clock()
        tally.add_prompt(target_s, now - started, len(answer.tokens) - answer.n_prompt)
        if answer.is_started and tally.time_to_first_token_s is None:
            assert answer.prefill_started_s is not None
            tally.time_to_first_token_s = now - answer.prefill_started_s
        is_last = answer.is_started or answer.is_finished
        if is_last and not (scored or answer.options.reports_reading):
            return events
        return [self._reading(answer, scored), *events]

    def _reading(self, answer: AnswerState, scored: tuple[Piece, ...] = ()) -> ReadingEvent:
        return ReadingEvent(
            answer.index,
            self.now_s,
            answer.n_read,
            answer.n_prompt,
            self.reading.seconds(answer.n_read, answer.n_prompt),
            answer.n_cached,
            answer.n_loaded,
            answer.tally.wall_s,
            scored,
        )

    def finish(self, answer: AnswerState, costs: CostTable) -> FinishedEvent:
        """Return the summary of a finished answer. One that had drafts, and is not so short that
        noise would decide, is compared with plain decoding by the `costs` of the target's batches.
        """
        is_compared = answer.tally.n_drafted and answer.n_answer >= _SHORTEST_COMPARED
        token_s = answer.tally.priced_token_s(costs) if is_compared else None
        return answer.finished_event(self.now_s, token_s)
