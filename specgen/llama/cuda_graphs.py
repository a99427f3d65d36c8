"""The costs of decodes on devices that replay graphs.

CUDA records the kernels of a decode as a graph, and replays it while batches keep their size. A
batch of another size is launched kernel by kernel. If that size comes again it is recorded, which
takes longest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specgen.llama.library import device_of, native_devices
from specgen.llama.model import LlamaModel
from specgen.method.cost_table import CostTable

#: The weights of the latest observation in means.
_RUN_RATE = 0.5
_EXCESS_RATE = 0.25
#: The expected rounds in a row without a draft, and with one, before any were seen.
_PLAIN_RUN = 4.0
_DRAFTED_RUN = 1.0
#: The seconds for each layer that the first decode of a size (launched), and the second one
#: (recorded), are expected to take more: those of an H100. The layers' width hardly matters.
_LAUNCH_S = 6e-5
_RECORD_S = 2e-4


def device_names() -> list[str]:
    """Return the names of the devices that llama.cpp can use."""
    return [device_of(each).name for each in native_devices()]


def replays_graphs(
    model: LlamaModel,
    n_gpu_layers: int,
    devices: Callable[[], list[str]] = device_names,
) -> bool:
    """Return whether all layers of a model are computed where graphs are replayed."""
    if model.is_remote or n_gpu_layers == 0 or 0 < n_gpu_layers <= model.n_layer:
        return False
    if "GGML_CUDA_DISABLE_GRAPHS" in os.environ:
        return False
    return any(name.startswith("CUDA") for name in devices())


@dataclass(slots=True)
class _Run:
    """Rounds of one kind (with or without a draft) that follow each other."""

    #: How many there are in a row, on average.
    mean_length: float
    #: The present ones.
    length: int = 0

    @property
    def expected_length(self) -> float:
        return max(1.0, self.mean_length, self.length)

    def end(self) -> None:
        """Note that a round of the other kind came."""
        if self.length:
            self.mean_length += _RUN_RATE * (self.length - self.mean_length)
            self.length = 0


class GraphCostTable(CostTable):
    """The costs of a target that replays graphs.

    What a change of size takes is spread over as many rounds as the last runs of rounds with a
    draft (or without one) had.
    """

    def __init__(self, seconds: Mapping[int, float] | None = None, *, n_layer: int) -> None:
        super().__init__(seconds)
        #: The rows of the last decode, and how many decodes in a row had as many.
        self._n_last = 0
        self._n_same = 0
        #: What the first and the second decode of a size take more than later ones.
        self._launch_s = n_layer * _LAUNCH_S
        self._record_s = n_layer * _RECORD_S
        self._plain_run = _Run(_PLAIN_RUN)
        self._drafted_run = _Run(_DRAFTED_RUN)

    def seconds_each(self, n_rows: int) -> float:
        """Return a sequence's share of a decode, with its share of a change of size."""
        seconds = super().seconds_each(n_rows)
        if self.n_sharing > 1 or not seconds:
            return seconds
        run = self._drafted_run if n_rows > 1 else self._plain_run
        n_rounds = run.expected_length
        is_recorded = self._n_same >= 2
        if not is_recorded:
            if n_rows == self._n_last:
                return seconds + self._record_s / n_rounds
            return seconds + self._launch_s
        if n_rows == self._n_last:
            return seconds
        # What is recorded has to be launched and recorded again after these rounds.
        return seconds + self._launch_s + (self._launch_s + self._record_s) / n_rounds

    def observe(
        self,
        n_rows: int,
        seconds: float,
        n_sharing: int = 1,
    ) -> None:
        """Learn from a decode: its size's cost, or what the change to this size took."""
        run = self._plain_run
        other_run = self._drafted_run
        if n_rows > n_sharing:
            run, other_run = other_run, run
        other_run.end()
        run.length += 1
        self._n_same = self._n_same + 1 if n_rows == self._n_last else 1
        self._n_last = n_rows
        if self._n_same > 2 or n_sharing > 1 or n_rows not in self._seconds:
            super().observe(n_rows, seconds, n_sharing)
            return
        self.n_sharing = n_sharing
        excess_s = max(0.0, seconds - self.seconds(n_rows))
        if self._n_same == 1:
            self._launch_s += _EXCESS_RATE * (excess_s - self._launch_s)
        else:
            self._record_s += _EXCESS_RATE * (excess_s - self._record_s)
