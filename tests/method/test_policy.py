"""How much is drafted: fixed lengths, an adaptive bound, and the cost-aware policy."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.method.acceptance import AcceptanceCounts
from specgen.method.cost_table import FREE, CostTable, Price
from specgen.method.draft import NO_DRAFT, ROOT, Draft
from specgen.method.drafter import draft_alone
from specgen.method.policy import (
    CostAwarePolicy,
    FixedPolicy,
    Offer,
    Policy,
    RoundPlan,
    RoundResult,
    ThresholdPolicy,
)
from specgen.method.stopping import CostAwareStopping
from specgen.options import FIXED_LENGTH, FIXED_P_MIN, LONGEST_DRAFT, DraftOptions, SamplerOptions
from tests.helpers.exact_distributions import distribution
from tests.helpers.fake_backend import FakeVocabulary, noisy, random_language
from tests.helpers.fake_generations import N_VOCAB, model_drafter
from tests.helpers.simulated_drafting import Run, World, run, steps, text

LANGUAGE = random_language(N_VOCAB, seed=3)
LETTERS = FakeVocabulary.letters(N_VOCAB)
FLAT = dict.fromkeys(range(1, 18), 1.0)


def cost_aware(
    table: dict[int, float] | None = None,
    acceptance: dict[str, AcceptanceCounts] | None = None,
    max_tokens: int | None = None,
    p_min: float | None = None,
) -> CostAwarePolicy:
    options = DraftOptions(max_tokens=max_tokens, p_min=p_min)
    return CostAwarePolicy(options, CostTable(FLAT if table is None else table), acceptance)


def fixed(max_tokens: int = 4, p_min: float = 0.0, min_tokens: int = 0) -> FixedPolicy:
    return FixedPolicy(
        DraftOptions(policy="fixed", max_tokens=max_tokens, p_min=p_min, min_tokens=min_tokens)
    )


def threshold(
    max_tokens: int = 16, p_min: float | None = None, min_tokens: int = 0
) -> ThresholdPolicy:
    return ThresholdPolicy(
        DraftOptions(policy="threshold", max_tokens=max_tokens, p_min=p_min, min_tokens=min_tokens)
    )


def planned(
    policy: Policy,
    found: Draft = NO_DRAFT,
    *,
    n_left: int = 100,
    price: Price = FREE,
    drafter: str | None = "model",
) -> RoundPlan:
    """The plan of a round that allows the longest draft."""
    return policy.plan(Offer(n_left, policy.n_max, found, drafter, price))


def cut(policy: Policy, draft: Draft) -> Draft:
    """What is verified of a draft in the round that begins."""
    return planned(policy).stop.cut(draft)


def result(
    draft: Draft,
    n_accepted: int,
    target_s: float = 1.0,
    draft_s: float = 0.0,
    own: int = 99,
    *,
    plan: RoundPlan | None = None,
) -> RoundResult:
    """The result of a round in which `draft` was verified."""
    path = tuple(range(n_accepted))
    committed = (*draft.tokens[:n_accepted], own)
    if plan is None:
        by_ngrams = len(draft) and draft.origins[0] == "ngram"
        plan = RoundPlan("found", found=draft) if by_ngrams else RoundPlan("model")
    return RoundResult(plan, draft, path, draft_s, target_s, 1 + len(draft), committed, (draft,))


def draft_steps(plan: RoundPlan, confidences: Sequence[float]) -> list[tuple[bool, bool]]:
    """What a plan decides at the draft steps of a chain: whether each token is drafted, and whether
    another step follows.
    """
    found: list[tuple[bool, bool]] = []
    cumulative_acceptance = 1.0
    for n, confidence in enumerate(confidences):
        step = plan.after_draft_step(n, cumulative_acceptance, confidence)
        cumulative_acceptance = step.cumulative_acceptance
        found.append((step.keep_token, step.continue_drafting))
    return found


def bound_of(policy: Policy) -> float:
    return planned(policy).stop.bound


def chain(*probabilities: float | None, origin: str = "model") -> Draft:
    return Draft.chain(range(len(probabilities)), origin, probabilities)


def drawn(*probabilities: float, origin: str = "model") -> Draft:
    source = distribution(LANGUAGE((1,)), SamplerOptions(temperature=1.0))
    n = len(probabilities)
    return Draft.chain(range(n), origin, probabilities, [source] * n)


POLICIES: dict[str, Callable[..., Policy]] = {
    "fixed": partial(fixed, max_tokens=8, p_min=0.4),
    "threshold": threshold,
    "cost": cost_aware,
}


# --- what all of them hold to


@pytest.mark.parametrize("name", POLICIES)
@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=16))
def test_a_sampled_token_is_never_dropped(name: str, probabilities: list[float]) -> None:
    """Dropping it because of its value would bias the answer."""
    # Where each row costs a token, nothing is worth verifying.
    policy = cost_aware({n: 1.0 * n for n in range(1, 18)}) if name == "cost" else POLICIES[name]()
    stop = planned(policy).stop
    draft = drawn(*probabilities)
    assert stop.cut(draft) == draft
    # A tree of sampled tokens stays complete, too, and so does what hangs below them.
    source = draft.distributions[0]
    beside = Draft((1, 2, 3), (ROOT, ROOT, 0), ("t",) * 3, (0.01,) * 3, (source, source, None))
    assert stop.cut(beside) == beside


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_whether_to_draft_a_token_is_decided_before_it_is_sampled(name: str, noise: float) -> None:
    """If drafts begin with the same tokens, all of them continue or none does. Otherwise the token
    itself would decide whether it is drafted.
    """
    sampler = SamplerOptions(temperature=1.5, top_k=4, top_p=1.0, min_p=0.0)
    policy = POLICIES[name]()
    language = noisy(LANGUAGE, noise)
    n_texts = 0
    for context in ([1, 2, 3], [5, 4], [7, 7, 1], [2]):
        drafts: list[Draft] = []
        for seed in range(150):
            drafter, _ = model_drafter(language, LETTERS, sampler, seed=seed)
            plan = planned(copy.deepcopy(policy), n_left=50)
            plan = replace(plan, n_max=min(6, plan.n_max))
            drafts.append(plan.stop.cut(draft_alone(drafter.propose(context, plan))))
        texts = {draft.tokens for draft in drafts}
        ended = {tokens for tokens in texts if len(tokens) < 6}
        for tokens, n in itertools.product(texts, range(6)):
            assert len(tokens) <= n or tokens[:n] not in ended
        n_texts += len(texts)
        # The policy is in another state for the next text.
        for draft in drafts[:10]:
            policy.observe(result(draft, len(draft) // 2))
    assert n_texts > 15


@pytest.mark.parametrize("name", POLICIES)
def test_no_draft_is_longer_than_the_longest(name: str) -> None:
    plan = planned(POLICIES[name](max_tokens=3, p_min=0.0))
    assert plan.n_max == 3
    assert draft_steps(plan, [1.0] * 4) == [
        (True, True),
        (True, True),
        (True, False),
        (False, False),
    ]


@pytest.mark.parametrize("name", POLICIES)
def test_a_draft_below_the_bound_on_each_token_goes_no_further(name: str) -> None:
    plan = planned(POLICIES[name](p_min=0.6))
    assert [takes for takes, _ in draft_steps(plan, [0.9, 0.59])] == [True, False]


def test_the_lengths_where_the_user_names_none_are_those_of_the_policy() -> None:
    assert FixedPolicy(DraftOptions(policy="fixed")).n_max == FIXED_LENGTH
    assert ThresholdPolicy(DraftOptions(policy="threshold")).n_max == LONGEST_DRAFT
    assert cost_aware().n_max == LONGEST_DRAFT
    assert DraftOptions(policy="fixed").stops_below == FIXED_P_MIN
    assert DraftOptions().stops_below == 0.0
    assert DraftOptions(policy="fixed", p_min=0.1).stops_below == 0.1
    assert (DraftOptions().adds_ngrams, DraftOptions(policy="fixed").adds_ngrams) == (True, False)
    assert not DraftOptions(ngrams=False).adds_ngrams
    assert DraftOptions().policy == "cost"


# --- fixed lengths


def test_short_fixed_drafts_are_dropped() -> None:
    policy = fixed(4, min_tokens=3)
    assert cut(policy, chain(0.9, 0.9)) is NO_DRAFT
    assert len(cut(policy, chain(0.1, 0.1, 0.1))) == 3


def test_costs_drop_short_drafts_too() -> None:
    policy = CostAwarePolicy(DraftOptions(min_tokens=3), CostTable(FLAT))
    assert cut(policy, chain(0.9, 0.9)) is NO_DRAFT
    assert len(cut(policy, chain(0.9, 0.9, 0.9))) == 3
    assert len(cut(policy, drawn(0.9, 0.9))) == 2
    for n_found, reason in ((2, "acceptance"), (3, "found")):
        found = chain(*[0.9] * n_found, origin="ngram")
        plan = planned(policy, found, drafter=None)
        assert plan.reason == reason
        assert len(plan.found) == (n_found if reason == "found" else 0)


# --- an adapting bound


def test_the_bound_stays_within_its_limits_and_falls_slowly_where_nothing_is_drafted() -> None:
    policy = threshold()
    draft = chain(0.9)
    for _ in range(100):
        policy.observe(result(draft, 0))
    assert bound_of(policy) == pytest.approx(0.9)
    before = bound_of(policy)
    policy.observe(result(NO_DRAFT, 0))
    assert 0.95 * before < bound_of(policy) < before
    for _ in range(500):
        policy.observe(result(draft, 1))
    assert bound_of(policy) == pytest.approx(0.01)
    for _ in range(500):
        policy.observe(result(NO_DRAFT, 0))
    assert bound_of(policy) == pytest.approx(0.01)


def test_the_bound_is_on_the_draft_as_a_whole() -> None:
    policy = threshold()
    bound = bound_of(policy)
    n = int(math.log(bound) / math.log(0.8))  # tokens of 0.8 that are above it together
    plan = planned(policy)
    assert [takes for takes, _ in draft_steps(plan, [0.8] * (n + 1))] == [True] * n + [False]
    assert len(plan.stop.cut(chain(*[0.8] * 16))) == n
    # A sure draft grows long, an unsure one not at all.
    assert all(takes for takes, _ in draft_steps(plan, [0.999] * 16))
    assert not plan.after_draft_step(0, 1.0, 0.9 * bound).keep_token


def test_an_n_gram_whose_probability_nobody_knows_is_not_cut() -> None:
    assert len(cut(threshold(), chain(*[None] * 16, origin="ngram"))) == 16


@pytest.mark.parametrize("over", [0.0, 0.15, -0.15])
def test_a_fixed_share_of_what_is_drafted_is_refused_in_the_long_run(over: float) -> None:
    """Whatever a model's probabilities are worth. (Rounds without a draft lower the bound a
    little, so that the share is larger where there are many.)"""
    confidences, rights = text(20_000, lambda c: min(1.0, max(0.0, c + over)), seed=4)
    world = World(lambda _: 1.0, 0.0, confidences, rights)
    policy = threshold()
    refused: list[float] = []
    bounds: list[float] = []
    observe = policy.observe

    def observed(told: RoundResult) -> None:
        if len(told.draft):
            refused.append(1.0 - len(told.path) / len(told.draft))
        observe(told)
        bounds.append(bound_of(policy))

    policy.observe = observed  # type: ignore[method-assign,assignment]
    n_rounds = run(world, policy).n_rounds
    share = float(np.mean(refused))
    expected = 0.25 + 0.025 * (n_rounds - len(refused)) / len(refused)
    if max(bounds) < 0.89:
        assert share == pytest.approx(expected, abs=0.02)
    else:  # a bound as high as it may be is not always high enough
        assert expected - 0.02 < share < 0.4


# --- costs: how well it does

CURVES: dict[str, Callable[[int], float]] = {
    "flat": lambda _: 1.0,
    "gentle": lambda n: 0.9 + 0.1 * n,
    "linear": lambda n: 0.6 + 0.4 * n,
    "steep": lambda n: 0.3 + 0.7 * n,
    "steps of four": steps({1: 1.0, 5: 2.0, 9: 3.0, 13: 4.0}),
    "a cliff": steps({1: 1.0, 9: 3.0}),
    "jagged": steps({1: 1.0, 2: 1.6, 3: 1.7, 5: 2.4, 8: 2.5, 9: 4.0}),
    "in proportion": lambda n: 1.0 * n,
}
TRUTHS: dict[str, Callable[[float], float]] = {
    "honest": lambda c: c,
    "better than it says": lambda c: 0.1 + 0.88 * c,
    "half as good": lambda c: 0.1 + 0.5 * c,
    "too sure": lambda c: c**3,
    "says nothing": lambda _: 0.7,
}


@pytest.mark.slow
@pytest.mark.parametrize("sureness", [0.0, 1.0])
@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize("curve", CURVES)
def test_in_the_long_run_it_is_about_as_quick_as_the_best_fixed_length(
    curve: str, truth: str, sureness: float
) -> None:
    ratios = []
    for draft_s in (0.02, 0.1, 0.3):
        first, world = (  # the first text is to learn from
            World(CURVES[curve], draft_s, *text(1200, TRUTHS[truth], sureness=sureness, seed=seed))
            for seed in (1, 2)
        )
        table = CostTable(first.table())
        acceptance = dict[str, AcceptanceCounts]()
        run(first, CostAwarePolicy(DraftOptions(), table, acceptance))
        found = run(world, CostAwarePolicy(DraftOptions(), table, acceptance))
        best, best_s = world.best_fixed()
        ratios.append(best_s / found.seconds)
        assert ratios[-1] > (0.94 if world.plain_s > 1.2 * best_s else 0.88), (draft_s, best)
        assert world.plain_s / found.seconds > 0.98
    assert np.mean(ratios) > 0.94


@pytest.mark.parametrize("curve", ["flat", "gentle", "linear"])
def test_where_the_model_knows_what_it_knows_it_is_quicker_than_any_fixed_length(
    curve: str,
) -> None:
    first, world = (
        World(CURVES[curve], 0.1, *text(3000, lambda c: c, sureness=2.0, seed=seed))
        for seed in (1, 2)
    )
    table = CostTable(first.table())
    acceptance = dict[str, AcceptanceCounts]()
    run(first, CostAwarePolicy(DraftOptions(), table, acceptance))
    found = run(world, CostAwarePolicy(DraftOptions(), table, acceptance))
    assert found.seconds < 0.97 * world.best_fixed()[1]


@pytest.mark.parametrize("truth", ["honest", "better than it says"])
def test_where_rows_cost_nothing_drafts_are_as_long_as_they_pay(truth: str) -> None:
    """As for a target that is read from disk, where a draft step takes a hundredth of a pass."""
    first, world = (
        World(CURVES["flat"], 0.01, *text(1200, TRUTHS[truth], seed=seed), n_max=32)
        for seed in (1, 2)
    )
    table = CostTable(first.table())
    acceptance = dict[str, AcceptanceCounts]()
    options = DraftOptions(max_tokens=32)
    run(first, CostAwarePolicy(options, table, acceptance))
    found = run(world, CostAwarePolicy(options, table, acceptance))
    assert max(found.lengths) > LONGEST_DRAFT
    assert found.seconds < world.best_fixed()[1] / 0.97


def test_a_short_prefill_does_not_wait() -> None:
    """The first pass would be a plain one, which takes seconds if it is read from disk."""
    policy = cost_aware()
    assert planned(policy, price=Price(0.01, 0.01, prefill_s=0.1)).reason == "model"
    assert planned(policy, price=Price(0.01, 0.01, prefill_s=0.5)).reason == "prefill"


HOPELESS: dict[str, tuple[Callable[[float], float], float]] = {
    "always wrong": (lambda _: 0.0, 0.1),
    "random": (lambda _: 0.05, 0.1),
    "hardly ever right and nearly free": (lambda _: 0.03, 0.01),
    "as dear as the target": (lambda c: c, 1.0),
    "dearer than the target": (lambda _: 0.95, 1.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("sureness", [0.0, 1.0])
@pytest.mark.parametrize("kind", HOPELESS)
@pytest.mark.parametrize("curve", CURVES)
def test_a_draft_that_cannot_pay_costs_next_to_nothing(
    curve: str, kind: str, sureness: float
) -> None:
    """Not even in a first text, of which nothing is known."""
    truth, draft_s = HOPELESS[kind]
    confidences, rights = text(1200, truth, sureness=sureness, seed=3)
    world = World(CURVES[curve], draft_s, confidences, rights)
    if world.plain_s > 1.02 * world.best_fixed()[1]:
        pytest.skip("it pays after all")
    for prefill_s in (0.0, 5.0):
        found = run(world, cost_aware(world.table()), prefill_s=prefill_s)
        assert (world.plain_s + prefill_s) / found.seconds > 0.97, prefill_s


@dataclass
class Texts:
    """Consecutive texts of 160 tokens, before which the draft model's prefill takes the time of ten
    tokens.

    What the policy learns is kept. The model's confidence shows which kind a text is.
    """

    curve: str
    draft_s: float
    prefill_s: float = 10.0
    acceptance: dict[str, AcceptanceCounts] = field(default_factory=dict)
    table: CostTable = field(default_factory=CostTable)
    ratios: list[float] = field(default_factory=list)

    def go_on(
        self, confidence: float, seed: int, slowness: Callable[[], float] = lambda: 1.0
    ) -> Run:
        rng = np.random.default_rng(seed)
        confidences = np.clip(rng.normal(confidence, 0.1, 160), 0.02, 0.999)
        rights = (rng.random(160) < confidences).astype(np.float64)
        world = World(CURVES[self.curve], self.draft_s, confidences, rights)
        if not self.table:
            self.table = CostTable(world.table())
        policy = CostAwarePolicy(DraftOptions(), self.table, self.acceptance)
        found = run(world, policy, prefill_s=self.prefill_s, slowness=slowness)
        self.ratios.append(world.plain_s / found.seconds)
        return found


@pytest.mark.parametrize(("curve", "draft_s"), [("jagged", 0.2), ("linear", 0.1)])
def test_texts_that_suit_a_draft_badly_do_not_keep_it_from_others(
    curve: str, draft_s: float
) -> None:
    texts = Texts(curve, draft_s)
    for seed in range(6):
        texts.go_on(0.25, seed)
    n_steps = [texts.go_on(0.96, seed).n_draft_steps for seed in range(6, 14)]
    assert min(n_steps[-4:]) > 60
    assert min(texts.ratios) > 0.85
    assert np.mean(texts.ratios[:6]) > 0.94
    assert np.mean(texts.ratios[-4:]) > 1.25


@pytest.mark.parametrize(("n_quiet", "slowness"), [(9, 30.0), (30, 100.0)])
@pytest.mark.parametrize(
    ("curve", "draft_s"), [("gentle", 0.05), ("gentle", 0.3), ("linear", 0.05)]
)
def test_occasional_stalls_of_the_machine_do_not_stop_drafting_in_later_texts(
    curve: str, draft_s: float, n_quiet: int, slowness: float
) -> None:
    texts = Texts(curve, draft_s, prefill_s=1.0)
    for seed in range(4):
        texts.go_on(0.9, seed)
    rng = np.random.default_rng(4)
    for seed in range(4, 6):
        texts.go_on(0.9, seed, lambda: float(rng.choice([1.0] * n_quiet + [slowness])))
    for seed in range(6, 12):
        texts.go_on(0.9, seed)
    assert np.mean(texts.ratios[6:]) > 0.9 * np.mean(texts.ratios[:4])


@pytest.mark.parametrize(("curve", "draft_s"), [("steep", 0.2), ("linear", 0.3), ("jagged", 0.3)])
def test_a_draft_that_pays_in_no_text_costs_next_to_nothing_in_the_long_run(
    curve: str, draft_s: float
) -> None:
    texts = Texts(curve, draft_s)
    for seed in range(40):
        texts.go_on(0.25, seed)
    assert np.mean(texts.ratios[:8]) > 0.93
    assert np.mean(texts.ratios[8:]) > 0.97


@pytest.mark.parametrize("n_forced", [0, 1, 8])
def test_a_drafter_earns_nothing_for_tokens_that_the_grammar_forced(n_forced: int) -> None:
    """Each round takes two and a half plain decodes for the one token that was not forced."""
    policy = cost_aware()
    for _ in range(4):
        plan = RoundPlan("model", drafter="model")
        round_result = result(chain(0.9, 0.9), 0, target_s=1.5, draft_s=1.0, plan=plan)
        round_result.committed += (5,) * n_forced
        round_result.n_without_choice = n_forced
        policy.observe(round_result)
    assert planned(policy).reason == "put aside"


def test_the_draft_models_prefill_is_weighed_against_the_rest_of_the_answer() -> None:
    confidences, rights = text(60, lambda _: 0.8, sureness=0.0)
    world = World(CURVES["flat"], 0.1, confidences, rights)
    assert run(world, cost_aware(world.table()), prefill_s=500.0).n_draft_steps == 0
    assert run(world, cost_aware(world.table()), prefill_s=2.0).n_draft_steps > 0
    policy = cost_aware()
    price = Price(0.1, 0.1, 10.0)
    # At first nothing is known of how long the answer is: it may end at once.
    plan = planned(policy, n_left=4000, price=price)
    assert (plan.n_max, plan.reason) == (0, "prefill")
    for _ in range(40):  # of the time so far no more than a part is risked
        policy.observe(result(NO_DRAFT, 0))
    starts = [planned(policy, n_left=n, price=price).n_max > 0 for n in (4, 40, 400, 4000)]
    assert starts == sorted(starts)
    assert starts[0] is False
    assert starts[-1] is True


def test_a_chain_that_is_known_is_cut_where_the_round_is_fastest() -> None:
    """Against a search over all lengths."""
    rng = np.random.default_rng(5)
    for _ in range(20):
        seconds = np.cumsum(rng.uniform(0.0, 0.6, 17)) + 1.0
        policy = cost_aware(dict(enumerate(seconds.tolist(), 1)))
        draft = chain(*rng.uniform(0.3, 1.0, 16).tolist(), origin="ngram")
        plan = planned(policy, draft, drafter=None)
        assert isinstance(plan.stop, CostAwareStopping)
        acceptances = plan.stop.cumulative_acceptances(draft)
        n_tokens = 1.0 + np.cumsum([0.0, *acceptances])
        tokens_per_s = n_tokens / seconds
        assert len(plan.found) == tokens_per_s.argmax()
        assert plan.reason == ("found" if len(plan.found) else "acceptance")


def test_short_answers_lose_little_with_a_draft_that_says_it_is_unsure() -> None:
    """Answers of twelve tokens without earlier measurements, and a model that is as often right as
    its confidence says.
    """
    ratios: list[float] = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        confidences = np.clip(rng.normal(0.3, 0.1, 12), 0.02, 0.999)
        rights = (rng.random(12) < confidences).astype(np.float64)
        world = World(CURVES["gentle"], 0.14, confidences, rights)
        ratios.append(world.plain_s / run(world, cost_aware(world.table()), prefill_s=0.7).seconds)
    assert np.mean(ratios) > 0.975


def test_the_cost_of_plain_decoding_stays_up_to_date() -> None:
    confidences, rights = text(4000, lambda _: 1.0, sureness=0.0)
    world = World(CURVES["flat"], 0.01, confidences, rights)
    lengths = run(world, cost_aware(world.table())).lengths
    gaps = np.diff([0, *np.flatnonzero(np.array(lengths) == 0)])
    assert lengths.count(0) < 0.05 * len(lengths)
    assert gaps.max() <= 70


def test_a_change_in_the_machines_speed_is_noticed() -> None:
    """Batches cost nothing more by the table, and as much as their rows in truth."""
    confidences, rights = text(3000, lambda _: 0.8, sureness=0.0)
    world = World(CURVES["in proportion"], 0.1, confidences, rights)
    found = run(world, cost_aware(FLAT))
    assert world.plain_s / found.seconds > 0.94
    assert np.mean(found.lengths[-200:]) < 0.5


def test_a_text_that_changes_is_followed() -> None:
    """A draft that is right in the first half and the last quarter only."""
    rng = np.random.default_rng(6)
    right = np.concatenate([rng.random(1000) < p for p in (0.85, 0.85, 0.0, 0.85)])
    world = World(CURVES["gentle"], 0.1, np.full(4000, 0.75), right.astype(np.float64))
    found = run(world, cost_aware(world.table()))
    apart = sum(
        World(
            world.target_s, 0.1, world.confidences[i : i + 1000], world.rights[i : i + 1000]
        ).best_fixed()[1]
        for i in range(0, 4000, 1000)
    )
    assert found.seconds < 1.12 * apart


# --- learning costs


@pytest.mark.parametrize(("n_accepted", "n_judged"), [(0, 1), (1, 2), (3, 4), (4, 4)])
def test_a_token_is_judged_only_if_those_before_it_were_accepted(
    n_accepted: int, n_judged: int
) -> None:
    acceptance: dict[str, AcceptanceCounts] = {}
    policy = cost_aware(acceptance=acceptance)
    draft = cut(policy, chain(0.95, 0.95, 0.95, 0.95))
    assert len(draft) == 4
    policy.observe(result(draft, n_accepted))
    assert acceptance["model"].n_judged.sum() == pytest.approx(n_judged, abs=0.1)
    assert acceptance["model"].n_accepted.sum() == pytest.approx(n_accepted, abs=0.1)


@pytest.mark.parametrize("is_found", [False, True])
@pytest.mark.parametrize(
    ("tokens", "n_judged", "n_right"), [((0, 1), 2, 2), ((0, 7), 2, 1), ((5,), 1, 0)]
)
def test_tokens_not_worth_verifying_are_compared_with_the_text(
    tokens: tuple[int, ...], n_judged: int, n_right: int, is_found: bool
) -> None:
    """A model's draft, or n-grams that the plan does not follow: that they are right is seen at no
    cost.
    """
    acceptance: dict[str, AcceptanceCounts] = {}
    policy = cost_aware({n: 1.0 * n for n in range(1, 18)}, acceptance)
    proposed = chain(*[0.9] * 5, origin="ngram" if is_found else "model")
    plan = planned(
        policy, proposed if is_found else NO_DRAFT, drafter=None if is_found else "model"
    )
    assert len(plan.found) == len(plan.stop.cut(proposed)) == 0
    policy.observe(RoundResult(plan, NO_DRAFT, (), 0.0, 1.0, 1, tokens, (proposed,)))
    (counts,) = (each for each in acceptance.values() if each.n_judged.sum() > 0)
    assert counts.n_judged.sum() == pytest.approx(n_judged, abs=0.1)
    assert counts.n_accepted.sum() == pytest.approx(n_right, abs=0.1)


def test_a_drawn_token_is_judged_by_the_confidence_before_the_draw() -> None:
    acceptance: dict[str, AcceptanceCounts] = {}
    policy = cost_aware(acceptance=acceptance)
    draft = planned(policy).stop.cut(
        replace(drawn(0.05, 0.15, 0.2), step_confidences=(0.93, 0.55, 0.1))
    )
    assert len(draft) == 3
    policy.observe(result(draft, 1))
    counts = acceptance["model"]
    assert np.flatnonzero(counts.n_judged).tolist() == [5, 9]
    assert np.flatnonzero(counts.n_accepted).tolist() == [9]


def test_a_draft_and_its_beginning_are_judged_once() -> None:
    """A found chain is proposed completely, and the part that is verified is in the draft again."""
    acceptance: dict[str, AcceptanceCounts] = {}
    policy = cost_aware({1: 1.0, 2: 1.0, 3: 50.0}, acceptance)
    plan = planned(policy)
    found = chain(0.95, 0.95, 0.95)
    once = plan.stop.cut(found)
    assert len(once) == 1
    policy.observe(RoundResult(plan, once, (0,), 0.0, 1.0, 2, (0, 1), (found, once)))
    assert acceptance["model"].n_judged.sum() == pytest.approx(2.0, abs=0.1)
    assert acceptance["model"].n_accepted.sum() == pytest.approx(2.0, abs=0.1)


@settings(max_examples=40)
@given(
    st.lists(st.floats(0.001, 10.0), min_size=1, max_size=17),
    st.lists(
        st.tuples(
            st.lists(st.floats(0.0, 1.0), max_size=6), st.integers(0, 6), st.floats(1e-4, 100.0)
        ),
        max_size=30,
    ),
    st.floats(0.0, 5.0),
)
def test_its_estimates_are_finite_after_any_observations(
    seconds: list[float], rounds: Sequence[tuple[list[float], int, float]], draft_s: float
) -> None:
    policy = cost_aware(dict(enumerate(seconds, 1)))
    for confidences, n_right, target_s in rounds:
        plan = planned(policy, n_left=50, price=Price(draft_s, draft_s, draft_s))
        kept: list[float] = []
        cumulative_acceptance = 1.0
        for confidence in confidences[: plan.n_max]:
            step = plan.after_draft_step(len(kept), cumulative_acceptance, confidence)
            cumulative_acceptance = step.cumulative_acceptance
            assert math.isfinite(cumulative_acceptance)
            if not step.keep_token:
                break
            kept.append(confidence)
        draft = plan.stop.cut(chain(*kept))
        if isinstance(plan.stop, CostAwareStopping):
            assert math.isfinite(plan.stop.worth_of(draft))
            assert 0.0 < plan.stop.token_s < math.inf
        n_accepted = min(n_right, len(draft))
        policy.observe(result(draft, n_accepted, target_s, draft_s, plan=plan))


# --- plans


def test_given_tokens_are_kept_without_a_decision() -> None:
    """A translated draft drafts the end of the text again first."""
    plan = planned(fixed(5, p_min=0.5))
    plan = replace(plan, n_max=plan.n_max + 2, n_given=2)
    assert plan.n_max == 7
    assert [takes for takes, _ in draft_steps(plan, [0.0] * 3)] == [True, True, False]
    decisions = draft_steps(plan, [0.0, 0.0, *[0.9] * 6])
    assert decisions == [*[(True, True)] * 6, (True, False), (False, False)]
