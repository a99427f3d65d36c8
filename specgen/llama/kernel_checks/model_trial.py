"""A trial of the kernels on a model, which runs in a child process:
`python -m specgen.llama.kernel_checks.model_trial LIBRARY FILE STEPS PRODUCTS ATTENTION`.

It attaches the library and loads the file, with the products and the attention of the kernels on (1) or off (0),
and decodes a few batches. With an empty LIBRARY llama.cpp's own code does all that. The file STEPS gets a line before
each step. The result is one line of JSON. If the process ends without it, the exit code or signal is the result.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

from specgen.errors import SpecgenError


def main(library: str, file: str, steps: str, products: str, attention: str) -> None:
    """Try the kernels on a model, and print the result."""
    _no_core_dump()
    # Threads that wait for each other leave the processor to other programs. OpenMP reads this once.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    from specgen.llama.kernel_trial import try_kernels
    from specgen.llama.kernels import attach

    problem = ""
    try:
        if library:
            kernels = attach(Path(library))
            kernels.enable(products=products == "1", attention=attention == "1")
        with Path(steps).open("w", encoding="utf-8") as log:
            for step in try_kernels(Path(file), time.perf_counter):
                print(step, file=log, flush=True)
    except SpecgenError as error:
        problem = error.message
    sys.stdout.write(json.dumps({"problem": problem}) + "\n")


def _no_core_dump() -> None:
    """Let the system write no image of this process if it dies."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main(*sys.argv[1:])
