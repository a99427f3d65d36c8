"""How often n-gram matches predict the next token: counted for each kind of match.

A *continuation* is a token that followed an earlier occurrence of the last tokens. How likely it is
to come next depends on its `Evidence`. For each evidence, `NgramCounts` counts in all texts how
often such continuations came next, starting from a prior. `TextChances` adds how much the current
text deviates from these rates, since an edit repeats itself and a poem does not.

Continuations are counted at every token of the answer, whether they were drafted or not. So the
rates are not biased towards what a policy chose to draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

#: Where a continuation was found: in the answer itself, in its prompt, in earlier texts
#: (`--lookup-store`), in files (`--lookup-file`), or in phrases that many answers share.
Place: TypeAlias = Literal["answer", "prompt", "earlier", "file", "phrase"]
#: Longer matches count as matches of this length.
LONGEST = 6
#: Continuations that followed more often count as if they had followed this many times.
MOST_OFTEN = 3
#: The prior rate of each evidence counts as this many continuations.
_N_PRIOR = 30.0
#: Each new count of an evidence multiplies its earlier ones by this factor, so that about 1500 are
#: remembered.
_DECAY = 1.0 - 1.0 / 1500.0
#: The same for the deviation of a text: about 150 continuations are remembered.
_TEXT_DECAY = 1.0 - 1.0 / 150.0
#: A text starts with this many hits...
_TEXT_HITS = 4.0
#: ...out of this many expected ones: repetitive answers dominate the average rates, so most texts
#: start below them.
_TEXT_EXPECTED = 8.0
#: Chances stay at least this far from 0 and from 1.
_MIN_CHANCE = 0.002

#: The prior rate of each evidence: by place and unanimity, then one row for each length from 1 to
#: `LONGEST`, with the rates for tokens that followed once, twice, and three or more times. Earlier
#: texts and files count as prompts. The rates were counted in a 1.5B model's answers to Spec-Bench
#: questions, those of phrases also in a 135M model's.
_PRIOR: dict[tuple[Place, bool], tuple[tuple[float, float, float], ...]] = {
    ("answer", True): (
        (0.27, 0.38, 0.69),
        (0.45, 0.58, 0.84),
        (0.56, 0.73, 0.78),
        (0.57, 0.71, 0.65),
        (0.61, 0.80, 0.74),
        (0.71, 0.70, 0.73),
    ),
    ("answer", False): (
        (0.12, 0.20, 0.27),
        (0.15, 0.24, 0.40),
        (0.23, 0.30, 0.24),
        (0.19, 0.40, 0.34),
        (0.17, 0.13, 0.19),
        (0.13, 0.28, 0.19),
    ),
    ("prompt", True): (
        (0.33, 0.73, 0.78),
        (0.65, 0.75, 0.92),
        (0.72, 0.81, 0.90),
        (0.79, 0.85, 0.82),
        (0.78, 0.91, 0.81),
        (0.92, 0.97, 0.93),
    ),
    ("prompt", False): (
        (0.07, 0.06, 0.16),
        (0.15, 0.22, 0.43),
        (0.19, 0.27, 0.34),
        (0.21, 0.32, 0.39),
        (0.24, 0.29, 0.35),
        (0.25, 0.20, 0.28),
    ),
    ("phrase", True): (
        (0.14, 0.13, 0.20),
        (0.31, 0.31, 0.60),
        (0.25, 0.40, 0.70),
        (0.30, 0.70, 0.80),
        (0.70, 0.75, 0.80),
        (0.85, 0.85, 0.85),
    ),
    ("phrase", False): (
        (0.06, 0.05, 0.08),
        (0.05, 0.10, 0.20),
        (0.08, 0.11, 0.20),
        (0.18, 0.20, 0.25),
        (0.20, 0.20, 0.30),
        (0.20, 0.25, 0.40),
    ),
}
#: Whose priors the continuations in other places have.
_PRIORS_OF: dict[Place, Place] = {"earlier": "prompt", "file": "prompt"}


class Evidence(NamedTuple):
    """What is known about a continuation before the next token is."""

    #: Where it was found last.
    place: Place
    #: The number of last tokens that match, from 1 to `LONGEST`.
    length: int
    #: How many times it followed them, from 1 to `MOST_OFTEN`.
    n_followed: int
    #: Whether it is the only token that ever followed them.
    is_unanimous: bool

    @classmethod
    def of(
        cls,
        place: Place,
        length: int,
        n_followed: int,
        n_occurrences: int,
    ) -> Evidence:
        """Return the evidence for a token that followed `n_followed` of all occurrences."""
        return cls(
            place,
            min(length, LONGEST),
            min(n_followed, MOST_OFTEN),
            n_followed == n_occurrences,
        )

    @property
    def prior(self) -> float:
        """The rate at which such continuations come next, before any are counted."""
        place = _PRIORS_OF.get(self.place, self.place)
        return _PRIOR[place, self.is_unanimous][self.length - 1][self.n_followed - 1]


@dataclass(slots=True)
class _Count:
    """The continuations with one kind of evidence."""

    #: How many continuations were counted. Earlier ones count less and less (`_DECAY`).
    n_tries: float = 0.0
    #: How many of them came next.
    n_hits: float = 0.0


class NgramCounts:
    """The counts of all texts, by evidence."""

    def __init__(self) -> None:
        self._counts: dict[Evidence, _Count] = {}

    def __bool__(self) -> bool:
        """Return whether anything was counted."""
        return bool(self._counts)

    def rate(self, evidence: Evidence) -> float:
        """Return the share of continuations with this evidence that came next."""
        prior = evidence.prior
        count = self._counts.get(evidence)
        if count is None:
            return prior
        return (_N_PRIOR * prior + count.n_hits) / (_N_PRIOR + count.n_tries)

    def add(self, evidence: Evidence, *, came_next: bool) -> None:
        """Count a continuation."""
        count = self._counts.setdefault(evidence, _Count())
        count.n_tries = count.n_tries * _DECAY + 1.0
        count.n_hits *= _DECAY
        if came_next:
            count.n_hits += 1.0

    def entries(self) -> Iterator[tuple[Evidence, float, float]]:
        """Yield each evidence with its numbers of tries and of hits, for `restore`."""
        for evidence, count in self._counts.items():
            yield evidence, count.n_tries, count.n_hits

    @classmethod
    def restore(cls, entries: Iterable[tuple[Evidence, float, float]]) -> NgramCounts:
        """Return counts with these entries."""
        counts = cls()
        for evidence, n_tries, n_hits in entries:
            counts._counts[evidence] = _Count(n_tries, min(n_hits, n_tries))
        return counts


class TextChances:
    """How likely continuations are to come next in one text.

    The odds that `counts` give are multiplied by one number: the hits in this text, divided by the
    hits that were expected of the same continuations.
    """

    def __init__(self, counts: NgramCounts) -> None:
        self._counts = counts
        self._n_hits = 0.0
        self._n_expected = 0.0

    def chance(self, evidence: Evidence) -> float:
        """Return the probability that a continuation with this evidence comes next."""
        rate = self._counts.rate(evidence)
        deviation = (self._n_hits + _TEXT_HITS) / (self._n_expected + _TEXT_EXPECTED)
        odds = rate / (1.0 - rate) * deviation
        chance = odds / (1.0 + odds)
        return min(1.0 - _MIN_CHANCE, max(_MIN_CHANCE, chance))

    def learn(self, evidence: Evidence, *, came_next: bool) -> None:
        """Learn whether a continuation came next."""
        self._n_expected = self._n_expected * _TEXT_DECAY + self._counts.rate(evidence)
        self._n_hits *= _TEXT_DECAY
        if came_next:
            self._n_hits += 1.0
        self._counts.add(evidence, came_next=came_next)
