"""What a draft model can be expected to gain from what decodes cost, and what is kept of that."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.arrays import Logits
from specgen.backend.base import Batch
from specgen.backend.fake import FakeBackend, FakeVocabulary, random_language
from specgen.costs import (
    ACCEPTANCE,
    WORTH,
    Costs,
    keep_costs,
    kept_costs,
    outlook,
    rows_s,
    time_pair,
)

COSTS = Costs({1: 0.03, 2: 0.04, 3: 0.05, 4: 0.06}, 0.002)
#: A machine on which the rows of a batch cost nearly as much as tokens one by one.
DEAR = Costs({1: 31.7, 2: 56.0, 3: 77.0, 4: 98.0}, 8.7)


# --- what to expect


def test_the_expected_speed_up_is_that_of_the_best_number_of_tokens() -> None:
    # 1: 3 * 1.7 / (4 + 0.2), 2: 3 * 2.19 / (5 + 0.4), 3: 3 * 2.533 / (6 + 0.6)
    expected = outlook(COSTS)
    assert expected.n_drafted == 2
    assert expected.speedup == pytest.approx(3 * 2.19 / 5.4)
    assert expected.batch_tokens == pytest.approx(5 / 3)
    assert expected.token_tokens == pytest.approx(0.2 / 3)
    assert expected.free_speedup == pytest.approx(3 * 2.19 / 5)
    assert expected.is_worth_it
    assert not expected.rules_out_all


def test_where_batches_are_dear_no_draft_model_pays() -> None:
    expected = outlook(DEAR)
    assert expected.n_drafted == 1
    assert expected.speedup == pytest.approx(31.7 * 1.7 / (56.0 + 8.7))
    assert not expected.is_worth_it
    assert expected.rules_out_all
    only_longest = outlook(Costs({1: 31.7, 2: 1000.0, 3: 1000.0, 4: 98.0}, 8.7))
    assert (only_longest.n_drafted, round(only_longest.speedup, 2)) == (3, 0.65)


def test_a_dear_draft_rules_out_itself_only() -> None:
    expected = outlook(Costs(COSTS.batch_s, 0.02))
    assert not expected.is_worth_it
    assert not expected.rules_out_all


def test_batches_that_cost_nothing_more_are_worth_the_longest_draft() -> None:
    expected = outlook(Costs({1: 0.03, 9: 0.03}, 1e-9))
    assert expected.n_drafted == 8
    assert expected.speedup == pytest.approx(sum(ACCEPTANCE**n for n in range(9)))


@given(
    st.lists(st.floats(0.001, 10.0), min_size=2, max_size=9),
    st.floats(0.0001, 10.0),
    st.floats(1.0, 10.0),
)
def test_what_costs_more_never_gains_more(
    seconds: list[float], draft_token_s: float, factor: float
) -> None:
    batch_s = dict(enumerate(seconds, 1))
    expected = outlook(Costs(batch_s, draft_token_s))
    assert 0.0 < expected.speedup <= expected.free_speedup
    assert outlook(Costs(batch_s, factor * draft_token_s)).speedup <= expected.speedup * (1 + 1e-9)
    # What is expected is a ratio: the unit does not matter.
    scaled = {size: factor * time for size, time in batch_s.items()}
    assert outlook(Costs(scaled, factor * draft_token_s)).speedup == pytest.approx(expected.speedup)


def test_what_no_batch_size_promises_is_less_than_the_longest_draft_could_give() -> None:
    assert outlook(Costs({1: 1.0, 2: 1.7 / WORTH - 1e-6}, 1e-9)).is_worth_it
    assert not outlook(Costs({1: 1.0, 2: 1.7 / WORTH + 1e-6}, 1e-9)).is_worth_it


# --- timing


@dataclass(slots=True)
class TimedBackend(FakeBackend):
    """Decodes in `seconds(n_rows, n_decodes)`, and says so."""

    seconds: Callable[[int, int], float] = lambda _rows, _decodes: 0.01

    def decode(self, batch: Batch) -> Logits:
        # The zero-argument super() does not know the class that slots=True makes.
        logits = FakeBackend.decode(self, batch)
        self.decode_s += self.seconds(len(batch), self.n_decodes)
        return logits


def backend(seconds: Callable[[int, int], float], n_ctx: int = 256) -> TimedBackend:
    vocabulary = FakeVocabulary.letters(26)
    return TimedBackend(vocabulary, random_language(26, seed=3), n_ctx=n_ctx, seconds=seconds)


@pytest.mark.parametrize("n_rows_max", [2, 4, 17, 40])
def test_batches_and_a_drafts_tokens_are_timed_and_the_caches_left_alone(n_rows_max: int) -> None:
    target = backend(lambda rows, _: 0.010 + 0.001 * rows)
    draft = backend(lambda rows, _: 0.002 * rows)
    costs = time_pair(target, draft, n_rows_max)
    assert {1, 2, n_rows_max} <= set(costs.batch_s) or costs.batch_s[max(costs.batch_s)] > 0.033
    for size, seconds in costs.batch_s.items():
        assert seconds == pytest.approx(0.010 + 0.001 * size)
    assert costs.draft_token_s == pytest.approx(0.002)
    for one in (target, draft):
        assert 0 < one.length(0) < 16
        assert not one.closed


def test_what_is_too_dear_for_any_draft_ends_the_timing() -> None:
    target = backend(lambda rows, _: 0.02 * rows)
    assert sorted(time_pair(target, backend(lambda *_: 0.001), 40).batch_s) == [1, 2, 3, 4]


def test_a_context_without_room_leaves_larger_batches_out() -> None:
    target = backend(lambda rows, _: 0.02, n_ctx=12)
    costs = time_pair(target, backend(lambda *_: 0.001, n_ctx=6), 40)
    assert sorted(costs.batch_s) == list(range(1, 9))


def test_a_moment_of_disturbance_does_not_count() -> None:
    # The whole first round, or each third decode of the draft, takes ten times as long.
    target = backend(lambda rows, n: (0.001 + 0.0001 * rows) * (10 if n < 9 else 1))
    draft = backend(lambda _, n: 0.0002 * (10 if n % 3 == 0 else 1))
    costs = time_pair(target, draft, 4)
    assert costs.batch_s == pytest.approx({n: 0.001 + 0.0001 * n for n in (1, 2, 3, 4)})
    assert costs.draft_token_s == pytest.approx(0.0002)


def test_a_moment_of_disturbance_does_not_end_the_timing_of_a_slow_model() -> None:
    # The sixth decode, in which the first batch of two is timed, takes ten times as long.
    target = backend(lambda rows, n: (0.1 + 0.01 * rows) * (10 if n == 6 else 1))
    costs = time_pair(target, backend(lambda *_: 0.001), 4)
    assert costs.batch_s == pytest.approx({n: 0.1 + 0.01 * n for n in (1, 2, 3, 4)})


def test_slow_models_are_timed_once_where_that_is_clear_and_twice_where_not() -> None:
    def n_decodes(draft_s: float) -> int:
        draft = backend(lambda *_: draft_s)
        time_pair(backend(lambda rows, _: 0.08 + 0.02 * rows), draft, 4)
        return draft.n_decodes

    once = n_decodes(0.5)
    assert n_decodes(0.001) == once
    assert n_decodes(0.03) == once + 1


# --- what is kept

KEY = {"target": {"name": "big.gguf", "size_bytes": 4000}, "cores": [2, 4], "n": 3}


def test_costs_are_read_again_under_their_key_only(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "costs.json"
    assert kept_costs(file, KEY) is None
    keep_costs(file, KEY, COSTS)
    assert kept_costs(file, KEY) == COSTS
    assert kept_costs(file, {**KEY, "n": 4}) is None
    keep_costs(file, {**KEY, "n": 4}, DEAR)
    assert kept_costs(file, KEY) == COSTS
    keep_costs(file, KEY, DEAR)
    assert kept_costs(file, KEY) == DEAR
    assert [path.name for path in file.parent.iterdir()] == ["costs.json"]


def test_the_latest_are_kept_and_the_file_stays_small(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    for n in range(70):
        keep_costs(file, {**KEY, "n": n}, COSTS)
    keep_costs(file, {**KEY, "n": 6}, DEAR)
    assert [kept_costs(file, {**KEY, "n": n}) is None for n in (5, 6, 7, 69)] == [
        True,
        False,
        False,
        False,
    ]
    assert len(json.loads(file.read_text(encoding="utf-8"))["costs"]) == 64


def entry(**changes: object) -> str:
    own = {"key": KEY, "batch_s": {"1": 0.1, "2": 0.2}, "draft_token_s": 0.05}
    return json.dumps({"costs": [{**own, **changes}]})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "\xff",
        "[" * 100_000,
        "[]",
        "{}",
        '{"costs": 3}',
        '{"costs": [3, null, {}]}',
        entry(batch_s=None),
        entry(batch_s={}),
        entry(batch_s={"1": 0.1}),
        entry(batch_s={"2": 0.1, "3": 0.2}),
        entry(batch_s={"1": 0.1, "x": 0.2}),
        entry(batch_s={"1": 0.1, "-2": 0.2}),
        entry(batch_s={"1": 0.1, "0": 0.2}),
        entry(batch_s={"1": 0.1, "2": "0.2"}),
        entry(batch_s={"1": 0.1, "2": 0.0}),
        entry(batch_s={"1": float("nan"), "2": 0.1}),
        entry(draft_token_s=None),
        entry(draft_token_s=-0.1),
        entry(draft_token_s=float("inf")),
    ],
)
def test_what_makes_no_sense_is_measured_and_written_anew(tmp_path: Path, text: str) -> None:
    file = tmp_path / "costs.json"
    file.write_bytes(text.encode("latin-1"))
    assert kept_costs(file, KEY) is None
    keep_costs(file, KEY, COSTS)
    assert kept_costs(file, KEY) == COSTS


def test_what_is_whole_in_a_damaged_list_is_used(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    document = json.loads(entry())
    document["costs"].insert(0, {"key": KEY, "batch_s": 3})
    file.write_text(json.dumps(document), encoding="utf-8")
    assert kept_costs(file, KEY) == Costs({1: 0.1, 2: 0.2}, 0.05)


def test_a_place_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    for file in (tmp_path / "file" / "costs.json", tmp_path):
        keep_costs(file, KEY, COSTS)
        assert kept_costs(file, KEY) is None
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_seconds_between_two_sizes_are_in_proportion() -> None:
    assert rows_s({1: 1.0, 2: 2.0, 6: 4.0}, 4) == pytest.approx(3.0)
