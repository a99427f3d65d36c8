"""How much memory the weights of a target may use, and what happens if they do not fit."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from specgen.errors import MemoryLimitError, UsageError
from specgen.llama.native_context import CONTEXT_OVERHEAD_BYTES
from specgen.options import (
    LONGEST_DRAFT,
    LONGEST_STREAMED_DRAFT,
    ContextOptions,
    DraftOptions,
    SessionOptions,
    WeightsMemory,
    Workers,
)
from specgen.session.calibration import calibrate, is_pair_measured
from specgen.session.engine import Engine
from specgen.session.measurement_store import MeasurementStore
from specgen.session.session import Session
from specgen.session.streaming_notes import streaming_notes
from specgen.session.weights_memory import (
    ALL_WEIGHTS,
    WeightsBudget,
    budget_within,
    memory_needs,
    weights_budget,
)
from specgen.system.disk import read_speed
from specgen.system.quantities import rough_seconds
from tests.helpers.common import EXACT
from tests.helpers.sessions import answered, answers, folder_with, options_of
from tests.helpers.tiny import write_large_model
from tests.helpers.virtual_time import VirtualTime
from tests.tiny import TinyConfig, write_tiny_model

GB = 10**9
CONFIG = TinyConfig(logit_scale=2.0, unprintable_scale=0.0)
models = folder_with(target=CONFIG, draft=CONFIG.draft(0.1))


@pytest.fixture
def large(tmp_path: Path) -> SessionOptions:
    target = write_large_model(tmp_path / "large.gguf", 10 * GB)
    return SessionOptions(target, write_large_model(tmp_path / "draft.gguf", GB // 2))


def with_memory(options: SessionOptions, memory: WeightsMemory) -> SessionOptions:
    context = replace(options.target_context, weights_memory=memory)
    return replace(options, target_context=context)


# --- the budget


def test_weights_that_fit_are_not_limited(large: SessionOptions) -> None:
    needs = memory_needs(large, ())
    assert needs.weights_bytes >= 10 * GB
    assert budget_within(large, (), needs.total_bytes + GB // 100) is ALL_WEIGHTS
    assert budget_within(large, (), 100 * GB) is ALL_WEIGHTS
    assert budget_within(with_memory(large, "all"), (), 100 * GB) is ALL_WEIGHTS


def test_weights_get_the_memory_that_others_leave(large: SessionOptions) -> None:
    alone = budget_within(large, (), 6 * GB).max_bytes
    beside_draft = budget_within(large, (large.draft,), 6 * GB).max_bytes
    beside_contexts = budget_within(large, (), 6 * GB, n_slots=4).max_bytes
    assert alone is not None
    assert beside_draft is not None
    assert beside_contexts is not None
    assert 5 * GB > alone > beside_contexts > beside_draft - GB
    assert alone - beside_draft > GB // 2  # the draft's weights and its context
    cache_bytes = 4096 * 32 * 8 * 2 * 128 * 2
    assert alone - beside_contexts == pytest.approx(3 * cache_bytes, rel=0.1)  # and larger batches
    # Nothing is left if the contexts alone are too large: opening them says so.
    assert budget_within(large, (), GB // 10).max_bytes == 0


def test_layers_without_attention_need_no_cache(tmp_path: Path) -> None:
    needs = []
    for architecture in ("lfm2", "llama"):
        config = TinyConfig(architecture=architecture, n_layer=10, n_ctx_train=10**6)
        options = SessionOptions(write_tiny_model(tmp_path / f"{architecture}.gguf", config))
        context = replace(options.target_context, n_ctx=10**6)
        needs.append(memory_needs(replace(options, target_context=context), ()).other_bytes)
    assert needs[0] - CONTEXT_OVERHEAD_BYTES == (needs[1] - CONTEXT_OVERHEAD_BYTES) // 2


def test_a_prompt_is_prefilled_in_larger_batches_where_memory_allows(large: SessionOptions) -> None:
    usual = ContextOptions().n_batch
    assert budget_within(large, (), 3 * GB).n_batch == usual
    more = budget_within(with_memory(large, 9 * GB), (), GB).n_batch
    assert more is not None
    assert more > usual


def test_the_user_sets_the_memory_of_weights(large: SessionOptions) -> None:
    assert budget_within(with_memory(large, 3 * GB), (), 100 * GB).max_bytes == 3 * GB
    assert budget_within(with_memory(large, 20 * GB), (), GB) is ALL_WEIGHTS
    with pytest.raises(MemoryLimitError, match="large.gguf: its weights need 10.0 GB, but only"):
        budget_within(with_memory(large, "all"), (), 6 * GB)


def test_a_file_that_cannot_be_read_is_reported_when_it_is_loaded(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.gguf", Path(__file__)):
        assert weights_budget(SessionOptions(path, "none"), ()) is ALL_WEIGHTS


def test_a_draft_that_cannot_be_read_does_not_count(large: SessionOptions, tmp_path: Path) -> None:
    """The others do, and the target is streamed all the same."""
    beside_draft = budget_within(large, (large.draft,), 6 * GB)
    assert beside_draft.max_bytes is not None
    for path in (tmp_path / "missing.gguf", Path(__file__)):
        assert budget_within(large, (path, large.draft), 6 * GB) == beside_draft


def test_only_the_memory_of_this_machine_is_limited(models: Path) -> None:
    workers = ContextOptions(workers=Workers(("a:1",)), weights_memory=1000)
    with pytest.raises(UsageError, match="--weights-memory is about"):
        weights_budget(SessionOptions(models / "target.gguf", target_context=workers), ())
    with pytest.raises(UsageError, match="a draft always stays in memory"):
        SessionOptions(models / "target.gguf", draft_context=ContextOptions(weights_memory="all"))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("10G", 10 * GB),
        ("1.5GiB", 3 * 2**29),
        ("1000B", 1000),
        ("500", 500 * 2**20),  # MiB
        ("ALL", "all"),
        ("auto", "auto"),
        (0, 0),
    ],
)
def test_memory_is_a_size_or_a_word(given: WeightsMemory | str, meant: WeightsMemory) -> None:
    assert ContextOptions(weights_memory=given).weights_memory == meant  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["much", "-1G", -5, 2.5])
def test_other_memory_is_refused(given: object) -> None:
    with pytest.raises(UsageError, match=r"weights_memory: .*"):
        ContextOptions(weights_memory=given)  # type: ignore[arg-type]


# --- a session whose weights do not fit

#: Seconds of a pass, whatever its rows.
PASS_S = 2.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    def seconds(name: str, n_rows: int) -> float:
        return PASS_S if name == "target.gguf" else 0.01 * (1.0 + 0.05 * n_rows)

    return VirtualTime(monkeypatch, seconds)


def streamed(
    models: Path,
    clock: VirtualTime,
    drafting: DraftOptions = DraftOptions(),
    draft: str = "draft",
) -> Session:
    options = options_of(models / "target.gguf", draft, drafting=drafting, n_tokens=60)
    return Session(options, clock, MeasurementStore(), budget=WeightsBudget(1))


def test_text_does_not_depend_on_the_memory(models: Path, clock: VirtualTime) -> None:
    with streamed(models, clock) as few:
        assert few.target.is_streamed
        text = answered(few, "the cat is in the house of").text
    plain = options_of(models / "target.gguf", "none", n_tokens=60)
    with Session(plain, clock, MeasurementStore()) as whole:
        assert not whole.target.is_streamed
        assert answered(whole, "the cat is in the house of").text == text


def test_a_streamed_target_is_timed_in_two_passes(models: Path, clock: VirtualTime) -> None:
    with streamed(models, clock) as session:
        assert not is_pair_measured(session, session.draft.cost_key if session.draft else None)
        started_s = clock.now_s
        calibrate(session)
        assert 2 * PASS_S <= clock.now_s - started_s < 3 * PASS_S
        assert is_pair_measured(session, session.draft.cost_key if session.draft else None)
        costs = session.costs.table()
        assert costs.seconds(1) == costs.seconds(session.n_rows_max) == pytest.approx(PASS_S)
    # What is known of it in memory is another matter.
    options = replace(session.options, draft="none")
    with Session(options, clock, session.measurements) as whole:
        assert not whole.costs.table()


def test_drafts_for_a_streamed_target_are_longer(models: Path, clock: VirtualTime) -> None:
    with streamed(models, clock) as session:
        assert session.n_rows_max == 1 + LONGEST_STREAMED_DRAFT
        session.change_drafting(DraftOptions(ngrams=False))
        assert session.n_rows_max == 1 + LONGEST_STREAMED_DRAFT
        finished = answered(session, "the cat is in the house of")
        assert finished.n_tokens / finished.n_rounds > 2.5
        assert finished.n_drafted / finished.n_rounds > LONGEST_DRAFT
    with streamed(models, clock, DraftOptions(max_tokens=5)) as session:
        assert session.n_rows_max == 6
    with streamed(models, clock, DraftOptions(policy="fixed")) as session:
        assert session.n_rows_max == 1 + DraftOptions(policy="fixed").n_max


def test_drafts_leave_sequences_for_all_answers_at_once(large: SessionOptions) -> None:
    lengths = {n: budget_within(large, (), 6 * GB, n).longest_draft for n in (1, 4, 8, 16)}
    assert lengths[1] == lengths[4] == LONGEST_STREAMED_DRAFT
    assert LONGEST_DRAFT < lengths[8] < LONGEST_STREAMED_DRAFT
    assert lengths[16] == LONGEST_DRAFT


def test_several_answers_share_the_passes_of_a_streamed_target(
    models: Path, clock: VirtualTime
) -> None:
    prompts = ["the cat is in " * 12 + "a", "the house of the " * 12 + "b", "c" * 100, "d"]

    def seconds_of(n_parallel: int) -> float:
        started_s = clock.now_s
        with (
            streamed(models, clock, draft="none") as session,
            Engine(session, n_parallel=n_parallel, n_ctx=512) as engine,
        ):
            answers(engine, prompts)
        return clock.now_s - started_s

    # Each prompt is read in a single pass, in which the others go on.
    assert seconds_of(4) < seconds_of(1) / 3


def test_the_first_lines_show_what_is_read_from_disk(models: Path, clock: VirtualTime) -> None:
    with streamed(models, clock) as session:
        first, *_ = streaming_notes(session)
        assert " of weights, 1 B of memory: " in first
        assert "with drafts" not in first
        calibrate(session)
        first, *_ = streaming_notes(session)
        assert ", about 2 s; with drafts about 0." in first
    options = options_of(models / "target.gguf", context=EXACT)
    with Session(options, clock, MeasurementStore()) as whole:
        assert not list(streaming_notes(whole))


# --- the disk


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reads past its cache like this")
def test_the_disk_is_measured_past_the_cache(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.write_bytes(bytes(1000))
    assert read_speed(small, time.perf_counter) is None
    assert read_speed(tmp_path / "missing", time.perf_counter) is None
    times = iter(range(1000))  # a reading a second
    file = tmp_path / "file"
    file.write_bytes(bytes(32 * 2**20))
    speed = read_speed(file, lambda: float(next(times)), max_bytes=16 * 2**20, max_s=100.0)
    # Some file systems, such as those in memory, have no other way than through the cache.
    assert speed is None or speed == pytest.approx(16 * 2**20 / 3)


def test_estimates_have_few_digits() -> None:
    assert [rough_seconds(value) for value in (0.04, 1.234, 6.0, 9.96, 14.4)] == [
        "40 ms",
        "1.2 s",
        "6 s",
        "10 s",
        "14 s",
    ]
