"""Costs on devices that capture graphs while the batch size stays the same, and drafts that are
decoded row by row there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.cuda_graphs import GraphCostTable, replays_graphs
from specgen.method.backend import Batch
from specgen.options import ContextOptions
from tests.tiny import TinyConfig, write_tiny_model

#: A token takes 10 ms, five rows 15; the first two decodes of a size take 2 and 8 ms more.
SECONDS = {1: 0.010, 5: 0.015}
LAUNCH_S = 0.002
RECORD_S = 0.008


@dataclass
class Device:
    """Takes the time of `SECONDS`, and longer when the batch size changes."""

    n_last: int = 0
    n_same: int = 0
    seconds: float = 0.0

    def decode(self, n_rows: int) -> float:
        self.n_same = self.n_same + 1 if n_rows == self.n_last else 0
        self.n_last = n_rows
        took_s = SECONDS[n_rows] + (LAUNCH_S, RECORD_S, 0.0)[min(self.n_same, 2)]
        self.seconds += took_s
        return took_s


def drafted(costs: GraphCostTable, device: Device, gains: list[int]) -> list[bool]:
    """Whether a draft of four tokens is verified in each round, by the tokens that it gains."""
    found = []
    for gain in gains:
        extra_s = costs.seconds_each(5) - costs.seconds_each(1)
        found.append(gain * SECONDS[1] > extra_s)
        n_rows = 5 if found[-1] else 1
        costs.observe(n_rows, device.decode(n_rows))
    return found


def test_single_drafts_are_not_worth_a_change_of_size() -> None:
    costs = GraphCostTable(SECONDS, n_layer=40)
    device = Device()
    found = drafted(costs, device, [0, 0, 0, 0, 0, 1] * 30)
    plain_s = len(found) * SECONDS[1] + LAUNCH_S + RECORD_S
    assert device.seconds - SECONDS[1] * sum(found) < 1.02 * plain_s
    assert sum(found) < 5


def test_many_drafts_in_a_row_are_worth_a_change_of_size() -> None:
    costs = GraphCostTable(SECONDS, n_layer=40)
    device = Device()
    found = drafted(costs, device, [0] * 20 + [3] * 40 + [0] * 20 + [3] * 20)
    assert sum(found[20:60]) == 40
    assert not any(found[:20] + found[60:80])
    assert all(found[80:])


def test_switching_between_sizes_does_not_bias_their_costs() -> None:
    costs = GraphCostTable(SECONDS, n_layer=40)
    device = Device()
    for n_rows in [1, 5, 1, 1, 5, 5] * 20:
        costs.observe(n_rows, device.decode(n_rows))
    assert costs.known == pytest.approx(SECONDS)
    costs.observe(5, device.decode(5))
    assert costs.seconds_each(5) == pytest.approx(SECONDS[5])
    assert costs.seconds_each(1) > SECONDS[1] + LAUNCH_S


def test_several_answers_at_once_share_a_batch_as_everywhere() -> None:
    costs = GraphCostTable(SECONDS, n_layer=40)
    costs.observe(5, 0.015, 5)
    assert costs.seconds_each(1) == pytest.approx(0.003)


def test_no_graphs_are_replayed_on_a_cpu_or_where_they_are_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LlamaModel(write_tiny_model(tmp_path / "tiny.gguf", TinyConfig()))
    devices = ["CPU"]

    def replays(n_gpu_layers: int) -> bool:
        return replays_graphs(model, n_gpu_layers, lambda: devices)

    assert not replays(-1)
    devices.append("CUDA0")
    counts = (-1, model.n_layer + 1, 0, model.n_layer)
    assert [replays(n) for n in counts] == [True, True, False, False]
    monkeypatch.setenv("GGML_CUDA_DISABLE_GRAPHS", "1")
    assert not replays(-1)
    model.close()


def test_a_draft_decodes_a_few_rows_one_by_one_with_the_same_result(tmp_path: Path) -> None:
    model = LlamaModel(write_tiny_model(tmp_path / "tiny.gguf", TinyConfig()))
    options = ContextOptions(cache_type_k="f32", cache_type_v="f32")
    found = []
    for replays in (False, True):
        backend = LlamaBackend(model, options, n_ctx=64, clock=time.perf_counter)
        backend.replays_graphs = replays
        backend.decode(Batch.of([5, 6, 7], 0))
        found.append(backend.decode(Batch.of([8, 9, 10], 3, 1)).copy())
        assert backend.decode(Batch.of([11, 12], 6)).shape == (0, model.vocabulary.n_tokens)
        assert list(backend.text(0)) == list(range(5, 13))
        assert backend.n_decoded_rows == 8
        backend.close()
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    model.close()
