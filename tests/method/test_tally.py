"""The figures of an answer that follow from its counts and times."""

from __future__ import annotations

import pytest

from specgen.method.cost_table import CostTable
from specgen.text.tally import Tally


def test_the_speed_up_of_the_whole_answer_includes_the_prompt() -> None:
    # 10 s for the prompt, then 40 tokens in 4 s, which take 8 s without a draft.
    tally = Tally(prompt_s=10.0, wall_s=14.0, start_s=10.0, n_start_tokens=1)
    assert tally.tokens_per_s(41) == pytest.approx(10.0)
    assert tally.whole_speedup(41, 0.2) == pytest.approx(18 / 14)
    assert tally.whole_speedup(41, None) is None
    assert tally.whole_speedup(1, 0.2) is None


@pytest.mark.parametrize("pace", [0.5, 1.0, 3.0])
def test_the_price_of_plain_decoding_follows_the_speed_of_the_machine(pace: float) -> None:
    costs = CostTable({1: 0.1, 2: 0.14, 4: 0.2})
    tally = Tally()
    assert tally.priced_token_s(costs) is None
    tally.add_decode(3, 4, pace * 0.2)
    tally.add_decode(1, 4, pace * 0.2, n_sequences=2)
    assert tally.priced_token_s(costs) == pytest.approx(pace * (3 * 0.1 + 0.07) / 4)
    assert tally.priced_token_s(CostTable()) is None


def test_the_uncertainty_follows_from_how_much_decodes_differ() -> None:
    steady, rough = Tally(), Tally()
    for number in range(30):
        steady.add_decode(2, 4, 0.2)
        rough.add_decode(2, 4, 0.2 if number % 2 else 0.24)
    # As much as times of decodes that do not differ at all can say, and single outliers do not count.
    least = steady.speedup_error(1)
    assert 0.0 < least < 0.05
    steady.add_decode(2, 4, 5.0)
    assert steady.speedup_error(1) == least
    # 0.2 or 0.24: 9 % from their mean, of which two standard errors are 18 %.
    assert rough.speedup_error(1) == pytest.approx(0.18, abs=0.02)
    assert rough.speedup_error(20) < rough.speedup_error(5) < rough.speedup_error(1)
    # A few decodes do not tell how much they differ.
    few = Tally()
    few.add_decode(2, 4, 0.2)
    assert few.speedup_error(1) > rough.speedup_error(1)
