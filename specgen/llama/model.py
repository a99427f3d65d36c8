"""A loaded GGUF model, and errors for files that are not usable models."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from specgen.errors import BackendError, ModelFileError, UsageError
from specgen.llama.file_check import check_file, check_weights
from specgen.llama.kernels.attached import LLAMA_CPP, WORKERS, attached
from specgen.llama.library import has_gpu, llama_cpp, native
from specgen.llama.model_description import describe_model
from specgen.llama.mtp_layers import holds_mtp_only, why_no_mtp
from specgen.llama.vocabulary import LlamaVocabulary
from specgen.llama.weights import lease_weights
from specgen.models.files import check_model_path, parts_of
from specgen.models.stored_models import shown_name
from specgen.options import CacheType, Workers
from specgen.system.files import version_of

#: Architectures for which llama.cpp computes wrong results in a batch of several sequences.
ONE_SEQUENCE = frozenset({"arwkv7", "plamo2", "rwkv6qwen2"})
#: Architectures of encoders, which make embeddings.
_ENCODERS = frozenset(
    (
        *("bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3"),
        *("modern-bert", "neo-bert", "nomic-bert", "nomic-bert-moe"),
    )
)
_EMBEDDING_MODEL = "an embedding model"
#: Architectures that are not batch-invariant with any kernels, and why.
_ROW_EXCEPTIONS = {
    "minimax-01": "llama.cpp computes its lightning attention in blocks as long as the batch "
    "(SCALE of q_decay_exp)",
    "chameleon": "llama.cpp excludes the tokens of images only in the first row of a batch "
    "(SET of result_output)",
}
#: GGML's numbers for weight types that specgen's kernels do not pack, and that llama.cpp multiplies
#: in another order from 8 rows on.
_TILED_TYPES = frozenset({16, 17, 18, 19, 21, 22, 29})


@contextlib.contextmanager
def _deletion_reported(file: Path) -> Iterator[None]:
    """Report a model file that is deleted after it was checked, and before it is loaded.

    Raises:
        ModelFileError: If it was deleted.
    """
    try:
        yield
    except FileNotFoundError:
        check_model_path(file)
        raise


class LlamaModel:
    """A GGUF model: its weights, which models of the same file share, vocabulary and metadata."""

    def __init__(
        self,
        path: Path,
        *,
        weights: Path | None = None,
        n_gpu_layers: int = -1,
        vocabulary_only: bool = False,
        workers: Workers | None = None,
        mtp: bool = False,
        weights_bytes: int | None = None,
        on_packing: Callable[[int, int], None] | None = None,
    ) -> None:
        """Load a model.

        Args:
            path: The file that the user named.
            weights: A copy of that file to load in its place.
            n_gpu_layers: The number of layers on the GPU; -1: all.
            vocabulary_only: Whether to load no weights. Then no context can be opened, and sizes
                are unknown.
            workers: The workers that compute its layers; None: this machine.
            mtp: Whether to load its MTP layers, too.
            weights_bytes: The maximum number of bytes of weights that stay in memory; the rest is
                read from disk in each pass. None: all of them.
            on_packing: Receives the number of bytes of streamed weights that are packed, and of all
                that will be.

        Raises:
            ModelFileError: If the file is not a usable model.
            MemoryLimitError: If it does not fit into memory.
            WorkerLostError: If a worker is lost.
        """
        # 1. Check the file.
        self.path = path
        #: The file that is loaded.
        self.file = path if weights is None else weights
        check_file(self.file)
        #: Why its MTP layers cannot draft; empty if they can.
        self.why_no_mtp = "its MTP layers are not loaded"
        if mtp and not vocabulary_only:
            self.why_no_mtp = why_no_mtp(self.file)
            if not self.why_no_mtp and workers is not None:
                self.why_no_mtp = "its MTP layers cannot draft while workers (--rpc) compute it"
        #: A chat template that replaces those of the file; None: there is none.
        self.own_template: str | None = None
        #: Whether `close` was called. Its contexts then refuse to decode.
        self.is_closed = False

        # 2. Load it, and read its properties.
        with _deletion_reported(self.file):
            #: The size and the time of each of its files now: they may be replaced or deleted while
            #: the model is in use.
            self.versions = [version_of(part)[1:] for part in parts_of(self.file)]
            self.loaded = lease_weights(
                self.file,
                n_gpu_layers,
                vocabulary_only=vocabulary_only,
                workers=workers,
                mtp=not self.why_no_mtp,
                weights_bytes=weights_bytes,
                on_packing=on_packing,
            )
        handle = self.loaded.handle
        self.size_bytes = int(llama_cpp.llama_model_size(handle))
        self.n_layer = int(llama_cpp.llama_model_n_layer(handle))
        self.n_embd = int(llama_cpp.llama_model_n_embd(handle))
        #: The length of a hidden state that MTP layers read and write, and of an embedding.
        self.n_embd_out = int(llama_cpp.llama_model_n_embd_out(handle))
        self.n_ctx_train = int(llama_cpp.llama_model_n_ctx_train(handle))
        #: The size of the sliding window in tokens; 0: no layer has one.
        self.n_window = int(llama_cpp.llama_model_n_swa(handle))
        #: Whether it has recurrent states, which every token changes. (Hybrid models also have
        #: cells.)
        self.has_recurrent_state = bool(
            llama_cpp.llama_model_is_recurrent(handle) or llama_cpp.llama_model_is_hybrid(handle)
        )
        #: What computes the model: `WORKERS`, or the result of `_describe_kernels`.
        self.kernels = WORKERS
        if workers is None:
            self.kernels = self._describe_kernels(0 if vocabulary_only else n_gpu_layers)

        # 3. Check that it is a model of the right kind.
        try:
            self._check_usable()
            with _deletion_reported(self.file):
                self._description = describe_model(self.file)
        except ModelFileError:
            self.close()
            raise

    # --- the file

    @cached_property
    def name(self) -> str:
        """The name of the file that was asked for, or Ollama's name of the model."""
        return shown_name(self.path)

    @cached_property
    def architecture(self) -> str:
        """The architecture, as the file names it."""
        return self.metadata("general.architecture") or ""

    def metadata(self, key: str) -> str | None:
        """Return a value of the file's metadata as text; None if it does not have the key."""
        name = key.encode()
        length = llama_cpp.llama_model_meta_val_str(self.handle, name, None, 0)
        if length < 0:
            return None
        buffer = ctypes.create_string_buffer(length + 1)
        llama_cpp.llama_model_meta_val_str(self.handle, name, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    def all_metadata(self) -> dict[str, str]:
        """Return the file's metadata as texts, without arrays."""
        texts: dict[str, str] = {}
        for index in range(llama_cpp.llama_model_meta_count(self.handle)):
            length = llama_cpp.llama_model_meta_key_by_index(self.handle, index, None, 0)
            buffer = ctypes.create_string_buffer(length + 1)
            llama_cpp.llama_model_meta_key_by_index(self.handle, index, buffer, len(buffer))
            key = buffer.value.decode("utf-8", "replace")
            texts[key] = self.metadata(key) or ""
        return texts

    def number(self, key: str) -> int:
        """Return a number of the architecture's metadata; 0 if the file does not have it."""
        value = self.metadata(f"{self.architecture}.{key}") or ""
        return int(value) if value.isdecimal() else 0

    @property
    def n_mtp_layers(self) -> int:
        """The number of MTP layers that can draft."""
        return 0 if self.why_no_mtp else self.number("nextn_predict_layers")

    @property
    def pooling(self) -> int | None:
        """llama.cpp's number for the pooling of an embedding model; None for other models."""
        return pooling_in(self.architecture, self.number("pooling_type"))

    @property
    def vocabulary(self) -> LlamaVocabulary:
        """The tokens."""
        self.check_open()
        return self.loaded.vocabulary

    def chat_template(self, name: str | None = None) -> str | None:
        """Return a chat template (Jinja); None if the model does not have it.

        Args:
            name: The name of the template; None: the default one. Some models have another one for
                tools.
        """
        if self.own_template is not None:
            return self.own_template
        key = None if name is None else name.encode()
        template = llama_cpp.llama_model_chat_template(self.handle, key)
        return template.decode("utf-8", "replace") if template else None

    # --- what computes it

    @property
    def has_equal_rows(self) -> bool:
        """Whether the model is batch-invariant, even if a prompt is decoded in pieces of any size.

        See `row_exception` for models that are not.
        """
        return self.has_kernels and not self.row_exception

    @property
    def has_kernels(self) -> bool:
        """Whether specgen's kernels compute all of it, attention included."""
        if LLAMA_CPP in self.kernels or self.kernels == WORKERS:
            return False
        kernels = attached()
        return kernels is None or not kernels.lacks_attention

    def _describe_kernels(self, n_gpu_layers: int) -> str:
        """Return the kernels on the CPU, as `computing` names them, and llama.cpp on a GPU."""
        on_cpu = self.loaded.key.kernels
        if n_gpu_layers == 0 or not has_gpu():
            return on_cpu
        n_layers = self.n_layer + 1  # llama.cpp counts the output layer, too
        if not 0 < n_gpu_layers < n_layers:
            return f"{LLAMA_CPP} on the GPU"
        return f"{LLAMA_CPP} on the GPU ({n_gpu_layers} of {n_layers} layers), {on_cpu} on the CPU"

    @cached_property
    def row_exception(self) -> str:
        """Why the model is not batch-invariant with any kernels, with the operator; else empty."""
        if self.architecture in _ROW_EXCEPTIONS:
            return _ROW_EXCEPTIONS[self.architecture]
        tensors = self._description.tensors
        # The embeddings do not count: their rows are copied, and not multiplied.
        types = {tensor.type for name, tensor in tensors.items() if "token_embd" not in name}
        tiled = [native.ggml_type_name(number).decode() for number in types & _TILED_TYPES]
        if not tiled:
            return ""
        return (
            f"llama.cpp adds up products of {' and '.join(sorted(tiled))} weights "
            "in a different order for 8 or more rows (MUL_MAT)"
        )

    @property
    def is_remote(self) -> bool:
        """Whether workers compute its layers."""
        return self.loaded.remote is not None

    @property
    def call(self) -> Callable[..., Any]:
        """A function that makes a native call, which may have to wait for workers.

        It takes the native function and its arguments.
        """
        return self.loaded.call

    @property
    def handle(self) -> Any:
        """llama.cpp's pointer to the model."""
        self.check_open()
        return self.loaded.handle

    def check_open(self) -> None:
        """Raise `BackendError` if the model is closed."""
        if self.is_closed:
            raise BackendError(f"{self.name} is closed")

    @property
    def why_one_sequence(self) -> str | None:
        """Why it can compute only one sequence at a time; None if it can compute several."""
        if self.architecture not in ONE_SEQUENCE:
            return None
        return (
            f"{self.name}: llama.cpp computes several sequences of this architecture "
            f"({self.architecture}) incorrectly"
        )

    def check_parallel(self, n_answers: int) -> None:
        """Raise `UsageError` if the model cannot generate `n_answers` answers at once."""
        why = self.why_one_sequence
        if n_answers > 1 and why is not None:
            raise UsageError(why, hint="make one answer at a time: --parallel 1")

    # --- the context

    def limited_n_ctx(self, n_ctx: int) -> int:
        """Return a size of a context, reduced to the number of positions if these are learned."""
        if n_ctx > self.n_ctx_train > 0 and self._description.has_learned_positions:
            return self.n_ctx_train
        return n_ctx

    # --- memory

    @property
    def is_streamed(self) -> bool:
        """Whether each pass reads weights from disk, since they are larger than their memory."""
        return self.streamed_bytes > 0

    @property
    def streamed_bytes(self) -> int:
        """The bytes of weights that each pass reads from disk, as far as that is known.

        Unpacked weights are mapped, and the system decides what stays in memory: all of them count.
        """
        return self.size_bytes if self.loaded.is_unpacked else self.loaded.streamed_bytes

    def cache_bytes(
        self,
        n_ctx: int,
        type_k: CacheType,
        type_v: CacheType,
    ) -> int:
        """Estimate the size of the KV cache for a context of `n_ctx` tokens."""
        return self._description.cache_bytes(n_ctx, type_k, type_v)

    def state_bytes(self) -> int:
        """Estimate the size of the recurrent state of a sequence; 0 if the model has none."""
        if not self.has_recurrent_state:
            return 0
        n_layers = self.n_layer
        interval = self.number("full_attention_interval")
        if interval:
            n_layers -= n_layers // interval  # every `interval`-th layer has attention instead
        # State-space models (Mamba): the state, and the last inputs of the convolution.
        inner_size = self.number("ssm.inner_size")
        state_size = self.number("ssm.state_size")
        convolved = inner_size + 2 * self.number("ssm.group_count") * state_size
        n_values = inner_size * state_size
        n_values += max(0, self.number("ssm.conv_kernel") - 1) * convolved
        # Short convolutions (LFM2): their last inputs.
        n_values += max(0, self.number("shortconv.l_cache") - 1) * self.n_embd
        # RWKV: a matrix for each head.
        n_values += self.number("wkv.head_size") * self.n_embd
        return 4 * n_layers * n_values  # float32

    # --- opening and closing

    def close(self) -> None:
        """Close the model, and free the weights after their last user. It may be called twice."""
        if not self.is_closed:
            self.is_closed = True
            self.loaded.release()

    def _check_rotation(self) -> None:
        """Raise `ModelFileError` if llama.cpp would never finish its first batch."""
        architecture = self.architecture
        n_rotated = self.metadata(f"{architecture}.rope.dimension_count")
        rotation = int(llama_cpp.llama_model_rope_type(self.handle))
        if n_rotated == "0" and rotation != llama_cpp.LLAMA_ROPE_TYPE_NONE:
            raise ModelFileError(f"{self.path}: damaged: {architecture}.rope.dimension_count is 0")

    def _check_usable(self) -> None:
        """Raise `ModelFileError` if the model cannot generate text, or would hang llama.cpp."""
        check_weights(self.file)
        self._check_rotation()
        if self.number("nextn_predict_layers") and holds_mtp_only(self.file):
            raise ModelFileError(
                f"{self.path}: MTP layers, and not the model that they belong to",
                "give them as --draft, and their model as -m",
            )
        other_kind = self._other_kind()
        if other_kind:
            hint = "use a model that generates text"
            if self.pooling is not None and other_kind == _EMBEDDING_MODEL:
                hint += f"; `specgen serve -m {self.path}` answers /v1/embeddings with this one"
            raise ModelFileError(
                f"{self.path}: {other_kind} ({self.architecture}); specgen generates text, "
                "token by token",
                hint,
            )
        if self.vocabulary.kind == 0:
            raise ModelFileError(f"{self.path}: the model has no vocabulary")

    def _other_kind(self) -> str:
        """Return the kind of a model that does not generate text; empty if it does."""
        if llama_cpp.llama_model_has_encoder(self.handle):
            return "an encoder-decoder or encoder-only model"
        if llama_cpp.llama_model_is_diffusion(self.handle):
            return "a diffusion model"
        if not llama_cpp.llama_model_has_decoder(self.handle):
            return "a model without a decoder"
        if self.number("pooling_type") == llama_cpp.LLAMA_POOLING_TYPE_RANK:
            return "a reranking model"
        is_causal = self.metadata(f"{self.architecture}.attention.causal") != "false"
        if self.pooling is not None or not is_causal:
            return _EMBEDDING_MODEL
        return ""


def pooling_in(architecture: str, pooling: int) -> int | None:
    """Return llama.cpp's number for the pooling of an embedding model.

    Args:
        architecture: The architecture.
        pooling: llama.cpp's number for the pooling in the file; 0 if the file has none.

    Returns:
        None if it is not an embedding model.
    """
    poolings = (
        llama_cpp.LLAMA_POOLING_TYPE_MEAN,
        llama_cpp.LLAMA_POOLING_TYPE_CLS,
        llama_cpp.LLAMA_POOLING_TYPE_LAST,
    )
    if pooling in poolings:
        return pooling
    # Files of some encoders do not name a pooling. (Rerankers are not embedding models.)
    if architecture in _ENCODERS and pooling != llama_cpp.LLAMA_POOLING_TYPE_RANK:
        return int(llama_cpp.LLAMA_POOLING_TYPE_MEAN)
    return None
