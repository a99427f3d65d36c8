"""Single operators of GGML on the CPU, which compute decoder heads and test the kernels: matrix
products, also with experts, and attention. Copies of model files in other types of weights.

The name of a buffer type for the weights selects the code: ``CPU`` is GGML's, `SPECGEN_BUFFER` that
of specgen's kernels, if they are attached. Shapes of an attention that do not fit together end the
process.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from specgen.errors import BackendError, OutputError
from specgen.llama.library import forget_log, ggml, last_error, llama_cpp, procedure
from specgen.system.files import new_beside, write_errors

FloatArray: TypeAlias = NDArray[np.float32]
IndexArray: TypeAlias = NDArray[np.int32]

#: The types of weights, and GGML's numbers of them. (GGML reads past the end of a table for
#: others.)
TYPE_NUMBERS = {
    name: GGMLQuantizationType[name.upper()].value
    for name in (
        *("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k"),
        *("q5_k", "q6_k", "iq2_xxs", "iq2_xs", "iq3_xxs", "iq1_s", "iq4_nl", "iq3_s", "iq2_s"),
        *("iq4_xs", "iq1_m", "tq1_0", "tq2_0", "mxfp4"),
    )
}
#: GGML's plain buffer type for the CPU, and that of specgen's kernels.
CPU_BUFFER = "CPU"
SPECGEN_BUFFER = "specgen"

_POINTER: Any = ctypes.c_void_p
_F32, _F16, _I32 = TYPE_NUMBERS["f32"], TYPE_NUMBERS["f16"], 26
_USAGE_WEIGHTS = 1
_CPU_DEVICE = 0


# --- weights --------------------------------------------------------------------------------
#: The most tensors in one computation; a tensor without data is small.
N_TENSORS = 16


class _InitParams(ctypes.Structure):
    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


@contextlib.contextmanager
def no_data() -> Iterator[Any]:
    """Open a GGML context for up to `N_TENSORS` tensors and a graph, without memory for their data."""
    overhead = ggml("ggml_graph_overhead_custom", *2 * (ctypes.c_size_t,), ctypes.c_bool)
    a_tensor = ggml("ggml_tensor_overhead", ctypes.c_size_t)()
    size = N_TENSORS * a_tensor + overhead(N_TENSORS, False)
    context = ggml("ggml_init", ctypes.c_void_p, _InitParams)(_InitParams(size, None, True))
    if not context:
        raise BackendError("GGML could not make a context")
    try:
        yield context
    finally:
        ggml("ggml_free", None, ctypes.c_void_p)(context)


def new_tensor(context: Any, type_: int, shape: Sequence[int]) -> Any:
    """Return a tensor without data. The last dimension of `shape` is GGML's first."""
    types = (ctypes.c_void_p, *2 * (ctypes.c_int,), ctypes.POINTER(ctypes.c_int64))
    make = ggml("ggml_new_tensor", ctypes.c_void_p, *types)
    dimensions = (ctypes.c_int64 * len(shape))(*reversed(shape))
    return make(context, type_, len(shape), dimensions)


@dataclass(frozen=True, slots=True)
class Weights:
    """A matrix, or one for each expert, in one of the types of `TYPE_NUMBERS`."""

    type_name: str
    #: (n_rows, n_columns) or (n_experts, n_rows, n_columns).
    shape: tuple[int, ...]
    #: The bytes as in a GGUF file: one row after the other.
    data: NDArray[np.uint8]

    def __post_init__(self) -> None:
        if len(self.shape) not in (2, 3) or min(self.shape) < 1:
            raise ValueError(f"{self.shape} is no shape of a matrix, or of several")
        expected = math.prod(self.shape[:-1]) * row_bytes(self.type_name, self.shape[-1])
        if self.data.size != expected:
            raise ValueError(f"{self.data.size} bytes of weights, {expected} expected")


def row_bytes(type_name: str, n_columns: int) -> int:
    """Return the size of a row. Raise `ValueError` for an unknown type, or a length that is no
    multiple of its block.
    """
    if type_name not in TYPE_NUMBERS:
        raise ValueError(f"{type_name}: not one of {', '.join(TYPE_NUMBERS)}")
    number = TYPE_NUMBERS[type_name]
    block = int(ggml("ggml_blck_size", ctypes.c_int64, ctypes.c_int)(number))
    if n_columns % block:
        raise ValueError(f"{type_name}: rows of {n_columns} are no multiple of {block}")
    size = ggml("ggml_row_size", ctypes.c_size_t, ctypes.c_int, ctypes.c_int64)
    return int(size(number, n_columns))


def quantize(values: FloatArray, type_name: str) -> Weights:
    """Quantise float32[(n_experts,) n_rows, n_columns] to a type; float types only round. Raise
    `ValueError`.
    """
    values = np.ascontiguousarray(values, np.float32)
    n_rows, n_columns = math.prod(values.shape[:-1]), values.shape[-1]
    data = np.zeros(n_rows * row_bytes(type_name, n_columns), np.uint8)
    types = (ctypes.c_int, _POINTER, _POINTER, *3 * (ctypes.c_int64,), _POINTER)
    convert = ggml("ggml_quantize_chunk", ctypes.c_size_t, *types)
    importance = np.ones(n_columns, np.float32)  # all columns are equally important
    number = TYPE_NUMBERS[type_name]
    needs_it = ggml("ggml_quantize_requires_imatrix", ctypes.c_bool, ctypes.c_int)(number)
    weights = importance.ctypes.data if needs_it else None
    arrays = values.ctypes.data, data.ctypes.data
    if convert(number, *arrays, 0, n_rows, n_columns, weights) != data.size:
        raise ValueError(f"{type_name}: GGML cannot quantise to this type")
    return Weights(type_name, values.shape, data)


class _TypeTraits(ctypes.Structure):
    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, _POINTER, _POINTER, ctypes.c_int64)),
        ("from_float_ref", _POINTER),
    )


def dequantize(weights: Weights) -> FloatArray:
    number = TYPE_NUMBERS[weights.type_name]
    if number == _F32:
        return weights.data.view(np.float32).reshape(weights.shape).copy()
    traits = ggml("ggml_get_type_traits", ctypes.POINTER(_TypeTraits), ctypes.c_int)(number)
    values = np.empty(weights.shape, np.float32)
    data = np.ascontiguousarray(weights.data)
    traits.contents.to_float(data.ctypes.data, values.ctypes.data, values.size)
    return values


# --- operators ------------------------------------------------------------------------------


class Matrix:
    """Weights in a buffer of a given type, ready for products. Raises `BackendError` if there is no
    such buffer type.
    """

    def __init__(self, weights: Weights, buffer_type: str = CPU_BUFFER) -> None:
        self.weights = weights
        with ExitStack() as on_error:
            context = on_error.enter_context(no_data())
            self.tensor = new_tensor(context, TYPE_NUMBERS[weights.type_name], weights.shape)
            known = buffer_types()
            if buffer_type not in known:
                what = f"{buffer_type}; it has {', '.join(known)}"
                raise BackendError(f"GGML has no buffer type {what}")
            buffer = _allocate(on_error, context, known[buffer_type])
            set_usage = ggml("ggml_backend_buffer_set_usage", None, _POINTER, ctypes.c_int)
            set_usage(buffer, _USAGE_WEIGHTS)
            copy_tensor("ggml_backend_tensor_set", self.tensor, weights.data)
            self._resources = on_error.pop_all()

    def close(self) -> None:
        self._resources.close()
        self.tensor = None

    def __enter__(self) -> Matrix:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


#: The tensor of an operator's result, and the input tensors with their data.
_Graph: TypeAlias = tuple[Any, list[tuple[Any, NDArray[Any]]]]


def multiply(
    matrix: Matrix,
    activations: FloatArray,
    experts: IndexArray | None = None,
    *,
    n_threads: int = 1,
) -> FloatArray:
    """Multiply rows of float32[n_tokens, n_columns] with the matrix: float32[n_tokens, n_rows],
    with leading dimensions too. With `experts`, int32[n_tokens, n_used], each token is multiplied
    with the matrices of these numbers (unchecked): float32[n_tokens, n_used, n_rows], from
    activations float32[n_tokens, n_used or 1, n_columns].
    """
    activations = np.ascontiguousarray(activations, np.float32)
    *_, n_rows, n_columns = matrix.weights.shape
    if activations.shape[-1] != n_columns:
        raise ValueError(f"{activations.shape} times a matrix of {matrix.weights.shape}")

    def build(context: Any) -> _Graph:
        vectors = new_tensor(context, _F32, activations.shape)
        if experts is None:
            product = ggml("ggml_mul_mat", *4 * (_POINTER,))
            return product(context, matrix.tensor, vectors), [(vectors, activations)]
        numbers = new_tensor(context, _I32, experts.shape)
        result = ggml("ggml_mul_mat_id", *5 * (_POINTER,))(context, matrix.tensor, vectors, numbers)
        return result, [(vectors, activations), (numbers, np.ascontiguousarray(experts, np.int32))]

    shape = activations.shape[:-1] if experts is None else experts.shape
    return _compute(build, (*shape, n_rows), n_threads)


def attend(
    queries: FloatArray,
    keys: FloatArray,
    values: FloatArray,
    mask: NDArray[np.float16],
    *,
    cache_type: str = "f16",
    n_threads: int = 1,
) -> FloatArray:
    """Compute attention (FLASH_ATTN_EXT) as llama.cpp's cache is laid out: float32[n_streams,
    n_rows, n_heads, size]. Queries have this shape, keys and values [n_streams, n_cells,
    n_kv_heads, size]; the mask is added to the scores: float16[n_streams or 1, n_mask_heads,
    n_rows, n_cells].
    """
    attention = ggml("ggml_flash_attn_ext", _POINTER, *5 * (_POINTER,), *3 * (ctypes.c_float,))
    permute = ggml("ggml_permute", _POINTER, *2 * (_POINTER,), *4 * (ctypes.c_int,))

    def build(context: Any) -> _Graph:
        inputs: list[tuple[Any, NDArray[Any]]] = [
            (new_tensor(context, _F32, queries.shape), np.ascontiguousarray(queries, np.float32))
        ]
        for part in (keys, values):
            cells = quantize(part.reshape(-1, part.shape[-1]), cache_type).data
            inputs.append((new_tensor(context, TYPE_NUMBERS[cache_type], part.shape), cells))
        # The operator wants the rows of each head together; a permuted view does that without a
        # copy.
        by_head = [permute(context, tensor, 0, 2, 1, 3) for tensor, _ in inputs]
        masking = new_tensor(context, _F16, mask.shape)
        inputs.append((masking, np.ascontiguousarray(mask, np.float16)))
        result = attention(context, *by_head, masking, queries.shape[-1] ** -0.5, 0.0, 0.0)
        return result, inputs

    return _compute(build, queries.shape, n_threads)


# --- graphs and buffers -----------------------------------------------------------------------------


def _allocate(resources: ExitStack, context: Any, buffer_type: Any) -> Any:
    forget_log()
    allocate = ggml("ggml_backend_alloc_ctx_tensors_from_buft", *3 * (_POINTER,))
    if not (buffer := allocate(context, buffer_type)):
        raise BackendError(f"GGML could not allocate tensors: {last_error()}")
    resources.callback(ggml("ggml_backend_buffer_free", None, _POINTER), buffer)
    return buffer


def copy_tensor(name: str, tensor: Any, data: NDArray[Any]) -> None:
    """Copy a whole tensor with the GGML function `name`. Raise `BackendError` if the array has
    another size.
    """
    copy = ggml(name, None, *2 * (_POINTER,), *2 * (ctypes.c_size_t,))
    size = ggml("ggml_nbytes", ctypes.c_size_t, _POINTER)(tensor)
    if size != data.nbytes:
        raise BackendError(f"a tensor of {size} bytes, an array of {data.nbytes}")
    copy(tensor, data.ctypes.data, 0, size)


def _compute(build: Callable[[Any], _Graph], shape: tuple[int, ...], n_threads: int) -> FloatArray:
    if 0 in shape:
        return np.zeros(shape, np.float32)
    with ExitStack() as resources:
        context = resources.enter_context(no_data())
        result, inputs = build(context)
        sizes = (ctypes.c_size_t, ctypes.c_bool)
        graph = ggml("ggml_new_graph_custom", *2 * (_POINTER,), *sizes)(context, N_TENSORS, False)
        ggml("ggml_build_forward_expand", None, *2 * (_POINTER,))(graph, result)
        _allocate(resources, context, ggml("ggml_backend_cpu_buffer_type", _POINTER)())
        for tensor, data in inputs:
            copy_tensor("ggml_backend_tensor_set", tensor, data)
        start = ggml("ggml_backend_dev_init", *2 * (_POINTER,), ctypes.c_char_p)
        backend = start(_cpu_device(), None)
        if not backend:
            raise BackendError("GGML could not start its CPU backend")
        resources.callback(ggml("ggml_backend_free", None, _POINTER), backend)
        types = (None, _POINTER, ctypes.c_int)
        if set_threads := _procedure_of_cpu(b"ggml_backend_set_n_threads", *types):
            set_threads(backend, n_threads)
        compute = ggml("ggml_backend_graph_compute", ctypes.c_int, *2 * (_POINTER,))
        if status := compute(backend, graph):
            raise BackendError(f"GGML could not compute an operator (status {status})")
        values = np.empty(shape, np.float32)
        copy_tensor("ggml_backend_tensor_get", result, values)
        return values


def buffer_types() -> dict[str, Any]:
    """Return the CPU's buffer types by name. They may change when a library is loaded, so they are
    not cached.
    """
    found: dict[str, Any] = {CPU_BUFFER: ggml("ggml_backend_cpu_buffer_type", _POINTER)()}
    pointers = ctypes.POINTER(_POINTER)
    if list_extra := _procedure_of_cpu(b"ggml_backend_dev_get_extra_bufts", pointers, _POINTER):
        name_of = ggml("ggml_backend_buft_name", ctypes.c_char_p, _POINTER)
        for buffer_type in itertools.takewhile(bool, list_extra(_cpu_device()) or ()):
            found[name_of(buffer_type).decode("utf-8", "replace")] = buffer_type
    return found


def _procedure_of_cpu(name: bytes, result: Any, *arguments: Any) -> Any:
    registry = ggml("ggml_backend_dev_backend_reg", _POINTER, _POINTER)(_cpu_device())
    return procedure(registry, name, result, *arguments)


def _cpu_device() -> Any:
    device = ggml("ggml_backend_dev_by_type", _POINTER, ctypes.c_int)(_CPU_DEVICE)
    if not device:
        raise BackendError("GGML has no CPU backend")
    return device


# --- copies of model files


def quantize_file(source: Path, output: Path, type_name: str) -> None:
    """Write a copy of a file whose matrices all have one type. Raise `BackendError`, `OutputError`."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{type_name.upper()}")
    params.pure = params.allow_requantize = True
    write_copy(source, output, params)


def write_copy(source: Path, output: Path, params: Any) -> None:
    """Let llama.cpp write a changed copy of a file. Raise `BackendError`, `OutputError`."""
    with write_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        with new_beside(output) as new:
            forget_log()
            paths = os.fsencode(source), os.fsencode(new)
            if llama_cpp.llama_model_quantize(*paths, ctypes.byref(params)):
                if "iostream" in last_error():
                    raise OutputError(f"{output}: cannot be written", "make room on the disk")
                raise BackendError(f"{source}: llama.cpp cannot copy it: {last_error()}")
            new.replace(output)
