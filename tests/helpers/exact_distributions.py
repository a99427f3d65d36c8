"""Enumerates all outcomes of a random function, with the probability of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from specgen.options import SamplerOptions
from specgen.system.arrays import Logits
from specgen.text.sampling.chain import Sampler
from specgen.text.sampling.distribution import Distribution


def distribution(logits: Logits, options: SamplerOptions) -> Distribution:
    """The distribution of a chain of samplers for a row of logits, without a history."""
    return Sampler(options).distribution(logits)


class Fate:
    """A random generator that makes the given decisions first, and then always the first choice.

    It records the choices that were possible at each decision, and their probabilities.
    """

    def __init__(self, decided: Sequence[int]) -> None:
        self._decided = decided
        self.taken: list[int] = []
        self.n_ways: list[int] = []
        self.chance = 1.0

    def decide(self, chances: Sequence[float]) -> int:
        place = len(self.taken)
        way = self._decided[place] if place < len(self._decided) else 0
        self.taken.append(way)
        self.n_ways.append(len(chances))
        self.chance *= chances[way]
        return way

    def random(self) -> Coin:
        return Coin(self)


@dataclass
class Coin:
    """A uniform random number. Fate decides whether it is below what it is compared with."""

    fate: Fate
    factor: float = 1.0

    def __mul__(self, factor: float) -> Coin:
        return Coin(self.fate, self.factor * factor)

    def __lt__(self, bound: float) -> bool:
        chance = min(1.0, bound / self.factor)
        return self.fate.decide((chance, 1.0 - chance)) == 0


def all_fates(run: Callable[[Fate], None]) -> Iterator[Fate]:
    """Run a random function in every possible way. Fate decides what is sampled."""
    decided: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Distribution, "sample", _sample)
        while True:
            fate = Fate(decided)
            run(fate)
            yield fate
            decided = fate.taken
            while decided and decided[-1] + 1 == fate.n_ways[len(decided) - 1]:
                decided.pop()
            if not decided:
                return
            decided[-1] += 1


def _sample(self: Distribution, fate: Fate) -> int:
    return int(self.token_ids[fate.decide(self.probs.tolist())])
