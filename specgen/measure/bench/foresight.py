"""The speed that the same drafts could reach if acceptance were known in advance.

With this knowledge, each round would use the drafter that pays most there, and draft exactly the tokens that
will be accepted, or none. The fastest way through an answer is a shortest path, which `best_schedule` finds.
A real policy is compared with it: the difference is what the policy loses by not knowing. This is for answers
at temperature 0, where acceptance does not depend on chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrafterForesight:
    """The possible drafts of one drafter for an answer of n tokens.

    `accepted[i]` is the number of tokens that would be accepted of a draft after the first i tokens. The
    seconds are for the first token of a draft, and for each further one.
    """

    accepted: tuple[int, ...]
    first_s: float
    next_s: float

    def seconds(self, n_drafted: int) -> float:
        return self.first_s + (n_drafted - 1) * self.next_s if n_drafted else 0.0


@dataclass(frozen=True, slots=True)
class ScheduledRound:
    """A round: the number of its drafter (None: none), and its number of drafted tokens, all of them
    accepted; the target adds one more."""

    drafter: int | None
    n_drafted: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The rounds that make an answer, and the seconds that they take."""

    seconds: float
    steps: tuple[ScheduledRound, ...]


def best_schedule(
    n_tokens: int, batch_s: Callable[[int], float], drafters: Sequence[DrafterForesight]
) -> Schedule:
    """Return the fastest way to make `n_tokens` tokens with these drafters.

    `batch_s` gives the target's seconds for a batch with a number of rows. A round with k drafted tokens has
    k + 1 rows and makes k + 1 tokens. Among equally fast ways it is the one with the shortest drafts.
    """
    longest = max((max(drafter.accepted, default=0) for drafter in drafters), default=0)
    rows_s = [batch_s(k + 1) for k in range(min(longest, max(0, n_tokens - 1)) + 1)]
    # Seconds from each position to the end, computed backwards.
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
    """Return how many tokens a draft model would predict correctly after each position, at most `n_max`.

    `look(place)` drafts after the first `place` tokens and returns the number of drafted tokens and of
    correct ones. Whether a token is predicted does not depend on where its draft began, so `look` is called
    only after an error or the end of a draft.
    """
    is_right = [False] * n_tokens
    place = 0
    while place < n_tokens:
        n_drafted, n_right = look(place)
        is_right[place : place + n_right] = [True] * n_right
        # A wrong token after the correct ones shows that this position is wrong: it is skipped.
        place += n_right + 1 if n_right < n_drafted or not n_right else n_right
    lengths = [0] * (n_tokens + 1)
    for place in reversed(range(n_tokens)):
        lengths[place] = min(n_max, lengths[place + 1] + 1) if is_right[place] else 0
    return tuple(lengths[:n_tokens])
