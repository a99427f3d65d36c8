"""`specgen bench`: all contenders answer every prompt in turns, and the figures of their
answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.errors import BackendError, PromptError, SpecgenError
from specgen.measure.benchmark import (
    Contender,
    Failure,
    Figures,
    Outcome,
    Result,
    Runs,
    Stages,
    entries_of,
    figures_of,
    shared_budget,
    speedup_sentences,
    take_turns,
)
from specgen.measure.prompts import BenchPrompt
from specgen.options import ContextOptions, SessionOptions
from specgen.session import weights_memory
from specgen.session.measurement_store import MeasurementStore, Threads
from specgen.session.weights_memory import budget_within
from specgen.system import machine
from tests.helpers.tiny import write_large_model

GB = 10**9
Log = list[tuple[str, str]]
PROMPTS = [BenchPrompt(number, "all", f"p{number}") for number in (1, 2, 3)]
OUTCOME = Outcome(
    text="text",
    n_tokens=11,
    finish_reason="length",
    tokens_per_s=10.0,
    time_to_first_token_s=1.0,
    token_ids=tuple(range(11)),
    n_rounds=5,
    n_drafted=10,
    drafted_by_depth=(10,),
    n_accepted=5,
    mean_accepted_length=2.0,
)


# --- turns


def fake(
    log: Log,
    name: str,
    temperature: float = 0.0,
    fails: dict[str, SpecgenError] | None = None,
    say: Callable[[str], Outcome] = lambda _prompt: OUTCOME,
) -> Contender:
    """Notes what it is asked; raises what `fails` has for a prompt, "warm-up" for warming up."""

    def answer(prompt: str) -> Outcome:
        log.append((name, prompt))
        if fails and prompt in fails:
            raise fails[prompt]
        return say(prompt)

    return Contender(temperature, name, answer, lambda: answer("warm-up"))


def measured(*contenders: Contender, n_passes: int = 1) -> Runs:
    runs = Runs()
    take_turns(contenders, PROMPTS, runs, n_passes=n_passes)
    return runs


def test_plain_decoding_is_first_and_the_others_take_turns() -> None:
    log: Log = []
    runs = measured(*(fake(log, name) for name in ("plain", "a", "b")), n_passes=2)
    assert log[:3] == [("plain", "warm-up"), ("a", "warm-up"), ("b", "warm-up")]
    turns = [[name for name, _ in log[at : at + 3]] for at in range(3, len(log), 3)]
    assert turns == [["plain", "a", "b"], ["plain", "b", "a"]] * 3
    assert [prompt for _, prompt in log[3::3]] == ["p1", "p2", "p3"] * 2
    assert [(each.prompt, each.round) for each in runs.results[::3]] == [
        (number, round_) for round_ in (1, 2) for number in (1, 2, 3)
    ]
    assert {each.outcome for each in runs.results} == {OUTCOME}


def test_a_contender_that_fails_is_left_out_and_the_others_continue() -> None:
    log: Log = []
    runs = measured(
        fake(log, "plain"),
        fake(log, "a", fails={"p2": BackendError("a is broken")}),
        fake(log, "b", fails={"warm-up": PromptError("b cannot begin")}),
        fake(log, "plain", 1.0),
        fake(log, "a", 1.0),
    )
    assert runs.failures == [
        Failure(0.0, "b", None, "b cannot begin"),
        Failure(0.0, "a", 2, "a is broken"),
    ]
    told = [(each.temperature, each.contender, each.prompt) for each in runs.results]
    assert [each for each in told if each[1] == "a"] == [
        *((0.0, "a", 1), (1.0, "a", 1), (1.0, "a", 2), (1.0, "a", 3))
    ]
    assert [each[2] for each in told if each[:2] == (0.0, "plain")] == [1, 2, 3]


def test_an_answer_that_was_cut_short_does_not_count() -> None:
    cut = fake([], "a", say=lambda _prompt: replace(OUTCOME, finish_reason="interrupted"))
    assert [each.contender for each in measured(fake([], "plain"), cut).results] == ["plain"]


# --- figures


def result(contender: str, prompt: int, speed: float, **changes: Any) -> Result:
    """An answer; that of `plain` is plain decoding's. Changes are those of the result or of its
    outcome.
    """
    values: dict[str, Any] = {
        "temperature": 0.0, "category": "all", "round": 1
    }  # fmt: skip
    own = {name: changes.pop(name) for name in values.keys() & changes.keys()}
    outcome = replace(OUTCOME, tokens_per_s=speed, **changes)
    return Result(contender=contender, prompt=prompt, outcome=outcome, **values | own)


def figures_of_a(*results: Result) -> Figures:
    (found,) = (each for each in figures_of(results) if each.contender == "a")
    return found


def test_a_speedup_is_over_plain_decoding_of_the_same_prompt_in_the_same_round() -> None:
    figures = figures_of_a(
        result("plain", 1, 10.0),
        result("a", 1, 2.5),
        result("plain", 2, 40.0),
        result("a", 2, 20.0),
        result("plain", 1, 5.0, round=2),
        result("a", 1, 20.0, round=2),
    )
    assert figures.speedup == pytest.approx((0.25 * 0.5 * 4.0) ** (1 / 3))
    assert figures.quartiles == (0.375, 2.25)
    # The worst prompt is so over all its rounds.
    assert figures.worst_speedup == 0.5
    assert (figures.n_answers, figures.tokens_per_s) == (3, 20.0)


def test_categories_count_alike_however_many_answers_they_have() -> None:
    figures = figures_of_a(
        *(result("plain", n, 1.0, category=name) for n, name in enumerate("xyyy")),
        *(
            result("a", n, 4.0 if name == "x" else 1.0, category=name)
            for n, name in enumerate("xyyy")
        ),
    )
    assert [(each.category, each.n_answers) for each in figures.categories] == [("x", 1), ("y", 3)]
    assert [each.speedup for each in figures.categories] == pytest.approx([4.0, 1.0])
    assert figures.speedup == pytest.approx(2.0)


def test_each_temperature_is_compared_with_its_own_plain_decoding() -> None:
    figures = figures_of(
        [
            result("plain", 1, 10.0),
            result("a", 1, 10.0),
            result("plain", 1, 5.0, temperature=0.8),
            result("a", 1, 10.0, temperature=0.8),
            result("a", 1, 10.0, temperature=1.0),
        ]
    )
    assert [(e.temperature, e.contender, e.speedup) for e in figures] == [
        (0.0, "plain", pytest.approx(1.0)),
        (0.0, "a", pytest.approx(1.0)),
        (0.8, "plain", pytest.approx(1.0)),
        (0.8, "a", pytest.approx(2.0)),
        (1.0, "a", None),
    ]


def test_counts_and_shares_are_over_all_answers() -> None:
    other = {
        "n_rounds": 15,
        "drafted_by_depth": (20, 10),
        "n_accepted": 5,
        "mean_accepted_length": 4.0,
        "time_to_first_token_s": 3.0,
    }
    figures = figures_of_a(
        result("plain", 1, 1.0),
        result("plain", 2, 1.0),
        result("a", 1, 1.0),
        result("a", 2, 1.0, **other),
    )
    assert figures.acceptance_rate == pytest.approx(0.25)
    assert figures.mean_accepted_length == pytest.approx((5 * 2.0 + 15 * 4.0) / 20)
    assert figures.first_token == pytest.approx(2.0)


def test_what_drafts_nothing_has_no_speedup() -> None:
    figures = figures_of(
        [
            result("plain", 1, 10.0),
            result("a", 1, 11.0, n_drafted=0, drafted_by_depth=(), n_accepted=0),
            result("b", 1, 20.0),
        ]
    )
    assert list(speedup_sentences(figures)) == [
        "a: nothing was drafted, so there is no speed-up",
        "b: 2.0 times as fast as without drafts (2.0 in 1 answer)",
    ]


# --- comparisons


def test_all_drafts_are_in_memory_at_once_but_the_contexts_of_one_contender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (machine, weights_memory):
        monkeypatch.setattr(module, "available_memory_bytes", lambda: 10 * GB)
    target = write_large_model(tmp_path / "target.gguf", 10 * GB)
    drafts = [write_large_model(tmp_path / f"draft {n}.gguf", n * GB // 2) for n in (1, 2, 3)]
    base = SessionOptions(target, "none")

    def budget_bytes(*stages: Stages, n_temperatures: int = 1) -> int:
        temperatures = [float(n) for n in range(n_temperatures)]
        ways = [base.drafting.policy], [base.drafting.tree], temperatures
        found = shared_budget(entries_of(base, stages, *ways, MeasurementStore())).max_bytes
        assert found is not None
        return found

    one, other, largest = ((draft,) for draft in drafts)
    alone = budget_bytes(largest)
    assert alone == budget_within(base, [drafts[2]], 10 * GB).max_bytes
    # More contenders with the same files need no more memory.
    assert alone == budget_bytes(largest, (drafts[2], "ngram"), n_temperatures=4)
    assert alone == pytest.approx(budget_bytes(largest, one, other) + 3 * GB // 2, rel=1e-4)
    # A draft for the draft is open, and has a context at the same time.
    assert budget_bytes((drafts[2], drafts[0])) < budget_bytes(largest, one)


def test_models_have_as_many_threads_as_were_found_to_be_best(tmp_path: Path) -> None:
    """As in `specgen run`, unless the user chooses a number."""
    target, draft = tmp_path / "t.gguf", tmp_path / "d.gguf"
    target.touch()
    draft.touch()
    measurements, context = MeasurementStore(), ContextOptions()
    measurements.keep_threads(target, context, Threads(3, 5))

    def options(context: ContextOptions) -> tuple[ContextOptions, ContextOptions]:
        base = SessionOptions(target, "none", target_context=context, draft_context=context)
        ways = [base.drafting.policy], [base.drafting.tree], [0.0]
        _, entry = entries_of(base, [(draft,)], *ways, measurements)
        return entry.options.target_context, entry.options.draft_context

    ours, drafts = options(context)
    assert (ours.n_threads, ours.n_threads_batch) == (3, 5)
    assert (drafts.n_threads, drafts.n_threads_batch) == (None, None)
    named = ContextOptions(n_threads=1)
    assert options(named)[0] == named
