"""The search for the best draft of a target: what is tried, stored and reported."""

from __future__ import annotations

import dataclasses
import io
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specgen.measure.draft_search import (
    Search,
    Tried,
    advice,
    by_speedup,
    search_drafts,
)
from specgen.measure.draft_trial import Baseline, DraftFigures, TrialAnswer
from specgen.measure.prompts import given_prompts
from specgen.options import ContextOptions, DraftOptions, DraftSource
from specgen.render.tables import print_draft_table
from specgen.session.calibration import is_pair_measured, known_costs, measure_costs
from specgen.session.measurement_store import MeasurementStore
from specgen.session.session import Session
from tests.helpers.sessions import options_of

PROMPTS = given_prompts(("def add(a, b): return a + b # and the sum is", "Once upon a time"))
ONE_THREAD = ContextOptions(n_threads=1, flash_attention="off")

pytestmark = pytest.mark.usefixtures("quick_threads")


def loaded(
    folder: Path, context: ContextOptions = ONE_THREAD, measurements: MeasurementStore | None = None
) -> Session:
    more: dict[str, Any] = {"n_tokens": 16, "drafting": DraftOptions(max_tokens=4)}
    options = options_of(folder / "target.gguf", context=context, **more)
    return Session(options, time.perf_counter, measurements)


def drafts(search: Search) -> set[DraftSource]:
    return {one.draft for one in search.tried}


# --- what is stored


def test_costs_and_threads_are_known_afterwards(tiny_models: Path) -> None:
    target, draft = tiny_models / "target.gguf", tiny_models / "draft.gguf"
    measurements, context = MeasurementStore(), ContextOptions(flash_attention="off")
    with loaded(tiny_models, context, measurements) as opened:
        found = search_drafts(opened, [draft], (), PROMPTS, tunes_threads=True)
    assert found is not None
    assert set(found.threads) == {"target.gguf", "draft.gguf"}
    assert measurements.threads(target, context) == found.threads["target.gguf"]
    assert measurements.threads(draft, context) == found.threads["draft.gguf"]
    with loaded(tiny_models, context, measurements) as opened:
        opened.change_draft(draft)
        assert is_pair_measured(opened, draft)
        assert known_costs(opened, draft) is not None
        taken = opened.costs.context_options()
        chosen = found.threads["target.gguf"]
        assert (taken.n_threads, taken.n_threads_batch) == (chosen.n_single, chosen.n_batch)
        # Nothing is left to measure.
        measure_costs(opened)
        assert not opened.setup_s["measuring_s"]


def test_known_costs_are_measured_again(tiny_models: Path) -> None:
    draft, measurements = tiny_models / "draft.gguf", MeasurementStore()
    with loaded(tiny_models, measurements=measurements) as opened:
        for size in (1, 2, 3, 4, 5):
            opened.costs.table().set_seconds(size, 1e6)
            opened.costs.table(draft).set_seconds(size, 1e6)
        # In a context that is fuller than any prompt of ours makes it.
        opened.costs.table(n_past=5000).set_seconds(3, 1e6)
        assert search_drafts(opened, [draft], (), PROMPTS) is not None
        assert max(opened.costs.table().known.values()) < 1e5
        assert max(opened.costs.table(n_past=5000).known.values()) < 1e5
        assert max(opened.costs.table(draft).known.values()) < 1e5


# --- prompts


def test_a_prompt_that_is_left_out_has_its_number_in_the_file(tiny_models: Path) -> None:
    """Only some of a file's prompts are tried."""
    every_other = given_prompts(["a", "b", "long " * 900, "d"])[::2]
    context = dataclasses.replace(ONE_THREAD, n_ctx=256)
    with loaded(tiny_models, context) as opened:
        found = search_drafts(opened, [], (), every_other)
    assert found is not None
    assert found.baseline.skipped == (3,)


# --- interrupted


def test_it_can_be_interrupted_at_any_time(tiny_models: Path) -> None:
    draft, bad = tiny_models / "draft.gguf", tiny_models / "bad.gguf"

    def run(n_patient: int) -> tuple[Search | None, int]:
        """What is found if it stops once it was asked so often; and how often it was asked."""
        asked = itertools.count()
        with loaded(tiny_models) as opened:
            found = search_drafts(
                opened, [draft, bad], (), PROMPTS, interrupted=lambda: next(asked) >= n_patient
            )
        return found, next(asked)

    whole, n_asked = run(10**9)
    assert whole is not None
    assert run(0)[0] is None
    n_tried = set()
    # It is asked often while the target answers, and seldom later on.
    for n_patient in (1, n_asked // 2, *range(n_asked - 8, n_asked)):
        found, _ = run(n_patient)
        if found is not None:
            assert found.is_interrupted
            assert drafts(found) <= drafts(whole)
            n_tried.add(len(found.tried))
    assert len(n_tried) > 2


# --- messages

DRAFT = Path("/m/small draft.gguf")


def figures(speedup: float) -> DraftFigures:
    spread = speedup, speedup - 0.1, speedup + 0.2, 6
    return DraftFigures(*spread, 10.0 * speedup, 0.6, 2.5, 0.00412, 0.0816)


def search(*tried: Tried) -> Search:
    baseline = Baseline((TrialAnswer("a", (1, 2)),) * 6, (), 256, {1: 0.1, 4: 0.15})
    plain = dataclasses.replace(figures(1.0), acceptance_rate=None, draft_token_s=None)
    return Search(Path("target.gguf"), baseline, (*tried, Tried("none", plain)), ())


def test_three_sentences_say_what_was_measured_what_it_means_and_what_to_do() -> None:
    measured, meaning, action = advice(search(Tried(DRAFT, figures(1.4))))
    assert measured == (
        "measured on 6 answers of target.gguf: 10.0 tokens/s without a draft, "
        "14.0 with small draft.gguf: 1.4 times as fast as without drafts (1.3 to 1.6 in 6 answers)"
    )
    assert meaning == (
        "a batch of 4 costs 1.5 tokens; drafts pay if 21% are accepted, and 60% were"
    )
    assert action == "use it: --draft '/m/small draft.gguf'"


def test_the_table_shows_why_drafts_pay() -> None:
    kinds = {"code": figures(1.6), "prose": figures(1.2)}
    best = Tried(DRAFT, dataclasses.replace(figures(1.4), kinds=kinds))
    stream = io.StringIO()
    print_draft_table(search(best), (), Console(file=stream, width=80))
    assert stream.getvalue().split("\n")[:14] == [
        "draft             speed-up  worst  tokens/s  accepted  per-pass    ms  start",
        "small draft.gguf      1.40   1.30     14.00      0.60      2.50  4.12  81.60",
        "none                  1.00   0.90     10.00         -      2.50     -  81.60",
        "",
        "in one decode                   ms  in tokens",
        "1 token of target.gguf       100.0       1.00",
        "2 tokens of target.gguf      116.7       1.17",
        "4 tokens of target.gguf      150.0       1.50",
        "1 token of small draft.gguf    4.1       0.04",
        "",
        "with small draft.gguf  speed-up  accepted",
        "code                       1.60      0.60",
        "prose                      1.20      0.60",
        "",
    ]


def test_ties_prefer_n_grams_then_no_draft_then_a_model() -> None:
    tried = [
        Tried(Path("equal.gguf"), figures(1.004)),
        Tried("none", figures(1.0)),
        Tried("ngram", figures(0.996)),
        Tried(Path("best.gguf"), figures(1.2)),
        Tried(Path("worst.gguf"), figures(0.7)),
    ]
    order = [Path("best.gguf"), "ngram", "none", Path("equal.gguf"), Path("worst.gguf")]
    assert [one.draft for one in by_speedup(tried)] == order
