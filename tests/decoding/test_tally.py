"""The figures of an answer that follow from its counts and times."""

from __future__ import annotations

import pytest

from specgen.decoding.tally import Tally


def test_the_speed_up_of_the_whole_answer_includes_the_prompt() -> None:
    # 10 s for the prompt, then 40 tokens in 4 s, which take 8 s without a draft.
    tally = Tally(prompt_s=10.0, wall_s=14.0, start_s=10.0, n_start_tokens=1)
    assert tally.tokens_per_s(41) == pytest.approx(10.0)
    assert tally.whole_speedup(41, 0.2) == pytest.approx(18 / 14)
    assert tally.whole_speedup(41, None) is None
    assert tally.whole_speedup(1, 0.2) is None


def test_reading_the_prompt_with_a_draft_model_counts_against_it() -> None:
    # As above, and the draft model reads the prompt too, in 5 s.
    tally = Tally(prompt_s=10.0, draft_s=5.0, wall_s=19.0, start_s=15.0, n_start_tokens=1)
    assert tally.whole_speedup(41, 0.2) == pytest.approx(18 / 19)
