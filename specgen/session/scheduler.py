"""Which request an engine serves next, in which slot, and which prompt is prefilled next."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass

from specgen.errors import BackendError, SpecgenError
from specgen.llama import LlamaBackend
from specgen.method.answer_loop import N_PREFILL_ALONGSIDE
from specgen.method.answer_state import AnswerState
from specgen.session.prompts import Prompt
from specgen.session.request import Request, RequestSettings, Slot
from specgen.text.overlap import common_prefix_length

#: How many waiting requests are considered, if the first ones should wait for another prompt.
_N_CONSIDERED = 16
#: The time of a piece of a prompt, for which a request that comes meanwhile waits.
_PIECE_S = 0.3
#: A request waits for the prefill of another prompt if it can share at least so many more tokens.
_N_WORTH_WAITING = 32


@dataclass(frozen=True, slots=True)
class _ChosenPiece:
    """The piece of a prompt that is prefilled, as it was before."""

    running: AnswerState
    #: How many tokens were prefilled before, and for how long.
    n_before: int
    prompt_s: float
    #: Whether an older prompt waits meanwhile.
    overtakes: bool


class Scheduler:
    """The requests of an engine: those that wait, and those that have one of its slots.

    Any thread may add and drop requests; all else is for the thread that steps the engine.
    """

    def __init__(self, n_slots: int, target: LlamaBackend) -> None:
        #: Equal parts of all caches.
        self.slots = tuple(Slot(number, n_slots) for number in range(n_slots))
        self._target = target
        #: Held while the queue changes.
        self._lock = threading.Lock()
        self._waiting: deque[Request] = deque()
        #: How many requests were added so far.
        self._n_added = 0
        self._is_closed = False
        #: The piece that was chosen last; None once it has been taken into account.
        self._chosen: _ChosenPiece | None = None
        #: Tokens of other prompts that were prefilled while the oldest one waited.
        self._n_overtaken = 0
        #: The seconds of a token in the last piece.
        self._token_s = 0.0

    # --- the requests -----------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or is served."""
        return not self._waiting and not self.busy

    @property
    def busy(self) -> list[Request]:
        """The requests that have a slot."""
        return [slot.request for slot in self.slots if slot.request is not None]

    @property
    def prefilling(self) -> list[Request]:
        """The requests that still need prefill."""
        return [request for request in self.busy if request.state == "prefill"]

    @property
    def decoding(self) -> list[Request]:
        """The requests that have an answer to continue."""
        return [request for request in self.busy if request.state == "decoding"]

    def add(
        self,
        prompt: Prompt,
        settings: RequestSettings,
        seed: int,
        *,
        drafts: bool,
    ) -> Request:
        """Queue a request. Raise `BackendError` after `close`."""
        with self._lock:
            if self._is_closed:
                raise BackendError("the engine is closed")
            request = Request(self._n_added, prompt, settings, seed, drafts)
            self._n_added += 1
            self._waiting.append(request)
        return request

    def drop(self, request: Request) -> bool:
        """Remove a request from the queue, and return whether it was there."""
        with self._lock:
            if request not in self._waiting:
                return False
            self._waiting.remove(request)
            return True

    def put_back(self, request: Request) -> None:
        """Let a request that could not begin wait again, before all others."""
        with self._lock:
            self._waiting.appendleft(request)

    def close(self, error: SpecgenError) -> None:
        """End the requests that are not done with an error, and take no more."""
        with self._lock:
            self._is_closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
        for request in (*waiting, *self.busy):
            if request.state != "done":
                request.failure = error
        for slot in self.slots:
            slot.request = None

    # --- which request begins ---------------------------------------------------------------------

    def take_next(self) -> Request | None:
        """Take the next request from the queue, and give it a free slot; None if none may begin.

        A request waits while a prompt with the same prefix is prefilled, to share its cells.
        """
        free = [slot for slot in self.slots if slot.request is None]
        if not free:
            return None
        request = self._take_from_queue()
        if request is None:
            return None

        def rank(slot: Slot) -> tuple[int, int]:
            """Rank the longest usable prefix first, then the least recently used slot."""
            text = self._target.text(slot.branches(self._target).first)
            n_shared = common_prefix_length(text, request.prompt.tokens)
            # A cell cache shares with any slot, so this one's text is better left to others unless
            # the prompt continues it.
            is_usable = n_shared == len(text) or self._target.rollback != "cells"
            return -n_shared if is_usable else 0, slot.used_last

        request.slot = min(free, key=rank)
        request.slot.used_last = request.index
        return request

    def _take_from_queue(self) -> Request | None:
        others = self.prefilling if self._target.rollback == "cells" else []
        with self._lock:
            for request in itertools.islice(self._waiting, _N_CONSIDERED):
                if not any(self._should_wait_for(request, other) for other in others):
                    self._waiting.remove(request)
                    return request
        return None

    def _should_wait_for(self, request: Request, other: Request) -> bool:
        """Return whether a request can share many more tokens once another prompt is prefilled."""
        n_shared = common_prefix_length(request.prompt.tokens, other.prompt.tokens)
        return n_shared > self._n_held(other) + _N_WORTH_WAITING

    # --- which prompt is prefilled ----------------------------------------------------------------

    def next_prefill(self) -> Request | None:
        """Return the request whose prompt is prefilled next; None if there is none.

        It is the one with the fewest tokens left, so that a short prompt does not wait for a long
        one. But after a batch of tokens of others it is the oldest, so that it does not wait
        forever.
        """
        self._learn_from_last_piece()
        prefilling = self.prefilling
        if not prefilling:
            return None
        oldest = min(prefilling, key=lambda request: request.index)
        if self._n_overtaken >= self._target.n_batch:
            chosen = oldest
        else:

            def rank(request: Request) -> tuple[int, int]:
                return len(request.prompt.tokens) - self._n_held(request), request.index

            chosen = min(prefilling, key=rank)
        self._chosen = _ChosenPiece(
            running=chosen.running,
            n_before=self._n_held(chosen),
            prompt_s=chosen.running.stats.prompt_s,
            overtakes=chosen is not oldest,
        )
        return chosen

    def _learn_from_last_piece(self) -> None:
        """Update the speed of prefill, and how long the oldest prompt has been waiting."""
        chosen = self._chosen
        self._chosen = None
        if chosen is None:
            return
        n = chosen.running.n_prefilled - chosen.n_before
        if n <= 0:
            return
        self._token_s = (chosen.running.stats.prompt_s - chosen.prompt_s) / n
        if chosen.overtakes:
            self._n_overtaken += n
        else:
            self._n_overtaken = max(0, self._n_overtaken - n)

    def can_prefill_alongside(self, prefilling: Request) -> bool:
        """Return whether a piece of a prompt can be decoded in the batch of a round.

        That needs a model in which a row has the same logits in any batch, and a cache of cells;
        and no rows of hidden states may be wanted.
        """
        decoding = self.decoding
        return (
            bool(decoding)
            and self._target.model.has_equal_rows
            and self._target.rollback == "cells"
            and not prefilling.is_cancelled
            and not prefilling.settings.generation.prompt_logprobs
            and all(each.running.hidden_states is None for each in (*decoding, prefilling))
        )

    def n_piece(self) -> int | None:
        """Return the most tokens of a prompt that are decoded at once; None for a whole batch.

        If other requests may come, a piece takes about `_PIECE_S`. But unless a row has the same
        logits in any batch, the pieces must be those of an answer alone.
        """
        if len(self.slots) == 1 or not self._target.model.has_equal_rows:
            return None
        if self.decoding or not self._token_s:
            return N_PREFILL_ALONGSIDE
        return max(N_PREFILL_ALONGSIDE, int(_PIECE_S / self._token_s))

    def _n_held(self, request: Request) -> int:
        """Return how many tokens the cache holds of a request that is served."""
        return self._target.length(request.running.slot.first)
