"""What answers add up to."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from specgen.measure.bench.figures import (
    Figures,
    Spread,
    Worst,
    figures_of,
    spread,
    to_html,
    to_json_object,
)
from specgen.measure.bench.runs import Result
from specgen.render.tables import print_bench_tables
from tests.helpers.bench import outcome, report_of, result


def by_name(results: list[Result]) -> dict[str, Figures]:
    return {each.contender: each for each in figures_of(results)}


def test_a_speedup_is_over_plain_decoding_of_the_same_prompt_in_the_same_round() -> None:
    results = [
        result("plain", 1, 10.0),
        result("a", 1, 2.5),
        result("plain", 2, 40.0),
        result("a", 2, 20.0),
        result("plain", 1, 5.0, round=2),
        result("a", 1, 20.0, round=2),
    ]
    figures = by_name(results)["a"]
    assert figures.speedup == pytest.approx((0.25 * 0.5 * 4.0) ** (1 / 3))
    assert figures.speedups == Spread(0.25, 0.375, 0.5, 2.25, 4.0)
    # The worst prompt is so over all its rounds.
    assert figures.worst == Worst(2, 0.5)
    assert figures.n_answers == 3
    assert figures.tokens_per_s == spread([2.5, 20.0, 20.0])
    assert by_name(results)["plain"].speedup == pytest.approx(1.0)


def test_categories_count_alike_however_many_answers_they_have() -> None:
    results = []
    for prompt, (category, speed) in enumerate([("x", 4.0), ("y", 1.0), ("y", 1.0), ("y", 1.0)]):
        results.append(result("plain", prompt, 1.0, category=category))
        results.append(result("a", prompt, speed, category=category))
    figures = by_name(results)["a"]
    assert [(each.category, each.n_answers) for each in figures.categories] == [("x", 1), ("y", 3)]
    assert [each.speedup for each in figures.categories] == pytest.approx([4.0, 1.0])
    assert figures.speedup == pytest.approx(2.0)


def test_lineups_have_a_plain_decoding_each() -> None:
    results = [
        result("plain", 1, 10.0),
        result("plain", 1, 5.0, temperature=0.8),
        result("a", 1, 10.0),
        result("a", 1, 10.0, temperature=0.8),
        result("a", 1, 10.0, target="other"),
    ]
    figures = figures_of(results)
    told = [(each.target, each.temperature, each.contender, each.speedup) for each in figures]
    assert told == [
        ("target.gguf", 0.0, "plain", pytest.approx(1.0)),
        ("target.gguf", 0.0, "a", pytest.approx(1.0)),
        ("target.gguf", 0.8, "plain", pytest.approx(1.0)),
        ("target.gguf", 0.8, "a", pytest.approx(2.0)),
        ("other", 0.0, "a", None),
    ]


def test_counts_and_shares_are_over_all_answers() -> None:
    other = outcome(
        n_rounds=15,
        n_drafted=30,
        n_accepted=5,
        mean_accepted_length=4.0,
        drafted_by_depth=(5, 4),
        accepted_by_depth=(5,),
        target_s=1.4,
        draft_s=0.0,
        own_s=0.6,
        time_to_first_token_s=3.0,
    )
    figures = by_name(
        [
            result("plain", 1, 1.0),
            result("plain", 2, 1.0),
            result("a", 1, 1.0),
            result("a", 2, 1.0, outcome=other),
        ]
    )["a"]
    assert (figures.n_rounds, figures.n_drafted, figures.n_tokens) == (20, 40, 22)
    assert figures.acceptance_rate == pytest.approx(0.25)
    assert figures.mean_accepted_length == pytest.approx((5 * 2.0 + 15 * 4.0) / 20)
    assert figures.first_token == pytest.approx(2.0)


def test_whole_answers_have_their_prompts_in_them_and_as_many_tokens_as_plain_decodings() -> None:
    def answer(name: str, prompt: int, speed: float, prompt_s: float | None, n: int) -> Result:
        told = outcome(speed, prompt_s=prompt_s, n_tokens=n)
        return result(name, prompt, speed, category="xy"[prompt - 1], outcome=told)

    figures = by_name(
        [
            answer("plain", 1, 10.0, 2.0, 61),  # 2 + 6 seconds
            answer("a", 1, 20.0, 1.0, 11),  # 1 + 3
            answer("plain", 2, 10.0, 2.0, 61),
            answer("a", 2, 10.0, 10.0, 61),  # 10 + 6
            answer("b", 1, 20.0, None, 61),
        ]
    )
    assert figures["plain"].whole == pytest.approx(1.0)
    assert figures["a"].whole == pytest.approx((2.0 * 0.5) ** 0.5)
    assert figures["b"].whole is None


@pytest.mark.parametrize(("temperature", "n"), [(0.0, 2), (0.8, None)])
def test_texts_that_differ_are_counted_at_temperature_0(temperature: float, n: int | None) -> None:
    outcomes = [
        outcome(),
        outcome(token_ids=(1,)),
        outcome(token_ids=None, text="another"),
        outcome(token_ids=None),
    ]
    results = []
    for prompt, own in enumerate(outcomes):
        results.append(result("plain", prompt, 1.0, temperature=temperature))
        results.append(result("a", prompt, 1.0, temperature=temperature, outcome=own))
    assert by_name(results)["a"].n_different == n


@pytest.mark.parametrize(
    ("own", "of_plain", "ended_by", "same"),
    [
        ("one two three", "one two", "length", True),  # it goes on after the limit
        ("one too three", "one two", "length", False),
        ("one", "one two", "length", False),
        ("caf\u00e9s", "caf\N{REPLACEMENT CHARACTER}", "length", True),  # cut within a character
        ("one two", "one two", "stop", True),
        ("one two three", "one two", "stop", False),
    ],
)
def test_what_another_program_says_after_the_limit_is_no_difference(
    own: str, of_plain: str, ended_by: str, same: bool
) -> None:
    other = outcome(token_ids=None, finish_reason=None, text=own)
    plain = outcome(finish_reason=ended_by, text=of_plain)
    assert other.says_the_same(plain) is same
    assert plain.says_the_same(other) is same


def test_a_speed_up_beyond_the_tokens_per_pass_is_marked() -> None:
    own = {
        "n_rounds": 5,
        "mean_accepted_length": 2.0,
        "target_s": 1.0,
        "draft_s": 0.1,
        "own_s": 0.1,
    }
    for tokens_per_s, is_marked in ((19.0, False), (23.0, True)):
        fast = result("ngram", 1, tokens_per_s, outcome=outcome(tokens_per_s, **own))
        _, found = figures_of([result("plain", 1, 10.0), fast])
        assert found.is_impossible == is_marked
        report = report_of([result("plain", 1, 10.0), fast])
        console = Console(file=io.StringIO(), width=120)
        print_bench_tables(report, console)
        assert ("2.30!" in console.file.getvalue()) == is_marked  # type: ignore[attr-defined]


def test_the_page_holds_the_report_and_no_name_ends_its_script() -> None:
    name = "</script><script>alert('REPORT & <b>')</script>"
    report = report_of([result("plain", 1, 10.0), result(name, 1, 20.0)])
    page = to_html(report)
    data, _, after = page.partition('id="report">')[2].partition("</script>")
    assert json.loads(data) == json.loads(json.dumps(to_json_object(report)))
    assert name not in after
    assert page.count("</script>") == 2
