"""What tuning finds out about tiny models, and what would be with other costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specgen.errors import ModelFileError, PairError, PromptError
from specgen.measure.selection.trial import Baseline, DraftFigures, measure_target
from specgen.measure.selection.tuning import DraftFindings, TriedDraft, Tuner, Tuning
from specgen.options import (
    ContextOptions,
    DraftOptions,
    DraftSource,
    GenerationOptions,
    SessionOptions,
)
from specgen.session.calibration.gain import Agreement, Costs, expected_gain
from specgen.session.calibration.memory import Memory
from specgen.session.drafter_factory import DrafterFactory
from specgen.session.loaded_models import Models
from specgen.session.measurements import is_pair_measured, known_costs, measure_if_new

PROMPTS = ("def add(a, b): return a + b # and the sum is", "Once upon a time")
N_TOKENS = 16
ONE_THREAD = ContextOptions(n_threads=1, flash_attention="off")


pytestmark = pytest.mark.usefixtures("quick_threads")


@contextmanager
def loaded(
    folder: Path, context: ContextOptions = ONE_THREAD, memory: Memory | None = None, **changes: int
) -> Iterator[Models]:
    options = SessionOptions(
        folder / "target.gguf",
        "none",
        drafting=DraftOptions(**{"max_tokens": 4, **changes}),  # type: ignore[arg-type]
        generation=GenerationOptions(max_tokens=N_TOKENS),
        target_context=context,
        draft_context=context,
    )
    with Models(options, time.perf_counter, memory) as opened:
        yield opened


def ways(tuning: Tuning) -> list[tuple[DraftSource, bool]]:
    return [(way.draft, way.ngrams) for way in tuning.ways]


class Stop:
    """Says that it is time to stop once it was asked so often; counts the questions."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.n_asked = 0

    def __call__(self) -> bool:
        self.n_asked += 1
        return self.n_asked > self.after


# --- what is found


def test_the_draft_is_tried_alone_and_with_n_grams_beside_all_else(tiny_models: Path) -> None:
    draft, bad = tiny_models / "draft.gguf", tiny_models / "bad.gguf"
    with loaded(tiny_models) as opened:
        tuning = Tuner(opened).run(draft, [bad, draft], PROMPTS)
    assert tuning is not None
    assert ways(tuning) == [
        ("none", False),
        (draft, False),
        (draft, True),
        ("ngram", False),
        (bad, True),
    ]
    assert not tuning.is_interrupted
    assert tuning.refused == ()
    assert [answer.prompt for answer in tuning.baseline.answers] == list(PROMPTS)
    assert set(tuning.baseline.batch_s) == {1, 2, 3, 4, 5}
    assert len(tuning.baseline.answer_token_s) == len(PROMPTS)
    plain = tuning.way("none")
    assert plain is not None
    assert (plain.figures.speedup, plain.figures.draft_share) == (1.0, 0.0)
    assert tuning.way("ngram", ngrams=True) is None
    # The user named the number of threads.
    assert tuning.threads is None
    found = tuning.draft
    assert found is not None
    assert (found.draft, found.threads) == (draft, None)
    assert found.costs is not None
    assert found.costs.batch_s == tuning.baseline.batch_s
    assert found.expected == expected_gain(found.costs, found.agreement.rate or 0.0)


def test_agreement_is_counted_at_every_place_of_the_answers(tiny_models: Path) -> None:
    rates = {}
    for name in ("target", "draft", "bad"):
        with loaded(tiny_models) as opened:
            tuning = Tuner(opened).run(tiny_models / f"{name}.gguf", [], PROMPTS)
        assert tuning is not None
        assert tuning.draft is not None
        n_tokens = sum(len(answer.tokens) for answer in tuning.baseline.answers)
        assert tuning.draft.agreement.n_places == n_tokens
        rates[name] = tuning.draft.agreement.rate
    assert rates["target"] == 1.0
    assert rates["draft"] is not None
    assert rates["bad"] is not None
    assert rates["draft"] > 0.5 > rates["bad"]


def test_without_a_draft_n_grams_and_others_are_tried(tiny_models: Path) -> None:
    bad = tiny_models / "bad.gguf"
    with loaded(tiny_models) as opened:
        tuning = Tuner(opened).run(None, [bad], PROMPTS)
    assert tuning is not None
    assert tuning.draft is None
    assert ways(tuning) == [("none", False), ("ngram", False), (bad, True)]


def test_an_own_draft_that_cannot_draft_is_an_error_another_one_is_refused(
    tiny_models: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes((tiny_models / "draft.gguf").read_bytes()[:5000])
    bert = tiny_models / "bert.gguf"
    with loaded(tiny_models) as opened:
        for wrong in (broken, bert):
            with pytest.raises((ModelFileError, PairError)):
                Tuner(opened).run(wrong, [], PROMPTS)
        tuning = Tuner(opened).run(None, [broken, bert], PROMPTS)
    assert tuning is not None
    assert ways(tuning) == [("none", False), ("ngram", False)]
    assert [file for file, _ in tuning.refused] == [broken, bert]
    for file, reason in tuning.refused:
        assert reason
        assert str(file) not in reason


def test_prompts_without_room_are_left_out_and_none_at_all_is_an_error(tiny_models: Path) -> None:
    context = ContextOptions(n_ctx=256, n_threads=1, flash_attention="off")
    too_long = "too long " * 400
    with loaded(tiny_models, context) as opened:
        tuning = Tuner(opened).run(None, [], (PROMPTS[0], too_long))
        assert tuning is not None
        assert tuning.baseline.skipped == (2,)
        with pytest.raises(PromptError, match="256"):
            Tuner(opened).run(None, [], [too_long])


def test_it_is_told_what_is_going_on(tiny_models: Path) -> None:
    told: list[tuple[str, int, int]] = []
    draft = tiny_models / "draft.gguf"
    with loaded(tiny_models, ContextOptions(flash_attention="off")) as opened:
        Tuner(opened, progress=lambda *what: told.append(what)).run(draft, [], PROMPTS)
    assert list(dict.fromkeys(what for what, _, _ in told)) == [
        "threads for target.gguf",
        "threads for draft.gguf",
        "target.gguf",
        "agreement of draft.gguf",
        "draft.gguf",
        "draft.gguf and n-grams",
        "n-grams",
    ]
    assert all(0 <= done < total for _, done, total in told)


# --- what is kept


def test_costs_chances_and_threads_are_known_afterwards(tiny_models: Path) -> None:
    target, draft = tiny_models / "target.gguf", tiny_models / "draft.gguf"
    memory, context = Memory(), ContextOptions(flash_attention="off")
    with loaded(tiny_models, context, memory) as opened:
        tuning = Tuner(opened).run(draft, [], PROMPTS)
    assert tuning is not None
    assert tuning.threads is not None
    assert tuning.draft is not None
    assert tuning.draft.threads is not None
    assert memory.threads(target, context) == tuning.threads.chosen
    assert memory.threads(draft, context) == tuning.draft.threads.chosen
    with loaded(tiny_models, context, memory) as opened:
        opened.change_draft(draft)
        assert is_pair_measured(opened, draft)
        assert known_costs(opened, draft) is not None
        taken = opened.costs.context_options()
        chosen = tuning.threads.chosen
        assert (taken.n_threads, taken.n_threads_batch) == (chosen.n_single, chosen.n_batch)
        judged = DrafterFactory(opened).acceptance()["model"].n_judged
        assert judged > 0.9 * tuning.draft.agreement.n_places
        # Nothing is left to measure.
        with opened.contexts(256) as contexts:
            assert measure_if_new(opened, *contexts) == 0.0


@pytest.mark.parametrize("named", [{"n_threads": 1}, {"n_threads_batch": 1}])
def test_numbers_of_threads_that_are_named_are_not_looked_for(
    tiny_models: Path, named: dict[str, int]
) -> None:
    memory = Memory()
    context = ContextOptions(flash_attention="off", **named)  # type: ignore[arg-type]
    with loaded(tiny_models, context, memory) as opened:
        tuning = Tuner(opened).run(None, [], PROMPTS[:1])
    assert tuning is not None
    assert tuning.threads is None
    assert memory.threads(tiny_models / "target.gguf", context) is None


def test_what_was_known_of_the_costs_is_measured_anew(tiny_models: Path) -> None:
    draft, memory = tiny_models / "draft.gguf", Memory()
    with loaded(tiny_models, memory=memory) as opened:
        for size in (1, 2, 3, 4, 5):
            opened.costs.table().start(size, 1e6)
            opened.costs.table(draft).start(size, 1e6)
        # In a context that is fuller than any prompt of ours makes it.
        opened.costs.table(n_past=5000).start(3, 1e6)
        tuning = Tuner(opened).run(draft, [], PROMPTS)
        assert tuning is not None
        assert max(opened.costs.table().known.values()) < 1e5
        assert max(opened.costs.table(n_past=5000).known.values()) < 1e5
        assert max(opened.costs.table(draft).known.values()) < 1e5


# --- interrupted


def test_it_can_be_interrupted_at_any_time(tiny_models: Path) -> None:
    draft, bad = tiny_models / "draft.gguf", tiny_models / "bad.gguf"

    def run(stop: Callable[[], bool]) -> Tuning | None:
        with loaded(tiny_models) as opened:
            return Tuner(opened, interrupted=stop).run(draft, [bad], PROMPTS)

    never = Stop(10**9)
    whole = run(never)
    assert whole is not None
    assert run(Stop(0)) is None
    n_ways = set()
    # It is asked often while the target answers, and seldom later on.
    for after in (1, never.n_asked // 2, *range(never.n_asked - 8, never.n_asked)):
        found = run(Stop(after))
        if found is not None:
            assert found.is_interrupted
            assert ways(found) == ways(whole)[: len(found.ways)]
            n_ways.add(len(found.ways))
    assert len(n_ways) > 2


def test_an_interruption_while_threads_are_compared_chooses_none(tiny_models: Path) -> None:
    target, memory, context = tiny_models / "target.gguf", Memory(), ContextOptions()
    stop = Stop(3)
    with loaded(tiny_models, context, memory) as opened:
        assert Tuner(opened, interrupted=stop).run(None, [], PROMPTS) is None
    assert memory.threads(target, context) is None


def test_an_interruption_while_batches_are_timed_ends_it(tiny_models: Path) -> None:
    with loaded(tiny_models) as opened:
        never = Stop(10**9)
        assert measure_target(opened, PROMPTS[:1], interrupted=never) is not None
        stop = Stop(never.n_asked - 1)
        assert measure_target(opened, PROMPTS[:1], interrupted=stop) is None
        assert stop.n_asked == never.n_asked


# --- the best way


def figures(speedup: float) -> DraftFigures:
    return DraftFigures(speedup, speedup, 10.0 * speedup, 0.5, 2.0, 0.01, 0.1)


def test_of_ways_that_gain_the_same_the_simplest_is_best() -> None:
    draft = Path("draft.gguf")
    all_ways = [
        TriedDraft(draft, True, figures(1.2)),
        TriedDraft(draft, False, figures(1.2)),
        TriedDraft("ngram", False, figures(1.2)),
        TriedDraft("none", False, figures(1.2)),
    ]
    baseline = Baseline((), (), 256, {1: 0.1})
    while all_ways:
        tuning = Tuning(Path("target.gguf"), baseline, None, None, tuple(all_ways))
        assert tuning.best == all_ways.pop()
    tuning = Tuning(
        Path("target.gguf"),
        baseline,
        None,
        None,
        (TriedDraft("none", False, figures(1.0)), TriedDraft(draft, True, figures(1.01))),
    )
    assert tuning.best.draft == draft


# --- what is expected of a draft


@pytest.mark.parametrize(("n_places", "costs"), [(100, None), (0, Costs({1: 1.0, 2: 1.2}, 0.1))])
def test_of_what_is_not_known_nothing_is_expected(n_places: int, costs: Costs | None) -> None:
    agreement = Agreement(n_places, 8 * n_places // 10)
    assert DraftFindings(Path("d.gguf"), agreement, costs).expected is None
