"""Which tokens of a draft are worth a row of the target's batch, by the chances that they count."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def best_nodes(
    path_chances: Sequence[float], token_s: float, extra_s: Sequence[float]
) -> tuple[list[int], float]:
    """The nodes of a tree that are worth most together, and what they are worth in seconds.

    The chance that a path is accepted does not grow along it, so the likeliest nodes of any
    number are a tree, and the best tree of that size. `path_chances` have parents before their
    children; `extra_s[n]` is what n nodes cost to verify. Nodes come likeliest first.
    """
    order = sorted(range(len(path_chances)), key=lambda node: -path_chances[node])
    best_n, best_s, gain_s = 0, 0.0, 0.0
    for n, node in enumerate(order[: len(extra_s) - 1], 1):
        gain_s += path_chances[node] * token_s
        if gain_s - extra_s[n] > best_s:
            best_n, best_s = n, gain_s - extra_s[n]
    return order[:best_n], best_s


def best_draws(
    siblings: Sequence[float],
    leaves: Sequence[float],
    mean: float,
    *,
    token_s: float,
    look_s: float,
    extra_s: Sequence[float],
) -> tuple[int, list[int]]:
    """How many more siblings of a token to draw, and from which leaves to go on, at best.

    What is drawn at random is verified whatever it is, so it is decided by what is known before:
    `siblings` are the chances that the second token drawn for a place is accepted, and the third,
    and so on; `leaves` those of nodes beyond which the model was not asked yet. What follows a
    node is accepted with the chance `mean`, what follows that with its square, and costs a look of
    `look_s` seconds. `extra_s[n]` is what n more tokens cost to verify. The likeliest of all these
    are taken, as many as are worth most together.

    Returns the number of siblings, and the indices of the leaves, likeliest first.
    """
    n_room = len(extra_s) - 1
    #: (-chance, source, decodes before it); sources are siblings, then leaves.
    ahead = [(-chance, source, 0) for source, chance in enumerate(siblings)]
    ahead += [(-chance * mean, len(siblings) + n, 1) for n, chance in enumerate(leaves)]
    heapq.heapify(ahead)
    taken: list[tuple[int, int]] = []
    best_n, best_s, gain_s = 0, 0.0, 0.0
    while ahead and len(taken) < n_room:
        minus_chance, source, n_looks = heapq.heappop(ahead)
        taken.append((source, n_looks))
        gain_s += -minus_chance * token_s - (look_s if n_looks else 0.0)
        if gain_s - extra_s[len(taken)] > best_s:
            best_n, best_s = len(taken), gain_s - extra_s[len(taken)]
        heapq.heappush(ahead, (minus_chance * mean, source, n_looks + 1))
    n_siblings, going_on = 0, []
    for source, n_looks in taken[:best_n]:
        if source < len(siblings):
            n_siblings += n_looks == 0
        elif n_looks == 1:
            going_on.append(source - len(siblings))
    return n_siblings, going_on
