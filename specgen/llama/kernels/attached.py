"""The library of kernels, attached to GGML: matrix products and attention for some CPUs.

It offers its own layout of weights to GGML's CPU backend, in which llama.cpp stores those of models
that it loads afterwards. It cannot be detached, but switched off for models that are loaded later.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from specgen.errors import BackendError
from specgen.llama.library import forget_log, ggml, last_error
from specgen.system.machine import REBUILD
from specgen.text.sampling import raw_probabilities

#: The result of `computing` if specgen's kernels do not compute.
LLAMA_CPP = "llama.cpp"
#: In place of that result for a model on workers, which do not say what kernels they use.
WORKERS = "workers"

_TEXT, _POINTER, _INT, _UINT64 = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64
#: The library's functions, whose names begin with `specgen_kernels_`: results and arguments.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "problem": (_TEXT,),
    "instructions": (_TEXT,),
    "built_for": (_TEXT,),
    "counts": (None, ctypes.POINTER(_UINT64)),
    "enable": (None, _INT, _INT),
    "serve": (None,),
    "new_row_limit": (_POINTER, ctypes.c_int64, _POINTER, ctypes.c_int64),
    "set_row_limit": (None, _POINTER),
    "delete_row_limit": (None, _POINTER),
    "open_packed": (_POINTER, _TEXT),
    "load_packed": (None, _POINTER),
    "used_packed": (_INT, _POINTER),
    "packed_file_bytes": (_UINT64, _POINTER),
    "write_packed": (_INT, _POINTER, _TEXT),
    "close_packed": (None, _POINTER),
}


class KernelCounts(NamedTuple):
    """What the kernels computed so far, the bytes in their layout now, and the attentions left to
    llama.cpp.
    """

    n_products: int
    n_attentions: int
    packed_bytes: int
    n_attentions_left: int


class Kernels:
    """The library of kernels that this process attached to GGML; see `attach`."""

    def __init__(self, path: Path, native: Any) -> None:
        self.path = path
        #: The library's functions by their names in `_FUNCTIONS`.
        self.native = native
        #: Their instruction set: ``avx2``, ``avx-vnni``, ``avx512-vnni``, ``amx-int8`` or
        #: ``neon-dotprod``.
        self.instructions = _text(native.instructions())
        #: Whether models that are loaded now get the kernels' layout of weights.
        self.computes_products = True
        self.computes_attention = True
        #: Whether a model of this process cannot have the kernels' attention, which is the same for
        #: all.
        self.lacks_attention = False

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    def enable(self, *, products: bool, attention: bool) -> None:
        """Switch the kernels on or off. `products` applies to models that are loaded from now on;
        `attention` to all attention and to products of tensors that are not packed, unless a model
        excluded it.
        """
        attention = attention and not self.lacks_attention
        self.native.enable(int(products), int(attention))
        self.computes_products, self.computes_attention = products, attention

    def serve(self) -> None:
        """Pack the weights that other machines send to this process's CPU through llama.cpp's RPC."""
        self.native.serve()

    def counts(self) -> KernelCounts:
        numbers = (_UINT64 * 4)()
        self.native.counts(numbers)
        return KernelCounts(*numbers)


_attached: Kernels | None = None
_problem_of: Callable[[Path], str] | None = None


def attach(path: Path) -> Kernels:
    """Attach the library at `path` to GGML, once for the process, and switch its kernels on. Raise
    `BackendError` if the file is not such a library, GGML has another version (the hint installs
    the right one), the CPU lacks the instructions, or another library is attached.
    """
    global _attached  # noqa: PLW0603 - GGML's own list, which it changes, is global too
    if _attached is not None:
        if _attached.path != path:
            raise BackendError(f"other kernels are attached: {_attached.path}")
        _attached.enable(products=True, attention=True)
        return _attached
    native = SimpleNamespace()
    try:
        library = ctypes.CDLL(os.fspath(path))
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(library, f"specgen_kernels_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(native, name, function)
    except (OSError, AttributeError) as error:
        raise BackendError(f"the library cannot be loaded: {error}") from error
    forget_log()
    loaded = ggml("ggml_backend_load", _POINTER, _TEXT)(os.fsencode(path))
    problem = _text(native.problem())
    if problem or not loaded:
        fits = _text(native.built_for()) == ggml_version()
        hint = None if fits else f"install the llama.cpp that they are for: {REBUILD}"
        raise BackendError(problem or f"GGML did not take the library: {last_error()}", hint)
    _attached = Kernels(path, native)
    with contextlib.suppress(AttributeError):  # libraries of earlier builds lack it
        native.likeliest = library.specgen_kernels_likeliest
        native.likeliest.restype = ctypes.c_double
        native.likeliest.argtypes = _POINTER, ctypes.c_int64, _INT, _POINTER, _POINTER
        raw_probabilities.native_likeliest = native.likeliest
    return _attached


def attached() -> Kernels | None:
    return _attached


def computing() -> str:
    """Return what computes models that are loaded now on the CPU: ``specgen avx2``, say, or
    ``llama.cpp``.
    """
    if _attached is None or not _attached.computes_products:
        return LLAMA_CPP
    return f"specgen {_attached.instructions}"


def ask_before_loading(problem_of: Callable[[Path], str] | None) -> None:
    """Ask `problem_of`, before a model file is loaded, why the kernels cannot compute it. None:
    they can.
    """
    global _problem_of  # noqa: PLW0603 - like the attached library, it holds for the process
    _problem_of = problem_of


def kernel_problem(file: Path) -> str:
    """Return why the kernels in use cannot compute a model ("they died of SIGSEGV"); empty if they
    can.
    """
    if _attached is None or not _attached.computes_products or _problem_of is None:
        return ""
    return _problem_of(file)


@contextlib.contextmanager
def loading_with(problem: str) -> Iterator[None]:
    """Load a model within this context. If the kernels have a problem with it they are off; their
    attention stays off.
    """
    kernels = _attached
    if kernels is None or not problem:
        yield
        return
    kernels.lacks_attention = True
    kernels.enable(products=False, attention=False)
    try:
        yield
    finally:
        kernels.enable(products=True, attention=False)


def ggml_version() -> str:
    try:
        return _text(ggml("ggml_version", _TEXT)())
    except BackendError:
        return ""


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")
