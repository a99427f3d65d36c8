"""Slots and the prefix cache: each slot holds a text in all caches, whose longest common prefix a new
prompt reuses."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from specgen.drafters.kind import CacheSlot
from specgen.errors import SpecgenError
from specgen.method.backend import Backend
from specgen.session.request import Request
from specgen.text.prefix import n_common
from specgen.text.sequence import Sequence


@dataclass(slots=True, eq=False)
class Slot(CacheSlot):
    """A slot of all caches, and the request that it serves."""

    #: None while the slot is free.
    request: Request | None = None
    #: None while the slot is free, and until the request's prefix and drafter are ready.
    sequence: Sequence | None = None
    #: The index of the last request that was served there; -1 before any.
    used_last: int = -1

    @property
    def is_decoding(self) -> bool:
        """Whether the answer has its first token."""
        return self.sequence is not None and self.sequence.is_started

    @property
    def is_reading(self) -> bool:
        """Whether the prompt is being prefilled."""
        return self.sequence is not None and not self.sequence.is_started

    @property
    def n_prompt(self) -> int:
        """The number of tokens in the prompt; 0 while the slot is free."""
        request = self.request
        return len(request.prompt.tokens) if request is not None else 0

    @property
    def n_answer(self) -> int:
        """The number of tokens in the answer so far."""
        sequence = self.sequence
        return sequence.n_answer if sequence is not None else 0

    @property
    def n_read(self) -> int:
        """The number of prompt tokens that the cache held before; all once the prefill is done."""
        sequence = self.sequence
        if sequence is None:
            return 0
        return sequence.n_prompt if sequence.is_started else sequence.n_cached

    def free(self) -> None:
        """Drop the request; its text stays in the caches."""
        self.request = self.sequence = None

    def fail(self, error: SpecgenError, backends: Iterable[Backend]) -> None:
        """End the request with an error. Its slot is cleared: the contents are uncertain."""
        assert self.request is not None
        self.request.failure = error
        for backend in backends:
            own = self.branches(backend)
            for sequence in range(own.first, own.first + own.n_branches):
                backend.remove(sequence)
        self.free()


class PrefixCache:
    """The `n` slots of an engine, which share all caches equally."""

    def __init__(self, n: int) -> None:
        self.slots = tuple(Slot(number, n) for number in range(n))

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    @property
    def n_busy(self) -> int:
        """The number of slots that have a request."""
        return sum(slot.request is not None for slot in self.slots)

    def decoding(self) -> list[Slot]:
        """Return the slots whose answers have their first token."""
        return [slot for slot in self.slots if slot.is_decoding]

    def reading(self) -> list[Slot]:
        """Return the slots whose prompts are being prefilled."""
        return [slot for slot in self.slots if slot.is_reading]

    def free_slot(self, tokens: abc.Sequence[int], target: Backend) -> Slot:
        """Return the best free slot for a prompt: the one whose text is the longest prefix of the prompt,
        else the one that was not used for longest. (If another slot holds a prefix of the prompt, its cells
        are shared.) At least one slot must be free."""

        def rank(slot: Slot) -> tuple[int, int]:
            text = target.text(slot.branches(target).first)
            n = n_common(text, tokens)
            goes_on = n if n == len(text) or not target.can_branch else 0
            return -goes_on, slot.used_last

        return min((slot for slot in self.slots if slot.request is None), key=rank)
