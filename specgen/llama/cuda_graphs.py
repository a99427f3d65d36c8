"""Devices that record the kernels of a decode as a graph, and replay it while batches keep their
size (CUDA). A batch of another size is launched kernel by kernel, and recorded if that size comes
again, which takes longest.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from specgen.llama.library import device_of, native_devices
from specgen.llama.model import LlamaModel
from specgen.method.cost_table import CostTable

_RUN_RATE, _EXCESS_RATE = 0.5, 0.25  # the weights of the latest observation in means
#: What is expected before it was seen: the length of runs of rounds without and with a draft, and
#: the seconds for each layer that the first and second decode of a size take more (an H100; the
#: layers' width hardly matters).
_FIRST_RUNS, _FIRST_EXCESS_S = (4.0, 1.0), (6e-5, 2e-4)


def replays_graphs(model: LlamaModel, n_gpu_layers: int) -> bool:
    """Return whether all layers of a model are computed where graphs are replayed."""
    if model.is_remote or n_gpu_layers == 0 or 0 < n_gpu_layers <= model.n_layer:
        return False
    if "GGML_CUDA_DISABLE_GRAPHS" in os.environ:
        return False
    return any(device_of(each).name.startswith("CUDA") for each in native_devices())


class GraphCostTable(CostTable):
    """The costs of a target of `n_layer` layers that replays graphs. What a change of size takes is
    spread over as many rounds as the last runs of rounds with a draft (or without one) had.
    """

    def __init__(self, seconds: Mapping[int, float] | None = None, *, n_layer: int) -> None:
        super().__init__(seconds)
        self._n_last = self._n_same = 0  # rows of the last decode, and how many decodes had so many
        self._excess_s = [n_layer * each_s for each_s in _FIRST_EXCESS_S]
        #: Rounds without and with a draft in a row: their mean number, and the present one.
        self._mean_run, self._run = [*_FIRST_RUNS], [0, 0]

    def seconds_each(self, n_rows: int) -> float:
        seconds = super().seconds_each(n_rows)
        if self.n_sharing > 1 or not seconds:
            return seconds
        (launch_s, record_s), drafts = self._excess_s, n_rows > 1
        n_rounds = max(1.0, self._mean_run[drafts], self._run[drafts])
        if self._n_same < 2:  # the last size is not recorded yet
            return seconds + (record_s / n_rounds if n_rows == self._n_last else launch_s)
        if n_rows == self._n_last:
            return seconds
        # What is recorded has to be launched and recorded again after these rounds.
        return seconds + launch_s + (launch_s + record_s) / n_rounds

    def observe(self, n_rows: int, seconds: float, n_sharing: int = 1) -> None:
        drafts = n_rows > n_sharing
        if ended := self._run[not drafts]:
            self._mean_run[not drafts] += _RUN_RATE * (ended - self._mean_run[not drafts])
            self._run[not drafts] = 0
        self._run[drafts] += 1
        self._n_same = self._n_same + 1 if n_rows == self._n_last else 1
        self._n_last, place = n_rows, self._n_same - 1
        if place >= len(self._excess_s) or n_sharing > 1 or n_rows not in self._seconds:
            super().observe(n_rows, seconds, n_sharing)
            return
        self.n_sharing = n_sharing
        excess_s = max(0.0, seconds - self.seconds(n_rows))
        self._excess_s[place] += _EXCESS_RATE * (excess_s - self._excess_s[place])
