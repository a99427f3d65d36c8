"""What an engine does next: which request begins, in which slot, which prompt is read, and how much
of it.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque

from specgen.errors import BackendError, SpecgenError
from specgen.llama import LlamaBackend
from specgen.method.answer_loop import N_PREFILL_ALONGSIDE
from specgen.method.answer_state import AnswerState
from specgen.session.prompts import Prompt
from specgen.session.request import Request, RequestSettings, Slot
from specgen.text.overlap import common_prefix_length

#: Waiting requests among which one is sought that need not wait for another prompt.
_N_CONSIDERED = 16
#: The time of a piece of a prompt, for which a request that comes meanwhile waits.
_PIECE_S = 0.3
#: A prompt waits for another one if it can share at least so many more tokens of it.
_N_WORTH_WAITING = 32


class Scheduler:
    """The requests of an engine: those that wait, and those that have one of the `n_slots` slots of
    all caches. Any thread may add and drop requests; all else is for the thread that steps the
    engine.
    """

    def __init__(self, n_slots: int, target: LlamaBackend) -> None:
        self.slots = tuple(Slot(number, n_slots) for number in range(n_slots))
        self._target = target
        #: Held while the queue changes.
        self._lock = threading.Lock()
        self._waiting: deque[Request] = deque()
        self._n_added = 0
        #: What was chosen to be read last: its tokens and seconds before, and whether an older
        #: prompt waited.
        self._chosen: tuple[AnswerState, int, float, bool] | None = None
        #: Tokens that were read of others while the oldest prompt waited; the seconds of a token in
        #: the last piece.
        self._n_overtaken, self._token_s = 0, 0.0
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self.busy

    @property
    def busy(self) -> list[Request]:
        return [slot.request for slot in self.slots if slot.request is not None]

    @property
    def reading(self) -> list[Request]:
        return [request for request in self.busy if request.state == "reading"]

    @property
    def decoding(self) -> list[Request]:
        return [request for request in self.busy if request.state == "decoding"]

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
        """End the requests that are not done with an error, and take no more."""
        with self._lock:
            self._is_closed = True
            waiting, self._waiting = list(self._waiting), deque()
        for request in (*waiting, *self.busy):
            if request.state != "done":
                request.failure = error
        for slot in self.slots:
            slot.request = None

    def take_next(self) -> Request | None:
        """Take the next request from the queue, and give it the free slot with the longest prefix
        of its prompt, else the least recently used. A request waits while a prompt with the same
        prefix is read, to share its cells.
        """
        if len(self.busy) == len(self.slots):
            return None
        reading = self.reading if self._target.rollback == "cells" else []
        with self._lock:
            for request in itertools.islice(self._waiting, _N_CONSIDERED):
                if not any(self._would_share_more(request, other) for other in reading):
                    self._waiting.remove(request)
                    break
            else:
                return None

        def rank(slot: Slot) -> tuple[int, int]:
            text = self._target.text(slot.branches(self._target).first)
            n = common_prefix_length(text, request.prompt.tokens)
            goes_on = n == len(text) or self._target.rollback != "cells"
            return -n if goes_on else 0, slot.used_last

        request.slot = min((slot for slot in self.slots if slot.request is None), key=rank)
        request.slot.used_last = request.index
        return request

    def drop(self, request: Request) -> bool:
        """Take a request from the queue, and return whether it was there. Any thread may do that."""
        with self._lock:
            if is_waiting := request in self._waiting:
                self._waiting.remove(request)
        return is_waiting

    def put_back(self, request: Request) -> None:
        """Let a request that could not begin wait again, before all others."""
        with self._lock:
            self._waiting.appendleft(request)

    def next_prefill(self) -> Request | None:
        """Return the request whose prompt is read next: the one with the fewest tokens left, so
        that a short one does not wait for a long one; after a batch of tokens of others the oldest,
        so that many do not keep it waiting.
        """
        if self._chosen is not None:  # learn from the piece that was read last
            (running, n_before, before_s, overtook), self._chosen = self._chosen, None
            if (n := running.n_prefilled - n_before) > 0:
                self._token_s = (running.stats.prompt_s - before_s) / n
                self._n_overtaken = max(0, self._n_overtaken + (n if overtook else -n))
        is_oldest_due = self._n_overtaken >= self._target.n_batch

        def rank(request: Request) -> tuple[int, int]:
            n_left = len(request.prompt.tokens) - self._n_read(request)
            return 0 if is_oldest_due else n_left, request.index

        reading = self.reading
        if not reading:
            return None
        request = min(reading, key=rank)
        overtakes = request.index > min(other.index for other in reading)
        running = request.running
        self._chosen = running, self._n_read(request), running.stats.prompt_s, overtakes
        return request

    def can_prefill_alongside(self, reading: Request) -> bool:
        """Return whether a piece of a prompt can be read in the batch of a round: a row must have
        the same logits in any batch, and no rows of recurrent states or hidden states may be
        wanted.
        """
        decoding = self.decoding
        return (
            bool(decoding)
            and self._target.model.has_equal_rows
            and self._target.rollback == "cells"
            and not (reading.is_cancelled or reading.settings.generation.prompt_logprobs)
            and all(request.running.hidden_states is None for request in (*decoding, reading))
        )

    def n_piece(self) -> int | None:
        """Return the most tokens of a prompt that are read at once; None for a whole batch. If
        others may come, they take `_PIECE_S`. Unless a row has the same logits in any batch, the
        pieces must be those of an answer alone.
        """
        if len(self.slots) == 1 or not self._target.model.has_equal_rows:
            return None
        n = N_PREFILL_ALONGSIDE
        if self._token_s and not self.decoding:
            n = max(n, int(_PIECE_S / self._token_s))
        return n

    def _would_share_more(self, request: Request, reading: Request) -> bool:
        n_shared = common_prefix_length(request.prompt.tokens, reading.prompt.tokens)
        return n_shared > self._n_read(reading) + _N_WORTH_WAITING

    def _n_read(self, request: Request) -> int:
        return self._target.length(request.running.slot.first)
