"""specgen's own kernels, attached to GGML: matrix products and attention for some CPUs.

The library of kernels is loaded by GGML (`ggml_backend_load`), and then offers GGML's CPU backend
a layout of its own for weights. llama.cpp lays out the weights of models that it loads afterwards
in it, and the kernels compute what is done with them. What they do not cover llama.cpp computes
itself. It is for one process, all models in it, and cannot be detached, but switched off for
models that are loaded later.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgen.backend.llama.library import forget_log, ggml_function, last_error
from specgen.errors import BackendError

#: What `computing` says where no kernels of ours compute.
LLAMA_CPP = "llama.cpp"
#: Who computes a model that other machines hold: they do not tell more.
WORKERS = "workers"

_TEXTS = (
    "specgen_kernels_problem",
    "specgen_kernels_instructions",
    "specgen_kernels_built_for",
)


@dataclass(frozen=True, slots=True)
class KernelCounts:
    """What the kernels did since the process began."""

    n_products: int
    n_attentions: int
    #: Weights that lie in the kernels' layout at present.
    packed_bytes: int
    #: Attentions that were left to llama.cpp.
    n_attentions_left: int


class Kernels:
    """The library of kernels of this process, attached to GGML; see `attach`."""

    def __init__(self, path: Path, library: Any) -> None:
        self.path = path
        self._library = library
        #: What they are written for: ``avx2``, ``avx-vnni``, ``avx512-vnni`` or ``amx-int8``.
        self.instructions = _text(library.specgen_kernels_instructions())
        self._enabled = (True, True)

    @property
    def computes_products(self) -> bool:
        """Whether the weights of models that are loaded now get the kernels' layout."""
        return self._enabled[0]

    @property
    def computes_attention(self) -> bool:
        return self._enabled[1]

    def enable(self, *, products: bool, attention: bool) -> None:
        """Switch the kernels on or off: products for models that are loaded from now on,
        attention from now on."""
        self._library.specgen_kernels_enable(int(products), int(attention))
        self._enabled = (products, attention)

    def serve(self) -> None:
        """From now on let this process's CPU keep quantised weights packed that others send to it, by
        llama.cpp's RPC."""
        self._library.specgen_kernels_serve()

    def counts(self) -> KernelCounts:
        numbers = (ctypes.c_uint64 * 4)()
        self._library.specgen_kernels_counts(numbers)
        return KernelCounts(*numbers)


_attached: Kernels | None = None


def attach(path: Path) -> Kernels:
    """Attach the library at `path` to GGML, once for the process; its kernels are then on.

    Raises `BackendError` that says why it cannot be: a file that is no such library, a GGML of
    another version, a CPU without the instructions.
    """
    global _attached  # noqa: PLW0603 - GGML's own list, which it changes, is global too
    if _attached is not None:
        if _attached.path != path:
            raise BackendError(f"other kernels are attached: {_attached.path}")
        _attached.enable(products=True, attention=True)
        return _attached
    try:
        library = ctypes.CDLL(os.fspath(path))
        _declare(library)
    except (OSError, AttributeError) as error:
        raise BackendError(f"the library cannot be loaded: {error}") from error
    try:
        load = ggml_function("ggml_backend_load", ctypes.c_void_p, ctypes.c_char_p)
    except AttributeError:
        raise BackendError("this build of llama.cpp cannot load libraries of kernels") from None
    forget_log()
    loaded = load(os.fsencode(path))
    problem = _text(library.specgen_kernels_problem())
    if problem or not loaded:
        raise BackendError(problem or f"GGML did not take the library: {last_error()}")
    _attached = Kernels(path, library)
    return _attached


def attached() -> Kernels | None:
    """The kernels of this process; None where none were attached."""
    return _attached


def computing() -> str:
    """Who computes the products of models that are loaded now on the CPU: ``specgen`` and the
    instruction set, or ``llama.cpp``."""
    if _attached is None or not _attached.computes_products:
        return LLAMA_CPP
    return f"specgen {_attached.instructions}"


def ggml_version() -> str:
    """The version of the GGML that llama.cpp is linked to; empty if it does not tell."""
    try:
        return _text(ggml_function("ggml_version", ctypes.c_char_p)())
    except AttributeError:
        return ""


def _declare(library: Any) -> None:
    """Raises `AttributeError` if a function is missing."""
    for name in _TEXTS:
        function = getattr(library, name)
        function.restype, function.argtypes = ctypes.c_char_p, ()
    library.specgen_kernels_counts.restype = None
    library.specgen_kernels_counts.argtypes = (ctypes.POINTER(ctypes.c_uint64),)
    library.specgen_kernels_enable.restype = None
    library.specgen_kernels_enable.argtypes = (ctypes.c_int, ctypes.c_int)
    library.specgen_kernels_serve.restype = None
    library.specgen_kernels_serve.argtypes = ()


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")


__all__ = [
    "LLAMA_CPP",
    "WORKERS",
    "KernelCounts",
    "Kernels",
    "attach",
    "attached",
    "computing",
    "ggml_version",
]
