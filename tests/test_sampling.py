"""The samplers against slow, obvious versions of themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from specgen.arrays import Logits
from specgen.errors import BackendError
from specgen.options import SamplerOptions
from specgen.sampling import Distribution, argmax, distribution, top_k, top_probability

#: Few distinct values make ties likely.
VALUES = st.sampled_from([-np.inf, -30.0, -1.0, 0.0, 0.5, 0.5000001, 2.0, 30.0]) | st.floats(
    -50, 50, width=32
)


def rows(max_size: int = 400) -> st.SearchStrategy[Logits]:
    shapes = st.integers(1, max_size)
    arrays = hnp.arrays(np.float32, shapes, elements=VALUES)
    return arrays.filter(lambda row: bool(np.isfinite(row.max())))


def slow_distribution(row: Logits, options: SamplerOptions) -> dict[int, float]:
    """Sort everything, then apply each step as its paper says."""
    if options.greedy:
        return {int(row.argmax()): 1.0}
    ranked = sorted(
        ((float(logit), token) for token, logit in enumerate(row) if logit > -np.inf),
        key=lambda pair: (-pair[0], pair[1]),
    )
    if 0 < options.top_k < len(row):
        ranked = ranked[: options.top_k]
    if options.top_p < 1:
        mass = np.array([np.exp(logit - ranked[0][0]) for logit, _ in ranked])
        reached = np.flatnonzero(mass.cumsum() >= options.top_p * mass.sum())
        # Rounding may leave the whole sum a hair under p times itself.
        ranked = ranked[: (reached[0] if len(reached) else len(ranked)) + 1]
    if options.min_p > 0:
        least = ranked[0][0] + np.log(options.min_p)
        ranked = [pair for pair in ranked if pair[0] >= least] or ranked[:1]
    weights = [np.exp((logit - ranked[0][0]) / options.temperature) for logit, _ in ranked]
    total = sum(weights)
    return {token: w / total for (_, token), w in zip(ranked, weights, strict=True) if w > 0}


@given(
    rows(),
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.sampled_from([0, 1, 2, 5, 40, 1000]),
    st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.0]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_a_distribution_is_what_its_definition_says(
    row: Logits, temperature: float, k: int, p: float, min_p: float
) -> None:
    options = SamplerOptions(temperature=temperature, top_k=k, top_p=p, min_p=min_p)
    result = distribution(row, options)
    expected = slow_distribution(row, options)
    assert result.probs.sum() == pytest.approx(1.0)
    assert (np.diff(result.token_ids) > 0).all()
    assert (result.probs > 0).all()
    found = dict(zip(result.token_ids.tolist(), result.probs.tolist(), strict=True))
    if set(found) != set(expected):
        # Allowed where the border of top-p falls between two equal sums.
        assert 0.0 < p < 1.0
        assert abs(len(found) - len(expected)) <= 1
    else:
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-12)


@given(rows(3000), st.integers(1, 300))
def test_top_k_takes_the_largest_and_the_lowest_ids_among_equals(row: Logits, k: int) -> None:
    token_ids, scores = top_k(row, k)
    ranked = sorted(range(len(row)), key=lambda token: (-row[token], token))[:k]
    expected = [token for token in ranked if row[token] > -np.inf]
    assert token_ids.tolist() == expected
    assert scores.tolist() == row[expected].tolist()


def test_top_p_of_a_large_vocabulary_equals_the_sorted_definition() -> None:
    rng = np.random.default_rng(3)
    for scale in (0.5, 3.0, 10.0):  # from nearly flat to peaked: the candidates must grow
        row = rng.normal(0.0, scale, 50_000).astype(np.float32)
        for p in (0.1, 0.9, 0.999):
            options = SamplerOptions(temperature=1.0, top_k=0, top_p=p, min_p=0.0)
            expected = slow_distribution(row, options)
            found = distribution(row, options)
            assert abs(len(found.token_ids) - len(expected)) <= 1
            assert set(found.token_ids.tolist()) ^ set(expected) <= set(expected) | set(
                found.token_ids.tolist()
            )
            shared = [t for t in found.token_ids.tolist() if t in expected]
            assert len(shared) >= len(expected) - 1


@given(rows())
def test_the_top_probability_is_that_of_the_softmax(row: Logits) -> None:
    probs = np.exp(row.astype(np.float64) - row.max())
    assert top_probability(row) == pytest.approx(1.0 / probs.sum(), rel=1e-4)
    assert argmax(row) == int(np.flatnonzero(row == row.max())[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [0, 3])
def test_logits_that_are_no_numbers_are_refused(bad: float, temperature: float, k: int) -> None:
    row = np.full(500, bad if bad == -np.inf else 0.0, np.float32)
    row[77] = bad
    options = SamplerOptions(temperature=temperature, top_k=k, top_p=1.0)
    with pytest.raises(BackendError):
        distribution(row, options)
    with pytest.raises(BackendError):
        top_probability(row)


PROBS = hnp.arrays(np.float64, 8, elements=st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0])).filter(
    lambda probs: bool(probs.sum() > 0)
)


def sparse(probs: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Distribution:
    ids = np.flatnonzero(probs)
    return Distribution(ids, probs[ids] / probs.sum())


@given(PROBS, PROBS)
def test_the_residual_is_the_normalised_positive_part(
    target: np.ndarray[tuple[int], np.dtype[np.float64]],
    draft: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> None:
    expected = np.maximum(0.0, target / target.sum() - draft / draft.sum())
    residual = sparse(target).minus(sparse(draft))
    if residual is None:
        assert expected.sum() < 1e-9
    elif expected.sum() > 1e-9:
        dense = np.zeros(8)
        dense[residual.token_ids] = residual.probs
        assert dense == pytest.approx(expected / expected.sum(), abs=1e-9)


def test_a_draw_inverts_the_cumulative_distribution() -> None:
    class Fixed:
        def __init__(self, value: float) -> None:
            self.value = value

        def random(self) -> float:
            return self.value

    source = Distribution(np.array([2, 5, 9]), np.array([0.25, 0.5, 0.25]))
    for value, token in [(0.0, 2), (0.2499, 2), (0.25, 5), (0.7499, 5), (0.75, 9), (0.99999, 9)]:
        assert source.draw(Fixed(value)) == token  # type: ignore[arg-type]
    assert source.probability(5) == 0.5
    assert source.probability(4) == 0.0
    assert source.probability(10) == 0.0
