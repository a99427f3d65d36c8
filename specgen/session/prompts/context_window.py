"""Which turns of a conversation fit into the context."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

#: The share of the context that is reserved for an answer, unless answers are limited to less.
_ANSWER_SHARE = 1 / 4
#: Turns are left out in portions that have at least this share of the context.
_PORTION_SHARE = 1 / 4


def room_for_prompt(n_ctx: int, max_tokens: int) -> int:
    """Return the number of tokens that a prompt may have, so that there is room for an answer.

    Args:
        n_ctx: The size of the context in tokens.
        max_tokens: The maximum number of tokens of the answer; negative for no limit.
    """
    n_reserved = int(n_ctx * _ANSWER_SHARE)
    if max_tokens >= 0:
        n_reserved = min(n_reserved, max_tokens)
    return n_ctx - n_reserved


def turns_to_leave_out(
    n_turns: int,
    n_ctx: int,
    n_room: int,
    n_tokens: Callable[[int], int],
) -> int:
    """Return how many of the oldest turns to leave out, so that a prompt has room.

    If any have to be left out, more are than necessary. Each time their number changes, the other
    turns have to be prefilled again, so it should change rarely. While a conversation grows, whole
    portions of its beginning are left out one after the other.

    Args:
        n_turns: The number of turns. The last one is never left out.
        n_ctx: The size of the context in tokens.
        n_room: The number of tokens that the prompt may have.
        n_tokens: Returns the number of tokens of the prompt without the oldest turns; its argument
            is their number.
    """
    n_whole = n_tokens(0)
    if n_whole <= n_room:
        return 0
    n_portion = max(1, int(n_ctx * _PORTION_SHARE))
    n_goal = n_whole - n_portion * math.ceil((n_whole - n_room) / n_portion)
    # Lengths decrease with the number of turns left out; bisection needs an ascending order, so
    # negate them.
    return bisect_left(range(n_turns - 1), -n_goal, key=lambda n_left_out: -n_tokens(n_left_out))
