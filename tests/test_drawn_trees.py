"""Trees that are drawn at random: what is told is the target's, worked out completely; and how
many tokens are drawn where."""

from __future__ import annotations

import itertools
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.backend.fake import FakeVocabulary, noisy, random_language
from specgen.chances import Chances
from specgen.draft import ROOT, Draft
from specgen.drafters import CombinedDrafter, Drafter, SuffixDrafter
from specgen.events import DraftedEvent
from specgen.growing import GrowingTree
from specgen.options import DraftOptions, GenerationOptions, SamplerOptions
from specgen.policy import CostAwarePolicy, RoundReport
from specgen.policy.plans import best_draws
from specgen.sampling import Distribution
from specgen.state import TextState
from specgen.tables import CostTable, Price
from specgen.verify import AutoVerifier, BlockVerifier, ResidualVerifier, Verifier
from tests.fakes import Setup, tree_drafter
from tests.goodness import p_value
from tests.test_verify import DRAFTS, LETTERS, LEVEL, PROMPT, SAMPLERS, draw, exact

N_LETTERS = 3
N_DEEP = 3


# --- all that can happen -----------------------------------------------------------------------


class Fate:
    """Decides what is left to chance, as told beforehand and then in the first way; remembers what
    else could have been decided, and how likely all of it was."""

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
    """A uniform number that is below what it is compared with, or not, as fate has it."""

    fate: Fate
    factor: float = 1.0

    def __mul__(self, factor: float) -> Coin:
        return Coin(self.fate, self.factor * factor)

    def __lt__(self, bound: float) -> bool:
        chance = min(1.0, bound / self.factor)
        return self.fate.decide((chance, 1.0 - chance)) == 0


def all_fates(run: Callable[[Fate], None]) -> Iterator[Fate]:
    """Let something happen in every way there is that has a chance."""
    decided: list[int] = []
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


def draw_by_fate(self: Distribution, fate: Fate) -> int:
    return int(self.token_ids[fate.decide(self.probs.tolist())])


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
    source: Callable[[tuple[int, ...]], Distribution],
    seed: int,
    n_max: int,
    fate: Fate,
    *,
    adds_late: bool = False,
) -> Draft:
    """A tree whose shape depends on all that was drawn before, in other branches too: beyond which
    node it goes on next, and how many tokens it draws there, which is settled before they are.
    With `adds_late`, the first token gets a sibling that depends on what was drawn behind it."""
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
            left = left.without(token)
    if adds_late and len(tokens) > 1 and parents.count(ROOT) == 1 and noise(seed, tokens) % 2:
        left = source(()).without(tokens[0])
        if left is not None:
            tokens.append(left.draw(fate))  # type: ignore[arg-type]
            parents.append(ROOT)
            sources.append(left)
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
    verifier: Verifier, seed: int, n_max: int, *, adds_late: bool = False
) -> tuple[float, Counter[tuple[int, ...]]]:
    """How far what is told is from the target's joint distribution, over all that can be drawn and
    decided, and the shapes that were drawn."""
    target, source = speaks(seed), speaks(seed + 1)
    found: defaultdict[tuple[int, ...], float] = defaultdict(float)
    shapes: Counter[tuple[int, ...]] = Counter()
    told: tuple[int, ...] = ()

    def happen(fate: Fate) -> None:
        nonlocal told
        draft = grown(source, seed, n_max, fate, adds_late=adds_late)
        shapes[draft.parents] += 1

        def after(node: int) -> Distribution:
            return target(() if node == ROOT else draft.text(node))

        verdict = verifier.verify(draft, after, fate)  # type: ignore[arg-type]
        told = (*(draft.tokens[node] for node in verdict.path), verdict.next_token)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Distribution, "draw", draw_by_fate)
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


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    n_max=st.integers(1, 4),
    verifier=st.sampled_from([BlockVerifier, ResidualVerifier, AutoVerifier]),
)
def test_whatever_tree_is_drawn_the_target_is_told(
    seed: int, n_max: int, verifier: Callable[[], Verifier]
) -> None:
    """Summed over all that can be drawn and decided: exactly the target's joint distribution."""
    error, _ = largest_error(verifier(), seed, n_max)
    assert error < 1e-9


def test_all_kinds_of_shapes_are_among_them() -> None:
    shapes: Counter[tuple[int, ...]] = Counter()
    for seed in range(12):
        shapes += largest_error(BlockVerifier(), seed, 4)[1]
    assert (ROOT, 0, 1) in shapes
    assert any(len(set(shape)) < len(shape) and shape.count(ROOT) == 1 for shape in shapes)
    assert any(shape.count(ROOT) > 1 and len(set(shape)) > 1 for shape in shapes)


def test_a_sibling_for_what_lies_behind_another_would_bias_blocks() -> None:
    """Why how many are drawn is settled before anything behind them is. Token by token it would
    not matter; and if it never mattered, this calculation could not tell."""
    errors = [largest_error(BlockVerifier(), seed, 3, adds_late=True)[0] for seed in range(20)]
    assert max(errors) > 1e-3
    for seed in range(20):
        assert largest_error(ResidualVerifier(), seed, 3, adds_late=True)[0] < 1e-9


# --- how many are worth drawing ----------------------------------------------------------------


def plans(n_sources: int, n_room: int) -> Iterator[tuple[int, ...]]:
    """How many tokens to take from each source, no more than there is room for together."""
    return (
        plan
        for plan in itertools.product(range(n_room + 1), repeat=n_sources)
        if sum(plan) <= n_room
    )


Chance = st.floats(0.02, 1.0)


@given(
    siblings=st.lists(Chance, max_size=2).map(lambda chances: sorted(chances, reverse=True)),
    leaves=st.lists(Chance, max_size=2),
    mean=st.floats(0.1, 0.95),
    costs=st.lists(st.floats(0.0, 0.7), max_size=5),
)
def test_the_best_draws_are_the_best_of_all(
    siblings: list[float], leaves: list[float], mean: float, costs: list[float]
) -> None:
    extra_s: list[float] = [0.0, *np.cumsum(costs).tolist()]
    n_siblings, going_on = best_draws(
        siblings, leaves, mean, token_s=1.0, look_s=0.0, extra_s=extra_s
    )

    def value(plan: tuple[int, ...]) -> float:
        firsts = [*siblings, *[chance * mean for chance in leaves]]
        gains = [
            float(first * mean**k) for first, n in zip(firsts, plan, strict=True) for k in range(n)
        ]
        return math.fsum(gains) - extra_s[sum(plan)]

    everything = list(plans(len(siblings) + len(leaves), len(costs)))
    best = max(map(value, everything))
    agreeing = [
        plan
        for plan in everything
        if [n > 0 for n in plan[: len(siblings)]] == [n < n_siblings for n in range(len(siblings))]
        and {n for n, k in enumerate(plan[len(siblings) :]) if k} == set(going_on)
    ]
    assert max(map(value, agreeing)) == pytest.approx(best)


CHEAP = {1: 1.0, 2: 1.05, 4: 1.1, 8: 1.2, 17: 1.4}
DEAR = {n: 1.0 + 0.6 * (n - 1) for n in range(1, 18)}


def policy_in_round(costs: dict[int, float], n_max: int = 16, n_seen: int = 0) -> CostAwarePolicy:
    """A policy that is asked about a model's draft, after `n_seen` places at which the first or the
    second of two tokens was accepted by turns, the model being unsure."""
    policy = CostAwarePolicy(DraftOptions(policy="cost", max_tokens=n_max), CostTable(costs))
    draft = Draft((1, 2), (ROOT, ROOT), ("model",) * 2, (0.4, 0.4), (HALF, HALF))
    for n in range(n_seen):
        policy.room(100)
        policy.prospect("model", Price(0.02, 0.02))
        tree = GrowingTree("model")
        for token in draft.tokens:
            tree.add(ROOT, token, 0.4, source=HALF, confidence=0.4)
        policy.frontier(tree, 16, 16, lambda n: 0.02)
        policy.observe(RoundReport(draft, (n % 2,), 0.02, 1.05, 3, (1 + n % 2, 3)))
    policy.room(100)
    policy.prospect("model", Price(0.02, 0.02))
    return policy


HALF = Distribution(np.array([1, 2]), np.array([0.5, 0.5]))


def test_where_it_is_unsure_more_tokens_are_drawn_for_a_place() -> None:
    assert policy_in_round(CHEAP).n_draws(GrowingTree("model"), ROOT, 0.99) == 1
    assert policy_in_round(CHEAP, n_seen=20).n_draws(GrowingTree("model"), ROOT, 0.4) > 1


def test_where_rows_are_dear_one_is_drawn_or_none() -> None:
    assert policy_in_round(DEAR, n_seen=20).n_draws(GrowingTree("model"), ROOT, 0.4) <= 1
    assert policy_in_round(DEAR).n_draws(GrowingTree("model"), ROOT, 0.99) == 1


def test_no_more_is_drawn_than_there_is_room_for() -> None:
    for n_max in (1, 2, 3):
        policy = policy_in_round(CHEAP, n_max, n_seen=20)
        assert policy.n_draws(GrowingTree("model"), ROOT, 0.4) <= n_max
        behind = GrowingTree("model")
        behind.n_before = n_max
        assert policy.n_draws(behind, ROOT, 0.4) == 0


def test_what_was_drawn_for_a_place_is_learnt_about_by_its_turn() -> None:
    policy = policy_in_round(CHEAP, n_seen=20)
    first, second = policy._chances["model"].counts, policy._chances["model~2"].counts
    assert first.n_judged.sum() == pytest.approx(20.0, rel=0.02)
    assert second.n_judged.sum() == pytest.approx(20.0, rel=0.02)
    assert first.n_accepted.sum() == pytest.approx(10.0, rel=0.02)
    assert second.n_accepted.sum() == pytest.approx(10.0, rel=0.02)


# --- in the loop -------------------------------------------------------------------------------


@pytest.mark.parametrize("quality", ["bad", "adversarial"])
@pytest.mark.parametrize("verifier", [AutoVerifier, ResidualVerifier])
def test_trees_drawn_by_cost_fit(
    verifier: Callable[[], Verifier], quality: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The joint distribution of the first tokens, trees growing as costs say from the beginning."""
    monkeypatch.setattr("specgen.policy.cost_aware._MOST_AHEAD", math.inf)
    options = SAMPLERS["plain"]
    n_nodes: Counter[int] = Counter()

    class Seen(CostAwarePolicy):
        def observe(self, report: RoundReport) -> None:
            n_nodes[len(report.draft) * (1 if report.draft.is_chain else -1)] += 1
            super().observe(report)

    chances: dict[str, Chances] = {}  # kept from one answer to the next, as it is in use

    def drafter(seed: int) -> Drafter:
        return tree_drafter(
            DRAFTS[quality],
            LETTERS,
            "auto",
            options,
            draws=True,
            seed=seed,
            state=TextState(PROMPT),
            costs=CostTable({1: 0.01, 8: 0.02}),
        )[0]

    counts = draw(
        options,
        drafter,
        verifier(),
        DraftOptions(policy="cost", max_tokens=6),
        policy=lambda drafting: Seen(drafting, CostTable({1: 1.0, 17: 1.01}), chances),
    )
    assert p_value(counts, exact(options)) > LEVEL
    assert sum(n for size, n in n_nodes.items() if size < -1) > 500  # trees


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    n_ctx=st.integers(12, 70),
    n_tokens=st.integers(1, 40),
    ngrams=st.booleans(),
)
def test_drawn_trees_leave_the_caches_as_they_should_be(
    seed: int, n_ctx: int, n_tokens: int, ngrams: bool
) -> None:
    """Through the end of the text, of the answer and of the context, on a backend whose logits
    depend on what its cache holds."""
    language = random_language(12, seed=seed, scale=2.0)
    words = FakeVocabulary.letters(12, ends=(11,))
    sampler = SamplerOptions(temperature=1.0)
    options = GenerationOptions(max_tokens=n_tokens)
    drafter, backend = tree_drafter(
        noisy(language, 1.0, seed=seed),
        words,
        "auto",
        sampler,
        draws=True,
        n_ctx=96,
        seed=seed,
        costs=CostTable({1: 0.02, 8: 0.03}),
    )
    whole: Drafter = drafter
    if ngrams:
        whole = CombinedDrafter(SuffixDrafter(1, 4, n_children=3), drafter)
    setup = Setup(
        language=language,
        vocabulary=words,
        options=options,
        n_ctx=n_ctx,
        sampler=sampler,
        drafter=whole,
        drafting=DraftOptions(policy="cost", max_tokens=16),
        policy=lambda drafting: CostAwarePolicy(drafting, CostTable(CHEAP)),
        n_branches=16,
        n_batch=128,
        seed=seed,
    )
    generation, events = setup.run()
    for event in events:
        if isinstance(event, DraftedEvent):
            assert len(event.nodes) <= 16
    assert [n for n in range(setup.target.n_sequences) if setup.target.length(n)] == [0]
    assert setup.target.length(0) in (len(generation.tokens), len(generation.tokens) - 1)
    drafter.rewind(len(generation.tokens))
    assert [n for n in range(1, backend.n_sequences) if backend.length(n)] == []
