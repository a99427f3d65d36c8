"""The child process that tests the kernels, or tries them on a model.

    python -m specgen.llama.kernels.kernel_trial LIBRARY
    python -m specgen.llama.kernels.kernel_trial LIBRARY SIZE FILE STEPS

The first form runs the self-test. The second loads the model FILE and decodes batches of every
kind; SIZE is `whole`, or `skeleton`, which tries a skeleton of the model. The file STEPS gets a
line before each step.

The process prints a line of JSON. If there is none, its exit code or signal is the result.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

from specgen.errors import SpecgenError
from specgen.llama.context import LlamaBackend
from specgen.llama.kernels.attached import attach
from specgen.llama.kernels.self_test import self_test
from specgen.llama.kernels.skeleton import write_skeleton
from specgen.llama.model import LlamaModel
from specgen.method.backend import Batch
from specgen.options import ContextOptions

_DEFAULT_OPTIONS = ContextOptions(n_threads=2)
#: The contexts to try, each with its number of sequences: the default one, one whose cache is read
#: by other code, one without the kernels' attention, and one with several sequences.
_CONTEXTS = (
    (_DEFAULT_OPTIONS, 1),
    (replace(_DEFAULT_OPTIONS, cache_type_k="q8_0", cache_type_v="q8_0"), 1),
    (replace(_DEFAULT_OPTIONS, flash_attention="off"), 1),
    (_DEFAULT_OPTIONS, 2),
)
_N_CTX = 128
#: The number of rows per sequence in each batch. The first is large enough for AMX.
_BATCH_ROWS = (26, 1)


class _AnyModel(LlamaModel):
    """A model whose vocabulary does not matter."""

    def _check_usable(self) -> None:
        self._check_rotation()  # otherwise the first batch would never end


def try_kernels(file: Path, clock: Callable[[], float]) -> Iterator[str]:
    """Load a model, and decode in several contexts.

    Yields:
        The name of each step, before it is taken.

    Raises:
        SpecgenError: If the model cannot be loaded.
    """
    yield "loading it"
    with contextlib.closing(_AnyModel(file, n_gpu_layers=0)) as model:
        for options, n_sequences in _CONTEXTS:
            # Not every model supports every context.
            with contextlib.suppress(SpecgenError):
                yield from _try_context(model, options, n_sequences, clock)


def _try_context(
    model: LlamaModel,
    options: ContextOptions,
    n_sequences: int,
    clock: Callable[[], float],
) -> Iterator[str]:
    """Open a context and decode its batches; yield the name of each step before it is taken."""
    yield "making a context"
    n_outputs = max(_BATCH_ROWS) * n_sequences
    backend = LlamaBackend(
        model,
        options,
        n_ctx=_N_CTX,
        clock=clock,
        n_sequences=n_sequences,
        n_outputs=n_outputs,
    )
    with contextlib.closing(backend):
        for n_rows in _BATCH_ROWS:
            batch = Batch()
            start = backend.length(0)
            for sequence, offset in itertools.product(range(n_sequences), range(n_rows)):
                position = start + offset
                token = position  # any valid token will do
                batch.add(token, position, (sequence,), wants=True)
            yield f"decoding {len(batch)} rows" if len(batch) > 1 else "decoding a row"
            backend.decode(batch)


def _trial(
    library: Path,
    size: str,
    model: Path,
    steps: Path,
) -> str:
    """Try the kernels on a model; a defect of theirs ends the process.

    Args:
        library: The library of kernels.
        size: ``skeleton`` or ``whole``.
        model: The model's file.
        steps: The file to which the name of each step is written before it is taken.

    Returns:
        Why llama.cpp cannot load the model; empty if it can.
    """
    try:
        attach(library).enable(products=True, attention=True)
        file = model
        if size == "skeleton":
            file = steps.with_name("skeleton.gguf")
            write_skeleton(model, file)
        with steps.open("w", encoding="utf-8") as log:
            for step in try_kernels(file, time.perf_counter):
                print(step, file=log, flush=True)
    except (SpecgenError, OSError) as error:
        return str(error)
    return ""


def _forbid_core_dumps() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(library: str, *trial: str) -> None:
    """Run the self-test or a trial, and print the answer as a line of JSON.

    Args:
        library: The library of kernels.
        *trial: For a trial, the arguments SIZE, FILE and STEPS (see the module's docstring).
    """
    if trial:
        size, model, steps = trial
        _forbid_core_dumps()
        problem = _trial(Path(library), size, Path(model), Path(steps))
        answer = {"problem": problem}
    else:
        answer = asdict(self_test(Path(library)))
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
