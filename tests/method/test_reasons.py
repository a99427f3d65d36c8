"""Every round gives a reason for what it drafted, or why it drafted nothing. A test causes each
reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from specgen.events import REASONS, CommittedEvent, FinishedEvent, ReasonName
from specgen.method.acceptance import AcceptanceCounts, AcceptanceRates
from specgen.method.cost_table import CostTable, Price
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.drafter import Drafting, ready
from specgen.method.policy import (
    CostAwarePolicy,
    FixedPolicy,
    Offer,
    Policy,
    RoundPlan,
    RoundResult,
    ThresholdPolicy,
)
from specgen.options import DraftOptions, GenerationOptions
from tests.helpers.fake_generations import FailingDrafter, NoDrafter, Setup
from tests.helpers.fake_grammar import FakeGrammar

FLAT = dict.fromkeys(range(1, 18), 1.0)
CHEAP = Price(0.05, 0.05)


def by_cost(
    table: dict[int, float] | None = None, **acceptance: AcceptanceCounts
) -> CostAwarePolicy:
    return CostAwarePolicy(DraftOptions(), CostTable(FLAT if table is None else table), acceptance)


def offer(
    found: Sequence[int] = (),
    drafter: str | None = "model",
    price: Price = CHEAP,
    n_max: int = 16,
    n_left: int = 100,
) -> Offer:
    draft = Draft.chain(found, "ngram", [0.95] * len(found)) if found else NO_DRAFT
    return Offer(n_left, n_max, draft, drafter, price)


def after(policy: Policy, n_rounds: int, asked: Offer, *, right: bool = False) -> RoundPlan:
    """The plan after some rounds of one second each, in which drafts of four tokens were right or
    wrong.
    """
    for _ in range(n_rounds):
        plan = policy.plan(asked)
        draft = plan.found
        if plan.n_max:
            draft = Draft.chain([1, 2, 3, 4], "model", [0.9] * 4, step_confidences=[0.9] * 4)
        path: tuple[int, ...] = ()
        committed: tuple[int, ...] = (9,)
        if right:
            path = tuple(range(len(draft)))
            committed = (*draft.tokens, 9)
        n_rows = 1 + len(draft)
        proposed = (asked.found, draft)
        policy.observe(RoundResult(plan, draft, path, 0.2, 1.0, n_rows, committed, proposed))
    return policy.plan(asked)


def first_trial(policy: Policy, asked: Offer) -> RoundPlan:
    """The first plan, in at most 200 rounds, that drafts."""
    plans = (after(policy, 1, asked) for _ in range(200))
    return next(plan for plan in plans if plan.n_max)


def wrong_chances() -> AcceptanceCounts:
    acceptance = AcceptanceRates()
    for _ in range(400):
        acceptance.count_steps([0.9])
        acceptance.judge(0.9, accepted=False)
    return acceptance.counts


#: What brings about each reason that a policy gives.
PLANS: dict[ReasonName, Callable[[], RoundPlan]] = {
    "found": lambda: by_cost().plan(offer([1, 2, 3], drafter=None)),
    "model": lambda: by_cost().plan(offer()),
    "trial": lambda: first_trial(by_cost(model=wrong_chances()), offer(price=Price(0.3, 0.3))),
    "fixed": lambda: FixedPolicy(DraftOptions(policy="fixed")).plan(offer()),
    "threshold": lambda: ThresholdPolicy(DraftOptions(policy="threshold")).plan(offer()),
    "costs unknown": lambda: by_cost({}).plan(offer()),
    "plain decode": lambda: after(by_cost(), 64, offer(), right=True),
    "no room": lambda: by_cost().plan(offer(n_max=0)),
    "nothing found": lambda: by_cost().plan(offer(drafter=None)),
    "prefill": lambda: by_cost().plan(offer(price=Price(0.05, 0.05, 9.0))),
    "row cost": lambda: by_cost({n: 1.0 * n for n in range(1, 18)}).plan(offer()),
    "acceptance": lambda: by_cost(model=wrong_chances()).plan(offer(price=Price(0.3, 0.3))),
    "put aside": lambda: after(
        by_cost({1: 0.5, **dict.fromkeys(range(2, 18), 0.6)}), 12, offer([1, 2, 3], drafter=None)
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_policy_gives_its_reason(name: ReasonName) -> None:
    plan = PLANS[name]()
    assert plan.reason == name
    drafts = name in ("found", "model", "trial", "fixed", "threshold")
    assert (plan.n_max + len(plan.found) > 0) == drafts


def test_reasons_have_their_numbers() -> None:
    assert PLANS["threshold"]().why == "a draft's probability must be at least 0.30"
    quick = by_cost({1: 1.0, **{n: n - 1.5 for n in range(2, 18)}})  # a batch of two, by noise
    assert quick.plan(offer(price=Price(9.0, 9.0))).why.endswith("checking it 0.00")
    assert PLANS["prefill"]().why == "the draft must first prefill the text, which takes 9.00 s"
    assert PLANS["row cost"]().why == (
        "a guess costs 0.05 of a token of the target, and checking it 1.00"
    )
    # A quick check does not explain why nothing is drafted: the guesses may be what costs.
    why = PLANS["acceptance"]().why
    assert "of its tokens are expected to be accepted" in why
    assert "a guess costs 0.30 of a token of the target" in why
    assert PLANS["no room"]().why == REASONS["no room"]


# --- reasons that only a round shows


class Unsure(NoDrafter):
    """Looks at the next token, and drafts nothing."""

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        return ready(replace(NO_DRAFT, step_confidences=(0.1,)))


class Forbidden(NoDrafter):
    """Drafts a token that no grammar of these tests allows."""

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        return ready(Draft.chain([7], "forbidden"))


#: A grammar of nothing but the tokens 1 and 2.
ONLY_ONES = FakeGrammar({0: {1: 0, 2: 0}})


def reasons(setup: Setup) -> list[str | None]:
    _, events = setup.run()
    return [event.reason for event in events if isinstance(event, CommittedEvent)]


BASE = Setup(options=GenerationOptions(max_tokens=12))
ROUNDS: dict[ReasonName, Callable[[], Setup]] = {
    "off": lambda: replace(BASE),
    "unsure": lambda: replace(BASE, drafter=Unsure()),
    "not ready": lambda: replace(BASE, drafter=NoDrafter()),
    "grammar": lambda: replace(BASE, drafter=Forbidden(), grammar=ONLY_ONES.start),
    "failed": lambda: replace(BASE, drafter=FailingDrafter(Unsure(), 2, RuntimeError("broken"))),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_gives_its_reason(name: ReasonName) -> None:
    said = reasons(ROUNDS[name]())
    assert said[0] is None  # the prompt's decode is no round
    assert said[1:] == {"off": ["off"] * 11, "failed": ["unsure"] * 2 + ["failed"] * 9}.get(
        name, [name] * 10 + ["no room"]
    )


def test_every_reason_is_brought_about_here_and_explained() -> None:
    assert set(PLANS) | set(ROUNDS) == set(REASONS)


def test_the_summary_counts_the_rounds_that_drafted_nothing() -> None:
    _, events = replace(BASE, drafter=FailingDrafter(Unsure(), 2, RuntimeError("broken"))).run()
    finished = events[-1]
    assert isinstance(finished, FinishedEvent)
    assert [(each.reason, each.n_rounds) for each in finished.undrafted] == [
        ("failed", 9),
        ("unsure", 2),
    ]
    assert finished.undrafted[0].text == REASONS["failed"]
