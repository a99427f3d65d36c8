"""Simulated time for sessions on tiny models.

Decodes take the time of a cost table, so that cost-aware policies decide the same on every machine
and in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llama_cpp
import pytest

from specgen.llama import LlamaBackend
from specgen.method.backend import Batch
from specgen.system.arrays import Logits


class VirtualTime:
    """A clock for a session. A decode takes `seconds(name of the model, number of rows)`.

    Everything else takes no time.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[str, int], float]
    ) -> None:
        self.now_s = 0.0
        self._name = ""
        decode, llama_decode = LlamaBackend.decode, llama_cpp.llama_decode

        def named(backend: LlamaBackend, batch: Batch) -> Logits:
            self._name = backend.model.name
            return decode(backend, batch)

        def timed(context: Any, batch: Any) -> int:
            self.now_s += seconds(self._name, batch.n_tokens)
            result: int = llama_decode(context, batch)
            return result

        monkeypatch.setattr(LlamaBackend, "decode", named)
        monkeypatch.setattr(llama_cpp, "llama_decode", timed)

    def __call__(self) -> float:
        return self.now_s
