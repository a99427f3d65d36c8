"""How often a drafter's tokens are accepted, learnt from what became of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.method.acceptance import (
    N_BINS,
    NGRAM_ORIGINS,
    AcceptanceRates,
    start_of,
)

CONFIDENCES = st.floats(0.0, 1.0)
#: One confidence of each bin.
OF_EACH_BIN = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.93, 0.98, 1.0)


def judged(acceptance: AcceptanceRates, truth: dict[float, float], n: int, seed: int = 0) -> None:
    """Judge tokens of these confidences, each accepted with its chance."""
    rng = np.random.default_rng(seed)
    confidences = list(truth)
    for index in rng.integers(0, len(confidences), n):
        confidence = confidences[index]
        acceptance.see(confidence)
        acceptance.judge(confidence, accepted=bool(rng.random() < truth[confidence]))


def test_before_anything_was_seen_a_surer_drafter_is_held_to_be_right_more_often() -> None:
    for origin in ("model", *NGRAM_ORIGINS):
        curve = np.array(AcceptanceRates(origin).curve())
        assert np.all(np.diff(curve) > 0.0)
        assert curve[0] == pytest.approx(start_of(origin, 0.05))
        assert 0.0 < AcceptanceRates(origin).mean() < 1.0
        assert AcceptanceRates(origin).n_judged == 0.0
    # An unsure model may be right; a repetition that was never one is hardly so.
    assert AcceptanceRates("model").chance(0.0) > AcceptanceRates("ngram").chance(0.0)


@pytest.mark.parametrize("over", [0.0, 0.2, -0.2])
def test_the_curve_becomes_what_was_accepted(over: float) -> None:
    truth = {c: min(0.97, max(0.03, c + over)) for c in OF_EACH_BIN}
    acceptance = AcceptanceRates()
    judged(acceptance, truth, 12_000)
    acceptance = acceptance.for_new_text()
    for confidence, chance in truth.items():
        assert acceptance.chance(confidence) == pytest.approx(chance, abs=0.07)


def test_a_text_that_deviates_moves_all_chances_and_the_next_one_begins_without() -> None:
    acceptance = AcceptanceRates()
    judged(acceptance, dict.fromkeys(OF_EACH_BIN, 0.6), 6000)
    acceptance = acceptance.for_new_text()
    before = np.array(acceptance.curve())
    for _ in range(40):
        acceptance.judge(0.85, accepted=False)
    during = np.array(acceptance.curve())
    # Those of which this text said nothing too.
    assert np.all(during < before - 0.1)
    acceptance = acceptance.for_new_text()
    after = np.array(acceptance.curve())
    others = [index for index in range(N_BINS) if OF_EACH_BIN[index] != 0.85]
    assert after[others] == pytest.approx(before[others], abs=1e-9)
    assert after[OF_EACH_BIN.index(0.85)] < before[OF_EACH_BIN.index(0.85)]


@given(st.lists(st.tuples(CONFIDENCES, st.booleans()), max_size=300))
def test_a_chance_is_never_certain_and_what_was_counted_makes_sense(
    tokens: list[tuple[float, bool]],
) -> None:
    acceptance = AcceptanceRates()
    for confidence, accepted in tokens:
        acceptance.see(confidence)
        acceptance.judge(confidence, accepted=accepted)
    curve = np.array(acceptance.curve())
    assert np.all((curve > 0.0) & (curve < 1.0))
    assert acceptance.frequencies().sum() == pytest.approx(1.0)
    assert curve.min() - 1e-12 <= acceptance.mean() <= curve.max() + 1e-12
    counts = acceptance.counts
    assert np.all(counts.n_accepted <= counts.n_judged + 1e-9)
    assert acceptance.n_judged <= len(tokens) + 1e-9


@given(st.lists(st.tuples(CONFIDENCES, st.booleans()), max_size=50), CONFIDENCES)
def test_an_accepted_token_never_lowers_a_chance_and_a_refused_one_never_raises_it(
    tokens: list[tuple[float, bool]], confidence: float
) -> None:
    accepting, refusing = AcceptanceRates(), AcceptanceRates()
    for acceptance, last in ((accepting, True), (refusing, False)):
        for seen, accepted in tokens:
            acceptance.judge(seen, accepted=accepted)
        before = np.array(acceptance.curve())
        acceptance.judge(confidence, accepted=last)
        difference = acceptance.curve() - before
        assert np.all(difference >= -2e-3) if last else np.all(difference <= 2e-3)


def test_old_counts_fade_and_new_ones_outweigh_them() -> None:
    acceptance = AcceptanceRates()
    judged(acceptance, {0.55: 0.9}, 20_000)
    # As many as are remembered, not as there were.
    assert acceptance.n_judged < 2000
    judged(acceptance, {0.55: 0.2}, 4000, seed=1)
    acceptance = acceptance.for_new_text()
    assert acceptance.chance(0.55) < 0.35


def test_the_shift_of_a_text_is_bounded() -> None:
    acceptance = AcceptanceRates()
    judged(acceptance, {0.55: 0.5}, 3000)
    acceptance = acceptance.for_new_text()
    kept = acceptance.chance(0.15)
    for _ in range(500):
        acceptance.judge(0.55, accepted=False)
    moved = acceptance.chance(0.15)
    # Of another confidence, nothing was seen: what this text can do to it has an end.
    assert 0.0 < math.log(kept / (1.0 - kept)) - math.log(moved / (1.0 - moved)) <= 2.5 + 1e-6


def test_trials_use_up_a_credit_that_comes_back_slowly() -> None:
    counts = AcceptanceRates().counts
    assert counts.trial_credit == 0.0
    for _ in range(10):
        counts.account(1, -4.0)
    assert counts.trial_credit == pytest.approx(-40.0, abs=1.0)
    for _ in range(1000):
        counts.account(1)
    assert counts.trial_credit == pytest.approx(-20.0, abs=2.0)
    for _ in range(1000):
        counts.account(3, 2.0)
    assert counts.trial_credit < 50.0  # what was saved once is no credit for ever
