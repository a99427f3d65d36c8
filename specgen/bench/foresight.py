"""The speed that the same drafts could reach if it were known what will be accepted.

Who knew the answer in advance would ask, at each place, the drafter that pays most there for
just as many tokens as will be accepted, or for none. The quickest way through the answer is a
shortest path, which `best_schedule` finds. What a real policy reaches is to be compared with that: the
rest is what it loses by not knowing.

It is for answers at temperature 0, where what is accepted does not depend on chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrafterForesight:
    """What a drafter could do for an answer of n tokens.

    `accepted[i]` is how many tokens that it drafts behind the first i would be accepted. Seconds
    for the first token of a draft, and for each further one.
    """

    accepted: tuple[int, ...]
    first_s: float
    next_s: float

    def seconds(self, n_drafted: int) -> float:
        return self.first_s + (n_drafted - 1) * self.next_s if n_drafted else 0.0


@dataclass(frozen=True, slots=True)
class ScheduledRound:
    """A round: which drafter (None: none), and how many tokens it drafts, all of them accepted;
    the target adds one."""

    drafter: int | None
    n_drafted: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """A way through an answer, round by round, and the seconds that it takes."""

    seconds: float
    steps: tuple[ScheduledRound, ...]


def best_schedule(
    n_tokens: int, batch_s: Callable[[int], float], drafters: Sequence[DrafterForesight]
) -> Schedule:
    """The quickest way to make `n_tokens` tokens, given what each drafter could do.

    `batch_s` gives the target's seconds for a batch of so many rows. A round in which k tokens
    are drafted has k + 1 rows and makes k + 1 tokens. Of equally quick ways it is the one with
    the shortest drafts.
    """
    longest = max((max(drafter.accepted, default=0) for drafter in drafters), default=0)
    rows_s = [batch_s(k + 1) for k in range(min(longest, max(0, n_tokens - 1)) + 1)]
    # Seconds from each place to the end, from the end on.
    rest_s = [math.inf] * n_tokens + [0.0]
    steps = [ScheduledRound(None, 0)] * n_tokens
    for place in reversed(range(n_tokens)):
        rest_s[place] = rows_s[0] + rest_s[place + 1]
        for index, drafter in enumerate(drafters):
            for k in range(1, min(drafter.accepted[place], n_tokens - place - 1) + 1):
                seconds = drafter.seconds(k) + rows_s[k] + rest_s[place + k + 1]
                if seconds < rest_s[place]:
                    rest_s[place], steps[place] = seconds, ScheduledRound(index, k)
    way: list[ScheduledRound] = []
    place = 0
    while place < n_tokens:
        way.append(steps[place])
        place += steps[place].n_drafted + 1
    return Schedule(rest_s[0], tuple(way))


def run_lengths(
    n_tokens: int, n_max: int, look: Callable[[int], tuple[int, int]]
) -> tuple[int, ...]:
    """How many tokens a draft model would get right behind each place, `n_max` at most.

    `look(place)` lets it draft behind the first `place` tokens; it tells how many tokens it
    drafted and how many of these are right. Where it errs does not depend on where a draft
    began, so that only the places behind an error, or the end of a draft, are looked at.
    """
    is_right = [False] * n_tokens
    place = 0
    while place < n_tokens:
        n_drafted, n_right = look(place)
        is_right[place : place + n_right] = [True] * n_right
        # What follows on the right ones is wrong, if there was one more.
        place += n_right + 1 if n_right < n_drafted or not n_right else n_right
    lengths = [0] * (n_tokens + 1)
    for place in reversed(range(n_tokens)):
        lengths[place] = min(n_max, lengths[place + 1] + 1) if is_right[place] else 0
    return tuple(lengths[:n_tokens])
