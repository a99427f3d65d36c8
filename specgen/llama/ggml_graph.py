"""Compute a graph of GGML's operators on the CPU, and find the CPU's buffer types."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgen.errors import BackendError
from specgen.llama.library import forget_log, ggml, last_error

#: GGML's plain buffer type for the CPU.
CPU_BUFFER = "CPU"
_CPU_DEVICE = 0
#: The most tensors in one computation; a tensor without data is small.
_N_TENSORS = 16


class _InitParams(ctypes.Structure):
    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


@contextmanager
def no_data() -> Iterator[Any]:
    """Open a GGML context for up to `_N_TENSORS` tensors and a graph, without memory for their data."""
    size = _N_TENSORS * ggml("ggml_tensor_overhead", ctypes.c_size_t)()
    overhead = ggml("ggml_graph_overhead_custom", ctypes.c_size_t, ctypes.c_size_t, ctypes.c_bool)
    size += overhead(_N_TENSORS, False)
    context = ggml("ggml_init", ctypes.c_void_p, _InitParams)(_InitParams(size, None, True))
    if not context:
        raise BackendError("GGML could not make a context")
    try:
        yield context
    finally:
        ggml("ggml_free", None, ctypes.c_void_p)(context)


def new_tensor(context: Any, type_number_: int, shape: Sequence[int]) -> Any:
    """Return a tensor without data. The last dimension of `shape` is GGML's first."""
    make = ggml(
        "ggml_new_tensor",
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_int64),
    )
    dimensions = (ctypes.c_int64 * len(shape))(*reversed(shape))
    return make(context, type_number_, len(shape), dimensions)


def allocate(resources: ExitStack, context: Any, buffer_type: Any) -> Any:
    """Allocate a buffer for all tensors of a context; `resources` frees it."""
    forget_log()
    allocate = ggml(
        "ggml_backend_alloc_ctx_tensors_from_buft", ctypes.c_void_p, *2 * (ctypes.c_void_p,)
    )
    buffer = allocate(context, buffer_type)
    if not buffer:
        raise BackendError(f"GGML could not allocate tensors: {last_error()}")
    resources.callback(ggml("ggml_backend_buffer_free", None, ctypes.c_void_p), buffer)
    return buffer


def write_tensor(tensor: Any, data: NDArray[Any]) -> None:
    """Copy an array to a tensor. Raise `BackendError` if their sizes differ."""
    copy_tensor("ggml_backend_tensor_set", tensor, data)


def copy_tensor(name: str, tensor: Any, data: NDArray[Any]) -> None:
    """Copy a whole tensor from or to an array with the GGML function `name`. Raise `BackendError` if
    their sizes differ."""
    copy = ggml(name, None, *2 * (ctypes.c_void_p,), *2 * (ctypes.c_size_t,))
    size = ggml("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)(tensor)
    if size != data.nbytes:
        raise BackendError(f"a tensor of {size} bytes, an array of {data.nbytes}")
    copy(tensor, data.ctypes.data, 0, size)


def compute(
    build: Callable[[Any], tuple[Any, list[tuple[Any, NDArray[Any]]]]],
    shape: tuple[int, ...],
    n_threads: int,
) -> NDArray[np.float32]:
    """Build a graph, compute it, and return the result as float32 of this shape. `build` creates the
    tensors in a context; it returns the result's tensor, and the input tensors with their data."""
    if 0 in shape:
        return np.zeros(shape, np.float32)
    with ExitStack() as resources:
        context = resources.enter_context(no_data())
        result, inputs = build(context)
        make_graph = ggml(
            "ggml_new_graph_custom",
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_bool,
        )
        graph = make_graph(context, _N_TENSORS, False)
        ggml("ggml_build_forward_expand", None, *2 * (ctypes.c_void_p,))(graph, result)
        allocate(resources, context, find_buffer_type(CPU_BUFFER))
        for tensor, data in inputs:
            write_tensor(tensor, data)
        start = ggml("ggml_backend_dev_init", *2 * (ctypes.c_void_p,), ctypes.c_char_p)
        backend = start(cpu_device(), None)
        if not backend:
            raise BackendError("GGML could not start its CPU backend")
        resources.callback(ggml("ggml_backend_free", None, ctypes.c_void_p), backend)
        if set_threads := _procedure_of_cpu(b"ggml_backend_set_n_threads"):
            ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(set_threads)(backend, n_threads)
        compute = ggml("ggml_backend_graph_compute", ctypes.c_int, *2 * (ctypes.c_void_p,))
        status = compute(backend, graph)
        if status:
            raise BackendError(f"GGML could not compute an operator (status {status})")
        values = np.empty(shape, np.float32)
        copy_tensor("ggml_backend_tensor_get", result, values)
        return values


def buffer_types() -> tuple[str, ...]:
    """Return the names of the CPU's buffer types: the plain one, then those for weights only, in the
    order in which llama.cpp tries them."""
    return (CPU_BUFFER, *extra_buffer_types())


def find_buffer_type(name: str) -> Any:
    """Return the CPU's buffer type of this name. Raise `BackendError` if there is none."""
    if name == CPU_BUFFER:
        return ggml("ggml_backend_cpu_buffer_type", ctypes.c_void_p)()
    extra = extra_buffer_types()
    if name not in extra:
        raise BackendError(f"GGML has no buffer type {name}; it has {', '.join(buffer_types())}")
    return extra[name]


def extra_buffer_types() -> dict[str, Any]:
    """Return the buffer types with special layouts, by name. They may change when a library is loaded, so
    the result is not cached."""
    address = _procedure_of_cpu(b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return {}
    pointers = ctypes.POINTER(ctypes.c_void_p)
    listed = ctypes.CFUNCTYPE(pointers, ctypes.c_void_p)(address)(cpu_device())
    name_of = ggml("ggml_backend_buft_name", ctypes.c_char_p, ctypes.c_void_p)
    found: dict[str, Any] = {}
    index = 0
    while listed and listed[index]:
        found[name_of(listed[index]).decode("utf-8", "replace")] = listed[index]
        index += 1
    return found


def _procedure_of_cpu(name: bytes) -> Any:
    """Return the address of a function of the CPU backend, which may be in a library of its own; None if it
    has none of that name."""
    registry = ggml("ggml_backend_dev_backend_reg", ctypes.c_void_p, ctypes.c_void_p)(cpu_device())
    find = ggml(
        "ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p
    )
    return find(registry, name)


def cpu_device() -> Any:
    """Return GGML's CPU device. Raise `BackendError` if there is none."""
    device = ggml("ggml_backend_dev_by_type", ctypes.c_void_p, ctypes.c_int)(_CPU_DEVICE)
    if not device:
        raise BackendError("GGML has no CPU backend")
    return device
