"""The costs of decodes, acceptance rates, the decision to stop drafting, and the estimated
speed-up.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.method.acceptance import N_BINS, AcceptanceRates
from specgen.method.answer_stats import AnswerStats
from specgen.method.cost_table import FREE, CostTable, Price
from specgen.method.policy import RoundPlan, RoundResult
from specgen.method.stopping import CostAwareStopping, draft_step_values

# --- expected costs of decodes


#: Five rows cost as much as eight, and nine twice as much.
JAGGED = {1: 1.0, 2: 1.1, 4: 1.2, 5: 2.0, 8: 2.0, 9: 4.0}

TIMES = st.floats(0.001, 100.0)
TABLES = st.dictionaries(st.integers(1, 40), TIMES, min_size=1, max_size=8)


@given(TABLES, st.integers(1, 80))
def test_costs_between_two_sizes_are_interpolated(seconds: dict[int, float], n_rows: int) -> None:
    table = CostTable(seconds)
    sizes = sorted(seconds)
    assert list(table.known.items()) == sorted(seconds.items())
    found = table.seconds(n_rows)
    if n_rows > sizes[-1]:
        assert found == pytest.approx(seconds[sizes[-1]] * n_rows / sizes[-1])
    else:
        # Fewer rows than any that is known cost what the fewest known do.
        assert found == pytest.approx(np.interp(n_rows, sizes, [seconds[n] for n in sizes]))


def test_no_rows_cost_nothing_and_an_empty_table_has_no_estimate() -> None:
    table = CostTable()
    assert not table
    assert table.seconds(0) == table.seconds(-3) == 0.0
    with pytest.raises(LookupError):
        table.seconds(1)
    assert Price(0.0, 0.0) == FREE


@pytest.mark.parametrize("sense", [{0: 1.0}, {-1: 1.0}, {1: 0.0}, {1: -2.0}, {1: float("nan")}])
def test_nonsensical_costs_are_ignored(sense: dict[int, float]) -> None:
    table = CostTable(sense)
    for size, seconds in sense.items():
        table.set_seconds(size, seconds)
        table.observe(size, seconds)
    assert not table


def test_the_cost_of_every_size_is_learnt_from_any_initial_estimate() -> None:
    truth = {n: JAGGED.get(n, 1.5) for n in range(1, 10)}
    table = CostTable(dict.fromkeys(range(1, 10), 1.0))
    rng = np.random.default_rng(1)
    for n in rng.integers(1, 10, 3000):
        table.observe(int(n), truth[int(n)] * float(np.exp(rng.normal(0.0, 0.05))))
    for n, seconds in truth.items():
        assert table.seconds(n) == pytest.approx(seconds, rel=0.12)


@given(TABLES, st.floats(1.0, 1e6))
def test_a_single_outlier_moves_the_estimate_only_slightly(
    seconds: dict[int, float], factor: float
) -> None:
    table = CostTable(seconds)
    sizes = list(seconds)
    for _ in range(4):
        for size in sizes:
            table.observe(size, table.seconds(size))
    before = table.known
    table.observe(sizes[0], factor * before[sizes[0]])
    for size in sizes:
        assert before[size] * 0.999 <= table.seconds(size) <= 1.11 * before[size]


# --- how often tokens are accepted, learnt from what became of them


#: One confidence of each bin.
OF_EACH_BIN = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.93, 0.98, 1.0)


def judged(acceptance: AcceptanceRates, truth: dict[float, float], n: int, seed: int = 0) -> None:
    """Judge tokens of these confidences, each accepted with its chance."""
    rng = np.random.default_rng(seed)
    confidences = list(truth)
    for index in rng.integers(0, len(confidences), n):
        confidence = confidences[index]
        acceptance.count_steps([confidence])
        acceptance.judge(confidence, accepted=bool(rng.random() < truth[confidence]))


def test_before_any_counts_acceptance_equals_the_models_confidence() -> None:
    acceptance = AcceptanceRates()
    assert acceptance.curve() == pytest.approx(OF_EACH_BIN, abs=0.06)


@pytest.mark.parametrize("over", [0.0, 0.2, -0.2])
def test_the_curve_approaches_the_observed_acceptance(over: float) -> None:
    truth = {c: min(0.97, max(0.03, c + over)) for c in OF_EACH_BIN}
    acceptance = AcceptanceRates()
    judged(acceptance, truth, 12_000)
    acceptance = AcceptanceRates(counts=acceptance.counts)
    for confidence, chance in truth.items():
        assert acceptance.acceptance(confidence) == pytest.approx(chance, abs=0.07)


def test_a_text_that_deviates_moves_all_chances_and_the_next_one_begins_without() -> None:
    acceptance = AcceptanceRates()
    judged(acceptance, dict.fromkeys(OF_EACH_BIN, 0.6), 6000)
    acceptance = AcceptanceRates(counts=acceptance.counts)
    before = np.array(acceptance.curve())
    for _ in range(40):
        acceptance.judge(0.85, accepted=False)
    during = np.array(acceptance.curve())
    # The others too, about which this text has shown nothing.
    assert np.all(during < before - 0.1)
    acceptance = AcceptanceRates(counts=acceptance.counts)
    after = np.array(acceptance.curve())
    others = [index for index in range(N_BINS) if OF_EACH_BIN[index] != 0.85]
    assert after[others] == pytest.approx(before[others], abs=1e-9)
    assert after[OF_EACH_BIN.index(0.85)] < before[OF_EACH_BIN.index(0.85)]


def test_old_counts_fade_and_new_ones_outweigh_them() -> None:
    acceptance = AcceptanceRates()
    judged(acceptance, {0.55: 0.9}, 20_000)
    # As many as are remembered, not as there were.
    assert acceptance.counts.n_judged.sum() < 2000
    judged(acceptance, {0.55: 0.2}, 4000, seed=1)
    acceptance = AcceptanceRates(counts=acceptance.counts)
    assert acceptance.acceptance(0.55) < 0.35


# --- when to stop: the rule against the search through everything that may happen


def searched(
    batch_s: list[float],
    next_s: float,
    token_s: float,
    frequencies: list[float],
    chances: list[float],
    n: int,
    chance: float,
) -> float:
    """The value of a draft step, by trying both answers to each question."""
    if n >= len(batch_s) - 1:
        return 0.0
    value = -next_s
    for frequency, own in zip(frequencies, chances, strict=True):
        after = chance * own
        further = searched(batch_s, next_s, token_s, frequencies, chances, n + 1, after)
        taken = after * token_s - (batch_s[n + 1] - batch_s[n]) + max(0.0, further)
        value += frequency * max(0.0, taken)
    return value


def rule(
    batch_s: list[float],
    next_s: float,
    token_s: float,
    frequencies: list[float],
    chances: list[float],
) -> CostAwareStopping:
    """The rule of a drafter whose one confidence is accepted with the first of the chances."""
    known = cast(
        AcceptanceRates,
        SimpleNamespace(
            frequencies=lambda: np.array(frequencies),
            curve=lambda: chances,
            acceptance=lambda _: chances[0],
        ),
    )
    return CostAwareStopping(
        origin="model",
        rates_of=lambda _, rank: known,
        token_s=token_s,
        extra_s=[seconds - batch_s[0] for seconds in batch_s],
        next_s=next_s,
        values=draft_step_values(batch_s, next_s, token_s, known),
    )


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[float], float, float, list[float], list[float]]:
    """Costs of batches and of a draft step, and the worth of a token; how often bins come, and how
    often their tokens are accepted.
    """
    n_bins = draw(st.integers(1, 3))
    weights = draw(st.lists(st.floats(0.05, 1.0), min_size=n_bins, max_size=n_bins))
    chances = draw(st.lists(st.floats(0.05, 0.99), min_size=n_bins, max_size=n_bins))
    batch_s = draw(st.lists(st.floats(0.5, 3.0), min_size=2, max_size=6))
    next_s = draw(st.floats(0.0, 1.0))
    token_s = draw(st.floats(0.2, 2.0))
    total = sum(weights)
    return batch_s, next_s, token_s, [weight / total for weight in weights], chances


@settings(max_examples=150)
@given(worlds(), st.floats(0.05, 1.0))
def test_the_value_is_that_of_the_best_answers_to_all_questions(
    world: tuple[list[float], float, float, list[float], list[float]], chance: float
) -> None:
    found = rule(*world)
    n_max = len(world[0]) - 1
    token_s = world[2]
    for n in range(n_max + 1):
        expected = searched(*world, n, chance)
        # Values lie on a grid; what is near zero anyway is not decided by that. Probabilities below
        # the grid's first one are worth a little more than they should be.
        assert found.value(n, chance) == pytest.approx(expected, abs=0.1 * token_s)


# --- the figures of an answer


def test_the_speed_up_of_the_whole_answer_includes_the_prompt() -> None:
    # 10 s for the prompt, then 40 tokens in 4 s, which take 8 s without a draft.
    stats = AnswerStats(prompt_s=10.0, wall_s=14.0, start_s=10.0, n_start_tokens=1)
    assert stats.speed(41) == pytest.approx(10.0)
    assert stats.whole_speedup(41, 0.2) == pytest.approx(18 / 14)
    assert stats.whole_speedup(41, None) is None
    assert stats.whole_speedup(1, 0.2) is None


def decode(n_committed: int, target_s: float, n_sequences: int = 1) -> RoundResult:
    """A round of four rows."""
    path = tuple(range(n_committed - 1))
    committed = tuple(range(n_committed))
    return RoundResult(
        RoundPlan("off"),
        path=path,
        target_s=target_s,
        n_rows=4,
        committed=committed,
        n_sequences=n_sequences,
    )


@pytest.mark.parametrize("pace", [0.5, 1.0, 3.0])
def test_the_price_of_plain_decoding_follows_the_speed_of_the_machine(pace: float) -> None:
    costs = CostTable({1: 0.1, 2: 0.14, 4: 0.2})
    stats = AnswerStats()
    assert stats.priced_token_s(costs) is None
    stats.add_round(decode(3, pace * 0.2))
    stats.add_round(decode(1, pace * 0.2, n_sequences=2))
    assert stats.priced_token_s(costs) == pytest.approx(pace * (3 * 0.1 + 0.07) / 4)
    assert stats.priced_token_s(CostTable()) is None


def test_the_uncertainty_follows_from_how_much_decodes_differ() -> None:
    steady = AnswerStats()
    rough = AnswerStats()
    for number in range(30):
        steady.add_round(decode(2, 0.2))
        rough.add_round(decode(2, 0.2 if number % 2 else 0.24))
    # The price of a plain token is of another moment, and single outliers do not count.
    assert steady.speedup_error() == pytest.approx(0.1)
    steady.add_round(decode(2, 5.0))
    assert steady.speedup_error() == pytest.approx(0.1)
    # 0.2 or 0.24: 9 % from their mean, of which two standard errors are 18 %.
    assert rough.speedup_error() == pytest.approx(0.18, abs=0.02)
    # A few decodes do not tell how much they differ.
    few = AnswerStats()
    few.add_round(decode(2, 0.2))
    assert few.speedup_error() > rough.speedup_error()
