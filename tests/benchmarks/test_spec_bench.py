"""Spec-Bench: the order of its questions, resuming after an interruption, and the statistics."""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.answers import command_line
from benchmarks.spec_bench import (
    CONTROL,
    N_REPEATS,
    PLAIN,
    Answer,
    Figures,
    Limit,
    Output,
    Part,
    ask_all,
    main,
    measure,
    read_other,
    read_results,
    settings_of,
    written,
)
from benchmarks.spec_bench_questions import (
    MT_BENCH,
    MT_BENCH_CATEGORIES,
    Question,
    SpecBenchError,
    chosen_ids,
    read_questions,
    spread,
)
from benchmarks.spec_bench_table import (
    Comparison,
    comparisons,
    percentile,
    report,
    summary_of,
    version_comparisons,
)
from benchmarks.worker_client import WorkerCommand, WorkerError, running_worker
from tests.tiny import CHATML_TEMPLATE, TinyConfig, write_tiny_model

TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")


def questions() -> list[Question]:
    """As many as Spec-Bench has, in its order: category after category."""
    sizes = dict.fromkeys(MT_BENCH_CATEGORIES, 10) | dict.fromkeys(TASKS, 80)
    categories = [category for category, size in sizes.items() for _ in range(size)]
    ranks = [rank for size in sizes.values() for rank in range(size)]
    return [
        Question(number, category, f"question {number}", rank)
        for number, (category, rank) in enumerate(zip(categories, ranks, strict=True))
    ]


# --- the order


def test_every_part_has_the_same_share_of_each_task() -> None:
    ordered = spread(questions())
    assert sorted(ordered, key=lambda each: each.question_id) == questions()
    for n in range(1, len(ordered) + 1):
        counts = Counter(question.task for question in ordered[:n])
        assert max(counts.values()) - min(counts[task] for task in (*TASKS, MT_BENCH)) <= 1
    first_of_mt_bench = [each.category for each in ordered if each.task == MT_BENCH][:16]
    assert Counter(first_of_mt_bench) == dict.fromkeys(MT_BENCH_CATEGORIES, 2)


@pytest.mark.parametrize("step", [5, 10])
def test_some_questions_are_spread_as_all_are(step: int) -> None:
    ordered = spread(questions())
    ids = chosen_ids(ordered, step)
    chosen = [question for question in ordered if question.question_id in ids]
    assert [ordered.index(question) // step for question in chosen] == list(range(480 // step))
    for n in range(1, len(chosen) + 1):
        counts = Counter(question.task for question in chosen[:n])
        assert max(counts.values()) - min(counts[task] for task in (*TASKS, MT_BENCH)) <= 2
    halves = Counter((question.task, question.rank % 2) for question in chosen)
    assert max(halves.values()) - min(halves.values()) <= 2


def test_a_file_is_read_with_its_first_turns(tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    lines = [
        {"question_id": 7, "category": "qa", "turns": ["Why?", "And why not?"]},
        {"question_id": 9, "category": "qa", "turns": ["Who?"]},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_questions(file) == [Question(7, "qa", "Why?", 0), Question(9, "qa", "Who?", 1)]


@pytest.mark.parametrize("line", ["{", "[]", '{"question_id": 1, "category": "qa", "turns": []}'])
def test_another_file_is_refused_with_the_address_of_the_right_one(
    tmp_path: Path, line: str
) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text(line)
    with pytest.raises(SpecBenchError, match="line 1: not a question") as caught:
        read_questions(file)
    assert caught.value.hint is not None
    assert "github.com/hemingkx/Spec-Bench" in caught.value.hint


def test_without_questions_the_error_names_their_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["spec_bench"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == (
        "Spec-Bench's questions are missing: download https://github.com/hemingkx/Spec-Bench/blob/main/"
        "data/spec_bench/question.jsonl, and name the file"
    )


# --- turns and repeats


@dataclass
class FakeContender:
    """Answers at given speeds, one after the other; the last one stays. Without any, it fails."""

    speeds: list[float]
    text: str = "answer"
    #: What was done, in turn.
    calls: list[str] = field(default_factory=list)

    def warm_up(self) -> None:
        self.calls.append("warm up")

    def answer(self, prompt: str) -> Figures:
        self.calls.append(prompt)
        if not self.speeds:
            return {"error": "too long"}
        speed = self.speeds.pop(0) if len(self.speeds) > 1 else self.speeds[0]
        return figures(speed, self.text)


def figures(tokens_per_s: float, text: str = "answer") -> Figures:
    return {
        "text": text,
        "token_ids": [ord(character) for character in text],
        "n_tokens": 101,
        "n_rounds": 50,
        "mean_accepted_length": 2.0,
        "tokens_per_s": tokens_per_s,
        "wall_s": 1.0 + 100.0 / tokens_per_s,
    }


def attempts(answers: Sequence[Answer]) -> list[tuple[str, int]]:
    return [(answer.contender, answer.attempt) for answer in answers]


def test_each_contender_is_warmed_up_before_its_turn() -> None:
    contenders = {PLAIN: FakeContender([10.0]), "ngram": FakeContender([12.0])}
    ask_all(contenders, "Why?", 0, has_control=True)
    assert contenders[PLAIN].calls == ["warm up", "Why?", "warm up", "Why?"]
    assert contenders["ngram"].calls == ["warm up", "Why?"]


def test_no_draft_always_comes_before_another() -> None:
    contenders = {name: FakeContender([10.0]) for name in (PLAIN, "a", "b", "c")}
    orders = [
        [answer.contender for answer in ask_all(contenders, "?", n, has_control=False)]
        for n in range(6)
    ]
    assert {order[0] for order in orders} == {PLAIN}
    for one, other in (("a", "b"), ("b", "c"), ("a", "c")):
        assert sum(order.index(one) < order.index(other) for order in orders) == 3


def test_only_a_slow_answer_is_repeated_and_plain_decoding_with_it() -> None:
    contenders = {
        PLAIN: FakeContender([10.0]),
        "slow": FakeContender([8.9, 9.5, 9.7, 11.0]),
        "quick": FakeContender([9.1]),
    }
    answers = ask_all(contenders, "?", 0, has_control=False)
    repeats = [(name, n) for n in range(1, N_REPEATS + 1) for name in (PLAIN, "slow")]
    assert attempts(answers) == [(PLAIN, 0), ("slow", 0), ("quick", 0), *repeats]


def test_an_answer_without_a_speed_is_not_repeated() -> None:
    contenders = {PLAIN: FakeContender([10.0]), "failing": FakeContender([])}
    answers = ask_all(contenders, "?", 0, has_control=False)
    assert attempts(answers) == [(PLAIN, 0), ("failing", 0)]


def test_each_text_is_written_once() -> None:
    answers = [
        Answer(PLAIN, 0, figures(10.0)),
        Answer("same", 0, figures(12.0)),
        Answer("other", 0, figures(12.0, "another")),
    ]
    plain, same, other = written(answers)
    assert (plain["text"], "is_equal" in plain) == ("answer", False)
    assert (same["is_equal"], "text" in same) == (True, False)
    assert (other["is_equal"], other["text"]) == (False, "another")
    assert "token_ids" not in plain


# --- resuming


def part(target: str = "target", **contenders: FakeContender) -> Part:
    ids = frozenset(question.question_id for question in questions())
    return Part(target, {PLAIN: FakeContender([10.0]), **contenders}, ids, frozenset())


def measured(output: Path, n_questions: int | None, *parts: Part) -> list[int]:
    """Measure the first ten questions; return the ids of all that the file has then."""
    measure(spread(questions())[:10], parts, Output(output), Limit(None, n_questions))
    return [line["question_id"] for line in read_results(output).lines]


def test_a_measurement_resumes_where_it_stopped(tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    expected = [question.question_id for question in spread(questions())[:10]]
    assert measured(output, 3, part()) == expected[:3]
    assert measured(output, 3, part()) == expected[:6]
    assert measured(output, None, part()) == expected
    assert measured(output, None, part()) == expected


def test_a_line_that_was_cut_is_measured_again(tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    expected = measured(output, 3, part())
    text = output.read_text()
    output.write_text(text[:-20])
    assert measured(output, 1, part()) == expected
    assert len(read_results(output).lines) == 3


def test_a_target_may_be_added_later(tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    measured(output, None, part())
    ids = measured(output, None, part(), part("bigger"))
    assert Counter(Counter(ids).values()) == {2: 10}


def test_time_is_up_between_two_questions(tmp_path: Path) -> None:
    output = Output(tmp_path / "results.jsonl")
    measure(questions(), [part(), part("bigger")], output, Limit(seconds=0.0))
    assert not (tmp_path / "results.jsonl").exists()
    measure(questions(), [part(), part("bigger")], output, Limit(n_questions=1))
    assert len(read_results(tmp_path / "results.jsonl").lines) == 2


def run(**changes: Any) -> dict[str, Any]:
    about = {"version": "1", "kernels": "specgen", "commit": "abc"}
    return {
        "command": "spec_bench.py",
        "machine": {"cpu": "a CPU", "n_logical_cores": 2, "system": "Linux"},
        "max_tokens": 128,
        "keeps_learning": False,
        "contenders": {"target": [PLAIN, "ngram"]},
        "about": {"target": {PLAIN: about, "ngram": about}},
        **changes,
    }


@pytest.mark.parametrize(
    "changes", [{"max_tokens": 64}, {"contenders": {"target": [PLAIN, "other"]}}]
)
def test_a_file_does_not_mix_settings(tmp_path: Path, changes: dict[str, Any]) -> None:
    Output(tmp_path / "results.jsonl").append({"run": run()})
    output = Output(tmp_path / "results.jsonl")
    output.check_same(run())
    output.check_same(run(contenders={"target": [PLAIN, "ngram"], "bigger": [PLAIN]}))
    with pytest.raises(SpecBenchError, match="measured with different"):
        output.check_same(run(**changes))


# --- the statistics


def line(
    answers: dict[str, list[float]], question_id: int = 1, category: str = "qa"
) -> dict[str, Any]:
    """A line of results, of the speeds of each contender's attempts."""
    found = [
        Answer(contender, attempt, figures(speed))
        for contender, speeds in answers.items()
        for attempt, speed in enumerate(speeds)
    ]
    return {
        "question_id": question_id,
        "category": category,
        "target": "target",
        "answers": written(found),
    }


def test_the_median_of_the_repeats_counts() -> None:
    answers = {PLAIN: [10.0, 10.0, 20.0, 10.0], "slow": [5.0, 9.0, 19.0, 12.0], "quick": [15.0]}
    slow, quick = comparisons([line(answers)])
    assert (slow.speedup, slow.is_repeated) == (0.95, True)
    assert (quick.speedup, quick.is_repeated) == (1.5, False)
    assert quick.whole_speedup == pytest.approx(11.0 / (1.0 + 100.0 / 15.0))


def test_versions_are_compared_without_repeats() -> None:
    answers = {PLAIN: [10.0, 10.0], "ngram": [6.0, 9.0], "ngram@before": [5.0], "other": [9.5]}
    (found,) = version_comparisons([line(answers)])
    assert (found.contender, found.speedup) == ("ngram over ngram@before", 1.2)


def test_an_error_does_not_count_as_an_answer() -> None:
    broken = line({PLAIN: [10.0], "ngram": [12.0]})
    broken["answers"][1] = {"contender": "ngram", "attempt": 0, "error": "too long"}
    assert comparisons([broken]) == []


speeds = st.floats(0.1, 10.0)


@given(st.lists(speeds, min_size=1, max_size=30))
def test_a_summary_is_that_of_all_answers(ratios: list[float]) -> None:
    compared = [
        Comparison(n, "qa", "target", "ngram", 9, ratio, ratio / 2, 20.0, 10, n > 0, n == 0)
        for n, ratio in enumerate(ratios)
    ]
    summary = summary_of(compared)
    assert summary.speedup == pytest.approx(statistics.geometric_mean(ratios))
    assert summary.whole_speedup == pytest.approx(summary.speedup / 2)
    assert summary.tokens_per_pass == 2.0
    assert summary.share_not_slower == sum(ratio >= 1.0 for ratio in ratios) / len(ratios)
    assert (summary.n_answers, summary.n_equal) == (len(ratios), len(ratios) - 1)
    first, third = summary.quartiles
    order = [min(ratios), summary.low, first, third, max(ratios)]
    assert order == pytest.approx(sorted(order))


def test_percentiles_are_interpolated() -> None:
    values = [float(n) for n in range(101)]
    assert percentile(values, 5) == 5.0
    assert percentile([1.0, 2.0], 25) == 1.25
    assert percentile([3.0], 5) == 3.0


def test_a_report_has_tables_for_both_halves(tmp_path: Path) -> None:
    output = Output(tmp_path / "results.jsonl")
    output.append({"run": run()})
    for number, category in enumerate(("coding", "math", "qa")):
        output.append(line({PLAIN: [10.0], "ngram": [12.0], CONTROL: [10.1]}, number, category))
    lines = list(report(read_results(tmp_path / "results.jsonl"), frozenset({0})))
    assert "- questions for target: 3" in lines
    assert "- specgen: commit abc, kernels specgen" in lines
    assert [each for each in lines if each.startswith("**")] == [
        "**All questions**",
        "**The questions for tuning**",
        "**The other questions**",
    ]
    start = "| ngram | 3 | 1.20 | 1.20 to 1.20 | 1.20 | 1.20 | 100% | 2.00 |"
    assert any(each.startswith(start) for each in lines)
    assert f"| {MT_BENCH} | 1.20 | 1.01 |" in lines


# --- other versions, and the process


def test_another_version_is_a_checkout_or_a_python(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch()
    assert read_other(f"before={tmp_path}") == (
        "before",
        WorkerCommand("specgen", checkout=tmp_path),
    )
    other = WorkerCommand("specgen", python=python, checkout=None)
    assert read_other(f"old={python}") == ("old", other)
    settings = settings_of(tmp_path, {"ngram": "ngram"}, {"old": other})
    assert [(each.name, each.draft, each.command.python == python) for each in settings] == [
        (PLAIN, "none", False),
        ("ngram", "ngram", False),
        ("ngram@old", "ngram", True),
    ]


def test_a_command_names_no_folders_of_a_machine(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "q.jsonl"), "--other", f"before={tmp_path}", "-n", "8", "results/x"]
    assert command_line("spec_bench", arguments) == (
        f"python -m benchmarks.spec_bench q.jsonl --other before={tmp_path.name} -n 8 results/x"
    )


@pytest.mark.slow
def test_a_process_answers_as_often_as_it_is_asked(tmp_path: Path) -> None:
    config = TinyConfig(chat_template=CHATML_TEMPLATE, n_ctx_train=512)
    target = write_tiny_model(tmp_path / "target.gguf", config)
    settings = {"target": str(target), "draft": "ngram", "max_tokens": 9, "keeps_learning": False}
    with running_worker(WorkerCommand("specgen"), settings) as worker:
        assert worker.about["kernels"]
        worker.warm_up()
        first = worker.answer("one two one two")
        assert "tokens" in worker.answer("x" * 5000)["error"]
        second = worker.answer("one two one two")
    assert first["n_tokens"] <= 9
    assert first["token_ids"] == second["token_ids"]


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    settings = {"target": "x", "draft": "none", "max_tokens": 9, "keeps_learning": False}
    with (
        pytest.raises(WorkerError, match="specgen ended with 1: .*x: no such file"),
        running_worker(WorkerCommand("specgen"), settings),
    ):
        pass
    missing = WorkerCommand("specgen", python=tmp_path / "python")
    with (
        pytest.raises(WorkerError, match="cannot be run: No such file"),
        running_worker(missing, settings),
    ):
        pass
