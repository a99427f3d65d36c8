"""What the store keeps of measurements, and how it treats files that something else wrote."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specgen.method.acceptance import N_BINS, AcceptanceCounts, AcceptanceRates
from specgen.options import ContextOptions, Workers
from specgen.session.measurement_store import MeasurementStore

CONTEXT = ContextOptions(n_threads=2)
MACHINE = {"cpu": "x", "cores": [2, 4]}
TARGET = Path("target.gguf")
DRAFT = Path("draft.gguf")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "memory.json"


def opened(file: Path | None, **machine: object) -> MeasurementStore:
    return MeasurementStore(file, {**MACHINE, **machine})


def learn(
    measurements: MeasurementStore, model: Path = TARGET, seconds: float = 1.0, n_past: int = 0
) -> None:
    """Let a memory know what 1 and 2 rows cost."""
    table = measurements.costs(model, CONTEXT).table(n_past)
    table.set_seconds(1, seconds)
    table.set_seconds(2, 1.5 * seconds)


def known(
    measurements: MeasurementStore, model: Path = TARGET, n_past: int = 0
) -> dict[int, float]:
    return measurements.costs(model, CONTEXT).table(n_past).known


def judge(
    measurements: MeasurementStore, n: int, mode: str = "greedy", draft: Path | str = DRAFT
) -> None:
    """Let a memory know of n accepted tokens."""
    by_origin = measurements.acceptance_counts(TARGET, draft, mode)
    model = AcceptanceRates("model", by_origin.setdefault("model", AcceptanceCounts()))
    for _ in range(n):
        model.count_steps([0.5])
        model.judge(0.5, accepted=True)


def document(file: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return found


# --- what is stored


def test_measurements_are_restored(file: Path) -> None:
    measurements = opened(file)
    assert known(measurements) == {}
    learn(measurements)
    measurements.costs(TARGET, CONTEXT).table(0).observe(3, 2.0)
    judge(measurements, 20)
    before = measurements.acceptance_counts(TARGET, DRAFT, "greedy")["model"]
    before.credit = 2.5
    measurements.save()
    again = opened(file)
    assert known(again) == pytest.approx(known(measurements), rel=1e-5)
    counts = again.acceptance_counts(TARGET, DRAFT, "greedy")["model"]
    assert counts.credit == 2.5
    for name in ("n_judged", "n_accepted", "n_seen"):
        assert getattr(counts, name) == pytest.approx(getattr(before, name), abs=0.002)
    assert [path.name for path in file.parent.iterdir()] == ["memory.json"]


def test_everything_that_changes_the_cost_of_a_decode_gets_its_own_table(file: Path) -> None:
    measurements = opened(file)
    learn(measurements)
    measurements.save()
    changes: dict[str, Any] = {"n_threads": 4, "n_threads_batch": 4, "n_gpu_layers": 0}
    changes |= {"flash_attention": "off", "cache_type_k": "q8_0", "cache_type_v": "q8_0"}
    changes["workers"] = Workers(("a:1",), (1.0,))
    assert known(opened(file, cpu="y")) == {}
    for name, value in changes.items():
        changed = dataclasses.replace(CONTEXT, **{name: value})
        for each in (measurements, opened(file)):
            assert each.costs(TARGET, changed).table().known == {}, name


def test_a_model_is_recognised_by_name_and_size_in_any_folder(tmp_path: Path, file: Path) -> None:
    here = tmp_path / "here" / "m.gguf"
    there = tmp_path / "there" / "m.gguf"
    for path in (here, there):
        path.parent.mkdir()
        path.write_bytes(b"1234")
    measurements = opened(file)
    learn(measurements, here)
    measurements.save()
    assert known(opened(file), there) == {1: 1.0, 2: 1.5}
    there.write_bytes(b"12345")
    assert known(opened(file), there) == {}


def test_a_fuller_context_starts_with_the_costs_of_the_nearest_one(file: Path) -> None:
    measurements = opened(file)
    learn(measurements, seconds=1.0)
    learn(measurements, seconds=4.0, n_past=5000)
    measurements.save()
    again = opened(file)
    assert known(again, n_past=600)[1] == pytest.approx(1.0)
    assert known(again, n_past=3000)[1] == pytest.approx(4.0)
    assert known(again, n_past=1 << 20)[1] == pytest.approx(4.0)
    # It is a copy, so what is observed here does not change the original.
    for _ in range(50):
        again.costs(TARGET, CONTEXT).table(600).observe(1, 2.0)
    assert known(again)[1] == pytest.approx(1.0)
    # What was learnt in this process is nearer than nothing, too.
    fresh = opened(None)
    learn(fresh)
    assert known(fresh, n_past=9000) == {1: 1.0, 2: 1.5}


# --- more than one process


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_fuller_context_that_only_saw_single_rows_learns_of_batches_later(
    file: Path, is_kept: bool
) -> None:
    """An answer without drafts decodes only single rows. The cost of batches is measured with the
    first draft, in an empty context. In earlier versions, nothing was drafted after long prompts
    then.
    """
    measurements = opened(file)
    measurements.costs(TARGET, CONTEXT).table(2000).observe(1, 2.0)
    if is_kept:
        measurements.save()
        measurements = opened(file)
    held = measurements.costs(TARGET, CONTEXT).table(2000)
    learn(measurements)
    measurements.costs(TARGET, CONTEXT).table(0).set_seconds(17, 3.0)
    assert measurements.costs(TARGET, CONTEXT).table(2000) is held
    assert held.known == pytest.approx({1: 2.0, 2: 3.0, 17: 6.0})
    # What it sees itself stays, and the empty context's table is its own.
    held.observe(17, 7.0)
    assert measurements.costs(TARGET, CONTEXT).table(2000).known[17] > 6.0
    assert known(measurements) == pytest.approx({1: 1.0, 2: 1.5, 17: 3.0})


def test_a_batch_costs_no_more_than_a_larger_one(file: Path) -> None:
    measurements = opened(file)
    table = measurements.costs(TARGET, CONTEXT).table(0)
    for n_rows, seconds in {1: 1.0, 2: 2.5, 3: 1.2, 4: 1.5, 8: 3.0}.items():
        table.set_seconds(n_rows, seconds)
    measurements.save()
    assert known(opened(file)) == {1: 1.0, 2: 1.2, 3: 1.2, 4: 1.5, 8: 3.0}


def test_many_that_save_at_once_leave_a_whole_file(file: Path) -> None:
    """Some of what they learn at the same moment may be lost, but nobody ever reads half a file."""
    models = [Path(f"{number}.gguf") for number in range(4)]

    def save_often(model: Path) -> None:
        measurements = opened(file)
        learn(measurements, model, 2.0)
        for _ in range(20):
            measurements.save()
            assert document(file)["costs"]

    with ThreadPoolExecutor(len(models)) as pool:
        list(pool.map(save_often, models))
    assert [path.name for path in file.parent.iterdir()] == ["memory.json"]
    found = [model for model in models if known(opened(file), model)]
    assert found
    # Whoever comes later adds to it.
    for model in models:
        measurements = opened(file)
        learn(measurements, model, 2.0)
        measurements.save()
    assert all(known(opened(file), model)[1] == 2.0 for model in models)


def test_the_latest_are_kept_and_the_file_stays_small(file: Path) -> None:
    measurements = opened(file)
    for n in range(300):
        learn(measurements, Path(f"{n}.gguf"))
        judge(measurements, 1, str(n))
    measurements.save()
    kept = document(file)
    assert [len(kept["costs"]), len(kept["chances"])] == [256, 256]
    later = opened(file)
    learn(later, Path("0.gguf"))
    learn(later, Path("44.gguf"), 7.0)  # the oldest that there is
    later.save()
    last = opened(file)
    found = [n for n in (0, 43, 44, 45, 46, 299) if known(last, Path(f"{n}.gguf"))]
    assert found == [0, 44, 46, 299]
    assert known(last, Path("44.gguf"))[1] == 7.0


# --- files that cannot be trusted


_DAMAGED = (
    *(b"", b"\xff\xfe", b"[" * 100_000, b"3", b'{"costs": 3, "chances": [1]}'),
    b'{"costs": {"x": 3, "y": null}, "chances": {"x": []}}',
)


@pytest.mark.parametrize("text", _DAMAGED)
def test_a_damaged_file_is_ignored_and_written_again(file: Path, text: bytes) -> None:
    file.parent.mkdir()
    file.write_bytes(text)
    measurements = opened(file)
    assert known(measurements) == {}
    assert measurements.acceptance_counts(TARGET, DRAFT, "greedy") == {}
    learn(measurements)
    judge(measurements, 3)
    measurements.save()
    again = opened(file)
    assert known(again) == {1: 1.0, 2: 1.5}
    assert again.acceptance_counts(TARGET, DRAFT, "greedy")[
        "model"
    ].n_judged.sum() == pytest.approx(3, abs=0.1)


def edit(file: Path, **changes: object) -> None:
    """Change what the file holds, by section: what its only entry becomes."""
    content = document(file)
    for section, entry in changes.items():
        (key,) = content[section]
        content[section][key] = entry
    file.write_text(json.dumps(content), encoding="utf-8")


SENSELESS = (
    'null 3 [1.0] "1" {"x":1.0} {"0":1.0} {"9999999999999":1.0} {"1":"1.0"} {"1":0.0} {"1":NaN}'
)


@pytest.mark.parametrize("entry", [*map(json.loads, SENSELESS.split()), {"1": 10**400}])
def test_costs_that_make_no_sense_are_not_known(file: Path, entry: object) -> None:
    measurements = opened(file)
    learn(measurements)
    measurements.save()
    edit(file, costs=entry)
    again = opened(file)
    assert known(again) == {}
    learn(again, seconds=2.0)
    again.save()
    assert known(opened(file))[1] == 2.0


FULL = {name: [1.0] * N_BINS for name in ("judged", "accepted", "seen")}


@pytest.mark.parametrize(
    "changed",
    [
        None,
        {"judged": [1.0] * (N_BINS - 1)},
        *({"judged": [count] * N_BINS} for count in (float("inf"), 1e308)),
        {"accepted": ["1"] * N_BINS},
        {"seen": [-1.0] * N_BINS},
        {"seen": None},
        *({"credit": credit} for credit in ("a", float("inf"))),
    ],
)
def test_chances_that_make_no_sense_are_not_known_and_spoil_no_others(
    file: Path, changed: dict[str, object] | None
) -> None:
    measurements = opened(file)
    judge(measurements, 4)
    measurements.save()
    (kept,) = document(file)["chances"].values()
    edit(file, chances={**kept, "ngram": changed and {**FULL, **changed}, "lookup": FULL})
    found = opened(file).acceptance_counts(TARGET, DRAFT, "greedy")
    assert set(found) == {"model", "lookup"}
    assert found["model"].n_judged.sum() == pytest.approx(4, abs=0.1)
    assert np.all(np.isfinite(AcceptanceRates("lookup", found["lookup"]).curve()))
