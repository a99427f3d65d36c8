"""The words of `specgen tune`: each sentence has the figures that it should have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.events import ReasonCount
from specgen.measure.selection.advice import (
    advice,
    name_of_way,
    options_of_way,
    threads_text,
)
from specgen.measure.selection.trial import Baseline, DraftFigures, TargetAnswer, is_tie
from specgen.measure.selection.tuning import DraftFindings, TriedDraft, Tuning
from specgen.method.policy.reasons import REASONS
from specgen.options import DraftSource
from specgen.session.calibration.gain import Agreement, Costs
from specgen.session.calibration.threads import Threads, ThreadTimes
from specgen.system.machine import CoreTime, core_time, of_counts, share_of_others

TARGET, DRAFT, OTHER = Path("/m/target.gguf"), Path("/m/draft.gguf"), Path("/m/an other.gguf")
#: A token takes 100 ms, a batch of n rows 75 + 25 n.
BATCH_S = {rows: 0.075 + 0.025 * rows for rows in range(1, 18)}
BASELINE = Baseline((TargetAnswer("a", (1,) * 60),) * 2, (), 256, BATCH_S, None, (0.1, 0.1))
THREADS = ThreadTimes(Threads(2, 4), 4, {2: 0.1, 4: 0.13}, {2: 0.3, 4: 0.2})
FINDINGS = DraftFindings(DRAFT, Agreement(120, 96), Costs(BATCH_S, 0.01), None)
PLAIN = DraftFigures(1.0, 1.0, 10.0, None, 1.0, None, 0.0)


def figures(speedup: float) -> DraftFigures:
    return DraftFigures(
        speedup=speedup,
        worst_speedup=speedup - 0.125,
        tokens_per_s=10.0 * speedup,
        acceptance_rate=0.75,
        mean_accepted_length=2.5,
        draft_token_s=0.01,
        start_s=0.5,
        draft_length=4.5,
        draft_share=0.375,
    )


def ways(**speedups: float) -> tuple[TriedDraft, ...]:
    """Ways by name, after not drafting; `..._ngrams` has n-grams beside."""
    named: dict[str, DraftSource] = {"draft": DRAFT, "other": OTHER, "ngram": "ngram"}
    found = [TriedDraft("none", False, PLAIN)]
    for name, speedup in speedups.items():
        draft, _, beside = name.partition("_")
        found.append(TriedDraft(named[draft], bool(beside), figures(speedup)))
    return tuple(found)


def tuning(**changes: Any) -> Tuning:
    all_ways = ways(draft=1.35, draft_ngrams=1.4, ngram=1.1, other_ngrams=1.2)
    return replace(Tuning(TARGET, BASELINE, THREADS, FINDINGS, all_ways), **changes)


def said(found: Tuning, heading: str) -> list[str]:
    """The sentences under a heading; none if it is not there."""
    by_heading = {section.heading: list(section.sentences) for section in advice(found)}
    assert all(by_heading.values())
    return by_heading.get(heading, [])


WORTH, WAYS, WHY = "What drafting is worth here", "Expected speed-ups", "Why"
HELP, SETTINGS, SURE = "What would help", "Settings chosen", "How sure this is"

# --- what it is worth


def test_the_users_own_draft_is_told_of_with_n_grams_beside_as_run_takes_it() -> None:
    assert said(tuning(), WORTH) == [
        (
            "draft.gguf and n-grams: x1.40 plain decoding, 14.0 tokens/s instead of 10.0; x1.27 for "
            "the worst prompt"
        ),
        "the target accepts 75 % of the drafted tokens; a round gives 2.5 tokens",
    ]


def test_what_gains_more_is_told_with_the_options_that_take_it() -> None:
    other = said(tuning(ways=ways(draft=1.1, draft_ngrams=1.2, other_ngrams=1.3)), WORTH)
    assert len(other) == 3
    assert other[2].startswith("best: an other.gguf and n-grams (--draft '/m/an other.gguf'): ")
    assert "x1.30 plain decoding, 13.0 tokens/s instead of 10.0" in other[2]
    alone = said(tuning(ways=ways(draft=1.4, draft_ngrams=1.2)), WORTH)
    assert alone[2].startswith("best: draft.gguf alone (--draft /m/draft.gguf --no-ngrams): ")
    # What may be noise is not.
    assert len(said(tuning(ways=ways(draft=1.22, draft_ngrams=1.2)), WORTH)) == 2


def test_where_nothing_gains_anything_plain_decoding_is_advised() -> None:
    found = said(tuning(ways=ways(draft=0.9, draft_ngrams=0.95, ngram=1.02)), WORTH)
    assert len(found) == 3
    assert "x0.95 plain decoding" in found[0]
    assert found[2] == (
        "no draft that was tried is clearly faster than plain decoding (--draft none), which makes "
        "10.0 tokens/s"
    )


def test_without_an_own_draft_the_best_is_told() -> None:
    found = said(tuning(draft=None, ways=ways(ngram=1.3)), WORTH)
    assert found == [
        (
            "best: n-grams alone (--draft ngram): x1.30 plain decoding, 13.0 tokens/s instead of "
            "10.0; x1.18 for the worst prompt"
        )
    ]


def test_a_draft_that_drafted_nothing_has_no_rate() -> None:
    idle = replace(figures(1.0), acceptance_rate=None, draft_length=None, draft_share=0.0)
    found = tuning(ways=(TriedDraft("none", False, PLAIN), TriedDraft(DRAFT, True, idle)))
    assert not any("accepts" in sentence for sentence in said(found, WORTH))
    assert said(found, SETTINGS)[-1].endswith("16 tokens at most: here nothing was drafted")


def test_all_ways_are_listed_by_what_they_gain() -> None:
    assert said(tuning(), WAYS) == [
        "x1.40  draft.gguf and n-grams",
        "x1.35  draft.gguf alone",
        "x1.20  an other.gguf and n-grams",
        "x1.10  n-grams alone (--draft ngram)",
        "x1.00  not drafting (--draft none)",
    ]


def test_ways_by_name_and_by_option() -> None:
    plain, alone, both, ngrams = ways(draft=1.0, draft_ngrams=1.0, ngram=1.0)
    assert [name_of_way(way) for way in (plain, alone, both, ngrams)] == [
        "not drafting", "draft.gguf alone", "draft.gguf and n-grams", "n-grams alone",
    ]  # fmt: skip
    assert [options_of_way(way) for way in (plain, both)] == [
        "--draft none", "--draft /m/draft.gguf",
    ]  # fmt: skip


# --- why


def test_why_is_agreement_costs_and_from_where_on_it_pays() -> None:
    agrees, drafts, batch, bound = said(tuning(), WHY)
    assert agrees == (
        "draft.gguf agrees with the target at 80 % of 120 places in the target's own answers"
    )
    assert drafts == "it drafts a token in 10.0 ms, 0.10 of the target's time"
    # 75 + 4 * 25
    assert batch == (
        "the target takes 100.0 ms for a token, and 1.75 times as long for a batch of 4 rows"
    )
    # 1 + a = 1.25 + 0.1
    assert bound == (
        "at these costs it saves time if it agrees at about 35 % or more; it agrees at 80 %"
    )


def test_costs_at_which_nothing_pays_are_told() -> None:
    dear = replace(FINDINGS, costs=Costs({1: 0.1, 2: 0.195}, 0.01))
    assert said(tuning(draft=dear), WHY)[-1] == (
        "at these costs it would not save time even if it always agreed; it agrees at 80 %"
    )


def test_a_draft_that_says_nothing_is_told_so() -> None:
    silent = replace(FINDINGS, agreement=Agreement(0, 0))
    found = tuning(draft=silent)
    assert said(found, WHY) == ["draft.gguf proposes nothing in the target's answers"]
    assert said(found, HELP) == []


def test_without_costs_only_agreement_is_told() -> None:
    found = tuning(draft=replace(FINDINGS, costs=None))
    assert len(said(found, WHY)) == 1
    assert said(found, HELP) == []


def test_without_a_draft_model_the_target_says_from_where_on_any_would_pay() -> None:
    batch, bound = said(tuning(draft=None), WHY)
    assert "100.0 ms for a token" in batch
    assert bound == (
        "at these costs a draft that takes no time saves time if it agrees at about 25 % or more"
    )


def test_where_a_draft_does_not_pay_the_policy_says_why() -> None:
    why = (
        ReasonCount("nothing found", REASONS["nothing found"], 20),
        ReasonCount("row cost", "a row costs 0.7 of a token", 14),
    )
    lost, paid = (replace(figures(speedup), n_rounds=52, undrafted=why) for speedup in (1.02, 1.3))
    all_ways = (
        TriedDraft("none", False, PLAIN),
        TriedDraft(DRAFT, False, lost),
        TriedDraft(DRAFT, True, paid),
        TriedDraft("ngram", False, replace(lost, n_rounds=34)),
        TriedDraft(OTHER, True, figures(0.9)),
    )
    told = "no earlier text continues from here (20); a row costs 0.7 of a token (14)"
    assert said(tuning(ways=all_ways), WHY)[4:] == [
        (
            "so about x1.44 was to be expected, but draft.gguf alone gave x1.02: while it drafted, decodes took "
            "longer than when they were timed alone"
        ),
        f"draft.gguf alone: 34 of 52 rounds drafted nothing: {told}",
        f"n-grams alone: 34 of 34 rounds drafted nothing: {told}",
    ]


# --- what would help


def test_what_would_help_has_a_number_each() -> None:
    cheaper, righter, target = said(tuning(), HELP)
    # Over the best number of drafted tokens: before, with 6 ms a token, with 90 %, and with
    # batches that cost no more than a token.
    before = best_speedup(0.8, 0.1, 0.25)
    for sentence, after in (
        (cheaper, best_speedup(0.8, 0.06, 0.25)),
        (righter, best_speedup(0.9, 0.1, 0.25)),
        (target, best_speedup(0.8, 0.1, 0.0)),
    ):
        assert f"about x{1.35 * after / before:.2f}" in sentence
    assert "takes 6.0 ms a token" in cheaper
    assert cheaper.endswith("; draft.gguf alone is at x1.35 now")
    assert "the same speed that agrees at 90 %" in righter
    assert "a larger model" in target


def test_what_would_not_help_is_told_so() -> None:
    dear = replace(FINDINGS, costs=Costs({1: 0.1, 2: 0.195, 3: 0.3}, 0.05))
    cheaper, righter, target = said(tuning(draft=dear, ways=ways(draft=0.9)), HELP)
    assert cheaper.endswith(": hardly a gain (x1.00); draft.gguf alone is at x0.90 now")
    assert righter.endswith(": hardly a gain (x1.00)")
    assert target.endswith(f": about x{best_speedup(0.8, 0.5, 0.0, 2):.2f}")


def best_speedup(rate: float, token: float, row: float, n_max: int = 16) -> float:
    return max(
        sum(rate**depth for depth in range(n + 1)) / (1.0 + row * n + token * n)
        for n in range(1, n_max + 1)
    )


def test_a_target_with_cheap_batches_needs_no_other() -> None:
    cheap = Costs({rows: 0.1 + 0.001 * rows for rows in range(1, 18)}, 0.01)
    found = said(tuning(draft=replace(FINDINGS, costs=cheap)), HELP)
    assert found[-1] == "the target is well suited to drafts: a batch of 4 rows costs 1.03 tokens"


def test_a_draft_that_is_always_right_cannot_be_righter() -> None:
    found = said(tuning(draft=replace(FINDINGS, agreement=Agreement(50, 50))), HELP)
    assert len(found) == 2
    assert not any("agrees at" in sentence for sentence in found)


def test_without_a_draft_model_on_the_disk_one_is_advised() -> None:
    (found,) = said(tuning(draft=None, ways=ways(ngram=1.0)), HELP)
    assert "specgen models list" in found
    assert said(tuning(draft=None, ways=ways(ngram=1.0, other_ngrams=1.0)), HELP) == []


# --- settings


def test_threads_are_told_with_what_they_gain() -> None:
    settings = said(tuning(draft=replace(FINDINGS, threads=THREADS)), SETTINGS)
    assert settings == [
        (
            "threads of target.gguf: 2 (100.0 ms; 130.0 ms with the usual 4) for a token, 4 as usual "
            "(200.0 ms; 300.0 ms with 2) for a batch of 6"
        ),
        (
            "threads of draft.gguf: 2 (100.0 ms; 130.0 ms with the usual 4) for a token, 4 as usual "
            "(200.0 ms; 300.0 ms with 2) for a batch of 6"
        ),
        (
            "drafts grow while that is expected to save time, to 16 tokens at most: here 4.5 on average, in "
            "38 % of the rounds"
        ),
    ]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({}, "2 (there was nothing to compare)"),
        ({2: 0.1}, "2 as usual (100.0 ms)"),
        ({1: 0.2, 2: 0.1, 3: 0.15}, "2 as usual (100.0 ms; 150.0 ms with 3)"),
        ({1: 0.05, 2: 0.1}, "2 as usual (100.0 ms; 50.0 ms with 1, but not surely)"),
    ],
)
def test_the_usual_number_is_told_with_the_next_best(
    seconds: dict[int, float], expected: str
) -> None:
    times = ThreadTimes(Threads(2, 2), 2, seconds, seconds)
    assert threads_text("x", times) == (
        f"threads of x: {expected} for a token, {expected} for a batch of 6"
    )


def test_threads_that_the_user_named_are_his() -> None:
    assert said(tuning(threads=None), SETTINGS)[0].startswith("threads are as given")


# --- how sure it is


def test_steady_figures_of_enough_tokens_are_not_doubted() -> None:
    assert said(tuning(others_share=0.02), SURE) == []
    assert said(tuning(others_share=None), SURE) == []


def test_a_busy_machine_is_told_of() -> None:
    (others,) = said(tuning(others_share=0.4), SURE)
    assert others.startswith("other programs took 40 % of the machine's cores")
    uneven = replace(BASELINE, answer_token_s=(0.09, 0.2))
    (found,) = said(tuning(baseline=uneven), SURE)
    assert found.startswith("a token took 90.0 ms at one time and 200.0 ms at another")
    # When threads were compared a token took 100 ms.
    slower = replace(BASELINE, answer_token_s=(0.15, 0.16))
    (found,) = said(tuning(baseline=slower), SURE)
    assert "100.0 ms at one time and 160.0 ms" in found
    assert said(tuning(baseline=slower, threads=None), SURE) == []
    (both,) = said(tuning(baseline=uneven, others_share=0.4), SURE)
    assert "40 % of the machine's cores meanwhile, and a token took 90.0 ms" in both
    assert "tune again" in both


def test_a_busy_machine_gives_results_and_no_conclusions() -> None:
    headings = [section.heading for section in advice(tuning(others_share=0.4))]
    assert headings == ["What drafting is worth here", "Expected speed-ups", SURE]


@pytest.mark.parametrize(
    ("other", "tied"),
    [
        ((1.5, 1.5, 1.5, 1.5), True),
        ((1.48, 1.48, 1.48, 1.48), True),
        ((1.4, 1.4, 1.4, 1.4), False),
        ((1.0, 1.9, 1.2, 1.6), True),  # less, but not each time
    ],
)
def test_speed_ups_that_differ_within_the_noise_are_a_tie(
    other: tuple[float, ...], tied: bool
) -> None:
    best = replace(figures(1.5), speedups=(1.5,) * 4)
    against = replace(figures(sum(other) / 4), speedups=other)
    assert is_tie(best, against) == tied


def test_few_tokens_are_told_of() -> None:
    few = replace(BASELINE, answers=BASELINE.answers[:1])
    assert said(tuning(baseline=few), SURE) == [
        "60 tokens of answers are few; for more, raise --count or -n"
    ]


# --- interrupted


def test_half_a_tuning_says_what_it_found_and_concludes_nothing() -> None:
    found = tuning(is_interrupted=True, draft=None, ways=ways(draft=1.3))
    assert [section.heading for section in advice(found)] == [WORTH, WAYS]
    nothing = tuning(is_interrupted=True, draft=None, ways=ways())
    assert said(nothing, WORTH) == ["plain decoding makes 10.0 tokens/s; no draft was tried"]
    assert said(nothing, WAYS) == []


# --- other programs

LINUX = {
    "user": 40.0, "nice": 1.0, "system": 9.0, "idle": 50.0, "iowait": 10.0, "irq": 0.0,
    "softirq": 0.5, "steal": 0.5, "guest": 9.0, "guest_nice": 0.5,
}  # fmt: skip
MACOS = {"user": 40.0, "nice": 1.0, "system": 10.0, "idle": 60.0}
WINDOWS = {"user": 40.0, "system": 11.0, "idle": 60.0, "interrupt": 3.0, "dpc": 2.0}


@pytest.mark.parametrize("counts", [LINUX, MACOS, WINDOWS])
def test_core_time_is_what_the_system_counts(counts: dict[str, float]) -> None:
    # Without idling and waiting, and without what is counted twice.
    assert of_counts(counts, 7.5) == CoreTime(total_s=111.0, busy_s=51.0, own_s=7.5)


def test_others_take_what_this_process_does_not() -> None:
    before = CoreTime(100.0, 50.0, 10.0)
    assert share_of_others(before, CoreTime(140.0, 80.0, 30.0)) == pytest.approx(0.25)
    # Clocks that tick apart make no negative share.
    assert share_of_others(before, CoreTime(140.0, 60.0, 30.0)) == 0.0
    assert share_of_others(before, before) is None
    assert share_of_others(None, before) is None
    assert share_of_others(before, None) is None


def test_this_system_tells() -> None:
    found = core_time()
    assert found is not None
    assert 0.0 < found.own_s < found.busy_s < found.total_s


def test_a_system_that_does_not_tell_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise PermissionError("/proc/stat")

    monkeypatch.setattr("psutil.cpu_times", refuse)
    assert core_time() is None
