"""Numbers with units, for people to read."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from specgen.system.quantities import human_bytes, seconds_text


def n_digits(text: str) -> int:
    """The number of digits in a text."""
    return sum(character.isdigit() for character in text)


@given(st.integers(1000, 10**17))
@example(9_996_000)
@example(99_960_000)
@example(999_600_000)
def test_sizes_have_three_digits(n_bytes: int) -> None:
    assert n_digits(human_bytes(n_bytes)) == 3


@given(st.floats(1.0, 999.0))
@example(9.996)
@example(99.96)
def test_durations_have_three_digits(seconds: float) -> None:
    assert n_digits(seconds_text(seconds)) == 3
