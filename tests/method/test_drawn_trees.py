"""Trees with tokens that are drawn at random: what is told is the target's, worked out completely."""

from __future__ import annotations

import itertools
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.method.draft import ROOT, Distribution, Draft
from specgen.method.verify import AutoVerifier, BlockVerifier, ResidualVerifier, Verifier
from tests.helpers.exact_distributions import Fate, all_fates

N_LETTERS = 3
N_DEEP = 3


# --- drafters that decide by all they know -----------------------------------------------------


def noise(*what: object) -> int:
    """A number that looks like chance and is always the same."""
    return zlib.crc32(repr(what).encode())


def speaks(seed: int) -> Callable[[tuple[int, ...]], Distribution]:
    """A language over a few letters; some letters cannot follow some texts."""

    def after(text: tuple[int, ...]) -> Distribution:
        weights = np.array([noise(seed, text, letter) % 7 for letter in range(N_LETTERS)], float)
        if not weights.any():
            weights[0] = 1.0
        ids = np.flatnonzero(weights)
        return Distribution(ids.astype(np.int64), weights[ids] / weights[ids].sum())

    return after


def grown(
    source: Callable[[tuple[int, ...]], Distribution], seed: int, n_max: int, fate: Fate
) -> Draft:
    """A tree whose shape depends on all that was drawn before, in other branches too: beyond which
    node it goes on next, and how many tokens it draws there, which is settled before they are."""
    tokens: list[int] = []
    parents: list[int] = []
    sources: list[Distribution] = []
    texts: dict[int, tuple[int, ...]] = {ROOT: ()}
    open_nodes = [ROOT]
    while open_nodes and len(tokens) < n_max:
        number = noise(seed, tokens, parents)
        if tokens and number % 5 == 0:
            break
        node = open_nodes.pop(number % len(open_nodes))
        left: Distribution | None = source(texts[node])
        for _ in range(min((1, 1, 2, 2, 3)[number // 5 % 5], n_max - len(tokens))):
            if left is None:
                break
            token = left.draw(fate)  # type: ignore[arg-type]
            child = len(tokens)
            tokens.append(token)
            parents.append(node)
            sources.append(left)
            texts[child] = (*texts[node], token)
            if len(texts[child]) < N_DEEP:
                open_nodes.append(child)
            left = left.minus(Distribution.certain(token))
    n = len(tokens)
    return Draft(tuple(tokens), tuple(parents), ("m",) * n, (None,) * n, tuple(sources))


def joint(after: Callable[[tuple[int, ...]], Distribution]) -> dict[tuple[int, ...], float]:
    """The distribution of the first tokens of a language."""
    found: dict[tuple[int, ...], float] = {}
    for text in itertools.product(range(N_LETTERS), repeat=N_DEEP + 1):
        found[text] = float(
            np.prod([after(text[:n]).probability(letter) for n, letter in enumerate(text)])
        )
    return found


def largest_error(
    verifier: Verifier, seed: int, draft_by: Callable[[Fate], Draft]
) -> tuple[float, Counter[tuple[int, ...]]]:
    """How far what is told is from the target's joint distribution, over all that can be drawn and
    decided, and the shapes of the drafts."""
    target = speaks(seed)
    found: defaultdict[tuple[int, ...], float] = defaultdict(float)
    shapes: Counter[tuple[int, ...]] = Counter()
    told: tuple[int, ...] = ()

    def happen(fate: Fate) -> None:
        nonlocal told
        draft = draft_by(fate)
        shapes[draft.parents] += 1

        def after(node: int) -> Distribution:
            return target(() if node == ROOT else draft.text(node))

        verdict = verifier.verify(draft, after, fate)  # type: ignore[arg-type]
        told = (*(draft.tokens[node] for node in verdict.path), verdict.next_token)

    for fate in all_fates(happen):
        if fate.chance > 0.0:
            found[told] += fate.chance
    assert sum(found.values()) == pytest.approx(1.0)
    error = 0.0
    for text, chance in joint(target).items():
        total = 0.0  # what was told, and what the target goes on with
        for n in range(1, len(text) + 1):
            rest = [target(text[:m]).probability(text[m]) for m in range(n, len(text))]
            total += found[text[:n]] * float(np.prod(rest))
        error = max(error, abs(total - chance))
    return error, shapes


def tree_by(seed: int, n_max: int) -> Callable[[Fate], Draft]:
    """Draws a tree by another language than the target's."""
    source = speaks(seed + 1)
    return lambda fate: grown(source, seed, n_max, fate)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    n_max=st.integers(1, 4),
    verifier=st.sampled_from([BlockVerifier, ResidualVerifier, AutoVerifier]),
)
def test_whatever_tree_is_drawn_the_target_is_told(
    seed: int, n_max: int, verifier: Callable[[], Verifier]
) -> None:
    """Summed over all that can be drawn and decided: exactly the target's joint distribution."""
    error, _ = largest_error(verifier(), seed, tree_by(seed, n_max))
    assert error < 1e-9


def test_all_kinds_of_shapes_are_among_them() -> None:
    shapes: Counter[tuple[int, ...]] = Counter()
    for seed in range(12):
        shapes += largest_error(BlockVerifier(), seed, tree_by(seed, 4))[1]
    assert (ROOT, 0, 1) in shapes
    assert any(len(set(shape)) < len(shape) and shape.count(ROOT) == 1 for shape in shapes)
    assert any(shape.count(ROOT) > 1 and len(set(shape)) > 1 for shape in shapes)
