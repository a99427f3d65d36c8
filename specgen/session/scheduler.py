"""What an engine does next: which request begins, which prompt is read, and how much of it."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from specgen.errors import BackendError, SpecgenError
from specgen.events import Event
from specgen.llama import LlamaBackend
from specgen.method.backend import Batch
from specgen.method.tables import CostTable
from specgen.session.answer_loop import AnswerLoop
from specgen.session.prefix_cache import Answer, PrefixCache
from specgen.session.prompts import Prompt
from specgen.session.request import Request, RequestSettings
from specgen.system.arrays import Logits
from specgen.text.prefix import n_common
from specgen.text.sequence import Sequence

#: Waiting requests among which one is sought that need not wait for another prompt.
_N_CONSIDERED = 16
#: A prompt waits for another one if it can share at least so many more tokens of it.
_N_WORTH_WAITING = 32
#: The most tokens of a prompt that are read between two rounds of other answers, which wait for them, or
#: beside a round while costs are not known.
N_READ_BESIDE = 32


class Scheduler:
    """Queues requests for the `slots` of an engine. `costs` returns the target's cost table. Requests may be added from
    any thread; all else is for the thread that steps the engine."""

    def __init__(
        self, slots: PrefixCache, target: LlamaBackend, costs: Callable[[], CostTable]
    ) -> None:
        self._slots = slots
        self._target = target
        self._costs = costs
        #: Held while the queue changes.
        self._lock = threading.Lock()
        self._waiting: deque[Request] = deque()
        self._n_added = 0
        self._reads_oldest = False
        self._is_closed = False

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def add(self, prompt: Prompt, settings: RequestSettings, seed: int, *, drafts: bool) -> Request:
        """Queue a request. Raise `BackendError` after `close`."""
        with self._lock:
            if self._is_closed:
                raise BackendError("the engine is closed")
            request = Request(self._n_added, prompt, settings, seed, drafts)
            self._n_added += 1
            self._waiting.append(request)
        return request

    def close(self, error: SpecgenError) -> None:
        """End the answers that are not done with an error, and take no more."""
        with self._lock:
            self._is_closed = True
            waiting, self._waiting = list(self._waiting), deque()
        for request in (*waiting, *(answer.request for answer in self._slots.answers())):
            if not request.is_done:
                request.failure = error
        for slot in self._slots:
            slot.free()

    def next_waiting(self) -> Request | None:
        """Take the next request from the queue if a slot is free. A request waits for a prompt with the
        same prefix that is being prefilled: then it shares those cells."""
        if len(self._slots.answers()) == len(self._slots):
            return None
        reading = self._slots.reading() if self._target.rollback == "cells" else []
        with self._lock:
            for request in itertools.islice(self._waiting, _N_CONSIDERED):
                if not any(self._would_share_more(request, answer) for answer in reading):
                    self._waiting.remove(request)
                    return request
        return None

    def put_back(self, request: Request) -> None:
        """Let a request that could not begin wait again, before all others."""
        with self._lock:
            self._waiting.appendleft(request)

    def next_reading(self) -> Answer | None:
        """Return the answer whose prompt is read next. By turns it is the one with the fewest tokens left and
        the oldest one: a short prompt need not wait for a long one, and many short ones do not keep a long
        one waiting."""
        self._reads_oldest = not self._reads_oldest

        def rank(answer: Answer) -> tuple[int, int]:
            n_left = 0
            if not self._reads_oldest:
                n_left = len(answer.request.prompt.tokens) - self._n_read(answer)
            return n_left, answer.request.index

        return min(self._slots.reading(), key=rank, default=None)

    def can_read_beside(self, reading: Answer) -> bool:
        """Return whether a piece of a prompt can be read in the batch of a round: a row must have the same
        logits in any batch, and no rows of recurrent states or hidden states may be wanted."""
        decoding = self._slots.decoding()
        return (
            bool(decoding)
            and self._target.model.has_equal_rows
            and self._target.rollback == "cells"
            and not reading.request.is_cancelled
            and all(answer.sequence.hidden is None for answer in (*decoding, reading))
        )

    def beside(self, reading: Answer, loop: AnswerLoop) -> ChunkedPrefill:
        """Return how a prompt is read in the batch of a round."""
        return ChunkedPrefill(loop, reading.sequence, self._target.n_batch, self._costs())

    def n_piece(self) -> int | None:
        """Return the most tokens of a prompt that are read between two rounds; None for as many as a batch has.
        Unless a row has the same logits in any batch, the pieces must be those of an answer alone."""
        may_be_short = self._slots.decoding() and self._target.model.has_equal_rows
        return N_READ_BESIDE if may_be_short else None

    def _would_share_more(self, request: Request, reading: Answer) -> bool:
        """Return whether a request can share more of a prompt that is being read, once that is read."""
        n_shared = n_common(request.prompt.tokens, reading.request.prompt.tokens)
        return n_shared > self._n_read(reading) + _N_WORTH_WAITING

    def _n_read(self, answer: Answer) -> int:
        return self._target.length(answer.sequence.slot.first)


@dataclass(slots=True)
class ChunkedPrefill:
    """A prompt of which a piece is read in the batch of a round of other sequences, by the `costs` of batches."""

    loop: AnswerLoop
    sequence: Sequence
    n_batch: int
    costs: CostTable
    _is_last: bool = False

    def add_to(self, batch: Batch) -> list[Event]:
        """Add as many tokens as take no longer than the round's own rows, so that running answers keep half of their
        pace."""
        n_own, costs = len(batch), self.costs
        events = self.loop.begin_reading(self.sequence, self.loop.clock())
        n_most = N_READ_BESIDE
        if costs:
            sizes, limit_s = range(1, self.n_batch), 2 * costs.seconds(n_own)
            n_most = bisect.bisect(sizes, limit_s, key=lambda n: costs.seconds(n_own + n))
        n_most = min(n_most, self.n_batch - n_own)
        if n_most > 0 and not self.sequence.is_finished:
            self._is_last = self.loop.add_piece(batch, self.sequence, n_most)
        return events

    def after(
        self, n_own: int, batch: Batch, logits: Logits, target_s: float
    ) -> tuple[float, list[Event]]:
        costs, n_all = self.costs, len(batch)
        own = min(1.0, costs.seconds(n_own) / costs.seconds(n_all)) if costs else n_own / n_all
        read_s = target_s * (1.0 - own)
        last = logits[-1:] if self._is_last else None
        started = self.loop.clock() - read_s
        try:
            return read_s, self.loop.after_chunk(self.sequence, last, read_s, started)
        except BackendError as error:  # the grammar allows no token, or a logit is not a number
            self.sequence.failure = error
            return read_s, []
