"""llama.cpp as a backend, through llama-cpp-python's low-level API.

The only module that imports llama_cpp: ctypes and its untyped values stay in here, native
failures become `SpecgenError`s here, and whoever imports this module pays for it (a quarter
of a second), so it is imported when a model is needed and not before.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from specgen.arrays import Logits
from specgen.backend.base import Batch
from specgen.backend.build import Build, Device
from specgen.errors import (
    BackendError,
    MemoryLimitError,
    ModelFileError,
    RollbackError,
    UsageError,
)
from specgen.options import CacheType, ContextOptions

try:
    import llama_cpp
except (ImportError, OSError, RuntimeError) as error:
    raise BackendError(
        f"llama-cpp-python cannot be loaded: {error}",
        hint='CMAKE_ARGS="-DCMAKE_CXX_FLAGS=-fno-dse" pip install --force-reinstall '
        "--no-cache-dir llama-cpp-python",
    ) from error

#: GGML type and size in bytes a value of each KV cache type.
_CACHE_TYPES: dict[CacheType, tuple[int, float]] = {
    "f32": (0, 4.0),
    "f16": (1, 2.0),
    "q4_0": (2, 18 / 32),
    "q4_1": (3, 20 / 32),
    "q5_0": (6, 22 / 32),
    "q5_1": (7, 24 / 32),
    "q8_0": (8, 34 / 32),
    "iq4_nl": (20, 18 / 32),
    "bf16": (30, 2.0),
}
_FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
_GGUF_MAGIC = b"GGUF"
#: What a context needs beside its cache: graph, scratch, one batch of activations.
_CONTEXT_OVERHEAD_BYTES = 100 * 2**20

LogSink = Callable[[str], None]

_log_lines: collections.deque[str] = collections.deque(maxlen=200)
_log_sinks: list[LogSink] = []


def _on_log(_level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
    """Keep llama.cpp's last words for error messages; pass all on where asked to."""
    line = text.decode("utf-8", "replace")
    _log_lines.append(line)
    for sink in _log_sinks[-1:]:
        sink(line)


# The module keeps the callback alive: llama.cpp would call freed memory otherwise.
_log_callback = llama_cpp.llama_log_callback(_on_log)
llama_cpp.llama_log_set(_log_callback, ctypes.c_void_p(0))
llama_cpp.llama_backend_init()


@contextlib.contextmanager
def logging_to(sink: LogSink) -> Iterator[None]:
    """While in this context, llama.cpp's log goes to `sink`, piece by piece; it is quiet
    otherwise."""
    _log_sinks.append(sink)
    try:
        yield
    finally:
        _log_sinks.pop()


class LlamaVocabulary:
    """The tokens of a GGUF model. Valid while the model is open."""

    def __init__(self, model: Any) -> None:
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self._n_tokens: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self._pieces: dict[int, bytes] = {}
        self._ends: list[int] | None = None

    @property
    def n_tokens(self) -> int:
        return self._n_tokens

    @property
    def add_bos(self) -> bool:
        return bool(llama_cpp.llama_vocab_get_add_bos(self._vocab))

    @property
    def kind(self) -> int:
        """llama.cpp's vocabulary type: SPM, BPE, WPM, ... as a number; 0 is none."""
        return int(llama_cpp.llama_vocab_type(self._vocab))

    def special_tokens(self) -> dict[str, int]:
        """The special tokens by role; -1 where there is none."""
        return {
            "bos": llama_cpp.llama_vocab_bos(self._vocab),
            "eos": llama_cpp.llama_vocab_eos(self._vocab),
            "eot": llama_cpp.llama_vocab_eot(self._vocab),
        }

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode()
        capacity = len(data) + 8
        while True:
            buffer = (llama_cpp.llama_token * capacity)()
            n: int = llama_cpp.llama_tokenize(
                self._vocab, data, len(data), buffer, capacity, add_special, parse_special
            )
            if n >= 0:
                return list(buffer[:n])
            if -n <= capacity:
                raise BackendError(f"llama.cpp could not tokenize {len(data)} bytes of text")
            capacity = -n

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._read_piece(token_id, special=False)
        return piece

    def token_text(self, token_id: int) -> str:
        return self.token_entry(token_id).decode("utf-8", "replace")

    def token_entry(self, token_id: int) -> bytes:
        """The entry in the token table as it stands in the file."""
        return llama_cpp.llama_vocab_get_text(self._vocab, token_id) or b""

    def token_attributes(self, token_id: int) -> int:
        """llama.cpp's attribute bits: unknown, unused, normal, control, ..."""
        return int(llama_cpp.llama_vocab_get_attr(self._vocab, token_id))

    def is_end(self, token_id: int) -> bool:
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token_id))

    def end_tokens(self) -> Sequence[int]:
        if self._ends is None:  # llama.cpp has no list of them: a pass over the vocabulary
            self._ends = [token_id for token_id in range(self._n_tokens) if self.is_end(token_id)]
        return self._ends

    def control_text(self, token_id: int) -> str:
        """A token as text, control tokens by their names: what chat templates write."""
        if token_id < 0:
            return ""
        return self._read_piece(token_id, special=True).decode("utf-8", "replace")

    def _read_piece(self, token_id: int, *, special: bool) -> bytes:
        capacity = 64
        while True:
            buffer = ctypes.create_string_buffer(capacity)
            n: int = llama_cpp.llama_token_to_piece(
                self._vocab, token_id, buffer, capacity, 0, special
            )
            if n >= 0:
                return buffer.raw[:n]
            capacity = -n


class LlamaModel:
    """The weights and the vocabulary of a GGUF file; contexts are made from it.

    Raises `ModelFileError` if the file cannot be used to generate text.
    """

    def __init__(self, path: Path, *, n_gpu_layers: int = -1) -> None:
        _check_file(path)
        self.path = path
        self._handle: Any = None
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        _log_lines.clear()
        self._handle = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not self._handle:
            raise ModelFileError(
                f"{path}: llama.cpp cannot load this model: {_last_error()}",
                hint="if the download was cut short, fetch the file again; if the model is "
                "newer than this llama-cpp-python, upgrade it",
            )
        try:
            self._check_generates()
            self.vocabulary = LlamaVocabulary(self._handle)
            if self.vocabulary.kind == 0:
                raise ModelFileError(f"{path}: the model has no vocabulary")
        except ModelFileError:
            self.close()
            raise

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def handle(self) -> Any:
        """The native model; raises `BackendError` once it is closed."""
        if not self._handle:
            raise BackendError(f"{self.name} is closed")
        return self._handle

    @property
    def n_ctx_train(self) -> int:
        """The context that the model was trained with, in tokens."""
        return int(llama_cpp.llama_model_n_ctx_train(self.handle))

    @property
    def can_roll_back(self) -> bool:
        """Whether its cache can drop the end of a text: recurrent states cannot."""
        return not (
            llama_cpp.llama_model_is_recurrent(self.handle)
            or llama_cpp.llama_model_is_hybrid(self.handle)
        )

    @property
    def description(self) -> str:
        """Architecture, size and quantisation in llama.cpp's words."""
        buffer = ctypes.create_string_buffer(256)
        llama_cpp.llama_model_desc(self.handle, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    @property
    def size_bytes(self) -> int:
        """Size of all tensors."""
        return int(llama_cpp.llama_model_size(self.handle))

    def metadata(self, key: str) -> str | None:
        """A value of the file's metadata as text; None where there is none."""
        capacity = 256
        while True:
            buffer = ctypes.create_string_buffer(capacity)
            n: int = llama_cpp.llama_model_meta_val_str(self.handle, key.encode(), buffer, capacity)
            if n < 0:
                return None
            if n < capacity:
                return buffer.value.decode("utf-8", "replace")
            capacity = n + 1

    def chat_template(self) -> str | None:
        """The model's own chat template (Jinja); None for models without one."""
        template = llama_cpp.llama_model_chat_template(self.handle, None)
        return template.decode("utf-8", "replace") if template else None

    def cache_bytes(self, n_ctx: int, type_k: CacheType, type_v: CacheType) -> int:
        """An estimate of the KV cache's size for a context of n_ctx tokens."""
        n_head = int(llama_cpp.llama_model_n_head(self.handle)) or 1
        n_head_kv = int(llama_cpp.llama_model_n_head_kv(self.handle))
        n_layer = int(llama_cpp.llama_model_n_layer(self.handle))
        head_size = int(llama_cpp.llama_model_n_embd(self.handle)) // n_head
        architecture = self.metadata("general.architecture") or ""
        size_k = int(self.metadata(f"{architecture}.attention.key_length") or head_size)
        size_v = int(self.metadata(f"{architecture}.attention.value_length") or head_size)
        a_token = size_k * _CACHE_TYPES[type_k][1] + size_v * _CACHE_TYPES[type_v][1]
        return int(n_ctx * n_layer * n_head_kv * a_token)

    def close(self) -> None:
        """Free the weights. Contexts made from the model must be closed before."""
        if self._handle:
            llama_cpp.llama_model_free(self._handle)
            self._handle = None

    def _check_generates(self) -> None:
        architecture = self.metadata("general.architecture") or "unknown"
        pooling = self.metadata(f"{architecture}.pooling_type") or "0"
        causal = self.metadata(f"{architecture}.attention.causal") or "true"
        if llama_cpp.llama_model_has_encoder(self.handle):
            what = "an encoder-decoder or encoder-only model"
        elif llama_cpp.llama_model_is_diffusion(self.handle):
            what = "a diffusion model"
        elif not llama_cpp.llama_model_has_decoder(self.handle):
            what = "a model without a decoder"
        elif pooling != "0" or causal == "false":
            what = "an embedding model"
        else:
            return
        raise ModelFileError(
            f"{self.path}: {what} ({architecture}); specgen generates text, token by token",
            hint="give a model that generates text",
        )


class LlamaBackend:
    """A context of a model: its KV cache, and the decoding of batches.

    `n_ctx` is in tokens, `n_sequences` the number of sequence ids, `n_outputs` the most rows
    of logits that one batch may ask for (memory is set aside for them). `clock` gives seconds
    and is read before and after each decode. Raises `MemoryLimitError` if the cache does not fit,
    `UsageError` if the cache types exclude each other, `BackendError` otherwise.
    """

    def __init__(
        self,
        model: LlamaModel,
        options: ContextOptions,
        *,
        n_ctx: int,
        clock: Callable[[], float],
        n_sequences: int = 1,
        n_outputs: int = 1,
    ) -> None:
        self._model = model
        self._clock = clock
        self._handle: Any = None
        self._n_ctx = n_ctx
        self._n_batch = min(options.n_batch, n_ctx)
        self._n_sequences = n_sequences
        self._n_outputs = n_outputs
        self._decode_s = 0.0
        self._n_decoded_rows = 0
        self._n_vocab = model.vocabulary.n_tokens
        _check_cache_types(options)
        _check_memory(model, options, n_ctx)

        params = llama_cpp.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = max(self._n_batch, n_outputs)
        params.n_ubatch = params.n_batch
        params.n_seq_max = n_sequences
        # llama.cpp aborts where a sequence could be left without an output.
        params.n_outputs_max = max(n_outputs, n_sequences)
        params.n_threads = options.n_threads or default_threads()
        params.n_threads_batch = options.n_threads_batch or params.n_threads
        params.flash_attn_type = _FLASH_ATTENTION[options.flash_attention]
        params.type_k = _CACHE_TYPES[options.cache_type_k][0]
        params.type_v = _CACHE_TYPES[options.cache_type_v][0]
        params.kv_unified = True  # branches of a tree share cells
        params.swa_full = True  # a sliding window would forget what a rollback needs
        params.no_perf = True
        _log_lines.clear()
        self._handle = llama_cpp.llama_init_from_model(model.handle, params)
        if not self._handle:
            raise MemoryLimitError(
                f"{model.name}: llama.cpp cannot make a context of {n_ctx} tokens: {_last_error()}",
                hint="try a smaller --ctx-size",
            )
        self._memory = llama_cpp.llama_get_memory(self._handle)
        if not self._memory:
            self.close()
            raise ModelFileError(f"{model.path}: the model keeps no cache: it does not generate")
        self._rows = _RowBuffers(params.n_batch, n_sequences, n_outputs)

    @property
    def vocabulary(self) -> LlamaVocabulary:
        return self._model.vocabulary

    @property
    def model(self) -> LlamaModel:
        return self._model

    @property
    def n_vocab(self) -> int:
        return self._n_vocab

    @property
    def n_ctx(self) -> int:
        return self._n_ctx

    @property
    def n_batch(self) -> int:
        return self._n_batch

    @property
    def n_outputs(self) -> int:
        return self._n_outputs

    @property
    def n_sequences(self) -> int:
        return self._n_sequences

    @property
    def can_roll_back(self) -> bool:
        return self._model.can_roll_back

    @property
    def decode_s(self) -> float:
        return self._decode_s

    @property
    def n_decoded_rows(self) -> int:
        return self._n_decoded_rows

    def decode(self, batch: Batch) -> Logits:
        n_wanted = self._rows.fill(batch)
        started = self._clock()
        status: int = llama_cpp.llama_decode(self._handle, self._rows.native)
        # The GPU works on after llama_decode returns: its time is decoding too.
        llama_cpp.llama_synchronize(self._handle)
        self._decode_s += self._clock() - started
        if status != 0:
            raise BackendError(
                f"{self._model.name}: llama.cpp could not decode {len(batch)} tokens at "
                f"position {batch.positions[0]} of {self._n_ctx} ({_DECODE_ERRORS.get(status)}, "
                f"status {status}): {_last_error()}"
            )
        self._n_decoded_rows += len(batch)
        if n_wanted == 0:
            return np.empty((0, self._n_vocab), np.float32)
        pointer = llama_cpp.llama_get_logits(self._handle)
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        if address is None:
            raise BackendError(f"{self._model.name}: llama.cpp gave no logits")
        memory = (ctypes.c_float * (n_wanted * self._n_vocab)).from_address(address)
        return np.ctypeslib.as_array(memory).reshape(n_wanted, self._n_vocab)

    def length(self, sequence: int) -> int:
        return int(llama_cpp.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def copy(self, source: int, destination: int, start: int = 0, end: int = -1) -> None:
        llama_cpp.llama_memory_seq_cp(self._memory, source, destination, start, end)

    def remove(self, sequence: int, start: int = 0) -> None:
        if not llama_cpp.llama_memory_seq_rm(self._memory, sequence, start, -1):
            raise RollbackError(
                f"{self._model.name}: the cache cannot drop sequence {sequence} from position "
                f"{start} on"
            )

    def close(self) -> None:
        if self._handle:
            llama_cpp.llama_free(self._handle)
            self._handle = None


_DECODE_ERRORS = {
    1: "no room in the cache",
    2: "aborted",
    -1: "a batch that makes no sense",
    -2: "memory could not be allocated",
    -3: "computing failed",
}


class _RowBuffers:
    """The memory behind llama.cpp's batch, allocated once and written through NumPy."""

    def __init__(self, n_rows: int, n_sequences: int, n_outputs: int) -> None:
        self._n_outputs = n_outputs
        self._tokens = np.zeros(n_rows, np.int32)
        self._positions = np.zeros(n_rows, np.int32)
        self._n_sequences = np.zeros(n_rows, np.int32)
        self._sequences = np.zeros((n_rows, n_sequences), np.int32)
        self._wants_logits = np.zeros(n_rows, np.int8)
        row_bytes = self._sequences.strides[0]
        first = self._sequences.ctypes.data
        self._pointers = np.array([first + i * row_bytes for i in range(n_rows)], np.uintp)
        int32_p = ctypes.POINTER(ctypes.c_int32)
        self.native = llama_cpp.llama_batch(
            n_tokens=0,
            token=self._tokens.ctypes.data_as(int32_p),
            embd=None,
            pos=self._positions.ctypes.data_as(int32_p),
            n_seq_id=self._n_sequences.ctypes.data_as(int32_p),
            seq_id=self._pointers.ctypes.data_as(ctypes.POINTER(int32_p)),
            logits=self._wants_logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(self, batch: Batch) -> int:
        """Write a batch; returns how many rows want logits. Raises `BackendError`."""
        n = len(batch)
        n_wanted = sum(batch.wants_logits)
        if not 0 < n <= len(self._tokens):
            raise BackendError(f"a batch of {n} rows; 1 to {len(self._tokens)} can be decoded")
        if n_wanted > self._n_outputs:
            raise BackendError(
                f"a batch wants {n_wanted} rows of logits; {self._n_outputs} at most"
            )
        self._tokens[:n] = batch.tokens
        self._positions[:n] = batch.positions
        self._wants_logits[:n] = batch.wants_logits
        for row, sequences in enumerate(batch.sequences):
            self._n_sequences[row] = len(sequences)
            self._sequences[row, : len(sequences)] = sequences
        self.native.n_tokens = n
        return n_wanted


def default_threads() -> int:
    """The number of physical cores: hyper-threads do not help matrix products."""
    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def _check_file(path: Path) -> None:
    """Say what is wrong with a model file before llama.cpp says less."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise ModelFileError(
            f"{path}: no such file",
            hint="give the path of a .gguf file, or a name that `specgen models list` shows",
        ) from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    if stat.S_ISDIR(mode):
        inside = sorted(child.name for child in path.glob("*.gguf"))[:3]
        hint = f"name the file: {', '.join(inside)}" if inside else "it holds no .gguf file"
        raise ModelFileError(f"{path}: a directory, not a model file", hint=hint)
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    if not magic:
        raise ModelFileError(f"{path}: the file is empty", hint="fetch it again")
    if magic != _GGUF_MAGIC:
        raise ModelFileError(
            f"{path}: not a GGUF file (it begins with {magic!r})",
            hint="llama.cpp's convert_hf_to_gguf.py turns Hugging Face models into GGUF",
        )


def _check_cache_types(options: ContextOptions) -> None:
    quantised = options.cache_type_v not in ("f32", "f16", "bf16")
    if quantised and options.flash_attention == "off":
        raise UsageError(
            f"--cache-type-v {options.cache_type_v} needs flash attention",
            hint="leave out --flash-attn off, or take --cache-type-v f16",
        )


def _check_memory(model: LlamaModel, options: ContextOptions, n_ctx: int) -> None:
    """Refuse a context that the machine cannot hold.

    llama.cpp would allocate it (Linux promises memory that it does not have), clear it, and
    be killed, or fail an assertion and abort: either way without a word to the user.
    """
    if options.n_gpu_layers != 0 and llama_cpp.llama_supports_gpu_offload():
        return  # the cache is on the GPU, whose allocator reports failure properly
    needed = model.cache_bytes(n_ctx, options.cache_type_k, options.cache_type_v)
    needed += _CONTEXT_OVERHEAD_BYTES
    available = psutil.virtual_memory().available
    if needed > available:
        raise MemoryLimitError(
            f"{model.name}: a context of {n_ctx} tokens needs about {needed / 2**30:.1f} GiB, "
            f"{available / 2**30:.1f} GiB are free",
            hint="take a smaller --ctx-size, or a smaller KV cache (--cache-type-k q8_0 "
            "--cache-type-v q8_0)",
        )


def _last_error() -> str:
    """llama.cpp's last complaint, as one line."""
    lines = "".join(_log_lines).splitlines()
    complaints = [line for line in lines if "error" in line.lower() or "failed" in line.lower()]
    if complaints:  # the first one names the cause, those after it only pass it on
        return complaints[0].strip()
    return lines[-1].strip() if lines else "it does not say why"


# --- for `specgen doctor` -------------------------------------------------------------------

_DEVICE_KINDS = {0: "cpu", 1: "gpu", 2: "integrated gpu", 3: "accelerator", 4: "meta"}


def build() -> Build:
    """What this build of llama.cpp is, and the devices that it finds on this machine."""
    return Build(
        version=llama_cpp.__version__,
        llama_version=llama_cpp.llama_version().decode("utf-8", "replace"),
        system_info=llama_cpp.llama_print_system_info().decode("utf-8", "replace").strip(" |\n"),
        gpu_offload=bool(llama_cpp.llama_supports_gpu_offload()),
        devices=_devices(),
    )


def _devices() -> tuple[Device, ...]:
    """GGML's devices; none where this llama-cpp-python keeps its GGML libraries elsewhere."""
    try:
        count = _ggml_function("ggml_backend_dev_count", ctypes.c_size_t)
        get = _ggml_function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
        name = _ggml_function("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
        text = _ggml_function("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
        kind = _ggml_function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
        size_p = ctypes.POINTER(ctypes.c_size_t)
        memory = _ggml_function("ggml_backend_dev_memory", None, ctypes.c_void_p, size_p, size_p)
    except (AttributeError, ImportError, OSError, RuntimeError):
        return ()
    found = []
    for device in [get(index) for index in range(count())]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        memory(device, ctypes.byref(free), ctypes.byref(total))
        found.append(
            Device(
                name=name(device).decode("utf-8", "replace"),
                kind=_DEVICE_KINDS.get(kind(device), "other"),
                description=text(device).decode("utf-8", "replace"),
                memory_bytes=total.value,
                free_bytes=free.value,
            )
        )
    return tuple(found)


def _ggml_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the GGML libraries, which llama-cpp-python loads but does not declare."""
    from llama_cpp import _ctypes_extensions

    folder = Path(llama_cpp.__file__).parent / "lib"
    for library in ("ggml", "ggml-base"):
        function = getattr(_ctypes_extensions.load_shared_library(library, folder), name, None)
        if function is not None:
            function.restype, function.argtypes = result, arguments
            return function
    raise AttributeError(name)
