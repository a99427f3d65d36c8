"""Write a copy of a model with another type of weights, or without some of its blocks."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from specgen.backend.llama.library import forget_log, last_error, llama_cpp
from specgen.errors import BackendError

#: llama.cpp's numbers of the file types with matrices of these types. With `pure` all matrices get the
#: type, also the output matrix, which llama.cpp otherwise does not change or gives more bits.
_FILE_TYPES = {"q4_0": 2, "q8_0": 7}
#: Seconds between the moments at which Ctrl-C is noticed.
_LOOK_S = 0.1


def requantize(
    model: Path,
    copy: Path,
    n_threads: int,
    type_name: Literal["q4_0", "q8_0"] = "q4_0",
    *,
    left_out: Collection[int] = (),
    as_is: bool = False,
) -> None:
    """Write a copy of a GGUF file with all matrices in one type, whether they were quantised or not. With
    `as_is` they keep their types. The copy lacks the blocks whose numbers are in `left_out`.

    A matrix whose row length is not a multiple of 32 gets the type that llama.cpp falls back to. Raise
    `BackendError` if llama.cpp cannot write the copy; a part of it may exist then.
    """
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = _FILE_TYPES[type_name]
    params.allow_requantize = True
    params.pure = True
    params.nthread = n_threads
    params.only_copy = as_is
    if left_out:
        params.prune_layers = (ctypes.c_int32 * (len(left_out) + 1))(*sorted(left_out), -1)
    results: list[int] = []

    def make() -> None:
        results.append(
            llama_cpp.llama_model_quantize(
                os.fsencode(model), os.fsencode(copy), ctypes.byref(params)
            )
        )

    forget_log()
    # In a thread, so that Ctrl-C works: native code cannot be interrupted, and this may take a minute.
    worker = threading.Thread(target=make, name="requantize", daemon=True)
    worker.start()
    while worker.is_alive():
        worker.join(_LOOK_S)
    if results != [0]:
        raise BackendError(f"{model}: llama.cpp cannot requantise it: {last_error()}")
