"""The library of kernels, attached to GGML: matrix products and attention for some CPUs.

It offers its own layout of weights (a buffer type) to GGML's CPU backend. llama.cpp uses that
layout for models that it loads afterwards. The library cannot be detached, but it can be switched
off for models that are loaded later.
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
from specgen.llama.library import forget_log, last_error
from specgen.llama.library import native as ggml
from specgen.system.llama_build import REBUILD
from specgen.system.machine import usable_memory, usable_threads
from specgen.text.sampling import raw_probabilities

#: The result of `computing` if specgen's kernels do not compute.
LLAMA_CPP = "llama.cpp"
#: In place of that result for a model on workers, which do not report what kernels they use.
WORKERS = "workers"

_TEXT: Any = ctypes.c_char_p
_POINTER: Any = ctypes.c_void_p
_INT: Any = ctypes.c_int
_INT64: Any = ctypes.c_int64
_UINT64: Any = ctypes.c_uint64
#: The library's functions, without the prefix `specgen_kernels_` of their names: the type of the
#: result, then those of the arguments.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "problem": (_TEXT,),
    "instructions": (_TEXT,),
    "built_for": (_TEXT,),
    "counts": (None, ctypes.POINTER(_UINT64)),
    "enable": (None, _INT, _INT),
    "serve": (None,),
    # the rows of a matrix that are computed
    "new_row_limit": (_POINTER, _INT64, _POINTER, _INT64),
    "set_row_limit": (None, _POINTER),
    "delete_row_limit": (None, _POINTER),
    # files of packed weights
    "packed_size": (_UINT64, _POINTER),
    "open_packed": (_POINTER, _TEXT),
    "limit_packed": (None, _POINTER, _UINT64, _TEXT),
    "load_packed": (None, _POINTER),
    "finish_packed": (_INT, _POINTER),
    "packed_problem": (_INT, _POINTER),
    "is_whole_packed": (_INT, _POINTER),
    "streamed_bytes": (_UINT64, _POINTER),
    "used_packed": (_INT, _POINTER),
    "packed_file_bytes": (_UINT64, _POINTER),
    "write_packed": (_INT, _POINTER, _TEXT),
    "close_packed": (None, _POINTER),
}
#: Functions that libraries of earlier builds do not have.
_OPTIONAL_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "likeliest": (ctypes.c_double, _POINTER, _INT64, _INT, _POINTER, _POINTER),
    "allow": (None, ctypes.c_uint, _UINT64),
}


class KernelCounts(NamedTuple):
    """Counters of what the kernels have computed in this process."""

    #: The number of matrix products.
    n_products: int
    #: The number of attentions.
    n_attentions: int
    #: The size of all weights that are in the kernels' layout now.
    packed_bytes: int
    #: The number of attentions that they left to llama.cpp.
    n_attentions_left: int


class Kernels:
    """The library of kernels that this process attached to GGML; see `attach`."""

    def __init__(self, path: Path, native: Any) -> None:
        self.path = path
        #: The library's functions, by their names in `_FUNCTIONS`.
        self.native = native
        #: The instruction set: ``avx2``, ``avx-vnni``, ``avx512``, ``avx512-vnni``,
        #: ``avx512-vnni-amd``, ``amx-int8`` or ``neon-dotprod``.
        self.instructions = _text(native.instructions())
        #: Whether models that are loaded now get the kernels' layout of weights.
        self.computes_products = True
        self.computes_attention = True
        #: Whether the kernels cannot compute some model of this process. Their attention then stays
        #: off, since it can only be switched for all models together.
        self.lacks_attention = False

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the library."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    def enable(self, *, products: bool, attention: bool) -> None:
        """Switch the kernels on or off.

        Args:
            products: Whether they compute the products of models that are loaded from now on.
            attention: Whether they compute all attention, and products with tensors that are not
                packed. Ignored if `lacks_attention`.
        """
        attention = attention and not self.lacks_attention
        self.native.enable(int(products), int(attention))
        self.computes_products = products
        self.computes_attention = attention

    def serve(self) -> None:
        """Pack the weights that other machines send to this process's CPU by llama.cpp's RPC."""
        self.native.serve()

    def counts(self) -> KernelCounts:
        """Return the counters."""
        numbers = (_UINT64 * len(KernelCounts._fields))()
        self.native.counts(numbers)
        return KernelCounts(*numbers)


# --- attaching ------------------------------------------------------------------------------------

_attached: Kernels | None = None


def attached() -> Kernels | None:
    """Return the kernels that this process attached; None if it attached none."""
    return _attached


def attach(path: Path) -> Kernels:
    """Attach a library to GGML, once for the process, and switch its kernels on.

    Raises:
        BackendError: If the file is not such a library, it was built for another version of GGML
            (the hint tells how to install that), the CPU lacks the instructions, or another library
            is attached.
    """
    global _attached  # noqa: PLW0603 - GGML's own list, which it changes, is global too
    if _attached is not None:
        if _attached.path != path:
            raise BackendError(f"other kernels are attached: {_attached.path}")
        _attached.enable(products=True, attention=True)
        return _attached
    native = _load_functions(path)
    forget_log()
    backend = ggml.ggml_backend_load(os.fsencode(path))
    problem = _text(native.problem())
    if problem or not backend:
        has_right_ggml = _text(native.built_for()) == ggml_version()
        hint = None if has_right_ggml else f"install the llama.cpp that they are for: {REBUILD}"
        raise BackendError(problem or f"GGML did not accept the library: {last_error()}", hint)
    _attached = Kernels(path, native)
    # Sampling calls it without knowing of kernels.
    raw_probabilities.native_likeliest = getattr(native, "likeliest", None)
    allow = getattr(native, "allow", None)
    if allow is not None:
        allow(usable_threads().amount, usable_memory().amount)
    return _attached


def _load_functions(path: Path) -> SimpleNamespace:
    """Load a library and return its functions as attributes.

    Raises:
        BackendError: If it cannot be loaded, or lacks one of `_FUNCTIONS`.
    """
    native = SimpleNamespace()
    try:
        library = ctypes.CDLL(os.fspath(path))
        for name, signature in _FUNCTIONS.items():
            setattr(native, name, _function(library, name, signature))
    except (OSError, AttributeError) as error:
        raise BackendError(f"the library cannot be loaded: {error}") from error
    for name, signature in _OPTIONAL_FUNCTIONS.items():
        with contextlib.suppress(AttributeError):
            setattr(native, name, _function(library, name, signature))
    return native


def _function(
    library: ctypes.CDLL,
    name: str,
    signature: tuple[Any, ...],
) -> Any:
    function = getattr(library, f"specgen_kernels_{name}")
    result, *arguments = signature
    function.restype = result
    function.argtypes = arguments
    return function


# --- what computes a model ------------------------------------------------------------------------

#: See `ask_before_loading`.
_problem_of: Callable[[Path], str] | None = None


def computing() -> str:
    """Return the kernels that compute a model loaded now: ``specgen avx2``, say, or `LLAMA_CPP`."""
    if _attached is None or not _attached.computes_products:
        return LLAMA_CPP
    return f"specgen {_attached.instructions}"


def ask_before_loading(problem_of: Callable[[Path], str] | None) -> None:
    """Let a function decide, before each model is loaded, whether the kernels can compute it.

    Args:
        problem_of: Returns why they cannot compute the model in a file, or an empty text. None
            means that they can compute every model.
    """
    global _problem_of  # noqa: PLW0603 - like the attached library, it holds for the process
    _problem_of = problem_of


def kernel_problem(file: Path) -> str:
    """Return why the kernels in use cannot compute a model; empty if they can, or none are in use.

    The answer is a clause about the kernels: "they died of SIGSEGV".
    """
    if _attached is None or not _attached.computes_products or _problem_of is None:
        return ""
    return _problem_of(file)


@contextlib.contextmanager
def loading_with(problem: str) -> Iterator[None]:
    """Load a model in the block, without the kernels if they cannot compute it.

    Afterwards they are switched on again, except for attention: it would also compute this model.

    Args:
        problem: The result of `kernel_problem`.
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
    """Return the version of GGML; empty if it has no such function."""
    try:
        return _text(ggml.ggml_version())
    except BackendError:
        return ""


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")
