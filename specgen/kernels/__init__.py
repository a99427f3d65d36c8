"""Who computes on the CPU: specgen's own kernels or llama.cpp's.

The kernels are a library of C++ (`kernels/` in the source) that is compiled when specgen is
installed, where there is a compiler and the platform is one that they are written for. It is
attached to llama.cpp for the whole process, before the first model is loaded, and only after it
passed a test of its own in another process (`specgen.kernels.self_test`), once a machine.
"""

from specgen.kernels.choice import (
    VARIABLE,
    KernelStatus,
    choose_kernels,
    examine_kernels,
    library_path,
    wanted_in,
)

__all__ = [
    "VARIABLE",
    "KernelStatus",
    "choose_kernels",
    "examine_kernels",
    "library_path",
    "wanted_in",
]
