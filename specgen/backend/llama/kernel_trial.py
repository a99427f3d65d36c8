"""Try specgen's kernels on a model: load it, and decode batches of every kind.

This may end the process; `specgen.kernels.model_trial` runs it in a child process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from specgen.backend.base import Batch
from specgen.backend.llama.context import LlamaBackend
from specgen.backend.llama.model import LlamaModel
from specgen.errors import SpecgenError
from specgen.options import ContextOptions

_USUAL = ContextOptions(n_threads=2)
#: The contexts and the numbers of their sequences: the usual one, one whose cache the kernels read in another way,
#: one without their attention, and one for several sequences.
_CONTEXTS = (
    (_USUAL, 1),
    (replace(_USUAL, cache_type_k="q8_0", cache_type_v="q8_0"), 1),
    (replace(_USUAL, flash_attention="off"), 1),
    (_USUAL, 2),
)
_N_CTX = 128
#: The rows of the batches, for each sequence. The larger number is enough for AMX.
_N_ROWS = (26, 1)


class _AnyModel(LlamaModel):
    """A model of which any text may come, or none."""

    def _check_usable(self) -> None:
        pass


def try_kernels(file: Path, clock: Callable[[], float]) -> Iterator[str]:
    """Load a model file, and decode in several contexts. Yield what is done next, before it is done. Raise
    `SpecgenError` if the file cannot be loaded; llama.cpp may refuse a context."""
    yield "loading it"
    with contextlib.closing(_AnyModel(file, n_gpu_layers=0)) as model:
        for options, n_sequences in _CONTEXTS:
            with contextlib.suppress(SpecgenError):
                yield from _try_context(model, options, n_sequences, clock)


def _try_context(
    model: LlamaModel, options: ContextOptions, n_sequences: int, clock: Callable[[], float]
) -> Iterator[str]:
    yield "making a context"
    n_outputs = max(_N_ROWS) * n_sequences
    backend = LlamaBackend(
        model, options, n_ctx=_N_CTX, clock=clock, n_sequences=n_sequences, n_outputs=n_outputs
    )
    with contextlib.closing(backend):
        position = 0
        for n_rows in _N_ROWS:
            batch = Batch()
            for sequence in range(n_sequences):
                for place in range(position, position + n_rows):
                    batch.add(place, place, (sequence,), True)
            yield f"decoding {len(batch)} rows" if len(batch) > 1 else "decoding a row"
            backend.decode(batch)
            position += n_rows


__all__ = ["try_kernels"]
