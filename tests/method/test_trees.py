"""Trees: how they grow, that they do not change the text, and their cells in the draft's cache."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.drafters.autoregressive import ModelDrafter
from specgen.drafters.ngram import SuffixDrafter
from specgen.events import DraftedEvent
from specgen.method.acceptance import AcceptanceRates
from specgen.method.answer_loop import AnswerLoop
from specgen.method.answer_state import AnswerState
from specgen.method.backend import Backend
from specgen.method.cascade import Cascade
from specgen.method.cost_table import CostTable
from specgen.method.draft import NO_DRAFT, ROOT, Draft
from specgen.method.drafter import Drafter, draft_alone
from specgen.method.policy import CostAwarePolicy, Offer, RoundPlan, RoundResult
from specgen.method.stopping import CostAwareStopping
from specgen.method.text_state import TextState
from specgen.method.verifiers import (
    AutoVerifier,
    BlockVerifier,
    ResidualVerifier,
    SpecTrVerifier,
    Verifier,
)
from specgen.options import (
    LARGEST_TREE,
    DraftOptions,
    GenerationOptions,
    SamplerOptions,
    parse_tree,
)
from specgen.text.sampling.distribution import Distribution
from tests.helpers.exact_distributions import Fate, all_fates, distribution
from tests.helpers.fake_backend import FakeVocabulary, Language, noisy, random_language
from tests.helpers.fake_generations import (
    PROMPT,
    Clock,
    Setup,
    Timed,
    model_drafter,
    read_prompt,
    tree_drafter,
    tree_request,
)
from tests.helpers.goodness_of_fit import LEVEL, p_value

N_VOCAB = 12
WORDS = FakeVocabulary.letters(N_VOCAB, ends=(N_VOCAB - 1,))
FIXED = DraftOptions(policy="fixed", max_tokens=LARGEST_TREE, p_min=0.0)
BY_COST = DraftOptions(policy="cost", max_tokens=16)


# --- shapes ----------------------------------------------------------------------------------


def test_shapes_are_read() -> None:
    for text, kind, n_nodes, n_levels in (
        ("3,2,1", "levels", 15, 3),
        ("1,1,1,1", "levels", 4, 4),
        ("5", "levels", 5, 1),
        ("4x5", "walks", 20, 5),
        (" 2X3 ", "walks", 6, 3),
    ):
        shape = parse_tree(text)
        assert (shape.kind, shape.n_nodes, shape.n_levels) == (kind, n_nodes, n_levels)
        assert parse_tree(str(shape)) == shape
    assert [parse_tree(text).kind for text in ("auto", "off")] == ["auto", "off"]
    for text in ("", "3,", "0", "2,0,1", "a", "3;2", "4x", "2x3x4", "-1", "1e3", "9,9,9", "99x99"):
        with pytest.raises(ValueError, match=r"not a shape|1 or more|more than 64"):
            parse_tree(text)


# --- drafts as trees -------------------------------------------------------------------------


def texts(draft: Draft) -> set[tuple[int, ...]]:
    return {draft.tokens_to(node) for node in range(len(draft))}


def test_independent_walks_lead_from_the_root_down_and_stay_whole() -> None:
    """Without the draft's walks, a token that was sampled twice would be verified only once."""
    rest = ("m",) * 3, (None,) * 3, (None,) * 3
    walks = Draft((1, 2, 3), (ROOT, 0, ROOT), *rest, walks=((0, 1), (2,), (0,)))
    for walk in [(1,), (0, 2), ()]:
        with pytest.raises(ValueError, match="not a path"):
            replace(walks, walks=(walk,))
    assert walks.first(3) is walks
    moved = walks.only([2, 0, 1])
    assert moved.walks == ((1, 2), (0,), (1,))
    assert [[moved.tokens[node] for node in walk] for walk in moved.walks] == [[1, 2], [3], [1]]
    for nodes in ([0, 1], [0, 2]):
        with pytest.raises(ValueError, match="left out"):
            walks.only(nodes)


@given(st.lists(st.floats(0.01, 1.0), max_size=7), st.integers(0, 2**31))
def test_the_best_nodes_are_the_best_of_all_subtrees(chances: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    parents = [int(rng.integers(ROOT, node)) for node in range(len(chances))]
    paths: list[float] = []
    for parent, chance in zip(parents, chances, strict=True):
        paths.append(chance * (1.0 if parent == ROOT else paths[parent]))
    extra_s = [0.0, *np.cumsum(rng.uniform(0.0, 0.8, len(chances))).tolist()]
    rates = AcceptanceRates()
    stop = CostAwareStopping(
        origin="", rates_of=lambda _, rank: rates, token_s=1.0, extra_s=extra_s
    )
    nodes = stop.best_nodes(paths)
    best_s = 0.0
    for size in range(len(chances) + 1):
        for subset in itertools.combinations(range(len(chances)), size):
            if all(parents[node] in (ROOT, *subset) for node in subset):
                best_s = max(best_s, sum(paths[node] for node in subset) - extra_s[size])
    assert sum(paths[node] for node in nodes) - extra_s[len(nodes)] == pytest.approx(best_s)
    for place, node in enumerate(nodes):
        assert parents[node] in (ROOT, *nodes[:place])


# --- whatever is drawn, by calculation ---------------------------------------------------------

N_LETTERS = 3
N_DEEP = 3


def pseudo_random(*what: object) -> int:
    """A number that looks like chance and is always the same."""
    return zlib.crc32(repr(what).encode())


def speaks(seed: int) -> Callable[[tuple[int, ...]], Distribution]:
    """A language over a few letters; some letters cannot follow some texts."""

    def after(text: tuple[int, ...]) -> Distribution:
        weights = np.array(
            [pseudo_random(seed, text, letter) % 7 for letter in range(N_LETTERS)], float
        )
        if not weights.any():
            weights[0] = 1.0
        ids = np.flatnonzero(weights)
        return Distribution(ids.astype(np.int64), weights[ids] / weights[ids].sum())

    return after


def drawn_tree(
    source: Callable[[tuple[int, ...]], Distribution], seed: int, n_max: int, fate: Fate
) -> Draft:
    """A tree whose shape depends on everything that was sampled before, also in other branches.
    This decides which node is extended next and by how many tokens, before these are sampled.
    """
    tokens: list[int] = []
    parents: list[int] = []
    sources: list[Distribution] = []
    texts: dict[int, tuple[int, ...]] = {ROOT: ()}
    open_nodes = [ROOT]
    while open_nodes and len(tokens) < n_max:
        number = pseudo_random(seed, tokens, parents)
        if tokens and number % 5 == 0:
            break
        node = open_nodes.pop(number % len(open_nodes))
        left: Distribution | None = source(texts[node])
        for _ in range(min((1, 1, 2, 2, 3)[number // 5 % 5], n_max - len(tokens))):
            if left is None:
                break
            token = left.sample(fate)  # type: ignore[arg-type]
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
    """How far the output is from the target's joint distribution.

    It is summed over everything that can be sampled and decided, for all shapes of drafts.
    """
    target = speaks(seed)
    found: defaultdict[tuple[int, ...], float] = defaultdict(float)
    shapes: Counter[tuple[int, ...]] = Counter()
    told: tuple[int, ...] = ()

    def happen(fate: Fate) -> None:
        nonlocal told
        draft = draft_by(fate)
        shapes[draft.parents] += 1

        def after(node: int) -> Distribution:
            return target(() if node == ROOT else draft.tokens_to(node))

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
    return lambda fate: drawn_tree(source, seed, n_max, fate)


def walks_by(seed: int, n_walks: int, n_deep: int) -> Callable[[Fate], Draft]:
    """Draws chains independently by another language than the target's; common beginnings are the
    same nodes.
    """
    source = speaks(seed + 1)

    def draw(fate: Fate) -> Draft:
        nodes = dict[tuple[int, ...], int]()
        sources = list[Distribution]()
        walks = []
        for _ in range(n_walks):
            texts: list[tuple[int, ...]] = [()]
            for _ in range(n_deep):
                after = source(texts[-1])
                texts.append((*texts[-1], after.sample(fate)))  # type: ignore[arg-type]
                if texts[-1] not in nodes:
                    nodes[texts[-1]] = len(nodes)
                    sources.append(after)
            walks.append(tuple(nodes[text] for text in texts[1:]))
        n = len(nodes)
        tokens = tuple(text[-1] for text in nodes)
        parents = tuple(nodes.get(text[:-1], ROOT) for text in nodes)
        return Draft(tokens, parents, ("m",) * n, (None,) * n, tuple(sources), tuple(walks))

    return draw


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    shape=st.sampled_from([1, 2, 3, 4, (1, 1), (2, 1), (3, 1), (2, 2)]),
    verifier=st.sampled_from([BlockVerifier, ResidualVerifier, SpecTrVerifier, AutoVerifier]),
)
def test_the_sum_over_all_drafts_is_the_targets_distribution(
    seed: int, shape: int | tuple[int, int], verifier: Callable[[], Verifier]
) -> None:
    """Summed over all drafts that can be sampled (trees of a given size, or walks) and over all
    decisions, the output has exactly the target's joint distribution.
    """
    draft_by = tree_by(seed, shape) if isinstance(shape, int) else walks_by(seed, *shape)
    assert largest_error(verifier(), seed, draft_by)[0] < 1e-9


@pytest.mark.parametrize("verifier", [BlockVerifier(), ResidualVerifier(), SpecTrVerifier()])
@pytest.mark.parametrize("seed", range(10))
def test_a_single_sampled_token_is_accepted_as_often_as_possible(
    verifier: Verifier, seed: int
) -> None:
    target = speaks(seed)(())
    source = speaks(seed + 1)(())
    paths = list[tuple[int, ...]]()

    def happen(fate: Fate) -> None:
        draft = walks_by(seed, 1, 1)(fate)
        paths.append(verifier.verify(draft, lambda _node: target, fate).path)  # type: ignore[arg-type]

    accepted = sum(fate.chance for fate in all_fates(happen) if paths[-1])
    shared = (min(target.probability(n), source.probability(n)) for n in range(N_LETTERS))
    assert accepted == pytest.approx(sum(shared))


@pytest.mark.parametrize("verifier", [BlockVerifier(), ResidualVerifier(), SpecTrVerifier()])
def test_probabilities_that_are_lost_in_rounding_do_no_harm(verifier: Verifier) -> None:
    """At a low temperature, the second-best token may have a probability of 1e-20."""
    target = Distribution(np.array([0, 1]), np.array([1.0, 1e-20]))
    source = Distribution(np.array([0, 1]), np.array([1.0, 1e-25]))
    draft = Draft.chain([0, 0, 0], "model", distributions=[source] * 3)
    verdict = verifier.verify(draft, lambda _node: target, np.random.default_rng(0))
    assert (verdict.path, verdict.next_token) == ((0, 1, 2), 0)


def test_all_kinds_of_shapes_are_among_them() -> None:
    shapes: Counter[tuple[int, ...]] = Counter()
    for seed in range(12):
        shapes += largest_error(BlockVerifier(), seed, tree_by(seed, 4))[1]
    assert (ROOT, 0, 1) in shapes
    assert any(len(set(shape)) < len(shape) and shape.count(ROOT) == 1 for shape in shapes)
    assert any(shape.count(ROOT) > 1 and len(set(shape)) > 1 for shape in shapes)


# --- in the loop ------------------------------------------------------------------------------


#: Tokens that are tested, after the first one, which comes from the prompt's round.
N_TOKENS = 3
#: They find any deviation of 0.12 (total variation, as the test pools the outcomes) with
#: probability 0.99.
N_DRAWS = 1300
SHORT_PROMPT = (0, 1, 0, 1, 0, 1)
LETTERS = FakeVocabulary.letters(5)

SAMPLERS = {
    "plain": SamplerOptions(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
    "chain": SamplerOptions(temperature=0.8, top_k=5, top_p=0.95, min_p=0.02),
}


def cached(language: Language) -> Language:
    return functools.lru_cache(maxsize=None)(language)


TARGET = cached(random_language(5, seed=3, scale=1.2))
DRAFTS: dict[str, Language] = {
    "good": cached(noisy(TARGET, 0.5)),
    "bad": cached(random_language(5, seed=4, scale=1.2)),
    "adversarial": cached(lambda text: -2 * TARGET(text)),
}


def exact(sampler: SamplerOptions) -> dict[tuple[int, ...], float]:
    """The joint distribution of the tokens after the first one."""
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(1 + N_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for text, prob in joint.items():
            step = distribution(TARGET(SHORT_PROMPT + text), sampler)
            for token, p in zip(step.token_ids.tolist(), step.probs.tolist(), strict=True):
                key = (*text, token)
                longer[key] = prob * p
        joint = longer
    after_first: Counter[tuple[int, ...]] = Counter()
    for text, prob in joint.items():
        after_first[text[1:]] += prob  # type: ignore[assignment]
    return dict(after_first)


def draw(
    sampler: SamplerOptions, make_drafter: Callable[[int], Drafter], verifier: Verifier
) -> Counter[tuple[int, ...]]:
    """The tokens after the first one of many answers."""
    counts: Counter[tuple[int, ...]] = Counter()
    rng = np.random.default_rng(12)
    for draw_number in range(N_DRAWS):
        setup = Setup(
            language=TARGET,
            vocabulary=LETTERS,
            drafter=make_drafter(int(rng.integers(2**31))),
            sampler=sampler,
            drafting=FIXED,
            # Room for whole drafts.
            options=GenerationOptions(max_tokens=1 + N_TOKENS + 2),
            seed=10_000 + draw_number,
            prompt=SHORT_PROMPT,
            verifier=verifier,
            n_batch=128,
        )
        loop = AnswerLoop(setup.backend(), Clock())
        generation = setup.generation()
        read_prompt(loop, generation)
        while len(generation.answer) < 1 + N_TOKENS:
            loop.round([generation])
        assert generation.cascade is not None, "drafting failed"
        counts[tuple(generation.answer[1 : 1 + N_TOKENS])] += 1
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "quality"), [("plain", "good"), ("plain", "adversarial"), ("chain", "bad")]
)
@pytest.mark.parametrize(
    ("shape", "verifier"),
    [
        ("2,2", AutoVerifier),
        ("3,1,1", ResidualVerifier),
        ("3x3", SpecTrVerifier),
        ("2x3", AutoVerifier),
        ("3x2", ResidualVerifier),
    ],
)
def test_sampled_trees_fit_the_targets_distribution(
    shape: str, verifier: Callable[[], Verifier], sampler: str, quality: str
) -> None:
    """The joint distribution of the first tokens, with rounds that end at every depth, by a G-test
    at a false-alarm level of 1e-4; `test_lossless.py` has chains.
    """
    options = SAMPLERS[sampler]

    def drafter(seed: int) -> Drafter:
        state = TextState(SHORT_PROMPT)
        return tree_drafter(
            DRAFTS[quality], LETTERS, shape, options, draws=True, seed=seed, state=state
        )[0]

    counts = draw(options, drafter, verifier())
    assert p_value(counts, exact(options)) > LEVEL


def counted(language: Language) -> tuple[Language, Counter[tuple[int, ...]]]:
    """A language, and a count of how often each text was looked up."""
    counts: Counter[tuple[int, ...]] = Counter()

    def logits(text: tuple[int, ...]) -> np.ndarray:
        counts[text] += 1
        return language(text)

    return logits, counts


CHEAP = {1: 1.0, 2: 1.05, 4: 1.1, 8: 1.2, 17: 1.4}


def by_cost(options: DraftOptions) -> CostAwarePolicy:
    return CostAwarePolicy(options, CostTable(CHEAP))


def draft_costs() -> CostTable:
    return CostTable({1: 0.1, 2: 0.11, 8: 0.15})


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    shape=st.sampled_from(["2,2,1", "4,1", "1,1,1,1", "3,3", "4x3", "auto", "auto", "auto"]),
    noise=st.sampled_from([0.0, 1.0, 4.0]),
    n_ctx=st.integers(12, 70),
    n_tokens=st.integers(1, 40),
    ngrams=st.booleans(),
)
def test_trees_change_nothing_and_no_token_is_decoded_twice(
    seed: int, shape: str, noise: float, n_ctx: int, n_tokens: int, ngrams: bool
) -> None:
    """Greedy, through the end of the text, of the answer and of the context."""
    language = random_language(N_VOCAB, seed=seed, scale=2.0)
    spoken, counts = counted(noisy(language, noise, seed=seed))
    is_auto = shape == "auto"
    drafting = BY_COST if is_auto else FIXED
    options = GenerationOptions(max_tokens=n_tokens)
    drafter, _ = tree_drafter(
        spoken, WORDS, shape, n_ctx=96, costs=draft_costs() if is_auto else None
    )
    free = SuffixDrafter(1, 4, n_children=3) if ngrams else None
    whole = Cascade(free, drafter)
    plain = Setup(language, WORDS, options=options, n_ctx=n_ctx)
    setup = replace(
        plain,
        drafter=whole,
        drafting=drafting,
        policy=by_cost if is_auto else None,
        n_branches=LARGEST_TREE,
        n_batch=128,
    )
    drafted = setup.run()[0]
    expected = plain.run()[0]
    assert (drafted.answer, drafted.finish_reason) == (expected.answer, expected.finish_reason)
    # What is verified and becomes text is decoded once. What costs advised against verifying is
    # forgotten, and may be met again beyond what became text.
    text = tuple(drafted.tokens)
    assert max(counts[text[:n]] for n in range(len(text) + 1)) <= (2 if is_auto else 1)
    # The target holds one sequence, of what is committed; so does the draft, of what it read.
    held = [n for n in range(setup.target.n_sequences) if setup.target.length(n)]
    assert held == [0]
    assert setup.target.length(0) in (len(drafted.tokens), len(drafted.tokens) - 1)


def grown(
    drafter: Drafter, language: Language, batch_s: dict[int, float]
) -> tuple[AnswerState, list[bool]]:
    """An answer with drafts by these costs of the target's batches; which drafts have branches."""
    setup = Setup(
        language=language,
        drafter=drafter,
        drafting=BY_COST,
        policy=lambda options: CostAwarePolicy(options, CostTable(batch_s)),
        options=GenerationOptions(max_tokens=300),
        n_ctx=400,
        n_branches=16,
    )
    target = Timed(setup.backend(), CostTable(batch_s))
    loop = AnswerLoop(cast(Backend, target), lambda: target.decode_s)
    generation = setup.generation()
    drafted = [event.nodes for event in loop.run(generation) if isinstance(event, DraftedEvent)]
    return generation, [len({node.parent for node in nodes}) < len(nodes) for nodes in drafted]


def test_where_rows_are_cheap_trees_grow_and_more_is_accepted_than_of_a_chain() -> None:
    language = random_language(N_VOCAB, seed=5, scale=1.5)
    spoken = noisy(language, 1.0)
    tree, _ = tree_drafter(spoken, WORDS, "auto", n_ctx=512, costs=draft_costs())
    chain, _ = model_drafter(spoken, WORDS, n_ctx=512)
    lengths: list[float] = []
    for drafter in (tree, chain):
        generation, branched = grown(drafter, language, CHEAP)
        assert any(branched) == (drafter is tree)
        assert generation.stats.mean_accepted_length is not None
        lengths.append(generation.stats.mean_accepted_length)
    assert lengths[0] > 1.15 * lengths[1]


def test_where_rows_cost_nothing_a_tree_grows_deeper_in_place_of_unlikely_nodes() -> None:
    """As for a target that is read from disk: the rows are used up long before the draft ends."""
    language = random_language(N_VOCAB, seed=5, scale=2.0)
    n_nodes = 16
    flat = dict.fromkeys(range(1, n_nodes + 2), 10.0)
    drafter, _ = tree_drafter(
        language, WORDS, "auto", n_ctx=512, costs=draft_costs(), n_sequences=64
    )
    generation, branched = grown(drafter, language, flat)
    assert any(branched)
    # The draft is always right. With four candidates for each position, it would end after four.
    assert generation.stats.mean_accepted_length is not None
    assert generation.stats.mean_accepted_length > 5.5


def test_where_each_row_costs_a_token_nothing_branches() -> None:
    """A chain may pay: its tokens are likelier than their siblings can be."""
    language = random_language(N_VOCAB, seed=5, scale=4.0)
    drafter, _ = tree_drafter(language, WORDS, "auto", n_ctx=512, costs=draft_costs())
    _, branched = grown(drafter, language, {n: 1.0 + 0.55 * (n - 1) for n in range(1, 18)})
    assert branched
    assert not any(branched)


@pytest.mark.parametrize("p_min", [0.3, 0.6])
def test_a_tree_by_costs_stops_where_its_most_likely_token_is_too_unlikely(p_min: float) -> None:
    language = random_language(N_VOCAB, seed=5, scale=2.0)
    drafter, _ = tree_drafter(language, WORDS, "auto", n_ctx=512, costs=draft_costs())
    setup = Setup(
        language,
        WORDS,
        drafter=drafter,
        drafting=replace(BY_COST, p_min=p_min),
        policy=by_cost,
        n_branches=LARGEST_TREE,
    )
    _, events = setup.run()
    drafts = [event.nodes for event in events if isinstance(event, DraftedEvent)]
    assert drafts
    for nodes in drafts:
        likeliest: dict[int, float] = {}
        for node in nodes:
            assert node.probability is not None
            best_so_far = likeliest.get(node.parent, 0.0)
            likeliest[node.parent] = max(best_so_far, node.probability)
        assert min(likeliest.values()) >= p_min


@pytest.mark.parametrize("shape", ["auto", "1,1,1,1", "2x4"])
def test_a_tree_is_no_deeper_than_it_may_be(shape: str) -> None:
    is_auto = shape == "auto"
    language = random_language(N_VOCAB, seed=2)
    costs = draft_costs() if is_auto else None
    drafter, _ = tree_drafter(language, WORDS, shape, costs=costs, n_levels_max=2)
    drafting, policy = (BY_COST, by_cost) if is_auto else (FIXED, None)
    setup = Setup(language, drafter=drafter, drafting=drafting, policy=policy, n_branches=16)
    assert len(setup.run()[0].stats.drafted_by_depth) == 2


def test_a_shape_may_ask_for_many_guesses() -> None:
    language = random_language(N_VOCAB, seed=2)
    drafter, _ = tree_drafter(language, WORDS, "10,1")
    draft = draft_alone(drafter.propose(PROMPT, RoundPlan("fixed", 20)))
    assert len(draft.children[ROOT]) == 10


def test_a_context_may_serve_one_answer_after_another() -> None:
    """Also where an answer ended with a tree in the cache."""
    language = random_language(N_VOCAB, seed=2)
    drafter, backend = tree_drafter(language, WORDS, "2,2,2")
    first = draft_alone(drafter.propose(PROMPT, RoundPlan("fixed", 14)))
    assert any(backend.length(sequence) for sequence in range(1, backend.n_sequences))
    backend.remove(0)
    again = ModelDrafter(backend, tree_request("2,2,2"), n_shared_tokens=N_VOCAB)
    assert draft_alone(again.propose(PROMPT, RoundPlan("fixed", 14))) == first


# --- n-grams ----------------------------------------------------------------------------------


def test_different_continuations_make_branches() -> None:
    #: "1 2" was followed by 3, twice by 4 5, and by 6.
    text = [1, 2, 3, 9, 1, 2, 4, 5, 1, 2, 4, 5, 8, 1, 2, 6, 7, 1, 2]
    chain = draft_alone(SuffixDrafter(2, 8).propose(text, RoundPlan("fixed", 6)))
    tree = draft_alone(SuffixDrafter(2, 8, n_children=3).propose(text, RoundPlan("fixed", 12)))
    assert chain.is_chain
    assert not tree.is_chain
    firsts = {tree.tokens[node] for node in tree.children[ROOT]}
    assert firsts == {3, 4, 6}
    assert (4, 5) in texts(tree)
    assert (6, 7) in texts(tree)
    assert chain.tokens[0] in firsts
    for node, parent in enumerate(tree.parents):
        assert parent < node
    few = draft_alone(SuffixDrafter(2, 8, n_children=3).propose(text, RoundPlan("fixed", 2)))
    assert len(few) == 2


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 16), st.integers(2, 4))
def test_branches_of_n_grams_are_continuations_found_in_the_text(
    text: list[int], n_max: int, n_children: int
) -> None:
    drafter = SuffixDrafter(1, 4, n_children=n_children)
    tree = draft_alone(drafter.propose(text, RoundPlan("fixed", n_max)))
    assert len(tree) <= n_max
    assert len(texts(tree)) == len(tree)
    for node in range(len(tree)):
        before = [*text, *tree.tokens_to(node)]
        pair = before[-2:]
        assert any(text[i : i + 2] == pair for i in range(len(text) - 1))


# --- learning their acceptance ----------------------------------------------------------------


def test_first_and_second_guesses_are_learnt_about_apart() -> None:
    policy = by_cost(BY_COST)
    draft = Draft((1, 2, 3), (ROOT, ROOT, ROOT), ("model",) * 3, (0.5, 0.3, 0.1), (None,) * 3)
    for _ in range(30):
        plan = policy.plan(Offer(100, 16, drafter="model"))
        # Nothing was verified of what was proposed.
        policy.observe(RoundResult(plan, NO_DRAFT, (), 0.0, 1.0, 1, (2,), (draft,)))
    assert policy.rates_of("model").acceptance(0.5) < 0.2
    assert policy.rates_of("model:2").acceptance(0.3) > 0.8
    assert policy.rates_of("model:3").acceptance(0.1) < 0.05
