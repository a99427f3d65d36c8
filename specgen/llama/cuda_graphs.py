"""The costs of decodes on devices that replay graphs.

CUDA replays the recorded kernels (the graph) of a decode as long as batches keep their size. After
a change of size, the first decode launches its kernels one by one. The second of the same size also
records them, which takes longest. Later ones of that size are replayed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specgen.llama.library import device_of, native_devices
from specgen.llama.model import LlamaModel
from specgen.method.cost_table import CostTable

#: The weight of the latest observation in the mean length of runs.
_RUN_RATE = 0.5
#: The weight of the latest observation in the mean time of launching or recording.
_EXCESS_RATE = 0.25
#: The expected number of rounds in a row without a draft, before any were seen.
_PLAIN_RUN = 4.0
#: The expected number of rounds in a row with a draft, before any were seen.
_DRAFTED_RUN = 1.0
#: The expected extra time per layer, compared with a replayed decode, of the first decode of a size
#: (measured on an H100; the layers' width hardly matters).
_LAUNCH_S = 6e-5
#: The same for the second decode of a size.
_RECORD_S = 2e-4


def device_names() -> list[str]:
    """Return the names of the devices that llama.cpp can use."""
    return [device_of(handle).name for handle in native_devices()]


def replays_graphs(
    model: LlamaModel,
    n_gpu_layers: int,
    devices: Callable[[], list[str]] = device_names,
) -> bool:
    """Return whether all layers of a model are computed on a device that replays graphs.

    Args:
        model: The model.
        n_gpu_layers: The number of layers on the GPU; negative: all.
        devices: Returns the names of the devices.
    """
    # All layers on the GPU are `n_layer` + 1, since llama.cpp counts the output layer, too.
    if model.is_remote or n_gpu_layers == 0 or 0 < n_gpu_layers <= model.n_layer:
        return False
    if "GGML_CUDA_DISABLE_GRAPHS" in os.environ:
        return False
    return any(name.startswith("CUDA") for name in devices())


@dataclass(slots=True)
class _Run:
    """Consecutive rounds of one kind: with a draft, or without one."""

    #: The mean number of rounds in past runs.
    mean_length: float
    #: The number of rounds of the present run; 0 during a run of the other kind.
    length: int = 0

    @property
    def expected_length(self) -> float:
        """The expected number of rounds in the present or the next run."""
        return max(1.0, self.mean_length, self.length)

    def end(self) -> None:
        """End the present run, if there is one: a round of the other kind came."""
        if self.length:
            self.mean_length += _RUN_RATE * (self.length - self.mean_length)
            self.length = 0


class GraphCostTable(CostTable):
    """The costs of a target on a device that replays graphs.

    The extra time after a change of size is spread over the expected number of rounds that keep the
    new size: the length of a run of rounds with a draft, or without one.
    """

    def __init__(
        self,
        seconds: Mapping[int, float] | None = None,
        *,
        n_layer: int,
    ) -> None:
        super().__init__(seconds)
        #: The number of rows of the last decode.
        self._n_last = 0
        #: The number of consecutive decodes, up to the last one, with that many rows.
        self._n_same = 0
        #: The extra time of the first decode of a size.
        self._launch_s = n_layer * _LAUNCH_S
        #: The extra time of the second decode of a size.
        self._record_s = n_layer * _RECORD_S
        self._plain_run = _Run(_PLAIN_RUN)
        self._drafted_run = _Run(_DRAFTED_RUN)

    def seconds_each(self, n_rows: int) -> float:
        """Return a sequence's share of a decode's time, with its share of a change of size."""
        seconds = super().seconds_each(n_rows)
        if self.n_sharing > 1 or not seconds:
            # The size of a batch of several texts depends on all of them; 0 is an unknown cost.
            return seconds
        run = self._drafted_run if n_rows > 1 else self._plain_run
        n_rounds = run.expected_length
        is_last_size = n_rows == self._n_last
        is_recorded = self._n_same >= 2
        if is_last_size and is_recorded:  # it is replayed
            return seconds
        if is_last_size:  # it is recorded now, and replayed in the other rounds of the run
            return seconds + self._record_s / n_rounds
        if not is_recorded:  # no graph is lost by the change
            return seconds + self._launch_s
        # The change loses a graph, which has to be launched and recorded again after this run.
        return seconds + self._launch_s + (self._launch_s + self._record_s) / n_rounds

    def observe(
        self,
        n_rows: int,
        seconds: float,
        n_sharing: int = 1,
    ) -> None:
        """Learn from a decode: the cost of its size or, after a change of size, the extra time."""
        # 1. Continue the run of rounds of this kind. Without drafts, each text has one row.
        run = self._plain_run
        other_run = self._drafted_run
        if n_rows > n_sharing:
            run, other_run = other_run, run
        other_run.end()
        run.length += 1
        self._n_same = self._n_same + 1 if n_rows == self._n_last else 1
        self._n_last = n_rows

        # 2. A replayed decode shows the cost of its size. So does any decode of a new size, and of
        #    several texts.
        if self._n_same > 2 or n_sharing > 1 or n_rows not in self._seconds:
            super().observe(n_rows, seconds, n_sharing)
            return

        # 3. Another one shows the extra time of launching or recording.
        self.n_sharing = n_sharing
        excess_s = max(0.0, seconds - self.seconds(n_rows))
        if self._n_same == 1:
            self._launch_s += _EXCESS_RATE * (excess_s - self._launch_s)
        else:
            self._record_s += _EXCESS_RATE * (excess_s - self._record_s)
