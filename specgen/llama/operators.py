"""Single operators of GGML on the CPU: matrix products, with or without experts, and attention.

Decoder heads and the self-test of the kernels use them. The buffer type of the weights selects the
code that computes: GGML's for `CPU_BUFFER`, specgen's kernels, if attached, for `SPECGEN_BUFFER`.
The module also writes copies of model files with other types of weights.
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
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from specgen.errors import BackendError, OutputError
from specgen.llama.ggml_signatures import GgmlInitParams
from specgen.llama.library import forget_log, last_error, llama_cpp, native, procedure
from specgen.system.files import BY_UMASK, PRIVATE, new_beside, write_errors

FloatArray: TypeAlias = NDArray[np.float32]
IndexArray: TypeAlias = NDArray[np.int32]

#: The types of weights, and GGML's numbers for them. (For other numbers, GGML reads past the end of
#: a table.)
TYPE_NUMBERS = {
    name: GGMLQuantizationType[name.upper()].value
    for name in (
        *("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k"),
        *("q5_k", "q6_k", "iq2_xxs", "iq2_xs", "iq3_xxs", "iq1_s", "iq4_nl", "iq3_s", "iq2_s"),
        *("iq4_xs", "iq1_m", "tq1_0", "tq2_0", "mxfp4"),
    )
}
#: GGML's plain buffer type for the CPU.
CPU_BUFFER = "CPU"
#: The buffer type of specgen's kernels.
SPECGEN_BUFFER = "specgen"
#: The maximum number of tensors in one computation; a tensor without data is small.
MAX_TENSORS = 16

_F32 = TYPE_NUMBERS["f32"]
_F16 = TYPE_NUMBERS["f16"]
_I32 = 26
#: GGML_BACKEND_BUFFER_USAGE_WEIGHTS.
_USAGE_WEIGHTS = 1
#: GGML_BACKEND_DEVICE_TYPE_CPU.
_CPU_DEVICE = 0
#: The order of dimensions that swaps the second and the third.
_SWAP_ROWS_AND_HEADS = (0, 2, 1, 3)


# --- weights


@dataclass(frozen=True, slots=True)
class Weights:
    """A matrix, or one for each expert, in one of the types of `TYPE_NUMBERS`."""

    #: A name in `TYPE_NUMBERS`.
    type_name: str
    #: (n_rows, n_columns) or (n_experts, n_rows, n_columns).
    shape: tuple[int, ...]
    #: The bytes as in a GGUF file: one row after the other.
    data: NDArray[np.uint8]

    def __post_init__(self) -> None:
        if len(self.shape) not in (2, 3) or min(self.shape) < 1:
            raise ValueError(f"{self.shape} is not the shape of one matrix or of several")
        expected = math.prod(self.shape[:-1]) * row_bytes(self.type_name, self.shape[-1])
        if self.data.size != expected:
            raise ValueError(f"{self.data.size} bytes of weights, {expected} expected")


def row_bytes(type_name: str, n_columns: int) -> int:
    """Return the size of a row of weights.

    Raises:
        ValueError: If the type is unknown, or the length is not a multiple of its block.
    """
    if type_name not in TYPE_NUMBERS:
        raise ValueError(f"{type_name}: not one of {', '.join(TYPE_NUMBERS)}")
    number = TYPE_NUMBERS[type_name]
    block = int(native.ggml_blck_size(number))
    if n_columns % block:
        raise ValueError(f"{type_name}: rows of {n_columns} are not a multiple of {block}")
    return int(native.ggml_row_size(number, n_columns))


def quantize(values: FloatArray, type_name: str) -> Weights:
    """Quantise weights to a type; for a float type they are only rounded.

    Args:
        values: float32[n_rows, n_columns] or float32[n_experts, n_rows, n_columns].
        type_name: A name in `TYPE_NUMBERS`.

    Raises:
        ValueError: If GGML cannot quantise to the type, or rows of this length.
    """
    values = np.ascontiguousarray(values, np.float32)
    n_rows = math.prod(values.shape[:-1])
    n_columns = values.shape[-1]
    data = np.zeros(n_rows * row_bytes(type_name, n_columns), np.uint8)
    number = TYPE_NUMBERS[type_name]
    importance = None
    if native.ggml_quantize_requires_imatrix(number):
        equal = np.ones(n_columns, np.float32)  # all columns are equally important
        importance = equal.ctypes.data
    first_row = 0
    n_bytes = native.ggml_quantize_chunk(
        number,
        values.ctypes.data,
        data.ctypes.data,
        first_row,
        n_rows,
        n_columns,
        importance,
    )
    if n_bytes != data.size:
        raise ValueError(f"{type_name}: GGML cannot quantise to this type")
    return Weights(type_name, values.shape, data)


def dequantize(weights: Weights) -> FloatArray:
    """Return weights as float32[shape], with the shape of `weights`."""
    number = TYPE_NUMBERS[weights.type_name]
    if number == _F32:  # GGML has no conversion for it
        return weights.data.view(np.float32).reshape(weights.shape).copy()
    traits = native.ggml_get_type_traits(number).contents
    values = np.empty(weights.shape, np.float32)
    data = np.ascontiguousarray(weights.data)
    traits.to_float(data.ctypes.data, values.ctypes.data, values.size)
    return values


class Matrix:
    """Weights in a buffer of a given type, ready for products, as a context manager."""

    def __init__(
        self,
        weights: Weights,
        buffer_type: str = CPU_BUFFER,
    ) -> None:
        """Copy weights into a new buffer.

        Raises:
            BackendError: If GGML has no such buffer type, or cannot allocate the buffer.
        """
        self.weights = weights
        with ExitStack() as on_error:
            context = on_error.enter_context(metadata_context())
            #: GGML's pointer to the tensor; None after `close`.
            self.tensor = new_tensor(context, TYPE_NUMBERS[weights.type_name], weights.shape)
            types = buffer_types()
            if buffer_type not in types:
                raise BackendError(
                    f"GGML has no buffer type {buffer_type}; it has {', '.join(types)}"
                )
            buffer = _allocate(on_error, context, types[buffer_type])
            native.ggml_backend_buffer_set_usage(buffer, _USAGE_WEIGHTS)
            write_tensor(self.tensor, weights.data)
            self._resources = on_error.pop_all()

    def close(self) -> None:
        """Free the buffer."""
        self._resources.close()
        self.tensor = None

    def __enter__(self) -> Matrix:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- operators


class _Graph(NamedTuple):
    """An operator and its arguments, for `_compute`."""

    #: The tensor that the operator writes.
    result: Any
    #: The tensors that it reads, each with its data. (A `Matrix` has its data already.)
    inputs: list[tuple[Any, NDArray[Any]]]


def multiply(
    matrix: Matrix,
    activations: FloatArray,
    experts: IndexArray | None = None,
    *,
    n_threads: int = 1,
) -> FloatArray:
    """Multiply rows with a matrix or, for each row, with the matrices of some experts.

    Args:
        matrix: One matrix or, with `experts`, a matrix for each expert.
        activations: The rows, float32[..., n_tokens, n_columns]. With `experts`,
            float32[n_tokens, n_used or 1, n_columns].
        experts: The experts of each token, int32[n_tokens, n_used]. Their range is not checked.
        n_threads: The number of threads that compute.

    Returns:
        float32[..., n_tokens, n_rows] or, with `experts`, float32[n_tokens, n_used, n_rows].

    Raises:
        ValueError: If the rows and the matrix have different numbers of columns.
        BackendError: If GGML cannot compute the product.
    """
    activations = np.ascontiguousarray(activations, np.float32)
    *_, n_rows, n_columns = matrix.weights.shape
    if activations.shape[-1] != n_columns:
        raise ValueError(f"{activations.shape} times a matrix of {matrix.weights.shape}")

    def build_product(context: Any) -> _Graph:
        rows = new_tensor(context, _F32, activations.shape)
        result = native.ggml_mul_mat(context, matrix.tensor, rows)
        return _Graph(result, [(rows, activations)])

    if experts is None:
        return _compute(build_product, (*activations.shape[:-1], n_rows), n_threads)
    expert_ids = np.ascontiguousarray(experts, np.int32)

    def build_expert_products(context: Any) -> _Graph:
        rows = new_tensor(context, _F32, activations.shape)
        ids = new_tensor(context, _I32, expert_ids.shape)
        result = native.ggml_mul_mat_id(context, matrix.tensor, rows, ids)
        return _Graph(result, [(rows, activations), (ids, expert_ids)])

    return _compute(build_expert_products, (*expert_ids.shape, n_rows), n_threads)


def attend(
    queries: FloatArray,
    keys: FloatArray,
    values: FloatArray,
    mask: NDArray[np.float16],
    *,
    cache_type: str = "f16",
    n_threads: int = 1,
) -> FloatArray:
    """Compute attention (FLASH_ATTN_EXT), with keys and values as in llama.cpp's cache.

    Shapes that do not fit together end the process.

    Args:
        queries: float32[n_streams, n_rows, n_heads, size].
        keys: float32[n_streams, n_cells, n_kv_heads, size].
        values: float32[n_streams, n_cells, n_kv_heads, size].
        mask: Added to the scores, float16[n_streams or 1, n_mask_heads, n_rows, n_cells].
        cache_type: The type of keys and values in the cache.
        n_threads: The number of threads that compute.

    Returns:
        float32[n_streams, n_rows, n_heads, size].
    """

    def build(context: Any) -> _Graph:
        inputs: list[tuple[Any, NDArray[Any]]] = []
        rows = new_tensor(context, _F32, queries.shape)
        inputs.append((rows, np.ascontiguousarray(queries, np.float32)))
        for part in (keys, values):
            cells = new_tensor(context, TYPE_NUMBERS[cache_type], part.shape)
            quantized = quantize(part.reshape(-1, part.shape[-1]), cache_type)
            inputs.append((cells, quantized.data))
        # The operator wants the rows of each head together: permuted views, without a copy.
        by_head = [
            native.ggml_permute(context, tensor, *_SWAP_ROWS_AND_HEADS) for tensor, _ in inputs
        ]
        mask_tensor = new_tensor(context, _F16, mask.shape)
        inputs.append((mask_tensor, np.ascontiguousarray(mask, np.float16)))
        scale = queries.shape[-1] ** -0.5
        max_bias = 0.0
        softcap = 0.0
        result = native.ggml_flash_attn_ext(
            context, *by_head, mask_tensor, scale, max_bias, softcap
        )
        return _Graph(result, inputs)

    return _compute(build, queries.shape, n_threads)


def _compute(
    build: Callable[[Any], _Graph],
    shape: tuple[int, ...],
    n_threads: int,
) -> FloatArray:
    """Compute an operator on the CPU.

    Args:
        build: Creates the operator and the tensors of its arguments in a GGML context.
        shape: The shape of the result.
        n_threads: The number of threads that compute.

    Returns:
        float32[shape].

    Raises:
        BackendError: If GGML cannot allocate the tensors, or cannot compute the operator.
    """
    if 0 in shape:
        return np.zeros(shape, np.float32)
    with ExitStack() as resources:
        # 1. Describe the operator and its tensors, which have no data yet.
        context = resources.enter_context(metadata_context())
        result, inputs = build(context)
        graph = native.ggml_new_graph_custom(context, MAX_TENSORS, False)
        native.ggml_build_forward_expand(graph, result)

        # 2. Allocate the tensors, and fill those that the operator reads.
        _allocate(resources, context, native.ggml_backend_cpu_buffer_type())
        for tensor, data in inputs:
            write_tensor(tensor, data)

        # 3. Compute.
        backend = native.ggml_backend_dev_init(_cpu_device(), None)
        if not backend:
            raise BackendError("GGML could not start its CPU backend")
        resources.callback(native.ggml_backend_free, backend)
        set_threads = _cpu_procedure(
            b"ggml_backend_set_n_threads",
            None,
            ctypes.c_void_p,
            ctypes.c_int,
        )
        if set_threads is not None:
            set_threads(backend, n_threads)
        status = native.ggml_backend_graph_compute(backend, graph)
        if status:
            raise BackendError(f"GGML could not compute an operator (status {status})")

        # 4. Copy the result.
        values = np.empty(shape, np.float32)
        read_tensor(result, values)
        return values


# --- tensors and buffers


@contextlib.contextmanager
def metadata_context() -> Iterator[Any]:
    """Open a GGML context for the metadata of `MAX_TENSORS` tensors and a graph.

    It does not hold the data of tensors (`_allocate` does that), so it is small.
    """
    size = MAX_TENSORS * native.ggml_tensor_overhead()
    size += native.ggml_graph_overhead_custom(MAX_TENSORS, False)
    context = native.ggml_init(GgmlInitParams(mem_size=size, mem_buffer=None, no_alloc=True))
    if not context:
        raise BackendError("GGML could not make a context")
    try:
        yield context
    finally:
        native.ggml_free(context)


def new_tensor(context: Any, type_: int, shape: Sequence[int]) -> Any:
    """Create a tensor without data. GGML orders dimensions the other way round: last one first."""
    dimensions = (ctypes.c_int64 * len(shape))(*reversed(shape))
    return native.ggml_new_tensor(context, type_, len(shape), dimensions)


def write_tensor(tensor: Any, data: NDArray[Any]) -> None:
    """Copy an array into a tensor; raise `BackendError` if their sizes in bytes differ."""
    _check_size(tensor, data)
    native.ggml_backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)


def read_tensor(tensor: Any, data: NDArray[Any]) -> None:
    """Copy a tensor into an array; raise `BackendError` if their sizes in bytes differ."""
    _check_size(tensor, data)
    native.ggml_backend_tensor_get(tensor, data.ctypes.data, 0, data.nbytes)


def _check_size(tensor: Any, data: NDArray[Any]) -> None:
    n_bytes = native.ggml_nbytes(tensor)
    if n_bytes != data.nbytes:
        raise BackendError(f"a tensor of {n_bytes} bytes, an array of {data.nbytes}")


def _allocate(
    resources: ExitStack,
    context: Any,
    buffer_type: Any,
) -> Any:
    """Allocate the data of all tensors of a context in one buffer, which `resources` frees.

    Raises:
        BackendError: If there is too little memory.
    """
    forget_log()
    buffer = native.ggml_backend_alloc_ctx_tensors_from_buft(context, buffer_type)
    if not buffer:
        raise BackendError(f"GGML could not allocate tensors: {last_error()}")
    resources.callback(native.ggml_backend_buffer_free, buffer)
    return buffer


def buffer_types() -> dict[str, Any]:
    """Return the CPU's buffer types by name.

    Attaching a library adds buffer types, so callers must not keep the result.
    """
    types: dict[str, Any] = {CPU_BUFFER: native.ggml_backend_cpu_buffer_type()}
    pointers = ctypes.POINTER(ctypes.c_void_p)
    list_extra = _cpu_procedure(b"ggml_backend_dev_get_extra_bufts", pointers, ctypes.c_void_p)
    if list_extra is not None:
        # The native list ends with a null pointer.
        for buffer_type in itertools.takewhile(bool, list_extra(_cpu_device()) or ()):
            name: bytes = native.ggml_backend_buft_name(buffer_type)
            types[name.decode("utf-8", "replace")] = buffer_type
    return types


def _cpu_procedure(name: bytes, result: Any, *arguments: Any) -> Any:
    """Return a function of GGML's CPU backend; None if it has no function of this name."""
    registry = native.ggml_backend_dev_backend_reg(_cpu_device())
    return procedure(registry, name, result, *arguments)


def _cpu_device() -> Any:
    device = native.ggml_backend_dev_by_type(_CPU_DEVICE)
    if not device:
        raise BackendError("GGML has no CPU backend")
    return device


# --- copies of model files


def quantize_file(
    source: Path,
    output: Path,
    type_name: str,
) -> None:
    """Write a copy of a model file in which all matrices have the same type.

    Args:
        source: The model file.
        output: Where the copy is written.
        type_name: The type of the matrices, "q4_0" for example.

    Raises:
        BackendError: If llama.cpp cannot convert the file.
        OutputError: If the copy cannot be written.
    """
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{type_name.upper()}")
    params.pure = True
    params.allow_requantize = True
    write_copy(source, output, params, BY_UMASK)


def write_copy(
    source: Path,
    output: Path,
    params: Any,
    mode: int = PRIVATE,
) -> None:
    """Let llama.cpp write a changed copy of a model file.

    Args:
        source: The model file.
        output: Where the copy is written.
        params: llama.cpp's parameters of a quantisation.
        mode: The mode of the copy; the umask is subtracted.

    Raises:
        BackendError: If llama.cpp cannot convert the file.
        OutputError: If the copy cannot be written.
    """
    with write_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        with new_beside(output, mode) as new:
            forget_log()
            status = llama_cpp.llama_model_quantize(
                os.fsencode(source),
                os.fsencode(new),
                ctypes.byref(params),
            )
            if status:
                if "iostream" in last_error():  # the C++ error of a failed write
                    raise OutputError(f"{output}: cannot be written", "make room on the disk")
                raise BackendError(f"{source}: llama.cpp cannot copy it: {last_error()}")
            new.replace(output)
