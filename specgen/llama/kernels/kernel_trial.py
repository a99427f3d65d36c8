"""The child process that tests the kernels: `python -m specgen.llama.kernels.kernel_trial LIBRARY`,
or tries them on a model: `... LIBRARY SIZE FILE STEPS`. It prints a line of JSON; without it, the
exit code or signal is the result.

The self-test compares operators of every kind with GGML's own, and rows alone with those in a
batch, bit by bit. A trial loads the file and decodes batches of every kind; STEPS gets a line
before each step. SIZE is `whole`, or `skeleton`: a file of the same make that loads quickly, with
its model's metadata and tensors, but fewer layers, fewer tokens without a text, and zeros for
weights, which are holes of a sparse file.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from specgen.errors import BackendError, SpecgenError
from specgen.llama import operators
from specgen.llama.context import LlamaBackend
from specgen.llama.gguf_file import GgufMetadata, GgufTensor, opened_parts
from specgen.llama.kernels.admission import Verdict
from specgen.llama.kernels.attached import Kernels, attach
from specgen.llama.library import ggml
from specgen.llama.model import LlamaModel
from specgen.llama.operators import SPECGEN_BUFFER, FloatArray, Matrix, new_tensor, no_data
from specgen.method.backend import Batch
from specgen.options import ContextOptions

# --- the self-test --------------------------------------------------------------------------------

#: The types of weights that the kernels multiply.
TYPES = (
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
    *("iq4_nl", "iq4_xs", "mxfp4", "f16", "bf16", "f32"),
)
#: The largest root mean square of differences to that of values; rounding to 8 bits causes 0.01.
TOLERANCE = 0.02
#: The sizes of the products: several superblocks of 256 columns, several groups of rows, and tokens
#: that do not fill the tiles of the kernels; the larger number is enough for AMX.
_N_COLUMNS, _N_ROWS, _N_TOKENS, _N_TOKENS_OF_LARGE = 768, 96, 11, 43
_N_EXPERTS, _N_USED = 4, 2
#: (key and value type, size of keys and values).
_ATTENTIONS = (("f16", 64), ("f16", 128), ("q8_0", 64))
_N_HEADS, _N_KV_HEADS, _N_CELLS = 8, 2, 160


class FailedTestError(Exception):
    """The kernels computed something wrong; the message names it."""


def self_test(library: Path) -> Verdict:
    try:
        kernels = attach(library)
    except BackendError as error:
        return Verdict("refused", error.message, hint=error.hint or "")
    try:
        for type_name in TYPES:
            _test_product(kernels, type_name)
        _test_product(kernels, "q4_k", with_experts=True)
        n_attentions = sum(_test_attention(kernels, *attention) for attention in _ATTENTIONS)
    except (BackendError, FailedTestError) as error:
        return Verdict("failed", str(error))
    tested = f"products of {len(TYPES)} types of weights"
    if n_attentions:
        tested += f" and {n_attentions} attentions"
    message = f"{tested} agree with llama.cpp's, and rows are the same alone and in a batch"
    return Verdict("passed", message, kernels.instructions)


def _test_product(kernels: Kernels, type_name: str, *, with_experts: bool = False) -> None:
    rng = np.random.default_rng(0)
    shape = (_N_EXPERTS, _N_ROWS, _N_COLUMNS) if with_experts else (_N_ROWS, _N_COLUMNS)
    weights = operators.quantize(rng.standard_normal(shape, dtype=np.float32), type_name)
    tokens = rng.standard_normal((_N_TOKENS_OF_LARGE, _N_COLUMNS), dtype=np.float32)
    experts = None
    if with_experts:
        tokens = tokens[:, None]
        shuffled = np.argsort(rng.random((len(tokens), _N_EXPERTS)), axis=1)
        experts = shuffled[:, :_N_USED].astype(np.int32)
    what = "products with experts" if with_experts else f"products of {type_name}"

    def product(matrix: Matrix, rows: slice, n_threads: int) -> FloatArray:
        chosen = None if experts is None else experts[rows]
        return operators.multiply(matrix, tokens[rows], chosen, n_threads=n_threads)

    with Matrix(weights) as plain, Matrix(weights, SPECGEN_BUFFER) as packed:
        kernels.enable(products=True, attention=False)
        expected = product(plain, slice(None), 1)
        kernels.enable(products=True, attention=True)
        if not with_experts:
            _compare(f"{what}, not packed", partial(product, plain), expected)
            n_before = kernels.counts().n_products
            product(packed, slice(0, 1), 1)
            if kernels.counts().n_products == n_before:
                raise FailedTestError(f"{what}: the kernels did not compute them")
        _compare(what, partial(product, packed), expected)


def _test_attention(kernels: Kernels, cache_type: str, size: int) -> bool:
    rng = np.random.default_rng(2)
    queries = rng.standard_normal((1, _N_TOKENS, _N_HEADS, size), dtype=np.float32)
    shape = (1, _N_CELLS, _N_KV_HEADS, size)
    keys, values = (rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
    # The last rows of a text: a row sees all cells before it, and its own.
    seen = np.arange(_N_TOKENS)[:, None] + _N_CELLS - _N_TOKENS
    mask = np.where(np.arange(_N_CELLS) > seen, -np.inf, 0).astype(np.float16)[None, None]

    def attend(rows: slice, n_threads: int) -> FloatArray:
        inputs = queries[:, rows], keys, values, mask[:, :, rows]
        computed = operators.attend(*inputs, cache_type=cache_type, n_threads=n_threads)
        return computed.reshape(-1, _N_HEADS, size)

    kernels.enable(products=True, attention=False)
    expected = attend(slice(None), 1)
    kernels.enable(products=True, attention=True)
    n_before = kernels.counts().n_attentions
    attend(slice(0, 1), 1)
    if kernels.counts().n_attentions == n_before:
        return False
    _compare(f"attention over {cache_type}", attend, expected)
    return True


def _compare(what: str, compute: Callable[[slice, int], FloatArray], expected: FloatArray) -> None:
    """Raise `FailedTestError` if the rows differ from GGML's, or a row from itself in a smaller
    batch.
    """
    computed = compute(slice(None), 2)
    if not np.isfinite(computed).all():
        raise FailedTestError(f"{what} are not all numbers")
    difference = computed.astype(np.float64) - expected
    error = np.sqrt(np.square(difference).mean() / np.square(expected).mean())
    if error >= TOLERANCE:
        raise FailedTestError(f"{what} differ from llama.cpp's by {error:.1%}")
    for n_rows, row in itertools.product((1, _N_TOKENS), range(0, len(computed), 5)):
        if computed[row].tobytes() != compute(slice(row, row + n_rows), 1)[0].tobytes():
            raise FailedTestError(f"{what}: row {row} of a batch is not what it is alone")


# --- trials of models -----------------------------------------------------------------------------

_USUAL = ContextOptions(n_threads=2)
#: The contexts and their sequences: as usual, with a cache read otherwise, without attention, for
#: several.
_CONTEXTS = (
    (_USUAL, 1),
    (replace(_USUAL, cache_type_k="q8_0", cache_type_v="q8_0"), 1),
    (replace(_USUAL, flash_attention="off"), 1),
    (_USUAL, 2),
)
_N_CTX = 128
#: The rows of the batches, for each sequence. The larger number is enough for AMX.
_BATCH_ROWS = (26, 1)


class _AnyModel(LlamaModel):
    """A model of which any text may come, or none."""

    def _check_usable(self) -> None: ...


def try_kernels(file: Path, clock: Callable[[], float]) -> Iterator[str]:
    """Load a model and decode in several contexts; yield each step's name before it. Raise
    `SpecgenError`.
    """
    yield "loading it"
    with contextlib.closing(_AnyModel(file, n_gpu_layers=0)) as model:
        for options, n_sequences in _CONTEXTS:
            with contextlib.suppress(SpecgenError):
                yield from _try_context(model, options, n_sequences, clock)


def _try_context(
    model: LlamaModel, options: ContextOptions, n_sequences: int, clock: Callable[[], float]
) -> Iterator[str]:
    yield "making a context"
    n_outputs = max(_BATCH_ROWS) * n_sequences
    backend = LlamaBackend(
        model, options, n_ctx=_N_CTX, clock=clock, n_sequences=n_sequences, n_outputs=n_outputs
    )
    with contextlib.closing(backend):
        for n_rows in _BATCH_ROWS:
            batch, start = Batch(), backend.length(0)
            for sequence, place in itertools.product(range(n_sequences), range(n_rows)):
                batch.add(start + place, start + place, (sequence,), True)
            yield f"decoding {len(batch)} rows" if len(batch) > 1 else "decoding a row"
            backend.decode(batch)


# --- skeletons of model files ---------------------------------------------------------------------

#: A skeleton has this many layers within these bytes: patterns of layers repeat after at most 8.
_N_LAYERS, _MOST_BYTES = 8, 2**27
#: It has no more tokens than this.
_MOST_TOKENS = 4096
#: The metadata that is kept besides that of the architecture.
_KEPT = ("general.architecture", "general.alignment")
#: More than the alignment of tensors.
_PADDING = 4096
#: The sizes in bytes of values that arrays may be cut to, by GGUF's types.
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_OF_A_LAYER = re.compile(r"blk\.(\d+)\.(.*)")


class _Written(GgufMetadata):
    """Metadata that are changed and written."""

    def __init__(self) -> None:
        self.handle, self._tensors = ggml("gguf_init_empty", ctypes.c_void_p)(), ctypes.c_void_p()

    def names(self) -> list[str]:
        name = ggml("gguf_get_key", ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64)
        count = ggml("gguf_get_n_kv", ctypes.c_int64, ctypes.c_void_p)(self.handle)
        return [name(self.handle, index).decode("utf-8", "replace") for index in range(count)]

    def remove(self, key: str) -> None:
        remove = ggml("gguf_remove_key", ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p)
        remove(self.handle, key.encode())

    def set(self, key: str, value: int | bytes) -> None:
        about = (ctypes.c_void_p, ctypes.c_char_p)
        name, kind = (
            ("u32", ctypes.c_uint32) if isinstance(value, int) else ("str", ctypes.c_char_p)
        )
        ggml(f"gguf_set_val_{name}", None, *about, kind)(self.handle, key.encode(), value)

    def cut(self, key: str, kept: Sequence[int]) -> None:
        kind: int = self.get("gguf_get_arr_type", ctypes.c_int, key)
        size = _VALUE_BYTES.get(kind)
        if size is None:  # texts
            return
        address: int = self.get("gguf_get_arr_data", ctypes.c_void_p, key)
        values = b"".join(ctypes.string_at(address + index * size, size) for index in kept)
        types = (ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p)
        write = ggml("gguf_set_arr_data", None, ctypes.c_void_p, *types, ctypes.c_size_t)
        write(self.handle, key.encode(), kind, values, len(kept))


def write_skeleton(file: Path, output: Path) -> None:
    with opened_parts(file) as (about, tensors), _Written() as made, no_data() as shorter:
        ggml("gguf_set_kv", None, *2 * (ctypes.c_void_p,))(made.handle, about.handle)
        n_tokens = made.length("tokenizer.ggml.tokens") or 0
        kept = _cut_metadata(made, tensors, n_tokens)
        n_bytes_of = ggml("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
        add = ggml("gguf_add_tensor", None, *2 * (ctypes.c_void_p,))
        rename = ggml("ggml_set_name", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
        n_bytes = 0
        for tensor in tensors:
            layer, name = _place(tensor)
            handle = tensor.handle
            if layer is not None:
                if layer not in kept:
                    continue
                name = f"blk.{kept.index(layer)}.{name}"
            elif n_tokens > _MOST_TOKENS and n_tokens in tensor.shape:
                shape = [_MOST_TOKENS if size == n_tokens else size for size in tensor.shape]
                handle = new_tensor(shorter, tensor.type, shape[::-1])
            rename(handle, name.encode())
            add(made.handle, handle)
            n_bytes += n_bytes_of(handle) + _PADDING
        size = ggml("gguf_get_meta_size", ctypes.c_size_t, ctypes.c_void_p)(made.handle)
        metadata = ctypes.create_string_buffer(size)
        ggml("gguf_get_meta_data", None, *2 * (ctypes.c_void_p,))(made.handle, metadata)
    with output.open("wb") as stream:
        stream.write(metadata.raw)
        stream.truncate(size + n_bytes)


def _cut_metadata(made: _Written, tensors: Sequence[GgufTensor], n_tokens: int) -> list[int]:
    architecture = made.text("general.architecture")
    n_layers = made.number(f"{architecture}.block_count")
    kept = _kept_layers(tensors, n_layers, made.number(f"{architecture}.nextn_predict_layers"))
    for key in made.names():
        if key not in _KEPT and not key.startswith(f"{architecture}."):
            made.remove(key)
        elif made.length(key) == n_layers and len(kept) < n_layers:
            made.cut(key, kept)
    made.set(f"{architecture}.block_count", len(kept))
    made.set("tokenizer.ggml.model", b"no_vocab")
    if n_tokens:
        made.set(f"{architecture}.vocab_size", min(n_tokens, _MOST_TOKENS))
    return kept


def _place(tensor: GgufTensor) -> tuple[int | None, str]:
    found = _OF_A_LAYER.fullmatch(tensor.name)
    return (int(found[1]), found[2]) if found else (None, tensor.name)


def _kept_layers(tensors: Sequence[GgufTensor], n_layers: int, n_last: int) -> list[int]:
    """Return the layers of a skeleton: the first ones, as many as have tensors of all kinds, and
    the last `n_last` (MTP).
    """
    of_layers: list[list[GgufTensor]] = [[] for _ in range(n_layers - n_last)]
    for tensor in tensors:
        layer = _place(tensor)[0]
        if layer is not None and layer < len(of_layers):
            of_layers[layer].append(tensor)
    kinds: set[tuple[str, int, tuple[int, ...]]] = set()
    n_first = n_bytes = 0
    for layer, found in enumerate(of_layers):
        n_bytes += sum(tensor.n_bytes for tensor in found)
        new = {(_place(tensor)[1], tensor.type, tensor.shape) for tensor in found} - kinds
        if new or (layer < _N_LAYERS and n_bytes <= _MOST_BYTES):
            n_first = layer + 1
        kinds |= new
    return [*range(n_first), *range(n_layers - n_last, n_layers)]


# --- the child process ----------------------------------------------------------------------------


def main(library: str, *trial: str) -> None:
    if not trial:
        sys.stdout.write(json.dumps(asdict(self_test(Path(library)))) + "\n")
        return
    size, name, steps = trial
    with contextlib.suppress(ImportError, OSError, ValueError):  # no core dumps
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    problem = ""
    try:
        file = Path(name)
        attach(Path(library)).enable(products=True, attention=True)
        if size == "skeleton":
            file = Path(steps).with_name("skeleton.gguf")
            write_skeleton(Path(name), file)
        with Path(steps).open("w", encoding="utf-8") as log:
            for step in try_kernels(file, time.perf_counter):
                print(step, file=log, flush=True)
    except (SpecgenError, OSError) as error:
        problem = str(error)
    sys.stdout.write(json.dumps({"problem": problem}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
