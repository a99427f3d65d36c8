"""The places of an engine: each is a part of its caches, with the answer that is generated there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from specgen.backend.base import Backend
from specgen.engine.answer import Answer
from specgen.engine.generation import Generation
from specgen.engine.slots import Part, n_common
from specgen.errors import SpecgenError


@dataclass(frozen=True, slots=True)
class SlotState:
    """What a slot of an engine is doing: the answer's index (None: the slot is free), the number of
    tokens in its prompt, how many of these the cache held before (all once the prompt is read), and the
    number of tokens in the answer so far."""

    number: int
    answer: int | None = None
    n_prompt: int = 0
    n_read: int = 0
    n_answer: int = 0


@dataclass(slots=True)
class Place:
    """A part of the caches, and the answer that is generated there."""

    part: Part
    answer: Answer | None = None
    #: None while the place is free, and until the answer's prefix and drafter are ready.
    generation: Generation | None = None
    #: The number of the last answer that was generated there; -1 before any.
    used_last: int = -1

    @property
    def is_begun(self) -> bool:
        """Whether the answer has its first token."""
        return self.generation is not None and self.generation.is_started

    @property
    def is_reading(self) -> bool:
        """Whether the answer's prompt is being read."""
        return self.generation is not None and not self.generation.is_started

    @property
    def state(self) -> SlotState:
        """What the place is doing."""
        number, answer, generation = self.part.number, self.answer, self.generation
        if answer is None:
            return SlotState(number)
        n_prompt = len(answer.prompt.tokens)
        if generation is None:
            return SlotState(number, answer.index, n_prompt)
        n_read = n_prompt if generation.is_started else generation.n_cached
        return SlotState(number, answer.index, n_prompt, n_read, generation.n_answer)

    def free(self) -> None:
        """Drop the answer; its text stays in the caches."""
        self.answer = self.generation = None

    def fail(self, error: SpecgenError, backends: Iterable[Backend]) -> None:
        """End the answer with an error. Its part of the caches is cleared: its contents are uncertain."""
        assert self.answer is not None
        self.answer.failure = error
        for backend in backends:
            slot = self.part.slot(backend)
            for sequence in range(slot.first, slot.first + slot.n_branches):
                backend.remove(sequence)
        self.free()


class Places:
    """`n` places, which share all caches in equal parts. One prompt is read at a time."""

    def __init__(self, n: int) -> None:
        self._places = [Place(Part(number, n)) for number in range(n)]

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Place]:
        return iter(self._places)

    @property
    def n_busy(self) -> int:
        """The number of places that have an answer."""
        return sum(place.answer is not None for place in self._places)

    def begun(self) -> list[Place]:
        """The places whose answers have their first token."""
        return [place for place in self._places if place.is_begun]

    def reading(self) -> Place | None:
        """The place whose prompt is being read, if there is one."""
        return next((place for place in self._places if place.is_reading), None)

    def free_place(self, tokens: Sequence[int], target: Backend) -> Place:
        """Return the best free place for a prompt: the one whose text is the longest beginning of the
        prompt, else the one that was not used for longest. (If another place holds a beginning of the
        prompt, its cells are shared.) At least one place must be free."""

        def rank(place: Place) -> tuple[int, int]:
            text = target.text(place.part.slot(target).first)
            n = n_common(text, tokens)
            goes_on = n if n == len(text) or not target.can_branch else 0
            return -goes_on, place.used_last

        return min((place for place in self._places if place.answer is None), key=rank)


__all__ = ["Place", "Places", "SlotState"]
