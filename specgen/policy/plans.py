"""Which nodes of a draft are worth a row of the target's batch, and beyond which to look next, by
their chances of acceptance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from specgen.core.growing_tree import GrowingTree
from specgen.policy.stopping import StoppingRule

#: A look beyond a second branch, in the same batch as the first, counts with this share of the gain
#: that it would have alone. (In replays of 48 answers this was never slower than chains; 1 was
#: slower by a percent where rows are expensive.)
_ASIDE = 0.5


def best_nodes(
    path_chances: Sequence[float], token_s: float, extra_s: Sequence[float]
) -> tuple[list[int], float]:
    """The nodes of a tree that are worth most together, and what they are worth in seconds.

    The chance that a path is accepted does not grow along it. So the n likeliest nodes always form
    a tree, and it is the best tree of n nodes. `path_chances` lists parents before their children;
    `extra_s[n]` are the seconds to verify n nodes. Nodes are returned likeliest first.
    """
    order = sorted(range(len(path_chances)), key=path_chances.__getitem__, reverse=True)
    best_n, best_s, gain_s = 0, 0.0, 0.0
    for n, node in enumerate(order[: len(extra_s) - 1], 1):
        gain_s += path_chances[node] * token_s
        if gain_s - extra_s[n] > best_s:
            best_n, best_s = n, gain_s - extra_s[n]
    return order[:best_n], best_s


def best_frontier(
    tree: GrowingTree,
    nodes: Sequence[int],
    rule: StoppingRule,
    token_s: float,
    extra_s: Sequence[float],
    *,
    next_s: float,
    seconds: Callable[[int], float],
) -> list[int]:
    """The first of `nodes`, which come likeliest first, that are worth looking beyond in one batch.

    `rule` and `token_s` are for the tree's drafter; `extra_s[n]` are the seconds to verify n of the
    tree's nodes. A look beyond one node alone takes `next_s` seconds, a batch of n looks
    `seconds(n)`.
    """
    chances, n_room = tree.path_chances, len(extra_s) - 1
    taken, _ = best_nodes(chances, token_s, extra_s)
    # A new node takes one more row, or the row of the least likely node that has one.
    n_taken, insert_s = len(taken), math.inf
    if n_taken < n_room:
        insert_s = extra_s[n_taken + 1] - extra_s[n_taken]
    if taken:
        insert_s = min(insert_s, chances[taken[-1]] * token_s)
    best, best_s, gain_s = 0, 0.0, 0.0
    for n, node in enumerate(nodes):
        n_rows = n_taken
        if n_rows >= n_room:  # no row is free: only likelier nodes keep theirs
            n_rows = sum(chances[other] >= chances[node] for other in taken)
        n_rows = max(n_rows, tree.depths[node] + 1)
        if n_rows >= n_room:
            break
        # The first node may be followed far. Tokens behind the others would compete for the same
        # rows, and the nodes are often wrong together.
        if n == 0:
            gain_s += max(0.0, rule.value(tree.n_before + n_rows, chances[node]) + next_s)
        else:
            gain_s += _ASIDE * rule.single(chances[node], insert_s)
        if node not in taken:  # the node itself would need a row too
            gain_s += min(0.0, chances[node] * token_s - insert_s)
        value_s = gain_s - seconds(n + 1)
        if value_s > best_s:
            best, best_s = n + 1, value_s
    return list(nodes[:best])
