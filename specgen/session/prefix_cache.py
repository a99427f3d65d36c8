"""Slots and the prefix cache: each slot holds a text in all caches, whose longest common prefix a new
prompt reuses."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from specgen.drafters.kind import CacheSlot
from specgen.method.backend import Backend
from specgen.session.request import Request
from specgen.text.prefix import n_common
from specgen.text.sequence import Sequence


@dataclass(slots=True, eq=False)
class Slot(CacheSlot):
    """A slot of all caches, and the answer that it serves; None while it is free."""

    answer: Answer | None = None
    #: The index of the last request that was served there; -1 before any.
    used_last: int = -1

    def free(self) -> None:
        """Drop the answer; its text stays in the caches."""
        self.answer = None

    def clear(self, backends: Iterable[Backend]) -> None:
        """Drop the answer and its text, whose state is uncertain after an error."""
        for backend in backends:
            own = self.branches(backend)
            for sequence in range(own.first, own.first + own.n_branches):
                backend.remove(sequence)
        self.free()


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """An answer that is being generated: its request, its sequence, and their slot."""

    slot: Slot
    request: Request
    sequence: Sequence

    @property
    def n_read(self) -> int:
        """The number of prompt tokens that the cache held before; all once the prefill is done."""
        sequence = self.sequence
        return sequence.n_prompt if sequence.is_started else sequence.n_cached


class PrefixCache:
    """The `n` slots of an engine, which share all caches equally."""

    def __init__(self, n: int) -> None:
        self.slots = tuple(Slot(number, n) for number in range(n))

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    def answers(self) -> list[Answer]:
        """Return the answers that are being generated."""
        return [slot.answer for slot in self.slots if slot.answer is not None]

    def decoding(self) -> list[Answer]:
        """Return the answers that have their first token."""
        return [answer for answer in self.answers() if answer.sequence.is_started]

    def reading(self) -> list[Answer]:
        """Return the answers whose prompts are being prefilled."""
        return [answer for answer in self.answers() if not answer.sequence.is_started]

    def free_slot(self, tokens: abc.Sequence[int], target: Backend) -> Slot:
        """Return the best free slot for a prompt: the one whose text is the longest prefix of the prompt,
        else the one that was not used for longest. (If another slot holds a prefix of the prompt, its cells
        are shared.) At least one slot must be free."""

        def rank(slot: Slot) -> tuple[int, int]:
            text = target.text(slot.branches(target).first)
            n = n_common(text, tokens)
            goes_on = n if n == len(text) or target.rollback != "cells" else 0
            return -goes_on, slot.used_last

        return min((slot for slot in self.slots if slot.answer is None), key=rank)
