"""A trial of the kernels on a model, which runs in a child process:
`python -m specgen.llama.kernels.trial KERNELS LIBRARY FILE STEPS`.

It attaches the library, loads the file with the kernels `on` or `off`, and decodes batches of every kind; `without`
attaches nothing. The file STEPS gets a line before each step. The result is one line of JSON. If the process ends
without it, the exit code or signal is the result.

Most trials load a skeleton of the model, a file of the same make that loads quickly. It has the metadata of its
model, and tensors of the same names, types and shapes, but fewer layers, fewer tokens without a text, and zeros for
weights: holes of a sparse file, which take no room on a disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from specgen.errors import BackendError, SpecgenError
from specgen.llama.context import LlamaBackend
from specgen.llama.gguf_metadata import GgufMetadata, GgufTensor, parts_of
from specgen.llama.kernels.attached import attach
from specgen.llama.library import ggml, new_tensor, no_data
from specgen.llama.model import LlamaModel
from specgen.method.backend import Batch
from specgen.options import ContextOptions

_USUAL = ContextOptions(n_threads=2)
#: The contexts and the numbers of their sequences: the usual one, one whose cache the kernels read in another way,
#: one without their attention, and one for several sequences.
_CONTEXTS = (
    (_USUAL, 1),
    (replace(_USUAL, cache_type_k="q8_0", cache_type_v="q8_0"), 1),
    (replace(_USUAL, flash_attention="off"), 1),
    (_USUAL, 2),
)
_N_CTX = 128
#: The rows of the batches, for each sequence. The larger number is enough for AMX.
_N_ROWS = (26, 1)


class _AnyModel(LlamaModel):
    """A model of which any text may come, or none."""

    def _check_usable(self) -> None:
        pass


def try_kernels(file: Path, clock: Callable[[], float]) -> Iterator[str]:
    """Load a model file, and decode in several contexts. Yield the name of each step before it starts.
    Raise `SpecgenError` if the file cannot be loaded; llama.cpp may refuse a context."""
    yield "loading it"
    with contextlib.closing(_AnyModel(file, n_gpu_layers=0)) as model:
        for options, n_sequences in _CONTEXTS:
            with contextlib.suppress(SpecgenError):
                yield from _try_context(model, options, n_sequences, clock)


def _try_context(
    model: LlamaModel, options: ContextOptions, n_sequences: int, clock: Callable[[], float]
) -> Iterator[str]:
    yield "making a context"
    n_outputs = max(_N_ROWS) * n_sequences
    backend = LlamaBackend(
        model, options, n_ctx=_N_CTX, clock=clock, n_sequences=n_sequences, n_outputs=n_outputs
    )
    with contextlib.closing(backend):
        position = 0
        for n_rows in _N_ROWS:
            batch = Batch()
            for sequence in range(n_sequences):
                for place in range(position, position + n_rows):
                    batch.add(place, place, (sequence,), True)
            yield f"decoding {len(batch)} rows" if len(batch) > 1 else "decoding a row"
            backend.decode(batch)
            position += n_rows


# --- skeletons of model files ---------------------------------------------------------------------

#: A skeleton has this many layers, if they weigh no more than these bytes. Layers with tensors of the same kinds
#: may attend to different cells; such patterns repeat after at most 8 layers.
_N_LAYERS, _MOST_BYTES = 8, 2**27
#: It has no more tokens than this.
_N_TOKENS = 4096
#: The metadata that is kept besides that of the architecture.
_KEPT = ("general.architecture", "general.alignment")
_TOKENS = "tokenizer.ggml.tokens"
#: More than the alignment of tensors.
_PADDING = 4096
_OF_A_LAYER = re.compile(r"blk\.(\d+)\.(.*)")


def skeleton_of(file: Path) -> Skeleton | None:
    """Return the skeleton of a model file; None if it cannot be made. All parts of a split file are read."""
    with ExitStack() as resources:
        try:
            parts = [GgufMetadata(resources, part) for part in parts_of(file)]
            return _skeleton(parts[0], [tensor for part in parts for tensor in part.tensors()])
        except BackendError:
            return None


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The skeleton of a model."""

    #: The file without its weights. Equal for models that differ in their weights and vocabularies only.
    metadata: bytes
    #: The size of the weights.
    n_bytes: int
    n_layers: int

    def write(self, file: Path) -> None:
        with file.open("wb") as stream:
            stream.write(self.metadata)
            stream.truncate(len(self.metadata) + self.n_bytes)


def _place(tensor: GgufTensor) -> tuple[int | None, str]:
    found = _OF_A_LAYER.fullmatch(tensor.name)
    return (int(found[1]), found[2]) if found else (None, tensor.name)


def _skeleton(about: GgufMetadata, tensors: Sequence[GgufTensor]) -> Skeleton | None:
    architecture = about.text("general.architecture")
    n_layers = about.number(f"{architecture}.block_count")
    n_last = about.number(f"{architecture}.nextn_predict_layers")
    kept = _kept_layers(tensors, n_layers, n_last)
    n_tokens = about.length(_TOKENS) or 0
    for key in about.names():
        if key not in _KEPT and not key.startswith(f"{architecture}."):
            about.remove(key)
        elif about.length(key) == n_layers and len(kept) < n_layers:
            about.cut(key, kept)
    about.set_number(f"{architecture}.block_count", len(kept))
    about.set_text("tokenizer.ggml.model", "no_vocab")
    if n_tokens:
        about.set_number(f"{architecture}.vocab_size", min(n_tokens, _N_TOKENS))

    with ExitStack() as resources:
        made = GgufMetadata(resources, None)
        shorter = resources.enter_context(no_data())
        ggml("gguf_set_kv", None, *2 * (ctypes.c_void_p,))(made.handle, about.handle)
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
            elif n_tokens > _N_TOKENS and n_tokens in tensor.shape:
                shape = [_N_TOKENS if size == n_tokens else size for size in tensor.shape]
                handle = new_tensor(shorter, tensor.type, shape[::-1])
            rename(handle, name.encode())
            add(made.handle, handle)
            n_bytes += n_bytes_of(handle) + _PADDING
        size = ggml("gguf_get_meta_size", ctypes.c_size_t, ctypes.c_void_p)(made.handle)
        metadata = ctypes.create_string_buffer(size)
        ggml("gguf_get_meta_data", None, *2 * (ctypes.c_void_p,))(made.handle, metadata)
        return Skeleton(metadata.raw, n_bytes, len(kept))


def _kept_layers(tensors: Sequence[GgufTensor], n_layers: int, n_last: int) -> list[int]:
    """Return the layers of a skeleton: the first ones, as many as have tensors of all kinds that the model's
    layers have, and the last `n_last`, which predict more tokens (MTP)."""
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


def main(kernels: str, library: str, file: str, steps: str) -> None:
    """Try the kernels on a model, and print the result."""
    with contextlib.suppress(
        ImportError, OSError, ValueError
    ):  # the system need not write a core dump
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    problem = ""
    try:
        if kernels != "without":
            is_on = kernels == "on"
            attach(Path(library)).enable(products=is_on, attention=is_on)
        with Path(steps).open("w", encoding="utf-8") as log:
            for step in try_kernels(Path(file), time.perf_counter):
                print(step, file=log, flush=True)
    except SpecgenError as error:
        problem = error.message
    sys.stdout.write(json.dumps({"problem": problem}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
