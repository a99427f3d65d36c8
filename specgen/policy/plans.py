"""Which tokens of a draft are worth a row of the target's batch, by the chances that they count."""

from __future__ import annotations

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
