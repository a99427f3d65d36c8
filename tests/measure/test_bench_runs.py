"""Everyone answers every prompt, in turn."""

from __future__ import annotations

import pytest

from specgen.errors import BackendError, PromptError
from specgen.measure.bench.runs import Failure, Lineup, Outcome, Runs, SkippedPrompt, run_lineups
from specgen.measure.prompts import BenchPrompt
from tests.helpers.bench import OUTCOME, FakeContender, outcome

Log = list[tuple[str, str]]
PROMPTS = [BenchPrompt(number, "all", f"p{number}") for number in (1, 2, 3)]


def lineup(log: Log, *names: str, temperature: float = 0.0) -> Lineup:
    others = tuple(FakeContender(name, log) for name in names)
    return Lineup("target", temperature, FakeContender("plain", log), others)


def measured(*lineups: Lineup, **options: object) -> Runs:
    runs = Runs()
    run_lineups(lineups, PROMPTS, runs, **options)  # type: ignore[arg-type]
    return runs


def test_plain_decoding_is_first_and_the_others_take_turns() -> None:
    log: Log = []
    runs = measured(lineup(log, "a", "b"), n_rounds=2)
    assert log[:3] == [("plain", "warm-up"), ("a", "warm-up"), ("b", "warm-up")]
    turns = [
        [name for name, _ in log[3 + 3 * turn : 6 + 3 * turn]] for turn in range(2 * len(PROMPTS))
    ]
    assert turns == [["plain", "a", "b"], ["plain", "b", "a"]] * 3
    assert [prompt for _, prompt in log[3::3]] == ["p1", "p2", "p3"] * 2
    assert [(each.prompt, each.round) for each in runs.results[::3]] == [
        (number, round_) for round_ in (1, 2) for number in (1, 2, 3)
    ]
    assert [each.contender for each in runs.results if each.is_plain] == ["plain"] * 6
    assert {each.outcome for each in runs.results} == {OUTCOME}


def test_all_lineups_answer_a_prompt_before_the_next_one() -> None:
    log: Log = []
    runs = measured(lineup(log, "a"), lineup(log, "b", temperature=0.8))
    names = ["plain", "a", "plain", "b"]
    assert [name for name, _ in log] == names * 4
    assert [each.temperature for each in runs.results[:4]] == [0.0, 0.0, 0.8, 0.8]


def test_who_fails_is_left_out_and_the_others_go_on() -> None:
    log: Log = []
    both = lineup(log, "a", "b")
    first, second = both.others
    assert isinstance(first, FakeContender)
    assert isinstance(second, FakeContender)
    first.fails["p2"] = BackendError("a is broken")
    second.fails[""] = PromptError("b cannot begin")
    runs = measured(both, lineup(log, "a", temperature=1.0))
    assert runs.failures == [
        Failure("target", 0.0, "b", None, "b cannot begin"),
        Failure("target", 0.0, "a", 2, "a is broken"),
    ]
    told = [(each.temperature, each.contender, each.prompt) for each in runs.results]
    assert [each for each in told if each[1] == "a"] == [
        (0.0, "a", 1),
        (1.0, "a", 1),
        (1.0, "a", 2),
        (1.0, "a", 3),
    ]
    assert [each[2] for each in told if each[:2] == (0.0, "plain")] == [1, 2, 3]


def test_a_prompt_that_plain_decoding_cannot_answer_is_skipped() -> None:
    log: Log = []
    only = lineup(log, "a")
    assert isinstance(only.plain, FakeContender)
    only.plain.fails["p2"] = PromptError("too long")
    runs = measured(only, n_rounds=2)
    assert runs.skipped == [SkippedPrompt("target", 2, "too long")]
    assert ("a", "p2") not in log
    assert log.count(("plain", "p2")) == 1
    assert len(runs.results) == 8
    only.plain.fails |= {f"p{n}": PromptError("too long") for n in (1, 3)}
    with pytest.raises(PromptError, match="no prompt can be answered.*too long"):
        measured(only)


def test_if_plain_decoding_fails_there_is_nothing_to_compare_with() -> None:
    log: Log = []
    only = lineup(log, "a")
    assert isinstance(only.plain, FakeContender)
    only.plain.fails["p2"] = BackendError("broken")
    runs = Runs()
    with pytest.raises(BackendError, match="broken"):
        run_lineups([only], PROMPTS, runs)
    assert [each.prompt for each in runs.results] == [1, 1]


def test_an_answer_that_was_cut_short_does_not_count() -> None:
    log: Log = []
    only = lineup(log, "a")

    def cut(_prompt: str) -> Outcome:
        return outcome(finish_reason="interrupted")

    assert isinstance(only.others[0], FakeContender)
    only.others[0].answers = cut
    assert [each.contender for each in measured(only).results] == ["plain"]
