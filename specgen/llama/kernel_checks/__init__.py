"""The choice between specgen's own CPU kernels and llama.cpp's.

The kernels are a C++ library (`kernels/` in the source). It is compiled when specgen is installed, if
there is a compiler and the kernels support the platform. The library is attached to llama.cpp for the
whole process, before the first model is loaded, and only if it passed its self-test. A separate process
runs this test (`specgen.llama.kernel_checks.self_test`), once on each machine. Before a model is loaded, another
process tries the kernels on it (`specgen.llama.kernel_checks.model_trial`), once for each model.
"""

from specgen.llama.kernel_checks.choice import (
    VARIABLE,
    KernelStatus,
    choose_kernels,
    examine_kernels,
    is_first_time,
    library_path,
    note_about,
    wanted_in,
)
from specgen.llama.kernel_checks.model_support import ModelTrials

__all__ = [
    "VARIABLE",
    "KernelStatus",
    "ModelTrials",
    "choose_kernels",
    "examine_kernels",
    "is_first_time",
    "library_path",
    "note_about",
    "wanted_in",
]
