"""Decide which request an engine serves next, in which slot, and which prompt it prefills next."""

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

#: The number of waiting requests that are considered, if the first ones should keep waiting.
_N_CONSIDERED = 16
#: The time that a chunk of a prompt should take. A request that arrives meanwhile has to wait.
_CHUNK_S = 0.3
#: A request waits for the prefill of another prompt if it can then share more than this many
#: additional tokens.
_N_WORTH_WAITING = 32


@dataclass(frozen=True, slots=True)
class _ChosenChunk:
    """The state of a prompt just before a chunk of it is prefilled."""

    #: The answer whose prompt is prefilled.
    running: AnswerState
    #: The number of tokens that were prefilled already.
    n_before: int
    #: The seconds that their prefill took.
    prompt_s: float
    #: Whether an older prompt has to wait for this one.
    overtakes: bool


@dataclass(frozen=True, slots=True)
class _SlotUse:
    """What it would mean for the text of a free slot if a request took the slot."""

    #: The number of tokens of the slot's conversation if the request continues it, else 0.
    n_continued: int
    #: The value of the text that would be dropped: the number of its tokens, and the slot's age.
    value: int
    #: The index of the last request that was served in the slot.
    used_last: int

    @property
    def rank(self) -> tuple[int, int, int]:
        """The lowest is best: a conversation that goes on, or else the least valuable text.

        A cache of cells can share the prefix of a prompt with any slot. So a long prefix in common
        is no reason to take a slot: this would only destroy the rest of its text.
        """
        return -self.n_continued, self.value, self.used_last


class Scheduler:
    """The requests of an engine: those that wait, and those that have a slot.

    Any thread may add and drop requests. Everything else is for the thread that steps the engine.

    Args:
        n_slots: The maximum number of requests that are served at once.
        target: The target's context.
    """

    def __init__(self, n_slots: int, target: LlamaBackend) -> None:
        #: Equal parts of all caches.
        self.slots = tuple(Slot(number, n_slots) for number in range(n_slots))
        self._target = target
        #: Held while the queue changes. Reentrant, because the garbage collector may interrupt a
        #: change at any point to close the iterator of another answer, which cancels that answer.
        self._lock = threading.RLock()
        self._waiting: deque[Request] = deque()
        #: The number of requests that were added so far.
        self._n_added = 0
        self._is_closed = False
        #: The chunk that was chosen last; None once its figures have been used.
        self._chosen: _ChosenChunk | None = None
        #: The number of tokens of other prompts that were prefilled while the oldest prompt waited.
        self._n_overtaken = 0
        #: Seconds per token of the last chunk; 0 before the first one.
        self._token_s = 0.0
        #: The value of the most valuable text that was dropped so far (`_SlotUse.value`).
        self._age = 0

    # --- the requests -----------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request is waiting or being served."""
        return not self._waiting and not self.busy

    @property
    def busy(self) -> list[Request]:
        """The requests that are being served: each has a slot."""
        return [slot.request for slot in self.slots if slot.request is not None]

    @property
    def prefilling(self) -> list[Request]:
        """The requests whose prompts are not completely prefilled."""
        return [request for request in self.busy if request.state == "prefill"]

    @property
    def decoding(self) -> list[Request]:
        """The requests whose prompts are prefilled, so that their answers are being decoded."""
        return [request for request in self.busy if request.state == "decoding"]

    def add(
        self,
        prompt: Prompt,
        settings: RequestSettings,
        seed: int,
        *,
        drafts: bool,
    ) -> Request:
        """Append a request to the queue.

        Raises:
            BackendError: If the scheduler is closed.
        """
        with self._lock:
            if self._is_closed:
                raise BackendError("the engine is closed")
            request = Request(self._n_added, prompt, settings, seed, drafts)
            self._n_added += 1
            self._waiting.append(request)
        return request

    def has(self, request: Request) -> bool:
        """Return whether a request is waiting here, or being served."""
        with self._lock:
            return request in self._waiting or request in self.busy

    def drop(self, request: Request) -> bool:
        """Remove a request from the queue, and return whether it was there."""
        with self._lock:
            if request not in self._waiting:
                return False
            self._waiting.remove(request)
            return True

    def put_back(self, request: Request) -> None:
        """Return a request that could not be started to the front of the queue."""
        with self._lock:
            self._waiting.appendleft(request)

    def close(self, error: SpecgenError) -> None:
        """Accept no more requests, and let all unfinished ones fail with an error."""
        with self._lock:
            self._is_closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
        for request in (*waiting, *self.busy):
            if request.state != "done":
                request.failure = error
        for slot in self.slots:
            slot.request = None

    # --- which request starts ---------------------------------------------------------------------

    def take_next(self) -> Request | None:
        """Take the next request from the queue, and give it a free slot.

        Returns:
            The request; None if no slot is free, or if no request may start now.
        """
        free = [slot for slot in self.slots if slot.request is None]
        if not free:
            return None
        request = self._take_from_queue()
        if request is None:
            return None
        uses = {slot: self._use_of(slot, request.prompt) for slot in free}
        chosen = min(free, key=lambda slot: uses[slot].rank)
        # As in GreedyDual (Young, 1994): any text that is used from now on is worth more than the
        # one that is dropped here, so even a long text is dropped in the end if it stays unused.
        self._age = max(self._age, uses[chosen].value)
        chosen.age = self._age
        chosen.used_last = request.index
        chosen.subject = request.prompt.subject
        request.slot = chosen
        return request

    def _use_of(self, slot: Slot, prompt: Prompt) -> _SlotUse:
        """Return what it would mean for the text of a free slot if a prompt took the slot."""
        first = slot.branches(self._target).first
        text = self._target.text(first)
        n_shared = common_prefix_length(text, prompt.tokens)
        continues_text = n_shared == len(text)
        # A client or a template may have changed the last turns of the conversation.
        is_same_subject = bool(prompt.subject) and slot.subject == prompt.subject
        continues_conversation = is_same_subject and 2 * n_shared > len(text)

        n_lost = len(text) - n_shared
        if self._target.rollback != "cells" and not continues_text:
            # Without cells to share, only a prefix in its own slot can be reused, up to a saved
            # state. That is a reason to take the slot, unless more of its text is lost than reused.
            n_reused = self._target.n_restorable(first, n_shared)
            n_lost = len(text) - 2 * n_reused
            continues_conversation = continues_conversation and n_reused > 0
        return _SlotUse(
            n_continued=n_shared if continues_text or continues_conversation else 0,
            value=slot.age + n_lost,
            used_last=slot.used_last,
        )

    def _take_from_queue(self) -> Request | None:
        """Take the first request that need not wait for a prompt with the same prefix."""
        # Only a cache of cells can share the prefix of a prompt in another slot.
        others = self.prefilling if self._target.rollback == "cells" else []
        with self._lock:
            for request in list(itertools.islice(self._waiting, _N_CONSIDERED)):
                must_wait = any(self._should_wait_for(request, other) for other in others)
                if not must_wait and self.drop(request):
                    return request
        return None

    def _should_wait_for(self, request: Request, other: Request) -> bool:
        """Return whether a request could share many more tokens once another prompt is prefilled.

        Args:
            request: The waiting request.
            other: A request whose prompt is being prefilled.
        """
        n_shared = common_prefix_length(request.prompt.tokens, other.prompt.tokens)
        return n_shared > self._n_held(other) + _N_WORTH_WAITING

    # --- which prompt is prefilled ----------------------------------------------------------------

    def next_prefill(self) -> Request | None:
        """Choose the request whose prompt is prefilled next; None if there is none.

        The prompt with the fewest tokens left comes first, so that a short prompt does not wait
        for a long one. The oldest prompt comes first if it has been overtaken by a whole batch of
        tokens, so that it does not wait forever.

        The caller has to prefill a chunk of it: the next call measures how long that took.
        """
        self._learn_from_last_chunk()
        prefilling = self.prefilling
        if not prefilling:
            return None
        oldest = min(prefilling, key=lambda request: request.index)
        chosen = oldest
        if self._n_overtaken < self._target.n_batch:
            chosen = min(prefilling, key=lambda request: (self._n_left(request), request.index))
        self._chosen = _ChosenChunk(
            running=chosen.running,
            n_before=self._n_held(chosen),
            prompt_s=chosen.running.stats.prompt_s,
            overtakes=chosen is not oldest,
        )
        return chosen

    def _learn_from_last_chunk(self) -> None:
        """Update the speed of prefill, and the number of tokens that overtook the oldest prompt."""
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
        """Return whether a chunk of a prompt can be decoded in the same batch as a round.

        The model has to be batch-invariant (a row has the same logits in any batch), and its cache
        must consist of cells. No answer may need hidden states, and the prompt's log-probabilities
        may not be wanted.
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

    def n_chunk_max(self) -> int | None:
        """Return the maximum number of tokens of the next chunk of a prompt; None for a full batch.

        With several slots, other requests may arrive, so a chunk takes only about `_CHUNK_S`, or
        less while other answers are being decoded.
        """
        # If the model is not batch-invariant, smaller chunks would change the logits, and thus the
        # answer would depend on other requests.
        if len(self.slots) == 1 or not self._target.model.has_equal_rows:
            return None
        # Each chunk, however small, reads the weights of a streamed model from disk.
        if self._target.model.is_streamed:
            return None
        if self.decoding or not self._token_s:
            return N_PREFILL_ALONGSIDE
        return max(N_PREFILL_ALONGSIDE, int(_CHUNK_S / self._token_s))

    def _n_left(self, request: Request) -> int:
        """Return the number of tokens of a prompt that are still to be prefilled."""
        return len(request.prompt.tokens) - self._n_held(request)

    def _n_held(self, request: Request) -> int:
        """Return the number of tokens of a request, which is being served, in the cache."""
        return self._target.length(request.running.branches.first)
