"""How often a drafter's tokens are accepted, learnt from what became of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.decoding.policy.acceptance import (
    N_BINS,
    NGRAM_ORIGINS,
    AcceptanceCounts,
    Chances,
    TextWorths,
    model_start,
    new_chances,
)
from specgen.decoding.policy.acceptance import ngram_start as start_of_ngrams

CONFIDENCES = st.floats(0.0, 1.0)
#: One confidence of each bin.
OF_EACH_BIN = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.93, 0.98, 1.0)


def judged(chances: Chances, truth: dict[float, float], n: int, seed: int = 0) -> None:
    """Judge tokens of these confidences, each accepted with its chance."""
    rng = np.random.default_rng(seed)
    confidences = list(truth)
    for index in rng.integers(0, len(confidences), n):
        confidence = confidences[index]
        chances.see(confidence)
        chances.judge(confidence, accepted=bool(rng.random() < truth[confidence]))


def test_there_is_a_bin_for_each_confidence() -> None:
    assert len(OF_EACH_BIN) == N_BINS
    chances = Chances()
    for index, confidence in enumerate(OF_EACH_BIN):
        before = chances.counts.n_judged.copy()
        chances.judge(confidence, accepted=True)
        assert np.flatnonzero(chances.counts.n_judged != before).tolist() == [index]
        assert chances.curve()[index] == chances.chance(confidence)


def test_before_anything_was_seen_a_surer_drafter_is_held_to_be_right_more_often() -> None:
    for origin, start in (("model", model_start), *((o, start_of_ngrams) for o in NGRAM_ORIGINS)):
        curve = np.array(new_chances(origin).curve())
        assert np.all(np.diff(curve) > 0.0)
        assert curve[0] == pytest.approx(start(0.05))
        assert 0.0 < new_chances(origin).mean() < 1.0
        assert new_chances(origin).n_judged == 0.0
    # An unsure model may be right; a repetition that was never one is hardly so.
    assert new_chances("model").chance(0.0) > new_chances("ngram").chance(0.0)


@pytest.mark.parametrize("over", [0.0, 0.2, -0.2])
def test_the_curve_becomes_what_was_accepted(over: float) -> None:
    truth = {c: min(0.97, max(0.03, c + over)) for c in OF_EACH_BIN}
    chances = Chances()
    judged(chances, truth, 12_000)
    chances = chances.for_new_text()
    for confidence, chance in truth.items():
        assert chances.chance(confidence) == pytest.approx(chance, abs=0.07)


def test_a_text_that_deviates_moves_all_chances_and_the_next_one_begins_without() -> None:
    chances = Chances()
    judged(chances, dict.fromkeys(OF_EACH_BIN, 0.6), 6000)
    chances = chances.for_new_text()
    before = np.array(chances.curve())
    for _ in range(40):
        chances.judge(0.85, accepted=False)
    during = np.array(chances.curve())
    # Those of which this text said nothing too.
    assert np.all(during < before - 0.1)
    chances = chances.for_new_text()
    after = np.array(chances.curve())
    others = [index for index in range(N_BINS) if OF_EACH_BIN[index] != 0.85]
    assert after[others] == pytest.approx(before[others], abs=1e-9)
    assert after[OF_EACH_BIN.index(0.85)] < before[OF_EACH_BIN.index(0.85)]


def test_what_is_never_accepted_soon_promises_little_and_may_recover() -> None:
    chances = Chances()
    for _ in range(60):
        chances.judge(0.9, accepted=False)
    assert chances.chance(0.9) < 0.1
    for _ in range(120):
        chances.judge(0.9, accepted=True)
    assert chances.chance(0.9) > 0.6


@given(st.lists(st.tuples(CONFIDENCES, st.booleans()), max_size=300))
def test_a_chance_is_never_certain_and_what_was_counted_makes_sense(
    tokens: list[tuple[float, bool]],
) -> None:
    chances = Chances()
    for confidence, accepted in tokens:
        chances.see(confidence)
        chances.judge(confidence, accepted=accepted)
    curve = np.array(chances.curve())
    assert np.all((curve > 0.0) & (curve < 1.0))
    assert chances.frequencies().sum() == pytest.approx(1.0)
    assert curve.min() - 1e-12 <= chances.mean() <= curve.max() + 1e-12
    counts = chances.counts
    assert np.all(counts.n_accepted <= counts.n_judged + 1e-9)
    assert chances.n_judged <= len(tokens) + 1e-9


@given(st.lists(st.tuples(CONFIDENCES, st.booleans()), max_size=50), CONFIDENCES)
def test_an_accepted_token_never_lowers_a_chance_and_a_refused_one_never_raises_it(
    tokens: list[tuple[float, bool]], confidence: float
) -> None:
    accepting, refusing = Chances(), Chances()
    for chances, last in ((accepting, True), (refusing, False)):
        for seen, accepted in tokens:
            chances.judge(seen, accepted=accepted)
        before = np.array(chances.curve())
        chances.judge(confidence, accepted=last)
        difference = chances.curve() - before
        assert np.all(difference >= -2e-3) if last else np.all(difference <= 2e-3)


def test_old_counts_fade_and_new_ones_outweigh_them() -> None:
    chances = Chances()
    judged(chances, {0.55: 0.9}, 20_000)
    # As many as are remembered, not as there were.
    assert chances.n_judged < 2000
    judged(chances, {0.55: 0.2}, 4000, seed=1)
    chances = chances.for_new_text()
    assert chances.chance(0.55) < 0.35


def test_what_was_not_seen_for_long_is_not_forgotten() -> None:
    chances = Chances()
    judged(chances, {0.15: 0.9}, 400)
    kept = chances.counts.n_judged[1]
    judged(chances, {0.98: 0.5}, 5000)
    assert chances.counts.n_judged[1] == kept


def test_the_frequencies_are_those_of_what_was_seen_judged_or_not() -> None:
    chances = Chances()
    rng = np.random.default_rng(2)
    for _ in range(1000):
        chances.see(0.15 if rng.random() < 0.3 else 0.98)
    frequencies = chances.frequencies()
    assert frequencies[1] == pytest.approx(0.3, abs=0.06)
    assert frequencies[10] == pytest.approx(0.7, abs=0.06)
    assert chances.n_judged == 0.0
    assert chances.mean() == pytest.approx(float(frequencies @ chances.curve()))


def test_counts_of_earlier_texts_are_gone_on_from() -> None:
    first = Chances()
    judged(first, {0.75: 0.3}, 500)
    kept = AcceptanceCounts(
        first.counts.n_judged.copy(), first.counts.n_accepted.copy(), first.counts.n_seen.copy()
    )
    second = new_chances("model", kept)
    first = first.for_new_text()
    assert second.curve() == pytest.approx(first.curve())
    second.judge(0.75, accepted=True)
    assert second.counts is kept
    assert second.n_judged > first.n_judged


def test_whatever_changes_the_chances_changes_the_version() -> None:
    chances = Chances()
    versions = [chances.version]
    chances.judge(0.5, accepted=True)
    versions.append(chances.version)
    chances.see(0.5)
    versions.append(chances.version)
    assert len(set(versions)) == 3


def test_the_shift_of_a_text_is_bounded() -> None:
    chances = Chances()
    judged(chances, {0.55: 0.5}, 3000)
    chances = chances.for_new_text()
    kept = chances.chance(0.15)
    for _ in range(500):
        chances.judge(0.55, accepted=False)
    moved = chances.chance(0.15)
    # Of another confidence, nothing was seen: what this text can do to it has an end.
    assert 0.0 < math.log(kept / (1.0 - kept)) - math.log(moved / (1.0 - moved)) <= 2.5 + 1e-6


def test_how_sure_it_is_in_the_present_text_counts_most() -> None:
    chances = Chances()
    for _ in range(500):
        chances.see(0.15)
    chances = chances.for_new_text()
    assert chances.frequencies()[1] > 0.9
    for _ in range(20):
        chances.see(0.98)
    assert chances.frequencies()[10] == pytest.approx(0.5, abs=0.03)
    chances = chances.for_new_text()
    assert chances.frequencies()[1] > 0.85


# --- what texts are worth ----------------------------------------------------------------------


def test_before_any_text_the_next_is_worth_what_was_thought() -> None:
    mean, deviation = TextWorths(start=0.3).of_next(look=0.2)
    assert mean == 0.3
    assert deviation > 0.3
    # What gains nothing but costs its looks is worth that in all texts.
    mean, deviation = TextWorths(start=-0.2).of_next(look=0.2)
    assert mean == -0.2
    assert deviation < 0.1


@pytest.mark.parametrize(("middle", "spread"), [(0.4, 0.5), (-0.3, 0.1), (0.0, 0.3)])
def test_after_many_texts_the_next_is_worth_what_they_were(middle: float, spread: float) -> None:
    rng = np.random.default_rng(0)
    worths = TextWorths(start=0.2)
    for worth in rng.normal(middle, spread, 300):
        worths.add(float(worth), 1.0)
    mean, deviation = worths.of_next(look=0.2)
    assert mean == pytest.approx(middle, abs=0.15)
    assert deviation == pytest.approx(spread, abs=0.12)


def test_a_few_bad_texts_leave_it_open_what_the_next_is_like() -> None:
    worths = TextWorths(start=0.2)
    for _ in range(4):
        worths.add(-0.2, 0.5)
    mean, deviation = worths.of_next(look=0.2)
    assert -0.2 < mean < 0.1
    assert deviation > 0.3


def test_a_text_counts_once_and_by_how_much_was_seen_of_it() -> None:
    chances = Chances()
    worths = chances.counts.worths
    chances.expect(0.5)
    assert worths.start == 0.5
    chances.see(0.9)
    chances.end_text()
    assert worths.n == 0.0  # too little was seen
    for n_looks in (10, 100):
        before = worths.n
        chances = chances.for_new_text()
        for _ in range(n_looks):
            chances.see(0.9)
        chances.expect(0.7)
        chances.end_text()
        chances.end_text()
        chances = chances.for_new_text()
        assert worths.n - before == pytest.approx(n_looks / (n_looks + 20), abs=0.05)
    assert worths.total / worths.n == pytest.approx(0.7)
    assert worths.start == 0.5


def test_what_may_be_lost_is_bounded_and_comes_back_slowly() -> None:
    worths = TextWorths(start=0.2)
    first = worths.allowance
    for _ in range(10):
        worths.account(-4.0, 1)
    assert worths.allowance == pytest.approx(first - 40.0, abs=1.0)
    for _ in range(1000):
        worths.account(0.0, 1)
    assert worths.allowance == pytest.approx(first - 20.0, abs=2.0)
    for _ in range(1000):
        worths.account(2.0, 3)
    assert worths.allowance < 100.0  # what was saved once is no credit for ever
